"""Where results come from: `code` (digests), `made_from`, `trained_on`, `repro` (commit, versions), `workspace_lock`."""
