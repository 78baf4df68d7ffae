"""Match the photographs of a folder, of many files or of a list, and write each result to a file.

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
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from superglue_sift.apps.pairing import (
    PICTURE,
    ItemPair,
    choose_pairs,
    listed_pairs,
    named_inputs,
    root_of,
)
from superglue_sift.errors import RequestError, WorkError
from superglue_sift.features.images import find_mask
from superglue_sift.features.store import FeatureStore, Item, read_npz
from superglue_sift.files import name_below, write_atomic, write_csv
from superglue_sift.geometry import verification
from superglue_sift.match_result import REFINED, MatchResult
from superglue_sift.matcher import Matcher, groups
from superglue_sift.matches import Matches
from superglue_sift.progress import Progress

# Endings of the files of a pair, besides PICTURE
MATCHES = "matches.npz"
JSON = "matches.json"

PAIR_LIST = "pairs.csv"  # table of the pairs of a scene
PAIR_COLUMNS = ("image0", "image1", "matches", "pair_score", "accepted", "reason")
BAD_IMAGES = "bad_images.csv"
BATCH_ON_GPU = 8
PAIRS_OF_A_WORKER = 2  # in a batch on a CPU, where workers wait for the last pair of a batch

# --- the pairs are matched


def match_folder(args: argparse.Namespace, matcher: Matcher) -> int:
    """Match any number of pairs into --out-dir; return the exit code.

    Raises WorkError if some photographs cannot be read, after the others are matched.
    """
    # Extract the features of all photographs, which are kept, and choose the pairs to match.
    root = root_of(args)
    store = FeatureStore(matcher, args.features or args.out_dir / "features", args.masks, root)
    photos, bad, pairs, total = _prepare(args, store)
    # pycolmap is an extra, so it is imported only for a database.
    database: Any = contextlib.nullcontext()
    if args.colmap:
        from superglue_sift.interop.colmap import database_of

        refine = args.refine is not False
        database = database_of(args.colmap, root, photos, store, refine, args.camera_per)
    # Match the pairs. The table and the database get each of them.
    rows: List[Sequence[Any]] = [PAIR_COLUMNS]
    before = 0
    with database as add:
        for pair, found, is_new in match_pairs(args, store, pairs, total):
            before += not is_new
            if matcher.rules and found is not None:
                rows.append(_row(root, *pair, found))
            if args.colmap:
                add(*pair, found)
    if matcher.rules:
        write_csv(args.out_dir / PAIR_LIST, rows)
    # Say what was done, and which photographs are bad.
    print(f"{total - before} pairs matched: {args.out_dir}")
    if before:
        print(f"{before} pairs were there before, and are kept; --overwrite matches them again")
    if args.colmap:
        print(f"{args.colmap}: in pixels as stored in the files, as COLMAP reads them")
    # The list of an earlier command may name photographs that are repaired now.
    path = args.out_dir / BAD_IMAGES
    path.unlink(missing_ok=True)
    if bad:
        write_csv(path, [("image", "reason"), *bad.items()])
        images = f"{len(bad)} of {len(photos) + len(bad)} images"
        rest = "the others are matched" if total else "no pair is left to match"
        raise WorkError(f"{images} cannot be read, {rest}; see {path}")
    return 0


def _prepare(
    args: argparse.Namespace, store: FeatureStore
) -> Tuple[List[Item], Dict[str, str], Iterable[ItemPair], int]:
    """Extract all features, and choose the pairs.

    Returns the photographs that can be read, the reason for each path that cannot be read, the
    pairs, and the number of pairs. Raises RequestError for a list that cannot be read, and for
    pairs by similarity without SIFT.
    """
    if args.pairs:
        listed = listed_pairs(args.pairs, root_of(args))
        photos, bad = extract_photos(list(dict.fromkeys(itertools.chain(*listed))), store)
        # Leave out pairs with a photograph that cannot be read.
        readable = set(photos)
        pairs = [pair for pair in listed if readable.issuperset(pair)]
        return photos, bad, pairs, len(pairs)
    kind = args.pairing or "auto"
    if not store.is_sift and kind in ("auto", "nearest"):
        if kind == "nearest" or args.k:
            fix = "use exhaustive or sequential"
            raise RequestError(f"--pairing nearest compares SIFT features; {fix}")
        kind = "exhaustive"
    photos, bad = extract_photos(named_inputs(args), store)
    return photos, bad, *choose_pairs(photos, store, kind, args.k)


def check_masks(images: Sequence[Path], masks: Path, root: Path) -> None:
    """Raise RequestError if the folder of masks holds none for these images."""
    # Masks with other names would be ignored without a word.
    if not any(find_mask(masks, name_below(path, root)) for path in images):
        name = name_below(images[0], root)
        raise RequestError(f"--masks {masks}: holds no mask of any image; {name}.png would be one")


def extract_photos(
    photos: Sequence[Item], store: FeatureStore
) -> Tuple[List[Item], Dict[str, str]]:
    """Extract missing features. Return the photographs that can be read, and, for each path that
    cannot be read, the reason. Raises RequestError if there are masks, but none of a photograph.
    """
    if store.masks:
        check_masks([photo.image for photo in photos], store.masks, store.root)

    def reason(photo: Item) -> str:
        """Extract one photograph; return why it cannot be read, or ""."""
        try:
            store.prepare(photo)
        except RequestError as error:
            return str(error).replace(f"{photo.image}: ", "", 1)
        return ""

    # One of two threads can read a file while SIFT of the other one runs.
    with ThreadPoolExecutor(2) as pool:
        reasons = pool.map(reason, photos)
        shown = list(Progress(reasons, total=len(photos), desc="features", unit="images"))
    bad = {str(photo.image): why for photo, why in zip(photos, shown) if why}
    return [photo for photo in photos if str(photo.image) not in bad], bad


def match_pairs(
    args: argparse.Namespace, store: FeatureStore, pairs: Iterable[ItemPair], total: int
) -> Iterator[Tuple[ItemPair, Optional[MatchResult], bool]]:
    """Match and write each pair that is not done.

    Yields, for each pair in order, its matches and whether they are new. The matches of a pair that
    was done are None, unless a scene, a database or a further file needs them.
    """
    matcher = store.matcher
    matcher.use_one_core_per_pair()
    # Read pixels only if positions are refined by them.
    features_of = store.with_pixels if matcher.refine else store
    # A batch keeps all workers busy on a CPU, or the GPU.
    on_gpu = matcher.device.startswith("cuda")
    size = BATCH_ON_GPU if on_gpu else PAIRS_OF_A_WORKER * matcher.workers
    with Progress(total=total, desc="matching", unit="pairs") as shown:
        # `pairs` may be millions, and are read group by group.
        for group in groups(pairs, size):
            # Match the pairs of the group that have no file yet.
            kept = [] if args.overwrite else [p for p in group if _file(args, p, MATCHES).is_file()]
            new = [pair for pair in group if pair not in kept]
            features = ((features_of(photo0), features_of(photo1)) for photo0, photo1 in new)
            results = dict(zip(new, matcher.match_batch(features, size)))
            for pair in group:
                yield pair, _write_pair(args, store, pair, results.get(pair)), pair in results
                shown.initial += pair in kept  # pairs that the pace does not count
                shown.update(1)


def _file(args: argparse.Namespace, pair: ItemPair, ending: str) -> Path:
    """Return the path OUT-DIR/A_B_ENDING of a file of a pair."""
    return args.out_dir / f"{pair[0].name}_{pair[1].name}_{ending}"


def _write_pair(
    args: argparse.Namespace, store: FeatureStore, pair: ItemPair, new: Optional[MatchResult]
) -> Optional[MatchResult]:
    """Write the missing files of a pair; return its matches if they are needed.

    new: its matches, or None if the pair is done.
    """
    path = _file(args, pair, MATCHES)
    if new:
        path.unlink(missing_ok=True)  # earlier matches, until all files are new
    wanted = [JSON] * args.json_files + [PICTURE] * args.pictures
    missing = [each for each in wanted if new or not _file(args, pair, each).is_file()]
    # A pair that is done is read again only if something needs its matches.
    if not (new or missing or store.matcher.rules or args.colmap):
        return None
    found = new or read_pair(path, store, pair)
    found = dataclasses.replace(found, images=(pair[0].image, pair[1].image))
    if JSON in missing:
        about = {"image0": pair[0].name, "image1": pair[1].name}
        write_atomic(_file(args, pair, JSON), json_of(found, about))
    if PICTURE in missing:
        found.show().save(_file(args, pair, PICTURE))
    # The matches are written last, since a pair counts as done if they are there.
    if new:
        write_atomic(path, npz_of(new))
    return found


def _row(root: Path, item0: Item, item1: Item, found: MatchResult) -> Tuple[Any, ...]:
    """Return the row of pairs.csv for one pair of a scene. Its columns are PAIR_COLUMNS."""
    score = f"{found.pair_score:.4f}"
    reason = "" if found.accepted else "not accepted"
    # A pair that the first look skipped was never judged, so it has no score.
    if found.pair_score == verification.SKIPPED:
        score = ""
        reason = "skipped: too few classical matches"
    names = (name_below(item.image, root) for item in (item0, item1))
    return (*names, len(found.matches), score, int(found.accepted), reason)


# --- the files of a pair


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


def read_pair(path: Path, store: FeatureStore, pair: ItemPair) -> MatchResult:
    """Read a pair that was matched before.

    Raises RequestError for a damaged file, or a file that was made with other settings or images.
    """
    arrays = read_npz(path) or {}
    features0, features1 = map(store, pair)
    of_scene = "pair_score" in arrays
    # The indices of the matches mean nothing with other keypoints.
    same = {"keypoints0": features0.keypoints, "keypoints1": features1.keypoints}
    same["frame"] = np.array(features0.frame)
    reason = ""
    if not {*same, "matches", "match_confidence"} <= arrays.keys():
        reason = "is damaged, or of another program"
    elif of_scene != (store.matcher.rules is not None):
        how = "with --scene" if of_scene else "without --scene, which --colmap implies"
        reason = f"was made {how}"
    elif not all(np.array_equal(arrays[name], value) for name, value in same.items()):
        reason = "was made with other images or settings"
    if reason:
        raise RequestError(f"{path}: {reason}; --overwrite matches the pair again")
    matches = Matches.from_dense(arrays["matches"], arrays["match_confidence"])
    # (M, ...) of the keypoints of image 0 -> (K, ...) of the matches
    index0 = matches.indices[:, 0]
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

    def rounded(values: Optional[np.ndarray], digits: int) -> Any:
        """Return a list, with null for numbers that are not finite."""
        if values is None:
            return None
        values = values.astype(float).round(digits)
        # JSON has no NaN.
        return np.where(np.isfinite(values), values, None).tolist()  # pyright: ignore

    fits = found.fits()
    matches0, scores0 = found.dense()
    record: Dict[str, Any] = {
        **about,
        "frame": found.frame,
        "turned0": found.turned[0],
        "turned1": found.turned[1],
        "image_size0": found.size0,
        "image_size1": found.size1,
        "keypoints0": rounded(found.keypoints0, 3),
        "keypoints1": rounded(found.keypoints1, 3),
        "matches0": matches0.tolist(),
        "matching_scores0": rounded(scores0, 6),
        "matches": [
            [*pair, score] for pair, score in zip(found.matches.tolist(), rounded(found.scores, 6))
        ],
        "pair_score": found.pair_score,
        "accepted": found.accepted,
        "inliers": {name: int(fit.inliers.sum()) for name, fit in fits.items()},
        "supported": {name: fit.supported for name, fit in fits.items()},
        **{name: rounded(getattr(found, name), 4) for name in REFINED},
    }
    for name, key in (("H_0to1", "homography"), ("F_0to1", "fundamental")):
        model = fits[key].model
        record[name] = None if model is None else model.tolist()
    return (json.dumps(record) + "\n").encode()
