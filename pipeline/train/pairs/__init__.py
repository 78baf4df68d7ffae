"""Pairs of views on their way to the network.

`order` (which pair when), `loader` (read and batched), `augmentation`, `workers` (processes that make batches),
`dali_loader` and `synthetic` (the same interface for comparison).
"""
