"""`make faults`: run the matrix of faults and write the results to docs/faults.md.

    python tests/faults/run.py [--report docs/faults.md] [--only ROW] [--every N]
    python tests/faults/run.py --random 1000 [--seed 0] [--results FILE] [--render]

--every N runs each N-th cell of the long rows, for a quick look, and notes it in the report.
--random N: N random faults over all stages, with a section of the report. Each result is appended
to FILE, and the same command resumes. --render: only write the section from FILE.
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
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from faults import campaign, cells  # noqa: E402 (the path must be set first)
from faults.group import until_done  # noqa: E402
from superglue_sift.progress import Progress  # noqa: E402


class Result(NamedTuple):
    """Result of one row of the matrix."""

    promise: str
    runs: int
    kills: int
    failures: List[str]
    hangs: int
    seconds: float
    skipped: List[str]


def of_cells(promise: str, chosen: List[cells.Cell], bench: cells.Workbench) -> Result:
    """Run every cell with its faults; the weights must equal those of a run without faults."""
    began = time.monotonic()
    failures = []
    kills = 0
    hangs = 0
    for cell in Progress(chosen, total=len(chosen), desc=promise[:40], unit="run"):
        try:
            arguments = (bench.arguments(cell.keys), cell.worlds, cell.fault)
            done = until_done(bench.folder / "cell", *arguments, environment=cell.environment)
            kills += done.starts - 1
            hangs += done.hung
            if done.digest != bench.clean(cell.worlds[-1], cell.keys):
                failures.append(f"{cell}: other bytes")
            elif done.starts == 1:
                failures.append(f"{cell}: the fault did not strike")
        except AssertionError as error:
            failures.append(f"{cell}: {str(error).splitlines()[0]}")
    return Result(promise, len(chosen), kills, failures, hangs, time.monotonic() - began, [])


def repeats(promise: str, bench: cells.Workbench) -> Result:
    """Repeat a training for each seed and number of ranks; the bytes must be equal."""
    began = time.monotonic()
    failures = []
    runs = 0
    for seed in (0, 1, 2):
        for world in (1, 2, 4):
            keys = (("seed", seed),)
            again = until_done(bench.folder / "cell", bench.arguments(keys), [world], "")
            runs += 2
            if again.digest != bench.clean(world, keys):
                failures.append(f"seed {seed}, {world} ranks: other bytes")
    return Result(promise, runs, 0, failures, 0, time.monotonic() - began, [])


def of_pytest(promise: str, *selection: str) -> Result:
    """Run the tests that cover a row, and count them."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "junit.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={file}",
            *selection,
        ]
        subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        if not file.is_file():
            return Result(promise, 0, 0, ["pytest did not run"], 0, time.monotonic() - began, [])
        tests = list(ElementTree.parse(file).iter("testcase"))
    failures = [
        t.get("name", "")
        for t in tests
        if t.find("failure") is not None or t.find("error") is not None
    ]
    skipped = [
        f"{t.get('name')}: {t.find('skipped').get('message')}"
        for t in tests
        if t.find("skipped") is not None
    ]
    return Result(
        promise, len(tests) - len(skipped), 0, failures, 0, time.monotonic() - began, skipped
    )


def hanging_server(bench: cells.Workbench, steps: int = 300) -> Result:
    """Cost of a tracking server that never answers, as a fraction of the time of small, fast
    steps.
    """
    began = time.monotonic()
    keys = (("steps", steps), ("log_every", 10), ("val_every", 100), ("save_every", 100))
    folders = [
        "--out",
        str(bench.folder / "recording"),
        "--reports",
        str(bench.folder / "recording-reports"),
    ]
    command = [
        sys.executable,
        str(ROOT / "tests/faults/telemetry.py"),
        *bench.arguments(keys),
        *folders,
    ]
    quick = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=quick, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        return Result(
            "a server that never answers",
            1,
            0,
            ["the training failed"],
            0,
            time.monotonic() - began,
            [],
        )
    t = json.loads(done.stdout.splitlines()[-1])
    fraction = t["recording"] / t["loop"]
    promise = (
        f"a tracking server that never answers costs {fraction:.2%} of the training's time:"
        f" {t['recording']:.3f} s in {t['calls']} calls, of {t['loop']:.1f} s for {t['steps']}"
        f" steps of {1e3 * t['loop'] / t['steps']:.0f} ms; once, {t['thread']:.1f} s of processor"
        f" time in another thread, and {t['closing']:.0f} s of waiting at the end"
    )
    failures = [f"{fraction:.2%} of the training's time, more than 1 %"] if fraction > 0.01 else []
    return Result(promise, 1, 0, failures, 0, time.monotonic() - began, [])


