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
    if params.asks_for_portable(sys.argv[1:]):
        environment.prepare_network()

import argparse
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import cv2
import numpy as np
import pandas as pd

from pipeline import bootstrap, errors, provenance, tracking, training_overlap
from pipeline.errors import RequestError, WorkError
from pipeline.evaluate import charts, estimators, matchers, metrics, report, scoring
from pipeline.evaluate.folders import HPatchesPairs, PosePairs
from pipeline.evaluate.matchers import OURS, RATIO_TEST, Matchers
from pipeline.evaluate.pairs import (
    HeldOutPairs,
    KnownPair,
    NegativePairs,
    Source,
    extract_pairs,
    levels,
)
from pipeline.evaluate.report import Results, only
from pipeline.evaluate.scoring import Settings, score_pair
from pipeline.fetch import dataset
from pipeline.fetch.dataset import Entry
from pipeline.files import file_sha256
from pipeline.params import EvaluateParams
from pipeline.prefetch import prefetch
from superglue_sift import drawing
from superglue_sift.errors import check_range
from superglue_sift.features import extractors
from superglue_sift.features.extractors import Extractor
from superglue_sift.features.images import BadImage
from superglue_sift.matches import Matches
from superglue_sift.network.batch import Pair
from superglue_sift.network.weights import choose_device, shipped_weights
from superglue_sift.progress import Progress

BATCH = 8  # number of pairs in one pass of a network
MAX_THREADS = 8  # largest number of threads that load, and of threads that score
LEAST = {"max_keypoints": 1, "network_keypoints": 1, "robustness": 0, "resize": 0}
PICTURED = (OURS, RATIO_TEST)  # the matchers of a picture, one above the other
KINDS = {"best": "One of the best pairs", "median": "A typical pair", "worst": "One of the worst"}
Score = Callable[[KnownPair, Mapping[str, Matches]], Any]


