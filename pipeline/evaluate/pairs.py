"""Pairs of images with ground truth, and the views of held-out photographs that make such pairs.

A `PairSource` has scenes (photographs, sequences), and each scene has pairs of images. Loading a
scene twice gives the same bytes. `pair_files` reads pairs from files.

Held-out pairs follow the protocol of the SuperGlue paper (section 5.1): a pair has two views of one
photograph. The first view shows nearly the whole photograph. The second is seen through a random
homography without borders. Both have photometric distortion. A pair depends only on the section
`views`, the name of its photograph and its number. Further pairs have second views that are
disturbed or magnified by fixed amounts.
"""

from __future__ import annotations

import functools
import itertools
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import cv2
import numpy as np

from pipeline.fetch.dataset import Entry, ImageSet
from pipeline.keypoints import views
from pipeline.params import EvaluateParams, Photometric
from superglue_sift.features.features import Features
from superglue_sift.features.images import decode_color, decode_gray
from superglue_sift.geometry.two_view import Size, compose, inverse
from superglue_sift.network.batch import FeaturePair, choose_orientations_of_pair

SEED = 0  # All models are compared on the same rendered pairs
MAX_NEGATIVE_PAIRS = 100
CACHED = 16  # Number of photographs that stay decoded, since a negative pair needs two

# How a pair is disturbed: the name of the condition, and the level. Other pairs have CALM.
Condition = Tuple[str, float]
CALM: Condition = ("", 0.0)


class CameraPair(NamedTuple):
    """The intrinsics of two cameras, and the motion between them.

    Attributes:
        K0, K1: the intrinsics (3, 3), in pixels of the images as they are matched.
        T_0to1: (4, 4), maps points of camera 0 to camera 1.
    """

    K0: np.ndarray
    K1: np.ndarray
    T_0to1: np.ndarray


# A homography, (3, 3) float64 from pixels of image 0 to image 1, or two cameras. None for two
# photographs with nothing in common.
TrueGeometry = Union[np.ndarray, CameraPair, None]


class ImagePair(NamedTuple):
    """A pair of images of a scene.

    Attributes:
        name: name of the pair.
        first, second: the indices of image 0 and image 1 in the scene.
        truth: the ground truth.
        condition: how image 1 is disturbed.
    """

    name: str
    first: int
    second: int
    truth: TrueGeometry
    condition: Condition = CALM


class LabeledPair(NamedTuple):
    """The input of every matcher, with its ground truth.

    Attributes:
        images: the pair of images.
        scene: name of its scene.
        scene_index: index of the scene in the source.
        features: the features of both images, as `Matcher.extract` returns them.
        oriented: the same keypoints, each with the orientation that fits the other image, for the
            matchers that take one descriptor of each keypoint.
    """

    images: ImagePair
    scene: str
    scene_index: int
    features: FeaturePair
    oriented: FeaturePair


# The content of a scene: its images, (H, W) uint8 gray, and its pairs.
Scene = Tuple[List[np.ndarray], List[ImagePair]]


class PairSource:
    """A sequence of scenes, each with some pairs of images. This class has none.

    Attributes:
        scenes: name and number of pairs of each scene.
        unit: the plural noun with which tables name the scenes.
    """

    scenes: Sequence[Tuple[str, int]] = ()
    unit = "scenes"

    def __len__(self) -> int:
        return len(self.scenes)

    def load_scene(self, index: int) -> Scene:
        """Read or render the scene with this index. It may have fewer pairs than `scenes` says.

        Raises:
            BadImage: If the scene must be left out.
        """
        raise NotImplementedError

    def load_color_image(self, index: int, image_index: int) -> np.ndarray:
        """Read or render an image of a scene in color, for a picture.

        Args:
            index: index of the scene.
            image_index: index of the image in the scene.

        Returns:
            (H, W, 3) uint8 BGR.
        """
        raise NotImplementedError


def get_image_size(image: np.ndarray) -> Size:
    """Return (width, height) of an (H, W) image."""
    return image.shape[1], image.shape[0]


def extract_scene_pairs(
    source: PairSource, index: int, extract: Callable[[np.ndarray], Features]
) -> List[LabeledPair]:
    """Load a scene, and extract the features of each image once.

    Args:
        source: the source of pairs.
        index: index of the scene.
        extract: `Matcher.extract` of the evaluated network.

    Raises:
        BadImage: If an image cannot be used.
    """
    images, image_pairs = source.load_scene(index)
    features = [extract(image) for image in images]
    labeled_pairs = []
    for image_pair in image_pairs:
        features0 = features[image_pair.first]
        features1 = features[image_pair.second]
        oriented = choose_orientations_of_pair(features0, features1)
        scene = source.scenes[index][0]
        labeled_pairs.append(
            LabeledPair(image_pair, scene, index, (features0, features1), oriented)
        )
    return labeled_pairs


# --- disturbances of the second view


def brighten(image: np.ndarray, factor: float) -> np.ndarray:
    """Multiply the brightness by `factor`, with saturation."""
    return cv2.convertScaleAbs(image, alpha=factor)


