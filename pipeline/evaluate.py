"""Stage `evaluate`: the trained matcher beside the baselines, on held-out images or a folder of pairs.

    python -m pipeline.evaluate --model checkpoints/best.safetensors --out reports/evaluate
    python -m pipeline.evaluate --model models/superglue.safetensors --pairs DIR --out DIR

Writes index.html (all of it on one page), metrics.json (flat names), pairs.csv (one line per pair and matcher) and
more into --out. What every file and figure means: docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional

from pipeline import errors, params
from pipeline.errors import WorkError
from pipeline.evaluation import matchers, options, outputs, pose_run, poses, summary, webpage
from pipeline.evaluation.degraded import sweep
from pipeline.evaluation.difficulty import by_condition
from pipeline.evaluation.heldout import HeldOutPairs
from pipeline.evaluation.intervals import differences
from pipeline.evaluation.model import choose_device, load_model
from pipeline.evaluation.pairs import Source
from pipeline.evaluation.run import Results, Settings, evaluate, figures_of
from pipeline.features.tuning import tune_process
from pipeline.matching.superglue import SuperGlue
from pipeline.report import curves, page, tables
from pipeline.runtime import distributed, tracking

PAPER = ((640, 480, 512), (640, 480, 1024), (512, 384, 512), (512, 384, 1024))  # width, height, keypoints
PAPER_PAIRS = 1024


def track(
    args: argparse.Namespace, figures: summary.Figures, step: int, context: distributed.Context
) -> None:
    """Add figures and files to the MLflow run of the training, where there is one."""
    if args.mlflow_run is None or not context.is_main:
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


def check(argv: Optional[List[str]] = None, world_size: int = 1) -> None:
    """What can be told before processes start, once and in one line. Raises RequestError."""
    args = options.parse(argv)
    section = options.load_params(args.params)
    load_model(args.model)
    if args.poses is None:
        options.choose_source(args, section)


def processes(argv: Optional[List[str]], proposed: int) -> int:
    """How many local processes the launcher starts: one for --poses, whose work is not shared out."""
    return 1 if options.parse(argv).poses else proposed


def run_poses(args: argparse.Namespace, model: SuperGlue, device: str, settings: Settings) -> int:
    """Pairs with known cameras: metrics.json, pairs.csv and a table."""
    rows = pose_run.evaluate(args.poses, args.images, args.resize, model, device, settings)
    figures = poses.summarize(rows, matchers.MATCHERS)
    outputs.write_json(args.out / "metrics.json", figures)
    curves.write_csv(args.out / "pairs.csv", pose_run.lines_of(rows))
    print(tables.pose_comparison(figures, poses.AUC_DEGREES) + f"\n\nwritten to {args.out}")
    return 0


@dataclass(frozen=True)
class Job:
    """One process's part in one evaluation."""

    args: argparse.Namespace
    context: distributed.Context
    model: SuperGlue
    info: dict
    device: str

    def run(
        self, source: Source, where: str, section: params.EvaluateParams, out: Path
    ) -> Optional[summary.Figures]:
        """Evaluate a source; the first process of a group writes everything into `out` and returns the figures."""
        args, model, device = self.args, self.model, self.device
        settings = options.settings_of(args, section)
        results = evaluate(source, model, device, settings, self.context)
        if not results.places:
            first = ": ".join(results.bad[0])
            raise WorkError(f"none of the {len(source)} images could be read; the first: {first}")
        robustness = by_condition(results.rows)
        if args.robustness and isinstance(source, HeldOutPairs):
            robustness += sweep(source, args.robustness, model, device, settings, self.context)
        if not self.context.is_main:
            return None
        figures, described = figures_of(results), options.protocol(args, section, settings, where, self.info)
        outputs.write_all(out, results, described, robustness)
        drawn = outputs.write_pictures(out / "pictures", source, model, device, results, settings)
        content = webpage.content(f"Evaluation: {where}", results, figures, robustness, drawn, described)
        (out / "index.html").write_text(page.render(content), encoding="utf-8")
        show(args, where, results, figures)
        bad = f"; {len(results.bad)} unreadable images left out, see bad_images.csv" if results.bad else ""
        print(f"\nwritten to {out}{bad}", flush=True)
        return figures


def run_paper(job: Job, section: params.EvaluateParams) -> None:
    """The paper's protocol and its variants, each in a folder of its own, and one table of all."""
    lines = []
    for width, height, keypoints in PAPER:
        asked = {"width": width, "height": height, "max_keypoints": keypoints}
        variant = section.model_copy(update=asked)
        source, where = options.choose_source(job.args, variant, PAPER_PAIRS)
        name = f"{width}x{height}-{keypoints}"
        figures = job.run(
            source, f"{where}, {width}x{height}, {keypoints} keypoints", variant, job.args.out / name
        )
        if figures is not None:
            lines += [{"protocol": name, **line} for line in summary.by_matcher(figures)]
    if lines:
        curves.write_csv(job.args.out / "protocols.csv", lines)


def run(args: argparse.Namespace, context: distributed.Context) -> int:
    """The work of one process."""
    started = time.monotonic()
    section = options.load_params(args.params)
    device = choose_device(args.device) if context.world_size == 1 else str(context.device)
    model, info = load_model(args.model, device, section.sinkhorn_iterations)
    if args.poses is not None:
        return run_poses(args, model, device, options.settings_of(args, section)) if context.is_main else 0
    job = Job(args, context, model, info, device)
    if args.paper:
        run_paper(job, section)
    else:
        source, where = options.choose_source(args, section)
        figures = job.run(source, where, section, args.out)
        track(args, figures or {}, int(info.get("step") or 0), context)
    if context.is_main:
        print(f"took {time.monotonic() - started:.0f} s")
    return 0


def main(argv: Optional[List[str]] = None) -> int:
    """Entry of the command line; alone, or as one process of torchrun's."""
    args = options.parse(argv)
    tune_process()
    with distributed.joined() as context:
        return run(args, context)


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
