"""Name the photographs of a command, and choose the pairs that are matched.

Photographs that look alike are found by VLAD of their SIFT descriptors (Jegou et al. 2010). The
vocabulary comes from OpenCV's k-means of RootSIFT of all images. The vector of an image sums the
offsets of its descriptors from their words. It is normalized by word and as a whole (Arandjelovic
and Zisserman 2013), and images are compared by cosine.
"""

from __future__ import annotations

import collections
import csv
import itertools
import os
import re
from pathlib import Path
from typing import Any, Callable, Iterable, List, Optional, Sequence, Tuple

import cv2
import numpy as np

from superglue_sift.apps.store import PhotoFile
from superglue_sift.errors import RequestError, check_range
from superglue_sift.features.descriptors import to_root_sift
from superglue_sift.features.features import Features
from superglue_sift.files import FileName, find_spelling, read_lines
from superglue_sift.matcher import split_batches

PICTURE_ENDING = "matches.jpg"  # ending of pictures of matches, which are no photographs
MAX_EXHAUSTIVE = 200  # maximum number of images of which all pairs, 19,900, match by default
IMAGES_PER_BLOCK = 16  # half of the images whose pixels stay in memory
DEFAULT_NEIGHBORS = {"sequential": 5, "nearest": 20}  # default number of others for each image
AUTO = "auto"
EXHAUSTIVE = "exhaustive"
PAIRINGS = (AUTO, EXHAUSTIVE, *DEFAULT_NEIGHBORS)
VOCABULARY_SIZE = 64  # words
SAMPLED_DESCRIPTORS = 20_000  # for the vocabulary, equally many of each image

PhotoPair = Tuple[PhotoFile, PhotoFile]

# --- names of photographs


def name_images(paths: Iterable[FileName], root: FileName) -> List[PhotoFile]:
    """Name the files to match by their paths below `root`.

    Args:
        paths: the files. A file that is named twice counts once.
        root: their folder.
    """
    by_path = {Path(os.path.abspath(path)): Path(path) for path in paths}  # A file counts once.
    named = name_photos(list(by_path), Path(os.path.abspath(root)))
    return [photo._replace(path=by_path[photo.path]) for photo in named]


def name_photos(paths: Sequence[Path], root: Path) -> List[PhotoFile]:
    """Name photographs by their paths below `root`.

    Names have no extension if the name A_B of every pair stays unique without it.

    Args:
        paths: the photographs.
        root: their folder. All paths are absolute, or all are relative to one folder.

    Raises:
        RequestError: If two results would have one name.
    """
    inside = [path.relative_to(root) if root in path.parents else path for path in paths]
    # A file that is not below `root` is named by its whole path, without "/", ".." and the drive.
    whole = [
        "-".join(part for part in path.parts if part not in (path.anchor, "..")) for path in inside
    ]
    plain = [name.rpartition(".")[0] or name for name in whole]
    # Windows and macOS do not distinguish A and a. If there are images a and a_b, then a_b_c could
    # be the pair of a with b_c, or of a_b with c.
    folded_names = {name.casefold() for name in plain}
    is_unique = len(folded_names) == len(plain) and not any(
        name[: separator.start()].casefold() in folded_names
        for name in plain
        for separator in re.finditer("_", name)
    )
    names = plain if is_unique else whole
    for name, count in collections.Counter(names).items():
        if count > 1:
            raise RequestError(
                f"{name}: the results of two images would have this name; rename one"
            )
    return [PhotoFile(name, path) for name, path in zip(names, paths)]


# --- pairs that the caller names


def name_pairs(pairs: Iterable[Tuple[FileName, FileName]], root: Path) -> List[PhotoPair]:
    """Name the photographs of pairs of files below `root`.

    A name without a file stays as it is, and is reported as a bad image.

    Returns:
        Each pair once, in order. Pairs of a photograph with itself are left out.
    """

    def resolve(name: FileName) -> Path:
        return Path(os.path.normpath(root / (find_spelling(root, str(name)) or name)))

    unique = dict.fromkeys((resolve(name0), resolve(name1)) for name0, name1 in pairs)
    paths = list(dict.fromkeys(itertools.chain.from_iterable(unique)))
    photos = dict(zip(paths, name_photos(paths, root)))
    return [(photos[path0], photos[path1]) for path0, path1 in unique if path0 != path1]


def read_pair_list(file: Path, root: Path) -> List[PhotoPair]:
    """Read pairs from a text file with `a b` in each line.

    Names with spaces stand in double quotes, or have a tab between them. Lines that start with `#`
    are ignored. Numbers after the names are ignored, too. In SuperGlue's lists they are two
    rotations, two camera matrices and a pose.

    Args:
        file: the text file.
        root: folder of the images, below which they are named.

    Returns:
        Each pair once, in order (`name_pairs`).

    Raises:
        RequestError: If the file cannot be read, or a line has not two names.
    """
    pairs = []
    for number, line in read_lines(file):
        names = _parse_names(line)
        if len(names) != 2:
            fix = "put names with spaces in double quotes, or a tab between the two"
            raise RequestError(f"{file}:{number}: needs two names, has {line!r:.80}; {fix}")
        pairs.append((names[0], names[1]))
    return name_pairs(pairs, root)


def _parse_names(line: str) -> List[str]:
    """Return the names in a line, without numbers that follow the first two names.

    Names have tabs between them. In a line without tabs they have spaces between them, and a name
    with spaces is quoted.
    """
    delimiter = "\t" if "\t" in line else " "
    words = next(csv.reader([line], delimiter=delimiter, skipinitialspace=True))
    words = [word.strip() for word in words if word.strip()]
    return words[:2] if re.fullmatch(r"[-+.\de ]*", " ".join(words[2:])) else words


