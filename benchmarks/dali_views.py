"""Photographs to pairs of views with the homography between them, as the DALI guides feed a
training: external source, decode, resize, crop, mirror and brightness in one pipeline, PyTorch's
iterator. And the same work by OpenCV.

The project's own views (perspective, rotation, no border) are made by `pipeline.views`; this is the
guides' loader, to be compared with OpenCV and to show that geometry can be kept: the resize, crop
and mirror of a view are a 3x3 matrix, and the homography of a pair follows from its two.
"""

from __future__ import annotations

from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np

from pipeline import compat
from pipeline.errors import RequestError

# Views 0 and 1 (B, 1, H, W) uint8, and H_0to1 (B, 3, 3) float64
Batch = Tuple[Any, Any, np.ndarray]


class Draw(NamedTuple):
    """A view: the photograph resized to `size` (w, h) px, cut out at `corner` (x, y), perhaps
    mirrored, brightened.
    """

    size: Tuple[int, int]
    corner: Tuple[int, int]
    mirror: int
    brightness: float


def draw(rng: np.random.Generator, view: Tuple[int, int]) -> Draw:
    """A view of `view` (w, h) px out of a photograph resized to 1.1 to 1.6 times that."""
    factor = rng.uniform(1.1, 1.6)
    size = tuple(round(side * factor) for side in view)
    corner = tuple(int(rng.integers(0, whole - side + 1)) for whole, side in zip(size, view))
    return Draw(size, corner, int(rng.integers(2)), float(rng.uniform(0.7, 1.3)))


def draw_pair(seed: int, index: int, view: Tuple[int, int]) -> List[Draw]:
    """The two views of photograph `index`."""
    rng = np.random.default_rng((seed, index))
    return [draw(rng, view), draw(rng, view)]


def to_view(drawn: Draw, image: Tuple[int, int], view: Tuple[int, int]) -> np.ndarray:
    """(3, 3) float64: from pixels of a photograph of `image` (w, h) to those of the view; centres
    at whole numbers.
    """
    sx, sy = np.array(drawn.size) / np.array(image)
    x, y = drawn.corner
    resize_and_cut = np.array([[sx, 0, (sx - 1) / 2 - x], [0, sy, (sy - 1) / 2 - y], [0, 0, 1]])
    mirror = np.array([[-1, 0, view[0] - 1], [0, 1, 0], [0, 0, 1.0]]) if drawn.mirror else np.eye(3)
    return mirror @ resize_and_cut


def between(drawn: Sequence[Draw], image: Tuple[int, int], view: Tuple[int, int]) -> np.ndarray:
    """(3, 3): from view 0 to view 1 of a photograph."""
    first, second = (to_view(each, image, view) for each in drawn)
    return second @ np.linalg.inv(first)


def opencv_views(files: Sequence[bytes], view: Tuple[int, int], seed: int = 0) -> Iterator[Batch]:
    """One photograph at a time."""
    how = cv2.IMREAD_GRAYSCALE | cv2.IMREAD_IGNORE_ORIENTATION
    for index, data in enumerate(files):
        gray = cv2.imdecode(np.frombuffer(data, np.uint8), how)
        drawn = draw_pair(seed, index, view)
        made = []
        for each in drawn:
            resized = cv2.resize(gray, each.size, interpolation=cv2.INTER_LINEAR)
            x, y = each.corner
            cut = resized[y : y + view[1], x : x + view[0]]
            cut = cut[:, ::-1] if each.mirror else cut
            made.append(cv2.convertScaleAbs(cut, alpha=each.brightness)[None, None])
        yield made[0], made[1], between(drawn, gray.shape[::-1], view)[None]


def dali_views(
    files: Sequence[bytes],
    view: Tuple[int, int],
    batch: int = 32,
    seed: int = 0,
    device: Optional[int] = None,
) -> Iterator[Batch]:
    """The same by DALI, on GPU `device` or the CPU; the last batch holds what is left."""
    try:
        from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
    except ImportError:
        raise RequestError(
            f"NVIDIA DALI is not installed; `pip install {compat.dali_package()}`"
        ) from None

    def feed(iteration: int) -> List[Any]:
        """The bytes of a batch, and the numbers of both views; the last batch is padded."""
        first = iteration * batch
        if first >= len(files):
            raise StopIteration
        places = [min(first + i, len(files) - 1) for i in range(batch)]
        pairs = [draw_pair(seed, i, view) for i in places]
        encoded: List[Any] = [[np.frombuffer(files[i], np.uint8) for i in places]]
        return sum(([*feed_view(drawn, view)] for drawn in zip(*pairs)), encoded)

    pipeline = build_pipeline(feed, view, batch, device)
    names = ["view0", "view1", "shape"]
    partial = LastBatchPolicy.PARTIAL
    index = 0
    for (found,) in DALIGenericIterator(
        [pipeline], names, size=len(files), last_batch_policy=partial
    ):
        shapes = found["shape"].tolist()
        H = [
            between(draw_pair(seed, index + i, view), (width, height), view)
            for i, (height, width, *_) in enumerate(shapes)
        ]
        index += len(H)
        yield found["view0"], found["view1"], np.stack(H)


def feed_view(drawn: Sequence[Draw], view: Tuple[int, int]) -> Iterator[np.ndarray]:
    """Size, position of the crop, mirror and brightness of one view of each photograph."""
    sizes = np.array([each.size for each in drawn], np.float32)
    corners = np.array([each.corner for each in drawn], np.float32)
    yield sizes[:, ::-1].copy()
    # DALI gives the crop's position as a fraction of the space around it
    yield from (corners / np.maximum(sizes - np.array(view, np.float32), 1)).T.copy()
    yield np.array([each.mirror for each in drawn], np.int32)
    yield np.array([each.brightness for each in drawn], np.float32)


def build_pipeline(feed: Any, view: Tuple[int, int], batch: int, device: Optional[int]) -> Any:
    from nvidia.dali import fn, pipeline_def, types

    floats = types.FLOAT
    kind = "cpu" if device is None else "mixed"

    @pipeline_def(batch_size=batch, num_threads=2, device_id=device)
    def viewing():
        given = [types.UINT8] + 2 * [floats, floats, floats, types.INT32, floats]
        encoded, *numbers = fn.external_source(
            feed, num_outputs=len(given), batch=True, dtype=given
        )
        image = fn.decoders.image(encoded, device=kind, output_type=types.GRAY)
        views = []
        for size, x, y, mirror, brightness in (numbers[:5], numbers[5:]):
            resized = fn.resize(image, size=size, interp_type=types.INTERP_LINEAR, antialias=False)
            bright = fn.brightness(resized, brightness=brightness)
            cut = {"crop": (view[1], view[0]), "crop_pos_x": x, "crop_pos_y": y, "mirror": mirror}
            views.append(
                fn.crop_mirror_normalize(bright, **cut, dtype=types.UINT8, output_layout="CHW")
            )
        return (*views, fn.peek_image_shape(encoded))

    built = viewing()
    built.build()
    return built
