"""Processes: `distributed` (ranks), `signals`, `faults` (for tests), `machine`, `memory` (malloc), `prefetch`."""
