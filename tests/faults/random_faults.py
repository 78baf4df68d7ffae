"""One random fault: disturb a stage once or twice, repeat it until it succeeds, and compare its
bytes.

A cell is a function of its number and the seed. Its result is a `Found`; each problem is a broken
promise.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import psutil

from faults.group import Outcome, fork, rendezvous, wait
from faults.stages import Base, Stage, differing, digests, files, finished, same_content
from pipeline.processes.signals import STOP_SIGNALS
from superglue_sift.weights import BadCheckpoint

LONGEST = 120  # seconds; a longer start counts as hung
STARTS = 4  # maximum of undisturbed starts after the fault
MISSES = 8  # moments tried until one comes before the stage ends
Environment = Sequence[Tuple[str, str]]


class Found(NamedTuple):
    """Result of a cell. silent: the stage succeeded with other bytes; lost: bytes missing,
    different or redone.
    """

    stage: str
    fault: str
    struck: bool
    problems: List[str]
    hung: bool = False
    silent: bool = False
    lost: int = 0
    codes: Sequence[List[int]] = ()
    seconds: float = 0.0


def start(
    stage: Stage, folder: Path, log: Path, environment: Environment = (), tracked: bool = False
) -> List[int]:
    """Fork the processes of a stage in `folder`; returns their ids."""
    meeting = list(rendezvous().items()) if len(stage.ranks) > 1 else []
    ranks = stage.ranks
    return [
        fork(r.main, r.arguments, log, folder, [*r.environment, *meeting, *environment], tracked)
        for r in ranks
    ]


class Cell:
    """A stage in its folder, and its results so far."""

    def __init__(self, base: Base, stage: Stage, draw: random.Random) -> None:
        self.base = base
        self.stage = stage
        self.draw = draw
        self.expected = base.expected(stage)
        self.log = base.logs / "cell"
        self.problems: List[str] = []
        self.codes: List[List[int]] = []
        self.hung = self.silent = False
        self.lost = 0
        self.fresh()

    def fresh(self) -> None:
        """Start over with an empty folder."""
        self.folder = self.base.cell(self.stage)
        self.log.write_text("")
        self.codes = []

    def start(self, environment: Environment = (), tracked: bool = False) -> List[int]:
        return start(self.stage, self.folder, self.log, environment, tracked)

    def wait(self, pids: List[int]) -> Outcome:
        longest = LONGEST * (3 if self.stage.name == "launcher" else 1)
        outcome = wait(pids, longest)
        self.codes.append(outcome.codes)
        if outcome.hung:
            self.hung = True
            self.problems.append(f"hangs: no end within {longest} s")
        return outcome

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def no_traceback(self) -> None:
        if "Traceback" in self.said():
            last = [line for line in self.said().splitlines() if line.strip()][-1]
            self.problems.append(f"a traceback: {last[:200]}")

    def finish(self, tracked: bool = False, environment: Environment = ()) -> None:
        """Repeat the command until it ends with 0, then compare. Correct files must not be computed
        again.
        """
        kept = self.right_so_far()
        for _ in range(STARTS):
            if not any(self.wait(self.start(environment, tracked)).codes):
                break
        else:
            last = ([line for line in self.said().splitlines() if line.strip()] or [""])[-1]
            self.problems.append(f"no success after {STARTS} more starts: {last[:200]}")
            return
        self.compare()
        redone = [
            path
            for path, stamp in kept.items()
            if not path.exists() or path.stat().st_mtime_ns != stamp
        ]
        if redone:
            self.lost += sum(path.stat().st_size for path in redone if path.exists())
            self.problems.append(
                f"computed again although intact: {', '.join(path.name for path in redone[:3])}"
            )

    def right_so_far(self) -> Dict[Path, int]:
        """Lasting files that are finished and correct, with their modification times."""
        found = digests(self.folder, self.stage.lasting)
        right = [
            self.folder / name
            for name, digest in found.items()
            if self.expected.get(name) == digest
        ]
        right = [path for path in right if finished(path)]
        return {path: path.stat().st_mtime_ns for path in right}

    def compare(self) -> None:
        """Compare the bytes of a stage that succeeded with those of an undisturbed run."""
        wrong = differing(digests(self.folder, self.stage.made), self.expected)
        if wrong:
            self.silent = True
            self.lost += sum(size_of(self.folder / name) for name in wrong)
            self.problems.append(f"other bytes: {', '.join(wrong[:4])}")

    def found(self, fault: str, struck: bool, began: float) -> Found:
        seconds = round(time.monotonic() - began, 2)
        about = (self.hung, self.silent, self.lost, self.codes, seconds)
        return Found(self.stage.name, fault, struck, self.problems, *about)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


class Clock:
    """Duration of an undisturbed start of each stage on this machine; moments of faults are drawn
    within it.
    """

    def __init__(self) -> None:
        self.seconds: Dict[str, float] = {}

    def note(self, name: str, seconds: float) -> None:
        self.seconds[name] = 0.7 * self.seconds.get(name, seconds) + 0.3 * seconds

    def moment(self, name: str, draw: random.Random, miss: int) -> float:
        """Seconds after the start, earlier after each draw that came too late."""
        return draw.random() * self.seconds.get(name, 1.0) * 0.8**miss


def processes_of(pids: Sequence[int]) -> List[psutil.Process]:
    """Those of these processes that still run, and their descendants."""
    found = []
    for pid in pids:
        try:
            own = psutil.Process(pid)
            found += [own, *own.children(recursive=True)]
        except psutil.Error:
            continue
    return [each for each in found if alive(each)]


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def disturbed(
    cell: Cell, clock: Clock, strike: Callable[[List[int]], bool], tracked: bool = False
) -> bool:
    """Start the stage and strike at a random moment, repeatedly until that is before the end;
    False: it never was.
    """
    for miss in range(MISSES):
        began = time.monotonic()
        pids = cell.start(tracked=tracked)
        moment = clock.moment(cell.stage.name, cell.draw, miss)
        while time.monotonic() - began < moment and processes_of(pids):
            time.sleep(0.002)
        there = processes_of(pids)
        struck = strike(pids)
        outcome = cell.wait(pids)
        none_left(cell, there)
        if struck:
            return True
        clock.note(cell.stage.name, time.monotonic() - began)
        if any(outcome.codes):
            cell.problems.append(f"failed without a fault: {cell.said()[-300:]}")
            return False
        cell.fresh()
    return False


def none_left(cell: Cell, processes: List[psutil.Process]) -> None:
    """Check that no process outlives its parent, except for the seconds in which it only
    imports.
    """
    deadline = time.monotonic() + 60
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for each in filter(alive, processes):
        cell.problems.append(f"process {each.pid} outlives its parent")
        each.kill()


def kill(cell: Cell, clock: Clock) -> Tuple[str, bool]:
    """SIGKILL of any process at any moment; sometimes of the next start too."""

    def strike(pids: List[int]) -> bool:
        there = processes_of(pids)
        if there:
            cell.draw.choice(there).kill()
        return bool(there)

    struck = disturbed(cell, clock, strike)
    if struck and cell.draw.random() < 0.25:
        pids = cell.start()
        time.sleep(clock.moment(cell.stage.name, cell.draw, 0))
        strike(pids)
        cell.wait(pids)
    cell.finish()
    return "SIGKILL", struck


def stop(cell: Cell, clock: Clock) -> Tuple[str, bool]:
    """SIGTERM, SIGINT or SIGUSR1 to one process or to all, those that were started last first."""
    number = cell.draw.choice((signal.SIGTERM, signal.SIGTERM, *STOP_SIGNALS))
    to_all = cell.draw.random() < 0.5
    training = cell.stage.name.startswith("train")
    began_training: List[bool] = []

    def strike(pids: List[int]) -> bool:
        there = processes_of(pids)
        began_training.append("pairs a step" in cell.said())
        leaders = [each for each in there if each.pid in pids]
        for each in reversed(there) if to_all else [cell.draw.choice(leaders)] if leaders else []:
            try:
                each.send_signal(number)
            except psutil.Error:
                continue
        return bool(leaders)

    struck = disturbed(cell, clock, strike)
    if struck and not cell.hung:
        after_stop(cell, training and began_training[-1])
    cell.finish()
    return f"{signal.Signals(number).name} to {'all' if to_all else 'one'}", struck


def after_stop(cell: Cell, in_steps: bool) -> None:
    """Check that a training that was in its steps ended with 143 and a checkpoint, or finished,
    without a traceback.
    """
    cell.no_traceback()
    codes = set(cell.codes[-1])
    if not in_steps:
        return
    saved = files(cell.folder, ("checkpoints/*/step-*.safetensors",))
    if not codes <= {0, 143} or (codes != {0} and not saved):
        cell.problems.append(
            f"ended with {sorted(codes)} and {len(saved)} checkpoints instead of 143 and one"
        )


def full_disk(cell: Cell, clock: Clock) -> Tuple[str, bool]:
    """The disk has space for a part of the stage's output; then it has enough again."""
    ballast = cell.base.work / "ballast"
    wanted = sum(size_of(path) for path in cell.base.folder.rglob("*") if path.is_file()) // 2
    struck = False
    for miss in range(MISSES):
        disk = os.statvfs(cell.base.work)
        free = int(cell.draw.random() * wanted * 0.5**miss)
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(disk.f_bavail * disk.f_frsize - free, 1))
        outcome = cell.wait(cell.start())
        ballast.unlink()
        if any(outcome.codes):
            struck = True
            break
        cell.fresh()
    if struck:
        cell.no_traceback()
        if not any(
            words in cell.said() for words in ("No space left", "disk is full", "make room")
        ):
            cell.problems.append(f"the message does not name the disk: {cell.said()[-200:]}")
    cell.finish()
    return "disk full", struck


