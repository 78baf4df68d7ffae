"""Stage `evaluate`: compare a matcher with baselines, on held-out images or pairs.

    python -m pipeline.evaluate --model checkpoints/best.safetensors --out reports/evaluate
    python -m pipeline.evaluate --pairs DIR --out DIR          # the shipped weights

Writes index.html (one page with everything), metrics.json (flat names), pairs.csv (one line per
pair and matcher) and more into --out. docs/evaluation.md explains every file and metric.
"""

from __future__ import annotations

import sys

from pipeline import params
from superglue_sift import environment

if __name__ == "__main__":  # this must come before torch is loaded
    environment.wait_passively()
    if params.is_portable(sys.argv[1:]):
        environment.prepare_network()

import argparse
import contextlib
import functools
import json
import logging
import math
import os
import re
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import cv2
import numpy as np
import pandas as pd

from pipeline import errors, provenance, tracking, workers
from pipeline.errors import RequestError, WorkError
from pipeline.evaluate import estimators, matchers, metrics, report, scoring
from pipeline.evaluate.matchers import INITIAL, OURS, RATIO_TEST, Matchers, MatchesByName, Network
from pipeline.evaluate.pairs import (
    HeldOutPairs,
    HPatchesPairs,
    KnownPair,
    NegativePairs,
    PosePairs,
    Source,
    extract_pairs,
    levels,
)
from pipeline.evaluate.report import Results
from pipeline.evaluate.scoring import Row, Scored, Settings, score_pair
from pipeline.fetch import dataset
from pipeline.fetch.dataset import Entry
from pipeline.params import EvaluateParams
from pipeline.workers import prefetch
from superglue_sift import drawing
from superglue_sift.errors import check_range
from superglue_sift.features import extractors
from superglue_sift.features.images import BadImage
from superglue_sift.files import check_writable, file_sha256
from superglue_sift.matcher import PRECISIONS, Matcher
from superglue_sift.matches import Matches
from superglue_sift.network.batch import Pair
from superglue_sift.network.weights import (
    BadCheckpoint,
    choose_device,
    find_shipped_weights,
    load_model_file,
)
from superglue_sift.progress import Progress

BATCH = 8  # number of pairs in one pass of a network
MAX_THREADS = 8  # largest number of threads that load, and of threads that score
# Options that exclude each other: robustness needs held-out images, the others homographies.
EXCLUDED = (
    ("robustness", "pairs"),
    *((option, "poses") for option in ("pairs", "robustness", "bound", "estimators")),
)
# Smallest values of options
LEAST = {"robustness": 0, "short_side": 0}
# Settings of `Matcher.load` that are options.
SETTINGS = (
    "max_keypoints", "network_keypoints", "threshold", "resize", "precision", "scene", "accept",
    "likely",
)  # fmt: skip
# How captions of pictures begin
BEGIN = {"best": "One of the best pairs", "median": "A typical pair", "worst": "One of the worst"}
Score = Callable[[KnownPair, MatchesByName], Any]
# The numbers of a pair, its rows of the table, and its scored matches by matcher.
PairScores = Tuple[Tuple[int, ...], List[Row], Dict[str, Scored]]
# What protocol.json says about the evaluated matcher.
MATCHER_SETTINGS = ("max_keypoints", "network_keypoints", "resize")


