"""Match the pairs of a folder, of many files or of a list, and write each result to a file.

The features of each photograph are computed once and kept on disk. A pair is done if its
`A_B_matches.npz` exists. This file is written last and atomically, so the same command goes on
where it was stopped. Memory holds the names of all images, but features of only the last 256,
pixels of the last 32, and one batch of pairs. With --colmap it also holds all matches.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from superglue_sift.apps import pairing, retrieval
from superglue_sift.apps.pairing import JSON, MATCHES, PICTURE, Pair
from superglue_sift.errors import RequestError, WorkError
from superglue_sift.features.store import FeatureStore, Item
from superglue_sift.files import DAMAGED, name_below, write_atomic, write_csv
from superglue_sift.geometry import verification
from superglue_sift.match_result import REFINED, MatchResult
from superglue_sift.matcher import Matcher
from superglue_sift.matches import Matches
from superglue_sift.progress import Progress

PAIR_LIST = "pairs.csv"  # table of the pairs of a scene
BAD_IMAGES = "bad_images.csv"
BATCH_ON_GPU = 8
PAIRS_OF_A_WORKER = 2  # in a batch on a CPU, where workers wait for the last pair of a batch

Adding = Callable[[Item, Item, MatchResult], None]


def match_folder(args: argparse.Namespace, matcher: Matcher) -> int:
    """Match any number of pairs into --out-dir; return the exit code.

    Raises WorkError if some photographs cannot be read, after the others are matched.
    """
    # Extract the features of all photographs, which are kept, and choose the pairs to match.
    features = args.features or args.out_dir / "features"
    store = FeatureStore(matcher, features, args.masks, pairing.root_of(args))
    photos, bad, pairs, total = _prepare(args, store)
    expansion = None
    many = len(photos) > pairing.MAX_EXHAUSTIVE
    if many and matcher.rules and not args.pairs and args.pairing in (None, "auto"):
        expansion = retrieval.Expansion(photos)
    with contextlib.ExitStack() as stack:
        # These functions get every pair, in the order of the pairs.
        adding: List[Adding] = [expansion] if expansion else []
        if matcher.rules:
            adding.append(stack.enter_context(pair_list(args.out_dir, pairing.root_of(args))))
        if args.colmap:
            adding.append(stack.enter_context(_database(args, photos, store)))
        # Match the pairs, and in large scenes also those that the accepted pairs propose.
        done = match_pairs(args, store, pairs, total, adding)
        for _ in range(retrieval.ROUNDS if expansion else 0):
            more = expansion.propose() if expansion else []
            done += match_pairs(args, store, more, len(more), adding)
    # Say what was done, and which photographs are bad.
    print(_report(args.out_dir, *done))
    if args.colmap:
        print(f"{args.colmap}: in pixels as stored in the files, as COLMAP reads them")
    path = args.out_dir / BAD_IMAGES
    path.unlink(missing_ok=True)
    if bad:
        write_csv(path, [("image", "reason"), *bad.items()])
        images = "1 image" if len(bad) == 1 else f"{len(bad)} images"
        raise WorkError(f"{images} cannot be read, the others are matched; see {path}")
    return 0


def _prepare(
    args: argparse.Namespace, store: FeatureStore
) -> Tuple[List[Item], Dict[str, str], Iterable[Pair], int]:
    """Extract all features, and choose the pairs.

    Returns the readable photographs, the reasons by path of the others, the pairs, and the number
    of pairs. Raises RequestError for a list that cannot be read, and for pairs by similarity
    without SIFT.
    """
    if args.pairs:
        listed = pairing.listed_pairs(args.pairs, pairing.root_of(args))
        every = list(dict.fromkeys(itertools.chain.from_iterable(listed)))
        photos, bad = extract_all(every, store)
        # Leave out pairs with a photograph that cannot be read.
        readable = set(photos)  # a pair with a bad photograph is left out
        pairs = [pair for pair in listed if readable.issuperset(pair)]
        return photos, bad, pairs, len(pairs)
    kind = args.pairing or "auto"
    if not store.is_sift and (kind == "nearest" or (kind == "auto" and args.k)):
        raise RequestError("--pairing nearest compares SIFT features; use exhaustive or sequential")
    photos, bad = extract_all(pairing.named_inputs(args), store)
    if kind == "auto" and not store.is_sift:
        kind = "exhaustive"
    return photos, bad, *pairing.choose_pairs(photos, store, kind, args.k)


def extract_all(photos: Sequence[Item], store: FeatureStore) -> Tuple[List[Item], Dict[str, str]]:
    """Extract missing features; return the readable photographs, and the reasons by path
    of others.
    """

    def reason(photo: Item) -> str:
        """Extract one photograph; return why it cannot be read, or ""."""
        try:
            store.prepare(photo)
        except RequestError as error:
            return str(error).replace(f"{photo.image}: ", "", 1)
        return ""

    with ThreadPoolExecutor(2) as pool:
        reasons = pool.map(reason, photos)
        shown = list(Progress(reasons, total=len(photos), desc="features", unit="images"))
    bad = {str(photo.image): why for photo, why in zip(photos, shown) if why}
    return [photo for photo in photos if str(photo.image) not in bad], bad


def match_pairs(
    args: argparse.Namespace,
    store: FeatureStore,
    pairs: Iterable[Pair],
    total: int,
    adding: Sequence[Adding],
) -> np.ndarray:
    """Match and write each pair that is not done, and give every pair to the functions `adding`.

    Returns (2,), the numbers of pairs that were matched now, and that were there before.
    """
    wanted = [JSON] * args.json_files + [PICTURE] * args.pictures
    counts = np.zeros(2, int)
    with Progress(total=total, desc="matching", unit="pairs") as shown:
        for pair, new in _match_new(args, store, pairs):
            path = _file(args.out_dir, pair, MATCHES)
            missing = wanted
            if new:
                path.unlink(missing_ok=True)  # earlier matches, until all files are new
            else:
                missing = [e for e in wanted if not _file(args.out_dir, pair, e).is_file()]
                shown.initial += 1  # pairs that the pace does not count
            if missing or adding:
                # A pair that is done is read again only if something else needs its matches.
                found = new or read_npz(path, store, pair)
                _complete(args.out_dir, pair, found, missing, adding)
            if new:
                write_atomic(path, npz_of(new))
            counts[0 if new else 1] += 1
            shown.update(1)
    return counts


def _match_new(
    args: argparse.Namespace, store: FeatureStore, pairs: Iterable[Pair]
) -> Iterator[Tuple[Pair, Optional[MatchResult]]]:
    """Yield each pair, in order, with its result, or with None if its file exists."""
    matcher = store.matcher
    matcher.side_by_side()
    # Read pixels only if positions are refined by them.
    features_of = store.with_pixels if matcher.refine else store
    # A batch keeps all workers busy on a CPU, or the GPU.
    size = PAIRS_OF_A_WORKER * matcher.workers
    if matcher.device.startswith("cuda"):
        size = BATCH_ON_GPU
    waiting = iter(pairs)
    for group in iter(lambda: list(itertools.islice(waiting, size)), []):
        new = [
            pair
            for pair in group
            if args.overwrite or not _file(args.out_dir, pair, MATCHES).is_file()
        ]
        features = ((features_of(photo0), features_of(photo1)) for photo0, photo1 in new)
        results = dict(zip(new, matcher.match_batch(features, size)))
        yield from ((pair, results.get(pair)) for pair in group)


def _file(folder: Path, pair: Pair, ending: str) -> Path:
    """Return the path FOLDER/A_B_ENDING of a file of a pair."""
    return folder / f"{pair[0].name}_{pair[1].name}_{ending}"


def _complete(
    folder: Path, pair: Pair, found: MatchResult, endings: Sequence[str], adding: Sequence[Adding]
) -> None:
    """Write the JSON file or the picture of a pair, and give the pair to the functions `adding`."""
    found = dataclasses.replace(found, images=(pair[0].image, pair[1].image))
    if JSON in endings:
        about = {"image0": pair[0].name, "image1": pair[1].name}
        write_atomic(_file(folder, pair, JSON), json_of(found, about))
    if PICTURE in endings:
        found.show().save(_file(folder, pair, PICTURE))
    for add in adding:
        add(*pair, found)


def _report(folder: Path, matched: int, before: int) -> str:
    """Say how many pairs were matched, how many existed, and how many others the folder holds."""
    text = f"{matched} pairs matched: {folder}"
    if before:
        text += f"\n{before} pairs were there before, and are kept; --overwrite matches them again"
    others = sum(1 for _ in folder.glob(f"*_{MATCHES}")) - matched - before
    if others > 0:
        text += f"\n{folder} also holds {others} pairs of other commands, which are kept"
    return text


def _database(args: argparse.Namespace, photos: Sequence[Item], store: FeatureStore) -> Any:
    """Return a context manager that fills the COLMAP database that is asked for.

    See `colmap.database_of`.
    """
    from superglue_sift.interop import colmap

    root = pairing.root_of(args)
    return colmap.database_of(args.colmap, root, photos, store, args.refine, args.camera_per)


@contextlib.contextmanager
def pair_list(folder: Path, root: Path) -> Iterator[Adding]:
    """Yield a function that adds pairs of a scene to FOLDER/pairs.csv, written at the end.

    A row has the names of both files below `root`, the number of matches, and the score of the pair
    or the reason why it has none.
    """
    rows: List[Sequence[Any]] = [
        ("image0", "image1", "matches", "pair_score", "accepted", "reason")
    ]

    def add(item0: Item, item1: Item, found: MatchResult) -> None:
        """Add the row of one pair."""
        score = f"{found.pair_score:.4f}"
        reason = "" if found.accepted else "not accepted"
        if found.pair_score == verification.SKIPPED:
            score = ""
            reason = "skipped: too few classical matches"
        names = [name_below(str(item.image), root) for item in (item0, item1)]
        rows.append((*names, len(found.matches), score, int(found.accepted), reason))

    yield add
    write_csv(folder / PAIR_LIST, rows)


def npz_of(found: MatchResult) -> bytes:
    """Return the bytes of a `.npz` of a result, in the common layout.

    keypoints0, keypoints1: (M, 2) and (N, 2) float32 px.
    matches: (M,) int64, -1 without a match.
    match_confidence: (M,) float32.
    frame, turned: () and (2,), see `MatchResult`.

    Refined matches also have aligned0, aligned1 (M, 2) px, deviations (M,) px and correlations
    (M,), float32, which are NaN without a match. Pairs of a scene also have pair_score ().
    """
    matches, scores = found.dense()
    arrays: Dict[str, Any] = {
        "keypoints0": found.keypoints0,
        "keypoints1": found.keypoints1,
        "matches": matches,
        "match_confidence": scores,
        "frame": found.frame,
        "turned": found.turned,
    }
    if found.pair_score is not None:
        arrays["pair_score"] = found.pair_score
    for name in REFINED if found.aligned1 is not None else ():
        refined = getattr(found, name)
        # (K, ...) of the matches -> (M, ...) of the keypoints of image 0
        arrays[name] = np.full((len(matches), *refined.shape[1:]), np.nan, np.float32)
        arrays[name][found.matches[:, 0]] = refined
    # Write the archive to memory, so that the file appears whole.
    data = io.BytesIO()
    np.savez_compressed(data, **arrays)
    return data.getvalue()


def read_npz(path: Path, store: FeatureStore, pair: Pair) -> MatchResult:
    """Read a pair that was matched before.

    Raises RequestError for a damaged file, or a file that was made with other settings or images.
    """
    features0, features1 = map(store, pair)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        known = [arrays["keypoints0"], arrays["keypoints1"], arrays["frame"]]
        matches = Matches.from_dense(arrays["matches"], arrays["match_confidence"])
    except DAMAGED:
        raise RequestError(f"{path}: is damaged; --overwrite matches the pair again") from None
    # The indices of the matches mean nothing with other keypoints.
    now = [features0.keypoints, features1.keypoints, features0.frame]
    of_scene = "pair_score" in arrays
    if not all(map(np.array_equal, known, now)) or of_scene != (store.matcher.rules is not None):
        reason = "is of other images or settings than those of this command"
        raise RequestError(f"{path}: {reason}; --overwrite matches the pair again")
    index0 = matches.indices[:, 0]
    # (M, ...) of the keypoints of image 0 -> (K, ...) of the matches
    refined: Dict[str, Any] = {name: arrays[name][index0] for name in REFINED if name in arrays}
    if of_scene:
        refined["pair_score"] = float(arrays["pair_score"])
    return dataclasses.replace(MatchResult.of(features0, features1, matches), **refined)


def json_of(found: MatchResult, about: Mapping[str, Any]) -> bytes:
    """Return JSON of a result, with the common names, and with `about`, such as the names of the
    files.

    matches: a list of [index0, index1, score].
    frame, turned0, turned1: see `MatchResult`.
    inliers, supported, H_0to1, F_0to1: from `MatchResult.fits`. A model that is not supported fits
        as wrong matches would.
    aligned0, aligned1, deviations, correlations: in the order of the matches. An entry is null
        where refinement failed. All are null if the matches were not refined.
    """
    fits = found.fits()
    matches0, scores0 = found.dense()
    rows = zip(found.matches.tolist(), found.scores.astype(float).round(6).tolist())
    record: Dict[str, Any] = {
        **about,
        "frame": found.frame,
        "turned0": found.turned[0],
        "turned1": found.turned[1],
        "image_size0": found.size0,
        "image_size1": found.size1,
        "keypoints0": found.keypoints0.astype(float).round(3).tolist(),
        "keypoints1": found.keypoints1.astype(float).round(3).tolist(),
        "matches0": matches0.tolist(),
        "matching_scores0": scores0.astype(float).round(6).tolist(),
        "matches": [[*pair, score] for pair, score in rows],
        "pair_score": found.pair_score,
        "accepted": found.accepted,
        "inliers": {name: int(fit.inliers.sum()) for name, fit in fits.items()},
        "supported": {name: fit.supported for name, fit in fits.items()},
    }
    for name, key in (("H_0to1", "homography"), ("F_0to1", "fundamental")):
        model = fits[key].model
        record[name] = None if model is None else model.tolist()
    for name in REFINED:
        values = getattr(found, name)
        if values is not None:
            values = np.asarray(values, np.float64).round(4)
            values = np.where(np.isfinite(values), values, None).tolist()  # pyright: ignore
        record[name] = values
    return (json.dumps(record) + "\n").encode()
