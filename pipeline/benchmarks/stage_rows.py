"""Rows of whole stages: keypoints beside bare OpenCV, evaluation, and two JPEG files to their matches."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterator, List

import cv2
import torch

from pipeline import params
from pipeline.benchmarks import plain, timing
from pipeline.benchmarks.keypoint_rows import OF_FLOOR, OF_PLAIN, keypoint_rows
from pipeline.benchmarks.model_rows import forward_call
from pipeline.benchmarks.photographs import photographs
from pipeline.benchmarks.row import Row, Setting
from pipeline.errors import RequestError
from pipeline.images.sources import open_manifest
from pipeline.matching.inference import folded

EVALUATED = 32  # pairs
OUTSIDE = "target: at most 0.05"
PAPER = (640, 480)  # views of the paper's training; each SIFT call there gives 72 MB back unless it is kept


def keypoints(setting: Setting) -> Iterator[Row]:
    """The stage's own pool beside bare OpenCV and a plain pool, on views as set and of the paper's size."""
    from pipeline.extraction.pool import cores

    try:
        images = open_manifest(setting.images)
        settings = params.load("keypoints", setting.params)
    except RequestError as error:
        yield Row("keypoints", "keypoint stage", skipped=str(error))
        return
    entries = images.entries("train")[: max(4, 8 * cores())]
    for width, height in sorted({(settings.width, settings.height), PAPER}):
        sized = settings.model_copy(update={"width": width, "height": height})
        yield from map(_keypoint_row, keypoint_rows(images, entries, sized, cores(), 2))


def _keypoint_row(row: Dict[str, Any]) -> Row:
    """Ours is to come near the floor and to leave a plain pool behind; the note says what each way spends."""
    floor, plain_ = (
        timing.Ratio(row[key], row[f"{key}_low"], row[f"{key}_high"]) for key in ("of_floor", "of_plain")
    )
    note = (
        f"{plain_} of plain (target {OF_PLAIN:g}), {row['cpu_ms']} ms and {row['faults']} page faults a view"
    )
    target = OF_FLOOR if row["what"].startswith("keypoints ours") else None
    speed = row["views_per_second"]
    return Row("keypoints", row["what"], speed, "views/s", floor, None, "floor", target, note)


def store(setting: Setting) -> Iterator[Row]:
    """Random access to a store of 512 keypoints a view; `setting` says nothing about it."""
    from pipeline.benchmarks.store_rows import store_rows

    del setting
    for row in store_rows():
        bound = f"; target: at most {row['at most']}" if row["at most"] else ""
        against = (
            f"; {row['of_bare']} of a bare map [{row['of_bare_low']}, {row['of_bare_high']}]"
            if row["of_bare"]
            else ""
        )
        yield Row(
            "store", row["what"], row["microseconds"], "us", note=f"one core, hot cache{against}{bound}"
        )


def evaluation(setting: Setting) -> Iterator[Row]:
    """What a pair costs `evaluate`, and the share of it outside SIFT and matching."""
    from pipeline.evaluation import matchers
    from pipeline.evaluation.heldout import HeldOutPairs
    from pipeline.evaluation.model import load_model
    from pipeline.evaluation.pairs import pairs_of_scene
    from pipeline.evaluation.run import Settings, match_others, score_pair
    from pipeline.evaluation.scoring import Limits

    try:
        images = open_manifest(setting.images)
        model = folded(
            load_model(setting.weights, str(setting.device))[0] if setting.weights else setting.model()
        )
    except RequestError as error:
        yield Row("evaluation", "evaluation", skipped=str(error))
        return
    asked = params.load("evaluate", setting.params)
    limits = Limits(asked.correct_px, asked.ransac_px, asked.ransac_iterations)
    settings = Settings(asked.max_keypoints, asked.threshold, asked.ratio, limits)
    source = HeldOutPairs(images, images.entries("test") or images.entries("train"), asked, EVALUATED)
    units = range(len(source))
    found = [pair for index in units for pair in pairs_of_scene(source, index, asked.max_keypoints)]
    batches = matchers.batches_of(found, settings.batch)
    answers = list(matchers.match_superglue(model, batches, str(setting.device)))
    with _one_thread():
        taken = setting.timed(
            {
                "SIFT": lambda: [pairs_of_scene(source, index, asked.max_keypoints) for index in units],
                "matcher": lambda: list(matchers.match_superglue(model, batches, str(setting.device))),
                "baselines": lambda: [match_others(pair, settings) for pair in found],
                "ours": lambda: [_score_ours(pair, answer, settings) for pair, answer in answers],
                "score": lambda: [score_pair(pair, answer, settings) for pair, answer in answers],
            }
        )
    each = {way: statistics.median(spent.wall) / len(found) for way, spent in taken.items()}
    counts = sum(len(pair.keypoints0) for pair in found) / len(found)
    kind = "trained" if setting.weights else "untrained"
    name = f"{asked.width}x{asked.height}, mean {counts:.0f} keypoints, {kind}"
    parts = ", ".join(f"{way} {1e3 * spent:.1f}" for way, spent in each.items())
    work = each["SIFT"] + each["matcher"]
    yield Row("evaluation", name, 1e3 * (work + each["score"]), "ms/pair", note=f"one thread: {parts}")
    for what, other, matched in (
        ("our matcher alone", each["ours"], 0.0),
        ("with three baselines, each by RANSAC and DLT", each["score"], each["baselines"]),
    ):
        share = (other - matched) / (work + other)
        yield Row("evaluation", f"outside matching and SIFT: {what}", share, "of the time", note=OUTSIDE)


@contextlib.contextmanager
def _one_opencv_thread() -> Iterator[None]:
    """As `match` and `evaluate` have it, which run SIFT in threads of their own."""
    before = cv2.getNumThreads()
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(before)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Of OpenCV and of torch: in `evaluate` all parts run side by side, so what counts is what each costs a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _one_opencv_thread():
            yield
    finally:
        torch.set_num_threads(before)


def _score_ours(pair: Any, answer: Any, settings: Any) -> None:
    """What `score_pair` does, without the baselines."""
    from pipeline.evaluation import confidence, scoring

    truth0 = scoring.true_matches(pair, settings.limits.correct_px)
    scoring.score(pair, "superglue", answer.above(settings.threshold), truth0, settings.limits)
    confidence.judge(pair, answer, truth0, settings.limits.correct_px)


def files(setting: Setting) -> Iterator[Row]:
    """Two JPEG files to matches at 512 keypoints, SIFT of both views in two threads."""
    from pipeline.match import keypoints_of
    from pipeline.pairs.batch import Pair, from_pairs

    model = folded(setting.model())
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool, _one_opencv_thread():
        paths = _jpegs(Path(folder), photographs(setting.images, 1))

        def call() -> None:
            sides = list(pool.map(lambda path: keypoints_of(path, 512, 0), paths))
            pair = Pair(sides[0][0], sides[1][0], sides[0][1], sides[1][1])
            forward_call(model, from_pairs([pair]).to(setting.device))()

        taken = setting.timed({"call": call})["call"]
    spread = timing.interval(taken.wall)
    note = f"[{spread.low:.3f}, {spread.high:.3f}] s; target: at most 0.25 on 2 cores"
    yield Row("latency", "two JPEGs to matches, 512 keypoints", spread.value, "s", note=note)


def _jpegs(folder: Path, images: List) -> List[Path]:
    image = images[0]
    turned = cv2.warpAffine(image, cv2.getRotationMatrix2D((320, 240), 10, 1.0), (640, 480))
    paths = [folder / "a.jpg", folder / "b.jpg"]
    for path, view in zip(paths, (image, turned)):
        cv2.imwrite(str(path), view)
    return paths


def batched_evaluation(setting: Setting) -> Iterator[Row]:
    """Matching cached pairs in batches, beside the plain network one pair at a time."""
    from pipeline.benchmarks.made import made_batch

    own = setting.model().eval()
    model, twin = folded(own), plain.plain_from(own).to(setting.device)
    pairs = 4
    whole = made_batch(512, pairs).to(setting.device)
    single = made_batch(512, 1).to(setting.device)
    alone = forward_call(twin, single)
    ways = {"plain": lambda: [alone() for _ in range(pairs)], "ours": forward_call(model, whole)}
    taken = setting.timed(ways)
    ratio = timing.speed_up(taken["plain"].wall, taken["ours"].wall)
    cpu = timing.speed_up(taken["plain"].cpu, taken["ours"].cpu)
    rate = pairs / statistics.median(taken["ours"].wall)
    yield Row(
        "evaluation", "matcher, N = 512, batch 4", rate, "pairs/s", ratio, cpu, "plain, one by one", 1.6
    )
