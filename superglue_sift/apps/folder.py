"""Match the photographs of a folder, of many files or of a list, and write each result to a file.

    from superglue_sift import Matcher, match_folder

    report = match_folder(Matcher.load(), "photos", "found")  # writes found/A_B_matches.npz

The features of each photograph are computed once and kept on disk. A pair is done if its
`A_B_matches.npz` was made from the same photographs with the same settings (`results`). This file
is written last and atomically, so that a call that was stopped is resumed by the same call. Memory
holds the names of all photographs, but features of only the last 256, pixels of the last 32, and
one batch of pairs. For a COLMAP database it also holds all matches.
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
    PICTURE,
    ExhaustivePairs,
    PhotoPair,
    check_pairing,
    choose_pairs,
    name_images,
    name_pairs,
    read_pair_list,
)
from superglue_sift.apps.results import JSON, MATCHES, MISSING, PairFiles
from superglue_sift.errors import RequestError, import_extra
from superglue_sift.features.photo_folder import find_mask, list_photos
from superglue_sift.features.store import FeatureStore, PhotoFile
from superglue_sift.files import FileName, check_writable, name_below, write_csv
from superglue_sift.geometry import verification
from superglue_sift.match_result import MatchResult
from superglue_sift.matcher import Matcher, groups
from superglue_sift.progress import Progress

PAIR_LIST = "pairs.csv"  # table of the pairs of a scene
PAIR_COLUMNS = ("image0", "image1", "matches", "pair_score", "accepted", "reason")
BAD_IMAGES = "bad_images.csv"
BATCH_ON_GPU = 8
PAIRS_OF_A_WORKER = 2  # in a batch on a CPU, where workers wait for the last pair of a batch

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
        others: number of results in the folder that are of other pairs.
        photos: number of photographs that can be read.
        bad_images: the reason for each file that cannot be read.
    """

    matched: int
    unchanged: int
    matched_again: Mapping[str, int]
    others: int
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
    """Match pairs of photographs, and write `A_B_matches.npz` of each pair (`results.npz_of`).

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
        RequestError: an argument is wrong, or a photograph was replaced while it was matched.
        OSError: a file cannot be written.

    Example:
        >>> from superglue_sift import Matcher
        >>> report = match_folder(Matcher.load(max_keypoints=500), "photos", "found")
        >>> report.matched  # photos/a.jpg with photos/b.jpg
        1
    """
    folder, out = Path(folder), Path(out)
    check_request(out, features, masks, colmap, pairing, k)
    matcher = dataclasses.replace(matcher)  # a copy, since it changes to one core per pair
    store = FeatureStore(matcher, Path(features or out / "features"), masks, folder)
    _check_matcher(store, out, pairs, pairing, k)
    photos, bad_images, photo_pairs = _prepare(store, images, pairs, pairing, k)
    database = _database(colmap, photos, store, refine_keypoints, camera_per)
    endings = [JSON] * json_files + [PICTURE] * pictures
    counts = _match_all(store, PairFiles(out, store), photo_pairs, overwrite, endings, database)
    _write_bad_images(out / BAD_IMAGES, bad_images)
    return FolderReport(*counts, len(photos), bad_images)


# --- what is asked for


def check_request(
    out: Optional[FileName] = None,
    features: Optional[FileName] = None,
    masks: Optional[FileName] = None,
    colmap: Optional[FileName] = None,
    pairing: str = AUTO,
    k: Optional[int] = None,
) -> None:
    """Check arguments of `match_folder` before any work. Raises RequestError for a wrong one."""
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
    """Raise RequestError if the folder of masks holds none for these images."""
    # Masks with other names would be ignored without a word.
    if not any(find_mask(masks, name_below(path, root)) for path in images):
        name = name_below(images[0], root)
        raise RequestError(f"--masks {masks}: holds no mask of any image; {name}.png would be one")


