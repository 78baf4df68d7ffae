"""SuperGlue for SIFT: a graph neural network that matches two sets of local features (arXiv
1911.11763). Written from the paper; `SuperGlue` has its equations in order:

    (2)       states        x = projection(descriptor) + encoder(position, score, scale, angle)
    (3 - 5)   L times       x <- x + MLP([x, attention of x within its image])
                            x <- x + MLP([x, attention of x to the other image])
    (6)       descriptors   f = final projection of x
    (7)       scores        S_ij = <f0_i, f1_j> / sqrt(D)
    (8, 9)    assignment    P by optimal transport of S with a dustbin for each image

What differs from the paper, and why:

- Descriptors are RootSIFT (Arandjelovic 2012) or other unit vectors. A keypoint with two
  orientations gets the better one for the pair (`batch.choose_orientations`).
- The encoder may also see each keypoint's nearest neighbour by descriptor in the other image
  (`neighbour_features`). The first layers then need not search for candidates: they can compare how
  distinctive these are (Lowe's ratio, section 7.1), and whether others moved, rotated and scaled
  alike.
- The encoder also sees SIFT's scale and angle (`scale_angle`), which SuperPoint does not have.
- Self-attention may use relative positions by rotary embedding (`rotary`), which was published
  later.
- Each residual branch starts at zero and the projections as the identity, so that the untrained
  network is the softmax nearest-neighbour matcher of its descriptors and training can only improve
  on it.
- The hidden norm is LayerNorm by default (`norm: layer`); the paper's BatchNorm is `norm: batch`.
  LayerNorm makes a pair's result independent of the rest of the batch, needs no collective, and has
  no train/eval mismatch.

Shapes: B pairs of images with M and N keypoints, padded (`batch`); T keypoints of all images
together, with their padding; D the width of a state.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn

from superglue_sift.matches import Matches
from superglue_sift.network.attention import MLP, AttentionalLayer, RotaryPositions, token_norm
from superglue_sift.network.batch import (
    Images,
    Keypoints,
    Pair,
    PairBatch,
    choose_orientations,
    from_pairs,
    root_sift,
    size_class,
)
from superglue_sift.network.sinkhorn import log_optimal_transport
from superglue_sift.torch_compat import checkpoint, floats_of_bytes, sqrt

SIFT_DIM = 128
# Hidden layers of the keypoint encoder (appendix, "keypoint encoder")
ENCODER_WIDTHS = (32, 64, 128, 256)

# Initial score: SHARPNESS * cosine of RootSIFT, and the dustbin at the cosine of a doubtful match.
# These minimize the loss of the untrained network on COCO views (1.51, precision 0.91, recall
# 0.70).
SHARPNESS = 40.0
DOUBTFUL_COSINE = 0.78
# The same for ORB, where half of the bits agree by chance: loss 2.2 on views of photographs, 10.2
# with the above.
BINARY_SHARPNESS = 12.0
BINARY_DOUBTFUL_COSINE = 0.2

# Typical SIFT values at 512x384: what the network sees of keypoints is of order one
TYPICAL_SCORE = 0.03
TYPICAL_SCALE = 4.0
NEIGHBOUR_FEATURES = 8  # per keypoint, see `neighbour_features`

# Limits of a configuration, since a model file may come from anyone.
LIMITS = {
    "dim": 4096,
    "layers": 256,
    "heads": 1024,
    "sinkhorn_iterations": 1000,
    "descriptor_dim": 65536,
}
NORMS = ("layer", "batch")
KINDS = ("sift", "float", "binary")


@dataclasses.dataclass(frozen=True)
class SuperGlueConfig:
    """Shape and meaning of the weights. Raises ValueError for a value out of range."""

    dim: int = 128  # D, width of a keypoint's state; the paper: 128 for SIFT, 256 for SuperPoint
    layers: int = 9  # pairs of one self- and one cross-attention layer
    heads: int = 4
    norm: str = "layer"  # layer | batch
    scale_angle: bool = True  # also encode SIFT's scale and angle
    neighbours: bool = False  # also encode each one's nearest neighbour in the other image
    rotary: bool = False  # relative positions in self-attention
    sinkhorn_iterations: int = 100  # T, in training; inference may use another
    extractor: str = "sift"  # of the keypoints (extractors.py)
    descriptor: str = "sift"  # kind of descriptor: sift | float | binary (extractors.py)
    descriptor_dim: int = 128  # entries of a descriptor; of a binary one, bits

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise ValueError(f"{name} = {value!r}: must be a whole number from 1 to {limit}")
        if self.neighbours and not self.scale_angle:
            raise ValueError("neighbours needs scale_angle")
        if self.dim % self.heads:
            raise ValueError(f"heads = {self.heads}: must divide dim ({self.dim})")
        if self.norm not in NORMS or self.descriptor not in KINDS:
            raise ValueError(
                f"norm {self.norm!r}, descriptor {self.descriptor!r}: must be of {NORMS} and of"
                f" {KINDS}"
            )

    def to_dict(self) -> dict:
        """Plain values for JSON; `SuperGlueConfig(**values)` reads them back."""
        return dataclasses.asdict(self)


class SuperGlue(nn.Module):
    """The network."""

    def __init__(self, config: SuperGlueConfig = SuperGlueConfig()) -> None:
        super().__init__()
        self.config = config
        self.recompute = False  # gradient checkpointing of each layer
        self.compiled = False  # see `compile_layers`
        dim = config.dim
        self.descriptor_projection = nn.Linear(config.descriptor_dim, dim)
        self.keypoint_encoder = _keypoint_encoder(config)
        self.rotary = RotaryPositions(dim // config.heads) if config.rotary else None
        self.self_attention = nn.ModuleList(_layer(config) for _ in range(config.layers))
        self.cross_attention = nn.ModuleList(_layer(config) for _ in range(config.layers))
        self.final_projection = nn.Linear(dim, dim)
        binary = config.descriptor == "binary"
        sharpness = BINARY_SHARPNESS if binary else SHARPNESS
        doubtful = BINARY_DOUBTFUL_COSINE if binary else DOUBTFUL_COSINE
        self.dustbin = nn.Parameter(torch.tensor(sharpness * doubtful))
        self._start_as_identity(sharpness)

    def forward(self, batch: PairBatch) -> Tensor:
        """Log assignment of each pair, (B, M + 1, N + 1) float32, dustbins last.

        exp() of an entry is the probability of that match; of padding it is 0.
        """
        log_P, _ = self.assign([batch])
        return log_P[0]

    def assign(
        self, batches: Sequence[PairBatch], wait: bool = True, precision: str = "float32"
    ) -> Tuple[List[Tensor], Tensor]:
        """Log assignments of batches of different sizes (`PairBatch.size_classes`), together.

        precision: of the layers while training, by autocast: float32, bfloat16 or float16. For
        inference `weights.fuse_for_inference` casts their weights once.

        Returns:
            log P (B, M + 1, N + 1) of each batch; and (pairs,) bool, whether each pair is finite,
            see `sinkhorn.log_optimal_transport`, also for `wait`.
        """
        keypoints = Keypoints.of([choose_orientations(batch) for batch in batches])
        descriptors = self.describe(keypoints, precision)
        iterations = self.config.sinkhorn_iterations
        solved = [  # equations 8 and 9
            log_optimal_transport(*problem, self.dustbin, iterations, wait)
            for problem in self.scores(descriptors, keypoints.images)
        ]
        log_Ps, finite = zip(*solved)
        return list(log_Ps), torch.cat(finite)

    def encode(self, keypoints: Keypoints) -> Tuple[Tensor, Optional[Tensor]]:
        """Initial states (T, D) (equation 2), and rotations (2, T, d / 2) of queries and keys."""
        config = self.config
        dtype = self.dustbin.dtype
        geometry = geometry_of(keypoints, config.scale_angle)  # (T, 3 or 6)
        descriptors = unit_vectors(keypoints.descriptors, config.descriptor, config.descriptor_dim)
        seen = [geometry]
        if config.neighbours:
            seen.append(neighbour_features(descriptors, geometry, keypoints.images))
        encoded = self.keypoint_encoder([torch.cat(seen, -1).to(dtype)], keypoints.images.valid)
        rotation = self.rotary(geometry[:, :2].to(dtype)) if self.rotary else None
        return self.descriptor_projection(descriptors.to(dtype)) + encoded, rotation

    def describe(self, keypoints: Keypoints, precision: str = "float32") -> Tensor:
        """Matching descriptors of all keypoints (equations 2 to 6), (T, D)."""
        images = keypoints.images
        x, rotation = self.encode(keypoints)
        dtype = None if precision == "float32" else getattr(torch, precision)
        run = checkpoint if self.recompute and self.training else _run
        for to_itself, to_other in zip(self.self_attention, self.cross_attention):
            x = run(to_itself, x, images, dtype, False, rotation)
            x = run(to_other, x, images, dtype, True)
        return self.final_projection(x)

    def scores(self, descriptors: Tensor, images: Images) -> List[Tuple[Tensor, Tensor, Tensor]]:
        """Of each batch the scores (B, M, N) (equation 7), and the masks (B, M) and (B, N)."""
        sides = images.split(descriptors / self.config.dim**0.25)  # (B, M, D), (B, N, D), ...
        return [
            (torch.bmm(f0, f1.transpose(1, 2)), mask0, mask1)
            for f0, f1, mask0, mask1 in zip(
                sides[::2], sides[1::2], images.masks[::2], images.masks[1::2]
            )
        ]

    def compile_layers(self) -> None:
        """Compile `describe` (torch 2), on a GPU as CUDA graphs, once for each of few shapes."""
        self.describe = torch.compile(self.describe, mode="reduce-overhead", dynamic=False)
        self.compiled = True

    @property
    def layers(self) -> List[nn.Module]:
        """Layers in order of use: self, cross, self, ..."""
        return [layer for both in zip(self.self_attention, self.cross_attention) for layer in both]

    @property
    def in_order(self) -> List[nn.Module]:
        """All modules with weights, in order of use."""
        encoders = [self.descriptor_projection, self.keypoint_encoder]
        rotary = [self.rotary] if self.rotary else []
        return [*encoders, *rotary, *self.layers, self.final_projection]

    def _start_as_identity(self, sharpness: float) -> None:
        """Make the first score of a pair of keypoints `sharpness` times the cosine."""
        dim = self.config.dim
        with torch.no_grad():
            for linear in (self.descriptor_projection, self.final_projection):
                nn.init.zeros_(linear.bias)
            if dim == self.config.descriptor_dim:
                nn.init.eye_(self.descriptor_projection.weight)
            else:  # keeps inner products when dim is the larger, nearly so below
                nn.init.orthogonal_(self.descriptor_projection.weight)
            nn.init.eye_(self.final_projection.weight)
            # unit descriptors scaled to entries of order one, then <f0, f1> / sqrt(D) = sharpness *
            # cosine
            self.descriptor_projection.weight.mul_(math.sqrt(dim))
            self.final_projection.weight.mul_(math.sqrt(sharpness / math.sqrt(dim)))


def _run(layer: nn.Module, *inputs: Any) -> Tensor:
    return layer(*inputs)


def _layer(config: SuperGlueConfig) -> AttentionalLayer:
    return AttentionalLayer(config.dim, config.heads, config.norm)


def _keypoint_encoder(config: SuperGlueConfig) -> MLP:
    """The encoder of geometry and neighbours, whose output starts at zero."""
    width = (6 if config.scale_angle else 3) + NEIGHBOUR_FEATURES * config.neighbours
    layers: List[nn.Module] = []
    for wider in ENCODER_WIDTHS:
        layers += [nn.Linear(width, wider), token_norm(config.norm, wider), nn.ReLU()]
        width = wider
    last = nn.Linear(width, config.dim)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return MLP(*layers, last)


@torch.no_grad()
def match_pairs(
    model: SuperGlue,
    pairs: Sequence[Pair],
    device: str,
    selected: Sequence[Tuple[np.ndarray, np.ndarray]],
) -> List[Matches]:
    """Match pairs by the network in one batch: all its mutual matches, whatever their scores.

    selected: for each pair the keypoints of both images that the network gets, ascending indices
    (m,) and (n,) (`nearest.select_keypoints`). Returns indices of all keypoints.
    """
    if not pairs:
        return []
    few = [
        Pair(pair.records0[index0], pair.records1[index1], pair.size0, pair.size1)
        for pair, (index0, index1) in zip(pairs, selected)
    ]
    order, batches = from_pairs(few).to(device).size_classes()
    if model.compiled:
        batches = [part.pad(len(part), size_class(part.width)) for part in batches]
    rows: List[Tuple[np.ndarray, np.ndarray]] = []
    for log_P in model.assign(batches)[0]:
        matches0, scores0, _, _ = mutual_matches(log_P, threshold=0.0)
        rows += zip(matches0.cpu().numpy(), scores0.cpu().numpy())
    by_pair = dict(zip(order, rows))
    return [Matches.from_dense(*by_pair[i]).renumber(*selected[i]) for i in range(len(pairs))]


def mutual_matches(log_P: Tensor, threshold: float = 0.2) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mutual best matches with a probability above `threshold` (section 5, 0.2 in the paper).

    log_P: (B, M + 1, N + 1), output of `SuperGlue`.

    Returns matches0 (B, M) int64, the index in image 1 or -1, and its probability scores0 (B, M)
    float32, 0 without a match; then matches1 and scores1 (B, N), the same from image 1.
    """
    inner = log_P.detach()[:, :-1, :-1].float()
    best0 = inner.max(2)
    best1 = inner.max(1)
    found: List[Tensor] = []
    for best, other in ((best0, best1), (best1, best0)):
        itself = torch.arange(best.indices.shape[1], device=log_P.device)
        scores = best.values.exp()
        good = (other.indices.gather(1, best.indices) == itself) & (scores > threshold)
        found += [best.indices.masked_fill(~good, -1), scores.masked_fill(~good, 0.0)]
    return found[0], found[1], found[2], found[3]


