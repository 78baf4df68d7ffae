"""Evaluate matchers on a source of pairs: match, score, compute all metrics, and draw some pairs.

`evaluate` runs all of it. Nothing here writes a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import pandas as pd

from pipeline.errors import WorkError
from pipeline.evaluate import charts, estimators, metrics
from pipeline.evaluate.matchers import OURS, RATIO_TEST, MatcherSet
from pipeline.evaluate.pair_files import PosePairs
from pipeline.evaluate.pairs import (
    CALM,
    Condition,
    HeldOutPairs,
    LabeledPair,
    NegativePairs,
    PairSource,
    extract_scene_pairs,
    list_conditions,
)
from pipeline.evaluate.report import Results
from pipeline.evaluate.scoring import MatchOutcomes, PairScores, ScoringSettings, score_pair
from pipeline.workers import prefetch
from superglue_sift import drawing
from superglue_sift.environment import count_usable_cores
from superglue_sift.features.images import BadImage
from superglue_sift.progress import Progress

MAX_THREADS = 8  # Largest number of threads that load, and of threads that match and score
# How the captions of pictures begin
CAPTION_STARTS = {
    "best": "One of the best pairs",
    "median": "A typical pair",
    "worst": "One of the worst",
}


def evaluate(
    source: PairSource, title: str, matcher_set: MatcherSet, settings: ScoringSettings
) -> Results:
    """Evaluate all pairs of a source. Held-out photographs also have negative pairs.

    Args:
        source: the pairs.
        title: where the pairs come from, for the report.
        matcher_set: the compared matchers.
        settings: what is computed for each pair.

    Raises:
        WorkError: If no pair that is not disturbed can be read.
    """
    # Match and score. Held-out photographs also make negative pairs, of photographs with nothing in
    # common. The base class has no pairs.
    negative_source = NegativePairs(source) if isinstance(source, HeldOutPairs) else PairSource()
    total = sum(count for part in (source, negative_source) for _, count in part.scenes)
    with Progress(total=total, desc="pairs", unit="pair") as bar:
        all_scores, bad_scenes = match_and_score(source, matcher_set, settings, bar)
        # Negative pairs have the same photographs. `bad_scenes` lists those that cannot be read.
        negatives, _ = match_and_score(negative_source, matcher_set, settings, bar)
    # Group the pairs by condition. Pairs that are not disturbed have CALM.
    groups: Dict[Condition, List[PairScores]] = {}
    for scores in all_scores:
        groups.setdefault(scores.images.condition, []).append(scores)
    if CALM not in groups:
        first = ": ".join(bad_scenes[0]) if bad_scenes else "there is none"
        raise WorkError(f"no pair could be read of {len(source)} {source.unit}; the first: {first}")
    # Compute the metrics, and their intervals from resampled scenes.
    networks = list(matcher_set.networks)
    table, outcomes, values = tabulate(groups[CALM], networks)
    resampled_means = metrics.bootstrap_scenes(values, outcomes)
    summary = metrics.summarize(values, resampled_means)
    differences = metrics.compare(values, resampled_means, networks)
    calibration = metrics.compute_calibration(outcomes[OURS])
    # `outcomes` has only the networks, and the curves need the ratio test, too.
    curves = {
        name: metrics.compute_precision_recall_curve(
            [scores.outcomes[name] for scores in groups[CALM]]
        )
        for name in (OURS, RATIO_TEST)
    }
    # Count the matches of negative pairs. Every one is wrong. Their mean gets no interval.
    if negatives:
        negative_rows = [scores.rows for scores in negatives]
        by_matcher = metrics.make_table(negative_rows).groupby("matcher", sort=False)
        for name, rows in by_matcher:
            row = rows["value"].mean(), math.nan, math.nan, len(negatives)
            summary.loc[(name, "negative_matches", "", False), :] = row
        summary = summary.astype({"pairs": int})  # The new rows made floats of them
    # Of the disturbed pairs, keep only the means of the network and the ratio test.
    means = {}
    for condition in filter(groups.get, list_conditions()):
        *_, disturbed = tabulate(groups[condition], networks)
        disturbed = disturbed[[OURS, RATIO_TEST]]
        means[condition] = pd.DataFrame({"value": disturbed.mean(), "pairs": disturbed.count()})
    frames: Any = means  # The types of pandas know no tuples as keys
    robustness = pd.concat(frames, names=["condition", "level"]) if means else pd.DataFrame()
    return Results(
        title=title,
        unit=source.unit,
        table=table,
        values=values,
        metrics=summary,
        differences=differences,
        robustness=robustness,
        calibration=calibration,
        precision_recall=pd.concat(curves, names=["matcher"]),
        bad_images=bad_scenes,
        protocol=make_protocol(source, title, matcher_set, settings),
        pictures=draw_pictures(source, table, groups[CALM]),
    )


def match_and_score(
    source: PairSource, matcher_set: MatcherSet, settings: ScoringSettings, bar: Progress
) -> Tuple[List[PairScores], List[Tuple[str, str]]]:
    """Match and score all pairs of a source, in its order.

    Some threads load the next scenes, others match and score pairs.

    Args:
        source: the pairs.
        matcher_set: the matchers.
        settings: what is computed for each pair.
        bar: the line of progress, which counts pairs.

    Returns:
        The scores of all pairs, and (scene, reason) of each scene that could not be read.
    """
    bad_scenes = []

    def load(index: int) -> List[LabeledPair]:
        try:
            return extract_scene_pairs(source, index, matcher_set.evaluated.extract)
        except BadImage as error:
            bad_scenes.append((source.scenes[index][0], error.reason))
            return []

    def score(pair: LabeledPair) -> PairScores:
        return score_pair(pair, matcher_set.match(pair), matcher_set.thresholds, settings)

    # Threads suffice, because decoding, warping, SIFT, the networks and robust estimators release
    # the GIL.
    threads = min(count_usable_cores(), MAX_THREADS)
    all_scores = []
    with contextlib.closing(prefetch(load, range(len(source)), threads, threads)) as scenes:
        pairs = (pair for scene in scenes for pair in scene)
        with contextlib.closing(prefetch(score, pairs, threads, threads)) as scored:
            for scores in scored:
                all_scores.append(scores)
                bar.update(1)
    # Count the pairs of unreadable scenes as done.
    bar.update(sum(count for _, count in source.scenes) - len(all_scores))
    return all_scores, sorted(bad_scenes)


def tabulate(
    scores: Sequence[PairScores], networks: Sequence[str]
) -> Tuple[pd.DataFrame, Dict[str, List[MatchOutcomes]], pd.DataFrame]:
    """Join the scores of all pairs.

    Args:
        scores: the scores of the pairs.
        networks: the names of the networks.

    Returns:
        The long table, the outcomes of all matches of each pair by network, and what each pair
        contributes to each metric.
    """
    table = metrics.make_table([pair.rows for pair in scores])
    outcomes = {name: [pair.outcomes[name] for pair in scores] for name in networks}
    return table, outcomes, metrics.compute_pair_values(table, outcomes)


def choose_pictured_pairs(values: pd.DataFrame) -> Dict[int, str]:
    """Choose pairs of the network for the pictures: three around the median, two best, three worst.

    A pair with a smaller error is better. If the errors are equal, the pair with more correct
    matches is. Of the three around the median, the one in which the network is furthest ahead of
    the ratio test comes first.

    Args:
        values: the columns `error` and `correct`, with a row for each (matcher, number of the
            pair).

    Returns:
        The name of the picture, such as "best-1", by the number of the pair.
    """
    # Rank the numbers of the pairs from the network's best to its worst.
    ranked = values.loc[OURS].sort_values(["error", "correct"], ascending=[True, False]).index
    middle = max(len(ranked) // 2 - 1, 0)
    ahead = values["correct"][OURS] - values["correct"][RATIO_TEST]
    typical = sorted(ranked[middle : middle + 3], key=lambda number: -ahead[number])
    groups = {"median": typical, "best": ranked[:2], "worst": ranked[::-1][:3]}
    names: Dict[int, str] = {}
    for kind, numbers in groups.items():
        for index, number in enumerate(numbers, 1):
            names.setdefault(number, f"{kind}-{index}")
    return names


def draw_pictures(
    source: PairSource, table: pd.DataFrame, scores: Sequence[PairScores]
) -> List[Tuple[str, str, np.ndarray]]:
    """Draw the matches of the pairs of `choose_pictured_pairs`.

    Args:
        source: the source of the pairs, from which the images are loaded again, in color.
        table: the long table of all pairs that are not disturbed.
        scores: the scores of these pairs. The column `number` of the table is the index in them.

    Returns:
        Name, caption and pixels (H, W, 3) uint8 BGR of each picture.
    """
    # Tabulate matches, correct matches and the leading estimator's error by matcher and pair.
    detected = table[
        ~table["refined"] & table["estimator"].isin(["", metrics.get_leading_estimator(table)])
    ]
    values = detected.pivot(index=["matcher", "number"], columns="metric", values="value")
    unit = "degrees of pose error" if metrics.has_pose_errors(table) else "px of corner error"
    pictures = []
    for number, name in choose_pictured_pairs(values).items():
        pair = scores[number]
        image0, image1 = (
            source.load_color_image(pair.scene_index, image_index)
            for image_index in (pair.images.first, pair.images.second)
        )
        # Draw one panel for each matcher.
        panels = []
        captions = []
        for panel in pair.panels:
            row = values.loc[(panel.heading, number)]
            heading = charts.get_title(panel.heading)
            panels.append(dataclasses.replace(panel, heading=heading))
            captions.append(
                f"{heading}: {row['correct']:.0f} of {row['matches']:.0f} matches correct,"
                f" {row['error']:.2f} {unit}"
            )
        caption_start = CAPTION_STARTS[name.partition("-")[0]]
        caption = f"{caption_start} ({pair.images.name}). {'; '.join(captions)}."
        pictures.append((name, caption, drawing.draw_panels(image0, image1, panels)))
    return pictures


def make_protocol(
    source: PairSource, title: str, matcher_set: MatcherSet, settings: ScoringSettings
) -> Dict[str, Any]:
    """Make the content of protocol.json: the pairs, estimators, parameters and networks.

    Args:
        source: the pairs, which decide what is estimated.
        title: where the pairs come from.
        matcher_set: the compared matchers.
        settings: what is computed for each pair.
    """
    has_poses = isinstance(source, PosePairs)
    functions = estimators.POSE_ESTIMATORS if has_poses else estimators.ESTIMATORS
    names = functions if has_poses else settings.estimators
    ours = matcher_set.evaluated
    models = {
        name: {
            "digest": network.digest(),
            "network": network.info["model"],
            "step": network.info.get("step"),
            "threshold": network.threshold,
        }
        for name, network in matcher_set.networks.items()
    }
    # The docstring of an estimator describes it here.
    return {
        "pairs_from": title,
        "estimators": {name: functions[name].__doc__ for name in names},
        "params": settings.params.model_dump(),
        "matcher": {
            "max_keypoints": ours.max_keypoints,
            "network_keypoints": ours.network_keypoints,
            "resize": ours.resize,
        },
        "models": models,
    }
