"""Train SuperGlue on SIFT keypoints, and use it.

The package in reading order:

    fetch, keypoints, train, evaluate, export   one file a stage, one `main` each, `python -m pipeline.<stage>`
    match, benchmark, doctor, presets, report   tools for the person at the keyboard
    launch        starts a stage on all processes of this machine
    images/       where photographs come from, how they are decoded, what is wrong with them
    views/        random homographies without borders, rendering, photometric distortion
    features/     a view to SIFT keypoints; the store that training maps into memory
    extraction/   all views of all images, in parallel, shard by shard
    pairs/        which two views when, and their batch: the shapes and units of all that enters the network
    matching/     the network, its optimal transport, truth, loss; plane geometry and metrics
    training/     objective, step, validation, what is saved, what is told
    evaluation/   protocols, baselines, scores, intervals
    report/       tables, curves, pictures, the page
    runtime/      processes, checkpoints, tracking, faults on purpose
    params, schema, errors      parameters, and what is said when they are wrong
    files, stack  writing a file whole, the two torch stacks
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "SuperGlue": "pipeline.matching.superglue",
    "SuperGlueConfig": "pipeline.matching.superglue",
    "mutual_matches": "pipeline.matching.superglue",
    "folded": "pipeline.matching.inference",
    "Replayed": "pipeline.matching.inference",
    "PairBatch": "pipeline.pairs.batch",
    "Pair": "pipeline.pairs.batch",
    "from_pairs": "pipeline.pairs.batch",
    "extract": "pipeline.features.sift",
    "load_model_file": "pipeline.runtime.checkpoint",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """The public API, loaded when it is asked for: `from pipeline import SuperGlue` alone imports torch."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
