"""Run the command `superglue-match`, also as `python -m superglue_sift`."""

from __future__ import annotations

import functools

from superglue_sift import environment

command = functools.partial(environment.import_and_run_main, "superglue_sift.apps.cli")

if __name__ == "__main__":
    raise SystemExit(command())
