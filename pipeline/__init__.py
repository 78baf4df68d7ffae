"""Train SuperGlue on SIFT keypoints, and use it.

The network itself is the library `superglue_sift`, which knows nothing of this package. The package in reading order:

    fetch, keypoints, train, evaluate, export   one file a stage, one `main` each, `python -m pipeline.<stage>`
    match, benchmark, doctor, presets, report   tools for the person at the keyboard
    prune         trainings that were set aside: lists them, and asks which to delete
    plan          memory and hours of a training, before it begins
    launch        starts a stage on all processes of this machine
    images/       where photographs come from, how they are decoded, what is wrong with them
    views/        random homographies without borders, rendering, photometric distortion; buildings before true cameras
    features/     the store of keypoints that training maps into memory
    extraction/   all views of all images, in parallel, shard by shard
    pairs/        which two views when, read from the store
    training/     objective, step, validation, what is saved and gone on from, what is reported
    evaluation/   protocols, baselines, metrics, scores, intervals
    report/       tables, curves, the page
    tracking/     the local log of a run, and what MLflow shows of it
    runtime/      processes, checkpoints, faults on purpose
    params, schema, errors      parameters, and what is said when they are wrong
    files, stack  writing a file whole, the two torch stacks
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The library's public names, also from here: `from pipeline import SuperGlue`; loaded when they are asked for."""
    import superglue_sift

    if name in superglue_sift.__all__ and name != "__version__":
        return getattr(superglue_sift, name)
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
