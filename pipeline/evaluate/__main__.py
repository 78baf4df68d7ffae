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
import json
import math
import os
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import cv2
import numpy as np
import pandas as pd

from pipeline import errors, provenance, tracking, workers
from pipeline.errors import RequestError, WorkError
from pipeline.evaluate import estimators, matchers, metrics, report, scoring
from pipeline.evaluate.matchers import OURS, RATIO_TEST, Matchers
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
from pipeline.evaluate.scoring import Settings, score_pair
from pipeline.fetch import dataset
from pipeline.fetch.dataset import Entry
from pipeline.params import EvaluateParams
from pipeline.workers import prefetch
from superglue_sift import drawing
from superglue_sift.errors import check_range
from superglue_sift.features import extractors
from superglue_sift.features.extractors import Extractor
from superglue_sift.features.images import BadImage
from superglue_sift.files import check_writable, file_sha256
from superglue_sift.matches import Matches
from superglue_sift.network.batch import Pair
from superglue_sift.network.weights import choose_device, shipped_weights
from superglue_sift.progress import Progress

BATCH = 8  # number of pairs in one pass of a network
MAX_THREADS = 8  # largest number of threads that load, and of threads that score
# Options that exclude each other: robustness needs held-out images, the others homographies
EXCLUDED = (
    ("robustness", "pairs"),
    *((option, "poses") for option in ("pairs", "robustness", "bound", "estimators")),
)
# Smallest values of options
LEAST = {"max_keypoints": 1, "network_keypoints": 1, "robustness": 0, "resize": 0}
# How captions of pictures begin
BEGIN = {"best": "One of the best pairs", "median": "A typical pair", "worst": "One of the worst"}
Score = Callable[[KnownPair, Mapping[str, Matches]], Any]


def parse(argv: Optional[List[str]]) -> argparse.Namespace:
    """Parse the command line. Raises RequestError for options that exclude each other."""
    parser = errors.make_parser("pipeline.evaluate", __doc__)
    add = parser.add_argument
    # which matchers
    add("--model", type=Path, help="model to evaluate (default: the shipped weights)")
    also = "another model, or a matcher module:function; repeat for more"
    add("--also", action="append", default=[], metavar="NAME=FILE", help=also)
    # which pairs
    add("--images", type=Path, default=Path("data/images"), help="folder that `fetch` wrote")
    add("--pairs", type=Path, help="instead of held-out images: a folder in HPatches layout")
    add("--poses", type=Path, help="instead: a pairs_with_gt.txt of cameras, images in --images")
    # where files are read and written
    add("--out", type=Path, default=Path("reports/evaluate"), help="folder for the results")
    add("--params", type=Path, help="parameters (default: params.yaml here, else the project's)")
    add("--mlflow-run", type=Path, help="log.jsonl of the training, to whose run results are added")
    add("--curves", type=Path, help="SVG of the learning curve for the page (default: none)")
    # keypoints, matches and metrics
    add("--max-keypoints", type=int, help="instead of evaluate.max_keypoints")
    add("--network-keypoints", type=int, help="how many of them a network gets (default: all)")
    least = "smallest confidence of a match (default: the model's own)"
    add("--threshold", type=float, default=0.0, help=least)
    side = "--pairs, --poses: shorter side in pixels (default: 480); 0 keeps the size"
    add("--resize", type=int, default=480, help=side)
    usual = f"default: {','.join(estimators.DEFAULT)}"
    add("--estimators", help=f"of: {', '.join(estimators.ESTIMATORS)}; the first leads ({usual})")
    add("--bound", action="store_true", help="also a row of the true matches, an upper bound")
    skip = "skip the metrics of refined matches, to save time"
    add("--no-refine", dest="refine", action="store_false", help=skip)
    # further pairs, and the machine
    hard = "number of photographs that are tried under growing blur, noise, ... (default: none)"
    add("--robustness", type=int, default=0, help=hard)
    overlap = "keep photographs of the training (default: run.allow_training_images of --params)"
    add("--allow-training-images", action="store_true", help=overlap)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return check_options(parser.parse_args(argv))


