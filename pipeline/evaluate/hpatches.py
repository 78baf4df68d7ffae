"""Folders in HPatches layout: sequences with images `1.png, 2.png, ...` and homographies `H_1_2,
H_1_3, ...`.

`H_1_k` is a text file of three rows of three numbers that maps pixels of image 1 to pixels of image
k (Balntas et al., "HPatches", CVPR 2017).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import cv2
import numpy as np

from pipeline.errors import RequestError
from pipeline.evaluate.inputs import Scene, Source, ViewPair, image_size
from superglue_sift.features.images import EXTENSIONS, BadImage, decode_color, read_gray
from superglue_sift.geometry.two_view import compose, inverse, resizing

MAX_SIDE = 16_000  # pixels: SIFT doubles an image, and OpenCV's remap takes less than 32,767
REFERENCE = 1  # the image that homographies map from


@dataclass(frozen=True)
class Sequence:
    """One sequence: its images by number, and the homography file of each number but the first."""

    name: str
    images: Dict[int, Path]
    homographies: Dict[int, Path]


class HPatchesPairs(Source):
    """Pairs (1, k) of every sequence below a folder.

    short_side: images are resized to this shorter side in pixels, and homographies with them (480
    in the protocol of LightGlue and glue-factory); 0 keeps their size.
    """

    unit = "sequences"

    def __init__(self, folder: Path, short_side: int = 480):
        self.short_side = short_side
        self.sequences = find_sequences(folder)
        self.scenes = [(sequence.name, len(sequence.homographies)) for sequence in self.sequences]
        for sequence in self.sequences:
            for file in sequence.homographies.values():
                read_homography(file)  # report a wrong file before the work begins

    def load(self, index: int) -> Scene:
        """Read one sequence. Raises RequestError for an unreadable image: no pair is skipped
        silently.
        """
        sequence = self.sequences[index]
        paths = sorted(sequence.images.items())
        read = {number: read_resized(path, self.short_side) for number, path in paths}
        numbers = list(read)
        first = numbers.index(REFERENCE)
        pairs = []
        for number, file in sorted(sequence.homographies.items()):
            scaled = compose(read[number][1], read_homography(file), inverse(read[REFERENCE][1]))
            name = f"{sequence.name}/{REFERENCE}-{number}"
            pairs.append(ViewPair(name, first, numbers.index(number), scaled))
        return Scene(sequence.name, [image for image, _ in read.values()], pairs)

    def in_color(self, index: int, image: int, gray: np.ndarray) -> np.ndarray:
        return in_color(sorted(self.sequences[index].images.items())[image][1], gray)


def read_resized(path: Path, short_side: int) -> Tuple[np.ndarray, np.ndarray]:
    """A gray image, (H, W) uint8, and (3, 3) from pixels of the file. Raises RequestError."""
    try:
        original = read_gray(path)
    except BadImage as error:  # the request is wrong: nothing of it is left out
        raise RequestError(str(error)) from None
    image = resize_short_side(original, short_side, path)
    return image, resizing(image_size(original), image_size(image))


def in_color(path: Path, gray: np.ndarray) -> np.ndarray:
    """The image of a file in colour, (H, W, 3) BGR, of the size of `gray`."""
    photograph = decode_color(path.read_bytes(), path.name)
    return cv2.resize(photograph, image_size(gray), interpolation=cv2.INTER_AREA)


def find_sequences(folder: Path) -> List[Sequence]:
    """Sequences in `folder`, nested, sorted by name. Raises RequestError without any, or for one
    that lacks a file.
    """
    if not folder.is_dir():
        raise RequestError(f"--pairs {folder}: no such folder")
    folders = [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]
    sequences = list(filter(None, (read_sequence(path, folder) for path in folders)))
    if not sequences:
        raise RequestError(
            f"--pairs {folder}: no sequence found; expected folders with images 1.png, 2.png, ... "
            "(or ppm, jpg) and homographies H_1_2, H_1_3, ..."
        )
    return sequences


def read_sequence(path: Path, root: Path) -> Optional[Sequence]:
    """The sequence in `path`, or None for a folder without homographies and image 1."""
    images: Dict[int, Path] = {}
    homographies: Dict[int, Path] = {}
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
    return Sequence(path.resolve().name if name == "." else name, images, homographies)


def read_homography(path: Path) -> np.ndarray:
    """(3, 3) float64 from a text file. Raises RequestError unless it is an invertible 3x3
    matrix.
    """
    try:
        H = np.array(path.read_text().split(), np.float64)
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: not a homography: {error}") from error
    if H.size != 9:
        raise RequestError(
            f"{path}: not a homography: expected 3 rows of 3 numbers, found {H.size}"
        )
    H = H.reshape(3, 3)
    units = np.diag([1000.0, 1000.0, 1.0])  # thousands of pixels: entries of similar magnitude
    if not np.isfinite(H).all() or np.linalg.matrix_rank(np.linalg.inv(units) @ H @ units) < 3:
        raise RequestError(f"{path}: not a homography: the matrix cannot be inverted")
    return H


def resize_short_side(image: np.ndarray, short_side: int, path: Path) -> np.ndarray:
    """Resize to a shorter side of `short_side` pixels, 0: unchanged. Raises RequestError beyond
    `MAX_SIDE`.
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
