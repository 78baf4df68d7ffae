"""Processes: `distributed` (ranks), `signals`, `machine`, `prefetch`."""
