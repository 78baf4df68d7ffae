"""Train SuperGlue on SIFT keypoints, and use it.

The network itself is the library `superglue_sift`, which knows nothing of this package. The package in reading order:

    fetch, keypoints, train, evaluate, export   one file a stage, one `main` each, `python -m pipeline.<stage>`
    match, benchmark, doctor, presets, report   tools for the person at the keyboard
    launch        starts a stage on all processes of this machine
    images/       where photographs come from, how they are decoded, what is wrong with them
    views/        random homographies without borders, rendering, photometric distortion
    features/     the store of keypoints that training maps into memory
    extraction/   all views of all images, in parallel, shard by shard
    pairs/        which two views when, read from the store
    training/     loss, objective, step, validation, what is saved, what is told
    evaluation/   protocols, baselines, metrics, scores, intervals
    report/       tables, curves, the page
    tracking/     the local log of a run, and what MLflow shows of it
    runtime/      processes, checkpoints, faults on purpose
    params, schema, errors      parameters, and what is said when they are wrong
    files, stack  writing a file whole, the two torch stacks
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "SuperGlue": "superglue_sift.superglue",
    "SuperGlueConfig": "superglue_sift.superglue",
    "mutual_matches": "superglue_sift.superglue",
    "fuse_for_inference": "superglue_sift.inference",
    "CUDAGraphModel": "superglue_sift.inference",
    "PairBatch": "superglue_sift.batch",
    "Pair": "superglue_sift.batch",
    "from_pairs": "superglue_sift.batch",
    "extract": "superglue_sift.sift",
    "load_model_file": "superglue_sift.weights",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """The public API, loaded when it is asked for: `from pipeline import SuperGlue` alone imports torch."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
