"""What one training is made of.

`objective` (batch -> loss), `optimization` and `muon`, `step`, `validation`, `precision`, `setup` (from parameters to
these), `state` (what is saved), `resume` (what is gone on from), `logger` (what is reported), and `trainer`, the loop
that uses them all.
"""
