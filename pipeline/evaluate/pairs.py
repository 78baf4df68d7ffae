"""Pairs with ground truth, rendered from held-out photographs or read from files.

A `PairSource` has scenes (photographs, sequences), and each scene has pairs of images. Loading a
scene twice gives the same bytes. Pictures can therefore be drawn at the end, without keeping the
images of all pairs in memory. Pairs in files are a folder in HPatches layout, or a list of pairs
with cameras.

Held-out pairs follow the protocol of the SuperGlue paper (section 5.1): a pair has two views of one
photograph. The first view shows nearly the whole photograph. The second is seen through a random
homography without borders. Both have photometric distortion. A pair depends only on the section
`views`, the name of its photograph and its number. `make_disturbed_sources` disturbs or magnifies
the second views by fixed amounts.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import cv2
import numpy as np

from pipeline.errors import RequestError
from pipeline.fetch.dataset import Entry, ImageSet
from pipeline.keypoints import views
from pipeline.params import EvaluateParams, Photometric
from superglue_sift.features.features import Features
from superglue_sift.features.images import BadImage, decode_color, decode_gray, read_gray
from superglue_sift.features.photo_folder import EXTENSIONS, walk_folders
from superglue_sift.files import find_spelling, read_lines
from superglue_sift.geometry.two_view import compose, inverse, map_to_resized
from superglue_sift.network.batch import FeaturePair, choose_orientations_of_pair

SEED = 0  # All models are compared on the same rendered pairs
MAX_NEGATIVE_PAIRS = 100
ZOOMS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)

# A sequence has a name, the files of its images (the reference first), and the homographies from
# the reference to the other images by their numbers.
HPatchesSequence = Tuple[str, List[Path], Dict[int, np.ndarray]]


class CameraPair(NamedTuple):
    """The intrinsics of two cameras, and the motion between them.

    Attributes:
        K0, K1: the intrinsics (3, 3), in pixels of the images as they are matched.
        T_0to1: (4, 4), maps points of camera 0 to camera 1.
    """

    K0: np.ndarray
    K1: np.ndarray
    T_0to1: np.ndarray


class LabeledPair(NamedTuple):
    """The input of every matcher, with its ground truth.

    Attributes:
        name: name of the pair.
        scene: name of its scene.
        indices: index of the scene in the source, and of the pair, image 0 and image 1 in the
            scene.
        features: the features of both images, as `Matcher.extract` returns them.
        pair: the same keypoints, each with the orientation that fits the other image, for the
            matchers that take one descriptor of each keypoint.
        truth: a homography, (3, 3) float64 from pixels of image 0 to image 1, or two cameras.
    """

    name: str
    scene: str
    indices: Tuple[int, int, int, int]
    features: FeaturePair
    pair: FeaturePair
    truth: Union[np.ndarray, CameraPair]


# The content of a scene: its images, (H, W) uint8 gray, and its pairs. A pair has a name, the
# indices of both images, and the ground truth.
Scene = Tuple[List[np.ndarray], List[Tuple[str, int, int, Union[np.ndarray, CameraPair]]]]


class PairSource:
    """A sequence of scenes, each with some pairs of images.

    Attributes:
        scenes: name and number of pairs of each scene.
        unit: the plural noun with which tables name the scenes.
    """

    scenes: Sequence[Tuple[str, int]]
    unit = "scenes"

    def __len__(self) -> int:
        return len(self.scenes)

    def load_scene(self, index: int) -> Scene:
        """Read or render the scene with this index.

        Raises:
            BadImage: If the scene must be left out.
        """
        raise NotImplementedError

    def render_in_color(self, index: int, image_index: int, gray: np.ndarray) -> np.ndarray:
        """Read or render an image of a scene in colour.

        Args:
            index: index of the scene.
            image_index: index of the image in the scene.
            gray: the image that `load_scene` returned, (H, W) uint8.

        Returns:
            (H, W, 3) uint8 BGR.
        """
        raise NotImplementedError


def get_image_size(image: np.ndarray) -> Tuple[int, int]:
    """Return (width, height) of an (H, W) image."""
    return image.shape[1::-1]


def extract_scene_pairs(
    source: PairSource,
    index: int,
    extract: Callable[[np.ndarray], Features],
    pair_index: Optional[int] = None,
) -> List[LabeledPair]:
    """Load a scene, and extract the features of each image once.

    Args:
        source: the source of pairs.
        index: index of the scene.
        extract: `Matcher.extract` of the evaluated network.
        pair_index: index in the scene of the one pair to return. If None, return all pairs.

    Raises:
        BadImage: If an image cannot be used.
    """
    images, pairs = source.load_scene(index)
    # The features of each image are kept, since the reference of a sequence is in all its pairs.
    features: Dict[int, Features] = {}
    labeled_pairs = []
    for position, (name, first, second, truth) in enumerate(pairs):
        if pair_index not in (None, position):
            continue
        for image_index in {first, second} - set(features):
            features[image_index] = extract(images[image_index])
        features0 = features[first]
        features1 = features[second]
        pair = choose_orientations_of_pair(features0, features1)
        indices = (index, position, first, second)
        scene = source.scenes[index][0]
        labeled_pairs.append(LabeledPair(name, scene, indices, (features0, features1), pair, truth))
    return labeled_pairs


class HeldOutPairs(PairSource):
    """Pairs of views that are rendered from held-out photographs.

    Photographs smaller than a view are scaled up, as in the paper (see docs/evaluation.md).

    Args:
        images: the images of the stage `fetch`.
        entries: the photographs, each of which is a scene.
        params: the section `evaluate`. It has the number of pairs of each photograph, the size of
            a view and the limits of the views.
        disturb: a function from pixels to pixels, (H, W) uint8, for the second view of each pair.
    """

    unit = "photographs"

    def __init__(
        self,
        images: ImageSet,
        entries: Sequence[Entry],
        params: EvaluateParams,
        disturb: Callable[[np.ndarray], np.ndarray] = np.asarray,
    ):
        self.images = images
        self.entries = list(entries)
        self.params = params
        self.disturb = disturb
        self.view_size = (params.width, params.height)
        self.scenes = [(entry.name, params.pairs_per_image) for entry in self.entries]

    def load_scene(self, index: int) -> Scene:
        """Render the pairs of one photograph.

        Raises:
            BadImage: If the photograph is unreadable or too small.
        """
        name, count = self.scenes[index]
        image = self.read_photograph(index)
        images = []
        pairs = []
        for number in range(count):
            # Views of even numbers are mild, and views of odd numbers are random homographies.
            first = 2 * number
            view0, H_image_to_0 = self.render_view(image, name, first)
            view1, H_image_to_1 = self.render_view(image, name, first + 1)
            images += [view0, self.disturb(view1)]
            H_0to1 = compose(H_image_to_1, inverse(H_image_to_0))
            pairs.append((f"{name}#{number}", first, first + 1, H_0to1))
        return images, pairs

    def render_in_color(self, index: int, image_index: int, gray: np.ndarray) -> np.ndarray:
        """Render a view in colour: the brightness of `gray`, and the colours of the photograph."""
        entry = self.entries[index]
        photograph = decode_color(self.images.read(entry), entry.name)
        # The same draw gives the same homography. Light and noise are those of `gray`.
        H, _ = self.draw_view(get_image_size(photograph), entry.name, image_index)
        view = cv2.cvtColor(views.render(photograph, H, self.view_size), cv2.COLOR_BGR2YCrCb)
        view[..., 0] = gray
        return cv2.cvtColor(view, cv2.COLOR_YCrCb2BGR)

    def read_photograph(self, index: int) -> np.ndarray:
        """Read the photograph with this index as gray pixels, (H, W) uint8.

        Raises:
            BadImage: If the photograph is unreadable or too small.
        """
        entry = self.entries[index]
        image = decode_gray(self.images.read(entry), entry.name)
        views.require_size(entry.name, get_image_size(image), self.view_size)
        return image

    def draw_view(
        self, size: Tuple[int, int], name: str, number: int
    ) -> Tuple[np.ndarray, np.random.Generator]:
        """Draw the homography of a view, which is mild for even numbers.

        Args:
            size: (width, height) of the photograph.
            name: name of the photograph.
            number: number of the view.

        Returns:
            H_image_to_view (3, 3), and the generator, from which the view's distortion is drawn.
        """
        # The name differs from the one in training, so no view of the training is drawn again.
        rng = views.make_generator(SEED, f"evaluate {name}", number)
        if number % 2 == 0:
            return views.sample_mild_view(rng, size, self.view_size), rng
        return views.sample_view(rng, size, self.view_size, self.params.views.homography), rng

    def render_distorted(
        self, image: np.ndarray, H: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Render the view H (3, 3) of an image, with photometric distortion from `rng`.

        The image and the view are gray, (H, W) uint8.
        """
        view = views.render(image, H, self.view_size)
        return views.distort(view, rng, self.params.views.photometric)

    def render_view(
        self, image: np.ndarray, name: str, number: int
    ) -> Tuple[np.ndarray, np.ndarray]:
        """Render a view of a photograph by its number, (H, W) uint8. Return also H_image_to_view.

        `image` has the gray pixels of the photograph, and `name` its name.
        """
        H, rng = self.draw_view(get_image_size(image), name, number)
        return self.render_distorted(image, H, rng), H


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
        *photographs, number = self.pairs[index]
        source = self.source
        images = []
        for side, entry_index in enumerate(photographs):
            photograph = source.read_photograph(entry_index)
            name = source.entries[entry_index].name
            images.append(source.render_view(photograph, name, 2 * number + side)[0])
        # Two photographs have no homography. This one is never used.
        no_truth = np.full((3, 3), np.nan)
        return images, [(f"{self.scenes[index][0]}#{number}", 0, 1, no_truth)]


