"""Synthetic pairs of held-out photographs; their homographies depend on the seed alone.

The protocol of the SuperGlue paper (section 5.1): two views of one photograph, the first nearly the
whole of it, the second through a random homography without borders, photometric distortion on both.
Nothing depends on parameters of training, on the number of workers, or on other photographs.
`LEVELS` disturbs the second views by fixed amounts, with the same homographies at every level.
"""

from __future__ import annotations

from typing import Callable, Dict, Optional, Sequence, Tuple

import cv2
import numpy as np

from pipeline.evaluate.inputs import Scene, Source, ViewPair, image_size
from pipeline.fetch.dataset import Entry, ImageSet, require_size
from pipeline.keypoints import views
from pipeline.params import EvaluateParams, Photometric
from superglue_sift.features.images import decode_color, decode_gray
from superglue_sift.geometry.two_view import compose, inverse

MAX_NEGATIVE_PAIRS = 100
SEED = 0  # of the pairs: models are compared on the same ones


class HeldOutPairs(Source):
    """`params.pairs_per_image` pairs of each entry, or `total` over all.

    Photographs smaller than a view are scaled up, as in the paper (see docs/evaluation.md).
    disturb: applied to every second view.
    """

    unit = "photographs"

    def __init__(
        self,
        images: ImageSet,
        entries: Sequence[Entry],
        params: EvaluateParams,
        total: Optional[int] = None,
        disturb: Callable[[np.ndarray], np.ndarray] = np.asarray,
    ):
        self.images = images
        self.entries = list(entries)[:total]
        self.params = params
        self.disturb = disturb
        self.view_size = (params.width, params.height)
        if total is None:
            total = params.pairs_per_image * len(self.entries)
        count, rest = divmod(total, len(self.entries) or 1)
        self.scenes = [(e.name, count + (index < rest)) for index, e in enumerate(self.entries)]

    def load(self, index: int) -> Scene:
        """Render the pairs of one photograph. Raises BadImage for an unreadable or too small
        one.
        """
        name, count = self.scenes[index]
        image = self.read(index)
        views = []
        pairs = []
        for number in range(count):
            first = 2 * number
            view0, H_image_to_0 = self.render(image, name, first)
            view1, H_image_to_1 = self.render(image, name, first + 1)
            views += [view0, self.disturb(view1)]
            H_0to1 = compose(H_image_to_1, inverse(H_image_to_0))
            pairs.append(ViewPair(f"{name}#{number}", first, first + 1, H_0to1))
        return Scene(name, views, pairs)

    def in_color(self, index: int, image: int, gray: np.ndarray) -> np.ndarray:
        """The colours of the photograph, with the brightness of the rendered view."""
        entry = self.entries[index]
        photograph = decode_color(self.images.read(entry), entry.name)
        H, _ = self.sample(photograph, entry.name, image)
        view = cv2.cvtColor(views.render(photograph, H, self.view_size), cv2.COLOR_BGR2YCrCb)
        view[..., 0] = gray
        return cv2.cvtColor(view, cv2.COLOR_YCrCb2BGR)

    def read(self, index: int) -> np.ndarray:
        """Photograph `index`, (H, W) uint8. Raises BadImage."""
        entry = self.entries[index]
        image = decode_gray(self.images.read(entry), entry.name)
        require_size(entry.name, image_size(image), self.view_size)
        return image

    def render(self, image: np.ndarray, name: str, number: int) -> Tuple[np.ndarray, np.ndarray]:
        """View `number` of a photograph, (H, W) uint8, and H_image_to_view."""
        H, rng = self.sample(image, name, number)
        return self.render_view(image, H, rng), H

    def sample(
        self, image: np.ndarray, name: str, number: int
    ) -> Tuple[np.ndarray, np.random.Generator]:
        """H_image_to_view of view `number`, mild for even numbers; and its generator."""
        rng = views.generator(SEED, f"evaluate {name}", number)
        sizes = image_size(image), self.view_size
        if number % 2 == 0:
            return views.mild_view(rng, *sizes), rng
        return views.sample_view(rng, *sizes, self.params.views.homography), rng

    def render_view(
        self, image: np.ndarray, H_image_to_view: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """A view with photometric distortion, (H, W) uint8."""
        view = views.render(image, H_image_to_view, self.view_size)
        return views.distort(view, rng, self.params.views.photometric)


class NegativePairs(Source):
    """Pairs of views of two different photographs of a source."""

    def __init__(self, source: HeldOutPairs):
        self.source = source
        names = [name for name, _ in source.scenes]
        count = len(names)
        possible = count * (count - 1) * source.params.pairs_per_image
        rounds = [divmod(pair, count) for pair in range(min(MAX_NEGATIVE_PAIRS, possible))]
        # both photographs, and the number of their views
        pairs = [
            (first, (first + 1 + number % (count - 1)) % count, number) for number, first in rounds
        ]
        photographs = [entry.photograph for entry in source.entries]
        self.pairs = [pair for pair in pairs if photographs[pair[0]] != photographs[pair[1]]]
        self.scenes = [(f"{names[a]} and {names[b]}", 1) for a, b, _ in self.pairs]

    def load(self, index: int) -> Scene:
        """Render the two views. Raises BadImage as the source does."""
        *photographs, number = self.pairs[index]
        source = self.source
        views = [
            source.render(source.read(at), source.entries[at].name, 2 * number + side)[0]
            for side, at in enumerate(photographs)
        ]
        name, _ = self.scenes[index]
        return Scene(name, views, [ViewPair(f"{name}#{number}", 0, 1, np.full((3, 3), np.nan))])


def brighten(image: np.ndarray, factor: float) -> np.ndarray:
    """Multiply the brightness by `factor`, with saturation."""
    return cv2.convertScaleAbs(image, alpha=factor)


def blur(image: np.ndarray, deviation: float) -> np.ndarray:
    """Gaussian blur with a standard deviation in pixels; 0: unchanged."""
    return cv2.GaussianBlur(image, (0, 0), deviation) if deviation > 0 else image


def add_noise(image: np.ndarray, deviation: float) -> np.ndarray:
    """Gaussian noise with a standard deviation in gray levels, the same for every image of a
    size.
    """
    drawn = np.random.default_rng(0).normal(0.0, 1.0, image.shape) * deviation
    return np.clip(np.rint(image + drawn), 0, 255).astype(np.uint8)


LEVELS: Dict[str, Tuple[Callable, Tuple[float, ...]]] = {
    "illumination (factor)": (brighten, (1.0, 0.5, 0.25, 0.12, 2.0)),
    "blur (px)": (blur, (0.0, 1.0, 2.0, 4.0)),
    "noise (gray levels)": (add_noise, (0.0, 5.0, 10.0, 20.0)),
    "JPEG (quality)": (views.compress, (90, 40, 15, 5)),
}


def disturb(source: HeldOutPairs, count: int, function: Callable, level: float) -> HeldOutPairs:
    """One pair of each of the first `count` photographs of a source, disturbed, without photometric
    distortion.
    """
    clear = Photometric(**dict.fromkeys(Photometric.model_fields, 0.0))
    views = source.params.views.model_copy(update={"photometric": clear})
    params = source.params.model_copy(update={"views": views, "pairs_per_image": 1})
    return HeldOutPairs(
        source.images, source.entries[:count], params, disturb=lambda view: function(view, level)
    )
