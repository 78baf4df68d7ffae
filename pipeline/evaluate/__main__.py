"""Stage `evaluate`: compare a matcher with baselines, on held-out images or on pairs from files.

    python -m pipeline.evaluate --model checkpoints/best.safetensors --out reports/evaluate
    python -m pipeline.evaluate --pairs DIR --out DIR          # the shipped weights

Writes index.html (one page with everything), metrics.json (flat names), pairs.csv (one line per
pair and matcher) and more into --out. docs/evaluation.md explains every file and metric.
"""

from __future__ import annotations

import sys

from pipeline import params
from superglue_sift import environment

if __name__ == "__main__":
    # These settings must come before torch is loaded.
    environment.wait_passively()
    if params.is_portable(sys.argv[1:]):
        environment.prepare_network()

import argparse
import contextlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import cv2

from pipeline import errors, provenance, tracking, workers
from pipeline.errors import RequestError
from pipeline.evaluate import estimators, evaluation, matchers, report
from pipeline.evaluate.matchers import OURS, MatcherSet, Network
from pipeline.evaluate.pairs import HeldOutPairs, HPatchesPairs, PairSource, PosePairs
from pipeline.evaluate.report import Results
from pipeline.evaluate.scoring import ScoringSettings
from pipeline.fetch import dataset
from pipeline.fetch.dataset import Entry
from pipeline.params import EvaluateParams
from superglue_sift.errors import check_range
from superglue_sift.features import extractors
from superglue_sift.files import check_writable
from superglue_sift.matcher import PRECISIONS, Matcher
from superglue_sift.matches import Matches
from superglue_sift.network.batch import FeaturePair
from superglue_sift.network.weights import choose_device, find_shipped_weights

# Options that exclude each other: robustness needs held-out images, the others homographies.
EXCLUDED_OPTIONS = (
    ("robustness", "pairs"),
    *((option, "poses") for option in ("pairs", "robustness", "bound", "estimators")),
)
# Smallest values of options
SMALLEST_VALUES = {"robustness": 0, "short_side": 0}
# Arguments of `Matcher.load` that this command also has as options
MATCHER_OPTIONS = (
    "max_keypoints", "network_keypoints", "threshold", "resize", "precision", "scene", "accept",
    "min_matches",
)  # fmt: skip


def parse(argv: Optional[List[str]]) -> argparse.Namespace:
    """Parse and check the command line.

    Raises:
        RequestError: If an option is wrong, or if two options exclude each other.
    """
    parser = errors.make_parser("pipeline.evaluate", __doc__)
    add = parser.add_argument
    # The matchers
    add("--model", type=Path, help="model to evaluate (default: the shipped weights)")
    also_help = "another model, or a matcher module:function; repeat for more"
    add("--also", action="append", default=[], metavar="NAME=FILE", help=also_help)
    # The pairs
    add("--images", type=Path, default=Path("data/images"), help="folder that `fetch` wrote")
    add("--pairs", type=Path, help="instead of held-out images: a folder in HPatches layout")
    add("--poses", type=Path, help="instead: a pairs_with_gt.txt of cameras, images in --images")
    # The files that are read and written
    add("--out", type=Path, default=Path("reports/evaluate"), help="folder for the results")
    add("--params", type=Path, help="parameters (default: params.yaml here, else the project's)")
    add("--mlflow-run", type=Path, help="mlflow.json of the training, whose run gets results")
    add("--curves", type=Path, help="SVG of the learning curve for the page (default: none)")
    # The settings of the matchers
    group = parser.add_argument_group(
        "how to match",
        "The options of superglue-match, with its defaults for --pairs and --poses. Held-out"
        " images keep their size and have evaluate.max_keypoints, all of which the network gets.",
    )
    add_setting = group.add_argument
    add_setting("--max-keypoints", type=int, help="maximum number of keypoints of an image")
    network_help = "maximum number of them that a network gets, selected for each pair"
    add_setting("--network-keypoints", type=int, help=network_help)
    threshold_help = "smallest confidence of a match (default: that of the model)"
    add_setting("--threshold", type=float, help=threshold_help)
    add_setting("--resize", type=int, help="longer side of the images for SIFT; 0 keeps the size")
    add_setting("--precision", choices=PRECISIONS, default="float32", help="of the layers")
    scene_help = "photographs of one place: accept or reject each pair"
    add_setting("--scene", action="store_true", help=scene_help)
    add_setting("--accept", type=float, help="with --scene: smallest probability of one place")
    min_matches_help = "with --scene: minimum of classical matches; 0 skips none"
    add_setting("--min-matches", type=int, help=min_matches_help)
    # Options that change how the metrics are computed
    refine_help = "skip the metrics of refined matches, to save time"
    add_setting("--no-refine", dest="refine", action="store_false", help=refine_help)
    side_help = (
        "--pairs, --poses: resize to this shorter side first, in which errors are measured; 480 is"
        " HPatches' protocol (default: no)"
    )
    add("--short-side", type=int, default=0, help=side_help)
    names = f"of: {', '.join(estimators.ESTIMATORS)}"
    default = f"default: {','.join(estimators.DEFAULT)}"
    add("--estimators", help=f"{names}; the first leads ({default})")
    add("--bound", action="store_true", help="also a row of the true matches, an upper bound")
    # Further pairs, and the machine
    number_help = "number of photographs that are tried under growing blur, noise, ... (default: 0)"
    add("--robustness", type=int, default=0, help=number_help)
    keep_help = "keep photographs of the training (default: run.allow_training_images of --params)"
    add("--allow-training-images", action="store_true", help=keep_help)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return check_options(parser.parse_args(argv))


