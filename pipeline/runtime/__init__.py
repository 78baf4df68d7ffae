"""What surrounds the numbers: processes, checkpoints, signals, provenance, the machine."""