def _prepare(
    store: FeatureStore,
    images: Optional[Sequence[FileName]],
    pairs: Union[FileName, Sequence[Tuple[FileName, FileName]], None],
    pairing: str,
    k: Optional[int],
) -> Tuple[List[PhotoFile], Dict[str, str], Pairs]:
    """Extract all features, and choose the pairs. The arguments are those of `match_folder`.

    Returns:
        The photographs that can be read, the reason for each path that cannot be read, and the
        pairs.

    Raises:
        RequestError: For a list or a folder that cannot be read.
    """
    if pairs is None:
        paths = list_photos(store.root) if images is None else images
        photos, bad_images = extract_photos(name_images(paths, store.root), store)
        # The similarity of photographs is that of their SIFT.
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
    """Extract missing features.

    Returns:
        The photographs that can be read, and, for each path that cannot be read, the reason.

    Raises:
        RequestError: If there are masks, but none of a photograph.
    """
    if store.masks:
        check_masks([photo.path for photo in photos], store.masks, store.root)

    def extract(photo: PhotoFile) -> str:
        """Extract one photograph; return why it cannot be read, or ""."""
        try:
            store.prepare(photo)
        except RequestError as error:
            return str(error).replace(f"{photo.path}: ", "", 1)
        return ""

    # One of two threads can read a file while SIFT of the other one runs.
    with ThreadPoolExecutor(2) as pool:
        reasons = pool.map(extract, photos)
        reasons = list(Progress(reasons, total=len(photos), desc="features", unit="images"))
    bad_images = {str(photo.path): reason for photo, reason in zip(photos, reasons) if reason}
    return [photo for photo in photos if str(photo.path) not in bad_images], bad_images


# --- pairs are matched


def _database(
    path: Optional[FileName],
    photos: Sequence[PhotoFile],
    store: FeatureStore,
    refine_keypoints: bool,
    camera_per: Optional[str],
) -> Any:
    """Return the context manager of a new COLMAP database, or None without a path."""
    if not path:
        return None
    # pycolmap is an extra, so it is imported only for a database.
    from superglue_sift.interop.colmap import database_of

    return database_of(Path(path), store.root, photos, store, refine_keypoints, camera_per)


def _match_all(
    store: FeatureStore,
    files: PairFiles,
    pairs: Pairs,
    overwrite: bool,
    endings: Sequence[str],
    database: Any,
) -> Tuple[int, int, Dict[str, int], int]:
    """Match the pairs into their files, into the table of a scene, and into the database, if any.

    Returns:
        The first four numbers of a FolderReport.
    """
    fits, matched_again, others = _check_results(files, pairs, overwrite)
    rules = store.matcher.rules
    needs_all = rules is not None or database is not None
    rows: List[Sequence[Any]] = [PAIR_COLUMNS]
    with _one_core_per_pair(store.matcher), database or contextlib.nullcontext() as add:
        for pair, result in _match_pairs(store, files, pairs, fits, endings, needs_all):
            if rules and result is not None:
                rows.append(_row(store.root, *pair, result))
            if add:
                add(*pair, result)
    table = files.folder / PAIR_LIST
    if rules:
        write_csv(table, rows)
    # The table of an earlier call lists results of a scene, which are there no more.
    elif table.is_file() and table.read_bytes().startswith(",".join(PAIR_COLUMNS).encode()):
        table.unlink()
    return len(fits) - sum(fits), sum(fits), matched_again, others


