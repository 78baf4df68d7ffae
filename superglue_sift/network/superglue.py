"""Match two sets of local features, such as SIFT, by SuperGlue (arXiv 1911.11763).

SuperGlue is a graph neural network. The module is written from the paper. `SuperGlue.assign` has
the paper's equations in order, and the parts below it follow the same order:

    (2)       states        x = projection(descriptor) + encoder(position, score, scale, angle)
    (3 - 5)   L times       x <- x + MLP([x, attention of x within its image])
                            x <- x + MLP([x, attention of x to the other image])
    (6)       descriptors   f = final projection of x
    (7)       scores        S_ij = <f0_i, f1_j> / sqrt(D)
    (8, 9)    assignment    P by optimal transport of S with a dustbin for each image

The network differs from the paper in these points:

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

A shape names these numbers:

- B is the number of pairs, whose images have M and N keypoints with their padding (`batch`).
- T is the number of keypoints of all images together, with their padding.
- D is the width of a state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any, Callable, ContextManager, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn

from superglue_sift.features.sift import TYPICAL_SCORE
from superglue_sift.matches import Matches
from superglue_sift.network.batch import (
    Images,
    KeypointTensors,
    Pair,
    PairBatch,
    choose_orientations,
    from_pairs,
    join_keypoints,
    size_class,
    unit_vectors,
)
from superglue_sift.network.sinkhorn import log_optimal_transport
from superglue_sift.torch_compat import LayerNorm, checkpoint, chunked_attention, is_traced, sqrt

SIFT_DIM = 128
# Hidden layers of the keypoint encoder (appendix, "keypoint encoder")
ENCODER_WIDTHS = (32, 64, 128, 256)

# The initial score is SHARPNESS * cosine of RootSIFT, and the dustbin is the score of a doubtful
# cosine. These minimize the loss of the untrained network on COCO views (1.51, precision 0.91,
# recall 0.70).
SHARPNESS = 40.0
DOUBTFUL_COSINE = 0.78

# Typical scale of SIFT in images of 512x384 px. The inputs of the network are divided by it and by
# TYPICAL_SCORE, so that they are of order one.
TYPICAL_SCALE = 4.0
NEIGHBOUR_FEATURES = 8  # inputs of each keypoint from `neighbour_features`

# Initial standard deviation of the frequencies of rotary positions, in radians over half an image
SPREAD = 2.0

# Parameters are created with these options, since a program that uses the matcher may have changed
# torch's default dtype or default device.
FLOAT32: Any = {"dtype": torch.float32, "device": "cpu"}

# No number of a configuration may be larger, since a model file may come from anyone.
LARGEST = 65536
KINDS = ("sift", "float")  # kinds of descriptors, see `batch.unit_vectors`
# A function of this type sums a tensor over all ranks, and has a gradient.
SumRanks = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class SuperGlueConfig:
    """Describe the architecture of a network and its inputs. A model file contains it.

    Raises:
        ValueError: For a value out of range.
    """

    dim: int = 128  # D, width of a state; the paper has 128 for SIFT, 256 for SuperPoint
    layers: int = 9  # pairs of one self- and one cross-attention layer
    heads: int = 4  # heads of each attention layer
    norm: str = "layer"  # norm of hidden layers, "layer" or "batch"
    scale_angle: bool = True  # also encode SIFT's scale and angle
    neighbours: bool = False  # also encode the nearest neighbour in the other image
    rotary: bool = False  # use relative positions in self-attention
    sinkhorn_iterations: int = 100  # the same number in training and in matching
    extractor: str = "sift"  # name of the keypoint extractor (extractors.py)
    descriptor: str = "sift"  # kind of descriptor, "sift" or "float" (extractors.py)
    descriptor_dim: int = 128  # number of entries of a descriptor

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "sinkhorn_iterations", "descriptor_dim"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LARGEST:
                raise ValueError(f"{name} = {value!r}: must be a whole number from 1 to {LARGEST}")
        if self.neighbours and not self.scale_angle:
            raise ValueError("neighbours needs scale_angle")
        # Rotary positions take the channels of a head in pairs.
        if self.dim % (self.heads * (1 + self.rotary)):
            raise ValueError(
                f"heads = {self.heads}: must divide dim ({self.dim}), with rotary into even parts"
            )
        if self.descriptor not in KINDS:
            raise ValueError(f"descriptor {self.descriptor!r}: must be of {KINDS}")

    def to_dict(self) -> dict:
        """Return plain values for JSON. `SuperGlueConfig(**values)` reads them back."""
        return dataclasses.asdict(self)


class SuperGlue(nn.Module):
    """The network computes the probability of each match from the keypoints of pairs."""

    def __init__(self, config: SuperGlueConfig = SuperGlueConfig()) -> None:
        super().__init__()
        self.config = config
        self.recompute = False  # gradient checkpointing of each layer
        self.compiled = False  # see `compile_layers`
        dim = config.dim
        layer = functools.partial(AttentionalLayer, dim, config.heads, config.norm)
        # Equation 2: the first state of a keypoint
        self.descriptor_projection = nn.Linear(config.descriptor_dim, dim, **FLOAT32)
        self.keypoint_encoder = _keypoint_encoder(config)
        self.rotary = RotaryPositions(dim // config.heads) if config.rotary else None
        # Equations 3 to 5: layers in pairs
        self.self_attention = nn.ModuleList(layer(cross=False) for _ in range(config.layers))
        self.cross_attention = nn.ModuleList(layer(cross=True) for _ in range(config.layers))
        # Equation 6: matching descriptors; equation 8: the score of the dustbins
        self.final_projection = nn.Linear(dim, dim, **FLOAT32)
        self.dustbin = nn.Parameter(torch.tensor(SHARPNESS * DOUBTFUL_COSINE, **FLOAT32))
        self._start_as_identity()

    def forward(self, batch: PairBatch) -> Tensor:
        """Compute the log assignment of each pair, (B, M + 1, N + 1) float32.

        The last row and column are the dustbins. exp() of an entry is the probability of that
        match. It is 0 for padding.

        An example with five keypoints, which image 1 shows in another order and 9 px to the right:

        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> keypoints = 200 * torch.rand(1, 5, 2)
        >>> descriptors = torch.randint(256, (1, 5, 128), dtype=torch.uint8)
        >>> one = torch.ones(1, 5)
        >>> order = torch.tensor([3, 1, 4, 0, 2])
        >>> batch = PairBatch(
        ...     keypoints0=keypoints,
        ...     keypoints1=keypoints[:, order] + torch.tensor([9.0, 0.0]),
        ...     descriptors0=descriptors,
        ...     descriptors1=descriptors[:, order],
        ...     scales0=4 * one,
        ...     scales1=4 * one,
        ...     oris0=90 * one,
        ...     oris1=90 * one,
        ...     scores0=0.03 * one,
        ...     scores1=0.03 * one,
        ...     image_size0=torch.tensor([[320.0, 240.0]]),
        ...     image_size1=torch.tensor([[320.0, 240.0]]),
        ... )
        >>> log_P = SuperGlue()(batch)
        >>> log_P.shape
        torch.Size([1, 6, 6])
        >>> matches0, scores0, matches1, scores1 = mutual_matches(log_P)
        >>> matches0  # of each keypoint of image 0, the index of its match in image 1
        tensor([[3, 1, 4, 0, 2]])
        """
        log_P, _ = self.assign([batch])
        return log_P[0]

    def assign(
        self, batches: Sequence[PairBatch], wait: bool = True, precision: str = "float32"
    ) -> Tuple[List[Tensor], Tensor]:
        """Compute the log assignments of batches of different sizes (`PairBatch.size_classes`).

        Args:
            batches: the pairs, in batches of any sizes.
            wait: whether pairs that overflow are computed again in the log domain
                (`sinkhorn.log_optimal_transport`).
            precision: precision of the layers while training, by autocast: float32, bfloat16 or
                float16. For inference, `weights.fuse_for_inference` casts their weights once.

        Returns:
            log P (B, M + 1, N + 1) of each batch, and (pairs,) bool, whether each pair is finite.
        """
        # A keypoint with two orientations keeps one of them.
        keypoints, images = join_keypoints([choose_orientations(batch) for batch in batches])
        descriptors = self.describe(keypoints, images, precision)
        return self.transport(descriptors, images, wait)

    def describe(
        self, keypoints: KeypointTensors, images: Images, precision: str = "float32"
    ) -> Tensor:
        """Compute the matching descriptors (T, D) of all keypoints (equations 2 to 6).

        Keypoints and images are as from `join_keypoints`, and the precision is as for `assign`.
        """
        config = self.config
        dtype = self.dustbin.dtype
        # Compute the first state of each keypoint from its descriptor and geometry (equation 2).
        geometry = geometry_of(keypoints, config.scale_angle)  # (T, 3 or 6)
        descriptors = unit_vectors(keypoints.descriptors, config.descriptor)
        inputs = [geometry]
        if config.neighbours:
            inputs.append(neighbour_features(descriptors, geometry, images))  # (T, 8)
        encoded = self.keypoint_encoder([torch.cat(inputs, -1).to(dtype)], images.valid)
        x = self.descriptor_projection(descriptors.to(dtype)) + encoded  # (T, D)
        # Rotations of queries and keys, (2, T, d / 2)
        rotation = self.rotary(geometry[:, :2].to(dtype)) if self.rotary else None
        # Apply the layers of self- and cross-attention (equations 3 to 5). Gradient checkpointing
        # keeps only the input of each layer, and computes the rest again.
        autocast = None if precision == "float32" else getattr(torch, precision)
        recompute = self.recompute and self.training
        for layer in self.layers:
            arguments = (x, images, autocast, rotation)
            x = checkpoint(layer, *arguments) if recompute else layer(*arguments)
        return self.final_projection(x)  # equation 6

    def transport(
        self, descriptors: Tensor, images: Images, wait: bool, dtype: Optional[torch.dtype] = None
    ) -> Tuple[List[Tensor], Tensor]:
        """Compute the log assignments from matching descriptors (T, D) (equations 7 to 9).

        Args:
            wait: as for `assign`, as is the result.
            dtype: the precision of the optimal transport. If None, it is that of the descriptors.
        """
        # (T, D) -> (B, M, D), (B, N, D), ... for images 0 and 1 of each batch. Each factor is
        # divided by the root of sqrt(D).
        views = images.split(descriptors / self.config.dim**0.25)
        iterations = self.config.sinkhorn_iterations
        solved = []
        # Solve each batch by itself, since sizes differ.
        for i in range(0, len(views), 2):
            # (B, M, D), (B, N, D) -> (B, M, N), then log P (B, M + 1, N + 1)
            scores = torch.bmm(views[i], views[i + 1].transpose(1, 2))
            scores = scores.to(dtype or scores.dtype)
            mask0, mask1 = images.masks[i : i + 2]
            solved.append(
                log_optimal_transport(scores, mask0, mask1, self.dustbin, iterations, wait)
            )
        log_Ps, finite = zip(*solved)
        return list(log_Ps), torch.cat(finite)

    def compile_layers(self) -> None:
        """Compile `describe` by torch 2, on a GPU into CUDA graphs. Each shape is compiled once."""
        self.describe = torch.compile(self.describe, mode="reduce-overhead", dynamic=False)
        self.compiled = True

    @property
    def layers(self) -> List[nn.Module]:
        """Return all layers in the order of their use: self, cross, self, ..."""
        return [layer for both in zip(self.self_attention, self.cross_attention) for layer in both]

    @property
    def in_order(self) -> List[nn.Module]:
        """Return all modules with weights, in the order of their use."""
        first = [self.descriptor_projection, self.keypoint_encoder, self.rotary]
        return [*(module for module in first if module), *self.layers, self.final_projection]

    @torch.no_grad()
    def _start_as_identity(self) -> None:
        """Initialize the weights as the identity.

        The score of two keypoints is then SHARPNESS times the cosine of their descriptors.
        """
        # The biases of both projections, the encoder and the residual branches start at zero.
        zeros = [self.descriptor_projection.bias, self.final_projection.bias]
        for module in self.modules():
            if isinstance(module, MLP):
                zeros += module[-1].parameters()
        for parameter in zeros:
            nn.init.zeros_(parameter)
        dim = self.config.dim
        if dim == self.config.descriptor_dim:
            # `nn.init.eye_` would make a matrix on torch's default device.
            self.descriptor_projection.weight.zero_().fill_diagonal_(1.0)
        else:  # this keeps inner products if dim is larger, and nearly keeps them if not
            nn.init.orthogonal_(self.descriptor_projection.weight)
        self.final_projection.weight.zero_().fill_diagonal_(1.0)
        # Unit descriptors are scaled to entries of order one. Then <f0, f1> / sqrt(D) is
        # SHARPNESS * cosine.
        self.descriptor_projection.weight.mul_(math.sqrt(dim))
        self.final_projection.weight.mul_(math.sqrt(SHARPNESS / math.sqrt(dim)))


# Equation 2: the first state of a keypoint


def _keypoint_encoder(config: SuperGlueConfig) -> MLP:
    """Create the encoder of geometry and neighbours."""
    # Inputs of a keypoint: `geometry_of`, then `neighbour_features`
    width = (6 if config.scale_angle else 3) + NEIGHBOUR_FEATURES * config.neighbours
    layers: List[nn.Module] = []
    for wider in ENCODER_WIDTHS:
        norm = NORMS[config.norm](wider, **FLOAT32)
        layers += [nn.Linear(width, wider, **FLOAT32), norm, nn.ReLU()]
        width = wider
    return MLP(*layers, nn.Linear(width, config.dim, **FLOAT32))


def geometry_of(keypoints: KeypointTensors, scale_angle: bool) -> Tensor:
    """Return position, log score, log scale and direction of keypoints, (T, 6), each of order one.

    The keypoints are as from `join_keypoints`. Without `scale_angle`, return position and log score
    only, (T, 3).
    """
    # Positions are relative to the centre of the image, and from -1 to 1 along its longer side.
    # A batch that is padded has images of size 0.
    size = keypoints.image_size
    longer = size.amax(-1, keepdim=True).clamp(min=1.0)
    position = (keypoints.keypoints - (size - 1) / 2) / (longer / 2)
    score = (keypoints.scores[:, None].clamp(min=1e-6) / TYPICAL_SCORE).log()
    if not scale_angle:
        return torch.cat([position, score], -1)
    scale = (keypoints.scales[:, None].clamp(min=1e-3) / TYPICAL_SCALE).log()
    # An angle is two numbers, cos and sin, since 0 and 360 degrees are the same direction.
    angle = torch.deg2rad(keypoints.oris[:, None])
    return torch.cat([position, score, scale, angle.cos(), angle.sin()], -1)


@torch.no_grad()
def neighbour_features(descriptors: Tensor, geometry: Tensor, images: Images) -> Tensor:
    """Compute inputs of the encoder from each keypoint's nearest neighbour in the other image.

    Args:
        descriptors: unit descriptors of all keypoints, (T, D).
        geometry: (T, 6) with position, log score, log scale, cos and sin of the angle.
        images: the images of the keypoints.

    Returns:
        (T, 8). All are zero if the other image is empty. The columns are:
        - the distance of the descriptors,
        - its ratio to the distance of the second nearest neighbour, 1 if there is none,
        - whether both are mutual nearest neighbours,
        - the position of the neighbour (2 columns),
        - the log ratio of the scales,
        - cos and sin of the angle between the orientations.
    """
    units = images.split(descriptors)
    places = images.split(geometry)  # (B, M, 6) each
    features: List[Tensor] = []
    for i in range(0, len(units), 2):
        # Images i and i + 1 are the two sides of one batch.
        mask0, mask1 = images.masks[i : i + 2]
        cosines = torch.bmm(units[i], units[i + 1].transpose(1, 2))  # (B, M, N)
        cosines.masked_fill_(~(mask0.unsqueeze(2) & mask1.unsqueeze(1)), -torch.inf)
        for view, (nearest, distance, ratio, mutual) in enumerate(nearest_neighbours(cosines)):
            # (B, N, 6) -> (B, M, 6): the geometry of each nearest neighbour
            other = i + 1 - view
            theirs = places[other].gather(1, nearest.unsqueeze(2).expand(-1, -1, 6))
            _, _, _, scale0, cos0, sin0 = places[i + view].unbind(2)
            x1, y1, _, scale1, cos1, sin1 = theirs.unbind(2)
            turn = [cos0 * cos1 + sin0 * sin1, cos0 * sin1 - sin0 * cos1]
            columns = [distance, ratio, mutual.to(ratio.dtype), x1, y1, scale1 - scale0, *turn]
            # The maximum over an empty image is padding, so its features are set to zero.
            occupied = images.masks[other].any(1)[:, None, None]
            features.append(torch.stack(columns, 2).masked_fill(~occupied, 0.0))
    return images.join(features)


def nearest_neighbours(cosines: Tensor) -> List[Tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Find the nearest neighbour of each keypoint, for both images.

    Args:
        cosines: (B, M, N) between unit descriptors of both images, -inf for padding.

    Returns:
        For image 0 four tensors (B, M), and for image 1 the same (B, N):
        - the index of the nearest neighbour in the other image,
        - the distance of the descriptors,
        - its ratio to the distance of the second nearest neighbour, 1 if there is none,
        - whether both are mutual nearest neighbours.
    """
    best0 = cosines.max(2)
    best1 = cosines.max(1)
    neighbours = []
    for matrix, (values, nearest), (_, back) in (
        (cosines, best0, best1),
        (cosines.transpose(1, 2), best1, best0),
    ):
        # The second nearest is the maximum without the nearest. In an image of one keypoint there
        # is none, and the nearest takes its place, so that the ratio is 1.
        second = matrix.scatter(2, nearest.unsqueeze(2), -torch.inf).amax(2)
        second = torch.where(second == -torch.inf, values, second)
        # Distances of unit vectors: |a - b|^2 = 2 - 2 cos
        both = torch.stack([values, second]).clamp(-1.0, 1.0)
        distance, next_distance = sqrt((2.0 - 2.0 * both).clamp(min=1e-6)).unbind(0)
        ratio = (distance / next_distance.clamp(min=1e-6)).clamp(max=1.0)
        itself = torch.arange(nearest.shape[1], device=nearest.device)
        neighbours.append((nearest, distance, ratio, back.gather(1, nearest) == itself))
    return neighbours


