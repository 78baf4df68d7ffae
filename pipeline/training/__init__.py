"""What one training is made of.

`objective` (batch -> loss), `optimization`, `step`, `validation`, `state` (what is saved), `journal` (what is
told), and `trainer`, the loop that uses them all.
"""