def check_options(args: argparse.Namespace) -> argparse.Namespace:
    """Check the options, and find the models, functions and files that they name.

    The attributes `models`, `functions`, `params` and `estimators` of `args` are set. The folder of
    the results is created.

    Raises:
        RequestError: If an option is wrong, or if two options exclude each other.
    """
    for option, excluded in EXCLUDED_OPTIONS:
        if getattr(args, option) and getattr(args, excluded):
            raise RequestError(f"--{option} and --{excluded} exclude each other: leave one out")
    # Check the values of single options.
    check_writable(args.out / "metrics.json", args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, least in SMALLEST_VALUES.items():
        check_range(f"--{name.replace('_', '-')}", getattr(args, name), least)
    if args.short_side and not (args.pairs or args.poses):
        raise RequestError("--short-side: only with --pairs or --poses")
    # Load these now, so that a wrong name is reported before the work.
    args.models, args.functions = find_models(args.model, args.also)
    args.params = args.params or params.find_default_file()
    names = args.estimators.split(",") if args.estimators else estimators.DEFAULT
    for name in names:
        if name not in estimators.ESTIMATORS:
            choices = ", ".join(estimators.ESTIMATORS)
            raise RequestError(f"--estimators {name}: unknown; choose from {choices}")
    args.estimators = tuple(dict.fromkeys(names))
    return args


def find_models(
    model: Optional[Path], also: Sequence[str]
) -> Tuple[Dict[str, Path], Dict[str, Callable[[FeaturePair], Matches]]]:
    """Find the files of all compared models, and import the user's matching functions.

    Args:
        model: the file of the evaluated model. If None, the shipped weights are evaluated.
        also: further models and functions, as NAME=FILE or NAME=MODULE:FUNCTION.

    Returns:
        The files by name, the evaluated model first, and the functions by name.

    Raises:
        RequestError: If a name is invalid or used already, or if there is no such function.
    """
    models = {OURS: model or find_shipped_weights()}
    functions = {}
    for word in also:
        name, _, file = word.partition("=")
        used_names = (*matchers.MATCHERS, matchers.BOUND, *models, *functions)
        is_valid = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) is not None
        if not is_valid or not file or name in used_names:
            rule = "must be NAME=FILE, NAME a new one of letters, digits, - and _"
            raise RequestError(f"--also {word}: {rule}")
        # A word with a colon is a function of the user, and any other word is a file.
        if re.fullmatch(r"[\w.]+:\w+", file):
            functions[name] = matchers.load_matcher_function(file)
        else:
            models[name] = Path(file)
    return models, functions


def select_matcher_options(args: argparse.Namespace, section: EvaluateParams) -> Dict[str, Any]:
    """Return the arguments of `Matcher.load` that follow from the command line and params.yaml.

    Pairs from files have the defaults of superglue-match. Held-out views have the keypoints of the
    training, at the size of the views, and the network gets all of these keypoints.
    """
    defaults: Dict[str, Any] = {}
    if not (args.pairs or args.poses):
        count = section.max_keypoints if args.max_keypoints is None else args.max_keypoints
        defaults = {"max_keypoints": count, "network_keypoints": count, "resize": 0}
    options = {name: getattr(args, name) for name in MATCHER_OPTIONS}
    return {**defaults, **{name: value for name, value in options.items() if value is not None}}


