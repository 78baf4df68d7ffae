"""Run a command of both images: `repro` (the default), `ui`, `match`, `doctor`, `shell` and more.

It runs under tini. It adds to `dvc repro`:

- A workspace has one writer, across containers and the host. DVC's own lock only knows the
  processes of one container.
- SIGTERM reaches the trainer and not DVC, so that `docker stop` leaves a checkpoint.
- An empty workspace gets the project's files from the image. A workspace that another image filled
  is refused.

The exit code is 0 if the work is done, 1 if it failed, 2 if the request was wrong, and 143 if it
was stopped after a checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import List

from child import BAD_REQUEST, Child
from workspace import WrongRequest, copy_project, lock_workspace, require_same_code

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
    """Run one command, and return its exit code, or become its process."""
    command = argv[0] if argv else "repro"
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    is_repro = command == "repro" or command.startswith("--")
    try:
        if is_repro or command in (*MODULES, "ui"):
            require_same_code(Path.cwd())
        if is_repro:
            return run_repro(argv[1:] if command == "repro" else argv)
        words = make_command(command, argv[1:])
    except WrongRequest as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return BAD_REQUEST
    sys.stdout.flush()
    # The command takes the place of this process, so that it gets the signals itself.
    return os.execvp(words[0], words)


def make_command(command: str, rest: List[str]) -> List[str]:
    """Return the words of a command other than repro. Raises WrongRequest."""
    if command == "ui":
        return [sys.executable, "-m", "pipeline.tracking", "ui", "--host", "0.0.0.0", *rest]
    if command in MODULES:
        others = {"benchmark": "benchmarks", "match": "superglue_sift"}
        module = others.get(command, f"pipeline.{command}")
        return [sys.executable, "-m", module, *rest]
    name = "bash" if command == "shell" else command
    if not shutil.which(name):
        raise WrongRequest(
            f"no command {command!r}; commands: repro, ui, shell, {', '.join(MODULES)}"
        )
    return [name, *rest]


def run_repro(options: List[str]) -> int:
    """Check the machine, set the preset, run DVC, show the result, under the workspace's lock."""
    steps = plan_steps(options)
    copy_project(Path.cwd())
    with lock_workspace(Path.cwd()) as stream:
        for step in steps:
            code = Child(step, stream.fileno()).wait()
            if code != 0:
                return code
    return 0


class ReproParser(argparse.ArgumentParser):
    """The parser of repro, whose errors are one line."""

    def error(self, message: str) -> None:
        """Raise WrongRequest with the message of argparse."""
        raise WrongRequest(
            f"repro takes --preset NAME, --images DIR, --val-images DIR, stages; {message}"
        )


def plan_steps(options: List[str]) -> List[List[str]]:
    """Return the commands of one `repro`, in order. Raises WrongRequest."""
    parser = ReproParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset")
    parser.add_argument("--images")
    parser.add_argument("--val-images")
    parser.add_argument("stages", nargs="*")
    args = parser.parse_intermixed_args(options)
    words = [args.preset] if args.preset else []
    words += [f"--images={args.images}"] if args.images else []
    words += [f"--val-images={args.val_images}"] if args.val_images else []
    python = [sys.executable, "-m"]
    # `refresh` lets a folder of images that has changed be fetched again.
    steps = [[*python, "pipeline.presets", *(["use", *words] if words else ["refresh"])]]
    if not args.stages or set(args.stages) - PREPARING:
        steps.append([*python, "pipeline.doctor", "--quick"])
    steps.append(["dvc", "repro", *args.stages])
    return steps if args.stages else [*steps, [*python, "pipeline.report"]]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
