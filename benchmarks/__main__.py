"""Print the speed table of this machine: `python -m benchmarks`.

Compare numbers within one run only: there, the compared ways alternate on the same work.
"""

from __future__ import annotations

import os
import platform
from typing import Callable, Dict, Iterable, Iterator, Optional, Sequence

import torch

from benchmarks import images, network, training
from benchmarks.timing import Setting
from pipeline import errors
from pipeline.errors import RequestError
from superglue_sift.network.superglue import SuperGlueConfig
from superglue_sift.network.weights import choose_device

GROUPS: Dict[str, Callable[[Setting], Iterable[str]]] = {
    "step": network.time_training_step,
    "sinkhorn": network.time_transport,
    "latency": network.time_latency,
    "files": images.time_files,
    "modes": training.time_modes,
    "decoders": images.time_decoders,
    "views": images.time_view_loaders,
    "onnx": images.time_onnx_runtime,
    "parity": network.compare_precisions,
}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the rows as they are measured. Returns 1 if one failed, else 0."""
    parser = errors.make_parser("benchmarks", __doc__)
    add = parser.add_argument
    add("--only", default="", help=f"groups of rows, separated by commas: {', '.join(GROUPS)}")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dim", type=int, default=128, help="D, width of the network (default 128)")
    add("--layers", type=int, default=9, help="of self- and of cross-attention (default 9)")
    add("--keypoints", type=int, default=512, help="N, keypoints of a view (default 512, the most)")
    add("--seconds", type=float, default=15.0, help="of a comparison, about (default 15)")
    options = parser.parse_args(argv)
    groups = options.only.split(",") if options.only else list(GROUPS)
    config = SuperGlueConfig(dim=options.dim, layers=options.layers)
    device = torch.device(choose_device(options.device))
    setting = Setting(device, config, options.keypoints, options.seconds)
    # Each row is printed as soon as it is measured.
    print(describe_machine(setting), flush=True)
    code = 0
    for name in groups:
        for row in run_group(name, setting):
            print(row, flush=True)
            code |= "FAILED: " in row
    return code


def describe_machine(setting: Setting) -> str:
    """Describe the device, its load, torch, and the width of the network in a line."""
    name = platform.processor() or platform.machine()
    if setting.device.type == "cuda":
        name = torch.cuda.get_device_name(setting.device)
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return f"{name}, {load}, torch {torch.__version__}, D = {setting.config.dim}"


def run_group(name: str, setting: Setting) -> Iterator[str]:
    """Yield the rows of a group.

    An exception costs only the remaining rows of the group, and a row reports it: as skipped if
    something is missing (RequestError, ImportError), else as failed.
    """
    try:
        yield from GROUPS[name](setting)
    except (RequestError, ImportError) as error:
        yield f"{name:56} SKIP: {error}"
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        yield f"{name:56} FAILED: {type(error).__name__}: {message}"


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
