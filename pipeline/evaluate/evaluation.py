"""Evaluate matchers on a source of pairs: match, score, compute all metrics, and draw some pairs.

`evaluate_source` runs all of it. Nothing here writes a file.
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import pandas as pd

from pipeline import provenance
from pipeline.errors import WorkError
from pipeline.evaluate import estimators, metrics, report, scoring
from pipeline.evaluate.matchers import OURS, RATIO_TEST, MatcherSet, MatchesByMatcher
from pipeline.evaluate.pairs import (
    HeldOutPairs,
    LabeledPair,
    NegativePairs,
    PairSource,
    PosePairs,
    extract_scene_pairs,
    make_disturbed_sources,
)
from pipeline.evaluate.report import Results
from pipeline.evaluate.scoring import MatchOutcomes, Row, ScoringSettings, score_pair
from pipeline.workers import prefetch
from superglue_sift import drawing
from superglue_sift.features.images import BadImage
from superglue_sift.files import compute_file_sha256
from superglue_sift.progress import Progress

BATCH = 8  # Number of pairs in one pass of a network
MAX_THREADS = 8  # Largest number of threads that load, and of threads that score
# How the captions of pictures begin
CAPTION_STARTS = {
    "best": "One of the best pairs",
    "median": "A typical pair",
    "worst": "One of the worst",
}
# A function of a pair and of its matches by matcher
Score = Callable[[LabeledPair, MatchesByMatcher], Any]
# `LabeledPair.indices`, the rows of the table, and the outcomes of the matches by network
PairScores = Tuple[Tuple[int, ...], List[Row], Dict[str, MatchOutcomes]]
# Attributes of the evaluated matcher that protocol.json has
PROTOCOL_ATTRIBUTES = ("max_keypoints", "network_keypoints", "resize")


def evaluate_source(
    source: PairSource,
    title: str,
    matcher_set: MatcherSet,
    settings: ScoringSettings,
    robustness: int,
) -> Results:
    """Evaluate all pairs of a source, then its negative and its disturbed pairs.

    Only held-out photographs have negative and disturbed pairs.

    Args:
        source: the pairs.
        title: where the pairs come from, for the report.
        matcher_set: the compared matchers.
        settings: what is computed for each pair.
        robustness: number of photographs that are disturbed.

    Raises:
        WorkError: If no pair can be read.
    """
    # List all the work first, so that one bar shows all of it.
    negatives = []
    disturbed = []
    if isinstance(source, HeldOutPairs):
        negatives = [NegativePairs(source)]
        disturbed = list(make_disturbed_sources(source, robustness))
    sources = [source, *negatives, *(variant for _, _, variant in disturbed)]
    total = sum(count for pair_source in sources for _, count in pair_source.scenes)
    score = functools.partial(score_with_indices, matcher_set.thresholds, settings)
    with Progress(total=total, desc="pairs", unit="pair") as bar:
        scores, bad_images = match_and_score(source, matcher_set, score, bar)
        if not scores:
            first = ": ".join(bad_images[0])
            raise WorkError(f"none of the {len(source)} images could be read; the first: {first}")
        # Disturb the second views in each way at each level, and keep only the means.
        means = {}
        for name, level, variant in disturbed:
            variant_scores, _ = match_and_score(variant, matcher_set, score, bar)
            if variant_scores:
                means[name, level] = compute_means(variant_scores, matcher_set)
        # Match unrelated photographs, where every match is wrong.
        count = functools.partial(count_matches, matcher_set)
        counts: List[Dict[str, int]] = []
        for negative_source in negatives:
            counts += match_and_score(negative_source, matcher_set, count, bar)[0]
    results = compute_results(title, source.unit, scores, counts, means, matcher_set)
    protocol = make_protocol(source, title, matcher_set, settings)
    pair_indices = [indices for indices, *_ in scores]
    pictures = draw_pictures(source, matcher_set, results.table, pair_indices)
    return results._replace(bad_images=bad_images, protocol=protocol, pictures=pictures)


def match_and_score(
    source: PairSource, matcher_set: MatcherSet, score: Score, bar: Progress
) -> Tuple[List[Any], List[Tuple[str, str]]]:
    """Match and score all pairs of a source, in its order.

    Threads load and score, and the caller's thread runs the networks.

    Args:
        source: the pairs.
        matcher_set: the matchers.
        score: a function of a pair and of its matches by matcher.
        bar: the line of progress, which counts pairs.

    Returns:
        What `score` returned for each pair, and (scene, reason) of each scene that could not be
        read.
    """
    bad_scenes: List[Tuple[str, str]] = []
    counts = [count for _, count in source.scenes]
    step = max(1, BATCH // max(counts, default=1))  # Number of scenes that are matched together
    starts = range(0, len(source), step)  # The first scene of each batch

    def load_pairs(start: int) -> List[LabeledPair]:
        """Load the pairs of the batch that begins with the scene `start`."""
        labeled_pairs = []
        for index in range(len(source))[start : start + step]:
            try:
                labeled_pairs += extract_scene_pairs(source, index, matcher_set.extract)
            except BadImage as error:
                bad_scenes.append((source.scenes[index][0], error.reason))
        return labeled_pairs

    def score_pairs(batch: Tuple[List[LabeledPair], List[MatchesByMatcher]]) -> List[Any]:
        return list(map(score, *batch))

    # Threads suffice, because decoding, warping, SIFT and robust estimators release the GIL.
    threads = min(os.cpu_count() or 1, MAX_THREADS)
    # The networks run where the loop below asks for the next scores.
    batches = (
        (labeled_pairs, matcher_set.match(labeled_pairs, BATCH))
        for labeled_pairs in prefetch(load_pairs, starts, threads, threads)
    )
    scores = []
    for start, batch_scores in zip(starts, prefetch(score_pairs, batches, threads, threads)):
        scores += batch_scores
        bar.update(sum(counts[start : start + step]))
    return scores, sorted(bad_scenes)


def score_with_indices(
    thresholds: Mapping[str, float],
    settings: ScoringSettings,
    labeled_pair: LabeledPair,
    matches_by_matcher: MatchesByMatcher,
) -> PairScores:
    """Score all matchers on one pair by `score_pair`. Return also the pair's indices.

    Args:
        thresholds: the confidence above which a match counts, by matcher.
        settings: what is computed.
        labeled_pair: the pair and its ground truth.
        matches_by_matcher: all matches of each matcher.
    """
    rows, outcomes = score_pair(labeled_pair, matches_by_matcher, thresholds, settings)
    return labeled_pair.indices, rows, outcomes


def count_matches(
    matcher_set: MatcherSet, _: LabeledPair, matches_by_matcher: MatchesByMatcher
) -> Dict[str, int]:
    """Return how many matches of each matcher count, on a pair of unrelated photographs.

    The pair itself is not used. `match_and_score` gives it to every function of this kind.
    """
    counted_matches = matcher_set.apply_thresholds(matches_by_matcher)
    return {name: len(matches) for name, matches in counted_matches.items()}


def tabulate(
    scores: Sequence[PairScores], matcher_set: MatcherSet
) -> Tuple[pd.DataFrame, Dict[str, List[MatchOutcomes]], pd.DataFrame]:
    """Join the scores of all pairs.

    Returns:
        The long table, the outcomes of all matches of each pair by network, and what each pair
        contributes to each metric.
    """
    _, rows, outcomes = zip(*scores)
    table = metrics.make_table(rows)
    by_network = {name: [pair[name] for pair in outcomes] for name in matcher_set.networks}
    return table, by_network, metrics.compute_pair_values(table, by_network)


def compute_means(scores: Sequence[PairScores], matcher_set: MatcherSet) -> pd.DataFrame:
    """Return the mean and the number of pairs of each metric, of the network and the ratio test."""
    *_, values = tabulate(scores, matcher_set)
    values = values[[OURS, RATIO_TEST]]
    return pd.DataFrame({"value": values.mean(), "pairs": values.count()})


def compute_results(
    title: str,
    unit: str,
    scores: Sequence[PairScores],
    counts: Sequence[Dict[str, int]],
    means: Mapping[Tuple[str, float], pd.DataFrame],
    matcher_set: MatcherSet,
) -> Results:
    """Compute all metrics, with their intervals and differences.

    Args:
        title: where the pairs come from.
        unit: the plural noun of the scenes.
        scores: the scores of all pairs.
        counts: the number of matches of each matcher, for each negative pair.
        means: the tables of `compute_means` by condition and level of disturbance.
        matcher_set: the compared matchers.
    """
    table, by_network, values = tabulate(scores, matcher_set)
    samples = metrics.resample_scenes(values, by_network)
    summary = metrics.summarize(values, samples)
    for name, mean in pd.DataFrame(counts).mean().items():
        row = mean, math.nan, math.nan, len(counts)
        summary.loc[(name, "negative_matches", "", False), :] = row
    frames: Any = dict(means)  # Pandas has a narrower type for the names of the levels
    return Results(
        title,
        unit,
        table,
        values,
        summary.astype({"pairs": int}),
        metrics.compare(values, samples, list(matcher_set.networks)),
        pd.concat(frames, names=["condition", "level"]) if means else pd.DataFrame(),
        metrics.compute_calibration(by_network[OURS]),
    )


def choose_pictured_pairs(values: pd.DataFrame) -> Dict[int, str]:
    """Choose three median, two best and three worst pairs of the network for the pictures.

    They are in the order of the pictures. A pair with a smaller error is better. If the errors are
    equal, the pair with more correct matches is. Of the three median pairs, the one in which the
    network is furthest ahead of the ratio test comes first.

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
    source: PairSource,
    matcher_set: MatcherSet,
    table: pd.DataFrame,
    pair_indices: Sequence[Tuple[int, ...]],
) -> List[Tuple[str, str, np.ndarray]]:
    """Draw the matches of the pairs of `choose_pictured_pairs`.

    Args:
        source: the source of the pairs, from which the images are loaded again.
        matcher_set: the matchers, which match these pairs again.
        table: the long table of all pairs.
        pair_indices: `LabeledPair.indices` of all pairs, in the order of the table.

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
    # The results keep no images, so each pair is loaded and matched again.
    for number, name in choose_pictured_pairs(values).items():
        scene, position, *image_indices = pair_indices[number]
        (labeled_pair,) = extract_scene_pairs(source, scene, matcher_set.extract, position)
        image0, image1 = (
            source.render_in_color(scene, image_index, features.image)
            for image_index, features in zip(image_indices, labeled_pair.features)
        )
        # Show only the matches that count.
        (all_matches,) = matcher_set.match([labeled_pair], 1)
        matches_by_matcher = matcher_set.apply_thresholds(all_matches)
        # Draw one panel for each matcher.
        panels = []
        counts = []
        for matcher in (OURS, RATIO_TEST):
            row = values.loc[(matcher, number)]
            heading = report.get_title(matcher)
            counts.append(
                f"{heading}: {row['correct']:.0f} of {row['matches']:.0f} matches correct,"
                f" {row['error']:.2f} {unit}"
            )
            matches = matches_by_matcher[matcher]
            points = scoring.get_matched_points(labeled_pair.pair, matches)
            is_wrong = ~scoring.find_correct_matches(labeled_pair, matches)
            panels.append(drawing.Panel(heading, *points, matches.scores, is_wrong))
        caption_start = CAPTION_STARTS[name.partition("-")[0]]
        caption = f"{caption_start} ({labeled_pair.name}). {'; '.join(counts)}."
        pictures.append((name, caption, drawing.draw_panels(image0, image1, panels)))
    return pictures


def make_protocol(
    source: PairSource, title: str, matcher_set: MatcherSet, settings: ScoringSettings
) -> Dict[str, Any]:
    """Make the content of protocol.json: everything that must be quoted with a metric.

    Args:
        source: the pairs, which decide what is estimated.
        title: where the pairs come from.
        matcher_set: the compared matchers, whose model files are read.
        settings: what is computed for each pair.
    """
    has_poses = isinstance(source, PosePairs)
    functions = estimators.POSE_ESTIMATORS if has_poses else estimators.ESTIMATORS
    names = functions if has_poses else settings.estimators
    models = {
        name: {
            "file": network.file.name,
            "sha256": compute_file_sha256(network.file),
            "network": network.info["model"],
            "step": network.info.get("step"),
            "steps": get_training_section(network.info).get("steps"),
            "photographs": count_photographs(network.file),
            "threshold": network.threshold,
        }
        for name, network in matcher_set.networks.items()
    }
    return {
        "pairs_from": title,
        "estimators": {name: functions[name].__doc__ for name in names},
        "params": settings.params.model_dump(),
        "matcher": {name: getattr(matcher_set.evaluated, name) for name in PROTOCOL_ATTRIBUTES},
        "models": models,
    }


def get_training_section(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section `train` in the description of a trained or an exported model."""
    return info.get("train") or info.get("trained_with") or {}


def count_photographs(file: Path) -> Optional[int]:
    """Return the number of photographs on which a model was trained, or None if it is unknown."""
    photographs = provenance.read_photographs(file)
    return None if photographs is None else len(photographs)
