"""Stage 3: train. Read `train` first, from top to bottom.

`step` does one step along the gradient. `build` makes the network and what trains it. `data` makes
the batches, and `augmentation` changes their pairs. `loss` has the loss of a batch and the metrics
of a validation. `optimizer` has the learning rate, the optimizer and the precision. `checkpoint`
saves a training and finds where it starts. `log` reports.
"""
