"""Many pairs: of a folder, a list or a video. Features are computed once and kept on disk; what is done is not redone.

A pair is done when its `A_B_matches.npz` is there, which is written last and whole. What is held in memory does not
grow with the number of images but for their names: features of the 256 used last, and one batch of pairs.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import io
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, OrderedDict, Sequence, Tuple, Union
from zipfile import BadZipFile

import cv2
import numpy as np

from superglue_sift import results, retrieval
from superglue_sift.errors import RequestError
from superglue_sift.extractors import DEFAULT
from superglue_sift.files import write_atomic
from superglue_sift.images import EXTENSIONS, read_color
from superglue_sift.matcher import Features, Matcher, MatchResult
from superglue_sift.progress import Progress

HELD = 256  # features of so many images stay in memory
BATCH_ON_GPU = 8


class Item(NamedTuple):
    """An image to match. name: what its results are called after; image: a file, or (H, W, 3) uint8 BGR of a video."""

    name: str
    image: Union[Path, np.ndarray]

    def color(self) -> np.ndarray:
        """(H, W, 3) uint8 BGR."""
        return read_color(self.image) if isinstance(self.image, Path) else self.image


Pairs = Iterable[Tuple[Item, Item]]
Adding = Callable[[Item, Item, MatchResult], None]


class FeatureStore:
    """Features of images, computed once: in memory those used last, on disk all, by content and settings."""

    def __init__(self, matcher: Matcher, folder: Path, held: int = HELD) -> None:
        """folder: for the files, made when the first is written. held: of how many images in memory."""
        self.matcher, self.folder, self.held = matcher, folder, held
        extractor = matcher.extractor or DEFAULT
        own = "" if extractor is DEFAULT else f"{extractor.name}{extractor.code} "
        self._settings = f"{matcher.max_keypoints} {matcher.resize} {cv2.__version__} {own}{extractor.dtype.descr}"
        self._memory: OrderedDict[str, Features] = collections.OrderedDict()

    def __call__(self, item: Item) -> Features:
        """Its features. Raises RequestError for an image that cannot be read."""
        if item.name not in self._memory:
            self._memory[item.name] = self.prepare(item)
            while len(self._memory) > self.held:
                self._memory.popitem(last=False)
        self._memory.move_to_end(item.name)
        return self._memory[item.name]

    def prepare(self, item: Item) -> Features:
        """Its features from disk, else computed and written there. Threads may call it."""
        try:
            source = item.image.read_bytes() if isinstance(item.image, Path) else item.image.tobytes()
        except OSError as error:
            raise RequestError(f"{item.name}: cannot be read: {error.strerror}") from None
        path = self.folder / f"{hashlib.sha256(self._settings.encode() + source).hexdigest()[:32]}.npz"
        try:
            with np.load(path, allow_pickle=False) as file:
                return Features(file["records"], tuple(file["size"].tolist()))
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):  # not there yet, or damaged
            found = self.matcher.extract(item.image)._replace(gray=None)
        data = io.BytesIO()
        np.savez(data, records=found.records, size=found.size)
        write_atomic(path, data.getvalue())
        return found


@dataclass(frozen=True)
class Output:
    """What is written of each pair, in `folder`."""

    folder: Path
    json: bool = False
    pictures: bool = False
    homography: bool = False
    again: bool = False  # also what is there already: a camera shows something new each time

    def file(self, item0: Item, item1: Item, ending: str) -> Path:
        """FOLDER/A_B_matches.ENDING."""
        return self.folder / f"{item0.name}_{item1.name}_matches.{ending}"

    def done(self, item0: Item, item1: Item) -> bool:
        """Is all there that is asked for?"""
        asked = ["npz", *["json"] * self.json, *["jpg"] * self.pictures]
        return not self.again and all(self.file(item0, item1, ending).is_file() for ending in asked)

    def write(self, item0: Item, item1: Item, found: MatchResult) -> None:
        """All files of a pair, the one that says it is done last."""
        fitted = results.fits(found) if self.json or self.pictures or self.homography else {}
        pixels = functools.partial(map, Item.color, (item0, item1))
        if self.json:
            about = {"image0": item0.name, "image1": item1.name}
            results.write_json(self.file(item0, item1, "json"), found, fitted, about)
        if self.pictures:
            results.write_picture(self.file(item0, item1, "jpg"), found, fitted, pixels)
        if self.homography and fitted["homography"].model is not None:
            results.write_overlay(self.folder / f"{item0.name}_{item1.name}", fitted["homography"].model, pixels)
        results.write_npz(self.file(item0, item1, "npz"), found)


def same_settings(folder: Path, settings: Dict[str, object]) -> None:
    """Note how the pairs in `folder` are matched. Raises RequestError where those there were matched otherwise."""
    path = folder / "settings.json"
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise RequestError(f"{path}: pairs there were matched with other settings; name another --out-dir")
    write_atomic(path, text)


def photos_in(folder: Path) -> List[Item]:
    """All image files below a folder, by name. Raises RequestError when there are fewer than two."""
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())
    if len(paths) < 2:
        raise RequestError(f"{folder}: {len(paths)} images; matching needs two or more")
    return named(paths, folder)


def named(paths: Sequence[Path], root: Path) -> List[Item]:
    """Photos called after their place below `root`, without ending where each A_B still means one pair."""
    inside = [path.relative_to(root) if root in path.parents else path for path in paths]
    whole = ["-".join(part for part in path.parts if part not in ("/", "..")) for path in inside]
    plain = [name.rpartition(".")[0] or name for name in whole]
    # with a and a_b there, a_b_c could be a with b_c, or a_b with c
    taken = set(plain)
    clear = len(taken) == len(plain) and not any(
        name[:at] in taken for name in plain for at, letter in enumerate(name) if letter == "_"
    )
    names = plain if clear else whole
    for name, count in collections.Counter(names).items():
        if count > 1:
            raise RequestError(f"{name}: two images would have their results under this name; rename one")
    return [Item(name, path) for name, path in zip(names, paths)]


def listed_pairs(file: Path, root: Path) -> List[Tuple[Item, Item]]:
    """Pairs of a text file, `a b` in each line, below `root`; what follows in a line is ignored, as are lines of `#`.

    Raises RequestError for a file that cannot be read or a line of one name.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise RequestError(f"{file}: cannot be read: {error}") from None
    pairs: Dict[Tuple[Path, Path], None] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 2:
            raise RequestError(f"{file}:{number}: needs two names, has {line.strip()!r}")
        pairs[root / words[0], root / words[1]] = None
    if not pairs:
        raise RequestError(f"{file}: no pair in it; a line is `a.jpg b.jpg`")
    paths = list(dict.fromkeys(path for pair in pairs for path in pair))
    photo = dict(zip(paths, named(paths, root)))
    return [(photo[a], photo[b]) for a, b in pairs]


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


