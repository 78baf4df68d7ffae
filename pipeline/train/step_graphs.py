"""`--cuda-graph`: forward and backward pass of a micro-batch in one launch, as CUDA graphs of a few fixed sizes.

Inside a graph: everything from the records of keypoints to the gradient, which is added to one fixed buffer. Beside it
remain what the host decides or what costs little, some 100 launches of 2,000: the exchange of the gradient, which is
one all-reduce of that buffer (a graph that contained it would have to be captured and replayed by all ranks together,
while here each rank chooses for each batch), the norm, clipping, the optimiser and float16's scale.

A batch that fits no size, or whose gradient is not finite, takes the way without a graph. The sizes are a function of
the data and the parameters alone, so a resumed training uses the same.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from pipeline.parameters.schema import TrainParams
from pipeline.processes import distributed
from pipeline.train.objective import MatchingObjective
from superglue_sift.batch import PairBatch
from superglue_sift.network.cuda_graphs import SharedMemory, can_capture, capture_cuda_graph
from superglue_sift.network.fixed_layout import FixedLayout, Size, size_of
from superglue_sift.network.packing import Layout, size_class, to_device_async
from superglue_sift.network.superglue import SIFT_DIM

SIZES = 4  # more would save little padding (docs/performance.md) and take longer to capture
SAMPLED = 32  # steps whose numbers of keypoints determine the sizes
# The largest size exceeds the sampled steps by this fraction of its pairs and tokens, so that few batches are larger.
MARGIN = 1 / 32

Counts = Tuple[Tensor, Tensor]  # (B,) of each side, on the host


def sizes_for(sampled: Sequence[Counts]) -> List[Size]:
    """Up to SIZES sizes for batches like these, the largest first: each holds a share of them, the largest all."""
    pairs = max(len(counts0) for counts0, _ in sampled)
    largest = [_sorted(counts, pairs) for counts in sampled]
    tokens = [max(int(counts0.sum()), int(counts1.sum())) for counts0, counts1 in sampled]
    width = size_class(max(each[0] for each in largest))
    order = sorted(range(len(sampled)), key=lambda i: tokens[i])
    found = []
    for share in range(SIZES, 0, -1):
        chosen = order[: -(-len(order) * share // SIZES)]
        widths = [max(column) for column in zip(*(largest[i] for i in chosen))]
        most = max(tokens[i] for i in chosen)
        if share == SIZES:
            moved = math.ceil(MARGIN * pairs)
            widths, most = [widths[0]] * moved + widths[: pairs - moved], math.ceil((1 + MARGIN) * most)
        found.append(size_of(widths, most, width))
    return list(dict.fromkeys(found))


def _sorted(counts: Counts, pairs: int) -> List[int]:
    """The larger count of each pair, falling, with 0 for missing pairs."""
    largest = torch.maximum(*counts).sort(descending=True)[0].tolist()
    return largest + [0] * (pairs - len(largest))


def smallest(sizes: Sequence[Size], counts: Counts) -> Optional[int]:
    """Index of the last of `sizes` that holds a batch; None: it fits none."""
    return next((i for i in range(len(sizes) - 1, -1, -1) if sizes[i].holds(*counts)), None)


class Padding(NamedTuple):
    """Work of batches in their sizes compared with the same batches without padding.

    layers: of linear layers and attention, in operations; products: of matrices of pairs of keypoints, in entries
    compared with the parts of a `Layout` (which have padding too); total: of both, in operations; missed: fraction of
    batches that fit no size.
    """

    layers: float
    products: float
    total: float
    missed: float


def padding(sizes: Sequence[Size], batches: Sequence[Counts], config: Any) -> Padding:
    """`Padding` of these batches; all fractions but `missed` are of what is without padding.

    config: with `dim`, `layers` and `sinkhorn_iterations` of the network.
    """
    needed, done, entries, padded, missed = 0.0, 0.0, 0.0, 0.0, 0
    for counts in batches:
        chosen = smallest(sizes, counts)
        if chosen is None:
            missed += 1
            continue
        size, (m, n) = sizes[chosen], (side.double() for side in counts)
        fill0, fill1 = (
            torch.full((size.fillers,), (size.tokens - float(side.sum())) / size.fillers) for side in (m, n)
        )
        work, filling = (
            float(torch.stack(layer_operations(*sides, config.dim)).sum()) for sides in ((m, n), (fill0, fill1))
        )
        needed, done = needed + work, done + work + filling
        entries += _ragged_entries(counts)
        padded += sum(width**2 for width in size.widths)
    # of an entry: its score, its distance of descriptors, and the transport
    entry = 2 * config.dim + 2 * SIFT_DIM + 4 * config.sinkhorn_iterations
    total = (config.layers * done + entry * padded) / max(config.layers * needed + entry * entries, 1)
    return Padding(done / max(needed, 1) - 1, padded / max(entries, 1) - 1, total - 1, missed / len(batches))


def layer_operations(m: Any, n: Any, dim: int) -> Tuple[Any, Any]:
    """Operations of linear layers and of attention, in a self- and a cross-attention layer together.

    m, n: numbers of keypoints of a pair, or tensors of them. A multiplication with its addition counts as two.
    """
    return 4 * 10 * dim**2 * (m + n), 4 * dim * (m + n) ** 2


def _ragged_entries(counts: Counts) -> int:
    """Entries of the padded matrices of the parts of a `Layout` on a GPU, where batches are sorted."""
    order = torch.maximum(*counts).sort(descending=True)[1]
    records = torch.empty((len(order), 1, 0), device="meta")
    counts0, counts1 = (side[order] for side in counts)
    layout = Layout(SimpleNamespace(records0=records, records1=records, counts0=counts0, counts1=counts1))
    return sum(len(side0.counts) * side0.width * side1.width for side0, side1 in (part.sides for part in layout.parts))


def impossible(train: TrainParams, device: torch.device) -> str:
    """Why `--cuda-graph` does nothing here, the same on all ranks; "" if it works."""
    options = {
        "--parallel dp": train.parallel == "dp",
        "--compile": train.compile,
        "train.norm: batch": train.norm == "batch",
    }
    wrong = [name for name, given in options.items() if given]
    if wrong:
        return f"it does not go with {wrong[0]}"
    return "" if all(distributed.all_gather(can_capture(device))) else "it needs a GPU and torch 2"


def prepared(objective: MatchingObjective, scaler: Any, sampled: Sequence[Counts], record: int) -> Tuple[Any, str]:
    """`StepGraphs` for batches such as those `sampled`, and a line to print. record: bytes of a keypoint's record."""
    sizes = sizes_for(sampled)
    found = padding(sizes, sampled, objective.model.config)
    line = f"CUDA graphs of {len(sizes)} sizes of step: {100 * found.layers:.0f} % of the work in the layers is padding"
    return StepGraphs(objective, scaler, sizes, record), line


