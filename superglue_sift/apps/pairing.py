"""Which pairs a command matches: of photographs, of a list, of the frames of a video."""

from __future__ import annotations

import argparse
import collections
import csv
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import cv2

from superglue_sift.apps import retrieval
from superglue_sift.apps.results import ENDINGS, MATCHES
from superglue_sift.errors import RequestError
from superglue_sift.features.features import Features
from superglue_sift.features.images import EXTENSIONS
from superglue_sift.features.store import FeatureStore, Item
from superglue_sift.progress import Progress

# What is matched, `args.source`
TWO = "two images"
FILES = "more than two images"
FOLDER = "a folder"
VIDEO = "a video"
LIST = "--pairs"
CAMERA = "--camera"
PAGE = "--serve"
DATABASE = "--colmap of an existing database"

MAX_EXHAUSTIVE = 200  # images of which all 19,900 pairs are matched by default
BLOCK = 16  # images of one block of exhaustive pairs: half of those whose pixels stay in memory
MAX_NAME = 255  # bytes of a file name
NEIGHBOURS = {"sequential": 5, "nearest": 20}  # default numbers for each image

Pairs = Iterable[Tuple[Item, Item]]


class Job(NamedTuple):
    """Pairs to match, their number and photographs if known, and unreadable files with reasons.

    expansion: proposes more pairs after these.
    """

    pairs: Pairs
    total: Optional[int]
    photos: Sequence[Item]
    bad: Dict[str, str]
    expansion: Optional[retrieval.Expansion] = None


def choose_job(args: argparse.Namespace, store: FeatureStore) -> Job:
    """The pairs of the source. Computes the features of photographs."""
    if args.source in (VIDEO, CAMERA):
        pairs = sequential(open_video(args), args.k or NEIGHBOURS["sequential"])
        return Job(pairs, None, (), {})
    if args.source == LIST:
        listed = listed_pairs(args.pairs, root_of(args))
        every = dict.fromkeys(itertools.chain.from_iterable(listed))
        photos, bad = prepare(list(every), store)
        readable = set(photos)
        pairs = [pair for pair in listed if readable.issuperset(pair)]
        return Job(pairs, len(pairs), photos, bad)
    pairing = args.pairing or "auto"
    if not store.is_sift and (pairing == "nearest" or (pairing == "auto" and args.k)):
        raise RequestError("--pairing nearest compares SIFT features; use exhaustive or sequential")
    photos, bad = prepare(named_inputs(args), store)
    if pairing == "auto" and not store.is_sift:
        pairing = "exhaustive"
    pairs, total = choose_pairs(photos, store, pairing, args.k)
    grows = pairing == "auto" and store.matcher.rules and len(photos) > MAX_EXHAUSTIVE
    return Job(pairs, total, photos, bad, retrieval.Expansion(photos) if grows else None)


def root_of(args: argparse.Namespace) -> Path:
    """The folder below which images are named: of the command, or of its list or all its files."""
    if args.source == LIST:
        return args.root or args.pairs.parent
    if args.source == FOLDER:
        return args.inputs[0]
    folders = [os.path.dirname(os.path.abspath(path)) for path in args.inputs]
    return Path(os.path.commonpath(folders or [os.curdir]))


def named_inputs(args: argparse.Namespace) -> List[Item]:
    """The images of a folder, or those of the command line, without pictures of matches."""
    if args.source == FOLDER:
        return photos_in(args.inputs[0], args.out_dir)
    kept = [path for path in args.inputs if not _is_result(path)]
    given = {Path(os.path.abspath(path)): path for path in kept}
    if len(given) < 2:
        reason = "named twice" if kept else "a picture of matches"
        raise RequestError(f"{args.inputs[0]}: {reason}; matching needs two images")
    items = name_photos(list(given), root_of(args))
    return [item._replace(image=given[Path(str(item.image))]) for item in items]


def photos_in(folder: Path, out_dir: Path) -> List[Item]:
    """All image files below a folder, by name, except results: files below `out_dir`, and pictures
    of other runs.

    Raises RequestError: fewer than two images, or `out_dir` is the folder itself.
    """
    output = out_dir.resolve()
    if output == folder.resolve():
        fix = f"name another, such as {out_dir}/found"
        raise RequestError(f"--out-dir {out_dir}: is the folder of the photographs; {fix}")
    images = (p for p in folder.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())
    files = sorted(path for path in images if not _is_result(path))
    paths = [path for path in files if output not in path.resolve().parents]
    ignored = len(files) - len(paths)
    if ignored:
        print(f"{out_dir}: {ignored} images there are ignored: it is the output", file=sys.stderr)
    if len(paths) < 2:
        raise RequestError(f"{folder}: {len(paths)} images; matching needs two or more")
    return name_photos(paths, folder)


def _is_result(path: Path) -> bool:
    """Whether it is a picture of a pair, next to the pair's matches."""
    ends = [ending for ending in ENDINGS if path.name.endswith(f"_{ending}")]
    return any(path.with_name(path.name[: -len(ending)] + MATCHES).is_file() for ending in ends)