# Equations 3 to 5: attention between keypoints


class AttentionalLayer(nn.Module):
    """The layer updates every keypoint once: x <- x + MLP([x, message]) (equation 3)."""

    def __init__(self, dim: int, heads: int, norm: str, cross: bool) -> None:
        """Create a layer. If `cross`, an image attends to the other image of its pair."""
        super().__init__()
        self.heads = heads
        self.cross = cross
        self.query_key_value = nn.Linear(dim, 3 * dim, **FLOAT32)
        self.merge: nn.Module = nn.Linear(dim, dim, **FLOAT32)
        first = nn.Linear(2 * dim, 2 * dim, **FLOAT32)
        last = nn.Linear(2 * dim, dim, **FLOAT32)
        self.mlp = MLP(first, NORMS[norm](2 * dim, **FLOAT32), nn.ReLU(inplace=True), last)

    def forward(
        self, x: Tensor, images: Images, dtype: Optional[torch.dtype], rotation: Optional[Tensor]
    ) -> Tensor:
        """Update the states x (T, D) of all keypoints; return (T, D).

        Args:
            dtype: precision of the products by autocast. If None, it is the precision of the
                weights. The residual stream is not rounded to it.
            rotation: (2, T, d / 2) of queries and keys in self-attention, see `rotate`.
        """
        state = x.to(dtype or self.query_key_value.weight.dtype)
        # Autocast is inside the layer, because gradient checkpointing runs the layer again.
        with torch.autocast(x.device.type, dtype=dtype) if dtype else contextlib.nullcontext():
            heads = self.query_key_value(state).unflatten(-1, (3, self.heads, -1))  # (T, 3, H, d)
            # Queries and keys are rotated by their positions, values are not.
            if rotation is not None and not self.cross:
                rotated = rotate(heads[:, :2], rotation[:, :, None, None])
                heads = torch.cat([rotated, heads[:, 2:]], 1)
            # (T, 3, H, d) -> query, key and value (B, H, N, d) of images 0 and 1 of each batch
            views = [view.permute(2, 0, 3, 1, 4).unbind() for view in images.split(heads)]
            messages = []
            for i, (query, _, _) in enumerate(views):
                # The partner of image 2 k is image 2 k + 1, and the reverse.
                source = i ^ 1 if self.cross else i
                _, key, value = views[source]
                message = attention(query, key, value, images.visible[source])
                occupied = images.occupied[source]
                if occupied is not None:  # an image without keypoints sends no message
                    message = message * occupied
                # The heads are merged: (B, H, N, d) -> (B, N, D) (equation 5).
                messages.append(self.merge(message.transpose(1, 2).flatten(2)))
            return x + self.mlp([state, images.join(messages)], images.valid)


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Optional[Tensor]) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v without storing the weights (equation 4).

    Args:
        query: (B, H, M, d).
        key, value: (B, H, N, d).
        visible: (B, 1, 1, N) bool, True for keys to attend to. If None, attend to all keys.

    Returns:
        (B, H, M, d).
    """
    if not hasattr(nn.functional, "scaled_dot_product_attention"):
        # torch 1.10 has no kernel for attention.
        return chunked_attention(query, key, value, visible)
    if visible is not None and is_traced():
        # This is what the kernel does. With a bool mask ONNX also tests all weights for nan, which
        # takes half of the time of a pair.
        visible = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, -math.inf)
    with _without_cudnn() if query.is_cuda else contextlib.nullcontext():
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)


def _without_cudnn() -> ContextManager[Any]:
    """Return a context without cuDNN, which takes 70 ms (on an H100) to plan each new shape."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:  # torch 2.2 or older
        return contextlib.nullcontext()
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


