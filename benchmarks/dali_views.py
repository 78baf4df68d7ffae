"""Load photographs as pairs of views with their homography, by NVIDIA DALI and by OpenCV.

The DALI loader follows DALI's guides for training: one pipeline with an external source, decode,
resize, crop and mirror, and PyTorch's iterator with a partial last batch. The stage `keypoints`
makes other views (`pipeline.keypoints.views`). This loader shows that geometry can be kept. The
resize, crop and mirror of a view are one 3x3 matrix, and the homography of a pair follows from the
matrices of both views.
"""

from __future__ import annotations

from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np

from pipeline.errors import RequestError
from superglue_sift import torch_compat
from superglue_sift.geometry import two_view

BATCH = 32
# Views 0 and 1 (B, 1, H, W) uint8, and H_0to1 (B, 3, 3) float64
Batch = Tuple[Any, Any, np.ndarray]
Size = Tuple[int, int]  # (width, height) px


class Draw(NamedTuple):
    """Say how a view is made: resize to `size`, cut out at `corner` (x, y), perhaps mirror."""

    size: Size
    corner: Tuple[int, int]
    mirror: int


def draw(rng: np.random.Generator, view: Size) -> Draw:
    """Draw a view of `view` px out of a photograph resized to 1.1 to 1.6 times that."""
    factor = rng.uniform(1.1, 1.6)
    width, height = (round(side * factor) for side in view)
    corner = int(rng.integers(width - view[0] + 1)), int(rng.integers(height - view[1] + 1))
    return Draw((width, height), corner, int(rng.integers(2)))


def draw_pair(index: int, view: Size) -> Tuple[Draw, Draw]:
    """Draw the two views of photograph `index`."""
    rng = np.random.default_rng(index)
    return draw(rng, view), draw(rng, view)


def to_view(drawn: Draw, image: Size, view: Size) -> np.ndarray:
    """Return (3, 3) float64 from pixels of a photograph of `image` px to those of the view."""
    x, y = drawn.corner
    cut = np.array([[1, 0, -x], [0, 1, -y], [0, 0, 1.0]])
    flip = np.array([[-1, 0, view[0] - 1], [0, 1, 0], [0, 0, 1.0]]) if drawn.mirror else np.eye(3)
    return flip @ cut @ two_view.resizing(image, drawn.size)


def between(index: int, image: Size, view: Size) -> np.ndarray:
    """Return the homography (3, 3) from view 0 to view 1 of photograph `index` of `image` px."""
    first, second = (to_view(drawn, image, view) for drawn in draw_pair(index, view))
    return second @ np.linalg.inv(first)


def opencv_views(files: Sequence[bytes], view: Size) -> Iterator[Batch]:
    """Yield the views of one photograph at a time, by OpenCV."""
    for index, data in enumerate(files):
        gray = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE)
        made = []
        for drawn in draw_pair(index, view):
            resized = cv2.resize(gray, drawn.size, interpolation=cv2.INTER_LINEAR)
            x, y = drawn.corner
            cut = resized[y : y + view[1], x : x + view[0]]
            cut = cv2.flip(cut, 1) if drawn.mirror else cut
            made.append(cut[None, None])
        yield made[0], made[1], between(index, gray.shape[::-1], view)[None]


def dali_views(files: Sequence[bytes], view: Size, device: Optional[int]) -> Iterator[Batch]:
    """Yield batches by DALI on GPU `device`, or on the CPU if it is None.

    The last batch holds the photographs that are left. Raises RequestError without DALI.
    """
    try:
        from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
    except ImportError:
        package = torch_compat.dali_package()
        raise RequestError(f"NVIDIA DALI is not installed: pip install {package}") from None

    def feed(iteration: int) -> List[Any]:
        """Return the bytes of a batch and the numbers of both views. The last batch is padded."""
        first = iteration * BATCH
        if first >= len(files):
            raise StopIteration
        places = [min(first + i, len(files) - 1) for i in range(BATCH)]
        encoded: List[Any] = [np.frombuffer(files[i], np.uint8) for i in places]
        views = zip(*(draw_pair(i, view) for i in places))
        return [encoded, *(numbers for drawn in views for numbers in feed_view(drawn, view))]

    iterator = DALIGenericIterator(
        [build_pipeline(feed, view, device)],
        ["view0", "view1", "shape"],
        size=len(files),
        last_batch_policy=LastBatchPolicy.PARTIAL,
    )
    index = 0
    for (found,) in iterator:
        shapes = found["shape"].tolist()
        H = [between(index + i, (w, h), view) for i, (h, w, *_) in enumerate(shapes)]
        index += len(H)
        yield found["view0"], found["view1"], np.stack(H)


def feed_view(drawn: Sequence[Draw], view: Size) -> List[np.ndarray]:
    """Return height and width, position of the crop, and mirror of a view of each photograph."""
    sizes, corners, mirror = (np.array(each, np.float32) for each in zip(*drawn))
    # DALI wants the crop's position as a fraction of the space around it
    x, y = (corners / np.maximum(sizes - np.array(view), 1)).astype(np.float32).T.copy()
    return [sizes[:, ::-1].copy(), x, y, mirror.astype(np.int32)]


def build_pipeline(feed: Any, view: Size, device: Optional[int]) -> Any:
    """Build DALI's pipeline. Its outputs are both views and the shape of the photograph."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=device)
    def viewing():
        numbers = [types.FLOAT, types.FLOAT, types.FLOAT, types.INT32]
        given = [types.UINT8, *numbers, *numbers]
        encoded, *fed = fn.external_source(feed, num_outputs=len(given), batch=True, dtype=given)
        kind = "cpu" if device is None else "mixed"
        image = fn.decoders.image(encoded, device=kind, output_type=types.GRAY)
        views = []
        for size, x, y, mirror in (fed[:4], fed[4:]):
            resized = fn.resize(image, size=size, interp_type=types.INTERP_LINEAR, antialias=False)
            view_of = fn.crop_mirror_normalize(
                resized,
                crop=(view[1], view[0]),
                crop_pos_x=x,
                crop_pos_y=y,
                mirror=mirror,
                dtype=types.UINT8,
                output_layout="CHW",
            )
            views.append(view_of)
        return (*views, fn.peek_image_shape(encoded))

    built = viewing()
    built.build()
    return built