def damage(path: Path, draw: random.Random) -> str:
    """Flip one bit, truncate the file, or zero a part of it; returns which."""
    content = bytearray(path.read_bytes())
    how = draw.choice(("flipped", "flipped", "torn", "zeroed"))
    at = draw.randrange(len(content))
    before = bytes(content)
    if how == "flipped":
        content[at] ^= 1 << draw.randrange(8)
    elif how == "torn":
        del content[at:]
    else:
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    if bytes(content) == before:
        content[at] ^= 1
    path.unlink()  # not through a link into somebody's cache
    path.write_bytes(bytes(content))
    return how


def kill_all(pids: List[int]) -> bool:
    for each in processes_of(pids):
        each.kill()
    return True


def torn(cell: Cell, clock: Clock) -> Tuple[str, bool]:
    """Damage an output of a finished or killed start, an input, or a cached file."""
    if cell.draw.random() < 0.5:
        disturbed(cell, clock, kill_all)
    else:
        cell.wait(cell.start())
    inputs = files(cell.folder, cell.stage.read)
    there = [path for path in {*inputs, *files(cell.folder, cell.stage.made)} if size_of(path)]
    if not there:
        return "damaged file", False
    victim = cell.draw.choice(sorted(there))
    good = victim.read_bytes()
    how = damage(victim, cell.draw)
    before = len(cell.said())
    outcome = cell.wait(cell.start())
    lists = [path.read_text(errors="replace") for path in cell.folder.glob("reports/*/*.csv")]
    name = victim.name
    said = "\n".join((*lists, cell.said()[before:]))
    if "Traceback" in said:
        cell.problems.append(f"a traceback over {name}: {said.splitlines()[-1][:200]}")
    wrong = differing(digests(cell.folder, cell.stage.made), cell.expected)
    refused = (
        victim not in inputs and not any(outcome.codes) and still_good(cell, victim, good, wrong)
    )
    if not any(outcome.codes) and wrong and name not in said:
        cell.silent = True
        cell.lost += sum(size_of(cell.folder / each) for each in wrong)
        cell.problems.append(f"{name} {how}: no message, and other bytes in {', '.join(wrong[:3])}")
    elif any(outcome.codes) and victim.stem not in said and name not in said:
        cell.problems.append(f"{name} {how}: the message does not name it: {said.strip()[-200:]}")
    if any(outcome.codes) or wrong:  # detected: the user restores the file or removes the outputs
        cell.folder = restored(cell, victim, good)
        cell.finish()
    where = victim.relative_to(cell.folder).parts[0]
    return f"{how} {where}{', which its reader refuses' * refused}", True


