"""What is asked of `python -m pipeline.evaluate`: options, parameters, the source of pairs, the settings."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, List, Mapping, Optional, Tuple

from pipeline import params
from pipeline.errors import RequestError
from pipeline.evaluation import estimators, lightglue, poses, scoring
from pipeline.evaluation.heldout import HeldOutPairs
from pipeline.evaluation.hpatches import HPatchesPairs
from pipeline.evaluation.pairs import Source
from pipeline.evaluation.run import Settings
from pipeline.images import sources

WHAT = "The trained matcher beside the baselines, on held-out images or a folder of pairs."
PAPER_PAIRS = 1024
OWN_PARAMS = Path(__file__).resolve().parents[2] / "params.yaml"


def parse(argv: Optional[List[str]]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.evaluate", description=WHAT)
    add = parser.add_argument
    add("--model", type=Path, default=Path("checkpoints/best.safetensors"), help="model to judge")
    add("--images", type=Path, default=Path("data/images"), help="folder that `fetch` wrote")
    add("--pairs", type=Path, help="instead of held-out images: a folder in HPatches layout")
    add(
        "--poses",
        type=Path,
        help="instead: a pairs_with_gt.txt of image pairs with cameras, images in --images",
    )
    add("--out", type=Path, default=Path("reports/evaluate"), help="folder for the results")
    add("--params", type=Path, help="parameters (default: params.yaml here, else the project's)")
    add("--mlflow-run", type=Path, help="mlflow_run.json of the training, to add the results to its run")
    add("--max-keypoints", type=int, help="instead of evaluate.max_keypoints")
    add("--resize", type=int, default=480, help="--pairs, --poses: shorter side in pixels; 0: as they are")
    add("--batch", type=int, default=8, help="pairs in one pass of the network")
    add(
        "--paper",
        type=int,
        nargs="?",
        const=PAPER_PAIRS,
        metavar="PAIRS",
        help="the paper's protocol: 1,024 pairs (or so many), 640x480 and 512x384, 512 and 1,024 keypoints",
    )
    usual = f"default: {','.join(estimators.DEFAULT)}; --paper: all that are installed"
    add("--estimators", help=f"of: {', '.join(estimators.ESTIMATORS)}; the first leads ({usual})")
    add("--lightglue", type=Path, metavar="FILE", help="also LightGlue for SIFT, with these weights")
    add("--robustness", type=int, default=0, help="photographs tried under growing blur, noise, ...; 0: none")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    args = parser.parse_args(argv)
    wants = [name for name in ("pairs", "poses", "paper") if getattr(args, name) is not None]
    if len(wants) > 1:
        raise RequestError(f"--{wants[0]} and --{wants[1]} are two evaluations: ask for one at a time")
    if args.robustness and (args.pairs or args.poses):
        raise RequestError("--robustness needs held-out images: leave it out with --pairs and --poses")
    if args.out.exists() and not args.out.is_dir():
        raise RequestError(f"--out {args.out}: is a file; name a folder for the results")
    for name in ("max_keypoints", "batch", "paper"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise RequestError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be 1 or more")
    return args


def load_params(path: Optional[Path]) -> params.EvaluateParams:
    """Section `evaluate` of params.yaml, from here or from the project."""
    if path is None:
        path = Path("params.yaml") if Path("params.yaml").is_file() else OWN_PARAMS
    return params.load("evaluate", path)


def choose_source(
    args: argparse.Namespace, section: params.EvaluateParams, total: Optional[int] = None
) -> Tuple[Source, str]:
    """Where the pairs come from, and its name in words."""
    if args.pairs is not None:
        source = HPatchesPairs(args.pairs, args.resize)
        return source, f"{args.pairs.resolve().name}: {len(source)} sequences"
    images = sources.open_manifest(args.images)
    split, entries = "test", images.entries("test")
    if not entries:
        split, entries = "val", images.entries("val")
        chosen = "no test images: using the validation images, on which the checkpoint was chosen"
        print(chosen, file=sys.stderr)
    if not entries:
        raise RequestError(
            f"{args.images}: no held-out image; raise fetch.val_fraction or add images, then run fetch again"
        )
    source = HeldOutPairs(images, entries, section, total)
    return source, f"held-out images ({split}): {len(source)}"


@dataclass(frozen=True)
class Extras:
    """What depends on this machine. skipped: a line for each thing that was asked for and is not here."""

    estimators: Tuple[str, ...] = estimators.DEFAULT
    further: Mapping[str, Callable] = field(default_factory=dict)
    skipped: Tuple[str, ...] = ()


def extras(args: argparse.Namespace, device: str) -> Extras:
    """Estimators and further baselines. Raises RequestError for an estimator that was named and is not there."""
    skipped: List[str] = []
    further = {}
    if args.estimators is not None:
        chosen = estimators.choose(args.estimators.split(","))
    elif args.paper:
        chosen = estimators.installed()
        skipped += [f"SKIP {name}: not installed" for name in estimators.ESTIMATORS if name not in chosen]
    else:
        chosen = estimators.DEFAULT
    if args.lightglue is not None:
        match, said = lightglue.load(args.lightglue, device)
        if match is None:
            skipped.append(f"SKIP LightGlue: {said}")
        else:
            further[lightglue.NAME] = match
    return Extras(chosen, further, tuple(skipped))


def tracked_as(args: argparse.Namespace) -> str:
    """Where the figures stand in the run of the training."""
    if args.pairs or args.poses:
        return f"pairs/{(args.pairs or args.poses).resolve().stem}"
    return "paper" if args.paper else "test"


def settings_of(args: argparse.Namespace, section: params.EvaluateParams, extras: Extras) -> Settings:
    """The evaluation's settings from params.yaml and the command line."""
    return Settings(
        max_keypoints=args.max_keypoints or section.max_keypoints,
        threshold=section.threshold,
        ratio=section.ratio,
        limits=scoring.Limits(
            section.correct_px,
            section.ransac_px,
            section.ransac_iterations,
            extras.estimators,
        ),
        batch=args.batch,
        pictures=section.pictures,
        further=extras.further,
    )


def protocol(
    args: argparse.Namespace, section: params.EvaluateParams, settings: Settings, where: str, info: dict
) -> dict:
    """Everything a figure must be quoted with."""
    limits = settings.limits
    resized = f"shorter side {args.resize} px" if args.resize else "as they are"
    if args.poses:
        judged = poses.RULES
    else:
        judged = {
            "truth": f"mutual nearest reprojections under {limits.correct_px} px, the larger of both directions",
            "robust": f"inliers within {limits.ransac_px} px, {limits.ransac_iterations} iterations",
            "estimators": {name: estimators.WORDS[name] for name in limits.estimators},
        }
    return {
        "pairs_from": where,
        "views": resized if args.pairs or args.poses else f"{section.width}x{section.height}",
        "keypoints": f"SIFT, at most {settings.max_keypoints} in each view",
        **judged,
        "params": section.model_dump(),
        "model": {"file": args.model.as_posix(), "network": info["model"], "step": info.get("step")},
    }