@contextlib.contextmanager
def _one_core_per_pair(matcher: Matcher) -> Iterator[None]:
    """Match one pair per core on a CPU, and give torch its threads back at the end."""
    threads = torch.get_num_threads()
    matcher.use_one_core_per_pair()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _check_results(
    files: PairFiles, pairs: Pairs, overwrite: bool
) -> Tuple[bytearray, Dict[str, int], int]:
    """Find the pairs whose results are there and fit.

    Returns:
        Whether each pair fits (0 or 1), how many do not fit by the reason, and the number of
        results in the folder that are of other pairs.
    """
    names = files.existing()
    fits = bytearray(len(pairs))
    reasons: Dict[str, int] = collections.Counter()
    is_quick = overwrite or not names
    shown = Progress(pairs, total=len(pairs), desc="checking", unit="pairs", disable=is_quick)
    for number, pair in enumerate(shown):
        name = files.path(pair, MATCHES).name
        if name not in names:
            continue
        names.remove(name)
        reason = None if overwrite else files.misfit(pair)
        fits[number] = reason is None and not overwrite
        if reason not in (None, MISSING):
            reasons[reason] += 1
    if reasons:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        logger.warning("%d pairs are matched again: %s", sum(reasons.values()), counts)
    return fits, dict(reasons), len(names)


def _match_pairs(
    store: FeatureStore,
    files: PairFiles,
    pairs: Pairs,
    fits: Sequence[int],
    endings: Sequence[str],
    needs_all: bool,
) -> Iterator[Tuple[PhotoPair, Optional[MatchResult]]]:
    """Match and write each pair that is not done, and write missing files of the others.

    Args:
        store: the features, and the matcher.
        files: the files of the pairs.
        pairs: the pairs.
        fits: whether the result of each pair is there and fits.
        endings: JSON and PICTURE, if they are asked for.
        needs_all: yield the results of all pairs.

    Yields:
        Each pair in order with its result, or with None for a pair that was done, unless
        `needs_all`.
    """
    matcher = store.matcher
    # Read pixels only if positions are refined by them.
    features_of = store.with_pixels if matcher.refine else store
    # A batch keeps all workers busy on a CPU, or the GPU.
    on_gpu = matcher.device.startswith("cuda")
    size = BATCH_ON_GPU if on_gpu else PAIRS_OF_A_WORKER * matcher.workers
    with Progress(total=len(pairs), desc="matching", unit="pairs") as shown:
        # `pairs` may be millions, and are read group by group.
        for group in groups(zip(pairs, fits), size):
            new = [pair for pair, is_done in group if not is_done]
            features = ((features_of(photo0), features_of(photo1)) for photo0, photo1 in new)
            results = dict(zip(new, matcher.match_batch(features, size)))
            for pair, is_done in group:
                yield pair, _finish(files, pair, results.get(pair), endings, needs_all)
                shown.initial += is_done  # pairs that the pace does not count
                shown.update(1)


def _finish(
    files: PairFiles,
    pair: PhotoPair,
    result: Optional[MatchResult],
    endings: Sequence[str],
    is_needed: bool,
) -> Optional[MatchResult]:
    """Write the missing files of a pair; return its result, or None if it was not read.

    Args:
        result: the new result, or None for a pair that was done.
    """
    if result is not None:
        files.write(pair, result, endings)
        return result
    missing = [ending for ending in endings if files.lacks(pair, ending)]
    if not missing and not is_needed:
        return None
    result = files.read(pair)
    for ending in missing:
        files.write_more(pair, result, ending)
    return result


def _row(root: Path, photo0: PhotoFile, photo1: PhotoFile, result: MatchResult) -> Tuple[Any, ...]:
    """Return the row of pairs.csv for one pair of a scene. Its columns are PAIR_COLUMNS."""
    score = f"{result.pair_score:.4f}"
    reason = "" if result.accepted else "not accepted"
    # A pair that the first look skipped was never judged, so it has no score.
    if result.pair_score == verification.SKIPPED:
        score = ""
        reason = "skipped: too few classical matches"
    names = (name_below(photo.path, root) for photo in (photo0, photo1))
    return (*names, len(result.matches), score, int(result.accepted), reason)


def _write_bad_images(path: Path, bad_images: Mapping[str, str]) -> None:
    """Write the table of bad images.

    If there are none, delete the table of an earlier call, whose images may be repaired now.
    """
    path.unlink(missing_ok=True)
    if bad_images:
        write_csv(path, [("image", "reason"), *bad_images.items()])
