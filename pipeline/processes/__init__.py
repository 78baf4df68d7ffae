"""Processes of a run: `distributed` (ranks), `signals`, `faults` (for tests), `machine`, `memory` (malloc)."""
