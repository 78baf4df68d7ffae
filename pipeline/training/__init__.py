"""What one training is made of: `objective` (batch -> loss), `optimization`, `step`, `validation`, `state`."""
