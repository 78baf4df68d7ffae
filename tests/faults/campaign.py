"""Many random faults in sequence: how they are drawn, the file of results, and the table.

Each line of the file is one cell: its number, the seed, the commit, and the result.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

from faulty_server import FaultyServer

from faults import random_faults, stages
from faults.group import fork
from faults.random_faults import Cell, Clock, Found
from faults.telemetry import Gate, Silent
from pipeline.files import write_atomic
from pipeline.launch import free_port
from pipeline.processes.signals import end_with_parent
from superglue_sift.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
Fault = Callable[[Cell, Clock], Tuple[str, bool]]
DISK_MB = 256
CLONE_NEWNS = 0x20000  # of linux/sched.h


class Kind(NamedTuple):
    """A kind of fault: its promise, and the relative frequency of each stage."""

    promise: str
    fault: Fault
    weights: Dict[str, int]


def tracking_server(cell: Cell, clock: Clock) -> Tuple[str, bool]:
    """A tracking server that is down, hangs, is slow, refuses or dies; then one that works, at the
    same address.
    """
    how = cell.draw.choice(("dead", "hangs", "slow", "refuses", "dies"))
    store = cell.folder / "mlflow.db"
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    environment = [("MLFLOW_TRACKING_URI", uri), ("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")]
    environment += [("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")]
    server = fork(
        serve, (how, str(port), str(store), str(cell.draw.random())), cell.base.logs / "server"
    )
    began = time.monotonic()
    pids = cell.start([*environment, ("SG_WAIT", "2")], tracked=True)
    if how == "dies":
        time.sleep(clock.moment(cell.stage.name, cell.draw, 0))
        os.kill(server, signal.SIGKILL)
    codes = cell.wait(pids).codes
    clock.note(cell.stage.name, time.monotonic() - began)
    if any(codes):
        cell.problems.append(
            f"tracking server {how}: the training ended with {codes}: {cell.said()[-200:]}"
        )
    cell.no_traceback()
    ended(server)
    server = fork(serve, ("up", str(port), str(store), "0"), cell.base.logs / "server")
    cell.finish(tracked=True, environment=[*environment, ("SG_WAIT", "90")])
    ended(server)
    arrived(cell, store)
    return f"tracking server {how}", True


def serve(arguments: List[str]) -> int:
    """Serve a store at a port until killed; runs in a separate process."""
    end_with_parent()
    how = arguments[0]
    port = int(arguments[1])
    store = arguments[2]
    delay = float(arguments[3])
    if how == "hangs":
        Silent(port)
    elif how != "dead":
        gate = Gate(f"sqlite:///{store}", port, delay if how == "slow" else 0.0)
        gate.start()
        gate.mode = "error" if how == "refuses" else "up"
    while True:
        time.sleep(60)


def ended(server: int) -> None:
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)


def arrived(cell: Cell, store: Path) -> None:
    """Check that the store has every point of the training's log once."""
    logged = set()
    for line in (cell.folder / "reports/train/log.jsonl").read_text().splitlines():
        event = json.loads(line)
        logged |= {
            (name, event["step"])
            for name in event.get("metrics", {})
            if not name.startswith("system/")
        }
    with sqlite3.connect(store) as database:
        rows = database.execute(
            "SELECT key, step, COUNT(*) FROM metrics GROUP BY run_uuid, key, step"
        ).fetchall()
    stored = {(name, step): count for name, step, count in rows if not name.startswith("system/")}
    missing = logged - set(stored)
    twice = [point for point, count in stored.items() if count > 1]
    if missing or twice or not logged:
        cell.problems.append(
            f"{len(missing)} of {len(logged)} points did not arrive, {len(twice)} arrived twice"
        )
        cell.silent = True


