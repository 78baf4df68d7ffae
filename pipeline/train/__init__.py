"""Stage 3: one training.

`pairs` (which two views when, read into a batch), `objective` (batch to loss), `optimization` and `muon`, `step`,
`validation`, `precision`, `setup` (from parameters to these), `state` and `checkpoint` (what is saved), `identity`
(which training that is), `resume` and `superseded` (what is continued, what is set aside), `replicas` (one state on all
ranks), `unseen` (validation on photographs that the weights were not trained on), `logger` and `live_line` (what is
reported), and `trainer`, the loop.
"""