class ZoomedPairs(HeldOutPairs):
    """Pairs of a photograph and a magnified part of it, as of a landmark from afar and from near.

    Photographs that would be scaled up more than `views.homography.max_upscale` times are left out,
    so only large ones reach the last levels.

    Args:
        source: the source whose photographs are magnified.
        count: number of photographs, the first of the source.
        zoom: how many times the part is magnified, 1 or more.
    """

    def __init__(self, source: HeldOutPairs, count: int, zoom: float):
        params = source.params.model_copy(update={"pairs_per_image": 1})
        super().__init__(source.images, source.entries[:count], params)
        self.zoom = zoom

    def load_scene(self, index: int) -> Scene:
        """Render the pair of one photograph.

        Raises:
            BadImage: If the photograph is unreadable or too small.
        """
        name = self.entries[index].name
        image = self.read_photograph(index)
        # The generator does not depend on the level, so the parts are alike at every level.
        rng = views.make_generator(SEED, f"magnified {name}", 0)
        H_image_to_0 = views.sample_mild_view(rng, get_image_size(image), self.view_size)
        H_0to1 = draw_zoom(rng, self.view_size, self.zoom)
        H_image_to_1 = compose(H_0to1, H_image_to_0)
        # Magnified pixels contain no finer detail.
        upscale = views.compute_magnification(H_image_to_1, self.view_size).max()
        if upscale > self.params.views.homography.max_upscale:
            raise BadImage(name, f"a part magnified {self.zoom:g} times has no pixels of its own")
        images = [self.render_distorted(image, H, rng) for H in (H_image_to_0, H_image_to_1)]
        return images, [(f"{name} x{self.zoom:g}", 0, 1, H_0to1)]