def unit_vectors(data: Tensor, kind: str, dim: int) -> Tensor:
    """Descriptors as unit vectors, float32 (..., dim); zeros stay zeros.

    sift: RootSIFT. float: divided by their length. binary: every bit becomes -1 or +1, so that the
    cosine at Hamming distance h is 1 - 2 h / dim. data: (..., K) uint8, the bytes of records from
    the descriptor on (`PairBatch.descriptors`).
    """
    if kind == "sift":
        return root_sift(data)
    if kind == "float":
        return nn.functional.normalize(floats_of_bytes(data), dim=-1)
    # Highest bit first, as numpy.unpackbits
    place = 2 ** torch.arange(7, -1, -1, device=data.device)
    bits = (data.unsqueeze(-1) & place.to(torch.uint8)) != 0
    return (bits.flatten(-2).float() * 2 - 1) / math.sqrt(dim)


def geometry_of(keypoints: Keypoints, scale_angle: bool) -> Tensor:
    """(T, 3 or 6), each of order one: position, log score, log scale, direction."""
    size = keypoints.image_size
    position = (keypoints.positions - (size - 1) / 2) / (size.amax(-1, keepdim=True) / 2)
    score = (keypoints.scores.clamp(min=1e-6) / TYPICAL_SCORE).log().unsqueeze(-1)
    if not scale_angle:
        return torch.cat([position, score], -1)
    scale = (keypoints.scales.clamp(min=1e-3) / TYPICAL_SCALE).log().unsqueeze(-1)
    angle = torch.deg2rad(keypoints.angles).unsqueeze(-1)
    return torch.cat([position, score, scale, angle.cos(), angle.sin()], -1)


