"""What surrounds the numbers: processes, checkpoints, signals, tracking, progress, provenance, the machine."""