def check_options(args: argparse.Namespace) -> argparse.Namespace:
    """Check the options, and add the models, the estimators and the file of parameters.

    Raises RequestError for a wrong option.
    """
    # refuse options that exclude each other
    for option, other in EXCLUDED:
        if getattr(args, option) and getattr(args, other):
            raise RequestError(f"--{option} and --{other} exclude each other: leave one out")
    # check the values of single options
    check_writable(args.out / "metrics.json", args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    if not 0.0 <= args.threshold < 1.0:
        raise RequestError(f"--threshold {args.threshold}: must be at least 0 and below 1")
    for name, least in LEAST.items():
        if getattr(args, name) is not None:
            check_range(f"--{name.replace('_', '-')}", getattr(args, name), least)
    # find the models, parameters and estimators that the options name
    args.models, args.further = models_of(args)
    args.params = args.params or params.usual_file()
    asked = args.estimators.split(",") if args.estimators else estimators.DEFAULT
    for name in asked:
        if name not in estimators.ESTIMATORS:
            known = ", ".join(estimators.ESTIMATORS)
            raise RequestError(f"--estimators {name}: unknown; choose from {known}")
    args.estimators = tuple(dict.fromkeys(asked))
    return args


def models_of(
    args: argparse.Namespace,
) -> Tuple[Dict[str, Path], Dict[str, Callable[[Pair], Matches]]]:
    """Return all model files by name, the evaluated model first, and all matcher functions by name.

    Raises RequestError if a name is invalid or used already.
    """
    models = {OURS: args.model or shipped_weights()}
    further = {}
    for word in args.also:
        name, _, file = word.partition("=")
        taken = (*matchers.MATCHERS, matchers.BOUND, *models, *further)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or not file or name in taken:
            rule = "must be NAME=FILE, NAME a new one of letters, digits, - and _"
            raise RequestError(f"--also {word}: {rule}")
        # module:function is the user's code, anything else is a file
        if re.fullmatch(r"[\w.]+:\w+", file):
            further[name] = matchers.load_function(file)
        else:
            models[name] = Path(file)
    return models, further


def load_networks(
    args: argparse.Namespace, device: str, notes: List[str]
) -> Tuple[Dict[str, matchers.Network], Extractor]:
    """Load the networks. Return them by name, with the extractor of the evaluated model.

    A network that matches other keypoints is left out, with a note. Raises RequestError if the
    extractor is not SIFT and params.yaml does not name it.
    """
    networks: Dict[str, matchers.Network] = {}
    for name, file in args.models.items():
        network = matchers.load_network(file, device, args.threshold)
        # all rows of a table have the same keypoints, those of the evaluated model
        extractor = network.model.config.extractor
        if extractor == networks.get(OURS, network).model.config.extractor:
            networks[name] = network
        else:
            notes.append(f"{name} is left out: it matches keypoints of {extractor}.")
    if networks[OURS].info.get("step") == 0:
        notes.append("Training kept the weights it began with: no later step was better.")
    # a model file may name any function, so the user names it, too
    own = networks[OURS].model.config.extractor
    if own != extractors.DEFAULT.name and params.load(args.params).keypoints.extractor != own:
        raise RequestError(
            f"{args.models[OURS]}: matches keypoints of {own}, code that is run only when asked"
            f" for: set keypoints.extractor: {own} in {args.params}"
        )
    return networks, extractors.load(own)


def choose_photographs(
    args: argparse.Namespace, networks: Dict[str, matchers.Network], notes: List[str]
) -> Tuple[List[Entry], Dict[str, matchers.Network]]:
    """Return held-out photographs that no compared network was trained on, and the networks.

    All rows of a table need the same pairs. If one network was trained on a photograph, it is left
    out for all networks, unless `run.allow_training_images` keeps it. Raises RequestError if the
    evaluated network was trained on all photographs. A further network that was trained on all that
    remain is left out itself.
    """
    # take the split `test`, or `val` if there is no test image
    images = dataset.open_manifest(args.images)
    left = images.entries("test")
    if not left:
        left = images.entries("val")
        line = "no test images: using the validation images, on which the checkpoint was chosen"
        print(line, file=sys.stderr)
    if not left:
        fix = "raise fetch.val_fraction or add images, then run fetch again"
        raise RequestError(f"{args.images}: no held-out image; {fix}")
    # each network may remove photographs
    compared = {}
    for name, network in networks.items():
        photographs = [images.photograph(entry) for entry in left]
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
    args: argparse.Namespace, section: EvaluateParams, entries: Sequence[Entry], notes: List[str]
) -> Tuple[Source, str]:
    """Return the source of pairs, by default held-out photographs, and the title of its tables."""
    few = f"{args.network_keypoints} of " if args.network_keypoints else ""
    keypoints = f"{few}{section.max_keypoints} keypoints"
    size = f"short side {args.resize}" if args.resize else "full size"
    # read the pairs from files
    if args.pairs:
        source = HPatchesPairs(args.pairs, args.resize)
        return source, f"{args.pairs.resolve().name}: {len(source)} sequences, {size}, {keypoints}"
    if args.poses:
        source = PosePairs(args.poses, args.images, args.resize)
        return source, f"{args.poses.name}: known cameras, {size}, {keypoints}"
    # or render them from photographs
    held_out = HeldOutPairs(dataset.open_manifest(args.images), entries, section)
    fetched = json.loads((args.images / "source.json").read_text(encoding="utf-8"))
    # the title names the source, such as coco2017, or the user's folders
    name = fetched.get("source", "folder")
    if name == "folder":
        name = ", ".join(Path(each["path"]).name for each in fetched["containers"].values())
    overlap = "".join(f", {line.rstrip('.')}" for line in notes if args.allow_training_images)
    images = f"{len(held_out)} held-out images ({entries[0].split}){overlap}"
    return held_out, f"{name}: {images}, {section.width}x{section.height}, {keypoints}"