TRAININGS = {"train": 3, "train, 2 ranks": 2, "train, loader processes": 2}
KINDS = {
    "kill": Kind(
        "SIGKILL of any process at any moment, also while resuming: the same bytes, nothing"
        " computed twice",
        random_faults.kill,
        {
            "fetch": 2,
            "download": 5,
            "keypoints": 9,
            "evaluate": 5,
            "match": 9,
            "train": 9,
            "train, 2 ranks": 5,
            "train, loader processes": 5,
            "launcher": 1,
        },
    ),
    "signal": Kind(
        "SIGTERM, SIGINT or SIGUSR1 to one process or to all: a training saves and exits with 143;"
        " no traceback",
        random_faults.stop,
        {
            "fetch": 1,
            "download": 1,
            "keypoints": 2,
            "evaluate": 1,
            "match": 2,
            "train": 4,
            "train, 2 ranks": 3,
            "train, loader processes": 5,
            "launcher": 1,
        },
    ),
    "disk": Kind(
        "a full disk: one message that names it, no traceback; with free space again, the same"
        " bytes",
        random_faults.full_disk,
        {"fetch": 1, "download": 1, "keypoints": 3, "evaluate": 1, "match": 3, "train": 4},
    ),
    "damage": Kind(
        "a truncated file, a flipped bit, zeroed bytes: reported by name or computed again, never"
        " used silently",
        random_faults.torn,
        {"fetch": 1, "download": 2, "keypoints": 5, "evaluate": 3, "match": 5, "train": 6},
    ),
    "tracking": Kind(
        "a tracking server that is down, hangs, is slow, refuses or dies: the same weights, every"
        " point arrives once",
        tracking_server,
        {"train, tracked": 4},
    ),
    "node": Kind(
        "a node without a shared folder fails and returns with an empty disk: the same bytes",
        random_faults.leaving_node,
        {"train, 2 nodes": 4},
    ),
}


def drawn(seed: int, number: int) -> Tuple[str, str]:
    """Kind and stage of a cell."""
    every = [
        (kind, stage, weight)
        for kind, about in KINDS.items()
        for stage, weight in about.weights.items()
    ]
    draw = random.Random(f"{seed} {number}")
    return draw.choices([each[:2] for each in every], [each[2] for each in every])[0]


def own_disk(folder: Path) -> str:
    """Mount a small disk at `folder`, which a fault can fill; returns "" or the reason why it
    cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() or libc.unshare(CLONE_NEWNS):
        return "a separate disk needs root to mount it"
    for words in (
        ["--make-rprivate", "/"],
        ["-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", str(folder)],
    ):
        done = subprocess.run(["mount", *words], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return f"no separate disk: {done.stderr.strip()}"
    return ""


def warm() -> None:
    """Import and compute once what every forked process would otherwise repeat."""
    import mlflow.server.handlers  # noqa: F401
    import torch._dynamo  # noqa: F401


def archive(base: stages.Base) -> Tuple[FaultyServer, bytes]:
    """A server of an archive of the photographs, laid out as COCO's, and the archive's bytes."""
    path = base.folder / "val2017.zip"
    with zipfile.ZipFile(path, "w") as out:
        for index, photo in enumerate(sorted((base.folder / "photos").iterdir())):
            out.write(photo, f"val2017/{index:012d}.jpg")
    server = FaultyServer(path.read_bytes())
    server.pace = 0.01
    return server, path.read_bytes()


def prepare(work: Path, logs: Path) -> Tuple[stages.Base, int]:
    """The base of all cells, and the id of the process that serves its archive."""
    from mlflow.tracking import MlflowClient

    base = stages.Base(work, logs)
    base.make()
    fork(
        lambda _: MlflowClient(f"sqlite:///{base.folder}/mlflow.db").search_experiments() and 0,
        (),
        logs / "base",
    )
    os.wait()
    about = base.folder / "remote-archive.json"

    def serving(_: List[str]) -> int:
        end_with_parent()
        server, data = archive(base)
        write_atomic(
            about,
            json.dumps([server.url, hashlib.md5(data).hexdigest(), stages.PHOTOGRAPHS, len(data)]),
        )
        while True:
            time.sleep(60)

    process = fork(serving, (), logs / "server")
    while not about.exists():
        time.sleep(0.05)
    stages.write_params(base.folder, source="coco2017-val", path="")
    return base, process


def read(results: Path, seed: int) -> List[Dict[str, Any]]:
    """Cells of this seed so far, without a last line that a kill cut off."""
    found = []
    for line in results.read_text().splitlines() if results.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [each for each in found if each["seed"] == seed]


def cells_left(count: int, seed: int, results: Path) -> Iterator[int]:
    done = {each["number"] for each in read(results, seed)}
    return (number for number in range(count) if number not in done)


def run(count: int, seed: int, results: Path, only: Tuple[str, ...] = ()) -> None:
    """Run cells 0 to count - 1 that are not in `results` yet, and append each."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, stdout=-1, text=True, check=False
    )
    results = results.resolve()
    numbers = list(cells_left(count, seed, results))
    warm()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        work = Path(folder) / "disk"
        logs = Path(folder) / "logs"
        work.mkdir(), logs.mkdir()
        no_disk = own_disk(work)
        base, server = prepare(work, logs)
        clock = Clock()
        try:
            for number in Progress(numbers, total=len(numbers), desc="faults", unit="fault"):
                kind, name = drawn(seed, number)
                if only and kind not in only and name not in only:
                    continue
                skip = kind == "disk" and no_disk
                fault = KINDS[kind].fault
                draw = f"{seed} {number} cell"
                found = Found(name, skip, False, []) if skip else random_faults.run(
                    base, clock, base.known[name], fault, draw
                )  # fmt: skip
                line = {
                    "seed": seed,
                    "number": number,
                    "kind": kind,
                    "commit": commit.stdout.strip(),
                }
                keep(results, {**line, **found._asdict()}, logs)
        finally:
            os.kill(server, signal.SIGKILL)
            if not no_disk:
                # A killed process may still hold it
                subprocess.run(["umount", "--lazy", str(work)], check=False)


