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

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import cv2

from pipeline import errors, provenance, tracking, workers
from pipeline.errors import RequestError
from pipeline.evaluate import TEXT, estimators, evaluation, matchers, report
from pipeline.evaluate.matchers import OURS, MatcherSet, MatchFunction
from pipeline.evaluate.pair_files import HPatchesPairs, PosePairs
from pipeline.evaluate.pairs import HeldOutPairs, PairSource
from pipeline.evaluate.report import Results
from pipeline.evaluate.scoring import ScoringSettings
from pipeline.fetch import dataset
from pipeline.fetch.dataset import Entry, ImageSet
from superglue_sift.errors import Parser
from superglue_sift.files import check_writable
from superglue_sift.matcher import PRECISIONS, Matcher
from superglue_sift.network.weights import find_shipped_weights

# Arguments of `Matcher.load` that this command also has as options
MATCHER_OPTIONS = (
    "max_keypoints", "network_keypoints", "threshold", "resize", "precision", "scene", "accept",
    "min_matches",
)  # fmt: skip


def make_parser() -> Parser:
    """Create the parser of the command line."""
    parser = errors.make_parser("pipeline.evaluate", __doc__)
    add = parser.add_argument
    # The matchers
    add("--model", type=Path, help="model to evaluate (default: the shipped weights)")
    also_help = "another model, or a matcher module:function; repeat for more"
    add("--also", action="append", default=[], metavar="NAME=FILE", help=also_help)
    add("--bound", action="store_true", help="also a row of the true matches, an upper bound")
    # The pairs
    add(
        "--images",
        type=Path,
        default=Path("data/images"),
        help="folder that `fetch` wrote; with --poses, that of the images",
    )
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument(
        "--pairs", type=Path, help="instead of held-out images: a folder in HPatches layout"
    )
    sources.add_argument(
        "--poses", type=Path, help="instead: pairs with cameras (pairs_with_gt.txt); see --images"
    )
    number_help = "number of photographs that are tried under growing blur, noise, ... (default: 0)"
    sources.add_argument("--robustness", type=int, default=0, help=number_help)
    side_help = (
        "--pairs, --poses: resize images to this shorter side; errors are in these pixels; 480 is"
        " HPatches' protocol (default: no)"
    )
    add("--short-side", type=int, default=0, help=side_help)
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
    add_setting("--precision", choices=PRECISIONS, help="of the layers (default: float32)")
    scene_help = "photographs of one place: accept or reject each pair"
    add_setting("--scene", action="store_true", help=scene_help)
    add_setting("--accept", type=float, help="with --scene: smallest probability of one place")
    min_help = "with --scene: fewest inliers of the ratio test; 0 skips none"
    add_setting("--min-matches", type=int, help=min_help)
    # The metrics, and the machine
    refine_help = "skip the metrics of refined matches, to save time"
    add("--no-refine", dest="refine", action="store_false", help=refine_help)
    names = f"of: {', '.join(estimators.ESTIMATORS)}"
    default = f"default: {','.join(estimators.DEFAULT)}"
    add("--estimators", help=f"{names}; the first decides pictures and verdict ({default})")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """Evaluate, write the report, and send it to MLflow. Return the exit code."""
    workers.end_with_dvc()
    args = make_parser().parse_args(argv)
    is_held_out = not (args.pairs or args.poses)

    # Check the options before the work.
    if args.threshold is not None and args.threshold >= 1:
        raise RequestError(f"--threshold {args.threshold:g}: no match is above it; must be below 1")
    if args.short_side and is_held_out:
        raise RequestError("--short-side: only with --pairs or --poses")
    names = args.estimators.split(",") if args.estimators else estimators.DEFAULT
    for name in names:
        if name not in estimators.ESTIMATORS:
            choices = ", ".join(estimators.ESTIMATORS)
            raise RequestError(f"--estimators {name}: unknown; choose from {choices}")
    check_writable(args.out / "metrics.json", args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    sections = params.load(args.params or params.find_default_file())
    section = sections.evaluate

    # Load the matchers. Pairs from files have the defaults of superglue-match. Held-out views keep
    # their size. They have evaluate.max_keypoints, and the network gets all of these.
    notes: List[str] = []
    options = {name: getattr(args, name) for name in MATCHER_OPTIONS}
    options = {name: value for name, value in options.items() if value is not None}
    if is_held_out:
        count = options.get("max_keypoints", section.max_keypoints)
        options = {"max_keypoints": count, "network_keypoints": count, "resize": 0, **options}
    files, functions = find_matchers(args.model, args.also)
    extractor = sections.keypoints.extractor
    networks = matchers.load_networks(files, args.device, options, extractor, notes)

    # Choose the pairs. `choose_photographs` leaves out those that a network was trained on.
    source: PairSource
    if args.pairs:
        source = HPatchesPairs(args.pairs, args.short_side)
        origin = f"{args.pairs.resolve().name}: {len(source)} sequences"
    elif args.poses:
        source = PosePairs(args.poses, args.images, args.short_side)
        origin = f"{args.poses.name}: known cameras"
    else:
        images = dataset.open_manifest(args.images)
        keep = sections.run.allow_training_images
        entries, networks, lines = choose_photographs(images, networks, files, keep)
        notes += lines
        source = HeldOutPairs(images, entries, section, args.robustness)
        # The name of the source, such as coco2017, or of the user's folders
        name = ", ".join(Path(path).name for path in images.containers.values())
        name = name if images.source in ("", "folder") else images.source
        origin = f"{name}: {len(source)} held-out images ({entries[0].split})"
        if keep:
            origin += "".join(f", {line.rstrip('.')}" for line in lines)

    # The title says what is measured: the pairs, their size and their keypoints.
    ours = networks[OURS]
    if is_held_out:
        size = f"{section.width}x{section.height}"
    else:
        size = f"short side {args.short_side}" if args.short_side else "full size"
        size += f", SIFT at {ours.resize} px" if ours.resize else ", SIFT at this size"
    is_part = ours.network_keypoints < ours.max_keypoints
    limit = f"{ours.network_keypoints} of " if is_part else ""
    title = f"{origin}, {size}, {limit}{ours.max_keypoints} keypoints"

    # Match, score and write the report.
    cv2.setNumThreads(1)  # `evaluate` has threads, each with an image of its own
    settings = ScoringSettings(section, tuple(dict.fromkeys(names)), args.bound, args.refine)
    with silence_warnings():
        results = evaluation.evaluate(source, title, MatcherSet(networks, functions), settings)
    results = results._replace(notes=notes)
    report.write_files(args.out, results, args.curves)
    # In the pipeline, `python -m pipeline.report` prints the summary at the end.
    in_stage = "DVC_STAGE" in os.environ
    headlines = "\n".join(report.make_headlines(results))
    print(f"\n{headlines if in_stage else report.make_summary(results)}")
    print(f"\nwritten to {args.out}: {TEXT} has all tables", flush=True)

    # Send the results to the MLflow run of the training. Further evaluations have names of their
    # own, such as test/hpatches/auc_5.
    if args.mlflow_run is not None:
        folder = args.pairs or args.poses
        prefix = tracking.EVALUATION + (f"/{folder.resolve().stem}" if folder else "")
        send_to_mlflow(args.mlflow_run, args.out, results, ours.info, prefix)
    return 0


def find_matchers(
    model: Optional[Path], also: Sequence[str]
) -> Tuple[Dict[str, Path], Dict[str, MatchFunction]]:
    """Find the files of all compared models, and import the user's matching functions.

    Args:
        model: the file of the evaluated model. If None, the shipped weights are evaluated.
        also: further models and functions, as NAME=FILE or NAME=MODULE:FUNCTION.

    Returns:
        The files by name, the evaluated model first, and the functions by name.

    Raises:
        RequestError: If a name is invalid or used already.
        ImportError: If there is no such module.
        AttributeError: If the module has no such function.
    """
    files = {OURS: model or find_shipped_weights()}
    functions = {}
    for word in also:
        name, _, file = word.partition("=")
        used_names = (*matchers.MATCHERS, matchers.BOUND, *files, *functions)
        is_valid = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) is not None
        if not is_valid or not file or name in used_names:
            rule = "must be NAME=FILE, NAME a new one of letters, digits, - and _"
            raise RequestError(f"--also {word}: {rule}")
        # A word with a colon is a function of the user, and any other word is a file.
        if re.fullmatch(r"[\w.]+:\w+", file):
            functions[name] = matchers.load_matcher_function(file)
        else:
            files[name] = Path(file)
    return files, functions


