"""All views of one image: decode, render, distort, keypoints. A pure function of bytes, name and
parameters.
"""

from __future__ import annotations

from typing import Any, Dict, Union

import numpy as np

from pipeline.features.store import ImageViews
from pipeline.image_sets import dali_decoder, torchvision_decoder
from pipeline.image_sets.manifest import Entry
from pipeline.image_sets.sources import ImageSet
from pipeline.views import homography, render
from superglue_sift.features import extractors
from superglue_sift.features.images import BadImage, decode_gray

Result = Union[ImageViews, BadImage]

# Of the shards. Raise it when the same photograph and parameters give other views or keypoints:
# shards of another version are made again. tests/keypoints fails when a golden shard
# changes and this does not.
VERSION = 2
# Values of `keypoints.decoder` beside pillow, which decodes in the workers
DECODERS: Dict[str, Any] = {"dali": dali_decoder, "torchvision": torchvision_decoder}
SEED = 0  # draws depend on the image's name and the index of the view, too


def extract(images: ImageSet, settings: Any, work: dali_decoder.Work) -> Result:
    """The views of an image, or the reason why it cannot be used; does not raise for bad images."""
    try:
        if isinstance(work, Entry):
            work = work, decode_gray(images.read(work), work.name)
        entry, gray = work
        return gray_views(gray, entry.name, settings)
    except BadImage as bad:
        return bad


def gray_views(gray: np.ndarray, name: str, settings: Any) -> ImageViews:
    """The views of an image (`gray`: (H, W) uint8) with their keypoints, by the section
    `keypoints`.

    View 0 is a mild crop without photometric distortion; the others are random homographies with
    it. Views with few or no keypoints are kept, for training. `name` and the parameters determine
    every draw.

    Raises BadImage with the reason if the image cannot be used.
    """
    size = (gray.shape[1], gray.shape[0])
    homography.require_size(name, size, (settings.width, settings.height))
    extractor = extractors.load(settings.extractor)
    homographies = []
    records = []
    view_sizes = []
    for index in range(settings.views_per_image):
        rng = homography.generator(SEED, name, index)
        factor = 1.0 if settings.smallest == 1.0 else rng.uniform(settings.smallest, 1.0)
        view_size = (round(settings.width * factor), round(settings.height * factor))
        if index == 0:
            H = homography.mild_view(rng, size, view_size)
            view = render.render(gray, H, view_size)
        else:
            H = homography.sample_view(
                rng, size, view_size, settings.views.homography, _strength(settings, index)
            )
            view = render.distort(
                render.render(gray, H, view_size), rng, settings.views.photometric
            )
        view_sizes.append(view_size)
        homographies.append(H)
        records.append(extractor(view, settings.max_keypoints))
    return ImageViews(name, size, np.array(homographies), records, np.array(view_sizes))


def _strength(settings: Any, index: int) -> float:
    """Strength of view `index` >= 1: linear from `difficulty_first` at view 1 to 1 at the last."""
    fraction = (index - 1) / max(settings.views_per_image - 2, 1)
    return settings.difficulty_first + fraction * (1.0 - settings.difficulty_first)
