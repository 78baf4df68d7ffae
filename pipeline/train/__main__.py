"""Stage 3: train SuperGlue on the stored views, with one process or many.

    python -m pipeline.launch pipeline.train --keypoints data/keypoints --out checkpoints   (all
      local processes)
    torchrun --nproc_per_node=2 -m pipeline.train ...                                        (the
      same by hand)
    python -m pipeline.train ...                                                             (one
      process)

Every rank runs this file. The order of the pairs, the learning rate and the augmentation are
functions of the step, so a run killed anywhere resumes from its newest checkpoint and ends with the
same weights.
"""

from __future__ import annotations

import os
import sys

from pipeline import params
from superglue_sift import environment

if __name__ == "__main__":  # before torch is loaded
    environment.wait_passively()
    if params.asks_for_portable(sys.argv[1:]):
        environment.prepare_network()
    # Of every rank: the flag of `distributed.wrap` is meant
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import argparse
import shlex
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple

from pipeline import distributed, errors, signals
from pipeline.errors import RequestError
from pipeline.keypoints.store import Store
from pipeline.params import TrainOptions
from pipeline.train import setup
from pipeline.train.checkpoint import BEST
from pipeline.train.resume import TrainPaths
from pipeline.train.trainer import Training
from pipeline.train.validation import choose_pairs

OPTIONS = "TRAIN_OPTIONS"  # environment: options that come before those of the command line


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = params.Parser(
        prog="python -m pipeline.train",
        description=str(__doc__).splitlines()[0],
        parents=[params.option_parser()],
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--keypoints",
        type=Path,
        default=Path("data/keypoints"),
        help="folder of the stage keypoints",
    )
    add("--out", type=Path, default=Path("checkpoints"), help="folder of the checkpoints")
    add("--reports", type=Path, default=Path("reports/train"), help="folder of metrics and curves")
    add("--params", type=Path, default=Path("params.yaml"))
    add(
        "--fresh",
        action="store_true",
        help=(
            "begin anew, in a new folder, although there is a training with these parameters and"
            " data"
        ),
    )
    add("--verify", action="store_true", help="check every shard of the keypoints, not a sample")
    add("--validate-only", action="store_true",
        help="print metrics of the best model (or train.init_from); no training")  # fmt: skip
    add(
        "--keep-seen",
        action="store_true",
        help="validate also on photographs that the weights it starts from were trained on",
    )
    try:
        usual = shlex.split(os.environ.get(OPTIONS, ""))
        parser.parse_args(usual)
    except (RequestError, ValueError) as error:
        raise RequestError(
            f"{OPTIONS}: {error}; `python -m pipeline.train --help` lists what it may hold"
        ) from None
    return parser.parse_args([*usual, *(sys.argv[1:] if argv is None else argv)])


def options_of(args: argparse.Namespace) -> Dict[str, Any]:
    """The `TrainOptions` on the command line; the model to validate, if nothing is trained."""
    options = {n: value for n, value in vars(args).items() if n in TrainOptions.model_fields}
    if args.validate_only and not params.load("train", args.params).init_from:
        options["init_from"] = str(args.out / BEST)
    return options


def check(argv: Optional[Sequence[str]], world_size: int) -> Tuple[Store, Store]:
    """Check the request before any process starts: RequestError. Returns the opened train and val
    stores.
    """
    args = parse(argv)
    train = params.load("train", args.params, options_of(args))
    how = "all" if args.verify else "sample"
    stores = Store(args.keypoints / "train", how), Store(args.keypoints / "val", how)
    setup.global_batch(train, world_size)
    setup.check_device(train)
    setup.check_features(train, stores[0])
    if train.init_from:
        setup.read_model(
            train.init_from, "--validate-only" if args.validate_only else "train.init_from"
        )
        choose_pairs(train, stores[1], Path(train.init_from), args.keep_seen)
    return stores


def processes(argv: Optional[Sequence[str]], proposed: int) -> int:
    """Number of local processes for the launcher to start, of the `proposed` that are possible."""
    args = parse(argv)
    train = params.load("train", args.params, options_of(args))
    return proposed if train.parallel == "ddp" else 1


def main(argv: Optional[Sequence[str]] = None) -> int:
    args = parse(argv)
    paths = TrainPaths(
        args.keypoints,
        args.out,
        args.reports,
        args.params,
        args.fresh,
        args.keep_seen,
        options_of(args),
    )
    with signals.defer() as stop, distributed.process_group() as context:
        training = Training(paths, context, stop, *check(argv, context.world_size))
        code = training.validate_only() if args.validate_only else training.run()
    # A stop that came after the last step also ends the pipeline, such as `dvc repro`
    return errors.STOPPED if stop.requested else code


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