def choose_photographs(
    images: ImageSet, networks: Mapping[str, Matcher], files: Mapping[str, Path], keep: bool
) -> Tuple[List[Entry], Dict[str, Matcher], List[str]]:
    """Choose the held-out photographs on which no compared network was trained.

    All rows of a table need the same pairs. A photograph on which one network was trained is
    therefore left out for all networks. A further network is left out itself if it was trained on
    all photographs that remain.

    Args:
        images: the images of the stage `fetch`.
        networks: all networks by name.
        files: their files.
        keep: whether to keep photographs of the training, the key `run.allow_training_images`.

    Returns:
        The photographs, the networks that are compared, and notes for the report.

    Raises:
        RequestError: If there is no held-out photograph, or if the evaluated network was trained on
            all of them.
    """
    # Take the split `test`, or `val` if there is no test image.
    entries = images.select_entries("test")
    if not entries:
        entries = images.select_entries("val")
        line = "no test images: using the validation images, on which the checkpoint was chosen"
        print(line, file=sys.stderr)
    if not entries:
        raise RequestError("no held-out image: raise fetch.val_fraction, or add images")
    # Each network may remove photographs. The evaluated one comes first.
    notes = []
    compared_networks = {}
    for name, network in networks.items():
        photographs = [images.identify_photograph(entry) for entry in entries]
        title, purpose = ("the model", "held-out") if name == OURS else (name, "")
        indices, line = provenance.leave_out_photographs(
            files[name], photographs, keep, title, network.info, purpose
        )
        if indices:
            notes += [f"{line}."] if line else []
            entries = [entries[index] for index in indices]
            compared_networks[name] = network
        else:
            notes.append(f"{name} is left out: it was trained on all {len(entries)} photographs.")
    return entries, compared_networks, notes


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


def send_to_mlflow(
    log: Path, out: Path, results: Results, info: Mapping[str, Any], prefix: str
) -> None:
    """Add the headline, the files and a description to the MLflow run of the model's training.

    Args:
        log: the mlflow.json of the training, which names the run.
        out: the folder of the report.
        results: the results, whose files are written already.
        info: the description in the model's file, which names the training.
        prefix: how the names of metrics and artifacts begin.
    """
    values = {f"{prefix}/{name}": value for name, value in report.select_headline(results).items()}
    with tracking.attach(log, training=info.get("training")) as run:
        run.log_metrics(values, int(info.get("step") or 0))
        run.set_tags({f"{prefix}.processor": provenance.read_processor()})
        # Only held-out images describe the run, since they are a part of its data.
        if prefix == tracking.EVALUATION:
            *_, auc = report.compare_matchers(results)  # AUC@5 comes last
            text = f"AUC@5 {report.format_percent(auc['ours']['value'])}"
            run.describe(text, report.make_note(results, prefix))
        run.add_artifact(out, prefix)


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
