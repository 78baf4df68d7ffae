"""Pairs of views on their way to the network.

`order` (which pair when), `loader` (from the store to batches), `augmentation`, `workers`
(processes that load).
"""
