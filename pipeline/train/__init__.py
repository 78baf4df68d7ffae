"""Stage 3: one training.

`pairs` (order, loading, augmentation), `objective` (batch to loss), `optimization` and `muon`,
`step`, `validation`, `precision`, `setup` (builds these from the parameters), `state` and
`checkpoint` (what is saved), `identity` (the name of a training), `resume` (its folder, and the
checkpoint it starts from), `replicas` (one state on all ranks), `unseen` (validation without
photographs that the weights were trained on), `logger` and `live_line` (reports), and `trainer`,
the loop.
"""