def keep(results: Path, line: Dict[str, Any], logs: Path) -> None:
    """Append a cell and flush it to the disk; the output of a broken one is copied next to the
    file.
    """
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if line["problems"]:
        print(
            f"cell {line['number']}, {line['stage']}, {line['fault']}:"
            f" {'; '.join(line['problems'])}",
            file=sys.stderr,
        )
        if (logs / "cell").is_file():
            shutil.copy(
                logs / "cell", results.with_name(f"{results.stem}-cell-{line['number']}.log")
            )


TABLE = """## Random faults

Written by `python tests/faults/run.py --random {count} --seed {seed}`: {done} of {count} cells,
{minutes:.0f} minutes of one process, {commits}.
A cell runs one command on small inputs with a fault at a random moment, and repeats the command
until it succeeds.

- tried: the fault occurred before the command ended ({missed} more came too late or could not be
  tried)
- held: the promise was kept
- silent: the command succeeded with files that differ from those of an undisturbed run
- lost bytes: missing or different at the end, or computed again although they were intact

| promise | stage | tried | held | hangs | silent | lost bytes |
|---|---|---|---|---|---|---|
"""


def table(count: int, seed: int, results: Path) -> str:
    """Section of docs/faults.md about these results."""
    every = read(results, seed)
    struck = [each for each in every if each["struck"]]
    counts = Counter(each["commit"] for each in every)
    commits = ", ".join(f"{number} at commit {commit}" for commit, number in counts.most_common())
    minutes = sum(each["seconds"] for each in every) / 60
    head = {
        "count": count,
        "seed": seed,
        "done": len(every),
        "minutes": minutes,
        "missed": len(every) - len(struck),
    }
    text = TABLE.format(**head, commits=commits)
    for kind, about in KINDS.items():
        promise = about.promise
        for name in about.weights:
            cells = [each for each in struck if (each["kind"], each["stage"]) == (kind, name)]
            text, promise = (text + _row(promise, name, cells), "") if cells else (text, promise)
    text += _row("**all**", "", struck)
    broken = [each for each in struck if each["problems"]]
    skipped = sorted(
        {each["fault"] for each in every if not each["struck"] and each["seconds"] == 0}
    )
    for title, lines in (
        (
            "Broken",
            [
                f"cell {e['number']}, {e['stage']}, {e['fault']}: {'; '.join(e['problems'])}"
                for e in broken
            ],
        ),
        ("Not tried", skipped),
    ):
        text += (
            f"\n### {title}\n\n" + "\n".join(f"- {line}" for line in lines) + "\n" if lines else ""
        )
    return text


def _row(promise: str, name: str, cells: List[Dict[str, Any]]) -> str:
    held = sum(not each["problems"] for each in cells)
    hangs, silent, lost = (sum(each[key] for each in cells) for key in ("hung", "silent", "lost"))
    return f"| {promise} | {name} | {len(cells)} | {held} | {hangs} | {silent} | {lost} |\n"
