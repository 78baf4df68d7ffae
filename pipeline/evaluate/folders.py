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
from typing import Dict, List, Optional, Sequence, Tuple

import cv2
import numpy as np
from scipy.sparse.csgraph import connected_components

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

MAX_SIDE = 16_000  # pixels: SIFT doubles an image, and OpenCV's remap takes less than 32,767
REFERENCE = 1  # the image that homographies map from
NUMBERS = 2 + 9 + 9 + 16  # how many numbers follow the two names on a line of pairs with cameras

# A sequence: its name, its images by number, and a homography file for each number but the first
Sequences = List[Tuple[str, Dict[int, Path], Dict[int, Path]]]


class HPatchesPairs(Source):
    """Pairs (1, k) of every sequence below a folder.

    Images and homographies are resized to a shorter side of `short_side` pixels (480 in the
    protocol of LightGlue and glue-factory). 0 keeps their size. Raises RequestError for a wrong
    file.
    """

    unit = "sequences"

    def __init__(self, folder: Path, short_side: int = 480):
        self.short_side = short_side
        self.sequences = find_sequences(folder)
        self.scenes = [(name, len(files)) for name, _, files in self.sequences]
        for _, _, files in self.sequences:
            for file in files.values():
                read_homography(file)  # report a wrong file before the work begins

    def load(self, index: int) -> Scene:
        """Read one sequence.

        Raises RequestError for an unreadable image, so that no pair is skipped silently.
        """
        name, images, files = self.sequences[index]
        read = {
            number: read_resized(path, self.short_side) for number, path in sorted(images.items())
        }
        numbers = list(read)
        pairs = []
        for number, file in sorted(files.items()):
            # the homography between the resized images
            scaled = compose(read[number][1], read_homography(file), inverse(read[REFERENCE][1]))
            ends = numbers.index(REFERENCE), numbers.index(number)
            pairs.append((f"{name}/{REFERENCE}-{number}", *ends, scaled))
        return [image for image, _ in read.values()], pairs

    def in_color(self, index: int, image: int, gray: np.ndarray) -> np.ndarray:
        return in_color(sorted(self.sequences[index][1].items())[image][1], gray)


class PosePairs(Source):
    """Pairs of a `pairs_with_gt.txt`, with their scenes from `scene_names`.

    `short_side` is as in `HPatchesPairs`.
    """

    def __init__(self, file: Path, folder: Path, short_side: int = 480):
        self.pairs = read_pairs(file)
        self.folder = folder
        self.short_side = short_side
        self.scenes = [(name, 1) for name in scene_names([pair[:2] for pair in self.pairs])]

    def load(self, index: int) -> Scene:
        """Read one pair. Raises RequestError for an unreadable image."""
        name0, name1, pose = self.pairs[index]
        images = []
        intrinsics = []
        for name, K in ((name0, pose.K0), (name1, pose.K1)):
            image, scaling = read_resized(self.file_of(name), self.short_side)
            images.append(image)
            intrinsics.append(scaling @ K)
        truth = Pose(intrinsics[0], intrinsics[1], pose.T_0to1)
        return images, [(f"{name0} {name1}", 0, 1, truth)]

    def in_color(self, index: int, image: int, gray: np.ndarray) -> np.ndarray:
        name0, name1, _ = self.pairs[index]
        return in_color(self.file_of((name0, name1)[image]), gray)

    def file_of(self, name: str) -> Path:
        """Return the file of an image, whose name may be spelled as on another system."""
        return self.folder / (spelled_as_file(self.folder, name) or name)


def read_resized(path: Path, short_side: int) -> Tuple[np.ndarray, np.ndarray]:
    """Read a gray image and resize it.

    Returns the image, (H, W) uint8, and a matrix (3, 3) that maps pixels of the file to pixels of
    the image. Raises RequestError if the file cannot be read.
    """
    try:
        original = read_gray(path)
    except BadImage as error:  # an evaluation that the user asked for leaves nothing out
        raise RequestError(str(error)) from None
    image = resize_short_side(original, short_side, path)
    return image, resizing(image_size(original), image_size(image))


def in_color(path: Path, gray: np.ndarray) -> np.ndarray:
    """Read an image in colour, (H, W, 3) BGR, in the size of `gray`."""
    photograph = decode_color(path.read_bytes(), path.name)
    return cv2.resize(photograph, image_size(gray), interpolation=cv2.INTER_AREA)


def resize_short_side(image: np.ndarray, short_side: int, path: Path) -> np.ndarray:
    """Resize to a shorter side of `short_side` pixels. 0 keeps the size.

    Raises RequestError if a side is longer than `MAX_SIDE` then.
    """
    scale = short_side / min(image.shape) if short_side else 1.0
    size = image_size(image)
    if max(size) * scale > MAX_SIDE:
        raise RequestError(
            f"{path}: {size[0]}x{size[1]} pixels, at --resize {short_side} {max(size) * scale:.0f}"
            f" along the longer side; at most {MAX_SIDE} are possible"
        )
    if scale == 1.0:
        return image
    wanted = [max(1, round(side * short_side / min(size))) for side in size]
    method = cv2.INTER_AREA if scale < 1.0 else cv2.INTER_LINEAR
    return cv2.resize(image, wanted, interpolation=method)