def match_all(
    source: Source, matched: Matchers, settings: Settings, score: Score, bar: Progress
) -> Tuple[List[Any], List[Tuple[str, str]]]:
    """Match and score all pairs of a source, in its order.

    Threads load and score, and the caller's thread runs the networks.

    Returns:
        What `score` returned for each pair, and (scene, reason) of each scene that could not be
        read.
    """

    def load(first: int) -> List[KnownPair]:
        pairs = []
        for index in range(len(source))[first : first + step]:
            try:
                pairs += extract_pairs(source, index, *extraction)
            except BadImage as error:
                unread.append((source.scenes[index][0], error.reason))
        return pairs

    def score_all(answered: Tuple[List[KnownPair], List[Dict[str, Matches]]]) -> List[Any]:
        return list(map(score, *answered))

    unread: List[Tuple[str, str]] = []
    extraction = settings.params.max_keypoints, settings.extractor
    counts = [count for _, count in source.scenes]
    step = max(1, BATCH // max(counts, default=1))  # scenes whose pairs are matched together
    parts = range(0, len(source), step)  # the first scene of each batch
    # Threads suffice, because decoding, warping, SIFT and robust estimators release the GIL
    threads = min(os.cpu_count() or 1, MAX_THREADS)
    # The networks run where the loop below asks for the next scores
    answered = (
        (pairs, matched.answers([known.pair for known in pairs], BATCH))
        for pairs in prefetch(load, parts, threads, threads)
    )
    found = []
    for first, scores in zip(parts, prefetch(score_all, answered, threads, threads)):
        found += scores
        bar.update(sum(counts[first : first + step]))
    return found, sorted(unread)


def choose_pairs(values: pd.DataFrame) -> Dict[int, str]:
    """Choose median, best and worst pairs. Return the name of a picture by the pair's number.

    `values` is named by (matcher, number). If errors are equal, the pair with more correct matches
    is better.
    """
    # rank the numbers of the pairs from the network's best to its worst
    ranked = values.loc[OURS].sort_values(["error", "correct"], ascending=[True, False]).index
    middle = max(len(ranked) // 2 - 1, 0)
    # The first screen shows the typical pair in which the network has most correct matches ahead.
    ahead = values["correct"][OURS] - values["correct"][RATIO_TEST]
    typical = sorted(ranked[middle : middle + 3], key=lambda number: -ahead[number])
    chosen = {"median": typical, "best": ranked[:2], "worst": ranked[::-1][:3]}
    names: Dict[int, str] = {}
    for kind, group in chosen.items():
        for place, number in enumerate(group, 1):
            names.setdefault(number, f"{kind}-{place}")
    return names


def draw_pictures(
    source: Source,
    matched: Matchers,
    table: pd.DataFrame,
    places: Sequence[Tuple[int, ...]],
    settings: Settings,
) -> List[Tuple[str, str, np.ndarray]]:
    """Draw the pairs of `choose_pairs`. Return name, caption and pixels of each picture."""
    # tabulate matches, correct matches and the leading estimator's error by matcher and pair
    detected = table[~table["refined"] & table["estimator"].isin(["", metrics.leading(table)])]
    values = detected.pivot(index=["matcher", "number"], columns="metric", values="value")
    unit = "degrees of pose error" if metrics.is_posed(table) else "px of corner error"
    drawn = []
    # The results keep no images, so each pair is loaded and matched again
    for number, name in choose_pairs(values).items():
        scene, position, *ends = places[number]
        extraction = settings.params.max_keypoints, settings.extractor
        (known,) = extract_pairs(source, scene, *extraction, position)
        left, right = (
            source.in_color(scene, end, image) for end, image in zip(ends, known.images or ())
        )
        # show the matches that count
        shown = matched.above(matched.answers([known.pair], 1)[0])
        # draw one panel for each matcher
        panels = []
        caption = f"{BEGIN[name.partition('-')[0]]} ({known.name})."
        for matcher in (OURS, RATIO_TEST):
            row = values.loc[(matcher, number)]
            heading = report.title(matcher)
            caption += (
                f" {heading}: {row['correct']:.0f} of {row['matches']:.0f} matches correct,"
                f" {row['error']:.2f} {unit}."
            )
            points = scoring.matched_points(known.pair, shown[matcher])
            wrong = ~scoring.correct_matches(known, shown[matcher])
            panels.append(drawing.Panel(heading, *points, shown[matcher].scores, wrong))
        drawn.append((name, caption, drawing.draw(left, right, panels)))
    return drawn


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
            "threshold": network.threshold,
        }
        for name, network in matched.networks.items()
    }
    return {
        "pairs_from": where,
        "estimators": {name: known[name].__doc__ for name in used},
        "params": settings.params.model_dump(),
        "models": models,
    }


