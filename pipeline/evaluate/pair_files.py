"""Pairs with ground truth that are read from files.

These are a folder of sequences in HPatches layout, or a list of pairs with known cameras. Ground
truth that cannot be right is refused with the name of its file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import cv2
import numpy as np

from pipeline.errors import RequestError
from pipeline.evaluate.pairs import CameraPair, ImagePair, PairSource, Scene, get_image_size
from superglue_sift.features.images import BadImage, decode_color, read_gray
from superglue_sift.features.photo_folder import EXTENSIONS, walk_folders
from superglue_sift.files import find_spelling, read_lines
from superglue_sift.geometry.two_view import Size, compose, inverse, map_to_resized

# A sequence has a name, the files of its images (the reference first), and the homographies from
# the reference to the other images by their numbers.
HPatchesSequence = Tuple[str, List[Path], Dict[int, np.ndarray]]


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
            size = self._compute_size(file_size)
            # Areas are averaged where the image shrinks, to avoid aliasing.
            method = cv2.INTER_AREA if min(size) < min(file_size) else cv2.INTER_LINEAR
            images.append(cv2.resize(image, size, interpolation=method))
            maps.append(map_to_resized(file_size, size))
        return images, maps

    def _compute_size(self, file_size: Size) -> Size:
        """Return the size (width, height) in px to which an image is resized."""
        short_side = self.short_side or min(file_size)
        width, height = (max(1, round(side * short_side / min(file_size))) for side in file_size)
        return width, height

    def load_color_image(self, index: int, image_index: int) -> np.ndarray:
        """Read and resize an image of a scene in color."""
        path = self.files[index][image_index]
        image = decode_color(path.read_bytes(), path.name)
        size = self._compute_size(get_image_size(image))
        return cv2.resize(image, size, interpolation=cv2.INTER_AREA)


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
            ImagePair(
                f"{name}/1-{number}", 0, position, compose(maps[position], H, inverse(maps[0]))
            )
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
        return images, [ImagePair(f"{name0} {name1}", 0, 1, truth)]


def read_sequences(folder: Path) -> List[HPatchesSequence]:
    """Read the sequences in `folder` and in folders below it, sorted by name.

    Raises:
        RequestError: If there is none, or if a sequence lacks a file.
    """
    sequences = []
    for path in sorted(subfolder for subfolder, _ in walk_folders(folder)):
        files, homographies = read_sequence(path)
        # Other folders, such as the root of all sequences, have no homography.
        if homographies:
            name = path.relative_to(folder).as_posix()
            sequences.append((path.resolve().name if name == "." else name, files, homographies))
    if not sequences:
        raise RequestError(
            f"--pairs {folder}: no sequence, a folder with images 1.png, 2.png, ... and"
            " homographies H_1_2, ..."
        )
    return sequences


def read_sequence(path: Path) -> Tuple[List[Path], Dict[int, np.ndarray]]:
    """Return the images in a folder, image 1 first, and the homographies H_1_k by their number k.

    Raises:
        RequestError: For two files of one number, an image without its homography, or a homography
            without its image.
    """
    images: Dict[int, Path] = {}
    homographies: Dict[int, Path] = {}
    # Collect what the folder has, by number.
    for file in sorted(path.iterdir()):
        match = re.fullmatch(r"H_1_(\d+)(\.txt)?", file.name)
        is_image = file.stem.isdecimal() and file.suffix.lower() in EXTENSIONS
        if not match and not is_image:
            continue
        files_by_number, number = (homographies, match[1]) if match else (images, file.stem)
        first_file = files_by_number.setdefault(int(number), file)
        if first_file != file:
            raise RequestError(f"{file}: the same number as {first_file.name}; keep one of them")
    homographies.pop(1, None)  # Some data sets have H_1_1, the identity
    unpaired = (images.keys() - {1}) ^ homographies.keys()
    if homographies and 1 not in images:
        raise RequestError(f"{path}: no image 1")
    if unpaired:
        number = min(unpaired)
        raise RequestError(f"{path}: image {number} and homography H_1_{number} need each other")
    numbers = sorted(homographies)
    files = [images[number] for number in sorted(images)]
    return files, {number: read_homography(homographies[number]) for number in numbers}


def parse_numbers(words: Sequence[str], place: str) -> np.ndarray:
    """Convert words to numbers, (N,) float64.

    Args:
        words: the words.
        place: the file, and the line if there is one, for the error.

    Raises:
        RequestError: If a word is not a finite number.
    """
    try:
        numbers = np.array(list(map(float, words)))
    except ValueError as error:
        raise RequestError(f"{place}: {error}") from None
    if not np.isfinite(numbers).all():
        raise RequestError(f"{place}: NaN or infinity")
    return numbers


def read_homography(path: Path) -> np.ndarray:
    """Read a homography, (3, 3) float64, from a text file.

    The numbers are separated by blanks, commas or semicolons, with or without brackets.

    Raises:
        RequestError: If the file does not have an invertible 3x3 matrix.
    """
    # NumPy, MATLAB and CSV write brackets, commas and semicolons.
    words = re.sub(r"[][,;]", " ", " ".join(line for _, line in read_lines(path))).split()
    numbers = parse_numbers(words, str(path))
    # In thousands of pixels the entries have similar magnitudes.
    units = np.array([1000.0, 1000.0, 1.0])
    if len(numbers) == 9:
        H = numbers.reshape(3, 3)
        if np.linalg.matrix_rank(H / units[:, None] * units) == 3:
            return H
    raise RequestError(f"{path}: not a homography, which has 3 rows of 3 numbers and an inverse")


def is_camera_matrix(K: np.ndarray) -> bool:
    """Return whether K (3, 3) has positive focal lengths and the last row (0, 0, 1)."""
    return min(K[0, 0], K[1, 1]) > 0 and np.allclose(K[2], (0, 0, 1))


def is_rigid_motion(T: np.ndarray) -> bool:
    """Return whether T (4, 4) has a rotation and the last row (0, 0, 0, 1)."""
    R = T[:3, :3]
    is_rotation = np.allclose(R @ R.T, np.eye(3), atol=1e-3) and np.linalg.det(R) > 0
    return bool(is_rotation and np.allclose(T[3], (0, 0, 0, 1)))


def read_pairs(path: Path) -> List[Tuple[str, str, CameraPair]]:
    """Read the pairs of a `pairs_with_gt.txt`: the names of both images, and their cameras.

    Raises:
        RequestError: If a line is wrong, which the message names.
    """
    pairs = []
    for number, line in read_lines(path):
        place = f"--poses {path} line {number}"
        words = line.split()
        if len(words) != 38:
            rule = "two names without blanks, two rotations, K0, K1 and T_0to1"
            raise RequestError(f"{place}: {len(words)} words; must be 38: {rule}")
        # The matrices are written row by row.
        values = parse_numbers(words[2:], place)
        rotations, intrinsics, motion = np.split(values, [2, 20])
        K0, K1 = intrinsics.reshape(2, 3, 3)
        T_0to1 = motion.reshape(4, 4)
        if rotations.any():
            raise RequestError(f"{place}: EXIF rotation: rotate the images first and write 0 0")
        if not (is_camera_matrix(K0) and is_camera_matrix(K1)):
            rule = "positive focal lengths and the last row 0 0 1"
            raise RequestError(f"{place}: K0 and K1 must have {rule}")
        if not is_rigid_motion(T_0to1):
            raise RequestError(f"{place}: T_0to1 must have a rotation and the last row 0 0 0 1")
        pairs.append((words[0], words[1], CameraPair(K0, K1, T_0to1)))
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
