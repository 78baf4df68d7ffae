"""params.yaml: `schema` (the keys and their limits), `params` (reading it)."""