class StepGraphs:
    """The gradient of micro-batches, by CUDA graphs where they fit one of `sizes`.

    The gradients of the parameters are parts of one buffer, which nothing may replace.
    """

    def __init__(self, objective: MatchingObjective, scaler: Any, sizes: Sequence[Size], record: int) -> None:
        """objective: not in DistributedDataParallel. sizes: the largest first. record: bytes of a keypoint's record."""
        self.objective, self.scaler, self.sizes = objective, scaler, list(sizes)
        self.device = objective.model.dustbin.device
        self.gradient = _one_buffer([p for p in objective.parameters() if p.requires_grad])
        pairs, width = len(sizes[0].widths), sizes[0].width  # the same in all sizes
        self._batch = _empty_batch(pairs, width, record, self.device)
        self._counts = torch.zeros((2, pairs), dtype=torch.int64, device=self.device)
        self._graphs: List[Any] = []
        self._values: List[Dict[str, Tensor]] = []
        self._weight = 0.0

    def add(self, batch: PairBatch, weight: float) -> Optional[Dict[str, Tensor]]:
        """Add `weight` times the gradient of the batch's losses to `gradient`; the values of its pairs by name, (B,).

        The weight is the same in all calls. None, and nothing is done, if the batch fits no size. A pair that is not
        finite makes the gradient nan.
        """
        counts = batch.counts0, batch.counts1
        chosen = smallest(self.sizes, counts) if batch.records0.shape[-1] == self._batch.records0.shape[-1] else None
        if chosen is None or not self._ready(weight):
            return None
        order = torch.maximum(*counts).sort(descending=True, stable=True)[1]
        self._fill(batch, order)
        self._graphs[chosen]()
        places = to_device_async(order.argsort(), self.device)
        return {name: value.index_select(0, places) for name, value in self._values[chosen].items()}

    @property
    def captured(self) -> bool:
        """Whether the graphs are there."""
        return bool(self._graphs)

    def _fill(self, batch: PairBatch, order: Tensor) -> None:
        """Copy the sorted batch into the fixed memory, where more pairs and keypoints may remain of others."""
        counts = torch.zeros(self._counts.shape, dtype=torch.int64)
        counts[:, : len(batch)] = torch.stack([batch.counts0, batch.counts1])[:, order]
        self._counts.copy_(to_device_async(counts, self.device))
        there = to_device_async(order, self.device)
        for name in ("records0", "records1", "image_size0", "image_size1", "H_0to1"):
            source, target = getattr(batch, name), getattr(self._batch, name)[: len(batch)]
            (target[:, : source.shape[1]]).copy_(source.index_select(0, there))

    def _ready(self, weight: float) -> bool:
        """Capture all graphs at the first call; without them if that fails, which is said once."""
        if not self._graphs and self.sizes:
            self._weight = weight
            before = self.gradient.clone()
            try:
                memory = SharedMemory(self.device) if can_capture(self.device) else None
                self._graphs = [self._capture(size, memory) for size in self.sizes]
            except RuntimeError as error:
                self.sizes, self._graphs, self._values = [], [], []
                print(f"--cuda-graph: the step cannot be captured, so it runs without: {str(error).splitlines()[0]}")
            self.gradient.copy_(before)
        return self.captured

    def _capture(self, size: Size, memory: Optional[SharedMemory]) -> Any:
        """A graph of `size`, captured on the batch that is there: no pairs."""
        values: Dict[str, Tensor] = {}
        self._values.append(values)

        def work() -> None:
            layout = FixedLayout(self._counts, size)
            values.update(backward(self.objective, self._batch, layout, self.scaler, self._weight))

        return capture_cuda_graph(work, self.device, memory)


def backward(
    objective: nn.Module, batch: PairBatch, layout: FixedLayout, scaler: Any, weight: float
) -> Dict[str, Tensor]:
    """Add the gradient of a batch in this layout to that of the parameters; what a graph contains."""
    total, values = objective(batch, False, layout)
    scaler.scale(total.sum() * weight).backward()
    return values


def _one_buffer(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Zeros of which the gradient of each parameter becomes a view."""
    buffer = parameters[0].new_zeros(sum(p.numel() for p in parameters))
    for p, part in zip(parameters, buffer.split([p.numel() for p in parameters])):
        p.grad = part.view_as(p)
    return buffer


def _empty_batch(pairs: int, width: int, record: int, device: torch.device) -> PairBatch:
    records, counts = torch.zeros((pairs, width, record), dtype=torch.uint8), torch.zeros(pairs, dtype=torch.int64)
    sizes, H = torch.ones(pairs, 2), torch.eye(3, dtype=torch.float64).repeat(pairs, 1, 1)
    cells = torch.zeros((pairs, 2, 3, 3), dtype=torch.float64)
    return PairBatch(records, records.clone(), counts, counts, sizes, sizes.clone(), H, cells).to(device)
