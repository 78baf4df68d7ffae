"""Stage 3: train SuperGlue on the stored views, with one process or many.

    python -m pipeline.launch pipeline.train --keypoints data/keypoints --out checkpoints
    torchrun --nproc_per_node=2 -m pipeline.train ...      (the same by hand)
    python -m pipeline.train ...                           (one process)

Every rank runs this file. The order of the pairs, the learning rate and the augmentation are
functions of the step, so a run killed anywhere resumes from its newest checkpoint and ends with the
same weights.
"""

from __future__ import annotations

import os
import sys

from pipeline import params
from superglue_sift import environment

if __name__ == "__main__":  # this must come before torch is loaded
    environment.wait_passively()
    if params.asks_for_portable(sys.argv[1:]):
        environment.prepare_network()
    # Every rank sets it, because the flag that `distributed.wrap` sets makes torch warn
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import argparse
from pathlib import Path
from typing import Optional, Sequence, Tuple

from pipeline import distributed, errors, signals
from pipeline.keypoints.store import Store
from pipeline.train import checkpoint, trainer
from pipeline.train.loss import choose_pairs


def parse(argv: Optional[Sequence[str]]) -> Tuple[argparse.Namespace, params.Params]:
    """Parse the command line and read params.yaml."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.train",
        description=str(__doc__).splitlines()[0],
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--keypoints", type=Path, default=Path("data/keypoints"), help="of the stage keypoints")
    add("--out", type=Path, default=Path("checkpoints"), help="folder of the checkpoints")
    add("--reports", type=Path, default=Path("reports/train"), help="folder of metrics and curves")
    add("--params", type=Path, default=Path("params.yaml"))
    fresh = "begin again, in a new folder, although there is a training with these parameters"
    add("--fresh", action="store_true", help=f"{fresh} and data")
    longer = "begin from the newest checkpoint of this training, whose schedule may differ"
    add("--continue", dest="continued", type=Path, metavar="FOLDER", help=longer)
    add("--verify", action="store_true", help="check every shard of the keypoints, not a sample")
    only = "print metrics of the best model (or train.init_from); no training"
    add("--validate-only", action="store_true", help=only)
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    sections = params.load(args.params)
    # without initial weights, the best model is validated
    if args.validate_only and not sections.train.init_from:
        best = str(args.out / checkpoint.BEST)
        train = sections.train.model_copy(update={"init_from": best})
        sections = sections.model_copy(update={"train": train})
    return args, sections


def check(argv: Optional[Sequence[str]], world_size: int) -> Tuple[Store, Store]:
    """Check the request before any process starts. Return the opened train and val stores.

    Raises RequestError if the stores, a checkpoint or a model file do not fit the request.
    """
    return _open_stores(*parse(argv), world_size)


def _open_stores(
    args: argparse.Namespace, sections: params.Params, world_size: int
) -> Tuple[Store, Store]:
    train = sections.train
    run = sections.run
    how = "all" if args.verify else "sample"
    stores = Store(args.keypoints / "train", how), Store(args.keypoints / "val", how)
    trainer.check(train, stores[0])
    if args.continued:
        ours = checkpoint.fingerprint(train, run, stores[0].digest, world_size)
        checkpoint.load_to_continue(args.continued, ours)
    if train.init_from:
        trainer.read_model(train.init_from)
        choose_pairs(train, stores[1], run.allow_training_images, Path(train.init_from))
    return stores


def main(argv: Optional[Sequence[str]] = None) -> int:
    args, sections = parse(argv)
    with signals.defer() as stop, distributed.process_group() as context:
        stores = _open_stores(args, sections, context.world_size)
        training = trainer.Training(args, sections, context, stop, *stores)
        code = training.validate_only() if args.validate_only else training.run()
    # A stop that came after the last step also ends the pipeline, such as `dvc repro`
    return errors.STOPPED if stop.requested else code


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
