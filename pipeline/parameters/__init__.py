"""params.yaml: `schema` (the keys and their limits), `params` (reading and checking the file)."""
