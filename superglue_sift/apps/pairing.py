"""Name the photographs of a command, and choose the pairs that are matched.

Photographs that look alike are found by VLAD of their SIFT descriptors (Jegou et al. 2010). The
vocabulary comes from OpenCV's k-means of RootSIFT of all images. The vector of an image sums the
offsets of its descriptors from their words. It is normalised by word and as a whole (Arandjelovic
and Zisserman 2013), and images are compared by cosine.
"""

from __future__ import annotations

import argparse
import collections
import csv
import itertools
import os
import re
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import cv2
import numpy as np

from superglue_sift.errors import RequestError
from superglue_sift.features.features import Features
from superglue_sift.features.images import list_photos
from superglue_sift.features.sift import root_sift_of
from superglue_sift.features.store import Item
from superglue_sift.files import read_lines, spelled_as_file
from superglue_sift.matcher import groups

# Values of `args.source`, which says what is matched
TWO = "two images"
FILES = "more than two images"
FOLDER = "a folder"
LIST = "--pairs"
PAGE = "--serve"
DATABASE = "--colmap of an existing database"

PICTURE = "matches.jpg"  # ending of pictures of matches, which are no photographs
MAX_EXHAUSTIVE = 200  # all pairs of so many images, 19,900, are matched by default
BLOCK = 16  # number of images of a block, half of those whose pixels stay in memory
NEIGHBOURS = {"sequential": 5, "nearest": 20}  # default number of others for each image
WORDS = 64
SAMPLE = 20_000  # number of descriptors for the vocabulary, equally many of each image

ItemPair = Tuple[Item, Item]

# --- the images of a command, and their names


def root_of(args: argparse.Namespace) -> Path:
    """Return the folder below which images are named.

    It is the folder of the command or of its list, or the one that holds all its files.
    """
    if args.source == LIST:
        return args.root or args.pairs.parent
    if args.source == FOLDER:
        return args.inputs[0]
    return Path(os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in args.inputs]))


def named_inputs(args: argparse.Namespace) -> List[Item]:
    """Return the images of a folder, or those of the command line, without pictures of matches.

    Raises RequestError if there are fewer than two.
    """
    root = root_of(args)
    # The shell has listed the files, or the folder is searched.
    paths = list_photos(root) if args.source == FOLDER else args.inputs
    # An earlier command may have written pictures of matches into the folder.
    kept = [path for path in paths if not path.name.endswith(f"_{PICTURE}")]
    given = {Path(os.path.abspath(path)): path for path in kept}  # a file named twice counts once
    if len(given) < 2:
        count = "no image" if not given else "only one image"
        reason = f"{count} to match, two or more are needed (*_{PICTURE} does not count)"
        raise RequestError(f"{args.inputs[0]}: {reason}")
    items = name_photos(list(given), Path(os.path.abspath(root)))
    return [item._replace(image=given[item.image]) for item in items]


def name_photos(paths: Sequence[Path], root: Path) -> List[Item]:
    """Name photographs by their path below `root`, without extension if every A_B stays unique.

    Raises RequestError if two results would have one name.
    """
    inside = [path.relative_to(root) if root in path.parents else path for path in paths]
    # A file elsewhere is named by its whole path, without "/", ".." and the drive.
    whole = [
        "-".join(part for part in path.parts if part not in (path.anchor, "..")) for path in inside
    ]
    plain = [name.rpartition(".")[0] or name for name in whole]
    # A and a are one file name on Windows and macOS. If there are images a and a_b, then a_b_c
    # could be the pair of a with b_c, or of a_b with c.
    taken = {name.casefold() for name in plain}
    clear = len(taken) == len(plain) and not any(
        name[: found.start()].casefold() in taken
        for name in plain
        for found in re.finditer("_", name)
    )
    names = plain if clear else whole
    for name, count in collections.Counter(names).items():
        if count > 1:
            raise RequestError(
                f"{name}: the results of two images would have this name; rename one"
            )
    return [Item(name, path) for name, path in zip(names, paths)]


def listed_pairs(file: Path, root: Path) -> List[ItemPair]:
    """Read pairs from a text file, `a b` in each line, which name images below `root`.

    Names with spaces stand in double quotes, or have a tab between them. Lines that start with `#`
    are ignored. Numbers after the names are ignored, too: in SuperGlue's lists, they are two
    rotations, two camera matrices and a pose. Raises RequestError for an unreadable file or a line
    without two names.
    """
    pairs: Dict[Tuple[Path, Path], None] = {}  # keeps each pair once, in the list's order
    for number, line in read_lines(file):
        words = _names(line)
        if len(words) != 2:
            fix = "put names with spaces in double quotes, or a tab between the two"
            raise RequestError(f"{file}:{number}: needs two names, has {line!r:.80}; {fix}")
        # A name that is not found stays as it is, and is reported as a bad image.
        spelled = (spelled_as_file(root, word) or word for word in words)
        path0, path1 = (Path(os.path.normpath(root / name)) for name in spelled)
        if path0 == path1:
            raise RequestError(f"{file}:{number}: {words[0]} with itself; name two images")
        pairs[path0, path1] = None
    if not pairs:
        raise RequestError(f"{file}: has no pairs; a line is `a.jpg b.jpg`")
    paths = list(dict.fromkeys(itertools.chain.from_iterable(pairs)))
    photo = dict(zip(paths, name_photos(paths, root)))
    return [(photo[a], photo[b]) for a, b in pairs]


