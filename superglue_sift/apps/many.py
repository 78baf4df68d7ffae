"""Match many pairs: of a folder, a list or a video. Features are computed once and kept on disk;
pairs are resumed.

A pair is done if its `A_B_matches.npz` exists, which is written last and atomically, and states the
same images, weights, settings and versions. Memory holds the names of all images, but features of
only the last 256, pixels of 32, and one batch of pairs.
"""

from __future__ import annotations

import collections
import csv
import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import cv2

from superglue_sift.apps import results, retrieval
from superglue_sift.apps.results import BLINK, JSON, OVERLAY, PICTURE
from superglue_sift.errors import RequestError
from superglue_sift.feature_store import FeatureStore, Item
from superglue_sift.features import Features
from superglue_sift.files import write_atomic
from superglue_sift.images import EXTENSIONS
from superglue_sift.match_result import MatchResult
from superglue_sift.progress import Progress

BATCH_ON_GPU = 8
PAIRS_OF_A_WORKER = 2  # in a batch on a CPU: workers wait for the last pair of a batch
MAX_EXHAUSTIVE = 200  # images of which all 19,900 pairs are matched by default
NEIGHBOURS = {"sequential": 5, "nearest": 20}  # default numbers for each image
MATCHES = "matches.npz"
ENDINGS = (JSON, PICTURE, OVERLAY, BLINK)  # of a pair's other files

Pairs = Iterable[Tuple[Item, Item]]
Adding = Callable[[Item, Item, MatchResult], None]


@dataclass(frozen=True)
class Output:
    """Files to write for each pair, in `folder`.

    wanted: their endings, beside MATCHES. settings: see `results.made_from`. again: overwrite
    existing results, since a camera shows something new each time.
    """

    folder: Path
    wanted: Sequence[str] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    again: bool = False

    def file(self, item0: Item, item1: Item, ending: str) -> Path:
        """FOLDER/A_B_ENDING."""
        return self.folder / f"{item0.name}_{item1.name}_{ending}"

    def missing(self, item0: Item, item1: Item) -> List[str]:
        """Endings of wanted files that do not exist."""
        return [end for end in self.wanted if not self.file(item0, item1, end).is_file()]

    def complete(self, item0: Item, item1: Item, found: MatchResult, made: str) -> bool:
        """Write the missing files; returns whether there were any."""
        missing = self.missing(item0, item1)
        if not missing:
            return False
        found = found._replace(images=(item0.image, item1.image))
        fitted = found.fits()
        files: Dict[str, bytes] = {}
        if JSON in missing:
            about = {"image0": item0.name, "image1": item1.name, "made_from": json.loads(made)}
            files[JSON] = results.json_of(found, fitted, about)
        if PICTURE in missing:
            files[PICTURE] = results.picture_of(found, fitted)
        if {OVERLAY, BLINK}.intersection(missing):
            files.update(results.overlays_of(found, fitted["homography"].model))
        for ending, content in files.items():
            write_atomic(self.file(item0, item1, ending), content)
        return bool(files)

    def write(self, item0: Item, item1: Item, found: MatchResult, made: str) -> None:
        """Write all files of a pair, the matches last; an earlier result is removed first."""
        for ending in (MATCHES, *ENDINGS):
            self.file(item0, item1, ending).unlink(missing_ok=True)
        self.complete(item0, item1, found, made)
        write_atomic(self.file(item0, item1, MATCHES), results.npz_of(found, made))


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
    return [Item(name, path) for name, path in zip(names, paths)]


