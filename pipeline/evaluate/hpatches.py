"""Folders in HPatches layout: sequences with images `1.png, 2.png, ...` and homographies `H_1_2,
H_1_3, ...`.

`H_1_k` is a text file of three rows of three numbers that maps pixels of image 1 to pixels of image
k (Balntas et al., "HPatches", CVPR 2017).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional

import cv2
import numpy as np

from pipeline.errors import RequestError
from pipeline.evaluate.inputs import Scene, Source, ViewPair, image_size
from superglue_sift.geometry import compose, inverse, resizing
from superglue_sift.images import EXTENSIONS, decode_color, read_gray

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
        if short_side < 0:
            raise RequestError(
                f"--resize {short_side}: must be 0 (leave as they are) or a side in pixels"
            )
        self.short_side = short_side
        self.sequences = find_sequences(Path(folder))
        self.scenes = [(sequence.name, len(sequence.homographies)) for sequence in self.sequences]
        for sequence in self.sequences:
            for file in sequence.homographies.values():
                read_homography(file)  # report a wrong file before the work begins

    def load(self, index: int) -> Scene:
        """Read one sequence. Raises RequestError for an unreadable image: no pair is skipped
        silently.
        """
        sequence = self.sequences[index]
        # by number; (3, 3) original pixels to resized ones
        images = {}
        scalings = {}
        for number, path in sorted(sequence.images.items()):
            original = read_gray(path)
            images[number] = resize_short_side(original, self.short_side, path)
            scalings[number] = resizing(image_size(original), image_size(images[number]))
        pairs = []
        numbers = list(images)
        for number in numbers:
            if number == REFERENCE:
                continue
            H_given = read_homography(sequence.homographies[number])
            H_0to1 = compose(scalings[number], H_given, inverse(scalings[REFERENCE]))
            name = f"{sequence.name}/{REFERENCE}-{number}"
            first = numbers.index(REFERENCE)
            second = numbers.index(number)
            pairs.append(ViewPair(name, first, second, H_0to1))
        return Scene(sequence.name, list(images.values()), pairs)

    def in_color(self, index: int, image: int, gray: np.ndarray) -> np.ndarray:
        return in_color(sorted(self.sequences[index].images.items())[image][1], gray)


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
        if match:
            homographies[int(match.group(1))] = file
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
        raise RequestError(
            f"{homographies[number]}: no image {number}.png (or ppm, jpg) next to it"
        )
    if len(images) < 2:
        raise RequestError(f"{path}: only image 1; expected 2.png with H_1_2 at least")
    name = path.relative_to(root).as_posix()
    return Sequence(path.resolve().name if name == "." else name, images, homographies)


def read_homography(path: Path) -> np.ndarray:
    """(3, 3) float64 from a text file. Raises RequestError unless it is an invertible 3x3
    matrix.
    """
    try:
        H = np.array(
            [line.split() for line in path.read_text().splitlines() if line.strip()], np.float64
        )
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: not a homography: {error}") from error
    if H.shape != (3, 3):
        raise RequestError(
            f"{path}: not a homography: expected 3 rows of 3 numbers, found {H.shape}"
        )
    units = np.diag([1000.0, 1000.0, 1.0])  # thousands of pixels: entries of similar magnitude
    if not np.isfinite(H).all() or np.linalg.matrix_rank(np.linalg.inv(units) @ H @ units) < 3:
        raise RequestError(f"{path}: not a homography: the matrix cannot be inverted")
    return H


def resize_short_side(image: np.ndarray, short_side: int, path: Path) -> np.ndarray:
    """Resize to a shorter side of `short_side` pixels, 0: unchanged. Raises RequestError beyond
    `MAX_SIDE`.
    """
    shorter = min(image.shape)
    longer = max(image.shape)
    scale = short_side / shorter if short_side else 1.0
    if longer * scale > MAX_SIDE:
        now = "x".join(map(str, image_size(image)))
        raise RequestError(
            f"{path}: {now} pixels, at --resize {short_side} {longer * scale:.0f} along the longer"
            f" side; at most {MAX_SIDE} are possible"
        )
    if scale == 1.0:
        return image
    wanted = [max(1, round(side * short_side / shorter)) for side in image_size(image)]
    return cv2.resize(
        image, wanted, interpolation=cv2.INTER_AREA if scale < 1.0 else cv2.INTER_LINEAR
    )
