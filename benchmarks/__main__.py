"""The speed table of this machine: `python -m pipeline.benchmark`.

Compare numbers within one run only: there, the compared ways alternate on the same work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Optional, Sequence

import torch

from benchmarks import images, network, row, training
from benchmarks.row import Row, Setting
from pipeline import errors
from pipeline.errors import RequestError
from pipeline.files import write_atomic
from superglue_sift.superglue import SuperGlueConfig
from superglue_sift.weights import choose_device

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
        prog="python -m pipeline.benchmark", description=str(__doc__).split("\n")[0]
    )
    add = parser.add_argument
    add("--only", default="", help=f"groups of rows, separated by commas: {', '.join(GROUPS)}")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dim", type=int, default=128, help="D, width of the network (default 128)")
    add("--iterations", type=int, default=100, help="T, Sinkhorn iterations (default 100)")
    add("--seconds", type=float, default=15.0, help="of a comparison, about (default 15)")
    add("--rounds", type=int, default=7, help="of a comparison at most (default 7)")
    add("--params", type=Path, default=Path("params.yaml"), help="with the section keypoints")
    add("--json", type=Path, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args(argv)
    if options.rounds < 2 or options.dim % 4 or options.dim < 8 or options.iterations < 1:
        raise RequestError(
            "--rounds must be 2 or more, --dim a multiple of 4 from 8 on, --iterations 1 or more"
        )
    unknown = [name for name in options.only.split(",") if name and name not in GROUPS]
    if unknown:
        raise RequestError(
            f"--only {unknown[0]}: no such group of rows; there are {', '.join(GROUPS)}"
        )
    return options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the rows as they are measured."""
    options = parse(argv)
    config = SuperGlueConfig(dim=options.dim, sinkhorn_iterations=options.iterations)
    device = torch.device(choose_device(options.device))
    setting = Setting(device, config, options.rounds, options.seconds, options.params)
    about = describe_machine(setting)
    print(about, flush=True)
    rows: List[Row] = []
    for name in filter(None, options.only.split(",")) if options.only else GROUPS:
        for each in row.run(name, GROUPS[name], setting):
            rows.append(each)
            print(each, flush=True)
        if options.json:
            held = {"machine": about, "rows": [dataclasses.asdict(each) for each in rows]}
            write_atomic(options.json, json.dumps(held, indent=1) + "\n")
    return 0


def describe_machine(setting: Setting) -> str:
    """A line on device, load, torch and the network."""
    name = (
        torch.cuda.get_device_name(setting.device)
        if setting.device.type == "cuda"
        else platform.processor()
    )
    load = (
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {torch.get_num_threads()}"
        " threads"
    )
    size = f"D = {setting.config.dim}, T = {setting.config.sinkhorn_iterations}"
    return f"{name or platform.machine()}, {load}, torch {torch.__version__}; {size}"


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
