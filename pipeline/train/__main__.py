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
import signal
import sys

from pipeline import params, workers
from superglue_sift import environment

if __name__ == "__main__":
    # A signal waits until the training can save a checkpoint.
    signal.pthread_sigmask(signal.SIG_BLOCK, workers.STOP_SIGNALS)
    # These settings must come before torch is loaded.
    environment.wait_passively()
    if params.is_portable(sys.argv[1:]):
        environment.prepare_network()
    # Every rank sets it, because the flag that `distributed.wrap_in_ddp` sets makes torch warn.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import argparse
from pathlib import Path
from typing import Optional, Sequence, Tuple

from pipeline import distributed, errors, workers
from pipeline.train import checkpoint, trainer
from superglue_sift.files import check_writable


def parse_request(argv: Optional[Sequence[str]]) -> Tuple[argparse.Namespace, params.Params]:
    """Parse the command line and read params.yaml.

    Raises:
        RequestError: If params.yaml or the environment is wrong.
    """
    parser = errors.make_parser("pipeline.train", __doc__)
    parser.allow_abbrev = False
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
    args = parser.parse_args(argv)
    sections = params.load(args.params)
    # Option --validate-only without initial weights validates the best model.
    if args.validate_only and not sections.train.init_from:
        best = str(args.out / checkpoint.BEST)
        train = sections.train.model_copy(update={"init_from": best})
        sections = sections.model_copy(update={"train": train})
    return args, sections


def check_request(argv: Optional[Sequence[str]], world_size: int) -> None:
    """Check the request before any process starts.

    Args:
        argv: the command line.
        world_size: number of processes.

    Raises:
        RequestError: If the stores, a checkpoint or a model file do not fit the request, or if a
            folder cannot be written.
    """
    args, sections = parse_request(argv)
    check_folders(args)
    trainer.check_request(args, sections, world_size)


def check_folders(args: argparse.Namespace) -> None:
    """Raise RequestError if a folder of the results cannot be written."""
    if not args.validate_only:
        for folder in (args.out, args.reports):
            check_writable(folder / "metrics.json", folder)


def main(argv: Optional[Sequence[str]] = None) -> int:
    args, sections = parse_request(argv)
    params.require_prepared(sections)
    check_folders(args)
    with workers.defer_signals() as stop, distributed.process_group() as context:
        if args.validate_only:
            code = trainer.print_validation(args, sections, context)
        else:
            code = trainer.train(args, sections, context, stop)
    # A stop that came after the last step also ends the pipeline, such as `dvc repro`.
    return errors.STOPPED if stop.requested else code


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
