"""The files of a pair: its matches as `.npz` and JSON, and a picture.

The `.npz` and the JSON hold `made_from`, a digest of all that the matches were made from: the
matcher (`Matcher.digest`), and the bytes of both photographs and of their masks. So `PairFiles` can
tell results that fit from all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any, Dict, Optional, Set

import numpy as np

from superglue_sift.apps.pairing import PICTURE_ENDING, PhotoPair
from superglue_sift.apps.store import FeatureStore, read_npz
from superglue_sift.files import write_atomically
from superglue_sift.match_result import REFINED, MatchResult
from superglue_sift.matches import Matches

# Endings of the files of a pair, besides PICTURE_ENDING
MATCHES_ENDING = "matches.npz"
JSON_ENDING = "matches.json"
# Version of the arrays of a file. Raise it if they change, so that pairs are matched again.
RESULTS_FORMAT = 1

NAME_BYTES = 255  # maximum length of a file's name


class PairFiles:
    """The files of pairs in one folder: `A_B_matches.npz`, `.json` and `.jpg`.

    A and B are the names of the photographs (`make_pair_stem`).
    """

    def __init__(self, folder: Path, store: FeatureStore) -> None:
        """Name the files. This reads and writes nothing.

        Args:
            folder: their folder, which need not exist.
            store: the features of the photographs, and the matcher.
        """
        self.folder = folder
        self._store = store
        self._settings = f"{RESULTS_FORMAT}-{store.matcher.digest()}"

    def get_path(self, pair: PhotoPair, ending: str) -> Path:
        """Return the path of a file of a pair."""
        return self.folder / f"{make_pair_stem(pair[0].name, pair[1].name)}_{ending}"

    def list_matches_files(self) -> Set[str]:
        """Return the names of all `*_matches.npz` in the folder."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            return {entry.name for entry in entries if entry.name.endswith(f"_{MATCHES_ENDING}")}
        return set()

    def describe(self, pair: PhotoPair) -> Dict[str, str]:
        """Return the texts in the files of a pair: the names of its photographs, and made_from."""
        digests = (self._store.digest(photo) for photo in pair)
        made_from = "-".join([self._settings, *digests])
        return {"image0": pair[0].name, "image1": pair[1].name, "made_from": made_from}

    def fits(self, pair: PhotoPair) -> bool:
        """Return whether the matches of a pair are there, whole, and made from the same things."""
        arrays = read_npz(self.get_path(pair, MATCHES_ENDING)) or {}
        return str(arrays.get("made_from")) == self.describe(pair)["made_from"]

    def read(self, pair: PhotoPair) -> MatchResult:
        """Read the matches of a pair, which fit.

        Raises:
            OSError: If the file was deleted in the meantime.
        """
        with np.load(self.get_path(pair, MATCHES_ENDING), allow_pickle=False) as file:
            arrays = dict(file)
        matches = Matches.from_dense(arrays["matches"], arrays["match_confidence"])
        # (M, ...) of the keypoints of image 0 -> (K, ...) of the matches
        index0 = matches.indices[:, 0]
        attributes: Dict[str, Any] = {
            name: arrays[name][index0] for name in REFINED if name in arrays
        }
        if "pair_score" in arrays:
            attributes["pair_score"] = float(arrays["pair_score"])
        images = (pair[0].path, pair[1].path)
        result = MatchResult.of(self._store(pair[0]), self._store(pair[1]), matches)
        return dataclasses.replace(result, images=images, **attributes)

    def write(self, pair: PhotoPair, result: MatchResult) -> None:
        """Write the matches of a pair. A JSON or a picture of earlier matches is written again."""
        # The matches are deleted first and written last, since a pair counts as done if they are
        # there.
        path = self.get_path(pair, MATCHES_ENDING)
        path.unlink(missing_ok=True)
        for ending in (JSON_ENDING, PICTURE_ENDING):
            if self.get_path(pair, ending).exists():
                self.write_extra_file(pair, result, ending)
        write_atomically(path, make_npz(result, **self.describe(pair)))

    def write_extra_file(self, pair: PhotoPair, result: MatchResult, ending: str) -> None:
        """Write the JSON or the picture of a pair.

        Args:
            pair: the pair.
            result: its matches.
            ending: JSON_ENDING or PICTURE_ENDING.
        """
        path = self.get_path(pair, ending)
        if ending == JSON_ENDING:
            write_atomically(path, make_json(result, **self.describe(pair)))
        else:
            images = (pair[0].path, pair[1].path)
            dataclasses.replace(result, images=images).show().save(path)


# --- names


