"""Match the photographs of a folder, of many files or of a list, and write each result to a file.

    from superglue_sift import Matcher, match_folder

    report = match_folder(Matcher.load(), "photos", "found")  # writes found/A_B_matches.npz

The features of each photograph are computed once and kept on disk. A pair is done if its
`A_B_matches.npz` was made from the same photographs with the same settings (`results`). This file
is written last and atomically, so that the same call goes on where it was stopped. Memory holds the
names of all photographs, the features of the last 256, the pixels of the last 32, and one batch of
pairs. For a COLMAP database it also holds all matches.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch

from superglue_sift.apps.pairing import (
    AUTO,
    EXHAUSTIVE,
    PICTURE_ENDING,
    ExhaustivePairs,
    PhotoPair,
    check_pairing,
    choose_pairs,
    name_images,
    name_pairs,
    read_pair_list,
)
from superglue_sift.apps.results import JSON_ENDING, MATCHES_ENDING, MISSING, PairFiles
from superglue_sift.errors import RequestError, import_extra
from superglue_sift.features.photo_folder import find_mask, list_photos
from superglue_sift.features.store import FeatureStore, PhotoFile
from superglue_sift.files import FileName, check_writable, name_below, write_csv
from superglue_sift.geometry import verification
from superglue_sift.match_result import MatchResult
from superglue_sift.matcher import Matcher, split_batches
from superglue_sift.progress import Progress

PAIR_LIST = "pairs.csv"  # table of the pairs of a scene
PAIR_COLUMNS = ("image0", "image1", "matches", "pair_score", "accepted", "reason")
BAD_IMAGES = "bad_images.csv"
BATCH_ON_GPU = 8
# Pairs of a batch on a CPU for each worker. At the end of a batch, workers wait for its last pair.
PAIRS_OF_A_WORKER = 2

Pairs = Union[List[PhotoPair], ExhaustivePairs]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FolderReport:
    """What `match_folder` did.

    Attributes:
        matched: number of pairs that were matched.
        unchanged: number of pairs whose results were there, fit and were kept.
        matched_again: number of pairs whose results were there and did not fit, by the reason. They
            are also counted in `matched`.
        other_results: number of results in the folder that are of other pairs.
        photos: number of photographs that can be read.
        bad_images: the reason for each file that cannot be read.
    """

    matched: int
    unchanged: int
    matched_again: Mapping[str, int]
    other_results: int
    photos: int
    bad_images: Mapping[str, str]


def match_folder(
    matcher: Matcher,
    folder: FileName,
    out: FileName,
    *,
    images: Optional[Sequence[FileName]] = None,
    pairs: Union[FileName, Sequence[Tuple[FileName, FileName]], None] = None,
    pairing: str = AUTO,
    k: Optional[int] = None,
    masks: Optional[FileName] = None,
    features: Optional[FileName] = None,
    pictures: bool = False,
    json_files: bool = False,
    overwrite: bool = False,
    colmap: Optional[FileName] = None,
    camera_per: Optional[str] = None,
    refine_keypoints: bool = True,
) -> FolderReport:
    """Match pairs of photographs, and write `A_B_matches.npz` of each pair (`results.make_npz`).

    A pair whose file was made from the same photographs and masks, by the same weights with the
    same settings, is kept. So the same call goes on after a stop. Results that do not fit are made
    again, and a warning counts them.

    Args:
        matcher: the matcher. On a CPU, a copy matches one pair per core.
        folder: folder of the photographs, which are named by their paths below it.
        out: folder of the results. `bad_images.csv` lists files that cannot be read, and
            `pairs.csv` the pairs of a matcher of scenes.
        images: files to match instead of all photographs at or below `folder`.
        pairs: pairs of names below `folder`, or a text file with `a.jpg b.jpg` in each line.
        pairing: how to choose pairs: "exhaustive" for all pairs, "sequential" or "nearest" for each
            photograph with the `k` before it or with the `k` most similar ones, or "auto":
            "nearest" with `k` or for more than 200 photographs, else "exhaustive".
        k: number of photographs that each is matched with. If None, it is 5 for "sequential" and
            20 for "nearest".
        masks: folder of masks, `NAME.jpg.png` for `NAME.jpg`. Black pixels give no keypoints.
        features: folder of the features, which calls may share. If None, it is in `out`.
        pictures: also write `A_B_matches.jpg`.
        json_files: also write `A_B_matches.json`.
        overwrite: match all pairs again.
        colmap: COLMAP database to write, which must not exist.
        camera_per: "folder" or "image": what has one camera in the database. If None, photographs
            whose EXIF data name the same camera share one, and each of the others has its own.
        refine_keypoints: refine keypoints of the database by the pixels of all their pairs.

    Returns:
        A report of what was done.

    Raises:
        RequestError: If an argument is wrong, or a photograph was replaced while it was matched.
        OSError: If a file cannot be written.

    Example:
        >>> from superglue_sift import Matcher
        >>> report = match_folder(Matcher.load(max_keypoints=500), "photos", "found")
        >>> report.matched  # photos/a.jpg with photos/b.jpg
        1
    """
    folder, out = Path(folder), Path(out)
    check_folder_request(out, features, masks, colmap, pairing, k)
    matcher = dataclasses.replace(matcher)  # A copy, which changes to one core per pair
    store = FeatureStore(matcher, Path(features or out / "features"), masks, folder)
    _check_matcher(store, out, pairs, pairing, k)
    photos, bad_images, photo_pairs = _extract_and_pair(store, images, pairs, pairing, k)
    database = _open_database(colmap, photos, store, refine_keypoints, camera_per)
    endings = [JSON_ENDING] * json_files + [PICTURE_ENDING] * pictures
    counts = _match_all(store, PairFiles(out, store), photo_pairs, overwrite, endings, database)
    _write_bad_images(out / BAD_IMAGES, bad_images)
    return FolderReport(*counts, len(photos), bad_images)


# --- checks before any work


def check_folder_request(
    out: Optional[FileName] = None,
    features: Optional[FileName] = None,
    masks: Optional[FileName] = None,
    colmap: Optional[FileName] = None,
    pairing: str = AUTO,
    k: Optional[int] = None,
) -> None:
    """Raise RequestError if an argument of `match_folder` is wrong. Nothing is written."""
    check_pairing(pairing, k)
    if masks and not Path(masks).is_dir():
        raise RequestError(f"--masks {masks}: no such folder")
    for directory in filter(None, (features, out)):
        check_writable(Path(directory) / BAD_IMAGES, named=directory)
    if colmap:
        # An earlier database would get its images twice.
        if Path(colmap).exists():
            fix = "name another, or leave out the photographs to match the features that it holds"
            raise RequestError(f"--colmap {colmap}: exists already; {fix}")
        check_writable(colmap)
        import_extra("pycolmap", "colmap")


def _check_matcher(
    store: FeatureStore, out: Path, pairs: Any, pairing: str, k: Optional[int]
) -> None:
    """Raise RequestError if the matcher does not fit the other arguments of `match_folder`."""
    extractor = store.matcher.extractor
    # Without this check, each photograph would be listed as one that cannot be read.
    if extractor is None:
        name = store.matcher.model.config.extractor
        reason = f"the model needs this code to find keypoints: extractor='{name}'"
        raise RequestError(f"--extractor {name}: required, since {reason}")
    if not store.is_sift and (pairing == "nearest" or (pairing == AUTO and k)):
        fix = "use exhaustive or sequential"
        raise RequestError(f"--pairing nearest compares SIFT features; {fix}")
    table = out / PAIR_LIST
    is_file = isinstance(pairs, (str, Path))
    if store.matcher.rules and is_file and Path(pairs).resolve() == table.resolve():
        raise RequestError(f"{pairs}: is an input, and would be overwritten; name another folder")


def check_masks(images: Sequence[Path], masks: Path, root: Path) -> None:
    """Raise RequestError if no image has a mask, since the masks then probably have wrong names.

    Args:
        images: the files of the images.
        masks: the folder of masks.
        root: the folder of the images. A mask has the path of its image below it, plus ".png".
    """
    if not any(find_mask(masks, name_below(path, root)) for path in images):
        name = name_below(images[0], root)
        raise RequestError(f"--masks {masks}: holds no mask of any image; {name}.png would be one")


def _extract_and_pair(
    store: FeatureStore,
    images: Optional[Sequence[FileName]],
    pairs: Union[FileName, Sequence[Tuple[FileName, FileName]], None],
    pairing: str,
    k: Optional[int],
) -> Tuple[List[PhotoFile], Dict[str, str], Pairs]:
    """Extract all features, and choose the pairs.

    Args:
        store: the features, and the matcher.
        images, pairs, pairing, k: the arguments of `match_folder`.

    Returns:
        The photographs that can be read, the reason for each path that cannot be read, and the
        pairs.

    Raises:
        RequestError: If a list or a folder cannot be read.
    """
    if pairs is None:
        paths = list_photos(store.root) if images is None else images
        photos, bad_images = extract_photos(name_images(paths, store.root), store)
        # Photographs are similar if their SIFT features are, so "nearest" needs SIFT.
        if pairing == AUTO and not store.is_sift:
            pairing = EXHAUSTIVE
        return photos, bad_images, choose_pairs(photos, store, pairing, k)
    if isinstance(pairs, (str, Path)):
        named_pairs = read_pair_list(Path(pairs), store.root)
    else:
        named_pairs = name_pairs(pairs, store.root)
    named_photos = list(dict.fromkeys(itertools.chain.from_iterable(named_pairs)))
    photos, bad_images = extract_photos(named_photos, store)
    # Leave out pairs with a photograph that cannot be read.
    readable = set(photos)
    return photos, bad_images, [pair for pair in named_pairs if readable.issuperset(pair)]


def extract_photos(
    photos: Sequence[PhotoFile], store: FeatureStore
) -> Tuple[List[PhotoFile], Dict[str, str]]:
    """Extract the features that the store lacks, and write them there.

    Args:
        photos: the photographs.
        store: the features, and the matcher.

    Returns:
        The photographs that can be read, and the reason for each path that cannot be read.

    Raises:
        RequestError: If the folder of masks has none of these photographs.
    """
    if store.masks:
        check_masks([photo.path for photo in photos], store.masks, store.root)

    def extract(photo: PhotoFile) -> str:
        """Extract one photograph. Return why it cannot be read, or ""."""
        try:
            store.prepare(photo)
        except RequestError as error:
            return str(error).replace(f"{photo.path}: ", "", 1)
        return ""

    # One thread reads a file while SIFT of the other thread runs.
    with ThreadPoolExecutor(2) as pool:
        reasons = pool.map(extract, photos)
        reasons = list(Progress(reasons, total=len(photos), desc="features", unit="images"))
    bad_images = {str(photo.path): reason for photo, reason in zip(photos, reasons) if reason}
    return [photo for photo in photos if str(photo.path) not in bad_images], bad_images


# --- matches of all pairs


def _open_database(
    path: Optional[FileName],
    photos: Sequence[PhotoFile],
    store: FeatureStore,
    refine_keypoints: bool,
    camera_per: Optional[str],
) -> Any:
    """Return a context manager that creates a COLMAP database, or None without a path."""
    if not path:
        return None
    # pycolmap is an extra, so it is imported only for a database.
    from superglue_sift.interop.colmap import create_database

    return create_database(Path(path), store.root, photos, store, refine_keypoints, camera_per)


def _match_all(
    store: FeatureStore,
    files: PairFiles,
    pairs: Pairs,
    overwrite: bool,
    endings: Sequence[str],
    database: Any,
) -> Tuple[int, int, Dict[str, int], int]:
    """Match the pairs, and write their files, the table of a scene, and the database.

    Args:
        store: the features, and the matcher.
        files: the files of the pairs.
        pairs: the pairs.
        overwrite: match all pairs again.
        endings: JSON_ENDING and PICTURE_ENDING, if these files are wanted.
        database: the context manager of `_open_database`.

    Returns:
        The first four attributes of a FolderReport.
    """
    done, matched_again, other_results = _find_done_pairs(files, pairs, overwrite)
    rules = store.matcher.rules
    needs_all = rules is not None or database is not None
    rows: List[Sequence[Any]] = [PAIR_COLUMNS]
    with _use_one_core_per_pair(store.matcher), database or contextlib.nullcontext() as add_pair:
        for pair, result in _match_pairs(store, files, pairs, done, endings, needs_all):
            if rules and result is not None:
                rows.append(_make_row(store.root, *pair, result))
            if add_pair:
                add_pair(*pair, result)
    table = files.folder / PAIR_LIST
    if rules:
        write_csv(table, rows)
    # The table of an earlier call for a scene lists results that were matched again.
    elif table.is_file() and table.read_bytes().startswith(",".join(PAIR_COLUMNS).encode()):
        table.unlink()
    return len(done) - sum(done), sum(done), matched_again, other_results


@contextlib.contextmanager
def _use_one_core_per_pair(matcher: Matcher) -> Iterator[None]:
    """Match one pair per core on a CPU, and give torch its threads back at the end."""
    threads = torch.get_num_threads()
    matcher.use_one_core_per_pair()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _find_done_pairs(
    files: PairFiles, pairs: Pairs, overwrite: bool
) -> Tuple[bytearray, Dict[str, int], int]:
    """Find the pairs that are done: their results are there and fit.

    Args:
        files: the files of the pairs.
        pairs: the pairs.
        overwrite: no pair counts as done.

    Returns:
        Whether each pair is done (0 or 1), the number of results that do not fit by the reason, and
        the number of results of other pairs in the folder.
    """
    names = files.list_matches_files()
    done = bytearray(len(pairs))
    reasons: Dict[str, int] = collections.Counter()
    is_quick = overwrite or not names
    shown = Progress(pairs, total=len(pairs), desc="checking", unit="pairs", disable=is_quick)
    for number, pair in enumerate(shown):
        name = files.get_path(pair, MATCHES_ENDING).name
        if name not in names:
            continue
        names.remove(name)
        reason = None if overwrite else files.explain_misfit(pair)
        done[number] = reason is None and not overwrite
        if reason not in (None, MISSING):
            reasons[reason] += 1
    if reasons:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        logger.warning("%d pairs are matched again: %s", sum(reasons.values()), counts)
    return done, dict(reasons), len(names)


def _match_pairs(
    store: FeatureStore,
    files: PairFiles,
    pairs: Pairs,
    done: Sequence[int],
    endings: Sequence[str],
    needs_all: bool,
) -> Iterator[Tuple[PhotoPair, Optional[MatchResult]]]:
    """Match and write each pair that is not done, and write missing files of the others.

    Args:
        store: the features, and the matcher.
        files: the files of the pairs.
        pairs: the pairs.
        done: whether each pair is done (0 or 1).
        endings: JSON_ENDING and PICTURE_ENDING, if these files are wanted.
        needs_all: read the results of pairs that are done, too.

    Yields:
        Each pair in order with its result, or with None if the result was not read.
    """
    matcher = store.matcher
    # Only refinement needs pixels.
    read_features = store.with_pixels if matcher.refine else store
    # A batch keeps the GPU busy, or all workers of a CPU.
    on_gpu = matcher.device.startswith("cuda")
    size = BATCH_ON_GPU if on_gpu else PAIRS_OF_A_WORKER * matcher.workers
    with Progress(total=len(pairs), desc="matching", unit="pairs") as shown:
        # There may be millions of pairs, so they are read group by group.
        for group in split_batches(zip(pairs, done), size):
            new_pairs = [pair for pair, is_done in group if not is_done]
            features = (
                (read_features(photo0), read_features(photo1)) for photo0, photo1 in new_pairs
            )
            results = dict(zip(new_pairs, matcher.match_batch(features, size)))
            for pair, is_done in group:
                yield pair, _write_missing_files(files, pair, results.get(pair), endings, needs_all)
                shown.initial += is_done  # The pace does not count it.
                shown.update(1)


def _write_missing_files(
    files: PairFiles,
    pair: PhotoPair,
    result: Optional[MatchResult],
    endings: Sequence[str],
    is_needed: bool,
) -> Optional[MatchResult]:
    """Write the missing files of a pair.

    Args:
        files: the files of the pairs.
        pair: the pair.
        result: the new result, or None for a pair that was done.
        endings: JSON_ENDING and PICTURE_ENDING, if these files are wanted.
        is_needed: read the result of a pair that was done.

    Returns:
        The result, or None if it was not read.
    """
    if result is not None:
        files.write(pair, result, endings)
        return result
    missing = [ending for ending in endings if files.is_missing(pair, ending)]
    if not missing and not is_needed:
        return None
    result = files.read(pair)
    for ending in missing:
        files.write_extra_file(pair, result, ending)
    return result


def _make_row(
    root: Path, photo0: PhotoFile, photo1: PhotoFile, result: MatchResult
) -> Tuple[Any, ...]:
    """Return the row of pairs.csv, with PAIR_COLUMNS, for one pair of a scene."""
    score = f"{result.pair_score:.4f}"
    reason = "" if result.accepted else "not accepted"
    # A pair that `preview_pair` skipped was never judged, so it has no score.
    if result.pair_score == verification.SKIPPED:
        score = ""
        reason = "skipped: too few classical matches"
    names = (name_below(photo.path, root) for photo in (photo0, photo1))
    return (*names, len(result.matches), score, int(result.accepted), reason)


def _write_bad_images(path: Path, bad_images: Mapping[str, str]) -> None:
    """Write the table of bad images, or delete that of an earlier call if there are none."""
    path.unlink(missing_ok=True)
    if bad_images:
        write_csv(path, [("image", "reason"), *bad_images.items()])
