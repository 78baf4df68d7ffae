"""Run the campaign of faults and write docs/faults.md: `python tests/faults/run.py [--random N]`.

The rows of the matrix are tests. Each random fault is appended to --results, and the same command
goes on after the last one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from faults import random_faults  # noqa: E402 (the path must be set first)
from superglue_sift.progress import Progress  # noqa: E402

# promise: a file of tests, and a selection of its tests
MATRIX = {
    "two runs give the same bytes": ("test_faults.py", "runs"),
    "SIGKILL in any phase of a step, also several times: the same bytes": (
        "test_faults.py",
        "killed",
    ),
    "SIGTERM, SIGINT or SIGUSR1 to a rank or to all processes: saved, then the same bytes": (
        "test_faults.py",
        "signal or batches",
    ),
    "NaN on one rank, out of memory, disk full: one message, nothing is lost": (
        "test_faults.py",
        "number or many or fix",
    ),
    "nodes with separate folders lose one and get it back: the same bytes": ("test_nodes.py", ""),
    "a rank, torchrun, the launcher or `dvc repro` killed: resumes, the same bytes": (
        "test_launch.py",
        "TestFaults",
    ),
    "an elastic job loses a node and gets it back": ("test_launch.py", "TestNodes"),
    "400 truncated or altered checkpoints: detected, never executed, never used": (
        "test_checkpoint.py",
        "",
    ),
    "a download that breaks off, stalls or brings other bytes: resumed, or reported": (
        "test_download.py",
        "",
    ),
    "0, 1 or 2 keypoints: finite loss, right shapes": ("test_matching.py", "few or empty or alone"),
    "MLflow down, hanging or unreliable: training does not wait, every point arrives once": (
        "test_tracking.py",
        "",
    ),
    "a tracking server that never answers costs less than 1 % of the training's time": (
        "test_faults.py",
        "costs",
    ),
}
HEAD = """# Faults

Written by `make faults` on {date}: {machine}, Python {python}, {cores} cores, torch {torch}.

Trainings of 8 steps are interrupted and started again until they end. Weights, optimizer state and
best model must then have the SHA-256 of an uninterrupted training. Tests that cannot run on this
machine are skipped and do not count.

| promise | tests | runs | failures | time |
|---|---|---|---|---|
"""
RANDOM = """
## Random faults

Written by `make random-faults`: {done} of {count} cells of seed {seed}, at {commits}. A cell runs a
stage on small inputs with a fault at a random moment, and repeats it until it succeeds. Numbers of
faults that occurred before the stage ended; {broken} of them broke the promise.

"""


def run_tests(promise: str, name: str, selection: str) -> str:
    """Run the tests of a row; the row of the table, with the names of tests that failed."""
    began = time.monotonic()
    (file,) = (ROOT / "tests").rglob(name)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
        command += [f"--junitxml={folder}/junit.xml", "-k", selection]
        subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        cases = list(ElementTree.parse(f"{folder}/junit.xml").iter("testcase"))
    failed = [c.get("name") for c in cases if {"failure", "error"} & {child.tag for child in c}]
    runs = sum(c.find("skipped") is None for c in cases)
    words = f"{len(failed)} {' '.join(map(str, failed))}".strip()
    shown = f"{name} {f'-k {selection!r}' if selection else ''}".strip()
    taken = Progress.format_interval(time.monotonic() - began)
    return f"| {promise} | `{shown}` | {runs} | {words} | {taken} |"


def read(results: Path, seed: int) -> List[Dict[str, Any]]:
    """Cells of this seed so far, without a last line that a kill cut off."""
    lines = results.read_text().splitlines(keepends=True) if results.is_file() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [each for each in found if each["seed"] == seed]


def run_random(count: int, seed: int, results: Path) -> None:
    """Run the cells 0 to count - 1 that are not in `results` yet, and append each."""
    done = {each["number"] for each in read(results, seed)}
    numbers = [number for number in range(count) if number not in done]
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, text=True
    )
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        base = random_faults.Base(Path(folder)) if numbers else None
        for number in Progress(numbers, total=len(numbers), desc="faults", unit="fault"):
            found = {**random_faults.run(base, seed, number), "commit": commit.strip()}
            with results.open("a") as file:
                file.write(json.dumps(found) + "\n")


def show_random(count: int, seed: int, results: Path) -> str:
    """The section of docs/faults.md about these results."""
    every = read(results, seed)
    commits = ", ".join(sorted({each["commit"] for each in every}))
    broken = [each for each in every if each["problems"]]
    about = {"done": len(every), "broken": len(broken), "commits": commits}
    text = RANDOM.format(count=count, seed=seed, **about)
    stages = list(random_faults.STAGES)
    tried = Counter((each["kind"], each["stage"]) for each in every if each["struck"])
    rows = [["promise", *stages], ["---"] * (1 + len(stages))]
    for kind, fault in random_faults.FAULTS.items():
        rows.append([str(fault.__doc__), *(str(tried[kind, stage]) for stage in stages)])
    text += "".join(f"| {' | '.join(row)} |\n" for row in rows)
    lines = [f"- cell {e['number']}, {e['kind']}, {e['stage']}: {e['problems']}\n" for e in broken]
    return text + "".join(["\n", *lines] if lines else [])


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "faults.md")
    parser.add_argument("--random", type=int, default=100, metavar="N", help="of random faults")
    parser.add_argument("--seed", type=int, default=0, help="of the random faults")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "faults.jsonl", help="of random faults"
    )
    parser.add_argument("--only-random", action="store_true", help="keep the matrix of the report")
    options = parser.parse_args()
    head = options.report.read_text().partition("\n## Random")[0]
    if not options.only_random:
        head = HEAD.format(
            date=datetime.date.today(),
            machine=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            cores=os.cpu_count(),
            torch=torch.__version__,
        )
        for promise, tests in MATRIX.items():
            head += run_tests(promise, *tests) + "\n"
    run_random(options.random, options.seed, options.results)
    text = head + show_random(options.random, options.seed, options.results)
    options.report.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
