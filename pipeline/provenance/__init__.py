"""Provenance of results: `trained_on`, `repro` (versions)."""