def make_pair_stem(name0: str, name1: str) -> str:
    """Return A_B, with which the names of a pair's files begin.

    If A_B_matches.json would be longer than a file's name may be, A and B are cut to equal lengths,
    and 16 hexadecimal digits of the SHA-256 of A_B follow. Equal names always give equal results.

    Args:
        name0: A, the name of the first photograph.
        name1: B, the name of the second photograph.

    Example:
        >>> make_pair_stem("cup0", "cup1")
        'cup0_cup1'
        >>> make_pair_stem("a" * 200, "b" * 200)[-20:]
        'bbb_c2cd523bada00634'
    """
    stem = f"{name0}_{name1}"
    max_bytes = NAME_BYTES - len(f"_{JSON_ENDING}")
    data = stem.encode("utf-8", "surrogateescape")
    if len(data) <= max_bytes:
        return stem
    digest = hashlib.sha256(data).hexdigest()[:16]
    max_bytes_each = (max_bytes - len(f"__{digest}")) // 2
    # A character that would be cut in two is left out.
    short_names = (
        name.encode("utf-8", "surrogateescape")[:max_bytes_each].decode("utf-8", "ignore")
        for name in (name0, name1)
    )
    return "_".join([*short_names, digest])


# --- contents


def make_npz(result: MatchResult, **about: str) -> bytes:
    """Encode a result as the bytes of a `.npz`, with the names that SuperGlue uses.

    The file has these arrays:

    keypoints0, keypoints1: (M, 2) and (N, 2) float32 px.
    matches: (M,) int64, -1 without a match.
    match_confidence: (M,) float32.
    frame, turned: () and (2,), see `MatchResult`.

    Refined matches also have refined0, refined1 (M, 2) px, deviations (M,) px and correlations
    (M,), float32, which are NaN without a match. Pairs of a scene also have pair_score ().

    Args:
        result: the matches.
        about: further texts by name, such as the names of the photographs.
    """
    matches, scores = result.to_dense()
    arrays: Dict[str, Any] = {
        "keypoints0": result.keypoints0,
        "keypoints1": result.keypoints1,
        "matches": matches,
        "match_confidence": scores,
        "frame": result.frame,
        "turned": result.turned,
        **about,
    }
    if result.pair_score is not None:
        arrays["pair_score"] = result.pair_score
    for name in REFINED if result.refined1 is not None else ():
        refined = getattr(result, name)
        # (K, ...) of the matches -> (M, ...) of the keypoints of image 0
        arrays[name] = np.full((len(matches), *refined.shape[1:]), np.nan, np.float32)
        arrays[name][result.matches[:, 0]] = refined
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def make_json(result: MatchResult, **about: str) -> bytes:
    """Encode a result as JSON, with the names that SuperGlue and LightGlue use.

    image_size0, image_size1: width and height in px.
    keypoints0, keypoints1: lists of [x, y] in px.
    matches0: for each keypoint of image 0 the index of its match in image 1, or -1.
    matching_scores0: the score of this match, or 0.
    matches: a list of [index0, index1, score].
    frame, turned0, turned1, pair_score, accepted: see `MatchResult`.
    inliers, supported, H_0to1, F_0to1: from `MatchResult.fit_models`. A model that is not supported
        fits no better than a model of wrong matches.
    refined0, refined1, deviations, correlations: in the order of the matches. An entry is null
        where refinement failed. All are null if the matches were not refined.

    Args:
        result: the matches.
        about: further texts by name, such as the names of the photographs.
    """

    def round_numbers(values: Optional[np.ndarray], digits: int) -> Any:
        """Return a list with None for numbers that are not finite, since JSON has no NaN."""
        if values is None:
            return None
        values = values.astype(float).round(digits)
        return np.where(np.isfinite(values), values, None).tolist()  # pyright: ignore

    fits = result.fit_models()
    matches0, scores0 = result.to_dense()
    scores = round_numbers(result.scores, 6)
    record: Dict[str, Any] = {
        **about,
        "frame": result.frame,
        "turned0": result.turned[0],
        "turned1": result.turned[1],
        "image_size0": result.size0,
        "image_size1": result.size1,
        "keypoints0": round_numbers(result.keypoints0, 3),
        "keypoints1": round_numbers(result.keypoints1, 3),
        "matches0": matches0.tolist(),
        "matching_scores0": round_numbers(scores0, 6),
        "matches": [[*indices, score] for indices, score in zip(result.matches.tolist(), scores)],
        "pair_score": result.pair_score,
        "accepted": result.accepted,
        "inliers": {name: int(fit.inliers.sum()) for name, fit in fits.items()},
        "supported": {name: fit.supported for name, fit in fits.items()},
        **{name: round_numbers(getattr(result, name), 4) for name in REFINED},
    }
    for name, key in (("H_0to1", "homography"), ("F_0to1", "fundamental")):
        model = fits[key].model
        record[name] = None if model is None else model.tolist()
    return (json.dumps(record) + "\n").encode()
