"""Stage 3: train SuperGlue on the stored views, with one process or many.

    python -m pipeline.launch pipeline.train --keypoints data/keypoints --out checkpoints   (all local processes)
    torchrun --nproc_per_node=2 -m pipeline.train ...                                        (the same by hand)
    python -m pipeline.train ...                                                             (one process)

Every rank runs this file. The order of the pairs, the learning rate and the augmentation are functions of the
step, so a run killed anywhere goes on from its newest checkpoint as if nothing had happened.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence, Tuple

from pipeline import errors, params
from pipeline.features.store import Store
from pipeline.pairs.loader import choose
from pipeline.runtime import distributed, signals
from pipeline.training import resume, setup
from pipeline.training.trainer import Training


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.train", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument(
        "--keypoints", type=Path, default=Path("data/keypoints"), help="folder of the stage keypoints"
    )
    parser.add_argument("--out", type=Path, default=Path("checkpoints"), help="folder of the checkpoints")
    parser.add_argument(
        "--reports", type=Path, default=Path("reports/train"), help="folder of metrics and curves"
    )
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--resume", default=resume.AUTO, metavar="{auto,must,never,FOLDER}",
                        help="auto: go on from a checkpoint that fits, else set aside what is there and start from "
                        "scratch; must: refuse to start from scratch; never: start from scratch; FOLDER: take up again "
                        "what was set aside there")  # fmt: skip
    parser.add_argument("--accept", choices=("code",), action="append", default=[],
                        help="go on from a checkpoint although the training code has changed since")  # fmt: skip
    parser.add_argument(
        "--verify", action="store_true", help="check every shard of the keypoints, not a sample"
    )
    parser.add_argument(
        "--validate-only",
        action="store_true",
        help="print figures of the best model (or train.init_from); no training",
    )
    return parser.parse_args(argv)


def check(argv: Optional[Sequence[str]] = None, world_size: int = 1) -> Tuple[Store, Store]:
    """Everything that can be wrong with the request, before any process is started. The opened train and val stores.

    Raises:
        RequestError: with the key or file and the fix.
    """
    args = parse(argv)
    train = params.load("train", args.params)
    resume.check(args)
    how = "all" if args.verify else "sample"
    stores = Store(args.keypoints / "train", how), Store(args.keypoints / "val", how)
    setup.global_batch(train, world_size)
    setup.check_device(train)
    setup.check_features(train, stores[0])
    choose(train.loader, None)
    if train.init_from:
        setup.read_model(train.init_from, "train.init_from")
    return stores


def processes(argv: Optional[Sequence[str]], proposed: int) -> int:
    """How many local processes the launcher starts, where `proposed` could be had."""
    return setup.processes(params.load("train", parse(argv).params), proposed)


def main(argv: Optional[Sequence[str]] = None) -> int:
    args = parse(argv)
    with signals.deferred() as stop, distributed.joined() as context:
        training = Training(args, context, stop, *check(argv, context.world_size))
        return training.validate_only() if args.validate_only else training.run()


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
