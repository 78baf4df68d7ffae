"""Choose the pairs of photographs that a command matches, and name their results."""

from __future__ import annotations

import argparse
import collections
import csv
import itertools
import os
import sys
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from superglue_sift.apps import retrieval
from superglue_sift.errors import RequestError
from superglue_sift.features.features import Features
from superglue_sift.features.images import list_photos
from superglue_sift.features.store import Item
from superglue_sift.files import read_lines, spelled_as_file

# Values of `args.source`, which says what is matched
TWO = "two images"
FILES = "more than two images"
FOLDER = "a folder"
LIST = "--pairs"
PAGE = "--serve"
DATABASE = "--colmap of an existing database"

# Endings of the files of a pair
MATCHES = "matches.npz"
PICTURE = "matches.jpg"
JSON = "matches.json"

MAX_EXHAUSTIVE = 200  # all pairs of so many images, 19,900, are matched by default
BLOCK = 16  # number of images of a block, half of those whose pixels stay in memory
MAX_NAME = 255  # maximum number of bytes of a file name
NEIGHBOURS = {"sequential": 5, "nearest": 20}  # default number of others for each image

Pair = Tuple[Item, Item]


def root_of(args: argparse.Namespace) -> Path:
    """Return the folder below which images are named.

    It is the folder of the command or of its list, or the one that holds all its files.
    """
    if args.source == LIST:
        return args.root or args.pairs.parent
    if args.source == FOLDER:
        return args.inputs[0]
    folders = [os.path.dirname(os.path.abspath(path)) for path in args.inputs]
    try:
        return Path(os.path.commonpath(folders))
    except ValueError:  # files on several drives of Windows
        return Path(folders[0])


def named_inputs(args: argparse.Namespace) -> List[Item]:
    """Return the images of a folder, or those of the command line, without pictures of matches.

    Raises RequestError if there are fewer than two.
    """
    if args.source == FOLDER:
        return photos_in(args.inputs[0], args.out_dir)
    # Leave out a file that is named twice, and pictures that an earlier command wrote next to its
    # matches.
    kept = [path for path in args.inputs if not _is_result(path)]
    given = {Path(os.path.abspath(path)): path for path in kept}
    if len(given) < 2:
        reason = "named twice" if kept else "a picture of matches"
        raise RequestError(f"{args.inputs[0]}: {reason}; matching needs two images")
    items = name_photos(list(given), root_of(args))
    return [item._replace(image=given[Path(str(item.image))]) for item in items]


def photos_in(folder: Path, out_dir: Path) -> List[Item]:
    """List all photographs below a folder, by name, without results.

    Results are files below `out_dir`, and pictures of other runs. Raises RequestError if there are
    fewer than two images, or if `out_dir` is the folder itself.
    """
    output = out_dir.resolve()
    if output == folder.resolve():
        fix = f"name another, such as {out_dir}/found"
        raise RequestError(f"--out-dir {out_dir}: is the folder of the photographs; {fix}")
    files = [path for path in list_photos(folder) if not _is_result(path)]
    paths = [path for path in files if output not in path.resolve().parents]
    ignored = len(files) - len(paths)
    if ignored:
        print(f"{out_dir}: {ignored} images there are ignored: it is the output", file=sys.stderr)
    if len(paths) < 2:
        raise RequestError(f"{folder}: {len(paths)} images; matching needs two or more")
    return name_photos(paths, folder)


def _is_result(path: Path) -> bool:
    """Say whether a file is the picture of a pair, next to the pair's matches."""
    stem = path.name[: -len(PICTURE)]
    return path.name.endswith(f"_{PICTURE}") and path.with_name(stem + MATCHES).is_file()


