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

if __name__ == "__main__":  # before torch is loaded
    environment.wait_passively()
    if params.asks_for_portable(sys.argv[1:]):
        environment.prepare_network()

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import cv2

from pipeline import errors, provenance, tracking
from pipeline.errors import RequestError
from pipeline.evaluate import estimators, matchers, poses, protocol, unseen
from pipeline.evaluate.heldout import HeldOutPairs
from pipeline.evaluate.hpatches import HPatchesPairs
from pipeline.evaluate.matchers import OURS, Matchers
from pipeline.evaluate.protocol import Evaluation, Named
from pipeline.evaluate.scoring import Settings
from pipeline.fetch import dataset
from pipeline.params import EvaluateParams
from pipeline.report import summary
from pipeline.report.document import Content
from superglue_sift.errors import check_range
from superglue_sift.features import extractors
from superglue_sift.features.extractors import Extractor
from superglue_sift.matches import Matches
from superglue_sift.network.batch import Pair
from superglue_sift.network.weights import choose_device, shipped_weights

PAPER_PAIRS = 1024
LEAST = {  # of whole numbers
    **dict.fromkeys(("max_keypoints", "network_keypoints", "paper"), 1),
    **dict.fromkeys(("robustness", "resize"), 0),
}


def parse(argv: Optional[List[str]]) -> argparse.Namespace:
    """Options and their values. Raises RequestError for what cannot be asked together."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.evaluate", description=str(__doc__).splitlines()[0]
    )
    add = parser.add_argument
    add("--model", type=Path, help="model to evaluate (default: the shipped weights)")
    also = "another model, or a matcher module:function; repeat for more"
    add("--also", action="append", default=[], metavar="NAME=FILE", help=also)
    add("--images", type=Path, default=Path("data/images"), help="folder that `fetch` wrote")
    add("--pairs", type=Path, help="instead of held-out images: a folder in HPatches layout")
    cameras = "instead: a pairs_with_gt.txt of pairs with cameras, images in --images"
    add("--poses", type=Path, help=cameras)
    paper = "the paper's protocol: 1,024 pairs (or PAIRS) in two sizes, 512 and 1,024 keypoints"
    add("--paper", type=int, nargs="?", const=PAPER_PAIRS, metavar="PAIRS", help=paper)
    add("--out", type=Path, default=Path("reports/evaluate"), help="folder for the results")
    add("--params", type=Path, help="parameters (default: params.yaml here, else the project's)")
    run = "reports/train/log.jsonl, to add the results to the run of the training"
    add("--mlflow-run", type=Path, help=run)
    add("--max-keypoints", type=int, help="instead of evaluate.max_keypoints")
    seen = "of them that a network sees, the likely ones of each pair (default: all)"
    add("--network-keypoints", type=int, help=seen)
    threshold = "minimum confidence of a match; 0: the model's own"
    add("--threshold", type=float, default=0.0, help=threshold)
    resize = "--pairs, --poses: shorter side in pixels (default: 480); 0: keep the size"
    add("--resize", type=int, default=480, help=resize)
    usual = f"default: {','.join(estimators.DEFAULT)}; --paper: all"
    add("--estimators", help=f"of: {', '.join(estimators.ESTIMATORS)}; the first leads ({usual})")
    bound = "also a row of the true matches, an upper bound for all matchers"
    add("--bound", action="store_true", help=bound)
    aligned = "skip the metrics of aligned matches, to save time"
    add("--no-refine", dest="refine", action="store_false", help=aligned)
    hard = "photographs tried under growing blur, noise, ...; 0: none"
    add("--robustness", type=int, default=0, help=hard)
    seen = "keep photographs that a model was trained on, and mark the table"
    add("--keep-seen", action="store_true", help=seen)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return check_options(parser.parse_args(argv))


def check_options(args: argparse.Namespace) -> argparse.Namespace:
    """Add the models, the estimators and the file of parameters. Raises RequestError."""
    given = [name for name in ("pairs", "poses", "paper") if getattr(args, name) is not None]
    if len(given) > 1:
        raise RequestError(f"--{given[0]} and --{given[1]} are two evaluations: run one at a time")
    if args.robustness and (args.pairs or args.poses):
        raise RequestError(
            "--robustness needs held-out images: leave it out with --pairs and --poses"
        )
    if args.bound and args.poses:
        raise RequestError("--bound needs homographies: leave it out with --poses")
    if args.estimators and args.poses:
        raise RequestError("--estimators are of homographies: leave it out with --poses")
    if args.max_keypoints and args.paper:
        raise RequestError("--paper says how many keypoints: leave out --max-keypoints")
    if args.out.exists() and not args.out.is_dir():
        raise RequestError(f"--out {args.out}: is a file; name a folder for the results")
    if not 0.0 <= args.threshold < 1.0:
        raise RequestError(f"--threshold {args.threshold}: must be at least 0 and below 1")
    for name, least in LEAST.items():
        if getattr(args, name) is not None:
            check_range(f"--{name.replace('_', '-')}", getattr(args, name), least)
    args.models, args.further = models_of(args)
    args.params = args.params or params.usual_file()
    every = tuple(estimators.ESTIMATORS) if args.paper else estimators.DEFAULT
    args.estimators = estimators.choose(args.estimators.split(",")) if args.estimators else every
    return args


def models_of(
    args: argparse.Namespace,
) -> Tuple[Dict[str, Path], Dict[str, Callable[[Pair], Matches]]]:
    """All model files by name, ours first, and matchers by name. Raises RequestError for an invalid
    or used name.
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
        if re.fullmatch(r"[\w.]+:\w+", file):
            further[name] = matchers.load_function(file)
        else:
            models[name] = Path(file)
    return models, further