def load_networks(
    args: argparse.Namespace, matcher_options: Mapping[str, Any], notes: List[str]
) -> Dict[str, Network]:
    """Load the networks, and return them by name.

    A network that matches keypoints of another extractor is left out.

    Args:
        args: the command line.
        matcher_options: arguments of `Matcher.load`.
        notes: the notes of the report, to which lines are added.

    Raises:
        RequestError: If the extractor is not SIFT and params.yaml does not name it.
    """
    device = choose_device(args.device)
    networks: Dict[str, Network] = {}
    for name, file in args.models.items():
        network = matchers.load_network(file, device, **matcher_options)
        # All rows of a table have the same keypoints, those of the evaluated model.
        extractor = network.matcher.model.config.extractor
        if extractor == networks.get(OURS, network).matcher.model.config.extractor:
            networks[name] = network
        else:
            notes.append(f"{name} is left out: it matches keypoints of {extractor}.")
    # A model file may name any function, so it is run only if the user names it, too.
    matcher = networks[OURS].matcher
    extractor = matcher.model.config.extractor
    if matcher.extractor is None:
        if params.load(args.params).keypoints.extractor != extractor:
            raise RequestError(
                f"{args.models[OURS]}: matches keypoints of {extractor}, code that is run only when"
                f" asked for: set keypoints.extractor: {extractor} in {args.params}"
            )
        matcher.extractor = extractors.load_extractor(extractor)
    return networks


def choose_photographs(
    args: argparse.Namespace, networks: Dict[str, Network], notes: List[str]
) -> Tuple[List[Entry], Dict[str, Network]]:
    """Choose the held-out photographs on which no compared network was trained.

    All rows of a table need the same pairs. A photograph on which one network was trained is
    therefore left out for all networks, unless `run.allow_training_images` keeps it. A further
    network is left out itself if it was trained on all photographs that remain.

    Args:
        args: the command line.
        networks: all networks by name.
        notes: the notes of the report, to which lines are added.

    Returns:
        The photographs, and the networks that are compared.

    Raises:
        RequestError: If there is no held-out photograph, or if the evaluated network was trained on
            all of them.
    """
    # Take the split `test`, or `val` if there is no test image.
    images = dataset.open_manifest(args.images)
    entries = images.select_entries("test")
    if not entries:
        entries = images.select_entries("val")
        line = "no test images: using the validation images, on which the checkpoint was chosen"
        print(line, file=sys.stderr)
    if not entries:
        fix = "raise fetch.val_fraction or add images, then run fetch again"
        raise RequestError(f"{args.images}: no held-out image; {fix}")
    # Each network may remove photographs.
    compared_networks = {}
    for name, network in networks.items():
        photographs = [images.identify_photograph(entry) for entry in entries]
        title = "the model" if name == OURS else name
        keep = args.allow_training_images
        indices, line = provenance.leave_out_photographs(network.file, photographs, keep, title)
        if indices:
            notes += [f"{line}."] if line else []
            entries = [entries[index] for index in indices]
            compared_networks[name] = network
        elif name == OURS:
            raise RequestError(
                f"{network.file}: was trained on all of the {len(entries)} held-out photographs;"
                ' evaluate on others, train from scratch (train.init_from: ""), or keep them with'
                " run.allow_training_images: true"
            )
        else:
            notes.append(f"{name} is left out: it was trained on all {len(entries)} photographs.")
    return entries, compared_networks


def choose_source(
    args: argparse.Namespace,
    section: EvaluateParams,
    matcher: Matcher,
    entries: Sequence[Entry],
    notes: List[str],
) -> Tuple[PairSource, str]:
    """Return the source of pairs, by default held-out photographs, and the title of its tables.

    Args:
        args: the command line.
        section: the section `evaluate` of params.yaml, for held-out photographs.
        matcher: the evaluated matcher, whose settings are in the title.
        entries: the held-out photographs, from `choose_photographs`.
        notes: the notes of the report. The title repeats them if photographs of the training are
            kept.
    """
    max_keypoints = matcher.max_keypoints
    network_keypoints = matcher.network_keypoints
    limit = f"{network_keypoints} of " if network_keypoints < max_keypoints else ""
    keypoints = f"{limit}{max_keypoints} keypoints"
    size = f"short side {args.short_side}" if args.short_side else "full size"
    sift_size = f"SIFT at {matcher.resize} px" if matcher.resize else "SIFT at this size"
    # Read the pairs from files.
    if args.pairs:
        source = HPatchesPairs(args.pairs, args.short_side)
        name = args.pairs.resolve().name
        return source, f"{name}: {len(source)} sequences, {size}, {sift_size}, {keypoints}"
    if args.poses:
        source = PosePairs(args.poses, args.images, args.short_side)
        return source, f"{args.poses.name}: known cameras, {size}, {sift_size}, {keypoints}"
    # Or render the pairs from photographs.
    held_out = HeldOutPairs(dataset.open_manifest(args.images), entries, section)
    source_info = json.loads((args.images / "source.json").read_text(encoding="utf-8"))
    # The title names the source, such as coco2017, or the user's folders.
    name = source_info.get("source", "folder")
    if name == "folder":
        containers = source_info["containers"].values()
        name = ", ".join(Path(container["path"]).name for container in containers)
    overlap = "".join(f", {line.rstrip('.')}" for line in notes if args.allow_training_images)
    images = f"{len(held_out)} held-out images ({entries[0].split}){overlap}"
    return held_out, f"{name}: {images}, {section.width}x{section.height}, {keypoints}"


