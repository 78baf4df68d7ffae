"""Checks the machine and the parameters before work begins: `plan` (memory and hours of a training)."""
