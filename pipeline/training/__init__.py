"""What one training is made of.

`objective` (batch -> loss), `optimization` and `muon`, `step`, `validation`, `precision`, `setup` (from parameters to
these), `state` (what is saved), `identity` (which training that is), `resume` and `superseded` (what is gone on from,
what is set aside), `replicas` (one state on all ranks), `logger` (what is reported), and `trainer`, their loop.
"""
