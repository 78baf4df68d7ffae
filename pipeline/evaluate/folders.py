"""Pairs that are read from files: folders in HPatches layout, and lists of pairs with cameras.

A folder has sequences of images `1.png, 2.png, ...` and text files `H_1_2, H_1_3, ...`. A text file
has three rows of three numbers, which map pixels of image 1 to pixels of image k (Balntas et al.,
"HPatches", CVPR 2017).

A line of `pairs_with_gt.txt` has two image names, two EXIF rotations, K0 and K1 (nine numbers each)
and T_0to1 (sixteen numbers), row by row (arXiv 1911.11763, sections 5.2 and 5.3).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict, List, Tuple

import cv2
import numpy as np

from pipeline.errors import RequestError
from pipeline.evaluate.pairs import Pose, Scene, Source, image_size
from superglue_sift.features.images import (
    EXTENSIONS,
    BadImage,
    decode_color,
    read_gray,
    walk_folders,
)
from superglue_sift.files import read_lines, spelled_as_file
from superglue_sift.geometry.two_view import compose, inverse, resizing

NUMBERS = 2 + 9 + 9 + 16  # how many numbers follow the two names on a line of pairs with cameras

# A sequence: its name, its images (the reference first), and the homographies to the others by
# number
Sequence = Tuple[str, List[Path], Dict[int, np.ndarray]]


class FilePairs(Source):
    """Scenes whose images are read from files and resized to a shorter side of `short_side` px.

    480 is the protocol of LightGlue and glue-factory, and 0 keeps the size. An unreadable image
    raises RequestError, so that no pair is skipped silently.
    """

    def __init__(self, short_side: int):
        self.short_side = short_side

    def files(self, index: int) -> List[Path]:
        """Return the files of a scene's images."""
        raise NotImplementedError

    def read(self, index: int) -> Tuple[List[np.ndarray], List[np.ndarray]]:
        """Return the gray images of a scene, and the maps (3, 3) from pixels of the files."""
        images = []
        maps = []
        for path in self.files(index):
            try:
                image = read_gray(path)
            except BadImage as error:
                raise RequestError(str(error)) from None
            # areas are averaged where the image shrinks, to avoid aliasing
            before = image_size(image)
            shorter = self.short_side or min(before)
            size = [max(1, round(side * shorter / min(before))) for side in before]
            method = cv2.INTER_AREA if shorter < min(before) else cv2.INTER_LINEAR
            image = cv2.resize(image, size, interpolation=method)
            images.append(image)
            maps.append(resizing(before, image_size(image)))
        return images, maps

    def in_color(self, index: int, image: int, gray: np.ndarray) -> np.ndarray:
        path = self.files(index)[image]
        photograph = decode_color(path.read_bytes(), path.name)
        return cv2.resize(photograph, image_size(gray), interpolation=cv2.INTER_AREA)


class HPatchesPairs(FilePairs):
    """Pairs (1, k) of every sequence below a folder. Raises RequestError for a wrong file."""

    unit = "sequences"

    def __init__(self, folder: Path, short_side: int = 480):
        super().__init__(short_side)
        self.sequences = find_sequences(folder)
        self.scenes = [(name, len(others)) for name, _, others in self.sequences]

    def files(self, index: int) -> List[Path]:
        return self.sequences[index][1]

    def load(self, index: int) -> Scene:
        """Read one sequence, and scale its homographies as the images are resized."""
        name, _, homographies = self.sequences[index]
        images, maps = self.read(index)
        return images, [
            (f"{name}/1-{number}", 0, place, compose(maps[place], H, inverse(maps[0])))
            for place, (number, H) in enumerate(homographies.items(), 1)
        ]


class PosePairs(FilePairs):
    """Pairs of a `pairs_with_gt.txt`, with their scenes from `scene_names`."""

    def __init__(self, file: Path, folder: Path, short_side: int = 480):
        super().__init__(short_side)
        self.pairs = read_pairs(file)
        self.folder = folder
        self.scenes = [(name, 1) for name in scene_names([pair[:2] for pair in self.pairs])]

    def files(self, index: int) -> List[Path]:
        """Return both files, whose names may be spelled as on another system."""
        names = self.pairs[index][:2]
        return [self.folder / (spelled_as_file(self.folder, name) or name) for name in names]

    def load(self, index: int) -> Scene:
        """Read one pair, and scale its intrinsics as the images are resized."""
        name0, name1, pose = self.pairs[index]
        images, (map0, map1) = self.read(index)
        # K maps to pixels of the file, and the map from these to pixels of the resized image
        truth = Pose(map0 @ pose.K0, map1 @ pose.K1, pose.T_0to1)
        return images, [(f"{name0} {name1}", 0, 1, truth)]


