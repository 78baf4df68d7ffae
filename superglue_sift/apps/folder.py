"""Match many pairs: of a folder, a list or a video. Features are computed once and kept on disk;
pairs are resumed.

A pair is done if its `A_B_matches.npz` exists, which is written last and atomically, and states the
same images, weights, settings and versions. Memory holds the names of all images, but features of
only the last 256, pixels of 32, and one batch of pairs; with --colmap also all matches.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from superglue_sift.apps import results, retrieval
from superglue_sift.apps.pairing import CAMERA, Pairs, choose_job, root_of
from superglue_sift.apps.results import ENDINGS, MATCHES
from superglue_sift.errors import WorkError
from superglue_sift.features.extractors import DEFAULT
from superglue_sift.features.features import Features
from superglue_sift.features.store import FeatureStore, Item
from superglue_sift.files import file_sha256, write_atomic, write_csv
from superglue_sift.geometry import verification
from superglue_sift.match_result import MatchResult
from superglue_sift.matcher import Matcher
from superglue_sift.network.weights import shipped_weights
from superglue_sift.progress import Progress

# Of `Matcher`
SETTINGS = ("max_keypoints", "network_keypoints", "resize", "threshold", "refine", "frame")
BAD_IMAGES = "bad_images.csv"  # of --out-dir
BATCH_ON_GPU = 8
PAIRS_OF_A_WORKER = 2  # in a batch on a CPU: workers wait for the last pair of a batch

Adding = Callable[[Item, Item, MatchResult], None]


def match_many(args: argparse.Namespace, matcher: Matcher) -> int:
    """Match any number of pairs into --out-dir; returns the exit code."""
    store = FeatureStore(matcher, args.features or args.out_dir / "features")
    wanted = [results.JSON] * args.json_files + [results.PICTURE] * args.pictures
    wanted += [results.OVERLAY, results.BLINK] * args.homography
    job = choose_job(args, store)
    total = job.total
    with contextlib.ExitStack() as stack:
        adding: List[Adding] = [job.expansion] if job.expansion else []
        if matcher.rules:
            adding.append(stack.enter_context(results.pair_list(args.out_dir, root_of(args))))
        if args.colmap:
            from superglue_sift.interop import colmap

            root = root_of(args)
            database = colmap.database_of(args.colmap, root, job.photos, store, args.refine)
            adding.append(stack.enter_context(database))
        settings = settings_of(args, matcher)
        run = Run(store, args.out_dir, wanted, settings, args.source == CAMERA, adding)
        # Ctrl-C is how a camera ends
        with contextlib.suppress(*[KeyboardInterrupt] * (args.source == CAMERA)):
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
    scene = {}
    if matcher.rules:
        judged = [*verification.WEIGHTS.tolist(), verification.BIAS]
        scene = {"scene": dataclasses.asdict(matcher.rules), "acceptance": judged}
    return {
        "weights": file_sha256(args.model or shipped_weights()),
        "extractor": f"{extractor.name} {extractor.code}".strip(),
        "precision": args.precision,
        **{name: getattr(matcher, name) for name in SETTINGS},
        **scene,
    }


@dataclass
class Run:
    """Match pairs into `folder`, and count them: matched, of these again; done before, of these
    with missing files.

    wanted: endings of the files of each pair, beside MATCHES. settings: see `results.made_from`.
    overwrite: match again what exists, since a camera shows something new each time. adding:
    functions that are called with every pair, also those done before.
    """

    store: FeatureStore
    folder: Path
    wanted: Sequence[str]
    settings: Mapping[str, object]
    overwrite: bool
    adding: Sequence[Adding]
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
        # pairs in their order, with the `made_from` of those in progress, "" of those done before
        started: collections.deque = collections.deque()
        with Progress(total=total, desc="matching", unit="pairs") as shown:
            for found in matcher.match_batch(self._waiting(pairs, started, shown), size):
                self._add_done(started)
                pair, made = started.popleft()
                self._write(pair, made, found)
                self.matched += 1
                shown.update(1)
            self._add_done(started)

    def report(self, total: Optional[int]) -> str:
        """Numbers of matched and existing pairs, and of other pairs in the folder."""
        words = [f"{self.matched} pairs matched"]
        if total and self.matched < total:
            words[0] += f" of {total}, the others before"
        if self.again:
            words.append(f"{self.again} of them again, since their inputs changed")
        if self.completed:
            words.append(f"{self.completed} of the others were completed")
        text = f"{'; '.join(words)}: {self.folder}"
        others = sum(1 for _ in self.folder.glob(f"*_{MATCHES}")) - self.matched - self.before
        if others > 0:
            text += f"\n{self.folder} also holds {others} pairs of other commands, which are kept"
        return text

    def _file(self, pair: Tuple[Item, Item], ending: str) -> Path:
        """FOLDER/A_B_ENDING."""
        return self.folder / f"{pair[0].name}_{pair[1].name}_{ending}"

    def _waiting(
        self, pairs: Pairs, started: collections.deque, shown: Progress
    ) -> Iterator[Tuple[Features, Features]]:
        """Features of the pairs to match, which are added to `started`."""
        features = self.store.with_pixels if self.store.matcher.refine else self.store
        for pair in pairs:
            if not self.overwrite and self._done(pair, shown):
                self.before += 1
                shown.initial += 1
                shown.update(1)
                started.append((pair, ""))
                self._add_done(started)
                continue
            sides = features(pair[0]), features(pair[1])
            # After reading the features, which are of this content
            started.append((pair, self._made_from(pair)))
            yield sides

    def _made_from(self, pair: Tuple[Item, Item]) -> str:
        return results.made_from([self.store.digest(item) for item in pair], self.settings)

    def _done(self, pair: Tuple[Item, Item], shown: Progress) -> bool:
        """Whether a pair's result is of the same inputs as now."""
        path = self._file(pair, MATCHES)
        arrays = results.read_arrays(path)
        now = self._made_from(pair)
        if arrays is None:
            return False
        why = results.differs(str(arrays.get("made_from", "")), now)
        if why:
            self.again += 1
            if self.again == 1:
                shown.say(f"{path}: {why}; it is computed again, as are others that do not fit")
            return False
        return True

    def _add_done(self, started: collections.deque) -> None:
        """Complete the pairs done before, up to the first in progress: all are added in order."""
        while started and not started[0][1]:
            pair, _ = started.popleft()
            missing = [ending for ending in self.wanted if not self._file(pair, ending).is_file()]
            if missing or self.adding:
                arrays = results.read_arrays(self._file(pair, MATCHES))
                # read by `_done`, too: those of all pairs that wait would fill the memory
                assert arrays is not None
                size0, size1 = (self.store(item).size for item in pair)
                found = results.from_arrays(arrays, size0, size1)
                self.completed += self._complete(pair, self._made_from(pair), found, missing)

    def _write(self, pair: Tuple[Item, Item], made: str, found: MatchResult) -> None:
        """Write all files of a pair, the matches last; an earlier result is removed first."""
        for ending in (MATCHES, *ENDINGS):
            self._file(pair, ending).unlink(missing_ok=True)
        self._complete(pair, made, found, self.wanted)
        write_atomic(self._file(pair, MATCHES), results.npz_of(found, made))

    def _complete(
        self, pair: Tuple[Item, Item], made: str, found: MatchResult, endings: Sequence[str]
    ) -> bool:
        """Write these files of a pair, and add it; returns whether there were any."""
        files: Dict[str, bytes] = {}
        if endings:
            found = dataclasses.replace(found, images=(pair[0].image, pair[1].image))
            fitted = found.fits()
            about = {"image0": pair[0].name, "image1": pair[1].name, "made_from": json.loads(made)}
            files = results.files_of(found, fitted, about, endings)
        for ending, content in files.items():
            write_atomic(self._file(pair, ending), content)
        for add in self.adding:
            add(*pair, found)
        return bool(files)