class RotaryPositions(nn.Module):
    """Rotary embedding of 2-D positions, with learned frequencies.

    It is that of Su et al. 2021 and of LightGlue, section 3.1.

    Inner products of rotated queries and keys depend on the relative positions of keypoints.
    """

    def __init__(self, channels: int) -> None:
        """Draw the frequencies at random. channels: d of each head, which must be even."""
        super().__init__()
        self.frequencies = nn.Parameter(SPREAD * torch.randn(2, channels // 2, **FLOAT32))

    def forward(self, positions: Tensor) -> Tensor:
        """Compute cos and sin (2, T, d / 2) of positions (T, 2) of order one, for `rotate`."""
        angles = positions @ self.frequencies  # (T, 2) and (2, d / 2) -> (T, d / 2)
        return torch.stack([angles.cos(), angles.sin()])


def rotate(vectors: Tensor, rotation: Tensor) -> Tensor:
    """Rotate vectors (..., d), whose entries i and i + d / 2 are a point of the plane.

    Args:
        rotation: cos and sin of the angles, (2, ..., d / 2), broadcast. The result has the dtype of
            the vectors.
    """
    # (..., d) -> two halves (..., d / 2), whose entries are the coordinates of d / 2 points
    a, b = vectors.chunk(2, -1)
    cos, sin = rotation.to(vectors.dtype).unbind(0)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class MLP(nn.Sequential):
    """A perceptron of keypoints. Its BatchNorm leaves out padding."""

    def forward(self, inputs: Sequence[Tensor], valid: Optional[Tensor] = None) -> Tensor:
        """Compute (T, C) from the concatenation of `inputs`, (T, C0), (T, C1), ...

        The products of each input are added, so that the concatenation need not exist. It would be
        a fifth of what a training step keeps for the gradient.

        Args:
            valid: (T,) bool, False for padding. If None, there is no padding.
        """
        first: Any = self[0]
        # Split the columns of the first map by the input that they belong to.
        weights = first.weight.to(inputs[0].dtype).split([tensor.shape[1] for tensor in inputs], 1)
        # (T, C0), (T, C1), ... -> (T, hidden)
        x = nn.functional.linear(inputs[0], weights[0], first.bias)
        for tensor, weight in zip(inputs[1:], weights[1:]):
            x = torch.addmm(x, tensor, weight.t())
        for module in list(self)[1:]:
            x = module(x, valid) if isinstance(module, TokenBatchNorm) else module(x)
        return x


class TokenBatchNorm(nn.Module):
    """Normalize over all keypoints of the batch, with sums of all ranks by `sum_ranks`.

    The statistics equal those of one process with the whole batch, for any numbers of keypoints per
    rank. (torch's SyncBatchNorm needs a GPU.) A batch without keypoints does not change the running
    statistics.
    """

    running_mean: Tensor
    running_var: Tensor

    momentum = 0.1
    eps = 1e-5

    def __init__(self, channels: int, **options: Any) -> None:
        """Create the norm. options: dtype and device."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, **options))
        self.bias = nn.Parameter(torch.zeros(channels, **options))
        self.register_buffer("running_mean", torch.zeros(channels, **options))
        self.register_buffer("running_var", torch.ones(channels, **options))
        self.sum_ranks: Optional[SumRanks] = None

    def forward(self, x: Tensor, valid: Optional[Tensor] = None) -> Tensor:
        """Normalize x (T, C); return (T, C). This is computed in float32 also under autocast.

        Args:
            valid: (T,) bool, False for padding, which does not count. If None, there is no padding.
        """
        x32 = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = self.running_mean
        var = self.running_var
        if self.training:
            mean, var = self._statistics(x32, valid)
        return ((x32 - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias).to(x.dtype)

    def _statistics(self, x: Tensor, valid: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        """Compute mean and variance (C,) of the keypoints, and update the running statistics.

        The mean is computed first, since a difference of large squares would lose digits.
        """
        sum_ranks = self.sum_ranks or (lambda tensor: tensor)
        counted = torch.ones_like(x[:, :1]) if valid is None else valid.to(x.dtype).unsqueeze(1)
        # One reduction sums the values and the number of keypoints over all ranks.
        first = sum_ranks(torch.cat([(x * counted).sum(0), counted.sum(0)]))
        count = first[-1].detach().clamp(min=1.0)
        mean = first[:-1] / count
        var = sum_ranks(((x - mean).square() * counted).sum(0)) / count
        with torch.no_grad():
            # The step is a tensor, so that the host does not wait for the device.
            step = self.momentum * (first[-1] > 0).to(first.dtype)
            # Keep the unbiased variance, as torch's BatchNorm does.
            self.running_mean += step * (mean - self.running_mean)
            self.running_var += step * (var * count / (count - 1).clamp(min=1.0) - self.running_var)
        return mean, var


NORMS = {"layer": LayerNorm, "batch": TokenBatchNorm}  # norms of hidden layers


def synchronize(model: nn.Module, sum_ranks: Optional[SumRanks]) -> None:
    """Set `sum_ranks` of every TokenBatchNorm. If None, each rank has its own statistics."""
    for module in model.modules():
        if isinstance(module, TokenBatchNorm):
            module.sum_ranks = sum_ranks


# Section 5: matches of an assignment


def mutual_matches(log_P: Tensor, threshold: float = 0.2) -> Tuple[Tensor, ...]:
    """Find mutual best matches with a probability above `threshold` (section 5, 0.2 in the paper).

    Two keypoints in each image. The second of image 0 belongs in the dustbin:

    >>> P = torch.tensor([[[0.9, 0.0, 0.1], [0.0, 0.3, 0.7], [0.1, 0.7, 0.0]]])
    >>> matches0, scores0, _, _ = mutual_matches(P.log(), threshold=0.5)
    >>> matches0
    tensor([[ 0, -1]])
    >>> scores0
    tensor([[0.9000, 0.0000]])

    Args:
        log_P: (B, M + 1, N + 1), output of `SuperGlue`.

    Returns:
        Matches0 (B, M) int64, the index in image 1 or -1, and its probability scores0 (B, M)
        float32, which is 0 without a match. matches1 and scores1 (B, N) say the same of image 1.
    """
    # (B, M + 1, N + 1) -> (B, M, N), without the dustbins
    inner = log_P.detach()[:, :-1, :-1].float()
    best0 = inner.max(2)
    best1 = inner.max(1)
    matches: List[Tensor] = []
    for best, other in ((best0, best1), (best1, best0)):
        itself = torch.arange(best.indices.shape[1], device=log_P.device)
        scores = best.values.exp()
        # A match is mutual if the best match of the best match is the keypoint itself.
        good = (other.indices.gather(1, best.indices) == itself) & (scores > threshold)
        matches += [best.indices.masked_fill(~good, -1), scores.masked_fill(~good, 0.0)]
    return tuple(matches)


@torch.no_grad()
def match_pairs(
    model: SuperGlue,
    pairs: Sequence[Pair],
    device: str,
    selected: Sequence[Tuple[np.ndarray, np.ndarray]],
) -> List[Matches]:
    """Match pairs by the network in one batch. Return all mutual matches, whatever their scores.

    Args:
        selected: for each pair, the keypoints of both images that the network gets, ascending
            indices (m,) and (n,) (`nearest.select_keypoints`). The matches that are returned have
            indices of all keypoints.
    """
    if not pairs:
        return []
    # Give the network the selected keypoints alone.
    few = [
        pair._replace(records0=pair.records0[index0], records1=pair.records1[index1])
        for pair, (index0, index1) in zip(pairs, selected)
    ]
    # Sort the pairs into batches of similar sizes, to save padding.
    order, batches = from_pairs(few).to(device).size_classes()
    if model.compiled:
        # CUDA graphs need few shapes, so widths are rounded up.
        widest = (max(part.scores0.shape[1], part.scores1.shape[1]) for part in batches)
        batches = [part.pad(len(part), size_class(n)) for part, n in zip(batches, widest)]
    rows = []
    for log_P in model.assign(batches)[0]:
        # Keep every mutual match: callers apply their own thresholds.
        matches0, scores0, _, _ = mutual_matches(log_P, threshold=0.0)
        rows += zip(matches0.cpu().numpy(), scores0.cpu().numpy())
    # Restore the order of the pairs, and the indices of all keypoints.
    by_pair = dict(zip(order, rows))
    return [Matches.from_dense(*by_pair[i]).renumber(*selected[i]) for i in range(len(pairs))]
