"""SuperGlue for SIFT: a graph neural network that matches two sets of local features (arXiv 1911.11763).

keypoints + descriptors -> keypoint encoder -> L x (self-, cross-attention) -> scores -> optimal transport.

Written from the paper. What differs from it, and why:
- Descriptors are SIFT's, converted from uint8 to RootSIFT inside the network (Arandjelovic 2012), or others, as unit
  vectors (`descriptors.unit_vectors`). A keypoint with two orientations gets the better one for the pair
  (`orientation`).
- The keypoint encoder also sees SIFT's scale and angle (`scale_angle`), which SuperPoint does not have.
- Self-attention may use relative positions by rotary embedding (`rotary`), which was published later.
- Each residual branch starts at zero and the projections as the identity, so that the untrained network is
  the softmax nearest-neighbour matcher of its descriptors and training can only improve on it.
- The hidden norm is LayerNorm by default (`norm: layer`); the paper's BatchNorm is `norm: batch`. LayerNorm
  makes a pair's result independent of the rest of the batch, needs no collective, and has no train/eval mismatch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from superglue_sift.batch import PairBatch
from superglue_sift.descriptors import unit_vectors
from superglue_sift.network.attention import AttentionalLayer, RotaryPositions, maps_of
from superglue_sift.network.neighbours import FEATURES, neighbour_features
from superglue_sift.network.normalization import token_norm
from superglue_sift.network.orientation import choose_orientations
from superglue_sift.network.packing import Assignments, Layout
from superglue_sift.network.sinkhorn import Marginals, log_optimal_transport, padded_optimal_transport, to_float32
from superglue_sift.torch_compat import can_compile, no_autocast, recomputed

SIFT_DIM = 128
ENCODER_WIDTHS = (32, 64, 128, 256)  # hidden layers of the keypoint encoder (appendix, "keypoint encoder")

# Typical SIFT values at 512x384, so that the encoder's inputs are of order one.
TYPICAL_SCORE, TYPICAL_SCALE = 0.03, 4.0

# Initial score: SHARPNESS * cosine of RootSIFT, and the dustbin at the cosine of a doubtful match. These minimize the
# loss of the untrained network on COCO views (1.51, precision 0.91, recall 0.70).
SHARPNESS, DOUBTFUL_COSINE = 40.0, 0.78
# The same for ORB, where half of the bits agree by chance: loss 2.2 on views of photographs, 10.2 with the above.
BINARY_SHARPNESS, BINARY_DOUBTFUL_COSINE = 12.0, 0.2

# Limits of a configuration, since a model file may come from anyone.
LIMITS = {"dim": 4096, "layers": 256, "heads": 1024, "sinkhorn_iterations": 1000, "descriptor_dim": 65536}
NORMS, KINDS = ("layer", "batch"), ("sift", "float", "binary")


@dataclasses.dataclass(frozen=True)
class SuperGlueConfig:
    """Shape and meaning of the weights. Raises ValueError for a value out of range."""

    dim: int = 128  # D, width of a keypoint's state; the paper: 128 for SIFT, 256 for SuperPoint
    layers: int = 9  # pairs of one self- and one cross-attention layer
    heads: int = 4
    norm: str = "layer"  # layer | batch
    scale_angle: bool = True  # also encode SIFT's scale and angle
    neighbours: bool = False  # also encode each keypoint's nearest neighbour in the other image (neighbours.py)
    rotary: bool = False  # relative positions in self-attention (attention.py)
    sinkhorn_iterations: int = 100  # T, in training; inference may use another
    extractor: str = "sift"  # of the keypoints (extractors.py)
    descriptor: str = "sift"  # kind of descriptor: sift | float | binary (descriptors.py)
    descriptor_dim: int = 128  # entries of a descriptor; of a binary one, bits

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise ValueError(f"{name} = {value!r}: must be a whole number from 1 to {limit}")
        if self.dim % self.heads:
            raise ValueError(f"heads = {self.heads}: must divide dim ({self.dim})")
        if self.norm not in NORMS or self.descriptor not in KINDS:
            raise ValueError(f"norm {self.norm!r}, descriptor {self.descriptor!r}: must be of {NORMS} and of {KINDS}")

    def to_dict(self) -> dict:
        """Plain values for JSON; `SuperGlueConfig(**values)` reads them back."""
        return dataclasses.asdict(self)


class Matches(NamedTuple):
    """Mutual matches. matches0: (B, M) int64 index into image 1 or -1, matching_scores0: (B, M) float32; and back."""

    matches0: Tensor
    matching_scores0: Tensor
    matches1: Tensor
    matching_scores1: Tensor


class SuperGlue(nn.Module):
    """The network. Input: a `superglue_sift.batch.PairBatch` (or any object with its fields)."""

    def __init__(self, config: SuperGlueConfig = SuperGlueConfig()) -> None:
        super().__init__()
        self.config = config
        self.recompute = False  # gradient checkpointing of each layer
        dim = config.dim
        self.descriptor_projection = nn.Linear(config.descriptor_dim, dim)
        self.keypoint_encoder = _keypoint_encoder(_encoder_inputs(config), dim, config.norm)
        self.rotary = RotaryPositions(dim // config.heads) if config.rotary else None
        self.self_attention = nn.ModuleList(_layer(config) for _ in range(config.layers))
        self.cross_attention = nn.ModuleList(_layer(config) for _ in range(config.layers))
        self.final_projection = nn.Linear(dim, dim)
        binary = config.descriptor == "binary"
        sharpness = BINARY_SHARPNESS if binary else SHARPNESS
        doubtful = BINARY_DOUBTFUL_COSINE if binary else DOUBTFUL_COSINE
        self.dustbin = nn.Parameter(torch.tensor(sharpness * doubtful))
        self._start_as_identity(sharpness)

    def _start_as_identity(self, sharpness: float) -> None:
        dim = self.config.dim
        with torch.no_grad():
            for linear in (self.descriptor_projection, self.final_projection):
                nn.init.zeros_(linear.bias)
            if dim == self.config.descriptor_dim:
                nn.init.eye_(self.descriptor_projection.weight)
            else:  # keeps inner products when dim is the larger, nearly so below
                nn.init.orthogonal_(self.descriptor_projection.weight)
            nn.init.eye_(self.final_projection.weight)
            # unit descriptors scaled to entries of order one, then <f0, f1> / sqrt(D) = sharpness * cosine
            self.descriptor_projection.weight.mul_(math.sqrt(dim))
            self.final_projection.weight.mul_(math.sqrt(sharpness / math.sqrt(dim)))

    def forward(self, batch, layout: Optional[Layout] = None) -> Assignments:
        """Log assignment of each pair.

        Args:
            batch: PairBatch of B pairs; keypoints (B, M, 2) px, descriptors as bytes, counts (B,).
            layout: of the batch, if known.

        Returns:
            A sequence of B float32 matrices (m_i + 1, n_i + 1), without padding, dustbins last; exp() of an
            entry is the probability of that match.
        """
        layout = layout or Layout(batch)
        return self.assign(self.matching_descriptors(batch, layout), layout)

    def matching_descriptors(self, batch, layout: Layout) -> Tensor:
        """Matching descriptors of all keypoints (equation 6), packed: images 0 of all pairs, then images 1: (S, D).

        Autocast applies to the layers only, as in `inference`.
        """
        kind = layout.device.type
        with no_autocast(kind):
            if self.config.descriptor == "sift":
                batch = choose_orientations(batch, layout)
            x, rotation = self.encode(_tokens(batch, layout), layout)
        x = self.propagate(x, rotation, layout)
        with no_autocast(kind):
            return self.final_projection(x)

    def encode(self, tokens, layout: Layout) -> Tuple[Tensor, Optional[Tensor]]:
        """Initial state (S, D) of S packed tokens, images 0 first (equation 2); their rotation (2, S, d / 2) or None.

        tokens: with the fields of a PairBatch whose views 0 have one keypoint each. layout: see `propagate`.
        """
        geometry = geometry_of(tokens, "0", self.config.scale_angle)[:, 0]  # (S, 3 or 6)
        descriptors = unit_vectors(tokens.descriptors0[:, 0], self.config.descriptor, self.config.descriptor_dim)
        inputs = geometry
        if self.config.neighbours:
            with torch.no_grad():
                inputs = torch.cat([geometry, neighbour_features(descriptors, geometry, layout)], -1)
        dtype = self.dustbin.dtype
        state = self.descriptor_projection(descriptors.to(dtype)) + self.keypoint_encoder(inputs.to(dtype))
        return state, self.rotary(geometry[:, :2].to(dtype)) if self.rotary else None

    def propagate(self, x: Tensor, rotation: Optional[Tensor], layout: Layout) -> Tensor:
        """Apply the layers to states (S, D). layout: or an object with its attributes (`onnx.PaddedLayout`)."""
        for place, (layer, maps) in enumerate(zip(self._layers, self._maps(layout.device.type))):
            where = (layout.between, None) if place % 2 else (layout.within, rotation)
            if self.recompute and self.training:
                x = recomputed(layer, x, *where, *maps)
            else:
                x = layer(x, *where, *maps)
        return x

    @property
    def in_order(self) -> List[nn.Module]:
        """All modules with weights, in order of use."""
        encoders = [self.descriptor_projection, self.keypoint_encoder, *([self.rotary] if self.rotary else [])]
        return [*encoders, *self._layers, self.final_projection]

    @property
    def _layers(self) -> List[nn.Module]:
        """Layers in order of use: self, cross, self, ..."""
        return [layer for both in zip(self.self_attention, self.cross_attention) for layer in both]

    def _maps(self, kind: str) -> List[tuple]:
        """Further arguments of each layer: on a GPU the maps of trainable layers, computed for all at once."""
        layers = [layer for layer in self._layers if isinstance(layer, AttentionalLayer)]
        # torch 1.10's checkpoints give gradients to arguments, not to the entries of a tuple
        separate = self.recompute and not can_compile()
        if kind == "cpu" or separate or len(layers) < len(self._layers):
            return [()] * len(self._layers)
        return [(maps,) for maps in maps_of(layers)]

    def assign(self, descriptors: Tensor, layout: Layout) -> Assignments:
        """Log assignments from `matching_descriptors` (equations 7 to 9)."""
        # On a CPU one thread per pair takes 1.75 times less processor time than `transport`, 7 % of a training step
        # with 8 pairs of 256 keypoints.
        if layout.device.type == "cpu":
            return Assignments.of(self._assign_pairs(descriptors, layout, range(len(layout.sizes))))
        assignments, finite = self.transport(descriptors, layout)
        overflown = [pair for pair, is_finite in enumerate(finite.tolist()) if not is_finite]
        if not overflown:
            return assignments
        return assignments.replaced(overflown, self._assign_pairs(descriptors, layout, overflown))

    def _assign_pairs(self, descriptors: Tensor, layout: Layout, pairs: Iterable[int]) -> List[Tensor]:
        sides0, sides1 = (to_float32(t).split(s.counts) for t, s in zip(layout.halves(descriptors), layout.sides))
        with no_autocast(descriptors.device.type):  # scores reach 40, where bfloat16 resolves 0.25
            scores = [(sides0[i] * self._scale) @ sides1[i].T for i in pairs]
        return log_optimal_transport(scores, self.dustbin, self.config.sinkhorn_iterations)

    def transport(self, descriptors: Tensor, layout: Layout) -> Tuple[Assignments, Tensor]:
        """`assign` of the whole batch, part by part, without device-to-host synchronisation.

        Returns:
            log assignments; and (B,) bool, whether each is finite; others must be computed in the log domain.
        """
        T, results = self.config.sinkhorn_iterations, []
        if layout.marginals is None:
            counts = [(part.sides[0].counts, part.sides[1].counts) for part in layout.parts]
            layout.marginals = [Marginals(m, n, descriptors.device) for m, n in counts]
        x0, x1 = (to_float32(t) for t in layout.halves(descriptors))
        halves = x0 * self._scale, x1
        shapes = len(layout.parts) > 1, layout.fixed
        for part, marginals in zip(layout.parts, layout.marginals):
            sides = [side.pad(t[rows]) for side, t, rows in zip(part.sides, halves, part.rows)]
            with no_autocast(descriptors.device.type):
                scores = torch.bmm(sides[0], sides[1].transpose(1, 2))
            log_P, finite = padded_optimal_transport(scores, marginals, self.dustbin, T, *shapes)
            results.append((Assignments.padded(log_P, layout.sizes[part.pairs]), finite))
        return layout.assignments([part for part, _ in results]), torch.cat([finite for _, finite in results])

    @property
    def _scale(self) -> float:
        return 1 / math.sqrt(self.config.dim)


def _layer(config: SuperGlueConfig) -> AttentionalLayer:
    return AttentionalLayer(config.dim, config.heads, token_norm(config.norm, 2 * config.dim))


def _encoder_inputs(config: SuperGlueConfig) -> int:
    if config.neighbours and not config.scale_angle:
        raise ValueError("neighbours needs scale_angle")
    return (6 if config.scale_angle else 3) + (FEATURES if config.neighbours else 0)


def _keypoint_encoder(inputs: int, dim: int, norm: str) -> nn.Sequential:
    layers: List[nn.Module] = []
    for width in ENCODER_WIDTHS:
        layers += [nn.Linear(inputs, width), token_norm(norm, width), nn.ReLU()]
        inputs = width
    last = nn.Linear(inputs, dim)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def _tokens(batch, layout: Layout) -> PairBatch:
    """A batch of S views of one keypoint each, images 0 first, to process both sides at once."""
    records = layout.pack_sides(batch.records0, batch.records1).unsqueeze(1)
    sizes = torch.cat([batch.image_size0, batch.image_size1]).index_select(0, layout.images)
    return PairBatch(records, records, layout.images, layout.images, sizes, sizes)


def geometry_of(batch, side: str, scale_angle: bool) -> Tensor:
    """Inputs of the keypoint encoder, (B, N, 3 or 6), of order one: position, score, log scale, direction."""
    keypoints = getattr(batch, "keypoints" + side)
    size = getattr(batch, "image_size" + side)[:, None, :]
    position = (keypoints - (size - 1) / 2) / (size.amax(-1, keepdim=True) / 2)
    score = (getattr(batch, "scores" + side).clamp(min=1e-6) / TYPICAL_SCORE).log().unsqueeze(-1)
    if not scale_angle:
        return torch.cat([position, score], -1)
    scale = (getattr(batch, "scales" + side).clamp(min=1e-3) / TYPICAL_SCALE).log().unsqueeze(-1)
    angle = torch.deg2rad(getattr(batch, "angles" + side)).unsqueeze(-1)
    return torch.cat([position, score, scale, angle.cos(), angle.sin()], -1)


def mutual_matches(log_assignments: Sequence[Tensor], size: Tuple[int, int], threshold: float = 0.2) -> Matches:
    """Mutual best matches with a probability above `threshold` (section 5, 0.2 in the paper).

    Args:
        log_assignments: output of `SuperGlue`, B matrices (m_i + 1, n_i + 1).
        size: (M, N) of the padded result, at least the largest (m_i, n_i).
        threshold: minimum probability of a match.

    Returns tensors on the device of `log_assignments`.
    """
    B, (M, N) = len(log_assignments), size
    device = log_assignments[0].device if B else torch.device("cpu")
    matches0 = torch.full((B, M), -1, dtype=torch.int64, device=device)
    matches1 = torch.full((B, N), -1, dtype=torch.int64, device=device)
    scores0, scores1 = torch.zeros((B, M), device=device), torch.zeros((B, N), device=device)
    for i, log_assignment in enumerate(log_assignments):
        P = log_assignment[:-1, :-1].detach().float().exp()
        if min(P.shape) == 0:
            continue
        best0, best1 = P.max(1), P.max(0)
        for matches, scores, best, back in ((matches0, scores0, best0, best1), (matches1, scores1, best1, best0)):
            count = len(best.indices)
            mutual = back.indices[best.indices] == torch.arange(count, device=device)
            good = mutual & (best.values > threshold)
            matches[i, :count] = best.indices.masked_fill(~good, -1)
            scores[i, :count] = best.values.masked_fill(~good, 0.0)
    return Matches(matches0, scores0, matches1, scores1)
