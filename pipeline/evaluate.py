"""Stage `evaluate`: the trained matcher beside the baselines, on held-out images or a folder of pairs.

    python -m pipeline.evaluate --model checkpoints/best.safetensors --out reports/evaluate
    python -m pipeline.evaluate --model models/superglue.safetensors --pairs DIR --out DIR

Writes index.html (all of it on one page), metrics.json (flat names), pairs.csv (one line per pair and matcher) and
more into --out. What every file and figure means: docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import time
from typing import List, Optional

from pipeline import errors, params
from pipeline.evaluation import options, outputs, paper, pose_run, poses, summary
from pipeline.evaluation.job import Job
from pipeline.features.tuning import tune_process
from pipeline.runtime import distributed, tracking, workspace_lock
from superglue_sift.inference import folded
from superglue_sift.weights import choose_device, load_model


def track(args: argparse.Namespace, figures: summary.Figures, step: int) -> None:
    """Add figures and files to the MLflow run of the training, where there is one."""
    if args.mlflow_run is None:
        return
    prefix = options.tracked_as(args)
    with tracking.attach(args.mlflow_run) as run:
        run.log({f"{prefix}/{name}": value for name, value in figures.items() if value is not None}, step)
        for name in outputs.FILES:
            if (args.out / name).exists():
                run.artifact(args.out / name, prefix)
        for name in outputs.FOLDERS:
            if (args.out / name).exists():
                run.artifact(args.out / name, f"{prefix}/{name}")


def check(argv: Optional[List[str]] = None, world_size: int = 1) -> None:
    """What can be told before processes start, once and in one line. Raises RequestError."""
    args = options.parse(argv)
    section = options.load_params(args.params)
    load_model(args.model)
    if args.poses is None:
        options.choose_source(args, section)
    else:
        poses.read_pairs(args.poses)


def evaluate(job: Job, section: params.EvaluateParams) -> Optional[summary.Figures]:
    """What was asked for. Figures on the first process of a group, None on the others."""
    if job.args.poses is not None:
        return pose_run.run(job, section)
    if job.args.paper:
        return paper.run(job, section)
    source, where = options.choose_source(job.args, section)
    content = job.run(source, where, section, job.args.out)
    return None if content is None else content.figures


def main(argv: Optional[List[str]] = None) -> int:
    """Entry of the command line; alone, or as one process of torchrun's."""
    started = time.monotonic()
    args = options.parse(argv)
    tune_process()
    workspace_lock.take()
    with distributed.joined() as context:
        section = options.load_params(args.params)
        device = choose_device(args.device) if context.world_size == 1 else str(context.device)
        model, info = load_model(args.model, device, section.sinkhorn_iterations)
        model = folded(model)
        job = Job(args, context, model, info, device, options.extras(args, device))
        figures = evaluate(job, section)
        if figures is not None:
            track(args, figures, int(info.get("step") or 0))
            print(f"took {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
