"""Stage 3: one training.

`pairs` (order, loading, augmentation), `objective` (batch to loss), `optimization` and `muon`, `step`, `step_graphs`
(`--cuda-graph`), `validation`, `precision`, `setup` (builds these from the parameters), `state` and `checkpoint` (what
is saved), `identity` (which training a checkpoint belongs to), `resume` and `superseded` (checkpoints to resume,
checkpoints set aside), `replicas` (one state on all ranks), `unseen` (validation without photographs that the weights
were trained on), `logger` and `live_line` (reports), and `trainer`, the loop.
"""
