"""What surrounds the numbers: processes, checkpoints, signals, progress, provenance, the machine."""