def _names(line: str) -> List[str]:
    """Return the names in a line. Numbers that follow the first two names are left out.

    If the line has tabs, they separate the names. Otherwise spaces do, and a name with spaces is
    quoted.
    """
    between = "\t" if "\t" in line else " "
    try:
        words = next(csv.reader([line], delimiter=between, skipinitialspace=True))
    except csv.Error:  # a line that is too long
        return []
    words = [word.strip() for word in words if word.strip()]
    return words[:2] if re.fullmatch(r"[-+.\de ]*", " ".join(words[2:])) else words


# --- which pairs are matched


def choose_pairs(
    photos: Sequence[Item],
    features_of: Callable[[Item], Features],
    pairing: Optional[str] = None,
    k: Optional[int] = None,
) -> Tuple[Iterable[ItemPair], int]:
    """Choose pairs of photographs; return them and their number.

    pairing: "exhaustive", or "sequential" or "nearest" with `k` others for each photograph. If None
        or "auto", it is "nearest" with `k` or for many photographs, and otherwise "exhaustive".
    k: number of others. If None, it is the number in NEIGHBOURS.

    Only "nearest" needs the features, which must be SIFT.
    """
    count = len(photos)
    if pairing in (None, "auto"):
        pairing = "nearest" if k or count > MAX_EXHAUSTIVE else "exhaustive"
    # All pairs may be millions, so they are not made into a list.
    if pairing == "exhaustive":
        return exhaustive(photos), count * (count - 1) // 2
    k = k or NEIGHBOURS[str(pairing)]
    if pairing == "sequential":
        chosen = [(i, j) for j in range(count) for i in range(max(0, j - k), j)]
    else:
        chosen = nearest_pairs(photos, lambda item: features_of(item).records["descriptor"], k)
    return [(photos[i], photos[j]) for i, j in chosen], len(chosen)


def exhaustive(items: Sequence[Item]) -> Iterator[ItemPair]:
    """Yield all pairs, block by block, so that most pairs need no image read again."""
    for block, other in itertools.combinations_with_replacement(groups(items, BLOCK), 2):
        if other is block:
            yield from itertools.combinations(block, 2)
        else:
            yield from itertools.product(block, other)


def nearest_pairs(
    images: Sequence[Any], descriptors: Callable[[Any], np.ndarray], k: int
) -> List[Tuple[int, int]]:
    """Pair each image with the k (at least 1) most similar others.

    descriptors: returns SIFT (n, 128) uint8 of an image. It is called twice for each image, with
        one result in memory at a time.

    Returns pairs (i, j) with i < j, sorted and unique.
    """
    if len(images) < 2:
        return []
    # The vocabulary comes from equally many descriptors of each image, at regular intervals.
    samples = []
    for image in images:
        rows = descriptors(image)
        count = min(SAMPLE // len(images) + 1, len(rows))
        samples.append(root_sift_of(rows[np.linspace(0, len(rows) - 1, count).astype(int)]))
    words = vocabulary(samples)
    described = np.stack([vlad(root_sift_of(descriptors(image)), words) for image in images])
    # Take the k largest cosines of each image, but not the image itself.
    pairs = set()
    for i, vector in enumerate(described):
        similarity = described @ vector
        # An image is most similar to itself.
        similarity[i] = -np.inf
        for j in np.argsort(-similarity, kind="stable")[: min(k, len(images) - 1)]:
            pairs.add((min(i, int(j)), max(i, int(j))))
    return sorted(pairs)


def vocabulary(samples: Sequence[np.ndarray]) -> np.ndarray:
    """Cluster RootSIFT samples (n, 128) into at most 64 words (W, 128) float32.

    Equal samples give equal words.
    """
    together = np.concatenate(samples)
    if len(together) <= WORDS:
        return together
    # k-means begins with random centres, which are the same in each run.
    cv2.setRNGSeed(0)
    criteria = (cv2.TERM_CRITERIA_EPS + cv2.TERM_CRITERIA_MAX_ITER, 30, 1e-4)
    no_labels: Any = None
    return cv2.kmeans(together, WORDS, no_labels, criteria, 1, cv2.KMEANS_PP_CENTERS)[2]


def vlad(descriptors: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Compute the vector of an image, (W * 128,) float32 of unit length, or zeros without
    keypoints.
    """
    sums = np.zeros_like(words)
    if len(descriptors) and len(words):
        # Find the nearest word of each descriptor, (n,). |d - w|^2 = |d|^2 - 2 d w + |w|^2.
        word = np.argmax(descriptors @ words.T - (words**2).sum(1) / 2, axis=1)
        np.add.at(sums, word, descriptors - words[word])
    # Normalise by word, so that a repeated pattern does not outweigh the rest, then as a whole.
    sums /= np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    return sums.ravel() / max(float(np.linalg.norm(sums)), 1e-12)
