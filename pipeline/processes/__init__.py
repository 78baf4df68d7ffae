"""Processes: `distributed` (ranks), `signals`, `faults` (for tests), `machine`, `prefetch`."""
