"""Entrypoint of both images: `repro` (the default), `ui`, `match`, `doctor`, `shell` and more.

It runs under tini. What it adds to `dvc repro`:
- one writer for a workspace, across containers and the host (DVC's own lock knows the processes of
  one container);
- SIGTERM reaches the trainer and not DVC, so that `docker stop` leaves a checkpoint;
- a workspace that is empty gets the project's files from the image, and one that another image
  filled is refused.
Exit codes: 0 done, 1 the work failed, 2 the request was wrong, 143 stopped after a checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import List

from child import BAD_REQUEST, Child
from workspace import Wrong, lock, require_same_code, seed

USAGE = """usage: docker run [--gpus all] -v "$PWD:/workspace" IMAGE [COMMAND ...]
  repro [--preset NAME] [--images DIR] [--val-images DIR] [STAGE ...]
                                 run the pipeline (the default), or what these stages need
  ui                             MLflow's pages on port 5000: add -p 127.0.0.1:5000:5000
  match A.jpg B.jpg ...          match two images
  evaluate | export | report ...  python -m pipeline.NAME ...
  benchmark ...                  python -m benchmarks ...
  doctor                         what this machine and these docker options can do
  shell                          a shell in the workspace
  any other program of the image, with its arguments"""
STAGES = ("fetch", "keypoints", "evaluate", "export")
MODULES = (*STAGES, "match", "benchmark", "report", "doctor", "presets")
PREPARING = {"fetch", "keypoints"}  # stages that may run where no training could


def main(argv: List[str]) -> int:
    """Run one command."""
    command = argv[0] if argv else "repro"
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    is_repro = command == "repro" or command.startswith("--")
    try:
        if is_repro or command in (*MODULES, "ui"):
            require_same_code(Path.cwd())
        if is_repro:
            return repro(argv[1:] if command == "repro" else argv)
        words = program(command, argv[1:])
    except Wrong as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return BAD_REQUEST
    sys.stdout.flush()
    return os.execvp(words[0], words)  # nothing of this file stays between it and the signals


def program(command: str, rest: List[str]) -> List[str]:
    """The command line of a command other than repro. Raises Wrong."""
    if command == "ui":
        return [sys.executable, "-m", "pipeline.tracking", "ui", "--host", "0.0.0.0", *rest]
    if command in MODULES:
        others = {"benchmark": "benchmarks", "match": "superglue_sift"}
        module = others.get(command, f"pipeline.{command}")
        return [sys.executable, "-m", module, *rest]
    name = "bash" if command == "shell" else command
    if not shutil.which(name):
        raise Wrong(f"no command {command!r}; commands: repro, ui, shell, {', '.join(MODULES)}")
    return [name, *rest]


def repro(options: List[str]) -> int:
    """Check the machine, set the preset, run DVC, show the result, under the workspace's lock."""
    steps = plan(options)
    seed(Path.cwd())
    with lock(Path.cwd()) as held:
        for step in steps:
            code = Child(step, held.fileno()).wait()
            if code != 0:
                return code
    return 0


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise Wrong(f"repro takes --preset NAME, --images DIR, --val-images DIR, stages; {message}")


def plan(options: List[str]) -> List[List[str]]:
    """The commands of one `repro`, in order. Raises Wrong."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset")
    parser.add_argument("--images")
    parser.add_argument("--val-images")
    parser.add_argument("stages", nargs="*")
    asked = parser.parse_intermixed_args(options)
    given = [asked.preset] if asked.preset else []
    given += [f"--images={asked.images}"] if asked.images else []
    given += [f"--val-images={asked.val_images}"] if asked.val_images else []
    python = [sys.executable, "-m"]
    # refresh: a folder of images that has changed is fetched again
    steps = [[*python, "pipeline.presets", *(["use", *given] if given else ["refresh"])]]
    if not asked.stages or set(asked.stages) - PREPARING:
        steps.append([*python, "pipeline.doctor", "--quick"])
    steps.append(["dvc", "repro", *asked.stages])
    return steps if asked.stages else [*steps, [*python, "pipeline.report"]]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