def choose_photographs(args: argparse.Namespace, models: Mapping[str, Path]) -> unseen.Choice:
    """Held-out photographs that no compared model was trained on, and the models; only the latter
    with other pairs.
    """
    if args.pairs is not None or args.poses is not None:
        return unseen.Choice([], dict(models), [])
    images = dataset.open_manifest(args.images)
    entries = images.entries("test")
    if not entries:
        entries = images.entries("val")
        line = "no test images: using the validation images, on which the checkpoint was chosen"
        print(line, file=sys.stderr)
    if not entries:
        fix = "raise fetch.val_fraction or add images, then run fetch again"
        raise RequestError(f"{args.images}: no held-out image; {fix}")
    return unseen.choose(entries, models, args.keep_seen)


def choose_source(
    args: argparse.Namespace, section: EvaluateParams, chosen: unseen.Choice
) -> Named:
    """The source of pairs, by default held-out photographs, and the title of its table."""
    few = f"{args.network_keypoints} of " if args.network_keypoints else ""
    keypoints = f"{few}{section.max_keypoints} keypoints"
    size = f"short side {args.resize}" if args.resize else "full size"
    if args.pairs is not None:
        source = HPatchesPairs(args.pairs, args.resize)
        return source, f"{args.pairs.resolve().name}: {len(source)} sequences, {size}, {keypoints}"
    if args.poses is not None:
        source = poses.PosePairs(args.poses, args.images, args.resize)
        return source, f"{args.poses.name}: known cameras, {size}, {keypoints}"
    entries = chosen.entries
    held_out = HeldOutPairs(dataset.open_manifest(args.images), entries, section, args.paper)
    fetched = json.loads((args.images / "source.json").read_text(encoding="utf-8"))
    name = fetched.get("source", "folder")
    if name == "folder":
        name = ", ".join(Path(each["path"]).name for each in fetched["containers"].values())
    images = f"{len(held_out)} held-out images ({entries[0].split}){chosen.mark}"
    return held_out, f"{name}: {images}, {section.width}x{section.height}, {keypoints}"


def choose_extractor(args: argparse.Namespace, network: matchers.Network) -> Extractor:
    """The extractor of the evaluated model. Raises RequestError for one that params.yaml does not
    name.
    """
    name = network.model.config.extractor
    if name != extractors.DEFAULT.name and params.load("keypoints", args.params).extractor != name:
        raise RequestError(
            f"{network.file}: matches keypoints of {name}, code that is run only when asked for:"
            f" set keypoints.extractor: {name} in {args.params}"
        )
    return extractors.load(name)


def load_networks(
    args: argparse.Namespace, device: str
) -> Tuple[Dict[str, matchers.Network], List[str]]:
    """The networks by name, and a note for each that matches other keypoints than ours."""
    networks: Dict[str, matchers.Network] = {}
    skipped = []
    for name, file in args.models.items():
        network = matchers.load_network(file, device, args.threshold)
        extractor = network.model.config.extractor
        if extractor == networks.get(OURS, network).model.config.extractor:
            networks[name] = network
        else:
            skipped.append(f"SKIP {name}: of keypoints of {extractor}")
    if networks[OURS].info.get("step") == 0:
        skipped.append("Training kept the weights it began with: no later step was better")
    return networks, skipped


def track(
    args: argparse.Namespace, contents: Mapping[str, Content], info: Mapping[str, Any]
) -> None:
    """Add headline, files and description to the MLflow run of the training that the model's `info`
    names, if any.

    contents: of each variant by its folder below `--out`, "" for a single one.
    """
    if args.mlflow_run is None:
        return
    folder = args.pairs or args.poses
    name = "paper" if args.paper else folder.resolve().stem if folder else ""
    prefix = "/".join(filter(None, (tracking.EVALUATION, name)))
    is_main = not name  # of the data it was trained on
    with tracking.attach(args.mlflow_run, training=info.get("training")) as run:
        for variant, content in contents.items():
            group = "/".join(filter(None, (prefix, variant)))
            metrics = {f"{group}/{key}": value for key, value in summary.headline(content).items()}
            run.log(metrics, int(info.get("step") or 0))
        run.artifact(args.out, prefix)
        run.tags({f"{prefix}.processor": provenance.processor()})
        if is_main:
            content = contents[""]
            run.describe(summary.result(content), summary.note(content))
            run.compare_with_champion(args.out / "pairs.csv")


def evaluate(args: argparse.Namespace) -> Tuple[Dict[str, Content], Mapping[str, Any]]:
    """Evaluate: content by variant, and the model's info."""
    asked = {"max_keypoints": args.max_keypoints} if args.max_keypoints else {}
    section = params.load("evaluate", args.params).model_copy(update=asked)
    device = choose_device(args.device)
    networks, skipped = load_networks(args, device)
    ours = networks[OURS]
    chosen = choose_photographs(args, {name: network.file for name, network in networks.items()})
    compared = {name: networks[name] for name in chosen.models}
    is_scene = args.poses is not None
    matched = Matchers(compared, device, args.further, is_scene, args.network_keypoints)
    settings = Settings(
        section,
        args.estimators,
        args.resize,
        args.robustness,
        choose_extractor(args, ours),
        args.bound,
        args.refine,
    )
    work = Evaluation(matched, settings, (*chosen.lines, *skipped))
    if args.paper:
        source_of = lambda variant: choose_source(args, variant, chosen)  # noqa: E731
        return protocol.run_paper(work, source_of, args.out), ours.info
    return {"": work.run(choose_source(args, section, chosen), args.out)}, ours.info


def main(argv: Optional[List[str]] = None) -> int:
    started = time.monotonic()
    args = parse(argv)
    cv2.setNumThreads(1)  # several images are worked on at a time
    contents, info = evaluate(args)
    track(args, contents, info)
    print(f"took {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
