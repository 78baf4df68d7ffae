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

from pipeline import errors
from pipeline.train import checkpoint, train
from superglue_sift.files import check_writable


def parse_request(argv: Optional[Sequence[str]]) -> Tuple[argparse.Namespace, params.Params]:
    """Parse the command line, read params.yaml, and check that the folders can be written.

    Raises:
        RequestError: If params.yaml is wrong, or if a folder cannot be written.
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
    args.folders = train.Folders(args.keypoints, args.out, args.reports)
    args.verify = "all" if args.verify else "sample"
    sections = params.load(args.params)
    if args.validate_only and not sections.train.init_from:
        best = str(args.out / checkpoint.BEST)
        section = sections.train.model_copy(update={"init_from": best})
        sections = sections.model_copy(update={"train": section})
    for folder in () if args.validate_only else (args.out, args.reports):
        check_writable(folder / "metrics.json", folder)
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
    train.check_request(sections, args.folders, args.continued, args.verify, world_size)


def main(argv: Optional[Sequence[str]] = None) -> int:
    args, sections = parse_request(argv)
    params.require_prepared(sections)
    if args.validate_only:
        train.print_validation(sections, args.folders, args.verify)
        return 0
    with workers.defer_signals() as stop:
        preset = params.read_preset_name(args.params)
        code = train.train(
            sections, args.folders, stop, args.fresh, args.continued, args.verify, preset
        )
    # A stop that came after the last step also ends the pipeline, such as `dvc repro`.
    return errors.STOPPED if stop.requested else code


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
