"""Time of a pair in torch and in ONNX Runtime: `python -m benchmarks.dev.onnx_times FILE.onnx [--device cuda]`.

FILE.onnx is from `python -m superglue_sift.onnx`, of the same model. The median of five calls, after a warm-up.
"""

from __future__ import annotations

import argparse
import statistics
import timeit
from functools import partial
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

import numpy as np
import torch

from pipeline import errors
from pipeline.errors import RequestError
from superglue_sift.batch import Pair
from superglue_sift.features import Features
from superglue_sift.matcher import match_pairs
from superglue_sift.network.inference import fuse_for_inference
from superglue_sift.network.superglue import SIFT_DIM
from superglue_sift.onnx import inputs_of
from superglue_sift.sift import KEYPOINT
from superglue_sift.weights import choose_device, load_model, shipped_weights


def latencies(path: Path, model: Optional[Path], device: str = "cpu") -> Iterator[str]:
    """Yield a line for each number of keypoints. Raises RequestError: no such file, or not for `device`."""
    if not path.is_file():
        raise RequestError(f"{path}: no such file; `python -m superglue_sift.onnx {path}` writes it")
    session = _session(path, torch.device(device))
    network = fuse_for_inference(load_model(model or shipped_weights(), device)[0])
    for count in (512, 1024, 2048):
        side = Features(_synthetic_keypoints(count), (640, 480))
        pair, inputs = Pair(side.records, side.records, side.size, side.size), inputs_of(side, side)
        calls = partial(match_pairs, network, [pair], device), partial(session.run, None, inputs)
        in_torch, in_onnx = (1000 * statistics.median(timeit.repeat(call, number=1, repeat=6)[1:]) for call in calls)
        yield f"{count} keypoints each: torch {in_torch:.0f} ms, ONNX Runtime {in_onnx:.0f} ms"


def _session(path: Path, device: torch.device) -> Any:
    """`onnxruntime.InferenceSession` on this device; raises instead of falling back to the CPU."""
    try:
        import onnxruntime
    except ImportError:
        raise RequestError("one more package is needed: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    provider: Any = "CPUExecutionProvider"
    if device.type == "cuda":
        provider = "CUDAExecutionProvider", {"device_id": device.index or 0}
        if provider[0] not in onnxruntime.get_available_providers():
            raise RequestError(
                f"onnxruntime {onnxruntime.__version__} has no CUDA: pip install onnxruntime-gpu in its place"
            )
    session = onnxruntime.InferenceSession(str(path), options, providers=[provider])
    if device.type == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
        raise RequestError("onnxruntime-gpu cannot load CUDA or cuDNN: its messages above name the library")
    return session


def _synthetic_keypoints(count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    records = np.zeros(count, KEYPOINT)
    records["x"], records["y"] = rng.uniform(0, 480, (2, count))
    records["scale"], records["angle"] = rng.uniform(1, 20, count), rng.uniform(0, 360, count)
    records["score"], records["descriptor"] = 0.05, rng.integers(0, 120, (count, SIFT_DIM))
    return records


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.onnx_times", description=str(__doc__).split(":")[0])
    parser.add_argument("file", type=Path, help="the network as ONNX")
    parser.add_argument("--model", type=Path, help="model file (default: the shipped weights)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto")
    args = parser.parse_args(argv)
    for line in latencies(args.file, args.model, choose_device(args.device)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