def draw_zoom(rng: np.random.Generator, size: Tuple[int, int], zoom: float) -> np.ndarray:
    """Draw H_0to1 (3, 3), which magnifies a part of a view to a view of the same size.

    Args:
        rng: the generator, from which the position of the part is drawn.
        size: (width, height) of both views.
        zoom: how many times the part is magnified.
    """
    middle = (np.array(size) - 1) / 2
    # Half the size of the part is `middle / zoom`, and its centre may move by the rest of the view.
    centre = middle + rng.uniform(-1.0, 1.0, 2) * (middle - middle / zoom)
    H = np.diag([zoom, zoom, 1.0])
    H[:2, 2] = middle - zoom * centre
    return H


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


DISTURBANCES: Dict[str, Tuple[Callable, Tuple[float, ...]]] = {
    "illumination (factor)": (brighten, (1.0, 0.5, 0.25, 0.12, 2.0)),
    "blur (px)": (blur, (0.0, 1.0, 2.0, 4.0)),
    "noise (gray levels)": (add_noise, (0.0, 5.0, 10.0, 20.0)),
    "JPEG (quality)": (views.compress_as_jpeg, (90, 40, 15, 5)),
}


def make_disturbed_sources(
    source: HeldOutPairs, count: int
) -> Iterator[Tuple[str, float, HeldOutPairs]]:
    """Yield the condition, the level and the source of each line of robustness.csv.

    There is one pair of each photograph. Its second view is disturbed or magnified. Only magnified
    pairs have the photometric distortion of `source`.

    Args:
        source: the source whose photographs are used.
        count: number of photographs, the first of the source.
    """
    # Switch all other distortions off.
    clear = Photometric(**dict.fromkeys(Photometric.model_fields, 0.0))
    calm = source.params.views.model_copy(update={"photometric": clear})
    params = source.params.model_copy(update={"views": calm, "pairs_per_image": 1})
    for name, (function, amounts) in DISTURBANCES.items():
        for amount in amounts:
            content = source.images, source.entries[:count], params
            # The default values keep the function and the amount of this turn of the loop.
            yield (
                name,
                amount,
                HeldOutPairs(*content, lambda view, f=function, a=amount: f(view, a)),
            )
    for zoom in ZOOMS:
        yield "zoom", zoom, ZoomedPairs(source, count, zoom)


