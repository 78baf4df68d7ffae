"""Export the network to ONNX: keypoints and descriptors to matches, for any batch size and number of keypoints.

    python -m superglue_sift.onnx superglue.onnx --model models/superglue.safetensors

Inputs have the names of SuperGlue and LightGlue, with suffix 0 for the first image and 1 for the second:

    keypoints0 (B, M, 2) float32, pixels       descriptors0 (B, M, 128) float32, SIFT's from 0 to 255
    scores0, scales0, angles0 (B, M) float32   mask0 (B, M) bool, true for keypoints
    image_size0 (B, 2) float32, width, height

Outputs: matches0 (B, M), matches1 (B, N) int64, -1 without a match; matching_scores0, matching_scores1 float32; as a
list, matches (K, 3) int64 of batch, index 0, index 1 with mscores (K,) float32.

The graph uses padded tensors and masks, since ONNX has no ragged batches; weights and formulas are the same. The export
needs `pip install 'superglue-sift[onnx]'` and torch 2.5 or newer.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from superglue_sift import errors
from superglue_sift.batch import Pair
from superglue_sift.errors import RequestError
from superglue_sift.features import Features
from superglue_sift.files import check_writable
from superglue_sift.matcher import match_threshold
from superglue_sift.network.orientation import choose_pair
from superglue_sift.network.packing import Part
from superglue_sift.network.superglue import SIFT_DIM, SuperGlue
from superglue_sift.progress import clock
from superglue_sift.sift import positions
from superglue_sift.torch_compat import can_export
from superglue_sift.weights import load_model, shipped_weights

OPSET = 18  # minimum that torch's exporter writes without conversion
SIDE = ("keypoints", "descriptors", "scores", "scales", "angles", "image_size", "mask")
INPUTS = tuple(f"{name}{side}" for side in "01" for name in SIDE)
OUTPUTS = ("matches0", "matches1", "matching_scores0", "matching_scores1", "matches", "mscores")
_EMPTY = 2  # masked rows after the keypoints: no image is empty, and a second nearest neighbour exists


class PaddedSuperGlue(nn.Module):
    """The trained network on padded tensors, for `torch.export`. CPU or CUDA, no gradients."""

    def __init__(self, model: SuperGlue, threshold: float) -> None:
        """model: in evaluation mode. threshold: minimum probability of a match."""
        super().__init__()
        self.model, self.threshold = model, threshold

    def forward(self, *inputs: Tensor) -> Tuple[Tensor, ...]:
        """INPUTS to OUTPUTS, see the module's docstring."""
        named = dict(zip(INPUTS, inputs))
        lengths = [named["keypoints" + side].shape[1] for side in "01"]
        sides = [_with_empty_rows({name: named[name + side] for name in SIDE}) for side in "01"]
        masks = [side["mask"] for side in sides]
        layout: Any = PaddedLayout(masks)
        # (S, 1, ...): as `superglue._tokens`, without a copy of the records
        fields = {name + "0": layout.flat([side[name] for side in sides]).unsqueeze(1) for name in SIDE}
        fields["image_size0"] = fields["image_size0"].squeeze(1)
        x = self.model.propagate(*self.model.encode(SimpleNamespace(**fields), layout), layout)
        states = layout.sides_of(self.model.final_projection(x))
        P = self._assignment(*states, *masks) * (masks[0].unsqueeze(2) & masks[1].unsqueeze(1))
        return _matches(P[:, : lengths[0], : lengths[1]], self.threshold)

    def _assignment(self, x0: Tensor, x1: Tensor, mask0: Tensor, mask1: Tensor) -> Tensor:
        """(B, M', N') probabilities by Sinkhorn's iterations in the scaled-kernel form of `sinkhorn.py`.

        The last masked rows and columns serve as dustbins. In float64, whose range is sufficient for trained scores.
        """
        scores = torch.matmul(x0 / math.sqrt(self.model.config.dim), x1.transpose(1, 2)).double()
        Z = torch.where(mask0.unsqueeze(2) & mask1.unsqueeze(1), scores, self.model.dustbin.double())
        m, n = (mask.double().sum(1, keepdim=True) for mask in (mask0, mask1))
        total = (m + n).clamp(min=1.0)
        mu, nu = (torch.cat([mask[:, :-1].double(), other], 1) / total for mask, other in ((mask0, n), (mask1, m)))
        K = (Z - Z.amax(2, keepdim=True)).exp()
        back = K.transpose(1, 2)
        b = (nu > 0).double().unsqueeze(2)  # excludes masked columns from the first iteration on
        a = mu.unsqueeze(2)
        for _ in range(self.model.config.sinkhorn_iterations):
            a = mu.unsqueeze(2) / torch.matmul(K, b).clamp(min=1e-300)
            b = nu.unsqueeze(2) / torch.matmul(back, a).clamp(min=1e-300)
        return (K * a * b.transpose(1, 2) * total.unsqueeze(2)).float()