def evaluate(args: argparse.Namespace) -> Tuple[Results, Mapping[str, Any]]:
    """Evaluate all matchers. Return the results and the description of the network.

    Raises RequestError for a wrong request and WorkError if nothing can be evaluated.
    """
    # read the section of params.yaml, change it by options, and load the networks
    sections = params.load(args.params)
    asked = {"max_keypoints": args.max_keypoints} if args.max_keypoints else {}
    section = sections.evaluate.model_copy(update=asked)
    # The key of the training counts like the option: a stage of DVC has fixed options
    args.allow_training_images |= sections.run.allow_training_images
    device = choose_device(args.device)
    notes: List[str] = []
    networks, extractor = load_networks(args, device, notes)
    # choose the pairs, without photographs that a compared network was trained on
    entries: List[Entry] = []
    if not (args.pairs or args.poses):
        entries, networks = choose_photographs(args, networks, notes)
    source, where = choose_source(args, section, entries, notes)
    # match and score
    matched = Matchers(networks, device, args.further, args.network_keypoints)
    settings = Settings(section, args.estimators, extractor, args.bound, args.refine)
    results = run(source, where, matched, settings, args.robustness)
    return results._replace(notes=notes), networks[OURS].info


def run(
    source: Source, where: str, matched: Matchers, settings: Settings, robustness: int
) -> Results:
    """Evaluate all pairs of a source, then its negative and its disturbed pairs.

    `robustness` is the number of photographs that are disturbed. Raises WorkError if no pair can be
    read.
    """

    def score(known: KnownPair, answers: Mapping[str, Matches]) -> Any:
        return (known.place, *score_pair(known, answers, matched.thresholds, settings))

    def count(_: KnownPair, answers: Mapping[str, Matches]) -> Dict[str, int]:
        return {name: len(found) for name, found in matched.above(answers).items()}

    def tabulate(found: Sequence[Any]) -> Tuple[Any, pd.DataFrame, Dict, pd.DataFrame]:
        places, rows, scored = zip(*found)
        table = metrics.make_table(rows)
        own = {name: [each[name] for each in scored] for name in matched.networks}
        return places, table, own, metrics.values_of_pairs(table, own)

    # list all the work first, so that one bar shows all of it
    negative = []
    hard = []
    if isinstance(source, HeldOutPairs):
        negative = [NegativePairs(source)]
        hard = list(levels(source, robustness))
    every = [source, *negative, *(variant for _, _, variant in hard)]
    total = sum(count for each in every for _, count in each.scenes)
    conditions = {}
    # match and score all of it
    with Progress(total=total, desc="pairs", unit="pair") as bar:
        given = matched, settings
        # the pairs themselves
        found, bad = match_all(source, *given, score, bar)
        if not found:
            first = ": ".join(bad[0])
            raise WorkError(f"none of the {len(source)} images could be read; the first: {first}")
        # disturb the second views in each way at each level, and keep only the means
        for name, level, variant in hard:
            disturbed, _ = match_all(variant, *given, score, bar)
            if disturbed:
                values = tabulate(disturbed)[-1][[OURS, RATIO_TEST]]
                means = {"value": values.mean(), "pairs": values.count()}
                conditions[name, level] = pd.DataFrame(means)
        # match different photographs, where every match is wrong
        counts = [each for part in negative for each in match_all(part, *given, count, bar)[0]]
    # compute all metrics from the table
    places, table, own, values = tabulate(found)
    samples = metrics.resample(values, own)
    summary = metrics.summarize(values, samples)
    for name, mean in pd.DataFrame(counts).mean().items():
        row = mean, math.nan, math.nan, len(counts)
        summary.loc[(name, "negative_matches", "", False), :] = row
    summary = summary.astype({"pairs": int})
    return Results(
        where,
        source.unit,
        table,
        values,
        summary,
        metrics.compare(values, samples, list(matched.networks)),
        pd.concat(conditions, names=["condition", "level"]) if conditions else pd.DataFrame(),
        metrics.calibration(own[OURS]),
        bad,
        protocol=describe(source, where, matched, settings),
        pictures=draw_pictures(source, matched, table, places, settings),
    )


