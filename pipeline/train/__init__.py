"""Stage 3. Read `trainer` from top to bottom: build, loop, step, validate, save, stop.

`data` makes the batches, and `augmentation` changes their pairs. `loss` has the loss of a batch and
the metrics of a validation. `optimizer` has the learning rate, the optimiser and the precision.
`checkpoint` saves a training and finds where it starts. `log` reports.
"""