def blur(image: np.ndarray, deviation: float) -> np.ndarray:
    """Blur by a Gaussian with a standard deviation in pixels. 0 leaves the image unchanged."""
    return cv2.GaussianBlur(image, (0, 0), deviation) if deviation > 0 else image


def add_noise(image: np.ndarray, deviation: float) -> np.ndarray:
    """Add Gaussian noise with a standard deviation in gray levels."""
    # (H, W): every image of one size gets the same noise.
    noise = np.random.default_rng(0).normal(0.0, 1.0, image.shape) * deviation
    return np.clip(np.rint(image + noise), 0, 255).astype(np.uint8)


def compress(image: np.ndarray, quality: float) -> np.ndarray:
    """Compress as JPEG of a quality, 1 to 100, and decode again."""
    return views.compress_as_jpeg(image, int(quality))


DISTURBANCES: Dict[str, Tuple[Callable[[np.ndarray, float], np.ndarray], Tuple[float, ...]]] = {
    "illumination (factor)": (brighten, (1.0, 0.5, 0.25, 0.12, 2.0)),
    "blur (px)": (blur, (0.0, 1.0, 2.0, 4.0)),
    "noise (gray levels)": (add_noise, (0.0, 5.0, 10.0, 20.0)),
    "JPEG (quality)": (compress, (90, 40, 15, 5)),
}
ZOOMS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)


def list_conditions() -> List[Condition]:
    """List the conditions of the disturbed pairs of a photograph."""
    levels = {name: levels for name, (_, levels) in DISTURBANCES.items()}
    levels["zoom"] = ZOOMS
    return [(name, level) for name in levels for level in levels[name]]


def draw_zoom(rng: np.random.Generator, size: Size, zoom: float) -> np.ndarray:
    """Draw H_0to1 (3, 3), which magnifies a part of a view to a view of the same size.

    Args:
        rng: the generator, from which the position of the part is drawn.
        size: (width, height) of both views.
        zoom: how many times the part is magnified.
    """
    middle = (np.array(size) - 1) / 2
    # Half the size of the part is `middle / zoom`, and its center may move by the rest of the view.
    center = middle + rng.uniform(-1.0, 1.0, 2) * (middle - middle / zoom)
    H = np.diag([zoom, zoom, 1.0])
    H[:2, 2] = middle - zoom * center
    return H


# --- views of held-out photographs