def evaluate(args: argparse.Namespace) -> Tuple[Results, Mapping[str, Any]]:
    """Evaluate all matchers. Return the results and the description of the evaluated model.

    Raises:
        RequestError: If the request is wrong.
        WorkError: If no pair can be read.
    """
    # Read the section of params.yaml, and load the networks.
    sections = params.load(args.params)
    section = sections.evaluate
    # The key of the training counts like the option: a stage of DVC has fixed options.
    args.allow_training_images |= sections.run.allow_training_images
    notes: List[str] = []
    networks = load_networks(args, select_matcher_options(args, section), notes)
    # Choose the pairs, without photographs that a compared network was trained on.
    entries: List[Entry] = []
    if not (args.pairs or args.poses):
        entries, networks = choose_photographs(args, networks, notes)
    matcher_set = MatcherSet(networks, args.functions)
    source, title = choose_source(args, section, matcher_set.evaluated, entries, notes)
    # Match and score.
    settings = ScoringSettings(section, args.estimators, args.bound, args.refine)
    results = evaluation.evaluate_source(source, title, matcher_set, settings, args.robustness)
    return results._replace(notes=notes), networks[OURS].info


def send_to_mlflow(args: argparse.Namespace, results: Results, info: Mapping[str, Any]) -> None:
    """Add the headline, the files and a description to the MLflow run of the model's training.

    Nothing is done without `--mlflow-run`.

    Args:
        args: the command line.
        results: the results, whose files are written already.
        info: the description in the model's file, which names the training.
    """
    if args.mlflow_run is None:
        return
    # Further evaluations have names of their own, such as test/hpatches/auc_5.
    folder = args.pairs or args.poses
    prefix = "/".join(filter(None, (tracking.EVALUATION, folder.resolve().stem if folder else "")))
    values = {f"{prefix}/{name}": value for name, value in report.select_headline(results).items()}
    with tracking.attach(args.mlflow_run, training=info.get("training")) as run:
        run.log_metrics(values, int(info.get("step") or 0))
        run.set_tags({f"{prefix}.processor": provenance.read_processor()})
        # Held-out images come from the data on which the model was trained.
        if folder is None:
            auc = report.compare_matchers(results)[-1]["ours"]["value"]
            run.describe(f"AUC@5 {report.format_percent(auc)}", report.make_note(results, prefix))
        run.add_artifact(args.out, prefix)


@contextlib.contextmanager
def silence_warnings() -> Iterator[None]:
    """Silence the library's warnings.

    Views without keypoints are expected where light and noise are tried.
    """
    logger = logging.getLogger("superglue_sift")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def main(argv: Optional[List[str]] = None) -> int:
    """Evaluate, write the report, and send it to MLflow. Return the exit code."""
    workers.end_with_dvc()
    args = parse(argv)
    cv2.setNumThreads(1)  # The threads work on several images at a time
    with silence_warnings():
        results, info = evaluate(args)
    # Write the files first, so that MLflow can copy them.
    report.write_files(args.out, results, report.render_page(results, args.curves))
    # Where the pipeline ends, `python -m pipeline.report` prints the summary.
    in_stage = "DVC_STAGE" in os.environ
    headlines = "\n".join(report.make_headlines(results))
    print(f"\n{headlines if in_stage else report.make_summary(results)}")
    print(f"\nwritten to {args.out}: {report.TEXT} has all tables", flush=True)
    send_to_mlflow(args, results, info)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