def name_photos(paths: Sequence[Path], root: Path) -> List[Item]:
    """Name photos by their path below `root`, without extension if every A_B stays unique."""
    inside = [path.relative_to(root) if root in path.parents else path for path in paths]
    whole = ["-".join(part for part in path.parts if part not in ("/", "..")) for path in inside]
    plain = [name.rpartition(".")[0] or name for name in whole]
    # given a and a_b, a_b_c could be a with b_c, or a_b with c
    taken = set(plain)
    clear = len(taken) == len(plain) and not any(
        name[:at] in taken for name in plain for at, letter in enumerate(name) if letter == "_"
    )
    names = plain if clear else whole
    for name, count in collections.Counter(names).items():
        if count > 1:
            reason = "the results of two images would have this name; rename one"
            raise RequestError(f"{name}: {reason}")
    longest = sorted(names, key=lambda name: len(os.fsencode(name)))[-2:]
    if len(os.fsencode("_".join([*longest, MATCHES]))) > MAX_NAME:
        reason = "too long for A_B_matches.npz; rename it, or move it to a folder of a shorter path"
        raise RequestError(f"{longest[-1]}: {reason}")
    return [Item(name, path) for name, path in zip(names, paths)]


def listed_pairs(file: Path, root: Path) -> List[Tuple[Item, Item]]:
    """Pairs of a text file, `a b` in each line, below `root`. Lines that start with `#` are
    ignored.

    Names with spaces stand in double quotes, or with a tab between the two.
    Raises RequestError for an unreadable file or a line without two names.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise RequestError(f"{file}: is not a text file; a line is `a.jpg b.jpg`") from None
    pairs: Dict[Tuple[Path, Path], None] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            words = _names(line)
        except csv.Error:
            words = []
        if len(words) != 2:
            fix = "put names with spaces in double quotes, or a tab between the two"
            raise RequestError(f"{file}:{number}: needs two names, has {line.strip()!r:.80}; {fix}")
        path0, path1 = (Path(os.path.normpath(root / word)) for word in words)
        if path0 == path1:
            raise RequestError(f"{file}:{number}: {words[0]} with itself; name two images")
        pairs[path0, path1] = None
    if not pairs:
        raise RequestError(f"{file}: has no pairs; a line is `a.jpg b.jpg`")
    paths = list(dict.fromkeys(path for pair in pairs for path in pair))
    photo = dict(zip(paths, name_photos(paths, root)))
    return [(photo[a], photo[b]) for a, b in pairs]


def _names(line: str) -> List[str]:
    """The names in a line: between tabs if there are any, else words, with spaces if quoted."""
    between = "\t" if "\t" in line.strip() else " "
    words = next(csv.reader([line], delimiter=between, skipinitialspace=True))
    return [word.strip() for word in words if word.strip()]


def frames(capture: cv2.VideoCapture, every: int, most: Optional[int]) -> Iterator[Item]:
    """Each `every`-th frame of a video or camera, at most `most`."""
    for number in itertools.count():
        if (most is not None and number >= most * every) or not capture.grab():
            return
        if number % every:
            continue
        ok, image = capture.retrieve()
        if ok:
            yield Item(f"frame{number:06d}", image)


def exhaustive(items: Sequence[Item]) -> Iterator[Tuple[Item, Item]]:
    """All pairs, block by block, so that most need no image read again."""
    starts = range(0, len(items), BLOCK)
    for first, second in itertools.combinations_with_replacement(starts, 2):
        for i in range(first, min(first + BLOCK, len(items))):
            for j in range(max(second, i + 1), min(second + BLOCK, len(items))):
                yield items[i], items[j]


def sequential(items: Iterable[Item], window: int) -> Iterator[Tuple[Item, Item]]:
    """Pair each item with the `window` items before it."""
    before: collections.deque = collections.deque(maxlen=window)
    for item in items:
        for earlier in before:
            yield earlier, item
        before.append(item)


def open_video(args: argparse.Namespace) -> Iterator[Item]:
    """The frames of the video or camera. Raises RequestError if it cannot be opened."""
    source: Any = args.camera
    name = f"--camera {args.camera}"
    if args.source == VIDEO:
        source = name = str(args.inputs[0])
        if not args.inputs[0].is_file():
            raise RequestError(f"{name}: no such folder or video")
    capture = cv2.VideoCapture(source)
    if not capture.isOpened():
        raise RequestError(f"{name}: OpenCV cannot open it as a video")
    return frames(capture, args.every or 1, args.frames)


def prepare(photos: Sequence[Item], store: FeatureStore) -> Tuple[List[Item], Dict[str, str]]:
    """Compute missing features. Returns the readable photos, and the reasons by path of others."""

    def reason(photo: Item) -> str:
        try:
            store.prepare(photo)
        except RequestError as error:
            return str(error).replace(f"{photo.image}: ", "", 1)
        return ""

    readable = []
    bad = {}
    with ThreadPoolExecutor(2) as pool:
        shown = Progress(
            pool.map(reason, photos), total=len(photos), desc="features", unit="images"
        )
        for why, photo in zip(shown, photos):
            if why:
                bad[str(photo.image)] = why
            else:
                readable.append(photo)
    return readable, bad


def choose_pairs(
    photos: Sequence[Item], store: Callable[[Item], Features], pairing: str, k: Optional[int] = None
) -> Tuple[Pairs, int]:
    """Pairs of photos, and their number.

    pairing: exhaustive; sequential or nearest with `k` others each (None: NEIGHBOURS); auto:
    nearest with `k` or for many photos, else exhaustive. nearest compares SIFT.
    """
    count = len(photos)
    if pairing == "auto":
        pairing = "nearest" if k or count > MAX_EXHAUSTIVE else "exhaustive"
    if pairing == "exhaustive":
        return exhaustive(photos), count * (count - 1) // 2
    k = k or NEIGHBOURS[pairing]
    if pairing == "sequential":
        k = min(k, max(count - 1, 0))
        return sequential(photos, k), k * count - k * (k + 1) // 2
    chosen = retrieval.nearest_pairs(photos, lambda photo: store(photo).records["descriptor"], k)
    return [(photos[i], photos[j]) for i, j in chosen], len(chosen)
