"""Pad the keypoints of several images to a batch, and join the images of several batches.

`make_batch` makes a batch of `Features` of B images: tensors (B, N, ...), where N is the number of
keypoints of the image with most of them. B pairs are two such batches, of the images 0 with M
keypoints and of the images 1 with N.

Pairs of different sizes are sorted into a few batches with little padding (`group_pairs`). The
network reads the keypoints of all images of these batches as one tensor (T, ...), padding included
(`join_keypoints`), since only attention and transport need to know which image a keypoint belongs
to (`Images`).

SIFT has a descriptor for each strong orientation, and the strongest one changes between views. Lowe
(2004, section 5) creates a keypoint for each. Here a point remains one keypoint, so that true
matches and matches of the network are one to one. The point gets the orientation whose descriptor
is closer to a descriptor of the other image (`choose_orientations`).
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from superglue_sift.features.features import KEYPOINT_FIELDS, Features
from superglue_sift.torch_compat import sqrt

MAX_PADDING = 1 / 32  # maximum padding of a batch of similar sizes on a CPU, per keypoint
MAX_COSINE_BYTES = 256 << 20  # maximum memory for the cosines of descriptors

FeaturePair = Tuple[Features, Features]  # of the images 0 and 1 of a pair, or of a batch of pairs


def make_batch(images: Sequence[Features]) -> Features:
    """Make a batch of the features of B images, one or more.

    Args:
        images: the features. Their scales are multiplied by `sift_scale`, since the network is
            trained with pixels of the image that SIFT saw.

    Returns:
        Tensors (B, N, ...) on the CPU, with N of at least 1 and zeros as padding. If some image has
        two orientations, all have.

    Example:
        >>> one = np.ones(2)
        >>> keypoints = np.array([[10.0, 20.0], [30.0, 5.0]])
        >>> descriptors = np.full((2, 128), 45)
        >>> image = Features.of(keypoints, 4 * one, 90 * one, one, descriptors, (64, 48))
        >>> batch = make_batch([image, image.select(slice(1))])
        >>> batch.keypoints
        tensor([[[10., 20.],
                 [30.,  5.]],
        <BLANKLINE>
                [[10., 20.],
                 [ 0.,  0.]]])
        >>> batch.mask
        tensor([[ True,  True],
                [ True, False]])
    """
    counts = [len(image.keypoints) for image in images]
    shape = (len(images), max(*counts, 1))
    orientations = max(image.descriptors.shape[1] for image in images)
    first = images[0].descriptors
    # numpy gets zeros from the system, and torch would write them.
    batch = Features(
        keypoints=np.zeros((*shape, 2), np.float32),
        scales=np.zeros(shape, np.float32),
        oris=np.zeros((*shape, orientations), np.float32),
        scores=np.zeros(shape, np.float32),
        descriptors=np.zeros((*shape, orientations, first.shape[2]), first.dtype),
        image_size=np.array([image.image_size for image in images], np.float32),
    )
    for row, (image, count) in enumerate(zip(images, counts)):
        batch.keypoints[row, :count] = image.keypoints
        batch.scales[row, :count] = image.scales
        batch.scores[row, :count] = image.scores
        batch.oris[row, :count, : image.oris.shape[1]] = image.oris
        batch.descriptors[row, :count, : image.oris.shape[1]] = image.descriptors
        if image.sift_scale is not None:
            batch.scales[row] *= image.sift_scale
    if min(counts) < shape[1]:
        batch = batch._replace(mask=np.arange(shape[1]) < np.array(counts)[:, None])
    tensors: List[Any] = [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in batch]
    return Features(*tensors)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return a batch, or a named tuple of batches, with the results of `function` as its tensors.

    For example, `map_tensors(lambda tensor: tensor.to("cuda"), batch)` moves a batch to a GPU.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, tuple):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    return batch


def get_mask(images: Features) -> Tensor:
    """Return (B, N) bool, True for keypoints, even if there is no padding."""
    if images.mask is not None:
        return images.mask
    return torch.ones(images.scores.shape, dtype=torch.bool, device=images.scores.device)


def count_keypoints(images: Features) -> Tensor:
    """Return the number of keypoints of each image of a batch, (B,) int64."""
    return get_mask(images).sum(1)


def select_images(images: Features, index: Sequence[int]) -> Features:
    """Return a batch of some images, with as little padding as they need.

    Args:
        images: the batch.
        index: the indices of the images, in the order of the new batch.
    """
    rows = torch.tensor(index, dtype=torch.int64, device=images.scores.device)
    counts = count_keypoints(images)[rows]
    width = max([*counts.tolist(), 1])
    selected = {}
    for name, tensor in _name_tensors(images).items():
        if name != "image_size":
            tensor = tensor[:, :width]
        selected[name] = tensor.index_select(0, rows)
    if (counts == width).all():
        selected["mask"] = None
    return images._replace(**selected)


def pad_images(images: Features, count: int, keypoints: int) -> Features:
    """Return a batch padded to `count` images with `keypoints` keypoints each.

    The added images have no keypoints, and come last.
    """
    mask = get_mask(images)
    if mask.shape != (count, keypoints):
        images = images._replace(mask=mask)
    padded = {}
    for name, tensor in _name_tensors(images).items():
        # torch pads from the last dimension to the first, with two numbers for each: no padding of
        # a keypoint's values, then more keypoints, then more images.
        padding = [0, 0] * (tensor.dim() - 1) + [0, count - len(tensor)]
        if name != "image_size":
            padding[-3] = keypoints - tensor.shape[1]
        padded[name] = pad(tensor, padding)
    return images._replace(**padded)


def _name_tensors(images: Features) -> dict:
    """Return the tensors of a batch by name."""
    return {name: t for name, t in images._asdict().items() if isinstance(t, Tensor)}


def round_up_keypoints(keypoints: int) -> int:
    """Round a number of keypoints up to one of 128, 192, 256, 384, 512, 768, ..."""
    # The unit is a quarter of the next power of two.
    unit = max(64, (1 << max(keypoints - 1, 1).bit_length()) >> 2)
    return max(128, -(-keypoints // unit) * unit)


def group_similar_sizes(counts: Sequence[Tuple[int, int]], padding: float) -> List[List[int]]:
    """Group pairs with similar numbers of keypoints.

    Args:
        counts: the numbers of keypoints (M, N) of each pair.
        padding: maximum padding of a group of several pairs, per keypoint.

    Returns:
        The indices of the pairs of each group, from the largest pair to the smallest.
    """
    groups: List[List[int]] = []
    # Neighbors in this order have similar sizes.
    for index in sorted(range(len(counts)), key=lambda index: -sum(counts[index])):
        pairs = [*groups[-1], index] if groups else [index]
        # The numbers of keypoints of all images 0, and of all images 1
        sides = list(zip(*(counts[pair] for pair in pairs)))
        padded = len(pairs) * sum(map(max, sides))
        # Begin a new group if this pair would need too much padding in the present one.
        if not groups or padded > (1 + padding) * sum(map(sum, sides)):
            groups.append([index])
        else:
            groups[-1] = pairs
    return groups


def group_pairs(images0: Features, images1: Features) -> List[List[int]]:
    """Group the pairs of a batch by similar numbers of keypoints.

    On a GPU there is one group, because to launch the work of another batch takes longer than the
    padding.

    Returns:
        The indices of the pairs of each group.
    """
    pairs = len(images0.scores)
    if images0.scores.device.type != "cpu" or pairs < 2:
        return [list(range(pairs))]
    counts = torch.stack([count_keypoints(images0), count_keypoints(images1)], 1)
    return group_similar_sizes(counts.tolist(), MAX_PADDING)


class Images:
    """The images to which the keypoints in one tensor (T, ...) belong, and which are padding.

    The tensor has the keypoints of several batches. Its parts are: images 0 of the first batch, its
    images 1, images 0 of the second batch, ... So the partners of the images in part i are the
    images in part `i ^ 1`. The first three attributes have an entry for each part, which has B
    images with N keypoints:

    Attributes:
        masks: (B, N) bool, True for keypoints.
        visible: (B, 1, 1, N) bool, the keypoints to which others attend. None without padding.
        occupied: (B, 1, 1, 1) bool, whether there is any keypoint. None without padding.
        valid: (T,) bool, True for keypoints. None without any padding.
    """

    def __init__(self, masks: Sequence[Tensor], padded: Sequence[bool]) -> None:
        """Create the masks of attention from the masks of keypoints.

        Args:
            masks: (B, N) bool of each part, True for keypoints.
            padded: whether some image of each part has padding.
        """
        self.masks = list(masks)
        self.visible: List[Optional[Tensor]] = []
        self.occupied: List[Optional[Tensor]] = []
        for mask, has_padding in zip(masks, padded):
            occupied = mask.any(1, keepdim=True)
            # An image without keypoints shows its padding, because a softmax over nothing is nan.
            visible = mask | ~occupied
            self.visible.append(visible[:, None, None] if has_padding else None)
            self.occupied.append(occupied[:, :, None, None] if has_padding else None)
        self.valid = torch.cat([mask.flatten() for mask in masks]) if any(padded) else None

    def split_by_image(self, values: Tensor) -> List[Tensor]:
        """Split (T, ...) into (B, N, ...) for images 0 and for images 1 of each batch."""
        # (T, ...) -> (B N, ...) of each part -> (B, N, ...)
        parts = values.split([mask.shape[0] * mask.shape[1] for mask in self.masks])
        return [part.view(*mask.shape, *part.shape[1:]) for part, mask in zip(parts, self.masks)]

    def join_images(self, parts: Sequence[Tensor]) -> Tensor:
        """Join (B, N, ...) of all images to (T, ...). This is the inverse of `split_by_image`."""
        return torch.cat([part.flatten(0, 1) for part in parts])


def join_keypoints(batches: Sequence[FeaturePair]) -> Tuple[Features, Images]:
    """Join the keypoints of several batches, with their padding, in tensors (T, ...).

    Args:
        batches: the images 0 and the images 1 of each batch.

    Returns:
        The keypoints, where `image_size` (T, 2) has the size of the image of each keypoint, and the
        images that they belong to.
    """
    parts = [part for batch in batches for part in batch]
    masks = [get_mask(part) for part in parts]
    images = Images(masks, [part.mask is not None for part in parts])
    # (B, 2) -> (B, N, 2): each keypoint gets the size of its image.
    sizes = [part.image_size[:, None].expand(*mask.shape, 2) for part, mask in zip(parts, masks)]
    joined: Dict[str, Any] = {
        name: images.join_images([getattr(part, name) for part in parts])
        for name in KEYPOINT_FIELDS
    }
    return Features(**joined, image_size=images.join_images(sizes)), images


@torch.no_grad()
def choose_orientations(images0: Features, images1: Features) -> FeaturePair:
    """Give each keypoint the better one of its two orientations for its pair.

    Args:
        images0, images1: the images of B pairs. Those with one orientation keep it.

    Returns:
        The images with one orientation of each keypoint.
    """
    both = images0.descriptors, images1.descriptors  # (B, M, O, D) and (B, N, O, D)
    if max(descriptors.shape[2] for descriptors in both) == 1:
        return images0, images1
    # Compute the cosines (B, O M, O N) of as many pairs at a time as fit MAX_COSINE_BYTES.
    rows, columns = (descriptors.shape[1] * descriptors.shape[2] for descriptors in both)
    pairs = max(1, MAX_COSINE_BYTES // (4 * rows * columns))
    is_second: Tuple[List[Tensor], List[Tensor]] = ([], [])
    for chunk in zip(*(descriptors.split(pairs) for descriptors in both)):
        # RootSIFT of all orientations, (B, O N, D). Padding and missing second descriptors are
        # zero, so that their cosine is the minimum, 0.
        unit0, unit1 = (
            normalize_descriptors(descriptors, "sift").flatten(1, 2) for descriptors in chunk
        )
        cosines = torch.bmm(unit0, unit1.transpose(1, 2))
        largest = cosines.amax(2), cosines.amax(1)
        for values, descriptors, chunks in zip(largest, chunk, is_second):
            # (B, O N) -> (B, N, O): the largest cosine of each orientation with any orientation in
            # the other image
            values = values.unflatten(1, descriptors.shape[1:3])
            chunks.append(values[..., -1] > values[..., 0])
    chosen = []
    for images, second in zip((images0, images1), map(torch.cat, is_second)):
        oris, descriptors = images.oris, images.descriptors
        oris = torch.where(second, oris[..., -1], oris[..., 0])
        second = second[:, :, None]
        descriptors = torch.where(second, descriptors[:, :, -1], descriptors[:, :, 0])
        chosen.append(images._replace(oris=oris[..., None], descriptors=descriptors[:, :, None]))
    return chosen[0], chosen[1]


def choose_orientations_of_pair(features0: Features, features1: Features) -> FeaturePair:
    """Call `choose_orientations` for the features of two images."""
    if max(features.oris.shape[1] for features in (features0, features1)) == 1:
        return features0, features1
    images = choose_orientations(make_batch([features0]), make_batch([features1]))
    chosen = []
    for features, batch in zip((features0, features1), images):
        count = len(features.keypoints)
        oris, descriptors = batch.oris[0, :count], batch.descriptors[0, :count]
        chosen.append(features._replace(oris=oris.numpy(), descriptors=descriptors.numpy()))
    return chosen[0], chosen[1]


def normalize_descriptors(descriptors: Tensor, kind: str) -> Tensor:
    """Divide descriptors by their lengths. Descriptors of zeros stay zeros.

    Args:
        descriptors: (..., D) uint8 or float32.
        kind: "sift" for RootSIFT, the root of descriptors that are divided by their sums, or
            "float" for descriptors of another extractor.

    Returns:
        Unit vectors (..., D) float32.
    """
    if kind == "float":
        return normalize(descriptors, dim=-1)
    values = descriptors.float()
    # The sum of whole numbers is at least 1, unless all are zero.
    return sqrt(values / values.sum(-1, keepdim=True).clamp(min=1.0))