def parse(argv: Optional[List[str]]) -> argparse.Namespace:
    """Parse the command line. Raises RequestError for options that exclude each other."""
    parser = errors.make_parser("pipeline.evaluate", __doc__)
    add = parser.add_argument
    # Which matchers
    add("--model", type=Path, help="model to evaluate (default: the shipped weights)")
    also = "another model, or a matcher module:function; repeat for more"
    add("--also", action="append", default=[], metavar="NAME=FILE", help=also)
    # Which pairs
    add("--images", type=Path, default=Path("data/images"), help="folder that `fetch` wrote")
    add("--pairs", type=Path, help="instead of held-out images: a folder in HPatches layout")
    add("--poses", type=Path, help="instead: a pairs_with_gt.txt of cameras, images in --images")
    # Where files are read and written.
    add("--out", type=Path, default=Path("reports/evaluate"), help="folder for the results")
    add("--params", type=Path, help="parameters (default: params.yaml here, else the project's)")
    add("--mlflow-run", type=Path, help="log.jsonl of the training, to whose run results are added")
    add("--curves", type=Path, help="SVG of the learning curve for the page (default: none)")
    # The matcher has these options of superglue-match, with the same defaults for --pairs, --poses.
    group = parser.add_argument_group(
        "how to match",
        "The options of superglue-match, with its defaults for --pairs and --poses. Held-out"
        " images have evaluate.max_keypoints, which the network gets all, and keep their size.",
    )
    add_setting = group.add_argument
    add_setting("--max-keypoints", type=int, help="maximum number of keypoints of an image")
    few = "maximum number of them that a network gets, selected for each pair"
    add_setting("--network-keypoints", type=int, help=few)
    least = "smallest confidence of a match (default: the model's own)"
    add_setting("--threshold", type=float, help=least)
    add_setting("--resize", type=int, help="longer side of the images for SIFT; 0 keeps the size")
    add_setting("--precision", choices=PRECISIONS, default="float32", help="of the layers")
    scene = "photographs of one place: accept or reject each pair"
    add_setting("--scene", action="store_true", help=scene)
    add_setting("--accept", type=float, help="with --scene: smallest probability of one place")
    add_setting("--likely", type=int, help="with --scene: fewest classical matches; 0 skips none")
    skip = "skip the metrics of refined matches, to save time"
    add_setting("--no-refine", dest="refine", action="store_false", help=skip)
    # Metrics
    side = "--pairs, --poses: resize to this shorter side first, in which errors are measured; 480"
    add("--short-side", type=int, default=0, help=f"{side} is HPatches' protocol (default: no)")
    usual = f"default: {','.join(estimators.DEFAULT)}"
    add("--estimators", help=f"of: {', '.join(estimators.ESTIMATORS)}; the first leads ({usual})")
    add("--bound", action="store_true", help="also a row of the true matches, an upper bound")
    # Further pairs, and the machine
    hard = "number of photographs that are tried under growing blur, noise, ... (default: none)"
    add("--robustness", type=int, default=0, help=hard)
    overlap = "keep photographs of the training (default: run.allow_training_images of --params)"
    add("--allow-training-images", action="store_true", help=overlap)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return check_options(parser.parse_args(argv))


