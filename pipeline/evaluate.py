"""Stage `evaluate`: the trained matcher beside the baselines, on held-out images or a folder of pairs.

    python -m pipeline.evaluate --model checkpoints/best.safetensors --out reports/evaluate
    python -m pipeline.evaluate --model models/superglue.safetensors --pairs DIR --out DIR

Writes index.html (all of it on one page), metrics.json (flat names), pairs.csv (one line per pair and matcher) and
more into --out. What every file and figure means: docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from pipeline import errors, params
from pipeline.errors import RequestError, WorkError
from pipeline.evaluation import estimators, matchers, outputs, pose_run, poses, scoring, summary, webpage
from pipeline.evaluation.degraded import LEVELS, DegradedPairs
from pipeline.evaluation.difficulty import by_condition, line_of
from pipeline.evaluation.heldout import HeldOutPairs
from pipeline.evaluation.hpatches import HPatchesPairs
from pipeline.evaluation.intervals import differences
from pipeline.evaluation.model import choose_device, load_model
from pipeline.evaluation.pairs import Source
from pipeline.evaluation.run import Results, Settings, evaluate, figures_of
from pipeline.features.tuning import tune_process
from pipeline.images import sources
from pipeline.matching.superglue import SuperGlue
from pipeline.report import curves, page, tables
from pipeline.runtime import distributed, tracking

OWN_PARAMS = Path(__file__).resolve().parents[1] / "params.yaml"


def parse(argv: Optional[List[str]]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.evaluate", description=__doc__.splitlines()[0])
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
    add("--estimators", default=",".join(estimators.DEFAULT), help="of: " + ", ".join(estimators.ESTIMATORS))
    add("--robustness", type=int, default=0, help="photographs tried under growing blur, noise, ...; 0: none")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    args = parser.parse_args(argv)
    for name in ("max_keypoints", "batch"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise RequestError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be 1 or more")
    return args


def load_params(path: Optional[Path]) -> params.EvaluateParams:
    """Section `evaluate` of params.yaml, from here or from the project."""
    if path is None:
        path = Path("params.yaml") if Path("params.yaml").is_file() else OWN_PARAMS
    return params.load("evaluate", path)


def choose_source(args: argparse.Namespace, section: params.EvaluateParams) -> Tuple[Source, str]:
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
    return HeldOutPairs(images, entries, section), f"held-out images ({split}): {len(entries)}"


def settings_of(args: argparse.Namespace, section: params.EvaluateParams) -> Settings:
    """The evaluation's settings from params.yaml and the command line."""
    return Settings(
        max_keypoints=args.max_keypoints or section.max_keypoints,
        threshold=section.threshold,
        ratio=section.ratio,
        limits=scoring.Limits(
            section.correct_px,
            section.ransac_px,
            section.ransac_iterations,
            estimators.choose(args.estimators.split(",")),
        ),
        batch=args.batch,
        pictures=section.pictures,
    )


def protocol(
    args: argparse.Namespace, section: params.EvaluateParams, settings: Settings, where: str, info: dict
) -> dict:
    """Everything a figure must be quoted with."""
    limits = settings.limits
    resized = f"shorter side {args.resize} px" if args.resize else "as they are"
    return {
        "pairs_from": where,
        "views": resized if args.pairs else f"{section.width}x{section.height}",
        "keypoints": f"SIFT, at most {settings.max_keypoints} in each view",
        "truth": f"mutual nearest reprojections under {limits.correct_px} px, the larger of both directions",
        "robust": f"inliers within {limits.ransac_px} px, {limits.ransac_iterations} iterations",
        "estimators": {name: estimators.WORDS[name] for name in limits.estimators},
        "params": section.model_dump(),
        "model": {"file": args.model.as_posix(), "network": info["model"], "step": info.get("step")},
    }


