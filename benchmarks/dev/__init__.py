"""What maintainers run: `python -m benchmarks.dev.<name> --help`. CONTRIBUTING.md says when."""