def parse(argv: Optional[List[str]]) -> argparse.Namespace:
    """Parse the command line. Raises RequestError for options that exclude each other."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.evaluate", description=str(__doc__).splitlines()[0]
    )
    add = parser.add_argument
    # which matchers
    add("--model", type=Path, help="model to evaluate (default: the shipped weights)")
    also = "another model, or a matcher module:function; repeat for more"
    add("--also", action="append", default=[], metavar="NAME=FILE", help=also)
    # which pairs
    add("--images", type=Path, default=Path("data/images"), help="folder that `fetch` wrote")
    add("--pairs", type=Path, help="instead of held-out images: a folder in HPatches layout")
    cameras = "instead: a pairs_with_gt.txt of pairs with cameras, images in --images"
    add("--poses", type=Path, help=cameras)
    # where files are read and written
    add("--out", type=Path, default=Path("reports/evaluate"), help="folder for the results")
    add("--params", type=Path, help="parameters (default: params.yaml here, else the project's)")
    run = "reports/train/log.jsonl, to add the results to the run of the training"
    add("--mlflow-run", type=Path, help=run)
    # keypoints, matches and metrics
    add("--max-keypoints", type=int, help="instead of evaluate.max_keypoints")
    curves = "SVG of the learning curve for the page (default: none)"
    add("--curves", type=Path, help=curves)
    selected = "number of them that are selected for the networks in each pair (default: all)"
    add("--network-keypoints", type=int, help=selected)
    threshold = "smallest confidence of a match (default: the model's own)"
    add("--threshold", type=float, default=0.0, help=threshold)
    resize = "--pairs, --poses: shorter side in pixels (default: 480); 0 keeps the size"
    add("--resize", type=int, default=480, help=resize)
    usual = f"default: {','.join(estimators.DEFAULT)}"
    add("--estimators", help=f"of: {', '.join(estimators.ESTIMATORS)}; the first leads ({usual})")
    bound = "also a row of the true matches, an upper bound for all matchers"
    add("--bound", action="store_true", help=bound)
    refined = "skip the metrics of refined matches, to save time"
    add("--no-refine", dest="refine", action="store_false", help=refined)
    # further pairs, and the machine
    hard = "number of photographs that are tried under growing blur, noise, ... (default: none)"
    add("--robustness", type=int, default=0, help=hard)
    overlap = "keep photographs that a model was trained on, and say so in the title"
    add("--allow-training-images", action="store_true", help=overlap)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return check_options(parser.parse_args(argv))


def check_options(args: argparse.Namespace) -> argparse.Namespace:
    """Check the options, and add the models, the estimators and the file of parameters.

    Raises RequestError for a wrong option.
    """
    # options that exclude each other
    if args.pairs is not None and args.poses is not None:
        raise RequestError("--pairs and --poses are two evaluations: run one at a time")
    if args.robustness and (args.pairs or args.poses):
        raise RequestError(
            "--robustness needs held-out images: leave it out with --pairs and --poses"
        )
    if args.bound and args.poses:
        raise RequestError("--bound needs homographies: leave it out with --poses")
    if args.estimators and args.poses:
        raise RequestError("--estimators are of homographies: leave it out with --poses")
    # values of single options
    if args.out.exists() and not args.out.is_dir():
        raise RequestError(f"--out {args.out}: is a file; name a folder for the results")
    if not 0.0 <= args.threshold < 1.0:
        raise RequestError(f"--threshold {args.threshold}: must be at least 0 and below 1")
    for name, least in LEAST.items():
        if getattr(args, name) is not None:
            check_range(f"--{name.replace('_', '-')}", getattr(args, name), least)
    # what the options name: models, parameters and estimators
    args.models, args.further = models_of(args)
    args.params = args.params or params.usual_file()
    asked = args.estimators.split(",") if args.estimators else estimators.DEFAULT
    args.estimators = estimators.choose(asked)
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
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or not file:
            raise RequestError(
                f"--also {word}: must be NAME=FILE, NAME of letters, digits, - and _"
            )
        if name in (*matchers.MATCHERS, *matchers.UNRANKED, *models, *further):
            raise RequestError(
                f"--also {word}: there is a matcher called {name} already; choose another name"
            )
        # module:function is the user's code, anything else is a file
        if re.fullmatch(r"[\w.]+:\w+", file):
            further[name] = matchers.load_function(file)
        else:
            models[name] = Path(file)
    return models, further


def choose_photographs(
    args: argparse.Namespace, models: Dict[str, Path]
) -> Tuple[List[Entry], Dict[str, Path], List[str]]:
    """Return held-out photographs that no compared model was trained on, the models, and notes.

    All rows of a table need the same pairs. If one model was trained on a photograph, it is left
    out for all models, unless `--allow-training-images` keeps it. Raises RequestError if the
    evaluated model was trained on all photographs. A further model that was trained on all that
    remain is left out itself.
    """
    images = dataset.open_manifest(args.images)
    left = images.entries("test")
    if not left:
        left = images.entries("val")
        line = "no test images: using the validation images, on which the checkpoint was chosen"
        print(line, file=sys.stderr)
    if not left:
        fix = "raise fetch.val_fraction or add images, then run fetch again"
        raise RequestError(f"{args.images}: no held-out image; {fix}")
    # each model may remove photographs
    compared = {}
    notes = []
    for name, file in models.items():
        photographs = [entry.photograph for entry in left]
        words = "ours" if name == OURS else name
        given = photographs, args.allow_training_images, words
        places, line = training_overlap.leave_out(file, *given)
        if not places and name == OURS:
            raise RequestError(
                f"{file}: was trained on all of the {len(left)} held-out photographs; evaluate on"
                ' others, train from scratch (train.init_from: ""), or keep them with'
                " --allow-training-images"
            )
        if not places:
            notes.append(f"{name} is left out: it was trained on all {len(left)} photographs.")
            continue
        notes += [f"{line}."] if line else []
        left = [left[place] for place in places]
        compared[name] = file
    return left, compared, notes


def choose_source(
    args: argparse.Namespace, section: EvaluateParams, entries: Sequence[Entry], notes: List[str]
) -> Tuple[Source, str]:
    """Return the source of pairs, by default held-out photographs, and the title of its tables."""
    few = f"{args.network_keypoints} of " if args.network_keypoints else ""
    keypoints = f"{few}{section.max_keypoints} keypoints"
    size = f"short side {args.resize}" if args.resize else "full size"
    # pairs that are read from files
    if args.pairs is not None:
        source = HPatchesPairs(args.pairs, args.resize)
        return source, f"{args.pairs.resolve().name}: {len(source)} sequences, {size}, {keypoints}"
    if args.poses is not None:
        source = PosePairs(args.poses, args.images, args.resize)
        return source, f"{args.poses.name}: known cameras, {size}, {keypoints}"
    # pairs that are rendered from photographs, named by where these come from
    held_out = HeldOutPairs(dataset.open_manifest(args.images), entries, section)
    fetched = json.loads((args.images / "source.json").read_text(encoding="utf-8"))
    name = fetched.get("source", "folder")
    if name == "folder":
        name = ", ".join(Path(each["path"]).name for each in fetched["containers"].values())
    overlap = "".join(f", {line.rstrip('.')}" for line in notes if args.allow_training_images)
    images = f"{len(held_out)} held-out images ({entries[0].split}){overlap}"
    return held_out, f"{name}: {images}, {section.width}x{section.height}, {keypoints}"


def choose_extractor(args: argparse.Namespace, network: matchers.Network) -> Extractor:
    """Return the extractor of the evaluated model.

    Raises RequestError if it is not SIFT and params.yaml does not name it.
    """
    name = network.model.config.extractor
    if name != extractors.DEFAULT.name and params.load(args.params).keypoints.extractor != name:
        raise RequestError(
            f"{network.file}: matches keypoints of {name}, code that is run only when asked for:"
            f" set keypoints.extractor: {name} in {args.params}"
        )
    return extractors.load(name)


def load_networks(
    args: argparse.Namespace, device: str
) -> Tuple[Dict[str, matchers.Network], List[str]]:
    """Load the networks. Return them by name, with notes.

    A network that matches other keypoints than the evaluated model is left out, with a note.
    """
    networks: Dict[str, matchers.Network] = {}
    notes = []
    for name, file in args.models.items():
        network = matchers.load_network(file, device, args.threshold)
        extractor = network.model.config.extractor
        if extractor == networks.get(OURS, network).model.config.extractor:
            networks[name] = network
        else:
            notes.append(f"{name} is left out: it matches keypoints of {extractor}.")
    if networks[OURS].info.get("step") == 0:
        notes.append("Training kept the weights it began with: no later step was better.")
    return networks, notes


def divide(counts: Sequence[int], most: int) -> List[List[int]]:
    """Group consecutive scenes, given by their numbers of pairs, into lists of scene numbers.

    A group has at most `most` pairs, but at least one scene.
    """
    units: List[List[int]] = []
    held = most
    for index, count in enumerate(counts):
        if held + count > most:
            units.append([])
            held = 0
        units[-1].append(index)
        held += count
    return units


def match_all(
    source: Source, matched: Matchers, settings: Settings, score: Score, bar: Progress
) -> Tuple[List[Tuple[KnownPair, Any]], List[Tuple[str, str]]]:
    """Match and score all pairs of a source, in its order.

    Threads load and score, and the caller's thread runs the networks.

    Returns:
        A list with (`KnownPair.place`, what `score` returned) for each pair, and a list with
        (scene, reason) for each scene that could not be read.
    """

    def load(scenes: List[int]) -> Tuple[List[KnownPair], List[Tuple[str, str]], int]:
        pairs = []
        bad = []
        for index in scenes:
            try:
                given = settings.params.max_keypoints, settings.extractor
                pairs += extract_pairs(source, index, *given)
            except BadImage as error:
                bad.append((source.scenes[index][0], error.reason))
        return pairs, bad, sum(counts[index] for index in scenes)

    def match(loaded: Tuple[List[KnownPair], Any, int]) -> Tuple[Any, List[Dict[str, Matches]]]:
        return loaded, matched.answers([known.pair for known in loaded[0]], BATCH)

    def score_all(answered: Tuple[Any, List[Dict[str, Matches]]]) -> Tuple[List, List, int]:
        (pairs, bad, count), answers = answered
        scores = [(known.place, score(known, each)) for known, each in zip(pairs, answers)]
        return scores, bad, count

    counts = [count for _, count in source.scenes]
    # Threads suffice, because decoding, warping, SIFT and robust estimators release the GIL
    threads = min(os.cpu_count() or 1, MAX_THREADS)
    answered = map(match, prefetch(load, divide(counts, BATCH), threads, threads))
    found = []
    unread = []
    for scores, bad, count in prefetch(score_all, answered, threads, threads):
        found += scores
        unread += bad
        bar.update(count)
    return found, unread


def draw_pictures(
    source: Source,
    matched: Matchers,
    table: pd.DataFrame,
    places: Sequence[Tuple[int, int]],
    settings: Settings,
) -> List[Tuple[str, str, np.ndarray]]:
    """Draw the best, median and worst pairs. Return name, caption and pixels of each picture.

    Of the median pairs, the first picture shows the one in which the network leads the ratio test
    by most correct matches.
    """
    # which pairs, and which of them comes first
    wide = {name: _pair_values(only(table, matcher=name)) for name in PICTURED}
    chosen = choose_pictures(wide[OURS])
    more = wide[OURS]["correct"] - wide[RATIO_TEST]["correct"]
    middle = [number for name, number in chosen if name.startswith("median")] or [chosen[0][1]]
    first = max(middle, key=lambda number: more[number])
    drawn = []
    # The results keep no images, so each pair is loaded and matched again
    for name, number in sorted(chosen, key=lambda each: each[1] != first):
        index, position = places[number]
        given = settings.params.max_keypoints, settings.extractor
        (known,) = extract_pairs(source, index, *given, position)
        _, views = source.load(index)
        _, *ends, _ = views[position]
        left, right = (
            source.in_color(index, end, image) for end, image in zip(ends, known.images or ())
        )
        shown = matched.above(matched.answers([known.pair], 1)[0])
        # one panel for each matcher
        panels = []
        counts = []
        for matcher in PICTURED:
            row = wide[matcher].loc[number]
            words = f"{row['correct']:.0f} of {row['matches']:.0f} matches correct"
            unit = "degrees of pose error" if metrics.is_posed(table) else "px of corner error"
            words += f", {row['error']:.2f} {unit}"
            counts.append(f"{report.title(matcher)}: {words}.")
            points = scoring.matched_points(known.pair, shown[matcher])
            wrong = ~scoring.correct_matches(known, shown[matcher])
            heading = report.title(matcher)
            panels.append(drawing.Panel(heading, *points, shown[matcher].scores, wrong))
        caption = f"{KINDS[name.partition('-')[0]]} ({known.name}). {' '.join(counts)}"
        drawn.append((name, caption, drawing.draw(left, right, panels)))
    return drawn


def _pair_values(own: pd.DataFrame) -> pd.DataFrame:
    """Return matches, correct matches and the first estimator's error of each pair of a matcher."""
    first = only(own, metric="error")["estimator"].tolist()[0]
    chosen = only(own, refined=False)
    return chosen[chosen["estimator"].isin(["", first])].pivot(
        index="number", columns="metric", values="value"
    )