def listed_pairs(file: Path, root: Path) -> List[Tuple[Item, Item]]:
    """Pairs of a text file, `a b` in each line, below `root`. Lines that start with `#` are
    ignored.

    Names with spaces stand in double quotes, or with a tab between the two.
    Raises RequestError for an unreadable file or a line without two names.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise RequestError(f"{file}: is not a text file; a line is `a.jpg b.jpg`") from None
    pairs: Dict[Tuple[Path, Path], None] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        words = _names(line)
        if len(words) != 2:
            fix = "put names with spaces in double quotes, or a tab between the two"
            raise RequestError(f"{file}:{number}: needs two names, has {line.strip()!r}; {fix}")
        pairs[root / words[0], root / words[1]] = None
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


def sequential(items: Iterable[Item], window: int) -> Iterator[Tuple[Item, Item]]:
    """Pair each item with the `window` items before it."""
    before: collections.deque = collections.deque(maxlen=window)
    for item in items:
        for earlier in before:
            yield earlier, item
        before.append(item)


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

    pairing: exhaustive; sequential or nearest with `k` others each (None: NEIGHBOURS); auto: one of
    them by number. nearest compares SIFT.
    """
    count = len(photos)
    if pairing == "auto":
        pairing = "nearest" if count > MAX_EXHAUSTIVE else "exhaustive"
    if pairing == "exhaustive":
        return itertools.combinations(photos, 2), count * (count - 1) // 2
    k = k or NEIGHBOURS[pairing]
    if pairing == "sequential":
        k = min(k, max(count - 1, 0))
        return sequential(photos, k), k * count - k * (k + 1) // 2
    chosen = retrieval.nearest_pairs(photos, lambda photo: store(photo).records["descriptor"], k)
    return [(photos[i], photos[j]) for i, j in chosen], len(chosen)


@dataclass
class Run:
    """Match pairs into `output`, and count pairs: matched, of these again; done before, of these
    with missing files.

    adding: functions that are called with every pair, also those done before.
    """

    store: FeatureStore
    output: Output
    adding: Sequence[Adding] = ()
    matched: int = 0
    again: int = 0
    before: int = 0
    completed: int = 0

    def match(self, pairs: Pairs, total: Optional[int]) -> None:
        """Match and write each pair that is not done. total: number of pairs, if known."""
        matcher = self.store.matcher
        matcher.side_by_side()
        on_gpu = matcher.device.startswith("cuda")
        size = BATCH_ON_GPU if on_gpu else PAIRS_OF_A_WORKER * matcher.workers
        started: collections.deque = collections.deque()  # pairs in progress, and their `made_from`
        with Progress(total=total, desc="matching", unit="pairs") as shown:
            for found in matcher.match_batch(self._waiting(pairs, started, shown), size):
                pair, made = started.popleft()
                photo0, photo1 = pair
                self.output.write(photo0, photo1, found, made)
                self._add(pair, found)
                self.matched += 1
                shown.update(1)

    def report(self, total: Optional[int]) -> str:
        """Numbers of matched and existing pairs, and of other pairs in the folder."""
        words = [f"{self.matched} pairs matched"]
        if total and self.matched < total:
            words[0] += f" of {total}, the others before"
        if self.again:
            words.append(f"{self.again} of them again, since their inputs changed")
        if self.completed:
            words.append(f"{self.completed} of the others were completed")
        folder = self.output.folder
        text = f"{'; '.join(words)}: {folder}"
        others = sum(1 for _ in folder.glob(f"*_{MATCHES}")) - self.matched - self.before
        if others > 0:
            text += f"\n{folder} also holds {others} pairs of other commands, which are kept"
        return text

    def _waiting(
        self, pairs: Pairs, started: collections.deque, shown: Progress
    ) -> Iterator[Tuple[Features, Features]]:
        """Features of the pairs to match, which are added to `started`."""
        features = self.store.with_pixels if self.store.matcher.refine else self.store
        for pair in pairs:
            if not self.output.again and self._done(pair, shown):
                self.before += 1
                shown.initial += 1
                shown.update(1)
                continue
            sides = features(pair[0]), features(pair[1])
            # After reading the features, which are of this content
            started.append((pair, self._made_from(pair)))
            yield sides

    def _add(self, pair: Tuple[Item, Item], found: MatchResult) -> None:
        for add in self.adding:
            add(*pair, found)

    def _made_from(self, pair: Tuple[Item, Item]) -> str:
        return results.made_from([self.store.digest(item) for item in pair], self.output.settings)

    def _done(self, pair: Tuple[Item, Item], shown: Progress) -> bool:
        """Whether a pair's result is of the same inputs as now; writes its missing files."""
        path = self.output.file(*pair, MATCHES)
        before = results.read_made_from(path)
        now = self._made_from(pair)
        if before is None:
            return False
        why = results.differs(before, now)
        if not why and (self.adding or self.output.missing(*pair)):
            found = results.read_npz(path, *(self.store(item).size for item in pair))
            self.completed += self.output.complete(*pair, found, now)
            self._add(pair, found)
        if why:
            self.again += 1
            if self.again == 1:
                shown.say(f"{path}: {why}; it is computed again, as are others that do not fit")
        return not why
