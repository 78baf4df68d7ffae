"""Stage `export`: write the best weights, with their description and provenance.

    python -m pipeline.export --model checkpoints/best.safetensors --out models

Writes models/superglue.safetensors (weights, configuration, provenance), models/superglue.json
(without the weights) and models/superglue.trained_on.txt (which photographs it was trained on).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import List, Optional

from pipeline import errors, params, provenance, tracking, workers
from pipeline.errors import RequestError
from pipeline.params import flatten
from superglue_sift import __version__
from superglue_sift.files import check_writable, compute_file_sha256, read_json
from superglue_sift.network.weights import load_model, read_match_threshold, save_model_file

ESSENTIAL = ("torch", "numpy", "opencv-python")  # Packages that compute keypoints and weights
NAME = "superglue"  # Name of the model, in its file and in the evaluation
# Parameters that are paths on the machine of the training. Digests identify their content.
PATH_KEYS = ("fetch.path", "fetch.val_path", "fetch.root", "train.init_from")


def parse(argv: Optional[List[str]]) -> argparse.Namespace:
    """Parse the command line."""
    parser = errors.make_parser("pipeline.export", __doc__)
    add = parser.add_argument
    best = Path("checkpoints/best.safetensors")
    add("--model", type=Path, default=best, help="weights to export")
    add("--metrics", type=Path, help="metrics.json of their evaluation, to store with them")
    add("--half", action="store_true", help="store the weights in float16: half the bytes")
    add("--out", type=Path, default=Path("models"), help="folder for the model")
    add("--mlflow-run", type=Path, help="mlflow.json of the training, whose run gets the model")
    add("--params", type=Path, default=Path("params.yaml"), help="parameters")
    return parser.parse_args(argv)


def describe_weights(info: dict, sections: dict, metrics: dict, source: Path) -> dict:
    """Return the description of the weights, which is the same in every clone.

    Commit, dvc.lock (which contains the digest of this file), machine, paths and time are only in
    the MLflow run.

    Args:
        info: what the training stored with the weights.
        sections: params.yaml without the section `run`.
        metrics: the metrics of the evaluation, or {}.
        source: the file of the weights.

    Raises:
        RequestError: If `info` was not stored by a training.
    """
    try:
        description = {name: info[name] for name in ("model", "step", "training", "validation")}
        description[provenance.PHOTOGRAPHS_KEY] = info[provenance.PHOTOGRAPHS_KEY]
        data = info["data"]
        trained_with = info["train"]
        versions = info["versions"][-1]  # Of the packages that trained the last steps
    except KeyError as error:
        raise RequestError(
            f"{source}: has no {error}, so it is no best.safetensors of a training"
        ) from None
    return {
        **description,
        "match_threshold": read_match_threshold(info),
        "metrics": metrics,
        "provenance": {
            "data.digest": data,
            "initial_weights.digest": info.get("initial_weights", ""),
            "source.sha256": compute_file_sha256(source),
            "version": __version__,
            **{f"version.{name}": versions[name] for name in ESSENTIAL if name in versions},
        },
        "params": {key: value for key, value in flatten(sections).items() if key not in PATH_KEYS},
        "trained_with": {
            key: value for key, value in trained_with.items() if f"train.{key}" not in PATH_KEYS
        },
    }


def main(argv: Optional[List[str]] = None) -> int:
    """Write the model and its description, and send the description to MLflow."""
    workers.end_with_dvc()
    args = parse(argv)
    sections = params.load(args.params).model_dump(exclude={"run"})
    model, info = load_model(args.model)
    check_writable(args.out / f"{NAME}.safetensors", args.out)
    # Read the metrics, which are stored with the weights.
    metrics = {}
    if args.metrics:
        message = "no such file; run `python -m pipeline.evaluate` first"
        metrics = read_json(args.metrics, message)
    description = describe_weights(info, sections, metrics, args.model)
    # Write the file of the model, and the list of its photographs beside it.
    path = args.out / f"{NAME}.safetensors"
    if args.half:
        model.half()  # Buffers of whole numbers stay as they are
    provenance.write_photographs(path, provenance.read_photographs(args.model))
    save_model_file(path, model.state_dict(), description)
    if args.mlflow_run is not None:
        with tracking.attach(args.mlflow_run, training=info["training"]) as run:
            run.set_tags({"export.sha256": compute_file_sha256(path)})
            run.add_artifact(path.with_suffix(".json"), "export")
    parameters = sum(weight.numel() for weight in model.parameters())
    print(
        f"{path}: {parameters:,} parameters, {path.stat().st_size / 1e6:.1f} MB, step"
        f" {info['step']}"
    )
    print(f"{path.with_suffix('.json')}: configuration, provenance and metrics")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