def track(args: argparse.Namespace, figures: summary.Figures, step: int) -> None:
    """Add figures and files to the MLflow run of the training, where there is one."""
    if args.mlflow_run is None:
        return
    prefix = f"pairs/{args.pairs.resolve().name}" if args.pairs else "test"
    with tracking.attach(args.mlflow_run) as run:
        run.log({f"{prefix}/{name}": value for name, value in figures.items() if value is not None}, step)
        for name in outputs.FILES:
            run.artifact(args.out / name, prefix)
        for name in outputs.FOLDERS:
            run.artifact(args.out / name, f"{prefix}/{name}")


def show(args: argparse.Namespace, where: str, results: Results, figures: summary.Figures) -> None:
    """Print the tables."""
    print(f"\n{where}, {len(results.places)} pairs\n")
    if args.pairs:
        print(tables.by_scene(summary.by_scene(results.rows, matchers.MATCHERS), matchers.MATCHERS) + "\n")
    print(tables.comparison(figures) + "\n")
    print(tables.differences(differences(results.rows)))


def disturbances(
    args: argparse.Namespace,
    source: Source,
    model: SuperGlue,
    device: str,
    settings: Settings,
    context: distributed.Context,
) -> List[Dict[str, object]]:
    """Lines of robustness.csv under growing disturbances, on the first `--robustness` photographs; none for 0."""
    if not args.robustness or not isinstance(source, HeldOutPairs):
        return []
    entries = source.entries[: args.robustness]
    lines = []
    for name, (disturb, levels) in LEVELS.items():
        for level in levels:
            pairs = DegradedPairs(source.images, entries, source.params, disturb, level)
            results = evaluate(pairs, model, device, settings, context, f"{name} {level:g}")
            lines.append(line_of(name, f"{level:g}", results.rows))
    return lines


def check(argv: Optional[List[str]], processes: int) -> None:
    """What can be told before processes start. Raises RequestError."""
    load_params(parse(argv).params)


def run_poses(args: argparse.Namespace, model: SuperGlue, device: str, settings: Settings) -> int:
    """Pairs with known cameras: metrics.json, pairs.csv and a table."""
    rows = pose_run.evaluate(args.poses, args.images, args.resize, model, device, settings)
    figures = poses.summarize(rows, matchers.MATCHERS)
    outputs.write_json(args.out / "metrics.json", figures)
    curves.write_csv(args.out / "pairs.csv", pose_run.lines_of(rows))
    print(tables.pose_comparison(figures, poses.AUC_DEGREES) + f"\n\nwritten to {args.out}")
    return 0


def run(args: argparse.Namespace, context: distributed.Context) -> int:
    """The work of one process; the first of a group writes the results."""
    started = time.monotonic()
    section = load_params(args.params)
    device = choose_device(args.device) if context.world_size == 1 else str(context.device)
    model, info = load_model(args.model, device, section.sinkhorn_iterations)
    settings = settings_of(args, section)
    if args.poses is not None:
        return run_poses(args, model, device, settings) if context.is_main else 0
    source, where = choose_source(args, section)
    results = evaluate(source, model, device, settings, context)
    disturbed = disturbances(args, source, model, device, settings, context)
    if not results.places:
        raise WorkError(
            f"none of the {len(source)} images could be read; the first: {': '.join(results.bad[0])}"
        )
    if not context.is_main:
        return 0
    figures, described = figures_of(results), protocol(args, section, settings, where, info)
    robustness = by_condition(results.rows) + disturbed
    outputs.write_all(args.out, results, described, robustness)
    drawn = outputs.write_pictures(args.out / "pictures", source, model, device, results, settings)
    content = webpage.content(f"Evaluation: {where}", results, figures, robustness, drawn, described)
    (args.out / "index.html").write_text(page.render(content), encoding="utf-8")
    track(args, figures, int(info.get("step") or 0))
    show(args, where, results, figures)
    bad = f"; {len(results.bad)} unreadable images left out, see bad_images.csv" if results.bad else ""
    print(f"\nwritten to {args.out} in {time.monotonic() - started:.0f} s{bad}")
    return 0


def main(argv: Optional[List[str]] = None) -> int:
    """Entry of the command line; alone, or as one process of torchrun's."""
    args = parse(argv)
    tune_process()
    with distributed.joined() as context:
        return run(args, context)


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