# --- pairs from files


class FilePairs(PairSource):
    """Scenes whose images are read from files, and resized.

    Errors are in pixels of the resized images.

    Attributes:
        files: the files of the images of each scene.

    Args:
        short_side: shorter side of the resized images in px. 480 is the protocol of LightGlue and
            glue-factory, and 0 keeps the size.
    """

    files: Sequence[List[Path]]

    def __init__(self, short_side: int):
        self.short_side = short_side

    def read_images(self, index: int) -> Tuple[List[np.ndarray], List[np.ndarray]]:
        """Read and resize the images of a scene.

        Returns:
            The gray images, (H, W) uint8, and the homography (3, 3) from each file's pixels to
            those of its resized image.

        Raises:
            RequestError: If an image is unreadable, so that no pair is skipped silently.
        """
        images = []
        maps = []
        for path in self.files[index]:
            try:
                image = read_gray(path)
            except BadImage as error:
                raise RequestError(str(error)) from None
            file_size = get_image_size(image)
            short_side = self.short_side or min(file_size)
            size = [max(1, round(side * short_side / min(file_size))) for side in file_size]
            # Areas are averaged where the image shrinks, to avoid aliasing.
            method = cv2.INTER_AREA if short_side < min(file_size) else cv2.INTER_LINEAR
            image = cv2.resize(image, size, interpolation=method)
            images.append(image)
            maps.append(map_to_resized(file_size, get_image_size(image)))
        return images, maps

    def render_in_color(self, index: int, image_index: int, gray: np.ndarray) -> np.ndarray:
        """Read an image of a scene in colour, and resize it to the size of `gray`."""
        path = self.files[index][image_index]
        photograph = decode_color(path.read_bytes(), path.name)
        return cv2.resize(photograph, get_image_size(gray), interpolation=cv2.INTER_AREA)