class HeldOutPairs(PairSource):
    """Pairs of views that are rendered from held-out photographs.

    Photographs smaller than a view are scaled up, at most twice (see docs/evaluation.md).

    Args:
        images: the images of the stage `fetch`.
        entries: the photographs, each of which is a scene.
        params: the section `evaluate`. It has the number of pairs of each photograph, the size of
            a view and the limits of the views.
        robustness: number of photographs, the first ones, that also have disturbed pairs.
    """

    unit = "photographs"

    def __init__(
        self,
        images: ImageSet,
        entries: Sequence[Entry],
        params: EvaluateParams,
        robustness: int = 0,
    ):
        self.images = images
        self.entries = list(entries)
        self.params = params
        self.robustness = robustness
        self.view_size = (params.width, params.height)
        more = len(list_conditions())
        self.scenes = [
            (entry.name, params.pairs_per_image + more * (index < robustness))
            for index, entry in enumerate(self.entries)
        ]
        self.read_photograph = functools.lru_cache(CACHED)(self._read_photograph)

    def _read_photograph(self, index: int) -> np.ndarray:
        """Read the photograph with this index as gray pixels, (H, W) uint8.

        Raises:
            BadImage: If the photograph is unreadable or too small.
        """
        entry = self.entries[index]
        image = decode_gray(self.images.read(entry), entry.name)
        views.require_size(entry.name, get_image_size(image), self.view_size)
        return image

    def load_scene(self, index: int) -> Scene:
        """Render the pairs of one photograph.

        Raises:
            BadImage: If the photograph is unreadable or too small.
        """
        name = self.entries[index].name
        image = self.read_photograph(index)
        images = []
        pairs = []
        for number in range(self.params.pairs_per_image):
            first = 2 * number
            view0, H_image_to_0 = self.render_view(image, name, first)
            view1, H_image_to_1 = self.render_view(image, name, first + 1)
            images += [view0, view1]
            H_0to1 = compose(H_image_to_1, inverse(H_image_to_0))
            pairs.append(ImagePair(f"{name}#{number}", first, first + 1, H_0to1))
        if index < self.robustness:
            self._add_disturbed_pairs(image, name, images, pairs)
            self._add_zoomed_pairs(image, name, images, pairs)
        return images, pairs

    def load_color_image(self, index: int, image_index: int) -> np.ndarray:
        """Render a view with its brightness and the colors of the photograph."""
        entry = self.entries[index]
        photograph = decode_color(self.images.read(entry), entry.name)
        # The same draw gives the same homography, light and noise.
        gray, H = self.render_view(self.read_photograph(index), entry.name, image_index)
        view = cv2.cvtColor(views.render(photograph, H, self.view_size), cv2.COLOR_BGR2YCrCb)
        view[..., 0] = gray
        return cv2.cvtColor(view, cv2.COLOR_YCrCb2BGR)

    def render_view(
        self, image: np.ndarray, name: str, number: int, photometric: Optional[Photometric] = None
    ) -> Tuple[np.ndarray, np.ndarray]:
        """Render a view of a photograph. Even numbers are mild views, odd ones random homographies.

        Args:
            image: the gray pixels of the photograph, (H, W) uint8.
            name: name of the photograph.
            number: number of the view.
            photometric: the photometric distortion. If None, that of the section `views`.

        Returns:
            The view, (H, W) uint8, and H_image_to_view (3, 3).
        """
        # The name differs from the one in training, so no view of the training is drawn again.
        rng = views.make_generator(SEED, f"evaluate {name}", number)
        size = get_image_size(image)
        if number % 2 == 0:
            H = views.sample_mild_view(rng, size, self.view_size)
        else:
            H = views.sample_view(rng, size, self.view_size, self.params.views.homography)
        return self._render(image, H, rng, photometric or self.params.views.photometric), H

    def _render(
        self, image: np.ndarray, H: np.ndarray, rng: np.random.Generator, photometric: Photometric
    ) -> np.ndarray:
        """Render the view H (3, 3) of an image with photometric distortion."""
        return views.distort(views.render(image, H, self.view_size), rng, photometric)

    def _add_disturbed_pairs(
        self, image: np.ndarray, name: str, images: List[np.ndarray], pairs: List[ImagePair]
    ) -> None:
        """Add the first pair, with no distortion but one level of one disturbance of view 1."""
        none = Photometric(**dict.fromkeys(Photometric.model_fields, 0.0))
        view0, H_image_to_0 = self.render_view(image, name, 0, none)
        view1, H_image_to_1 = self.render_view(image, name, 1, none)
        H_0to1 = compose(H_image_to_1, inverse(H_image_to_0))
        first = len(images)
        images.append(view0)
        for condition, (disturb, levels) in DISTURBANCES.items():
            for level in levels:
                pair = ImagePair(f"{name}#0", first, len(images), H_0to1, (condition, level))
                pairs.append(pair)
                images.append(disturb(view1, level))

    def _add_zoomed_pairs(
        self, image: np.ndarray, name: str, images: List[np.ndarray], pairs: List[ImagePair]
    ) -> None:
        """Add pairs of the photograph and a magnified part, as of a landmark from afar and near.

        Levels at which the part would be scaled up more than `views.homography.max_upscale` times
        are left out, since magnified pixels contain no finer detail.
        """
        for zoom in ZOOMS:
            # The generator does not depend on the level, so the parts are alike at every level.
            rng = views.make_generator(SEED, f"magnified {name}", 0)
            H_image_to_0 = views.sample_mild_view(rng, get_image_size(image), self.view_size)
            H_0to1 = draw_zoom(rng, self.view_size, zoom)
            H_image_to_1 = compose(H_0to1, H_image_to_0)
            upscale = views.compute_magnification(H_image_to_1, self.view_size).max()
            if upscale > self.params.views.homography.max_upscale:
                continue
            first = len(images)
            photometric = self.params.views.photometric
            images += [
                self._render(image, H, rng, photometric) for H in (H_image_to_0, H_image_to_1)
            ]
            condition = "zoom", zoom
            pairs.append(ImagePair(f"{name} x{zoom:g}", first, first + 1, H_0to1, condition))


class NegativePairs(PairSource):
    """Pairs of views of two different photographs of a source, at most MAX_NEGATIVE_PAIRS."""

    def __init__(self, source: HeldOutPairs):
        self.source = source
        entries = source.entries
        count = len(entries)
        photographs = [source.images.identify_photograph(entry) for entry in entries]
        # A pair has the indices of both photographs, and the number of their views.
        pairs = (
            (first, second, number)
            for number in range((count - 1) * source.params.pairs_per_image)
            for first in range(count)
            for second in [(first + 1 + number % (count - 1)) % count]
            # Two copies of one photograph are no negative pair.
            if photographs[first] != photographs[second]
        )
        self.pairs = list(itertools.islice(pairs, MAX_NEGATIVE_PAIRS))
        self.scenes = [(f"{entries[a].name} and {entries[b].name}", 1) for a, b, _ in self.pairs]

    def load_scene(self, index: int) -> Scene:
        """Render the two views.

        Raises:
            BadImage: If a photograph is unreadable or too small.
        """
        first, second, number = self.pairs[index]
        images = []
        for photograph, view in ((first, 2 * number), (second, 2 * number + 1)):
            image = self.source.read_photograph(photograph)
            name = self.source.entries[photograph].name
            images.append(self.source.render_view(image, name, view)[0])
        return images, [ImagePair(f"{self.scenes[index][0]}#{number}", 0, 1, None)]
