"""The command `superglue-match`, also `python -m superglue_sift`: configures threads, then imports
the rest.
"""

from __future__ import annotations

from superglue_sift import errors, threads


def command() -> int:
    """Entry point; returns the exit code."""
    threads.wait_passively()  # before torch is loaded
    from superglue_sift.apps import cli

    return errors.exit_code(cli.main)


if __name__ == "__main__":
    raise SystemExit(command())