def name_photos(paths: Sequence[Path], root: Path) -> List[Item]:
    """Name photographs by their path below `root`, without extension if every A_B stays unique.

    Raises RequestError if two results would have one name, or a name would be too long.
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
        name[:at].casefold() in taken
        for name in plain
        for at, letter in enumerate(name)
        if letter == "_"
    )
    names = plain if clear else whole
    for name, count in collections.Counter(names).items():
        if count > 1:
            reason = "the results of two images would have this name; rename one"
            raise RequestError(f"{name}: {reason}")
    # The two longest names make the longest name of a result.
    longest = sorted(names, key=lambda name: len(os.fsencode(name)))[-2:]
    if len(os.fsencode("_".join([*longest, MATCHES]))) > MAX_NAME:
        reason = "too long for A_B_matches.npz; rename it, or move it to a folder of a shorter path"
        raise RequestError(f"{longest[-1]}: {reason}")
    return [Item(name, path) for name, path in zip(names, paths)]


def listed_pairs(file: Path, root: Path) -> List[Pair]:
    """Read pairs from a text file, `a b` in each line, which name images below `root`.

    Names with spaces stand in double quotes, or with a tab between the two. Lines that start with
    `#` are ignored. Numbers after the names are ignored, too. SuperGlue's lists have two rotations
    there, and 38 numbers of a pose. Raises RequestError for an unreadable file or a line without
    two names.
    """
    pairs: Dict[Tuple[Path, Path], None] = {}  # each pair once, in the order of the list
    for number, line in read_lines(file):
        words = _names(line)
        if len(words) != 2:
            fix = "put names with spaces in double quotes, or a tab between the two"
            raise RequestError(f"{file}:{number}: needs two names, has {line!r:.80}; {fix}")
        spelled = (spelled_as_file(root, word) or word for word in words)
        path0, path1 = (Path(os.path.normpath(root / name)) for name in spelled)
        if path0 == path1:
            raise RequestError(f"{file}:{number}: {words[0]} with itself; name two images")
        pairs[path0, path1] = None
    if not pairs:
        raise RequestError(f"{file}: has no pairs; a line is `a.jpg b.jpg`")
    paths = list(dict.fromkeys(path for pair in pairs for path in pair))
    photo = dict(zip(paths, name_photos(paths, root)))
    return [(photo[a], photo[b]) for a, b in pairs]


def _names(line: str) -> List[str]:
    """Return the names in a line.

    They stand between tabs if there are any. Otherwise they are words, with spaces if quoted.
    """
    between = "\t" if "\t" in line.strip() else " "
    try:
        words = next(csv.reader([line], delimiter=between, skipinitialspace=True))
    except csv.Error:
        return []
    words = [word.strip() for word in words if word.strip()]
    numbers = words[2:]  # SuperGlue's lists have rotations, intrinsics and a pose
    return words[:2] if all(map(_is_number, numbers)) else words


def _is_number(word: str) -> bool:
    """Say whether a word is a number."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def exhaustive(items: Sequence[Item]) -> Iterator[Pair]:
    """Yield all pairs, block by block, so that most pairs need no image read again."""
    starts = range(0, len(items), BLOCK)
    for first, second in itertools.combinations_with_replacement(starts, 2):
        for i in range(first, min(first + BLOCK, len(items))):
            for j in range(max(second, i + 1), min(second + BLOCK, len(items))):
                yield items[i], items[j]


def sequential(items: Iterable[Item], window: int) -> Iterator[Pair]:
    """Yield pairs of each item with the `window` items before it."""
    before: collections.deque = collections.deque(maxlen=window)
    for item in items:
        for earlier in before:
            yield earlier, item
        before.append(item)


def choose_pairs(
    photos: Sequence[Item],
    features_of: Callable[[Item], Features],
    pairing: Optional[str] = None,
    k: Optional[int] = None,
) -> Tuple[Iterable[Pair], int]:
    """Choose pairs of photographs; return them and their number.

    pairing: "exhaustive", or "sequential" or "nearest" with `k` others for each photograph. If None
        or "auto", it is "nearest" with `k` or for many photographs, and otherwise "exhaustive".
    k: number of others. If None, it is the number in NEIGHBOURS.

    Only "nearest" needs the features, which must be SIFT.
    """
    count = len(photos)
    if pairing in (None, "auto"):
        pairing = "nearest" if k or count > MAX_EXHAUSTIVE else "exhaustive"
    if pairing == "exhaustive":
        return exhaustive(photos), count * (count - 1) // 2
    k = k or NEIGHBOURS[str(pairing)]
    if pairing == "sequential":
        k = min(k, max(count - 1, 0))
        return sequential(photos, k), k * count - k * (k + 1) // 2
    similar = retrieval.nearest_pairs(
        photos, lambda photo: features_of(photo).records["descriptor"], k
    )
    return [(photos[i], photos[j]) for i, j in similar], len(similar)