def sequential(items: Iterable[Item], window: int) -> Iterator[Tuple[Item, Item]]:
    """Each item with the `window` before it."""
    before: collections.deque = collections.deque(maxlen=window)
    for item in items:
        for earlier in before:
            yield earlier, item
        before.append(item)


def prepare(photos: Sequence[Item], store: FeatureStore) -> Tuple[List[Item], Dict[str, str]]:
    """Compute what features are missing: the readable photos, and of the others the reason by name."""

    def reason(photo: Item) -> str:
        try:
            store.prepare(photo)
        except RequestError as error:
            return str(error)
        return ""

    bad = {}
    with ThreadPoolExecutor(2) as pool:
        shown = Progress(pool.map(reason, photos), total=len(photos), desc="features", unit="images")
        for why, photo in zip(shown, photos):
            if why:
                bad[photo.name] = why
    return [photo for photo in photos if photo.name not in bad], bad


def choose_pairs(photos: Sequence[Item], store: FeatureStore, pairing: str, k: int) -> Tuple[Pairs, int]:
    """The pairs of a set of photos and how many. pairing: exhaustive, or sequential and nearest with k others each."""
    count = len(photos)
    if pairing == "exhaustive":
        return itertools.combinations(photos, 2), count * (count - 1) // 2
    if pairing == "sequential":
        k = min(k, max(count - 1, 0))
        return sequential(photos, k), k * count - k * (k + 1) // 2
    chosen = retrieval.nearest_pairs(photos, lambda photo: store(photo).records["descriptor"], k)
    return [(photos[i], photos[j]) for i, j in chosen], len(chosen)


def match(pairs: Pairs, total: Optional[int], store: FeatureStore, output: Output, add: Optional[Adding] = None) -> int:
    """Match and write each pair that is not done yet; returns how many that were. add: called for every pair."""
    matcher = store.matcher
    size = BATCH_ON_GPU if matcher.device.startswith("cuda") else 1
    shown = Progress(total=total, desc="matching", unit="pairs")

    def missing() -> Iterator[Tuple[Item, Item]]:
        for pair in pairs:
            if output.done(*pair):
                if add:
                    sizes = (store(item).size for item in pair)
                    add(*pair, results.read_npz(output.file(*pair, "npz"), *sizes))
                shown.initial += 1
                shown.update(1)
            else:
                yield pair

    waiting, ahead = itertools.tee(missing())
    sides = ((store(item0), store(item1)) for item0, item1 in ahead)
    with shown:
        for pair, found in zip(waiting, matcher.match_batch(sides, size)):
            output.write(*pair, found)
            if add:
                add(*pair, found)
            shown.update(1)
    return shown.n - shown.initial