def _with_empty_rows(values: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """Append masked keypoints to the SIDE of one image, and repeat its size for each keypoint."""
    values = dict(values)
    size = values.pop("image_size")
    padded = {name: torch.cat([t, t.new_zeros((t.shape[0], _EMPTY, *t.shape[2:]))], 1) for name, t in values.items()}
    return {**padded, "image_size": size.unsqueeze(1).expand(-1, padded["mask"].shape[1], -1)}


class PaddedLayout:
    """`packing.Layout` of padded images: tokens are the rows of (B, M'), then of (B, N'), with padding.

    Has the attributes that `SuperGlue.encode` and `propagate` use.
    """

    def __init__(self, masks: Sequence[Tensor]) -> None:
        """masks: (B, M') and (B, N') bool, true for keypoints."""
        self.masks, self.device = masks, masks[0].device
        self.within, self.between = _PaddedEdges(self, [0, 1]), _PaddedEdges(self, [1, 0])
        sides: Any = _PaddedSide(masks[0]), _PaddedSide(masks[1])
        self.parts = [Part(slice(None), (slice(None), slice(None)), sides)]

    def flat(self, sides: Sequence[Tensor]) -> Tensor:
        """(B, M', ...) and (B, N', ...) -> (S, ...)."""
        return torch.cat([t.flatten(0, 1) for t in sides])

    def joined(self, sides: Sequence[Sequence[Tensor]]) -> Tensor:
        """`flat` of each side's parts, of which there is one."""
        return self.flat([t for side in sides for t in side])

    def halves(self, packed: Tensor) -> Sequence[Tensor]:
        """(S, ...) -> (B M', ...) and (B N', ...)."""
        return packed.split([mask.shape[0] * mask.shape[1] for mask in self.masks])

    def sides_of(self, packed: Tensor) -> List[Tensor]:
        """(S, ...) -> (B, M', ...) and (B, N', ...)."""
        return [side.pad(half) for side, half in zip(self.parts[0].sides, self.halves(packed))]

    def valid(self, part: Part) -> Sequence[Tensor]:
        """The masks, since there is one part."""
        return self.masks

    @property
    def partner_starts(self) -> Tensor:
        """(S,) int64: first row of the partner image of each token."""
        (B, M), (_, N) = (mask.shape for mask in self.masks)
        pairs = torch.arange(B, device=self.device).unsqueeze(1)
        return self.flat([(B * M + pairs * N).expand(B, M), (pairs * M).expand(B, N)])

    @property
    def alone(self) -> Tensor:
        """(S,) bool: tokens whose partner image is empty."""
        empty = [~mask.any(1, keepdim=True) for mask in self.masks]
        return self.flat([other.expand_as(mask) for other, mask in zip(empty[::-1], self.masks)])


class _PaddedSide:
    """`packing.Packing` of one side; its packed rows are the padded ones."""

    full = False

    def __init__(self, mask: Tensor) -> None:
        self.valid = mask

    def pad(self, rows: Tensor) -> Tensor:
        """(B M', ...) -> (B, M', ...)."""
        return rows.view(*self.valid.shape, *rows.shape[1:])

    def pack(self, padded: Tensor) -> Tensor:
        """(B, M', ...) -> (B M', ...)."""
        return padded.flatten(0, 1)


class _PaddedEdges:
    """`packing.Edges`: the side to which each side attends."""

    def __init__(self, layout: PaddedLayout, partner: List[int]) -> None:
        self.layout, self.partner = layout, partner

    def attention(self, heads: Tensor) -> Tensor:
        """(S, 3, H, d) -> (S, H, d), see `attention.ragged_attention`."""
        sides = [t.permute(2, 0, 3, 1, 4).unbind(0) for t in self.layout.sides_of(heads)]  # q, k, v (B, H, M', d)
        messages = []
        for (q, _, _), partner in zip(sides, self.partner):
            (_, k, v), mask = sides[partner], self.layout.masks[partner]
            # A further coordinate of -1e30 masks keys, and is cheaper than a mask; finite, so that no key gives no nan.
            hidden = ((~mask).float() * -1e30)[:, None, :, None].expand_as(k[..., :1])
            q = pad(q / math.sqrt(q.shape[-1]), (0, 1), value=1.0)
            weights = torch.matmul(q, torch.cat([k, hidden], -1).transpose(2, 3)).softmax(-1)  # (B, H, M', N')
            message = torch.matmul(weights, v) * mask.any(1)[:, None, None, None]
            messages.append(message.transpose(1, 2))  # (B, M', H, d)
        return self.layout.flat(messages)


def _matches(P: Tensor, threshold: float) -> Tuple[Tensor, ...]:
    """OUTPUTS from probabilities (B, M, N), zero for padding; M and N may be 0."""
    # append a column and a row of zeros: the maximum of an empty row is undefined
    P = pad(P, (0, 1, 0, 1))
    best0, best1 = P.max(2), P.max(1)
    sides = []
    for best, other in ((best0, best1), (best1, best0)):
        itself = torch.arange(best.indices.shape[1], device=P.device)
        good = (other.indices.gather(1, best.indices) == itself) & (best.values > threshold)
        sides.append((best.indices.masked_fill(~good, -1)[:, :-1], best.values.masked_fill(~good, 0.0)[:, :-1]))
    (matches0, scores0), (matches1, scores1) = sides
    batch, index0 = torch.where(matches0 >= 0)
    flat = torch.stack([batch, index0, matches0[batch, index0]], 1)
    return matches0, matches1, scores0, scores1, flat, scores0[batch, index0]


def example(batch: int = 2, counts: Tuple[int, int] = (7, 5), device: str = "cpu") -> Tuple[Tensor, ...]:
    """INPUTS of synthetic keypoints; the last one of each image is masked."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for count in counts:
        drawn = [torch.rand((batch, count, *rest), generator=generator) for rest in ((2,), (SIFT_DIM,), (), (), ())]
        position, descriptors, scores, scales, angles = drawn
        mask = torch.arange(count).expand(batch, count) < max(count - 1, 0)
        size = torch.tensor([[640.0, 480.0]]).repeat(batch, 1)
        values += [position * 400, (descriptors * 255).round(), scores / 10, 1 + scales * 9, angles * 360, size, mask]
    return tuple(value.to(device) for value in values)


def inputs_of(side0: Features, side1: Features) -> Dict[str, np.ndarray]:
    """The graph's INPUTS by name, for one pair of features from `Matcher.extract`."""
    values: Dict[str, np.ndarray] = {}
    pair = choose_pair(Pair(side0.records, side1.records, side0.size, side1.size))
    for side, records, size in zip("01", pair[:2], pair[2:]):
        columns = {name + "s": records[name] for name in ("descriptor", "score", "scale", "angle")}
        columns.update(keypoints=positions(records), image_size=np.array(size))
        values.update({name + side: value.astype(np.float32)[None] for name, value in columns.items()})
        values["mask" + side] = np.ones((1, len(records)), bool)
    return values


def program(model: SuperGlue, threshold: float) -> Any:
    """`torch.export.ExportedProgram` for any batch size. Raises RequestError: torch before 2.5, or not for SIFT."""
    if not can_export():
        raise RequestError(
            f"torch {torch.__version__} cannot export a network with dynamic shapes: install 2.5 or newer"
        )
    if model.config.descriptor != "sift":
        raise RequestError(f"only models for SIFT can be exported to ONNX; this one is for {model.config.extractor}")
    dim = torch.export.Dim
    batch, counts = dim("batch"), {"0": dim("keypoints0"), "1": dim("keypoints1")}
    shapes = [{0: batch} if name.startswith("image_size") else {0: batch, 1: counts[name[-1]]} for name in INPUTS]
    with torch.no_grad():
        return torch.export.export(PaddedSuperGlue(model, threshold).eval(), example(), dynamic_shapes=(tuple(shapes),))


def export(
    path: Union[str, Path],
    model: Union[str, Path, None] = None,
    threshold: Optional[float] = None,
    report: Callable[[str], None] = lambda step: None,
) -> Path:
    """Write a trained model (None: the shipped weights) as ONNX, opset 18, in one file that ends in .onnx.

    threshold: minimum probability of a match; None: the model's own, else 0.2. The file's metadata contain it.
    report: receives a line at the start of each step, since the export takes a minute or
    more. Raises RequestError: no such model, a file that cannot be written, wrong extension, or missing packages.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise RequestError(f"{path}: must end in .onnx")
    check_writable(path)
    try:
        import onnx
        import onnxscript  # noqa: F401 (torch's exporter needs it)
    except ImportError:
        raise RequestError("ONNX needs more packages: pip install 'superglue-sift[onnx]'") from None
    network, info = load_model(model or shipped_weights())
    report("step 1 of 3: torch traces the network")
    threshold = match_threshold(info) if threshold is None else threshold
    exported = program(network, threshold)
    names = {"input_names": INPUTS, "output_names": OUTPUTS}
    report("step 2 of 3: torch translates it to ONNX, the longest step")
    written = torch.onnx.export(exported, dynamo=True, **names, opset_version=OPSET, verbose=False)
    assert written is not None
    report(f"step 3 of 3: writing {path}")
    file = written.model_proto  # a property that returns a new object
    onnx.helper.set_model_props(file, {"match_threshold": repr(threshold)})
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save_model(file, str(path))
    return path


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Entry point of `python -m superglue_sift.onnx`."""
    parser = argparse.ArgumentParser(prog="python -m superglue_sift.onnx", description=str(__doc__).splitlines()[0])
    parser.add_argument("out", type=Path, help="the file to write (.onnx)")
    parser.add_argument("--model", type=Path, help="model file (default: the shipped weights)")
    parser.add_argument("--threshold", type=float, help="minimum probability of a match (default: the model's own)")
    args = parser.parse_args(argv)
    started = time.monotonic()

    def report(step: str) -> None:
        print(f"{clock(time.monotonic() - started)}  {step}", file=sys.stderr, flush=True)

    path = export(args.out, args.model, args.threshold, report)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, opset {OPSET}; inputs {', '.join(INPUTS)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.exit_code(main))