def still_good(cell: Cell, victim: Path, good: bytes, wrong: List[str]) -> bool:
    """Remove a damaged file that the command did not touch from `wrong` if nobody can use it
    unknowingly.

    Returns True if its reader refuses it; else the reader finds the earlier content.
    """
    name = victim.relative_to(cell.folder).as_posix()
    if name not in wrong:
        return False
    refused = False
    try:
        same = same_content(victim, good)
    except (ValueError, BadCheckpoint):
        same = refused = True
    if same:
        wrong.remove(name)
    return refused


def restored(cell: Cell, victim: Path, good: bytes) -> Path:
    """The cell's folder with the damaged file restored if it is an input, else removed."""
    if victim in files(cell.folder, cell.stage.read):
        victim.write_bytes(good)
        for path in files(cell.folder, cell.stage.made):
            path.unlink()
    else:
        victim.unlink(missing_ok=True)
    return cell.folder


def leaving_node(cell: Cell, clock: Clock) -> Tuple[str, bool]:
    """One of two nodes without a shared folder is killed, and returns with an empty disk."""
    import shutil

    gone = cell.draw.randrange(2)

    def strike(pids: List[int]) -> bool:
        there = [each for each in processes_of(pids) if each.pid == pids[gone]]
        for each in there:
            each.kill()
        return bool(there)

    struck = disturbed(cell, clock, strike)
    for name in ("checkpoints", "reports"):
        shutil.rmtree(cell.folder / ("other" if gone else "") / name, ignore_errors=True)
    cell.finish()
    return f"node {gone} returns empty", struck


def run(
    base: Base,
    clock: Clock,
    stage: Stage,
    fault: Callable[[Cell, Clock], Tuple[str, bool]],
    seed: str,
) -> Found:
    """Run one cell, a function of its seed except for the load of the machine."""
    began = time.monotonic()
    cell: Optional[Cell] = None
    try:
        cell = Cell(base, stage, random.Random(seed))
        clock.seconds.setdefault(stage.name, base.seconds[stage.name])
        return cell.found(*fault(cell, clock), began)
    except (AssertionError, OSError) as error:
        problem = f"{type(error).__name__}: {str(error)[:300]}"
        print(problem, file=sys.stderr)
        return Found(
            stage.name, fault.__name__, True, [problem], seconds=round(time.monotonic() - began, 2)
        )