def rows(bench: cells.Workbench, every: int) -> Dict[str, Callable[[], Result]]:
    """Functions that run the rows, by name."""
    return {
        "1 repeat": lambda: repeats("two runs give the same bytes, with 1, 2 and 4 ranks", bench),
        "4 kill": lambda: of_cells(
            "SIGKILL of any rank in any phase, from the first to the last step: the same bytes",
            cells.kills()[::every],
            bench,
        ),
        "5 launcher": lambda: of_pytest(
            "a rank, torchrun, the launcher or `dvc repro` killed, a rank that hangs, SLURM:"
            " resumes, the same bytes",
            "tests/test_launch.py",
            "-k",
            "TestFaults",
        ),
        "6 again": lambda: of_cells(
            "killed several times, also while resuming, with each option: the same bytes",
            cells.repeated(),
            bench,
        ),
        "7 signals": lambda: of_cells(
            "SIGTERM, SIGINT or SIGUSR1 to one rank: a checkpoint, then the same bytes",
            cells.signals(),
            bench,
        ),
        "7 all": lambda: of_cells(
            "signals to loader processes and their rank, and one of them killed: a checkpoint, the"
            " same bytes",
            cells.loaders(),
            bench,
        ),
        "9-12 files": lambda: of_pytest(
            "400 truncated or altered checkpoints, other files, another training: detected, never"
            " executed, never used",
            "tests/train/test_checkpoint.py",
            "tests/train/test_training.py",
            "-k",
            "checkpoint or Resume",
        ),
        "13, 25, 10": lambda: of_pytest(
            "NaN on one rank, out of memory, disk full: all ranks stop with one message, nothing is"
            " lost",
            "tests/faults/test_faults.py",
            "-k",
            "number or many or fix",
        ),
        "15 few": lambda: of_pytest(
            "0, 1 or 2 keypoints: finite loss, right shapes",
            "tests/test_matching.py",
            "-k",
            "few or empty or alone",
        ),
        "22 MLflow": lambda: of_pytest(
            "MLflow down, hanging or unreliable: training does not wait, every point arrives once",
            "tests/tracking/test_tracking.py",
        ),
        "22 cost": lambda: hanging_server(bench),
        "nodes": lambda: of_pytest(
            "two nodes; an elastic job loses one and gets it back",
            "tests/test_launch.py",
            "-k",
            "TestNodes",
        ),
        "GPU": lambda: of_pytest("NCCL, float16, two devices", "tests", "-m", "gpu"),
    }


RANDOM = campaign.TABLE.partition("\n")[0]  # each command keeps the other's section
HEAD = """# Faults

Written by `make faults` on {date}: {machine}, Python {python}, {cores} cores, torch {torch}.{note}

Each run interrupts a training of {steps} steps, by SIGKILL of one rank or by the named signal, and
starts it again until it ends. Weights, optimizer state and best model must then have the SHA-256
of an uninterrupted training. Ranks are forked processes in a gloo group, or processes of torchrun
in the rows that name it. Tests that cannot run on this machine are listed as SKIP and do not count
as passed.

| row | promise | runs | kills | hangs | failures | time |
|---|---|---|---|---|---|---|
"""


def report(results: Dict[str, Result], every: int) -> str:
    """Text of docs/faults.md."""
    import torch

    text = HEAD.format(
        date=datetime.date.today(),
        machine=f"{platform.system()} {platform.machine()}",
        steps=cells.STEPS,
        python=platform.python_version(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        note=f" Only each {every}th cell of row 4 was run." if every > 1 else "",
    )
    for name, r in results.items():
        cells_of_row = (
            name,
            r.promise,
            r.runs,
            r.kills,
            r.hangs,
            len(r.failures),
            Progress.format_interval(r.seconds),
        )
        text += "| " + " | ".join(map(str, cells_of_row)) + " |\n"
    kills, hangs = (sum(getattr(r, f) for r in results.values()) for f in ("kills", "hangs"))
    failures = [f"{name}: {line}" for name, r in results.items() for line in r.failures]
    skipped = [f"{name}: {line}" for name, r in results.items() for line in r.skipped]
    text += f"\n**{kills} kills, {hangs} hangs, {len(failures)} failures.**\n"
    for title, lines in (("Failures", failures), ("SKIP", skipped)):
        if lines:
            text += f"\n## {title}\n\n" + "\n".join(f"- {line}" for line in lines) + "\n"
    return text


def random_faults(options: argparse.Namespace) -> int:
    """Run the remaining random faults and write their section of the report; returns 1 if a promise
    is broken.
    """
    if not options.render:
        campaign.run(options.random, options.seed, options.results, tuple(options.only))
    text = campaign.table(options.random, options.seed, options.results)
    before = options.report.read_text() if options.report.is_file() else ""
    options.report.write_text(before.partition(RANDOM)[0].rstrip() + "\n\n" + text)
    print(text[text.index("| promise") :])
    return (
        1 if any(each["problems"] for each in campaign.read(options.results, options.seed)) else 0
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "faults.md")
    parser.add_argument(
        "--only", action="append", default=[], help="name of a row; repeat it for more"
    )
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument(
        "--random", type=int, metavar="N", help="N random faults instead of the matrix"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random faults")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "faults.jsonl", help="results of the random faults"
    )
    parser.add_argument(
        "--render", action="store_true", help="only write their section from the file"
    )
    options = parser.parse_args()
    if options.random:
        return random_faults(options)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        matrix = rows(cells.Workbench(Path(folder)), options.every)
        unknown = set(options.only) - set(matrix)
        if unknown:
            parser.error(f"--only: no row {', '.join(sorted(unknown))}; rows: {', '.join(matrix)}")
        results = {
            name: run() for name, run in matrix.items() if not options.only or name in options.only
        }
    text = report(results, options.every)
    before = options.report.read_text() if options.report.is_file() else ""
    options.report.write_text(
        text + "".join(("\n" * (RANDOM in before), *before.partition(RANDOM)[1:]))
    )
    print(text[text.index("| row") :])
    return 1 if any(r.failures or r.hangs for r in results.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