class HPatchesPairs(FilePairs):
    """Pairs (1, k) of every sequence below a folder in HPatches layout.

    Args:
        folder: the folder of the sequences.
        short_side: shorter side of the resized images in px, or 0 to keep the size.

    Raises:
        RequestError: If a file is missing or wrong.
    """

    unit = "sequences"

    def __init__(self, folder: Path, short_side: int = 0):
        super().__init__(short_side)
        self.sequences = read_sequences(folder)
        self.scenes = [(name, len(homographies)) for name, _, homographies in self.sequences]
        self.files = [files for _, files, _ in self.sequences]

    def load_scene(self, index: int) -> Scene:
        """Read one sequence, and scale its homographies as the images are resized."""
        name, _, homographies = self.sequences[index]
        images, maps = self.read_images(index)
        return images, [
            (f"{name}/1-{number}", 0, position, compose(maps[position], H, inverse(maps[0])))
            for position, (number, H) in enumerate(homographies.items(), 1)
        ]


class PosePairs(FilePairs):
    """Pairs of a `pairs_with_gt.txt`, with the scenes of `name_scenes`.

    Args:
        file: the list of pairs and cameras, as `read_pairs` reads it.
        folder: the folder of the images.
        short_side: shorter side of the resized images in px, or 0 to keep the size.

    Raises:
        RequestError: If a line is wrong.
    """

    def __init__(self, file: Path, folder: Path, short_side: int = 0):
        super().__init__(short_side)
        self.pairs = read_pairs(file)
        names = [pair[:2] for pair in self.pairs]
        self.scenes = [(name, 1) for name in name_scenes(names)]
        # Names may be spelled as on another system.
        self.files = [
            [folder / (find_spelling(folder, name) or name) for name in pair_names]
            for pair_names in names
        ]

    def load_scene(self, index: int) -> Scene:
        """Read one pair, and scale its intrinsics as the images are resized."""
        name0, name1, cameras = self.pairs[index]
        images, (map0, map1) = self.read_images(index)
        # K maps to pixels of the file, and the map from these to pixels of the resized image.
        truth = CameraPair(map0 @ cameras.K0, map1 @ cameras.K1, cameras.T_0to1)
        return images, [(f"{name0} {name1}", 0, 1, truth)]


def read_sequences(folder: Path) -> List[HPatchesSequence]:
    """Read the sequences in `folder` and in folders below it, sorted by name.

    Raises:
        RequestError: If there is none, or if a sequence lacks a file.
    """
    if not folder.is_dir():
        raise RequestError(f"--pairs {folder}: no such folder")
    sequences = []
    for path in sorted(subfolder for subfolder, _ in walk_folders(folder)):
        files, homographies = read_sequence(path)
        # Other folders, such as the root of all sequences, have no homography.
        if homographies:
            name = path.relative_to(folder).as_posix()
            sequences.append((path.resolve().name if name == "." else name, files, homographies))
    if not sequences:
        raise RequestError(
            f"--pairs {folder}: no sequence found; expected folders with images 1.png, 2.png, ... "
            "(or ppm, jpg) and homographies H_1_2, H_1_3, ..."
        )
    return sequences


def read_sequence(path: Path) -> Tuple[List[Path], Dict[int, np.ndarray]]:
    """Return the images in a folder, image 1 first, and the homographies H_1_k by their number k.

    Raises:
        RequestError: For an image without its homography, or a homography without its image.
    """
    images: Dict[int, Path] = {}
    homographies: Dict[int, Path] = {}
    # Collect what the folder has, by number.
    for file in sorted(path.iterdir()):
        match = re.fullmatch(r"H_1_(\d+)(\.txt)?", file.name)
        if match:
            homographies[int(match[1])] = file
        elif file.stem.isdecimal() and file.suffix.lower() in EXTENSIONS:
            first_file = images.setdefault(int(file.stem), file)
            if first_file != file:
                raise RequestError(
                    f"{file}: image {int(file.stem)} exists twice, also as {first_file.name};"
                    " keep one"
                )
    homographies.pop(1, None)  # Some data sets have H_1_1, the identity
    # Each image but the first needs a homography, and each homography an image.
    if homographies and 1 not in images:
        raise RequestError(f"{path}: homographies but no image 1 (1.png, 1.ppm, 1.jpg, ...)")
    for number in sorted(images.keys() - homographies.keys() - {1}):
        raise RequestError(f"{images[number]}: no homography H_1_{number} next to it")
    for number in sorted(homographies.keys() - images.keys()):
        raise RequestError(
            f"{homographies[number]}: no image {number}.png (or ppm, jpg) next to it"
        )
    numbers = sorted(homographies)
    files = [images[number] for number in (1, *numbers) if number in images]
    return files, {number: read_homography(homographies[number]) for number in numbers}


