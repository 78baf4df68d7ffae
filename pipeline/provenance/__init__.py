"""Provenance of results: `code` (digests), `made_from`, `trained_on`, `repro` (versions), `workspace_lock`."""