def check_options(args: argparse.Namespace) -> argparse.Namespace:
    """Check the options, and add the models, the estimators and the file of parameters.

    Raises:
        RequestError: For a wrong option.
    """
    # Refuse options that exclude each other.
    for option, other in EXCLUDED:
        if getattr(args, option) and getattr(args, other):
            raise RequestError(f"--{option} and --{other} exclude each other: leave one out")
    # Check the values of single options.
    check_writable(args.out / "metrics.json", args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, least in LEAST.items():
        check_range(f"--{name.replace('_', '-')}", getattr(args, name), least)
    if args.short_side and not (args.pairs or args.poses):
        raise RequestError("--short-side: only with --pairs or --poses")
    # Find the models, parameters and estimators that the options name.
    args.models, args.further = models_of(args)
    args.params = args.params or params.usual_file()
    names = args.estimators.split(",") if args.estimators else estimators.DEFAULT
    for name in names:
        if name not in estimators.ESTIMATORS:
            known = ", ".join(estimators.ESTIMATORS)
            raise RequestError(f"--estimators {name}: unknown; choose from {known}")
    args.estimators = tuple(dict.fromkeys(names))
    return args


def models_of(
    args: argparse.Namespace,
) -> Tuple[Dict[str, Path], Dict[str, Callable[[Pair], Matches]]]:
    """Return all model files by name, the evaluated model first, and all matcher functions by name.

    Raises:
        RequestError: If a name is invalid or used already.
    """
    models = {OURS: args.model or find_shipped_weights()}
    further = {}
    for word in args.also:
        name, _, file = word.partition("=")
        taken = (*matchers.MATCHERS, matchers.BOUND, *models, *further)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or not file or name in taken:
            rule = "must be NAME=FILE, NAME a new one of letters, digits, - and _"
            raise RequestError(f"--also {word}: {rule}")
        # Module:function is the user's code, anything else is a file.
        if re.fullmatch(r"[\w.]+:\w+", file):
            further[name] = matchers.load_function(file)
        else:
            models[name] = Path(file)
    return models, further


def settings_of(args: argparse.Namespace, section: EvaluateParams) -> Dict[str, Any]:
    """Return the settings of `Matcher.load`. Pairs from files have those of superglue-match.

    Held-out views have the keypoints of the training, at the views' own size, and the network gets
    all of them.
    """
    settings: Dict[str, Any] = {}
    if not (args.pairs or args.poses):
        most = section.max_keypoints if args.max_keypoints is None else args.max_keypoints
        settings = {"max_keypoints": most, "network_keypoints": most, "resize": 0}
    options = {name: getattr(args, name) for name in SETTINGS}
    return {**settings, **{name: value for name, value in options.items() if value is not None}}


def initial_digest(info: Mapping[str, Any]) -> str:
    """Return the digest of the weights that a model was trained from, "" if it had random ones.

    `info` is the description in the model's file.
    """
    exported = info.get("provenance", {}).get("initial_weights.digest", "")
    return info.get("initial_weights", exported)


def find_initial_weights(models: Mapping[str, Path], init_from: str) -> Dict[str, Path]:
    """Return the weights that the evaluated model was trained from, as a further model.

    The result is empty if these weights are compared already, if the file `train.init_from` is
    gone, or if the model was trained from other weights.
    """
    try:
        digest = initial_digest(load_model_file(models[OURS])[1])
    except (FileNotFoundError, BadCheckpoint):  # `load_networks` reports it
        return {}
    if not digest or not init_from or not Path(init_from).is_file():
        return {}
    compared = [file_sha256(file) for file in models.values() if file.is_file()]
    if any(sha256.startswith(digest) for sha256 in compared):
        return {}
    is_start = file_sha256(init_from).startswith(digest)
    return {INITIAL: Path(init_from)} if is_start else {}


def load_networks(
    args: argparse.Namespace, settings: Mapping[str, Any], notes: List[str]
) -> Dict[str, Network]:
    """Load the networks, and return them by name.

    A network that matches other keypoints is left out, with a note. Raises RequestError if the
    extractor is not SIFT and params.yaml does not name it.
    """
    device = choose_device(args.device)
    networks: Dict[str, Network] = {}
    for name, file in args.models.items():
        network = matchers.load_network(file, device, **settings)
        # All rows of a table have the same keypoints, those of the evaluated model.
        extractor = network.matcher.model.config.extractor
        if extractor == networks.get(OURS, network).matcher.model.config.extractor:
            networks[name] = network
        else:
            notes.append(f"{name} is left out: it matches keypoints of {extractor}.")
    if networks[OURS].info.get("step") == 0:
        notes.append("Training kept the weights it began with: no later step was better.")
    # A model file may name any function, so the user names it, too.
    matcher = networks[OURS].matcher
    extractor = matcher.model.config.extractor
    if matcher.extractor is None:
        if params.load(args.params).keypoints.extractor != extractor:
            raise RequestError(
                f"{args.models[OURS]}: matches keypoints of {extractor}, code that is run only when"
                f" asked for: set keypoints.extractor: {extractor} in {args.params}"
            )
        matcher.extractor = extractors.load(extractor)
    return networks


def choose_photographs(
    args: argparse.Namespace, networks: Dict[str, Network], notes: List[str]
) -> Tuple[List[Entry], Dict[str, Network]]:
    """Return held-out photographs that no compared network was trained on, and the networks.

    All rows of a table need the same pairs. If one network was trained on a photograph, it is left
    out for all networks, unless `run.allow_training_images` keeps it. Raises RequestError if the
    evaluated network was trained on all photographs. A further network that was trained on all that
    remain is left out itself.
    """
    # Take the split `test`, or `val` if there is no test image.
    images = dataset.open_manifest(args.images)
    left = images.select_entries("test")
    if not left:
        left = images.select_entries("val")
        line = "no test images: using the validation images, on which the checkpoint was chosen"
        print(line, file=sys.stderr)
    if not left:
        fix = "raise fetch.val_fraction or add images, then run fetch again"
        raise RequestError(f"{args.images}: no held-out image; {fix}")
    # Each network may remove photographs.
    compared = {}
    for name, network in networks.items():
        photographs = [images.identify_photograph(entry) for entry in left]
        title = "the model" if name == OURS else name
        keep = args.allow_training_images
        places, line = provenance.leave_out_photographs(network.file, photographs, keep, title)
        if places:
            notes += [f"{line}."] if line else []
            left = [left[place] for place in places]
            compared[name] = network
        elif name == OURS:
            raise RequestError(
                f"{network.file}: was trained on all of the {len(left)} held-out photographs;"
                ' evaluate on others, train from scratch (train.init_from: ""), or keep them with'
                " run.allow_training_images: true"
            )
        else:
            notes.append(f"{name} is left out: it was trained on all {len(left)} photographs.")
    return left, compared


def choose_source(
    args: argparse.Namespace,
    section: EvaluateParams,
    matcher: Matcher,
    entries: Sequence[Entry],
    notes: List[str],
) -> Tuple[Source, str]:
    """Return the source of pairs, by default held-out photographs, and the title of its tables."""
    most = matcher.max_keypoints
    few = f"{matcher.network_keypoints} of " if matcher.network_keypoints < most else ""
    keypoints = f"{few}{most} keypoints"
    size = f"short side {args.short_side}" if args.short_side else "full size"
    seen = f"SIFT at {matcher.resize} px" if matcher.resize else "SIFT at this size"
    # Read the pairs from files.
    if args.pairs:
        source = HPatchesPairs(args.pairs, args.short_side)
        name = args.pairs.resolve().name
        return source, f"{name}: {len(source)} sequences, {size}, {seen}, {keypoints}"
    if args.poses:
        source = PosePairs(args.poses, args.images, args.short_side)
        return source, f"{args.poses.name}: known cameras, {size}, {seen}, {keypoints}"
    # Or render them from photographs.
    held_out = HeldOutPairs(dataset.open_manifest(args.images), entries, section)
    fetched = json.loads((args.images / "source.json").read_text(encoding="utf-8"))
    # The title names the source, such as coco2017, or the user's folders.
    name = fetched.get("source", "folder")
    if name == "folder":
        containers = fetched["containers"].values()
        name = ", ".join(Path(container["path"]).name for container in containers)
    overlap = "".join(f", {line.rstrip('.')}" for line in notes if args.allow_training_images)
    images = f"{len(held_out)} held-out images ({entries[0].split}){overlap}"
    return held_out, f"{name}: {images}, {section.width}x{section.height}, {keypoints}"


def match_all(
    source: Source, matched: Matchers, score: Score, bar: Progress
) -> Tuple[List[Any], List[Tuple[str, str]]]:
    """Match and score all pairs of a source, in its order.

    Threads load and score, and the caller's thread runs the networks.

    Returns:
        What `score` returned for each pair, and (scene, reason) of each scene that could not be
        read.
    """
    unread: List[Tuple[str, str]] = []
    counts = [count for _, count in source.scenes]
    step = max(1, BATCH // max(counts, default=1))  # scenes whose pairs are matched together
    parts = range(0, len(source), step)  # the first scene of each batch

    def load(first: int) -> List[KnownPair]:
        pairs = []
        for index in range(len(source))[first : first + step]:
            try:
                pairs += extract_pairs(source, index, matched.extract)
            except BadImage as error:
                unread.append((source.scenes[index][0], error.reason))
        return pairs

    def score_all(matched_pairs: Tuple[List[KnownPair], List[MatchesByName]]) -> List[Any]:
        return list(map(score, *matched_pairs))

    # Threads suffice, because decoding, warping, SIFT and robust estimators release the GIL.
    threads = min(os.cpu_count() or 1, MAX_THREADS)
    # The networks run where the loop below asks for the next scores.
    matched_parts = (
        (pairs, matched.match(pairs, BATCH)) for pairs in prefetch(load, parts, threads, threads)
    )
    scores = []
    for first, part in zip(parts, prefetch(score_all, matched_parts, threads, threads)):
        scores += part
        bar.update(sum(counts[first : first + step]))
    return scores, sorted(unread)


def choose_pairs(values: pd.DataFrame) -> Dict[int, str]:
    """Choose median, best and worst pairs. Return the name of a picture by the pair's number.

    `values` is named by (matcher, number). If errors are equal, the pair with more correct matches
    is better.
    """
    # Rank the numbers of the pairs from the network's best to its worst.
    ranked = values.loc[OURS].sort_values(["error", "correct"], ascending=[True, False]).index
    middle = max(len(ranked) // 2 - 1, 0)
    # The first screen shows the typical pair in which the network has most correct matches ahead.
    ahead = values["correct"][OURS] - values["correct"][RATIO_TEST]
    typical = sorted(ranked[middle : middle + 3], key=lambda number: -ahead[number])
    groups = {"median": typical, "best": ranked[:2], "worst": ranked[::-1][:3]}
    names: Dict[int, str] = {}
    for kind, numbers in groups.items():
        for index, number in enumerate(numbers, 1):
            names.setdefault(number, f"{kind}-{index}")
    return names


def draw_pictures(
    source: Source,
    matched: Matchers,
    table: pd.DataFrame,
    places: Sequence[Tuple[int, ...]],
    reference: str,
) -> List[Tuple[str, str, np.ndarray]]:
    """Draw the pairs of `choose_pairs`. Return name, caption and pixels of each picture.

    `reference` is a further network that is drawn, or "".
    """
    # Tabulate matches, correct matches and the leading estimator's error by matcher and pair.
    detected = table[~table["refined"] & table["estimator"].isin(["", metrics.leading(table)])]
    values = detected.pivot(index=["matcher", "number"], columns="metric", values="value")
    unit = "degrees of pose error" if metrics.is_posed(table) else "px of corner error"
    drawn = []
    # The results keep no images, so each pair is loaded and matched again.
    for number, name in choose_pairs(values).items():
        scene, position, *ends = places[number]
        (known,) = extract_pairs(source, scene, matched.extract, position)
        left, right = (
            source.in_color(scene, end, features.image)
            for end, features in zip(ends, known.features)
        )
        # Show the matches that count.
        shown = matched.above(matched.match([known], 1)[0])
        # Draw one panel for each matcher.
        panels = []
        counts = []
        for matcher in filter(None, (OURS, RATIO_TEST, reference)):
            row = values.loc[(matcher, number)]
            heading = report.title(matcher)
            counts.append(
                f"{heading}: {row['correct']:.0f} of {row['matches']:.0f} matches correct,"
                f" {row['error']:.2f} {unit}"
            )
            points = scoring.matched_points(known.pair, shown[matcher])
            wrong = ~scoring.correct_matches(known, shown[matcher])
            panels.append(drawing.Panel(heading, *points, shown[matcher].scores, wrong))
        caption = f"{BEGIN[name.partition('-')[0]]} ({known.name}). {'; '.join(counts)}."
        drawn.append((name, caption, drawing.draw(left, right, panels)))
    return drawn


def trained_with(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section `train` in the description of a trained or an exported model."""
    return info.get("train") or info.get("trained_with") or {}


def count_photographs(file: Path) -> Optional[int]:
    """Return the number of photographs that a model was trained on, None if it is not known."""
    photographs = provenance.read_photographs(file)
    return None if photographs is None else len(photographs)


def describe(source: Source, where: str, matched: Matchers, settings: Settings) -> Dict[str, Any]:
    """Return the content of protocol.json: everything that must be quoted with a metric."""
    posed = isinstance(source, PosePairs)
    known = estimators.POSE_ESTIMATORS if posed else estimators.ESTIMATORS
    used = known if posed else settings.estimators
    models = {
        name: {
            "file": network.file.name,
            "sha256": file_sha256(network.file),
            "network": network.info["model"],
            "step": network.info.get("step"),
            "steps": trained_with(network.info).get("steps"),
            "photographs": count_photographs(network.file),
            "initial_weights": initial_digest(network.info),
            "threshold": network.threshold,
        }
        for name, network in matched.networks.items()
    }
    return {
        "pairs_from": where,
        "estimators": {name: known[name].__doc__ for name in used},
        "params": settings.params.model_dump(),
        "matcher": {name: getattr(matched.ours, name) for name in MATCHER_SETTINGS},
        "models": models,
    }


def evaluate(args: argparse.Namespace) -> Tuple[Results, Mapping[str, Any]]:
    """Evaluate all matchers. Return the results and the description of the network.

    Raises:
        RequestError: For a wrong request and WorkError if nothing can be evaluated.
    """
    # Read the section of params.yaml, and load the networks.
    sections = params.load(args.params)
    section = sections.evaluate
    # The key of the training counts like the option: a stage of DVC has fixed options.
    args.allow_training_images |= sections.run.allow_training_images
    if INITIAL not in {*args.models, *args.further}:
        args.models.update(find_initial_weights(args.models, sections.train.init_from))
    notes: List[str] = []
    networks = load_networks(args, settings_of(args, section), notes)
    # Choose the pairs, without photographs that a compared network was trained on.
    entries: List[Entry] = []
    if not (args.pairs or args.poses):
        entries, networks = choose_photographs(args, networks, notes)
    matched = Matchers(networks, args.further)
    source, where = choose_source(args, section, matched.ours, entries, notes)
    # Match and score.
    settings = Settings(section, args.estimators, args.bound, args.refine)
    results = run(source, where, matched, settings, args.robustness)
    return results._replace(notes=notes), networks[OURS].info


def run(
    source: Source, where: str, matched: Matchers, settings: Settings, robustness: int
) -> Results:
    """Evaluate all pairs of a source, then its negative and its disturbed pairs.

    `robustness` is the number of photographs that are disturbed. Raises WorkError if no pair can be
    read.
    """
    # List all the work first, so that one bar shows all of it.
    negatives = []
    disturbed = []
    if isinstance(source, HeldOutPairs):
        negatives = [NegativePairs(source)]
        disturbed = list(levels(source, robustness))
    sources = [source, *negatives, *(variant for _, _, variant in disturbed)]
    total = sum(count for part in sources for _, count in part.scenes)
    score = functools.partial(score_known, matched.thresholds, settings)
    with Progress(total=total, desc="pairs", unit="pair") as bar:
        scores, bad = match_all(source, matched, score, bar)
        if not scores:
            first = ": ".join(bad[0])
            raise WorkError(f"none of the {len(source)} images could be read; the first: {first}")
        # Disturb the second views in each way at each level, and keep only the means.
        means = {}
        for name, level, variant in disturbed:
            variant_scores, _ = match_all(variant, matched, score, bar)
            if variant_scores:
                means[name, level] = mean_values(variant_scores, matched)
        # Match different photographs, where every match is wrong.
        count = functools.partial(count_matches, matched)
        counts = [row for part in negatives for row in match_all(part, matched, count, bar)[0]]
    places, *_ = zip(*scores)
    results = compute_results((where, source.unit), scores, counts, means, matched)
    protocol = describe(source, where, matched, settings)
    reference = report.reference_of(protocol["models"])
    pictures = draw_pictures(source, matched, results.table, places, reference)
    return results._replace(bad=bad, protocol=protocol, pictures=pictures)


def score_known(
    thresholds: Mapping[str, float], settings: Settings, known: KnownPair, by_name: MatchesByName
) -> PairScores:
    """Score the matches of all matchers on one pair. Return also its numbers."""
    return (known.place, *score_pair(known, by_name, thresholds, settings))


def count_matches(matched: Matchers, _: KnownPair, by_name: MatchesByName) -> Dict[str, int]:
    """Count the matches of each matcher that count, on a pair where all of them are wrong."""
    return {name: len(matches) for name, matches in matched.above(by_name).items()}


def tabulate(
    scores: Sequence[PairScores], matched: Matchers
) -> Tuple[pd.DataFrame, Dict[str, List[Scored]], pd.DataFrame]:
    """Make the long table of all pairs.

    Returns:
        The table, the scored matches of each network, and the values that each pair contributes to
        each metric.
    """
    _, rows, scored = zip(*scores)
    table = metrics.make_table(rows)
    by_network = {name: [pair[name] for pair in scored] for name in matched.networks}
    return table, by_network, metrics.values_of_pairs(table, by_network)


def mean_values(scores: Sequence[PairScores], matched: Matchers) -> pd.DataFrame:
    """Return the mean and the number of pairs of each metric, of the network and the ratio test."""
    *_, values = tabulate(scores, matched)
    values = values[[OURS, RATIO_TEST]]
    return pd.DataFrame({"value": values.mean(), "pairs": values.count()})


def compute_results(
    title: Tuple[str, str],
    scores: Sequence[PairScores],
    counts: Sequence[Dict[str, int]],
    means: Mapping[Tuple[str, float], pd.DataFrame],
    matched: Matchers,
) -> Results:
    """Compute all metrics, with their intervals and differences.

    Args:
        title: where the pairs are from, and the plural noun of their scenes.
        scores: of all pairs.
        counts: number of matches of each matcher, for each negative pair.
        means: from `mean_values`, by condition and level.
    """
    table, by_network, values = tabulate(scores, matched)
    samples = metrics.resample(values, by_network)
    summary = metrics.summarize(values, samples)
    for name, mean in pd.DataFrame(counts).mean().items():
        row = mean, math.nan, math.nan, len(counts)
        summary.loc[(name, "negative_matches", "", False), :] = row
    frames: Any = dict(means)  # pandas has a narrower type for the names of the levels
    return Results(
        *title,
        table,
        values,
        summary.astype({"pairs": int}),
        metrics.compare(values, samples, list(matched.networks)),
        pd.concat(frames, names=["condition", "level"]) if means else pd.DataFrame(),
        metrics.calibration(by_network[OURS]),
    )


def track(args: argparse.Namespace, results: Results, info: Mapping[str, Any]) -> None:
    """Add headline, files and description to an MLflow run.

    It is the run of the training that the model's `info` names. Without `--mlflow-run` nothing is
    done.
    """
    if args.mlflow_run is None:
        return
    # Further evaluations have names of their own, such as test/hpatches/auc_5.
    folder = args.pairs or args.poses
    prefix = "/".join(filter(None, (tracking.EVALUATION, folder.resolve().stem if folder else "")))
    values = {f"{prefix}/{name}": value for name, value in report.headline(results).items()}
    with tracking.attach(args.mlflow_run, training=info.get("training")) as sent:
        sent.log(values, int(info.get("step") or 0))
        sent.tags({f"{prefix}.processor": provenance.processor()})
        if folder is None:  # the pairs come from the data that the model was trained on
            best = report.duels(results)[-1]["ours"]["value"]
            sent.describe(f"AUC@5 {report.percent(best)}", report.note(results, prefix))
            # The champion may be an earlier version of this run, whose pairs.csv is replaced next.
            sent.compare_with_champion(args.out / "pairs.csv")
        sent.artifact(args.out, prefix)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Silence the library: views without keypoints are expected where light and noise are tried."""
    logger = logging.getLogger("superglue_sift")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def main(argv: Optional[List[str]] = None) -> int:
    workers.end_with_dvc()
    args = parse(argv)
    cv2.setNumThreads(1)  # the threads work on several images at a time
    with without_warnings():
        results, info = evaluate(args)
    # Write the files first, so that MLflow can copy them.
    report.write(args.out, results, report.render(results, args.curves))
    # `python -m pipeline.report` prints the summary where the pipeline ends
    in_stage = "DVC_STAGE" in os.environ
    print(f"\n{report.verdict(results) if in_stage else report.summary(results)}")
    print(f"\nwritten to {args.out}: {report.TEXT} has all tables", flush=True)
    track(args, results, info)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
