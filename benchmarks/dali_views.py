"""Load photographs as pairs of views with their homography, by NVIDIA DALI and by OpenCV.

The DALI loader follows DALI's guides for training: one pipeline with an external source that
decodes, resizes and warps, and PyTorch's iterator with a partial last batch. The stage `keypoints`
makes other views (`pipeline.keypoints.views`). This loader shows that geometry can be kept: each
view is an affine map of the resized photograph, drawn for the number of the photograph, and the
homography of a pair follows from the maps of both views.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import cv2
import numpy as np

BATCH = 32
ROOM = 1.25  # ratio of the size of the resized photograph to that of a view
# Views 0 and 1 (B, 1, H, W) uint8, and H_0to1 (B, 3, 3) float64
Batch = Tuple[Any, Any, np.ndarray]
Size = Tuple[int, int]  # (width, height) px


def draw_maps(index: int, view: Size) -> np.ndarray:
    """Draw the maps from a resized photograph to its two views.

    A map rotates by up to 15 degrees, scales by 0.9 to 1.1, shifts, and perhaps mirrors.

    Args:
        index: number of the photograph, which is the seed.
        view: size of a view in px.

    Returns:
        (2, 3, 3) float64.
    """
    rng = np.random.default_rng(index)
    maps = []
    for _ in range(2):
        turn = cv2.getRotationMatrix2D((0, 0), rng.uniform(-15, 15), rng.uniform(0.9, 1.1))
        about = np.eye(3)
        about[:2, 2] = (1 - np.multiply(view, ROOM)) / 2  # The middle becomes the origin.
        back = np.diag([rng.choice([-1.0, 1.0]), 1, 1])
        back[:2, 2] = (np.array(view) - 1) / 2 + rng.uniform(-10, 10, 2)
        maps.append(back @ np.vstack([turn, [0, 0, 1]]) @ about)
    return np.stack(maps)


def compute_resized_size(view: Size) -> Size:
    """Return the size of a resized photograph for views of a size."""
    return round(view[0] * ROOM), round(view[1] * ROOM)


def load_views_by_opencv(files: Sequence[bytes], view: Size) -> Iterator[Batch]:
    """Yield the views of one photograph at a time, by OpenCV.

    Args:
        files: the bytes of the photographs.
        view: size of a view in px.
    """
    for index, data in enumerate(files):
        gray = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE)
        resized = cv2.resize(gray, compute_resized_size(view))
        maps = draw_maps(index, view)
        view0, view1 = (cv2.warpAffine(resized, A[:2], view)[None, None] for A in maps)
        yield view0, view1, (maps[1] @ np.linalg.inv(maps[0]))[None]


def make_dali_loader(
    files: Sequence[bytes], view: Size, device: Optional[int]
) -> Callable[[], Iterator[Batch]]:
    """Build DALI's pipeline.

    Args:
        files: the bytes of the photographs.
        view: size of a view in px.
        device: number of the GPU. If None, the pipeline runs on the CPU.

    Returns:
        A function that yields the batches of all photographs each time that it is called. The last
        batch holds the photographs that are left.
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    maps = np.stack([draw_maps(index, view) for index in range(len(files))])

    def feed(iteration: int) -> List[Any]:
        """Return the bytes of a batch and the maps of both views. The last batch is padded."""
        if iteration * BATCH >= len(files):
            raise StopIteration
        indices = np.arange(iteration * BATCH, (iteration + 1) * BATCH).clip(max=len(files) - 1)
        encoded: List[Any] = [np.frombuffer(files[index], np.uint8) for index in indices]
        # DALI puts the center of the first pixel at (0.5, 0.5).
        shift = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
        shifted_maps = (shift @ maps[indices] @ np.linalg.inv(shift))[:, :, :2].astype(np.float32)
        return [encoded, *np.ascontiguousarray(shifted_maps.swapaxes(0, 1))]

    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=device)
    def make_views():
        dtypes = [types.UINT8, types.FLOAT, types.FLOAT]
        encoded, *map_pair = fn.external_source(feed, num_outputs=3, batch=True, dtype=dtypes)
        decoder_device = "cpu" if device is None else "mixed"
        image = fn.decoders.image(encoded, device=decoder_device, output_type=types.GRAY)
        width, height = compute_resized_size(view)
        linear = {"interp_type": types.INTERP_LINEAR}
        image = fn.resize(image, size=(height, width), antialias=False, **linear)
        warped = [
            fn.warp_affine(
                image, matrix=A, size=view[::-1], inverse_map=False, fill_value=0, **linear
            )
            for A in map_pair
        ]
        return tuple(fn.transpose(view, perm=[2, 0, 1]) for view in warped)

    pipeline = make_views()
    pipeline.build()
    iterator = DALIGenericIterator(
        [pipeline],
        ["view0", "view1"],
        size=len(files),
        last_batch_policy=LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )
    homographies = maps[:, 1] @ np.linalg.inv(maps[:, 0])

    def load() -> Iterator[Batch]:
        """Yield the batches of an epoch."""
        index = 0
        for (views,) in iterator:
            count = len(views["view0"])
            yield views["view0"], views["view1"], homographies[index : index + count]
            index += count

    return load