@torch.no_grad()
def neighbour_features(descriptors: Tensor, geometry: Tensor, images: Images) -> Tensor:
    """Inputs of the keypoint encoder from each keypoint's nearest neighbour in the other image.

    Args:
        descriptors: unit descriptors of all keypoints, (T, 128).
        geometry: (T, 6): position, log score, log scale, cos and sin of the angle.

    Returns:
        (T, 8): distance of the descriptors, its ratio to that of the second nearest (1
        without one), whether they are mutual nearest neighbours; position of the neighbour 2, log
        ratio of the scales, cos and sin of the angle between the orientations. Zeros if the other
        image is empty.
    """
    units = images.split(descriptors)
    places = images.split(geometry)
    features: List[Tensor] = []
    for i in range(0, len(units), 2):
        mask0, mask1 = images.masks[i : i + 2]
        cosines = torch.bmm(units[i], units[i + 1].transpose(1, 2))  # (B, M, N)
        cosines.masked_fill_(~(mask0.unsqueeze(2) & mask1.unsqueeze(1)), -torch.inf)
        best = [cosines.max(2), cosines.max(1)]
        features.append(_features_of(cosines, best, places[i], places[i + 1], mask1))
        cosines = cosines.transpose(1, 2)
        features.append(_features_of(cosines, best[::-1], places[i + 1], places[i], mask0))
    return images.join(features)


