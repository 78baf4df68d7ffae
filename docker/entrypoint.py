"""Entrypoint of both images: `repro` (the default), `ui`, `match`, `doctor`, `shell` and more; see
USAGE.

It runs under tini with the standard library alone. What it adds to `dvc repro`:
- one writer for a workspace, across containers and the host (DVC's own lock knows the processes of
  one container);
- SIGTERM reaches the trainer and not DVC, so that `docker stop` leaves a checkpoint;
- a workspace that is empty gets the project's files from the image, and one that another image
  filled is refused.
Exit codes: 0 done, 1 the work failed, 2 the request was wrong, 143 stopped after a checkpoint.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import List, Tuple

from child import Child
from workspace import WorkspaceLock, Wrong, same_code, seed

USAGE = """usage: docker run [--gpus all] -v "$PWD:/workspace" IMAGE [COMMAND ...]
  repro [--preset NAME] [--images DIR] [--val-images DIR] [STAGE ...]
                                 run the pipeline (the default), or what these stages need
  ui                             MLflow's pages on port 5000: add -p 127.0.0.1:5000:5000
  match A.jpg B.jpg ...          match two images
  evaluate | export | benchmark | report ...    python -m pipeline.NAME ...
  doctor                         what this machine and these docker options can do
  shell                          a shell in the workspace
  any other program of the image, with its arguments"""
MODULES = (
    "match",
    "evaluate",
    "export",
    "benchmark",
    "report",
    "doctor",
    "fetch",
    "keypoints",
    "presets",
)
PREPARING = ("fetch", "keypoints")  # stages that may run where no training could
BAD_REQUEST = 2


def main(argv: List[str]) -> int:
    """Run one command."""
    command, rest = (argv[0], argv[1:]) if argv else ("repro", [])
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    try:
        if command in ("repro", *MODULES) or command.startswith("--"):
            same_code(Path.cwd())
        if command == "repro" or command.startswith("--"):
            return repro(rest if command == "repro" else argv)
        return hand_over(command, rest)
    except Wrong as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return BAD_REQUEST


def hand_over(command: str, rest: List[str]) -> int:
    """Become the program asked for: nothing of this file stays between it and the signals."""
    if command == "ui":
        words = ui_command(os.environ.get("MLFLOW_TRACKING_URI", ""), rest)
    elif command == "shell":
        words = ["bash", *rest]
    elif command in MODULES:
        words = [sys.executable, "-m", f"pipeline.{command}", *rest]
    elif shutil.which(command):
        words = [command, *rest]
    else:
        raise Wrong(f"no command {command!r}; commands: repro, ui, shell, {', '.join(MODULES)}")
    sys.stdout.flush()
    os.execvp(words[0], words)


def ui_command(uri: str, rest: List[str]) -> List[str]:
    """The MLflow server over this image's own store."""
    if uri.startswith(("http://", "https://")):
        raise Wrong("MLFLOW_TRACKING_URI names a server, which shows its runs itself")
    words = ["mlflow", "server", "--backend-store-uri", uri, "--host", "0.0.0.0", "--port", "5000"]
    return [*words, "--workers", "1", *rest]


def repro(options: List[str]) -> int:
    """Check the machine, set the preset, run DVC, show the result; under the lock of the
    workspace.
    """
    workspace = Path.cwd()
    seed(workspace)
    with WorkspaceLock(workspace / ".dvc" / "tmp" / "workspace.lock") as lock:
        for step in plan(options):
            child = Child(step, lock.fileno())
            lock.runs(child.process.pid)
            code = child.wait()
            if code != 0:
                return code
    return 0


def plan(options: List[str]) -> List[List[str]]:
    """The commands of one `repro`, in order."""
    python = [sys.executable, "-m"]
    given, stages = preset_options(options)
    # refresh: a folder of images that has changed is fetched again
    steps = [[*python, "pipeline.presets", *(["use", *given] if given else ["refresh"])]]
    if not stages or set(stages) - set(PREPARING):
        steps.append([*python, "pipeline.doctor", "--quick"])
    steps.append(["dvc", "repro", *stages])
    return steps if stages else [*steps, [*python, "pipeline.report"]]


def preset_options(options: List[str]) -> Tuple[List[str], List[str]]:
    """`--preset P --images D --val-images D` as pipeline.presets takes them, and the stages asked
    for.
    """
    name: List[str] = []
    more: List[str] = []
    stages: List[str] = []
    words = [
        part
        for word in options
        for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    while words:
        key = words.pop(0)
        if not key.startswith("-"):
            stages.append(key)
        elif key not in ("--preset", "--images", "--val-images") or not words:
            raise Wrong(
                "repro takes --preset NAME, --images DIR, --val-images DIR and stages; not"
                f" {' '.join(options)!r}"
            )
        elif key == "--preset":
            name = [words.pop(0)]
        else:
            more += [key, words.pop(0)]
    return name + more, stages


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
