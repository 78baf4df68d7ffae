"""Stage 3. Read `trainer` from top to bottom: build, loop, step, validate, save, stop.

It takes batches from `data`, whose pairs `augmentation` changes; their loss and the metrics of a
validation from `loss`; learning rate, optimiser and precision from `optimizer`; where to start from
`checkpoint`. `log` reports.
"""
