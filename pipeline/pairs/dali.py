"""The pair loader that carries batches to the device with NVIDIA DALI.

`prefetched` is `pipeline.pairs.prefetch.prefetched` under another name: the same signature, the same batches in
the same order, but on `device`. The store holds keypoints, not images, so there is nothing to decode: the
packed record buffers of `load_batch`, made by the same thread, enter DALI's external source as they are, and
DALI copies them to page-locked memory and to the GPU while the step before is computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from typing import Any, Callable, Dict, Generator, Iterator, List, Optional, Sequence

import torch

from pipeline import stack
from pipeline.pairs import prefetch
from superglue_sift.batch import ON_HOST, PairBatch

FIELDS = tuple(field.name for field in dataclasses.fields(PairBatch))


def require() -> None:
    """RequestError naming the pip package where DALI is missing."""
    try:
        import nvidia.dali.plugin.pytorch  # noqa: F401
    except ImportError:
        raise stack.without_dali("train.loader = dali", "plain") from None


def prefetched(
    make: Callable[[int], List[PairBatch]], steps: Sequence[int], ahead: int = 2, device: Optional[torch.device] = None
) -> Generator[List[PairBatch], None, None]:
    """`make(step)` for each of `steps`, moved to `device` up to `ahead` steps before it is asked for.

    Args:
        make: the micro-batches of a step, on the host, each with its homographies.
        device: None is the CPU.

    Raises:
        RequestError: DALI is not installed. An exception in `make` is raised at its step.
    """
    require()
    device = device or torch.device("cpu")
    with contextlib.closing(prefetch.prefetched(make, steps, ahead)) as made:
        feed = _Feed(made)
        pipeline = _pipeline(feed, device, ahead)
        while True:
            first = _next(pipeline, device)
            if first is None:
                break
            rest = [_next(pipeline, device) for _ in range(feed.sizes.popleft() - 1)]
            yield [first, *rest]
        if feed.error is not None:
            raise feed.error


class _Feed:
    """What DALI's external source calls: the buffers of the next micro-batch.

    sizes: micro-batches of each step that was handed out. error: what `make` raised, kept until the steps
    before it are delivered.
    """

    def __init__(self, made: Iterator[List[PairBatch]]) -> None:
        self.made = made
        self.waiting: deque = deque()
        self.sizes: deque = deque()
        self.error: Optional[BaseException] = None

    def __call__(self) -> List[Any]:
        if not self.waiting:
            self._take_step()
        batch = self.waiting.popleft()
        return [getattr(batch, name).numpy() for name in FIELDS]

    def _take_step(self) -> None:
        try:
            batches = next(self.made)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise StopIteration from None
        self.waiting.extend(batches)
        self.sizes.append(len(batches))


def _dtypes() -> Dict[str, Any]:
    """Element type of each field of a PairBatch: DALI's and torch's."""
    from nvidia.dali import types

    special = {
        "records0": (types.UINT8, torch.uint8),
        "records1": (types.UINT8, torch.uint8),
        "counts0": (types.INT64, torch.int64),
        "counts1": (types.INT64, torch.int64),
        "H_0to1": (types.FLOAT64, torch.float64),
    }
    return {name: special.get(name, (types.FLOAT, torch.float32)) for name in FIELDS}


def _pipeline(feed: _Feed, device: torch.device, ahead: int) -> Any:
    """One sample per field and iteration: the whole buffer of a micro-batch."""
    from nvidia.dali import fn, pipeline_def

    on_gpu = device.type == "cuda"
    dtypes = [dali for dali, _ in _dtypes().values()]

    @pipeline_def(
        batch_size=1,
        num_threads=1,
        device_id=(device.index or 0) if on_gpu else None,
        prefetch_queue_depth=max(ahead, 1),
    )
    def carrying():
        fields = fn.external_source(feed, num_outputs=len(FIELDS), batch=False, dtype=dtypes)
        return tuple(field.gpu() if on_gpu and name not in ON_HOST else field for name, field in zip(FIELDS, fields))

    built = carrying()
    built.build()
    return built


def _next(pipeline: Any, device: torch.device) -> Optional[PairBatch]:
    """The next micro-batch, in torch's own memory; None at the end."""
    try:
        outputs = pipeline.run()
    except StopIteration:
        return None
    kinds = _dtypes()
    host = torch.device("cpu")
    return PairBatch(
        **{
            name: _tensor(out, kinds[name][1], host if name in ON_HOST else device)
            for name, out in zip(FIELDS, outputs)
        }
    )


def _tensor(output: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy, since DALI uses its memory again; on this thread's CUDA stream, and finished."""
    from nvidia.dali.plugin.pytorch import feed_ndarray

    tensor = torch.empty(tuple(output[0].shape()), dtype=dtype, device=device)
    if tensor.numel():
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        feed_ndarray(output[0], tensor, cuda_stream=stream)
    return tensor