def read_homography(path: Path) -> np.ndarray:
    """Read a homography, (3, 3) float64, from a text file.

    The numbers are separated by blanks, commas or semicolons, with or without brackets.

    Raises:
        RequestError: If the file does not have an invertible 3x3 matrix.
    """
    refusal = f"{path}: not a homography"
    # NumPy, MATLAB and CSV write brackets, commas and semicolons.
    words = re.sub(r"[][,;]", " ", " ".join(line for _, line in read_lines(path))).split()
    try:
        numbers = list(map(float, words))
    except ValueError as error:
        raise RequestError(f"{refusal}: {error}") from None
    if len(numbers) != 9:
        raise RequestError(f"{refusal}: expected 3 rows of 3 numbers, found {len(numbers)}")
    H = np.array(numbers).reshape(3, 3)
    # In thousands of pixels the entries have similar magnitudes.
    units = np.diag([1000.0, 1000.0, 1.0])
    if not np.isfinite(H).all() or np.linalg.matrix_rank(np.linalg.inv(units) @ H @ units) < 3:
        raise RequestError(f"{refusal}: the matrix cannot be inverted")
    return H


def read_pairs(path: Path) -> List[Tuple[str, str, CameraPair]]:
    """Read the pairs of a `pairs_with_gt.txt`: the names of both images, and their cameras.

    Raises:
        RequestError: If a line is wrong, which the message names.
    """
    pairs = []
    for number, line in read_lines(path):
        where = f"--poses {path} line {number}"
        words = line.split()
        if len(words) != 38:
            raise RequestError(
                f"{where}: {len(words)} words; must be 38: two names without blanks, two rotations,"
                " K0, K1, T_0to1"
            )
        try:
            values = np.array(words[2:], np.float64)
        except ValueError as error:
            raise RequestError(f"{where}: {error}") from None
        if values[:2].any():
            raise RequestError(
                f"{where}: EXIF rotation {words[2]} {words[3]}: rotate the images first and write"
                " 0 0"
            )
        # Read the words after the two rotations, row by row.
        K0, K1 = values[2:20].reshape(2, 3, 3)
        T = values[20:].reshape(4, 4)
        R = T[:3, :3]
        is_rotation = np.allclose(R @ R.T, np.eye(3), atol=1e-3) and np.linalg.det(R) > 0
        if not is_rotation or min(K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]) <= 0:
            raise RequestError(
                f"{where}: T_0to1 must contain a rotation, and focal lengths must be positive"
            )
        pairs.append((words[0], words[1], CameraPair(K0, K1, T)))
    if not pairs:
        raise RequestError(f"--poses {path}: contains no pair")
    return pairs


def name_scenes(pairs: List[Tuple[str, str]]) -> List[str]:
    """Return the name of the scene of each pair of images.

    Pairs that share images, directly or through other pairs, are one scene. If there are several
    folders, the pairs of one folder are one scene, too. A scene has the name of that folder, or of
    the first of its images.
    """
    folders = {name: str(Path(name).parent) for pair in pairs for name in pair}
    has_folders = len(set(folders.values())) > 1
    # Names that belong together, by a pair or by a folder, get one root (union-find).
    links = [*pairs, *(folders.items() if has_folders else ())]
    roots = {name: name for link in links for name in link}

    def find_root(name: str) -> str:
        """Return the name that stands for all names which belong together with this one."""
        while roots[name] != name:
            name = roots[name]
        return name

    for first, second in links:
        roots[find_root(second)] = find_root(first)
    # The first pair of each scene gives it its name.
    scene_names: Dict[str, str] = {}
    return [
        scene_names.setdefault(find_root(first), folders[first] if has_folders else first)
        for first, _ in pairs
    ]
