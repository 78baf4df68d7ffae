"""Stage 3: one training.

`trainer` is the loop. It takes batches from `pairs` (order, loading, augmentation), and one `step`
of `objective` (batch to loss), `optimization` and `muon` for each; once in a while it calls
`validation`, writes a `checkpoint` and reports to the `logger` (and its `curves`). `setup` and
`precision` build these from the parameters; `identity` names a training, `resume` finds its folder
and where it goes on, `published` makes it the output of the stage; `failures` explains a step that
failed.
"""