def _features_of(
    cosines: Tensor, best: List[Any], ours: Tensor, theirs: Tensor, mask: Tensor
) -> Tensor:
    """`neighbour_features` (B, M, 8) of images with M keypoints, `ours` (B, M, 6).

    cosines: (B, M, N) of both descriptors, -inf for padding. best: their maxima over N, and over M.
    theirs, mask: (B, N, 6), (B, N) of the other images.
    """
    values, nearest = best[0]
    second = cosines.scatter(2, nearest.unsqueeze(2), -torch.inf).amax(2)
    second = torch.where(second == -torch.inf, values, second)
    both = torch.stack([values, second]).clamp(-1.0, 1.0)
    distance, next_distance = sqrt((2.0 - 2.0 * both).clamp(min=1e-6)).unbind(0)
    itself = torch.arange(nearest.shape[1], device=nearest.device)
    mutual = best[1].indices.gather(1, nearest) == itself
    theirs = theirs.gather(1, nearest.unsqueeze(2).expand(-1, -1, ours.shape[2]))
    _, _, _, scale0, cos0, sin0 = ours.unbind(2)
    x1, y1, _, scale1, cos1, sin1 = theirs.unbind(2)
    columns = [
        distance,
        (distance / next_distance.clamp(min=1e-6)).clamp(max=1.0),
        mutual.to(distance.dtype),
        x1,
        y1,
        scale1 - scale0,
        cos0 * cos1 + sin0 * sin1,
        cos0 * sin1 - sin0 * cos1,
    ]
    occupied = mask.any(1)[:, None, None]
    return torch.stack(columns, 2).masked_fill(~occupied, 0.0)
