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
- The encoder may also see each keypoint's nearest neighbor by descriptor in the other image
  (`compute_neighbor_features`). Then the first layers need not search for candidates. They can
  compare how distinctive these are (Lowe's ratio, section 7.1), and whether other keypoints moved,
  rotated and scaled alike.
- The encoder also sees SIFT's scale and angle (`scale_angle`), which SuperPoint does not have.
- Self-attention may use relative positions by rotary embedding (`rotary`), which was published
  later.
- Each residual branch starts at zero, and the projections start as the identity. So the untrained
  network is the softmax nearest-neighbor matcher of its descriptors, from which training improves.
- The norm of hidden layers is LayerNorm (`norm: layer`), or the paper's BatchNorm (`norm: batch`).
  With LayerNorm a pair's result does not depend on the other pairs of the batch, is the same in
  training and in evaluation, and needs no communication between ranks.

A shape names these numbers:

- B is the number of pairs, whose images have M and N keypoints with their padding (`batch`).
- T is the number of keypoints of all images together, with their padding.
- D is the width of a state.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn

from superglue_sift.features.features import TYPICAL_SCORE, Features
from superglue_sift.matches import Matches
from superglue_sift.network.batch import (
    MAX_PADDING,
    FeaturePair,
    Images,
    choose_orientations,
    group_similar_sizes,
    join_keypoints,
    make_batch,
    map_tensors,
    normalize_descriptors,
    pad_images,
    round_up_keypoints,
)
from superglue_sift.network.config import SuperGlueConfig
from superglue_sift.network.perceptron import FLOAT32, MLP, NORMS
from superglue_sift.network.sinkhorn import log_optimal_transport
from superglue_sift.torch_compat import checkpoint_gradients, compute_attention, sqrt

# Hidden layers of the keypoint encoder (appendix, "keypoint encoder")
ENCODER_WIDTHS = (32, 64, 128, 256)

# The initial score is SHARPNESS * cosine of RootSIFT, and the dustbin has the score of a doubtful
# cosine. These values minimize the loss of the untrained network on views of COCO (1.51, with
# precision 0.91 and recall 0.70).
SHARPNESS = 40.0
DOUBTFUL_COSINE = 0.78

# Typical scale of SIFT in images of 512x384 px. The inputs of the network are divided by it and by
# TYPICAL_SCORE, so that they are of order one.
TYPICAL_SCALE = 4.0
NEIGHBOR_FEATURES = 8  # Number of inputs of a keypoint from `compute_neighbor_features`

# Initial standard deviation of the frequencies of rotary positions, in radians over half an image
FREQUENCY_DEVIATION = 2.0


class SuperGlue(nn.Module):
    """The network computes the probability of each match from the keypoints of pairs."""

    def __init__(self, config: Optional[SuperGlueConfig] = None) -> None:
        """Create a network with initial weights, on the CPU."""
        super().__init__()
        self.config = config = config or SuperGlueConfig()
        self.recompute = False  # gradient checkpointing of each layer
        self.compiled = False  # see `compile_layers`
        dim = config.dim
        layer = functools.partial(AttentionalLayer, dim, config.heads, config.norm)
        # Equation 2: the first state of a keypoint
        self.descriptor_projection = nn.Linear(config.descriptor_dim, dim, **FLOAT32)
        self.keypoint_encoder = _make_keypoint_encoder(config)
        self.rotary = RotaryPositions(dim // config.heads) if config.rotary else None
        # Equations 3 to 5: layers in pairs
        self.self_attention = nn.ModuleList(layer(cross=False) for _ in range(config.layers))
        self.cross_attention = nn.ModuleList(layer(cross=True) for _ in range(config.layers))
        # Equation 6: matching descriptors; equation 8: the score of the dustbins
        self.final_projection = nn.Linear(dim, dim, **FLOAT32)
        self.dustbin = nn.Parameter(torch.tensor(SHARPNESS * DOUBTFUL_COSINE, **FLOAT32))
        self._initialize_as_identity()

    def forward(self, images0: Features, images1: Features) -> Tensor:
        """Compute the log assignment of each pair.

        Args:
            images0, images1: the images of B pairs with M and N keypoints (`batch.make_batch`).

        Returns:
            (B, M + 1, N + 1) float32. The last row and column are the dustbins. exp() of an entry
            is the probability of that match. It is 0 for padding.

        Example:
            Match keypoints of OpenCV's SIFT. Image 1 lacks the left 40 columns of image 0.

            >>> import cv2
            >>> from skimage import data
            >>> images = []
            >>> for gray in (data.camera(), data.camera()[:, 40:]):
            ...     points, descriptors = cv2.SIFT.create(300).detectAndCompute(gray, None)
            ...     values = np.array([(*p.pt, p.size, p.angle, p.response) for p in points])
            ...     geometry = values[:, :2], *values[:, 2:].T
            ...     features = Features.of(*geometry, descriptors, gray.shape[1::-1])
            ...     images.append(make_batch([features]))
            >>> log_P = SuperGlue().eval()(*images)
            >>> matches0, scores0, matches1, scores1 = find_mutual_matches(log_P)
            >>> is_matched = matches0[0] >= 0
            >>> points0 = images[0].keypoints[0, is_matched]
            >>> points1 = images[1].keypoints[0, matches0[0, is_matched]]
            >>> (points1 - points0).median(0).values.round()
            tensor([-40.,   0.])
        """
        log_P, _ = self.assign([(images0, images1)])
        return log_P[0]

    def assign(
        self,
        batches: Sequence[FeaturePair],
        repair_overflow: bool = True,
        precision: str = "float32",
    ) -> Tuple[List[Tensor], Tensor]:
        """Compute the log assignments of several batches, whose sizes may differ.

        Args:
            batches: the images 0 and the images 1 of each batch of pairs.
            repair_overflow: whether pairs that overflow are computed again in the log domain
                (`sinkhorn.log_optimal_transport`).
            precision: precision of the layers while training, by autocast: float32, bfloat16 or
                float16. For inference, `weights.fuse_for_inference` casts their weights once.

        Returns:
            log P (B, M + 1, N + 1) of each batch, and (pairs,) bool, whether each pair is finite.
        """
        keypoints, images = join_keypoints([choose_orientations(*batch) for batch in batches])
        descriptors = self.compute_descriptors(keypoints, images, precision)
        return self.transport(descriptors, images, repair_overflow)

    def compute_descriptors(
        self, keypoints: Features, images: Images, precision: str = "float32"
    ) -> Tensor:
        """Compute the matching descriptors (T, D) of all keypoints (equations 2 to 6).

        Args:
            keypoints: the keypoints of several batches, (T, ...), with one orientation, from
                `join_keypoints`.
            images: their images, from the same function.
            precision: precision of the layers while training, by autocast: float32, bfloat16 or
                float16.
        """
        config = self.config
        dtype = self.dustbin.dtype
        # Equation 2: the first state of each keypoint
        geometry = encode_geometry(keypoints, config.scale_angle)  # (T, 3 or 6)
        descriptors = normalize_descriptors(keypoints.descriptors[:, 0], config.descriptor)
        inputs = [geometry]
        if config.neighbours:
            inputs.append(compute_neighbor_features(descriptors, geometry, images))  # (T, 8)
        encoded = self.keypoint_encoder([torch.cat(inputs, -1).to(dtype)], images.valid)
        x = self.descriptor_projection(descriptors.to(dtype)) + encoded  # (T, D)
        # Rotations of queries and keys, (2, T, d / 2)
        rotation = self.rotary(geometry[:, :2].to(dtype)) if self.rotary else None
        # Equations 3 to 5: layers of self- and cross-attention. Gradient checkpointing keeps only
        # the input of each layer, and computes the rest again.
        autocast = None if precision == "float32" else getattr(torch, precision)
        recompute = self.recompute and self.training
        for layer in self.layers:
            arguments = (x, images, autocast, rotation)
            x = checkpoint_gradients(layer, *arguments) if recompute else layer(*arguments)
        return self.final_projection(x)  # equation 6

    def transport(
        self,
        descriptors: Tensor,
        images: Images,
        repair_overflow: bool,
        dtype: Optional[torch.dtype] = None,
    ) -> Tuple[List[Tensor], Tensor]:
        """Compute the log assignments from matching descriptors (equations 7 to 9).

        Args:
            descriptors: (T, D), from `compute_descriptors`.
            images: the images of the keypoints.
            repair_overflow: whether pairs that overflow are computed again in the log domain.
            dtype: the precision of the optimal transport. If None, it is that of the descriptors.

        Returns:
            log P (B, M + 1, N + 1) of each batch, and (pairs,) bool, whether each pair is finite.
        """
        # (T, D) -> (B, M, D), (B, N, D), ... for images 0 and 1 of each batch. Both factors of a
        # score are divided by the root of sqrt(D).
        views = images.split_by_image(descriptors / self.config.dim**0.25)
        iterations = self.config.sinkhorn_iterations
        assignments = []
        for i in range(0, len(views), 2):
            # (B, M, D), (B, N, D) -> (B, M, N), then log P (B, M + 1, N + 1)
            scores = torch.bmm(views[i], views[i + 1].transpose(1, 2))
            scores = scores.to(dtype or scores.dtype)
            mask0, mask1 = images.masks[i : i + 2]
            assignments.append(
                log_optimal_transport(
                    scores, mask0, mask1, self.dustbin, iterations, repair_overflow
                )
            )
        log_Ps, finite = zip(*assignments)
        return list(log_Ps), torch.cat(finite)

    def compile_layers(self) -> None:
        """Compile `compute_descriptors` for each shape, by torch 2, on a GPU as CUDA graphs."""
        self.compute_descriptors = torch.compile(
            self.compute_descriptors, mode="reduce-overhead", dynamic=False
        )
        self.compiled = True

    @property
    def layers(self) -> List[nn.Module]:
        """Return all layers in the order of their use: self, cross, self, ..."""
        layers = zip(self.self_attention, self.cross_attention)
        return [layer for self_and_cross in layers for layer in self_and_cross]

    @property
    def modules_in_order(self) -> List[nn.Module]:
        """Return all modules with weights, in the order of their use."""
        first = [self.descriptor_projection, self.keypoint_encoder, self.rotary]
        return [*(module for module in first if module), *self.layers, self.final_projection]

    @torch.no_grad()
    def _initialize_as_identity(self) -> None:
        """Set the initial weights, with projections that are the identity up to a factor.

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
        else:
            # An orthogonal matrix keeps inner products if dim is larger, and nearly if it is not.
            nn.init.orthogonal_(self.descriptor_projection.weight)
        self.final_projection.weight.zero_().fill_diagonal_(1.0)
        # Unit descriptors are scaled to entries of order one. Then <f0, f1> / sqrt(D) is
        # SHARPNESS * cosine.
        self.descriptor_projection.weight.mul_(math.sqrt(dim))
        self.final_projection.weight.mul_(math.sqrt(SHARPNESS / math.sqrt(dim)))


# Equation 2: the first state of a keypoint


def _make_keypoint_encoder(config: SuperGlueConfig) -> MLP:
    """Create the encoder of geometry and neighbors."""
    # Inputs of a keypoint: `encode_geometry`, then `compute_neighbor_features`
    width = (6 if config.scale_angle else 3) + NEIGHBOR_FEATURES * config.neighbours
    layers: List[nn.Module] = []
    for wider in ENCODER_WIDTHS:
        norm = NORMS[config.norm](wider, **FLOAT32)
        layers += [nn.Linear(width, wider, **FLOAT32), norm, nn.ReLU()]
        width = wider
    return MLP(*layers, nn.Linear(width, config.dim, **FLOAT32))


def encode_geometry(keypoints: Features, scale_angle: bool) -> Tensor:
    """Encode keypoints as numbers of order one, which are the inputs of the encoder.

    Args:
        keypoints: the keypoints of several batches, (T, ...), from `join_keypoints`.
        scale_angle: whether to encode scale and angle.

    Returns:
        (T, 6) with position (2 columns), log score, log scale, and cos and sin of the angle.
        Without `scale_angle`, (T, 3) with position and log score.
    """
    # Positions are relative to the center of the image, and from -1 to 1 along its longer side.
    # Images that were added by `pad_images` have size 0.
    size = keypoints.image_size
    longer = size.amax(-1, keepdim=True).clamp(min=1.0)
    position = (keypoints.keypoints - (size - 1) / 2) / (longer / 2)
    score = (keypoints.scores[:, None].clamp(min=1e-6) / TYPICAL_SCORE).log()
    if not scale_angle:
        return torch.cat([position, score], -1)
    scale = (keypoints.scales[:, None].clamp(min=1e-3) / TYPICAL_SCALE).log()
    # An angle is encoded by cos and sin, since 0 and 360 degrees are the same direction.
    angle = torch.deg2rad(keypoints.oris)  # (T, 1)
    return torch.cat([position, score, scale, angle.cos(), angle.sin()], -1)


@torch.no_grad()
def compute_neighbor_features(descriptors: Tensor, geometry: Tensor, images: Images) -> Tensor:
    """Compute inputs of the encoder from each keypoint's nearest neighbor in the other image.

    Args:
        descriptors: unit descriptors of all keypoints, (T, D).
        geometry: (T, 6) with position, log score, log scale, cos and sin of the angle.
        images: the images of the keypoints.

    Returns:
        (T, 8). All are zero if the other image is empty. The columns are:
        - the distance of the descriptors,
        - its ratio to the distance of the second nearest neighbor, 1 if there is none,
        - whether both are mutual nearest neighbors,
        - the position of the neighbor (2 columns),
        - the log ratio of the scales,
        - cos and sin of the angle between the orientations.
    """
    unit_descriptors = images.split_by_image(descriptors)
    geometries = images.split_by_image(geometry)  # (B, M, 6) each
    features: List[Tensor] = []
    for i in range(0, len(unit_descriptors), 2):
        # Parts i and i + 1 are the images 0 and 1 of one batch.
        mask0, mask1 = images.masks[i : i + 2]
        unit0, unit1 = unit_descriptors[i : i + 2]
        cosines = torch.bmm(unit0, unit1.transpose(1, 2))  # (B, M, N)
        cosines.masked_fill_(~(mask0.unsqueeze(2) & mask1.unsqueeze(1)), -torch.inf)
        for view, (nearest, distance, ratio, mutual) in enumerate(find_nearest_neighbors(cosines)):
            partner = i + 1 - view
            # (B, N, 6) -> (B, M, 6): the geometry of each nearest neighbor
            rows = nearest.unsqueeze(2).expand(-1, -1, 6)
            neighbor_geometry = geometries[partner].gather(1, rows)
            _, _, _, scale0, cos0, sin0 = geometries[i + view].unbind(2)
            x1, y1, _, scale1, cos1, sin1 = neighbor_geometry.unbind(2)
            turn = [cos0 * cos1 + sin0 * sin1, cos0 * sin1 - sin0 * cos1]
            columns = [distance, ratio, mutual.to(ratio.dtype), x1, y1, scale1 - scale0, *turn]
            # In an image without keypoints the nearest neighbor is padding.
            occupied = images.masks[partner].any(1)[:, None, None]
            features.append(torch.stack(columns, 2).masked_fill(~occupied, 0.0))
    return images.join_images(features)


def find_nearest_neighbors(cosines: Tensor) -> List[Tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Find the nearest neighbor of each keypoint, for both images.

    Args:
        cosines: (B, M, N) between unit descriptors of both images, -inf for padding.

    Returns:
        For image 0 four tensors (B, M), and for image 1 the same (B, N):
        - the index of the nearest neighbor in the other image,
        - the distance of the descriptors,
        - its ratio to the distance of the second nearest neighbor, 1 if there is none,
        - whether both are mutual nearest neighbors.
    """
    best0 = cosines.max(2)
    best1 = cosines.max(1)
    neighbors = []
    for matrix, (values, nearest), (_, back) in (
        (cosines, best0, best1),
        (cosines.transpose(1, 2), best1, best0),
    ):
        # The second nearest is the maximum without the nearest. If there is none, the nearest takes
        # its place, so that the ratio is 1.
        second = matrix.scatter(2, nearest.unsqueeze(2), -torch.inf).amax(2)
        second = torch.where(second == -torch.inf, values, second)
        # Distances of unit vectors: |a - b|^2 = 2 - 2 cos
        both = torch.stack([values, second]).clamp(-1.0, 1.0)
        distance, second_distance = sqrt((2.0 - 2.0 * both).clamp(min=1e-6)).unbind(0)
        ratio = (distance / second_distance.clamp(min=1e-6)).clamp(max=1.0)
        itself = torch.arange(nearest.shape[1], device=nearest.device)
        neighbors.append((nearest, distance, ratio, back.gather(1, nearest) == itself))
    return neighbors


# Equations 3 to 5: attention between keypoints


class AttentionalLayer(nn.Module):
    """A layer that updates the states of all keypoints: x <- x + MLP([x, message]) (equation 3)."""

    def __init__(self, dim: int, heads: int, norm: str, cross: bool) -> None:
        """Create a layer.

        Args:
            dim: D, width of a state.
            heads: number of heads of the attention.
            norm: norm of the hidden layer, a key of NORMS.
            cross: whether an image attends to the other image of its pair, or to itself.
        """
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
        """Update the states of all keypoints.

        Args:
            x: the states, (T, D).
            images: the images of the keypoints.
            dtype: precision of the products by autocast. If None, it is the precision of the
                weights. The sum of x and the message is not rounded to it.
            rotation: (2, T, d / 2) of queries and keys in self-attention, see `rotate`.

        Returns:
            The new states, (T, D).
        """
        state = x.to(dtype or self.query_key_value.weight.dtype)
        # Autocast is inside the layer, so that it also holds when gradient checkpointing runs the
        # layer again.
        with torch.autocast(x.device.type, dtype=dtype) if dtype else contextlib.nullcontext():
            heads = self.query_key_value(state).unflatten(-1, (3, self.heads, -1))  # (T, 3, H, d)
            # Queries and keys are rotated by their positions, values are not.
            if rotation is not None and not self.cross:
                rotated = rotate(heads[:, :2], rotation[:, :, None, None])
                heads = torch.cat([rotated, heads[:, 2:]], 1)
            # (T, 3, H, d) -> query, key and value (B, H, N, d) of images 0 and 1 of each batch
            views = [view.permute(2, 0, 3, 1, 4).unbind() for view in images.split_by_image(heads)]
            messages = []
            for i, (query, _, _) in enumerate(views):
                # The partner of image 2 k is image 2 k + 1, and the reverse.
                source = i ^ 1 if self.cross else i
                _, key, value = views[source]
                message = compute_attention(query, key, value, images.visible[source])
                occupied = images.occupied[source]
                if occupied is not None:
                    # An image without keypoints sends no message.
                    message = message * occupied
                # The heads are merged: (B, H, N, d) -> (B, N, D) (equation 5).
                messages.append(self.merge(message.transpose(1, 2).flatten(2)))
            return x + self.mlp([state, images.join_images(messages)], images.valid)


class RotaryPositions(nn.Module):
    """Rotary embedding of 2D positions, with learned frequencies.

    Inner products of rotated queries and keys depend on the relative positions of keypoints (Su et
    al. 2021; LightGlue, section 3.1).
    """

    def __init__(self, channels: int) -> None:
        """Draw the frequencies at random.

        Args:
            channels: d, the width of a head. It must be even.
        """
        super().__init__()
        self.frequencies = nn.Parameter(
            FREQUENCY_DEVIATION * torch.randn(2, channels // 2, **FLOAT32)
        )

    def forward(self, positions: Tensor) -> Tensor:
        """Compute cos and sin, (2, T, d / 2), of the angles of positions (T, 2) of order one."""
        angles = positions @ self.frequencies  # (T, 2) and (2, d / 2) -> (T, d / 2)
        return torch.stack([angles.cos(), angles.sin()])


def rotate(vectors: Tensor, rotation: Tensor) -> Tensor:
    """Rotate queries and keys by rotary embedding.

    Args:
        vectors: (..., d). The entries i and i + d / 2 are the coordinates of one point.
        rotation: cos and sin of the angles, (2, ..., d / 2), broadcast.

    Returns:
        (..., d) in the dtype of the vectors.
    """
    # (..., d) -> (..., d / 2) and (..., d / 2)
    x, y = vectors.chunk(2, -1)
    cos, sin = rotation.to(vectors.dtype).unbind(0)
    return torch.cat([x * cos - y * sin, x * sin + y * cos], -1)


# Section 5: matches of an assignment


def find_mutual_matches(log_P: Tensor, threshold: float = 0.2) -> Tuple[Tensor, ...]:
    """Find mutual best matches with a probability above `threshold` (section 5).

    Args:
        log_P: (B, M + 1, N + 1), output of `SuperGlue`.
        threshold: minimum probability of a match, 0.2 in the paper.

    Returns:
        matches0: (B, M) int64, the index of the match in image 1, or -1 without a match.
        scores0: (B, M) float32, the probability of the match, or 0 without a match.
        matches1, scores1: (B, N), the same for the keypoints of image 1.

    Example:
        There are two keypoints in each image. The second of image 0 belongs in the dustbin.

        >>> P = torch.tensor([[[0.9, 0.0, 0.1], [0.0, 0.3, 0.7], [0.1, 0.7, 0.0]]])
        >>> matches0, scores0, _, _ = find_mutual_matches(P.log(), threshold=0.5)
        >>> matches0
        tensor([[ 0, -1]])
        >>> scores0
        tensor([[0.9000, 0.0000]])
    """
    # (B, M + 1, N + 1) -> (B, M, N), without the dustbins
    log_probabilities = log_P.detach()[:, :-1, :-1].float()
    best0 = log_probabilities.max(2)
    best1 = log_probabilities.max(1)
    matches_and_scores: List[Tensor] = []
    for best, back in ((best0, best1), (best1, best0)):
        itself = torch.arange(best.indices.shape[1], device=log_P.device)
        scores = best.values.exp()
        # A match is mutual if the best match of the best match is the keypoint itself.
        is_match = (back.indices.gather(1, best.indices) == itself) & (scores > threshold)
        matches_and_scores.append(best.indices.masked_fill(~is_match, -1))
        matches_and_scores.append(scores.masked_fill(~is_match, 0.0))
    return tuple(matches_and_scores)


@torch.no_grad()
def match_pairs(
    model: SuperGlue,
    pairs: Sequence[FeaturePair],
    device: str,
    selected: Sequence[Tuple[np.ndarray, np.ndarray]],
) -> List[Matches]:
    """Match pairs by the network, in one pass.

    Args:
        model: the network.
        pairs: the features of both images of each pair.
        device: the device of the network.
        selected: for each pair, the keypoints of both images that the network gets, as ascending
            indices (m,) and (n,) (`nearest.select_keypoints`).

    Returns:
        All mutual matches of each pair, whatever their scores, with indices of all keypoints.
    """
    if not pairs:
        return []
    groups = [list(range(len(pairs)))]
    if torch.device(device).type == "cpu":
        counts = [(len(index0), len(index1)) for index0, index1 in selected]
        groups = group_similar_sizes(counts, MAX_PADDING)
    batches = []
    for group in groups:
        images = [
            make_batch([pairs[i][image].select(selected[i][image]) for i in group])
            for image in (0, 1)
        ]
        if model.compiled:
            # CUDA graphs need few shapes, so the numbers of keypoints are rounded up.
            width = round_up_keypoints(max(batch.scores.shape[1] for batch in images))
            images = [pad_images(batch, len(group), width) for batch in images]
        batches.append(
            tuple(map_tensors(lambda tensor: tensor.to(device), image) for image in images)
        )
    matches: Dict[int, Matches] = {}
    for group, log_P in zip(groups, model.assign(batches)[0]):
        # Keep every mutual match, since callers apply their own thresholds.
        matches0, scores0, _, _ = find_mutual_matches(log_P, threshold=0.0)
        rows = zip(matches0.cpu().numpy(), scores0.cpu().numpy())
        matches.update((i, Matches.from_dense(*row)) for i, row in zip(group, rows))
    return [matches[i].renumber(*selected[i]) for i in range(len(pairs))]
