"""Match the photographs of a folder, of many files or of a list, and write each result to a file.

    from superglue_sift import Matcher, match_folder

    report = match_folder(Matcher.load(), "photos", "found")  # writes found/A_B_matches.npz

The features of each photograph are computed once and kept on disk. A pair is skipped if its file
`A_B_matches.npz` is up to date (`results`). This file is written last and atomically, so that the
same call resumes where it was stopped. Memory holds the names of all photographs and pairs, the
features of the last 256 photographs, the pixels of the last 32, and one batch of pairs. For a
COLMAP database it also holds all matches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import (
    Any,
    Collection,
    Dict,
    Generator,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch

from superglue_sift.apps.pairing import (
    AUTO,
    PICTURE_ENDING,
    PhotoPair,
    check_pairing,
    choose_pairs,
    name_images,
    name_pairs,
    read_pair_list,
    resolve_pairing,
)
from superglue_sift.apps.results import JSON_ENDING, MATCHES_ENDING, PairFiles
from superglue_sift.apps.store import FeatureStore, PhotoFile
from superglue_sift.errors import RequestError, import_extra
from superglue_sift.features.images import BadImage
from superglue_sift.features.photo_folder import check_masks, list_photos
from superglue_sift.files import FileName, name_below, write_csv
from superglue_sift.match_result import MatchResult
from superglue_sift.matcher import Matcher, split_batches
from superglue_sift.progress import Progress
from superglue_sift.scene import SKIPPED

PAIR_LIST = "pairs.csv"  # table of the pairs of a scene
PAIR_COLUMNS = ("image0", "image1", "matches", "pair_score", "accepted", "reason")
BAD_IMAGES = "bad_images.csv"
BATCH_ON_GPU = 8
# Pairs of a batch on a CPU for each worker. At the end of a batch, workers wait for its last pair.
PAIRS_OF_A_WORKER = 2

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FolderReport:
    """What `match_folder` did.

    Attributes:
        matched: number of pairs that were matched.
        unchanged: number of pairs that were skipped, since their results are up to date.
        matched_again: number of pairs whose results were out of date or damaged. They are also
            counted in `matched`.
        other_results: number of results in the folder that are of other pairs.
        photos: number of photographs that can be read.
        bad_images: the reason for each file that cannot be read.
    """

    matched: int
    unchanged: int
    matched_again: int
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
    colmap: Optional[FileName] = None,
    camera_per: Optional[str] = None,
    refine_keypoints: bool = True,
) -> FolderReport:
    """Match pairs of photographs, and write `A_B_matches.npz` of each pair (`results.make_npz`).

    A pair whose file was made from the same photographs and masks, by the same weights with the
    same settings, is kept. So the same call resumes after a stop. Results that do not fit are made
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
    features = Path(features or out / "features")
    _check_request(matcher, folder, out, pairs, pairing, k, masks, colmap)

    # --- photographs and their features

    store = FeatureStore(matcher, features, masks, folder)
    outputs = [path for path in (out, features, masks) if path]
    named_photos, named_pairs = _name_photos(folder, images, pairs, outputs)
    chosen_pairing = resolve_pairing(pairing, k, len(named_photos))
    if named_pairs is None and chosen_pairing == "nearest" and not store.is_sift:
        raise RequestError("--pairing nearest compares SIFT; use exhaustive or sequential")
    bad_images = extract_photos(named_photos, store)
    photos = [photo for photo in named_photos if str(photo.path) not in bad_images]

    # --- pairs, and those that are done

    if named_pairs is None:
        photo_pairs = choose_pairs(photos, store, pairing, k)
    else:
        readable = set(photos)
        photo_pairs = [pair for pair in named_pairs if readable.issuperset(pair)]
    files = PairFiles(out, store)
    done, matched_again, other_results = find_done_pairs(files, photo_pairs)
    if matched_again:
        reason = "a photograph, a mask, the model or a setting changed, or the file is damaged"
        logger.warning("%d pairs are matched again: %s", matched_again, reason)

    # --- matches, with all files of each pair

    endings = [JSON_ENDING] * json_files + [PICTURE_ENDING] * pictures
    database: Any = contextlib.nullcontext()
    if colmap:
        # pycolmap is an extra, so it is imported only for a database.
        from superglue_sift.interop.colmap import create_database

        database = create_database(
            Path(colmap), folder, photos, store, refine_keypoints, camera_per
        )
    needs_all = matcher.rules is not None or colmap is not None
    rows = []
    matched_pairs = match_pairs(store, photo_pairs, done)
    with _use_one_core_per_pair(store), contextlib.closing(matched_pairs), database as add_pair:
        for pair, result in matched_pairs:
            if result is not None:
                files.write(pair, result)
            missing = [ending for ending in endings if not files.get_path(pair, ending).exists()]
            if result is None and (missing or needs_all):
                result = files.read(pair)
            for ending in missing:
                files.write_extra_file(pair, result, ending)  # pyright: ignore
            if matcher.rules:
                rows.append(_make_row(folder, pair, result))  # pyright: ignore
            if add_pair:
                add_pair(*pair, result)
    _write_tables(out, rows if matcher.rules else None, bad_images)
    return FolderReport(
        matched=len(photo_pairs) - len(done),
        unchanged=len(done),
        matched_again=matched_again,
        other_results=other_results,
        photos=len(photos),
        bad_images=bad_images,
    )


