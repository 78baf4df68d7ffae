"""Match many pairs: of a folder, a list or a video. Features are computed once and kept on disk;
pairs are resumed.

A pair is done if its `A_B_matches.npz` exists, which is written last and atomically, and states the
same images, weights, settings and versions. Memory holds the names of all images, but features of
only the last 256, pixels of 32, and one batch of pairs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from superglue_sift.apps import results, retrieval
from superglue_sift.apps.pairing import CAMERA, Pairs, choose_job, root_of
from superglue_sift.apps.results import BLINK, ENDINGS, JSON, MATCHES, OVERLAY, PICTURE
from superglue_sift.errors import WorkError
from superglue_sift.extractors import DEFAULT
from superglue_sift.feature_store import FeatureStore, Item
from superglue_sift.features import Features
from superglue_sift.files import file_sha256, write_atomic, write_csv
from superglue_sift.match_result import MatchResult
from superglue_sift.matcher import Matcher
from superglue_sift.progress import Progress
from superglue_sift.sift import WEAK
from superglue_sift.weights import shipped_weights

SETTINGS = ("max_keypoints", "resize", "threshold", "refine", "frame")  # of `Matcher`
BAD_IMAGES = "bad_images.csv"  # of --out-dir
BATCH_ON_GPU = 8
PAIRS_OF_A_WORKER = 2  # in a batch on a CPU: workers wait for the last pair of a batch

Adding = Callable[[Item, Item, MatchResult], None]


def match_many(args: argparse.Namespace, matcher: Matcher) -> int:
    """Match any number of pairs into --out-dir; returns the exit code."""
    store = FeatureStore(matcher, args.features or args.out_dir / "features")
    wanted = [results.JSON] * args.json_files + [results.PICTURE] * args.pictures
    wanted += [results.OVERLAY, results.BLINK] * args.homography
    again = args.source == CAMERA
    output = Output(args.out_dir, wanted, settings_of(args, matcher), again)
    job = choose_job(args, store)
    total = job.total
    with contextlib.ExitStack() as stack:
        adding: List[Adding] = [job.expansion] if job.expansion else []
        if matcher.rules:
            adding.append(stack.enter_context(results.pair_list(args.out_dir, root_of(args))))
        if args.colmap:
            from superglue_sift.interop import colmap

            where = (args.colmap, root_of(args))
            database = colmap.database_of(*where, job.photos, store, args.refine)
            adding.append(stack.enter_context(database))
        run = Run(store, output, adding)
        run.match(job.pairs, total)
        if job.expansion:
            for _ in range(retrieval.ROUNDS):
                more = job.expansion.propose()
                run.match(more, len(more))
                total = (total or 0) + len(more)
    print(run.report(total))
    if args.colmap:
        print(f"{args.colmap}: in pixels as stored in the files, as COLMAP reads them")
    path = args.out_dir / BAD_IMAGES
    path.unlink(missing_ok=True)
    if job.bad:
        write_csv(path, [("image", "reason"), *job.bad.items()])
        images = "1 image" if len(job.bad) == 1 else f"{len(job.bad)} images"
        raise WorkError(f"{images} cannot be read, the others are matched; see {path}")
    return 0


def settings_of(args: argparse.Namespace, matcher: Matcher) -> Dict[str, object]:
    """All inputs of a pair's matches except the images, for `results.made_from`."""
    extractor = matcher.extractor or DEFAULT
    return {
        "weights": file_sha256(args.model or shipped_weights()),
        "extractor": f"{extractor.name} {extractor.code}".strip(),
        "precision": args.precision,
        **{name: getattr(matcher, name) for name in SETTINGS},
        **({"scene": dataclasses.asdict(matcher.rules), "contrast": WEAK} if matcher.rules else {}),
    }


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
            files[PICTURE] = found.show(fits=fitted).encode()
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
