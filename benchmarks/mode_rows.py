"""The table of modes: each training mode compared with the plain one, each decoder with OpenCV's.

Each mode and the baseline have processes of their own and alternate step by step. A mode that fails, or runs out of
memory, costs only its own row, which says why.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, NamedTuple

import cv2
import numpy as np

from benchmarks import timing
from benchmarks.dev.photographs import photographs
from benchmarks.group_rows import Group, places, training_group
from benchmarks.row import Row, Setting, contained
from benchmarks.synthetic import made_store
from pipeline import compat
from superglue_sift import sift

KEYPOINTS = 512
PAIRS = {"cuda": 64, "cpu": 2}  # per process and step
DECODED = 64  # photographs of 640x480 in a call of a decoder
PLAIN = "plain: one process, float32"


class Mode(NamedTuple):
    """Differences from the plain mode: keys of the section `train`, and the number of processes."""

    changes: Dict[str, Any]
    processes: int = 1


def modes(setting: Setting) -> Dict[str, Mode]:
    """By name, in the order of the table."""
    most = places(setting)
    counts = sorted({count for count in (1, 2, 4, 8, most) if count <= max(most, 2)})
    several = {f"DDP, {count} process{'es' * (count > 1)}": Mode({"parallel": "ddp"}, count) for count in counts}
    return {
        "DataParallel": Mode({"parallel": "dp"}),
        **several,
        "AMP, bfloat16": Mode({"precision": "bfloat16"}),
        "AMP, float16": Mode({"precision": "float16"}),
        f"DDP, {most} processes, AMP": Mode({"parallel": "ddp", "precision": "auto"}, most),
        "gradient accumulation, 2 parts": Mode({"accumulate": 2}),
        "torch.compile": Mode({"compile": True}),
        "loader: none (synthetic pairs)": Mode({"loader": "synthetic"}),
    }


def training(setting: Setting) -> Iterator[Row]:
    """Pairs per second of each mode of training."""
    with tempfile.TemporaryDirectory() as folder:
        store = made_store(Path(folder), KEYPOINTS)
        start = functools.partial(_training, setting, store)
        yield from _compared(setting, "modes", PLAIN, Mode({}), modes(setting), start)


def decoders(setting: Setting) -> Iterator[Row]:
    """Images per second of each decoder, and of the guides' loader of views."""
    with tempfile.TemporaryDirectory() as folder:
        jpegs = write_jpegs(setting, Path(folder) / "photographs")
        start = functools.partial(_decoding, setting, jpegs)
        one, two = "one thread", "two threads"  # as in the stage's workers and its DALI pipeline
        others = {f"decoder: torchvision, {one}": "torchvision", f"decoder: DALI, {two}": "dali"}
        views = {f"pairs of views: DALI, {two}": "dali-views"}
        for plain, way, ways in (
            (f"decoder: OpenCV, {one}", "opencv", others),
            (f"pairs of views: OpenCV, {one}", "opencv-views", views),
        ):
            modes_of = {name: Mode({"way": other}) for name, other in ways.items()}
            yield from _compared(setting, "decoders", plain, Mode({"way": way}), modes_of, start)
    yield from contained("decoders", "images handed to a worker", functools.partial(_handed, setting))


def _compared(
    setting: Setting, group: str, plain: str, first: Mode, others: Dict[str, Mode], start: Callable[[Mode], Group]
) -> Iterator[Row]:
    """A row of the baseline alone, then a row of each other mode, alternating with it."""
    base = start(first)
    try:
        alone = setting.timed({plain: base})[plain]
        spread = timing.interval([base.items / seconds for seconds in alone.wall])
        yield Row(group, plain, spread.value, base.unit, spread=spread)
        for name, mode in others.items():
            reason = _reason(setting, mode)
            if reason:
                yield Row(group, name, skipped=reason)
                continue
            made = functools.partial(_row, setting, name, mode, base, start, Row(group, plain))
            yield from contained(group, name, made)
    finally:
        base.close()


def _reason(setting: Setting, mode: Mode) -> str:
    """Why a mode cannot run here or has no effect; otherwise empty."""
    cuda, most = setting.device.type == "cuda", places(setting)
    if mode.changes.get("parallel") == "dp" and (not cuda or most < 2):
        return "needs two GPUs"
    if mode.changes.get("precision") == "float16" and not cuda:
        return "needs a GPU: its gradients are scaled there"
    if mode.processes > most:
        return f"needs {mode.processes} {'GPUs' if cuda else 'cores'}, there {'is 1' if most == 1 else f'are {most}'}"
    return compat.no_compiler(setting.device.type) if mode.changes.get("compile") else ""


def _row(
    setting: Setting, name: str, mode: Mode, base: Group, start: Callable[[Mode], Group], plain: Row
) -> Iterator[Row]:
    own = start(mode)
    try:
        taken = setting.timed({"base": base, "own": own})
    finally:
        own.close()
    each = {way: [t / part.items for t in taken[way].wall] for way, part in (("base", base), ("own", own))}
    rate, against = 1 / statistics.median(each["own"]), plain.what.split(": ")[-1]
    yield Row(plain.group, name, rate, own.unit, timing.speed_up(each["base"], each["own"]), against=against)


def _training(setting: Setting, store: Path, mode: Mode) -> Group:
    """A group whose call is a step. DataParallel's one process gets the pairs of all GPUs."""
    devices = mode.processes
    if mode.changes.get("parallel") == "dp":
        devices = places(setting) if setting.device.type == "cuda" else 1
    pairs = PAIRS[setting.device.type] * devices
    threads = max((os.cpu_count() or 1) // mode.processes, 1)
    changes = {"parallel": "single", **mode.changes}
    return training_group(setting, store, KEYPOINTS, pairs, changes, mode.processes, threads, ahead=True)


def _decoding(setting: Setting, jpegs: Path, mode: Mode) -> Group:
    """A group whose call decodes all photographs."""
    words = [sys.executable, "-m", "benchmarks.decode_rank", "--way", mode.changes["way"], "--folder", str(jpegs)]
    return Group(setting, words, 1, 1, DECODED, "images/s")


def _handed(setting: Setting) -> Iterator[Row]:
    """Pass decoded photographs to another process, as a shared decoder does, compared with their SIFT there."""
    gray = photographs(setting.images, 1)[0]
    detect = functools.partial(sift.extract, gray, KEYPOINTS)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(np.size, gray).result()
        ways = {"handed": lambda: pool.submit(np.size, gray).result(), "sift": detect}
        taken = setting.timed(ways)
    share = timing.speed_up(taken["sift"].wall, taken["handed"].wall)
    rate = 1 / statistics.median(taken["handed"].wall)
    note = f"{1 / share.value:.2%} of the time that SIFT of one view takes"
    yield Row("decoders", "640x480 handed to a worker by pickle", rate, "images/s", note=note)


def write_jpegs(setting: Setting, folder: Path) -> Path:
    """Write photographs of 640x480 as JPEG files, as in COCO."""
    folder.mkdir()
    found = photographs(setting.images, min(DECODED, 8))
    for number in range(DECODED):
        gray = found[number % len(found)]
        colour = cv2.merge([gray, cv2.GaussianBlur(gray, (0, 0), 2), gray])
        cv2.imwrite(str(folder / f"{number:03d}.jpg"), colour, [cv2.IMWRITE_JPEG_QUALITY, 95])
    return folder