def _check_request(
    matcher: Matcher,
    folder: Path,
    out: Path,
    pairs: Any,
    pairing: str,
    k: Optional[int],
    masks: Optional[FileName],
    colmap: Optional[FileName],
) -> None:
    """Raise RequestError if an argument of `match_folder` is wrong, before any work."""
    check_pairing(pairing, k)
    if masks:
        check_masks(masks, folder)
    if colmap:
        import_extra("pycolmap", "colmap")
        if Path(colmap).exists():
            raise RequestError(f"{colmap}: exists already; name another database")
    is_file = isinstance(pairs, (str, Path))
    if matcher.rules and is_file and Path(pairs).resolve() == (out / PAIR_LIST).resolve():
        raise RequestError(f"{pairs}: is an input, and would be overwritten; name another folder")


def _name_photos(
    folder: Path,
    images: Optional[Sequence[FileName]],
    pairs: Union[FileName, Sequence[Tuple[FileName, FileName]], None],
    outputs: Sequence[FileName],
) -> Tuple[List[PhotoFile], Optional[List[PhotoPair]]]:
    """Name the photographs to match, and their pairs if the caller names these.

    Args:
        folder, images, pairs: the arguments of `match_folder`.
        outputs: folders that hold no photographs.
    """
    if pairs is None:
        if images is None:
            # An earlier command may have written pictures of matches into the folder.
            photos = list_photos(folder, outputs)
            images = [path for path in photos if not path.name.endswith(f"_{PICTURE_ENDING}")]
        return name_images(images, folder), None
    if isinstance(pairs, (str, Path)):
        named_pairs = read_pair_list(Path(pairs), folder)
    else:
        named_pairs = name_pairs(pairs, folder)
    return list(dict.fromkeys(itertools.chain.from_iterable(named_pairs))), named_pairs


def extract_photos(photos: Sequence[PhotoFile], store: FeatureStore) -> Dict[str, str]:
    """Extract the features that the store lacks, and write them there.

    Args:
        photos: the photographs.
        store: the features, and the matcher.

    Returns:
        The reason for each path that cannot be read.

    Raises:
        RequestError: If the extractor may not be run, or a mask has another size.
    """

    def extract(photo: PhotoFile) -> str:
        """Extract one photograph. Return why it cannot be read, or ""."""
        try:
            store.prepare(photo)
        except BadImage as error:
            return str(error).replace(f"{photo.path}: ", "", 1)
        return ""

    # One thread reads a file while SIFT of the other thread runs. After Ctrl-C, the closed map
    # starts no further photograph.
    with (
        ThreadPoolExecutor(2) as pool,
        contextlib.closing(
            pool.map(extract, photos)  # pyright: ignore (it is a generator)
        ) as reasons,
    ):
        shown = Progress(reasons, total=len(photos), desc="features", unit="images")
        return {str(photo.path): reason for reason, photo in zip(shown, photos) if reason}


