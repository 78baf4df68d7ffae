"""What one training is made of.

`objective` (batch -> loss), `optimization`, `step`, `validation`, `state` (what is saved), `logger` (what is
reported), `curves` (its CSV files), and `trainer`, the loop that uses them all.
"""