def choose_pictures(ours: pd.DataFrame) -> List[Tuple[str, int]]:
    """Choose the pairs with the best, median and worst errors, each once: [("best-1", 7), ...].

    `ours` has the columns `error` and `correct`. Of equal errors, more correct matches are better.
    """
    errors = ours.assign(wrong=-ours["correct"]).sort_values(["error", "wrong"], kind="stable")
    ranked = [int(number) for number in errors.index]
    middle = max(len(ranked) // 2 - 1, 0)
    chosen = {"best": ranked[:2], "worst": ranked[::-1][:3], "median": ranked[middle : middle + 3]}
    names: Dict[int, str] = {}
    for kind, group in chosen.items():
        for place, number in enumerate(group, 1):
            names.setdefault(number, f"{kind}-{place}")
    return [(name, number) for number, name in names.items()]


def describe(source: Source, where: str, matched: Matchers, settings: Settings) -> Dict[str, Any]:
    """Return the content of protocol.json: everything that must be quoted with a metric."""
    params = settings.params
    views = f"shorter side {settings.resize} px" if settings.resize else "as they are"
    if isinstance(source, HeldOutPairs):
        views = f"{params.width}x{params.height}"
    posed = isinstance(source, PosePairs)
    known = estimators.POSE_ESTIMATORS if posed else estimators.ESTIMATORS
    used = known if posed else settings.estimators
    # when a match counts as correct
    truth = (
        f"symmetric epipolar distance, squared, below {estimators.EPIPOLAR_LIMIT} in normalized"
        " coordinates"
    )
    if not posed:
        truth = (
            f"mutual nearest reprojections under {scoring.CORRECT_PX} px, the larger of both"
            " directions"
        )
    # robust estimation, and the keypoints that every matcher gets
    robust = f"inliers within {estimators.PX} px, {estimators.ITERATIONS} iterations"
    default = settings.extractor is extractors.DEFAULT
    few = matched.network_keypoints
    selected = f", of which {few} are selected for a network" if few else ""
    # what is known about every network
    models = {
        name: {
            "file": network.file.name,
            "sha256": file_sha256(network.file),
            "network": network.info["model"],
            "step": network.info.get("step"),
            "validation_f1": bootstrap.plain(
                network.info.get("validation", {}).get("f1", math.nan)
            ),
            "threshold": network.threshold,
        }
        for name, network in matched.networks.items()
    }
    ours = models.pop(OURS)
    return {
        "pairs_from": where,
        "views": views,
        "keypoints": f"{'SIFT' if default else settings.extractor.name}, at most"
        f" {params.max_keypoints} in each view{selected}",
        "truth": truth,
        **({} if posed else {"robust": robust}),
        "estimators": {name: known[name][1] for name in used},
        **({"aligned": scoring.REFINEMENT} if settings.refine else {}),
        "params": params.model_dump(),
        "model": ours,
        **({"models beside it": models} if models else {}),
    }


def evaluate(args: argparse.Namespace) -> Tuple[Results, Mapping[str, Any]]:
    """Evaluate all matchers. Return the results and the description of the network.

    Raises RequestError for a wrong request and WorkError if nothing can be evaluated.
    """
    asked = {"max_keypoints": args.max_keypoints} if args.max_keypoints else {}
    section = params.load(args.params).evaluate.model_copy(update=asked)
    device = choose_device(args.device)
    networks, skipped = load_networks(args, device)
    # the pairs: photographs leave out what a compared model was trained on
    entries: List[Entry] = []
    files = {name: network.file for name, network in networks.items()}
    notes: List[str] = []
    if args.pairs is None and args.poses is None:
        entries, files, notes = choose_photographs(args, files)
    source, where = choose_source(args, section, entries, notes)
    # the matchers, and how they are scored
    compared = {name: networks[name] for name in files}
    is_scene = args.poses is not None
    matched = Matchers(compared, device, args.further, is_scene, args.network_keypoints)
    extractor = choose_extractor(args, networks[OURS])
    numbers = args.resize, args.robustness
    settings = Settings(section, args.estimators, *numbers, extractor, args.bound, args.refine)
    results = run(source, where, matched, settings)
    bad = [f"{len(results.bad)} images could not be read: see bad_images.csv."] * bool(results.bad)
    return results._replace(notes=[*bad, *notes, *skipped]), networks[OURS].info


def run(source: Source, where: str, matched: Matchers, settings: Settings) -> Results:
    """Evaluate all pairs of a source, then its negative and its disturbed pairs.

    Raises WorkError if no pair can be read.
    """

    def score(known: KnownPair, answers: Mapping[str, Matches]) -> Any:
        return score_pair(known, answers, matched.thresholds, settings)

    def count(_: KnownPair, answers: Mapping[str, Matches]) -> Dict[str, int]:
        return {name: len(found) for name, found in matched.above(answers).items()}

    # list all the work first, so that one bar shows all of it
    held_out = isinstance(source, HeldOutPairs)
    hard = list(levels(source, settings.robustness)) if held_out and settings.robustness else []
    negative = NegativePairs(source) if held_out else None
    every = [source, *([negative] if negative else []), *(variant for _, _, variant in hard)]
    total = sum(count for each in every for _, count in each.scenes)
    conditions = []
    counted = metrics.count_negatives([])
    with Progress(total=total, desc="pairs", unit="pair") as bar:

        def match(part: Source, score: Score, name: str) -> Tuple[List, List]:
            bar.set_description(name, refresh=False)
            return match_all(part, matched, settings, score, bar)

        # the pairs themselves
        found, bad = match(source, score, "pairs")
        if not found:
            first = ": ".join(bad[0])
            raise WorkError(f"none of the {len(source)} images could be read; the first: {first}")
        table = metrics.make_table([rows for _, (rows, _) in found])
        # the second views disturbed, each way at each level: only the means are kept
        for name, level, variant in hard:
            scores = [each for _, each in match(variant, score, f"{name} {level:g}")[0]]
            if scores:
                rows = metrics.make_table([rows for rows, _ in scores])
                ours = [scored[OURS] for _, scored in scores]
                conditions.append(metrics.condition(name, f"{level:g}", rows, ours))
        # different photographs: every match is wrong
        if negative:
            counts = match(negative, count, "pairs of different photographs")[0]
            counted = metrics.count_negatives([each for _, each in counts])
    # all metrics, computed from the table
    scored = {name: [each[name] for _, (_, each) in found] for name in matched.networks}
    values, gains = metrics.compare(table, scored, matched.thresholds)
    places = [place for place, _ in found]
    return Results(
        where,
        source.unit,
        len(set(table["scene"])),
        table,
        pd.concat([values, counted], ignore_index=True),
        gains,
        pd.concat(conditions, ignore_index=True) if conditions else pd.DataFrame(),
        metrics.calibration(scored[OURS]),
        bad,
        protocol=describe(source, where, matched, settings),
        pictures=draw_pictures(source, matched, table, places, settings),
        same=metrics.same_as_ours(table, list(matched.networks)),
    )


def track(args: argparse.Namespace, results: Results, info: Mapping[str, Any]) -> None:
    """Add headline, files and description to an MLflow run.

    It is the run of the training that the model's `info` names. Without `--mlflow-run` nothing is
    done.
    """
    if args.mlflow_run is None:
        return
    folder = args.pairs or args.poses
    prefix = "/".join(filter(None, (tracking.EVALUATION, folder.resolve().stem if folder else "")))
    values = {f"{prefix}/{name}": value for name, value in report.headline(results).items()}
    with tracking.attach(args.mlflow_run, training=info.get("training")) as sent:
        sent.log(values, int(info.get("step") or 0))
        sent.artifact(args.out, prefix)
        sent.tags({f"{prefix}.processor": provenance.processor()})
        if folder is None:  # the pairs come from the data that the model was trained on
            sent.describe(report.result(results), report.note(results, prefix))
            sent.compare_with_champion(args.out / "pairs.csv")


def main(argv: Optional[List[str]] = None) -> int:
    started = time.monotonic()
    args = parse(argv)
    cv2.setNumThreads(1)  # the threads work on several images at a time
    results, info = evaluate(args)
    report.write(args.out, results, charts.render(results, args.curves))
    # A stage of DVC prints the whole report at the end, by `python -m pipeline.report`
    in_stage = "DVC_STAGE" in os.environ
    print(f"\n{report.verdict(results) if in_stage else report.text(results)}")
    print(f"\nwritten to {args.out}", flush=True)
    track(args, results, info)
    print(f"took {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