# --- all pairs, or some for each photograph


def choose_pairs(
    photos: Sequence[PhotoFile],
    features_of: Callable[[PhotoFile], Features],
    pairing: str = AUTO,
    k: Optional[int] = None,
) -> List[PhotoPair]:
    """Choose pairs of photographs.

    Args:
        photos: the photographs.
        features_of: returns the features of a photograph, which must be SIFT. Only "nearest" calls
            it.
        pairing: "exhaustive" for all pairs, "sequential" or "nearest" for each photograph with the
            `k` before it or with the `k` most similar ones, or "auto" (`resolve_pairing`).
        k: number of photographs that each is paired with. If None, it is that of
            DEFAULT_NEIGHBORS.
    """
    count = len(photos)
    pairing = resolve_pairing(pairing, k, count)
    if pairing == EXHAUSTIVE:
        return make_exhaustive_pairs(photos)
    k = k or DEFAULT_NEIGHBORS[pairing]
    if pairing == "sequential":
        indices = [(i, j) for j in range(count) for i in range(max(0, j - k), j)]
    else:
        indices = find_nearest_pairs(photos, lambda photo: features_of(photo).descriptors[:, 0], k)
    return [(photos[i], photos[j]) for i, j in indices]


def check_pairing(pairing: str, k: Optional[int]) -> None:
    """Raise RequestError for a pairing that does not exist, or a number below 1."""
    if pairing not in PAIRINGS:
        raise RequestError(f"--pairing {pairing}: must be {', '.join(PAIRINGS)}")
    if k is not None:
        check_range("--k", k, 1)


def resolve_pairing(pairing: str, k: Optional[int], count: int) -> str:
    """Replace "auto" by the pairing that it stands for. Other pairings are returned as they are.

    Args:
        pairing: one of PAIRINGS.
        k: with it, "auto" stands for "nearest".
        count: number of photographs. For more than MAX_EXHAUSTIVE, "auto" stands for "nearest", and
            otherwise for "exhaustive".
    """
    if pairing != AUTO:
        return pairing
    return "nearest" if k or count > MAX_EXHAUSTIVE else EXHAUSTIVE


def make_exhaustive_pairs(photos: Sequence[PhotoFile]) -> List[PhotoPair]:
    """Return all pairs of photographs, in blocks, so that few images must be read again."""
    blocks = list(split_batches(photos, IMAGES_PER_BLOCK))
    pairs: List[PhotoPair] = []
    for number, block in enumerate(blocks):
        pairs.extend(itertools.combinations(block, 2))
        for later_block in blocks[number + 1 :]:
            pairs.extend(itertools.product(block, later_block))
    return pairs


def find_nearest_pairs(
    images: Sequence[Any], descriptors: Callable[[Any], np.ndarray], k: int
) -> List[Tuple[int, int]]:
    """Pair each image with the k images that are most similar to it.

    Args:
        images: the images.
        descriptors: returns SIFT (n, 128) uint8 of an image. It is called twice for each image, so
            that the descriptors of only one image are in memory.
        k: number of images that each is paired with, at least 1.

    Returns:
        The indices (i, j) of the images of each pair, with i < j, sorted and unique.
    """
    if len(images) < 2:
        return []
    samples = []
    for image in images:
        rows = descriptors(image)
        count = min(SAMPLED_DESCRIPTORS // len(images) + 1, len(rows))
        samples.append(to_root_sift(rows[np.linspace(0, len(rows) - 1, count).astype(int)]))
    words = make_vocabulary(samples)
    vectors = np.stack([compute_vlad(to_root_sift(descriptors(image)), words) for image in images])
    pairs = set()
    for i, vector in enumerate(vectors):
        similarity = vectors @ vector
        # An image is most similar to itself, and makes no pair with itself.
        similarity[i] = -np.inf
        for j in np.argsort(-similarity, kind="stable")[: min(k, len(images) - 1)]:
            pairs.add((min(i, int(j)), max(i, int(j))))
    return sorted(pairs)


def make_vocabulary(samples: Sequence[np.ndarray]) -> np.ndarray:
    """Cluster descriptors into words.

    Equal descriptors give equal words.

    Args:
        samples: RootSIFT (n, 128) float32 of each image.

    Returns:
        At most 64 words (W, 128) float32.
    """
    descriptors = np.concatenate(samples)
    if len(descriptors) <= VOCABULARY_SIZE:
        return descriptors
    # k-means begins with random centers, which are the same in each run.
    cv2.setRNGSeed(0)
    criteria = (cv2.TERM_CRITERIA_EPS + cv2.TERM_CRITERIA_MAX_ITER, 30, 1e-4)
    no_labels: Any = None
    return cv2.kmeans(descriptors, VOCABULARY_SIZE, no_labels, criteria, 1, cv2.KMEANS_PP_CENTERS)[
        2
    ]


def compute_vlad(descriptors: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Compute the VLAD vector of an image.

    Args:
        descriptors: RootSIFT (n, 128) of the image.
        words: the vocabulary, (W, 128).

    Returns:
        (W * 128,) float32 of unit length, or zeros for an image without keypoints.
    """
    sums = np.zeros_like(words)
    if len(descriptors) and len(words):
        # The nearest word of each descriptor, (n,), by |d - w|^2 = |d|^2 - 2 d w + |w|^2
        nearest = np.argmax(descriptors @ words.T - (words**2).sum(1) / 2, axis=1)
        np.add.at(sums, nearest, descriptors - words[nearest])
    # Normalize by word, so that a repeated pattern does not outweigh the rest, then as a whole.
    sums /= np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    return sums.ravel() / max(float(np.linalg.norm(sums)), 1e-12)