def find_sequences(folder: Path) -> List[Sequence]:
    """Read the sequences in `folder` and in folders below it, sorted by name.

    Raises RequestError if there is none, or if a sequence lacks a file.
    """
    if not folder.is_dir():
        raise RequestError(f"--pairs {folder}: no such folder")
    sequences = []
    for path in sorted(place for place, _ in walk_folders(folder)):
        files, homographies = read_sequence(path)
        if homographies:  # other folders, such as the root of all sequences, are passed over
            name = path.relative_to(folder).as_posix()
            sequences.append((path.resolve().name if name == "." else name, files, homographies))
    if not sequences:
        raise RequestError(
            f"--pairs {folder}: no sequence found; expected folders with images 1.png, 2.png, ... "
            "(or ppm, jpg) and homographies H_1_2, H_1_3, ..."
        )
    return sequences


def read_sequence(path: Path) -> Tuple[List[Path], Dict[int, np.ndarray]]:
    """Return the images in a folder, the first one first, and the homographies by number.

    Raises RequestError if one of two files that belong together is missing.
    """
    images: Dict[int, Path] = {}
    homographies: Dict[int, Path] = {}
    # collect what the folder has, by number
    for file in sorted(path.iterdir()):
        match = re.fullmatch(r"H_1_(\d+)(\.txt)?", file.name)
        if match:
            homographies[int(match[1])] = file
        elif file.stem.isdecimal() and file.suffix.lower() in EXTENSIONS:
            other = images.setdefault(int(file.stem), file)
            if other != file:
                raise RequestError(
                    f"{file}: image {int(file.stem)} exists twice, also as {other.name}; keep one"
                )
    homographies.pop(1, None)  # some data sets have H_1_1, the identity
    # each image but the first needs a homography, and each homography an image
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

    Its numbers are separated by blanks, commas or semicolons, with or without brackets. Raises
    RequestError unless it is an invertible 3x3 matrix.
    """
    wrong = f"{path}: not a homography"
    # also the forms of NumPy, MATLAB and CSV
    words = re.sub(r"[][,;]", " ", " ".join(line for _, line in read_lines(path))).split()
    try:
        numbers = list(map(float, words))
    except ValueError as error:
        raise RequestError(f"{wrong}: {error}") from None
    if len(numbers) != 9:
        raise RequestError(f"{wrong}: expected 3 rows of 3 numbers, found {len(numbers)}")
    H = np.array(numbers).reshape(3, 3)
    # in thousands of pixels the entries have similar magnitudes
    units = np.diag([1000.0, 1000.0, 1.0])
    if not np.isfinite(H).all() or np.linalg.matrix_rank(np.linalg.inv(units) @ H @ units) < 3:
        raise RequestError(f"{wrong}: the matrix cannot be inverted")
    return H


def read_pairs(path: Path) -> List[Tuple[str, str, Pose]]:
    """Read the pairs of a `pairs_with_gt.txt`. Raises RequestError that names the wrong line."""
    pairs = []
    for number, line in read_lines(path):
        where = f"--poses {path} line {number}"
        words = line.split()
        if len(words) != 2 + NUMBERS:
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
        # the words after the two rotations, row by row
        K0, K1 = values[2:20].reshape(2, 3, 3)
        T = values[20:].reshape(4, 4)
        R = T[:3, :3]
        is_rotation = np.allclose(R @ R.T, np.eye(3), atol=1e-3) and np.linalg.det(R) > 0
        if not is_rotation or min(K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]) <= 0:
            raise RequestError(
                f"{where}: T_0to1 must contain a rotation, and focal lengths must be positive"
            )
        pairs.append((words[0], words[1], Pose(K0, K1, T)))
    if not pairs:
        raise RequestError(f"--poses {path}: contains no pair")
    return pairs


def scene_names(pairs: List[Tuple[str, str]]) -> List[str]:
    """Return the name of the scene of each pair of images.

    Pairs that share images, directly or through other pairs, are one scene. If there are several
    folders, the pairs of one folder are one scene, too. A scene has the name of that folder, or of
    the first of its images.
    """
    folders = {name: str(Path(name).parent) for pair in pairs for name in pair}
    several = len(set(folders.values())) > 1
    # Names that belong together, by a pair or by a folder, get one root (union-find).
    links = [*pairs, *(folders.items() if several else ())]
    roots = {name: name for link in links for name in link}

    def root(name: str) -> str:
        while roots[name] != name:
            name = roots[name]
        return name

    for first, second in links:
        roots[root(second)] = root(first)
    # the first pair of each scene gives it its name
    starts: Dict[str, str] = {}
    return [
        starts.setdefault(root(first), folders[first] if several else first) for first, _ in pairs
    ]
