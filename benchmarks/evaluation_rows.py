"""Rows of the evaluation: the cost of its parts, the whole compared with SIFT and matching, matching in batches."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
from typing import Any, Callable, Dict, Iterator, List, Sequence

import numpy as np

from benchmarks import plain, timing
from benchmarks.model_rows import forward_call
from benchmarks.row import Row, Setting
from benchmarks.stage_rows import one_opencv_thread, one_thread
from benchmarks.synthetic import made_batch
from pipeline.errors import RequestError
from pipeline.evaluate import inputs, matchers, protocol, scoring
from pipeline.evaluate.heldout import HeldOutPairs
from pipeline.image_sets.sources import open_manifest
from pipeline.parameters import params
from superglue_sift.images import BadImage
from superglue_sift.matcher import THRESHOLD
from superglue_sift.network.inference import fuse_for_inference
from superglue_sift.weights import load_model

EVALUATED = 32  # pairs
OUTSIDE = 0.05  # maximum fraction of the time


def evaluation(setting: Setting) -> Iterator[Row]:
    """Cost of a pair in `evaluate`, and the fraction outside SIFT and matching."""
    try:
        work = _Evaluation(setting)
    except RequestError as error:
        yield Row("evaluation", "evaluation", skipped=str(error))
        return
    for each in itertools.chain(work.parts(), work.whole()):
        yield dataclasses.replace(each, dim=work.dim)


class _Evaluation:
    """Pairs of held-out images and all matches, as in `evaluate`."""

    def __init__(self, setting: Setting) -> None:
        """Raises RequestError without images or for a wrong model."""
        images = open_manifest(setting.images)
        self.setting, self.device = setting, str(setting.device)
        self.asked = params.load("evaluate", setting.params)
        own = (
            load_model(setting.weights, self.device, matchers.SINKHORN_ITERATIONS)[0]
            if setting.weights
            else setting.model()
        )
        self.model, self.dim = fuse_for_inference(own), own.config.dim
        self.settings = scoring.Settings(self.asked)
        network = matchers.Network(self.model, THRESHOLD)
        self.matchers = matchers.Matchers({matchers.OURS: network}, self.device)
        entries = images.entries("test") or images.entries("val") or images.entries("train")
        self.source = HeldOutPairs(images, entries, self.asked, EVALUATED)
        self.scenes = list(self._loaded())
        self.pairs = self._found()
        if not self.pairs:
            raise RequestError(f"{setting.images}: no image could be read")
        self.answers = self.matchers.answers([known.pair for known in self.pairs], self.settings.batch)
        kind = "trained" if setting.weights else "untrained"
        mean = sum(len(known.pair.records0) for known in self.pairs) / len(self.pairs)
        self.name = f"{self.asked.width}x{self.asked.height}, mean {mean:.0f} keypoints, {kind}"

    def _loaded(self) -> Iterator[inputs.Scene]:
        """Views of all readable photographs."""
        for index in range(len(self.source)):
            with contextlib.suppress(BadImage):
                yield self.source.load(index)

    def _found(self) -> List[inputs.KnownPair]:
        """Pairs of SIFT keypoints of the views."""
        limit = self.asked.max_keypoints
        return [pair for index, scene in enumerate(self.scenes) for pair in inputs.pairs_of_scene(scene, index, limit)]

    def _matches(self, found: List[inputs.KnownPair]) -> List[Any]:
        given = [known.pair for known in found]
        return list(matchers.match_batches(self.model, given, self.settings.batch, self.device))

    def parts(self) -> Iterator[Row]:
        """Cost of each part on one core."""
        px = scoring.CORRECT_PX
        thresholds = self.matchers.thresholds

        def scored(names: Sequence[str]) -> None:
            for known, answers in zip(self.pairs, self.answers):
                scoring.score_pair(known, {name: answers[name] for name in names}, thresholds, self.settings)

        ways: Dict[str, Callable[[], object]] = {
            "views": lambda: list(self._loaded()),
            "SIFT": self._found,
            "matcher": lambda: self._matches(self.pairs),
            "baselines": lambda: [matchers.match_baselines(known.pair) for known in self.pairs],
            "truth": lambda: [scoring.true_matches(known.pair, known.truth, px) for known in self.pairs],
            "ours": lambda: scored([matchers.OURS]),
            "all": lambda: scored(matchers.MATCHERS),
        }
        with one_thread():  # `evaluate` keeps all cores busy, so the cost on one core counts
            taken = self.setting.timed(ways)
        # of each round
        each = {way: np.asarray(spent.wall) / len(self.pairs) for way, spent in taken.items()}
        matching = each["SIFT"] + each["matcher"]
        ours, compared = each["ours"], each["all"]
        each.update({way: each[way] - each["truth"] for way in ("ours", "all")})  # part of both
        note = "one thread: " + ", ".join(f"{way} {1e3 * np.median(t):.1f}" for way, t in each.items())
        others = matching + each["baselines"]
        total = 1e3 * float(np.median(each["views"] + others + compared))
        yield Row("evaluation", self.name, total, "ms/pair", note=note)
        for what, inside, outside in (
            ("our matcher alone", matching, ours),
            ("with three baselines, each by RANSAC and DLT", others, compared),
        ):
            share = timing.interval(outside / (inside + outside))
            rest = np.median((outside + each["views"]) / (inside + outside + each["views"]))
            note = f"{rest:.4f} with the making of the views"
            name, unit = f"outside matching and SIFT: {what}", "of the time"
            yield Row("evaluation", name, share.value, unit, spread=share, at_most=OUTSIDE, note=note)

    def whole(self) -> Iterator[Row]:
        """All rows of pairs.csv with all threads of `evaluate`, compared with views, SIFT and our matcher alone."""
        units = protocol.units_of(self.source, self.settings.batch)

        def bare() -> None:
            list(protocol.map_over_ranks(units, [], self._extract, self._matches, len))

        def whole() -> None:
            list(protocol.results_by_unit(self.source, self.matchers, self.settings))

        with one_opencv_thread():
            taken = self.setting.timed({"bare": bare, "whole": whole})
        ratio = timing.speed_up(taken["bare"].wall, taken["whole"].wall)
        rate = len(self.pairs) / statistics.median(taken["whole"].wall)
        what = f"evaluate, all threads, {self.name}"
        yield Row("evaluation", what, rate, "pairs/s", ratio, None, "views, SIFT and our matcher alone")

    def _extract(self, scenes: List[int]) -> List[inputs.KnownPair]:
        return inputs.extract(self.source, scenes, self.asked.max_keypoints)[0]


def batched(setting: Setting) -> Iterator[Row]:
    """Match cached pairs in batches, compared with the plain network one pair at a time."""
    own = setting.model().eval()
    model, twin = fuse_for_inference(own), plain.plain_from(own).to(setting.device)
    together = 4
    whole = made_batch(512, together).to(setting.device)
    single = made_batch(512, 1).to(setting.device)
    alone = forward_call(twin, single)
    ways = {"plain": lambda: [alone() for _ in range(together)], "ours": forward_call(model, whole)}
    taken = setting.timed(ways)
    ratio = timing.speed_up(taken["plain"].wall, taken["ours"].wall)
    cpu = timing.speed_up(taken["plain"].cpu, taken["ours"].cpu)
    rate = together / statistics.median(taken["ours"].wall)
    yield Row("evaluation", "matcher, N = 512, batch 4", rate, "pairs/s", ratio, cpu, "plain, one by one", 1.6)