def find_done_pairs(
    files: PairFiles, pairs: Sequence[PhotoPair]
) -> Tuple[Collection[PhotoPair], int, int]:
    """Find the pairs that are done: their results are up to date.

    Args:
        files: the files of the pairs.
        pairs: the pairs.

    Returns:
        The pairs that are done, the number of pairs whose results do not fit, and the number of
        results of other pairs in the folder.
    """
    names = files.list_matches_files()
    done = set()
    misfits = 0
    for pair in Progress(pairs, desc="checking", unit="pairs", disable=not names):
        name = files.get_path(pair, MATCHES_ENDING).name
        if name not in names:
            continue
        names.remove(name)
        if files.fits(pair):
            done.add(pair)
        else:
            misfits += 1
    return done, misfits, len(names)


def match_pairs(
    store: FeatureStore, pairs: Sequence[PhotoPair], done: Collection[PhotoPair]
) -> Generator[Tuple[PhotoPair, Optional[MatchResult]], None, None]:
    """Match each pair that is not done, in batches.

    Args:
        store: the features, and the matcher.
        pairs: the pairs.
        done: pairs that are not matched.

    Yields:
        Each pair in order with its result, or with None if it is done.
    """
    matcher = store.matcher
    # Only refinement needs pixels.
    read_features = store.read_with_pixels if matcher.refines else store
    # A batch keeps the GPU busy, or all workers of a CPU.
    on_gpu = matcher.device.startswith("cuda")
    size = BATCH_ON_GPU if on_gpu else PAIRS_OF_A_WORKER * matcher.workers
    with Progress(total=len(pairs), desc="matching", unit="pairs") as shown:
        for group in split_batches(pairs, size):
            new_pairs = [pair for pair in group if pair not in done]
            features = (
                (read_features(first), read_features(second)) for first, second in new_pairs
            )
            with contextlib.closing(matcher.match_batch(features, size)) as batch_results:
                results = dict(zip(new_pairs, batch_results))
            for pair in group:
                yield pair, results.get(pair)
                shown.initial += pair in done  # The pace does not count it.
                shown.update(1)


@contextlib.contextmanager
def _use_one_core_per_pair(store: FeatureStore) -> Iterator[None]:
    """Match one pair per core on a CPU, and give torch its threads back at the end."""
    threads = torch.get_num_threads()
    store.matcher = store.matcher.use_one_core_per_pair()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _make_row(root: Path, pair: PhotoPair, result: MatchResult) -> Tuple[Any, ...]:
    """Return the row of pairs.csv, with PAIR_COLUMNS, for one pair of a scene."""
    score = f"{result.pair_score:.4f}"
    reason = "" if result.accepted else "not accepted"
    # A pair that `verify_ratio_matches` skipped was never judged, so it has no score.
    if result.pair_score == SKIPPED:
        score = ""
        reason = "skipped: too few classical matches"
    names = (name_below(photo.path, root) for photo in pair)
    return (*names, len(result.matches), score, int(result.accepted), reason)


def _write_tables(
    out: Path, rows: Optional[List[Tuple[Any, ...]]], bad_images: Mapping[str, str]
) -> None:
    """Write pairs.csv and bad_images.csv, or delete those of an earlier call.

    Args:
        out: the folder of the results.
        rows: the rows of pairs.csv. None if the matches are not of a scene.
        bad_images: the reason for each file that cannot be read.
    """
    tables = (
        (out / PAIR_LIST, PAIR_COLUMNS, rows),
        (out / BAD_IMAGES, ("image", "reason"), list(bad_images.items()) or None),
    )
    for path, columns, table in tables:
        if table is not None:
            write_csv(path, [columns, *table])
        # An earlier call wrote a file with this header. Another file is the user's.
        elif path.is_file() and path.read_bytes().startswith(",".join(columns).encode()):
            path.unlink()