def track(args: argparse.Namespace, results: Results, info: Mapping[str, Any]) -> None:
    """Add headline, files and description to an MLflow run.

    It is the run of the training that the model's `info` names. Without `--mlflow-run` nothing is
    done.
    """
    if args.mlflow_run is None:
        return
    # further evaluations have names of their own, such as test/hpatches/auc_5
    folder = args.pairs or args.poses
    prefix = "/".join(filter(None, (tracking.EVALUATION, folder.resolve().stem if folder else "")))
    values = {f"{prefix}/{name}": value for name, value in report.headline(results).items()}
    with tracking.attach(args.mlflow_run, training=info.get("training")) as sent:
        sent.log(values, int(info.get("step") or 0))
        sent.artifact(args.out, prefix)
        sent.tags({f"{prefix}.processor": provenance.processor()})
        if folder is None:  # the pairs come from the data that the model was trained on
            best = report.duels(results)[-1]["ours"]["value"]
            sent.describe(f"AUC@5 {report.percent(best)}", report.note(results, prefix))
            sent.compare_with_champion(args.out / "pairs.csv")


def main(argv: Optional[List[str]] = None) -> int:
    workers.end_with_dvc()
    args = parse(argv)
    cv2.setNumThreads(1)  # the threads work on several images at a time
    results, info = evaluate(args)
    # write the files first, so that MLflow can copy them
    report.write(args.out, results, report.render(results, args.curves))
    # `python -m pipeline.report` prints the summary where the pipeline ends
    in_stage = "DVC_STAGE" in os.environ
    print(f"\n{report.verdict(results) if in_stage else report.summary(results)}")
    print(f"\nwritten to {args.out}: {report.TEXT} has all tables", flush=True)
    track(args, results, info)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
