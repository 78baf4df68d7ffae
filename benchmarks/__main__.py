"""The speed table of this machine: `python -m benchmarks`.

Compare numbers within one run only: there, the compared ways alternate on the same work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Sequence

import torch

from benchmarks import images, network, training
from benchmarks.timing import Row, Setting
from pipeline import errors
from pipeline.errors import RequestError
from pipeline.files import write_atomic
from superglue_sift.network.superglue import SuperGlueConfig
from superglue_sift.network.weights import choose_device

GROUPS: Dict[str, Callable[[Setting], Iterable[Row]]] = {
    "sift": images.keypoints,
    "loader": training.loader,
    "step": network.step,
    "peer": training.peer,
    "sinkhorn": network.transport,
    "latency": network.latency,
    "files": images.files,
    "aligned": images.aligned,
    "filled": images.filled,
    "modes": training.modes,
    "views": images.views,
    "parity": network.parity,
    "memory": network.memory,
}


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """The command line. Raises RequestError."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=str(__doc__).split("\n")[0]
    )
    add = parser.add_argument
    add("--only", default="", help=f"groups of rows, separated by commas: {', '.join(GROUPS)}")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dim", type=int, default=128, help="D, width of the network (default 128)")
    add("--seconds", type=float, default=15.0, help="of a comparison, about (default 15)")
    add("--json", type=Path, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args(argv)
    options.groups = options.only.split(",") if options.only else list(GROUPS)
    for name in options.groups:
        if name not in GROUPS:
            raise RequestError(f"--only {name}: must be of {', '.join(GROUPS)}")
    return options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the rows as they are measured. Returns 1 if one failed, else 0."""
    options = parse(argv)
    try:
        config = SuperGlueConfig(dim=options.dim)
    except ValueError as error:
        raise RequestError(f"--dim {options.dim}: {error}") from None
    setting = Setting(torch.device(choose_device(options.device)), config, options.seconds)
    about = describe_machine(setting)
    print(about, flush=True)
    rows: List[Row] = []
    for name in options.groups:
        for row in run(name, setting):
            rows.append(row)
            print(row, flush=True)
        if options.json:
            held = {"machine": about, "rows": [dataclasses.asdict(row) for row in rows]}
            write_atomic(options.json, json.dumps(held, indent=1) + "\n")
    return int(any(row.failed for row in rows))


def describe_machine(setting: Setting) -> str:
    """A line on device, load, torch and the network."""
    name = platform.processor() or platform.machine()
    if setting.device.type == "cuda":
        name = torch.cuda.get_device_name(setting.device)
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return f"{name}, {load}, torch {torch.__version__}, D = {setting.config.dim}"


def run(name: str, setting: Setting) -> Iterator[Row]:
    """The rows of a group. An exception costs only its remaining rows, and a row reports it: as
    skipped if something is missing (RequestError), else as failed.
    """
    try:
        yield from GROUPS[name](setting)
    except RequestError as error:
        yield Row(name, skipped=str(error))
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        yield Row(name, failed=f"{type(error).__name__}: {message}")


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