def find_sequences(folder: Path) -> Sequences:
    """List the sequences in `folder` and in folders below it, sorted by name.

    Raises RequestError if there is none, or if a sequence lacks a file.
    """
    if not folder.is_dir():
        raise RequestError(f"--pairs {folder}: no such folder")
    folders = sorted(place for place, _ in walk_folders(folder))
    sequences = list(filter(None, (read_sequence(path, folder) for path in folders)))
    if not sequences:
        raise RequestError(
            f"--pairs {folder}: no sequence found; expected folders with images 1.png, 2.png, ... "
            "(or ppm, jpg) and homographies H_1_2, H_1_3, ..."
        )
    return sequences


def read_sequence(path: Path, root: Path) -> Optional[Tuple[str, Dict[int, Path], Dict[int, Path]]]:
    """Read the sequence in `path`. Return its name, images and homography files by number.

    Returns None for a folder without homographies and image 1. Raises RequestError if a file is
    missing.
    """
    images: Dict[int, Path] = {}
    homographies: Dict[int, Path] = {}
    # collect what the folder has, by number
    for file in sorted(path.iterdir()):
        match = re.fullmatch(r"H_1_(\d+)(\.txt)?", file.name)
        if match and int(match[1]) != REFERENCE:
            homographies[int(match[1])] = file
        elif file.stem.isdecimal() and file.suffix.lower() in EXTENSIONS:
            other = images.setdefault(int(file.stem), file)
            if other != file:
                raise RequestError(
                    f"{file}: image {int(file.stem)} exists twice, also as {other.name}; keep one"
                )
    # then check that each image but the first has a homography, and each homography an image
    if REFERENCE not in images:
        if not homographies:
            return None
        raise RequestError(f"{path}: homographies but no image 1 (1.png, 1.ppm, 1.jpg, ...)")
    for number in sorted(set(images) - {REFERENCE} - set(homographies)):
        raise RequestError(f"{images[number]}: no homography H_1_{number} next to it")
    for number in sorted(set(homographies) - set(images)):
        file = homographies[number]
        raise RequestError(f"{file}: no image {number}.png (or ppm, jpg) next to it")
    if len(images) < 2:
        raise RequestError(f"{path}: only image 1; expected 2.png with H_1_2 at least")
    name = path.relative_to(root).as_posix()
    return (path.resolve().name if name == "." else name), images, homographies


def read_homography(path: Path) -> np.ndarray:
    """Read a homography, (3, 3) float64, from a text file.

    Its numbers are separated by blanks, commas or semicolons, with or without brackets. Raises
    RequestError unless it is an invertible 3x3 matrix.
    """
    wrong = f"{path}: not a homography"
    numbers: List[float] = []
    for number, line in read_lines(path):
        try:
            numbers += map(float, re.sub(r"[][,;]", " ", line).split())
        except ValueError as error:
            raise RequestError(f"{wrong}: line {number}: {error}") from None
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
    pairs = [
        read_line(f"--poses {path} line {number}", line.split())
        for number, line in read_lines(path)
    ]
    if not pairs:
        raise RequestError(f"--poses {path}: contains no pair")
    return pairs


def read_line(where: str, words: Sequence[str]) -> Tuple[str, str, Pose]:
    """Read the words of one line. Raises RequestError if they are not two names and 36 numbers."""
    if len(words) != 2 + NUMBERS:
        raise RequestError(
            f"{where}: {len(words)} words; must be 38: two names without blanks, two rotations, K0,"
            " K1, T_0to1"
        )
    try:
        values = np.array(words[2:], np.float64)
    except ValueError as error:
        raise RequestError(f"{where}: {error}") from None
    if values[:2].any():
        raise RequestError(
            f"{where}: EXIF rotation {words[2]} {words[3]}: rotate the images first and write 0 0"
        )
    # the words after the two rotations, row by row
    K0 = values[2:11].reshape(3, 3)
    K1 = values[11:20].reshape(3, 3)
    T = values[20:].reshape(4, 4)
    R = T[:3, :3]
    is_rotation = np.allclose(R @ R.T, np.eye(3), atol=1e-3) and np.linalg.det(R) > 0
    if not np.isfinite(values).all() or not is_rotation:
        raise RequestError(f"{where}: T_0to1 does not contain a rotation")
    if min(K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]) <= 0:
        raise RequestError(f"{where}: focal lengths must be positive")
    return words[0], words[1], Pose(K0, K1, T)


def scene_names(pairs: Sequence[Sequence[str]]) -> List[str]:
    """Return the name of the scene of each pair of images.

    Pairs that share images, directly or through other pairs, are one scene. If there are several
    folders, the pairs of one folder are one scene, too. A scene has the name of that folder, or of
    the first of its images.
    """
    folders = {name: str(Path(name).parent) for pair in pairs for name in pair}
    several = len(set(folders.values())) > 1
    links = [*pairs, *(folders.items() if several else ())]
    names, ends = np.unique(np.array(links, str), return_inverse=True)
    firsts, seconds = ends.reshape(-1, 2).T
    # (images, images): which names belong together, by a pair or by a folder
    graph = np.zeros((len(names), len(names)), bool)
    graph[firsts, seconds] = True
    _, labels = connected_components(graph, directed=False)
    scenes = labels[firsts[: len(pairs)]]
    starts: Dict[int, str] = {}
    for scene, (first, _) in zip(scenes, pairs):
        starts.setdefault(scene, folders[first] if several else first)
    return [starts[scene] for scene in scenes]
