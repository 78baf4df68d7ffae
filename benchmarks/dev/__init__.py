"""One-off studies behind statements in docs/; `python -m benchmarks.dev.<name> --help`."""
