"""Copies batches to the device with NVIDIA DALI while the previous step is computed.

The store holds keypoints, so there is nothing to decode: DALI's external source gets the packed record buffers of
`load_batch` and copies them to page-locked memory and to the GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from typing import Any, Deque, Generator, List, Optional

import torch

from pipeline import compat
from superglue_sift.batch import ON_HOST, PairBatch

FIELDS = tuple(field.name for field in dataclasses.fields(PairBatch))


def require() -> None:
    """Raises RequestError, which names the pip package, if DALI is not installed."""
    try:
        import nvidia.dali.plugin.pytorch  # noqa: F401
    except ImportError:
        raise compat.without_dali("--loader dali", "leave out --loader") from None


def copied(
    steps: Generator[List[PairBatch], None, None], device: Optional[torch.device] = None, ahead: int = 2
) -> Generator[List[PairBatch], None, None]:
    """The micro-batches of each step on `device`, copied up to `ahead` of them in advance.

    Args:
        steps: the micro-batches of each step, on the host, with homographies; closed at the end. Its exceptions are
            raised at their step.
        device: None is the CPU.
    """
    device = device or torch.device("cpu")
    sizes: Deque[int] = deque()  # micro-batches of each step in DALI's queue
    errors: List[BaseException] = []  # raised after the steps before them

    def buffers() -> Generator[List[Any], None, None]:
        try:
            for batches in steps:
                sizes.append(len(batches))
                for batch in batches:
                    yield [getattr(batch, name).numpy() for name in FIELDS]
        except BaseException as error:
            errors.append(error)

    with contextlib.closing(steps):
        pipeline = _pipeline(buffers(), device, ahead)
        first = _next(pipeline, device)
        while first is not None:
            yield [first, *(_next(pipeline, device) for _ in range(sizes.popleft() - 1))]
            first = _next(pipeline, device)
    if errors:
        raise errors[0]


def _pipeline(buffers: Generator[List[Any], None, None], device: torch.device, ahead: int) -> Any:
    """One sample per field and iteration: the whole buffer of a micro-batch."""
    from nvidia.dali import fn, pipeline_def

    on_gpu = device.type == "cuda"
    index = (device.index or 0) if on_gpu else None

    @pipeline_def(batch_size=1, num_threads=1, device_id=index, prefetch_queue_depth=max(ahead, 1))
    def copying():
        fields = fn.external_source(buffers, num_outputs=len(FIELDS), batch=False)
        return tuple(field.gpu() if on_gpu and name not in ON_HOST else field for name, field in zip(FIELDS, fields))

    built = copying()
    built.build()
    return built


def _next(pipeline: Any, device: torch.device) -> Optional[PairBatch]:
    """The next micro-batch; None at the end."""
    try:
        outputs = pipeline.run()
    except StopIteration:
        return None
    host = torch.device("cpu")
    places = [host if name in ON_HOST else device for name in FIELDS]
    return PairBatch(*(_tensor(output, place) for output, place in zip(outputs, places)))


def _tensor(output: Any, device: torch.device) -> torch.Tensor:
    """A copy in torch's memory, since DALI reuses its own; finished on this thread's CUDA stream."""
    from nvidia.dali.plugin.pytorch import feed_ndarray, to_torch_type

    tensor = torch.empty(tuple(output[0].shape()), dtype=to_torch_type[output.dtype], device=device)
    if tensor.numel():
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        feed_ndarray(output[0], tensor, cuda_stream=stream)
    return tensor
