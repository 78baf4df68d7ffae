"""The files of a pair: its matches as `.npz` and JSON, and a picture.

The `.npz` and the JSON hold `made_from`, a digest of all that the matches were made from: the
matcher (`Matcher.digest`), and the bytes of both photographs and of their masks. So `PairFiles` can
tell results that fit from those of other settings, of a photograph that was replaced, and from
damaged files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any, Collection, Dict, Optional, Set

import numpy as np

from superglue_sift.apps.pairing import PICTURE, PhotoPair
from superglue_sift.errors import RequestError
from superglue_sift.features.store import FeatureStore, read_npz
from superglue_sift.files import write_atomic
from superglue_sift.match_result import REFINED, MatchResult
from superglue_sift.matches import Matches

# Endings of the files of a pair, besides PICTURE
MATCHES = "matches.npz"
JSON = "matches.json"
# What results are made from that is in no setting. Raise it if the arrays of a file change.
FORMAT = 1

# Why a result does not fit
MISSING = "missing"
DAMAGED = "damaged"
OTHER_PROGRAM = "of another program or an old version"
OTHER_SETTINGS = "with another model, version or settings"
OTHER_PHOTOS = "with a photograph or mask that changed"

NAME_BYTES = 255  # length of a file's name that most file systems allow
DIGITS = 16  # of the digest in a name that was too long
JPEG_END = b"\xff\xd9"  # marker at the end of a JPEG


class PairFiles:
    """The files of pairs in one folder: `A_B_matches.npz`, `.json` and `.jpg`.

    A and B are the names of the photographs (`pair_stem`).
    """

    def __init__(self, folder: Path, store: FeatureStore) -> None:
        """Name the folder. It need not exist.

        Args:
            store: the features of the photographs, and the matcher.
        """
        self.folder = folder
        self._store = store
        self._settings = f"{FORMAT}-{store.matcher.digest()}"
        self._max_bytes = max_name_bytes(folder)

    def path(self, pair: PhotoPair, ending: str) -> Path:
        """Return the path of a file of a pair."""
        stem = pair_stem(pair[0].name, pair[1].name, self._max_bytes)
        return self.folder / f"{stem}_{ending}"

    def existing(self) -> Set[str]:
        """Return the names of all files of matches in the folder."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            return {entry.name for entry in entries if entry.name.endswith(f"_{MATCHES}")}
        return set()

    def made_from(self, pair: PhotoPair) -> str:
        """Return the digest of the matcher and of both photographs with their masks."""
        digests = (self._store.digest(photo) for photo in pair)
        return "-".join([self._settings, *digests])

    def misfit(self, pair: PhotoPair) -> Optional[str]:
        """Return why the matches of a pair must be made again, or None if they fit."""
        path = self.path(pair, MATCHES)
        if not path.exists():
            return MISSING
        arrays = read_npz(path)
        if arrays is None:
            return DAMAGED
        made_from = str(arrays.get("made_from", ""))
        if made_from == self.made_from(pair):
            return None
        if not made_from.startswith(f"{FORMAT}-"):
            return OTHER_PROGRAM
        return OTHER_PHOTOS if made_from.startswith(f"{self._settings}-") else OTHER_SETTINGS

    def read(self, pair: PhotoPair) -> MatchResult:
        """Read the matches of a pair, which fit. Raises RequestError if they are gone."""
        path = self.path(pair, MATCHES)
        arrays = read_npz(path)
        if arrays is None:
            raise RequestError(f"{path}: was changed in the meantime; start again")
        matches = Matches.from_dense(arrays["matches"], arrays["match_confidence"])
        # (M, ...) of the keypoints of image 0 -> (K, ...) of the matches
        index0 = matches.indices[:, 0]
        changes: Dict[str, Any] = {name: arrays[name][index0] for name in REFINED if name in arrays}
        if "pair_score" in arrays:
            changes["pair_score"] = float(arrays["pair_score"])
        images = (pair[0].path, pair[1].path)
        result = MatchResult.of(self._store(pair[0]), self._store(pair[1]), matches)
        return dataclasses.replace(result, images=images, **changes)

    def write(self, pair: PhotoPair, result: MatchResult, endings: Collection[str]) -> None:
        """Write all files of a pair that was matched.

        Args:
            endings: JSON and PICTURE, if they are asked for. A file of the earlier matches is made
                again in any case.
        """
        path = self.path(pair, MATCHES)
        path.unlink(missing_ok=True)  # the earlier matches, until all files are new
        earlier = {name for name in (JSON, PICTURE) if self.path(pair, name).exists()}
        for ending in sorted({*endings, *earlier}):
            self.write_more(pair, result, ending)
        # The matches are written last, since a pair counts as done if they are there.
        write_atomic(path, npz_of(result, **self._about(pair)))

    def write_more(self, pair: PhotoPair, result: MatchResult, ending: str) -> None:
        """Write the JSON or the picture of a pair."""
        result = dataclasses.replace(result, images=(pair[0].path, pair[1].path))
        if ending == JSON:
            write_atomic(self.path(pair, JSON), json_of(result, **self._about(pair)))
        else:
            result.show().save(self.path(pair, PICTURE))

    def lacks(self, pair: PhotoPair, ending: str) -> bool:
        """Say whether the JSON or the picture of a pair is missing or damaged."""
        try:
            data = self.path(pair, ending).read_bytes()
            if ending == PICTURE:
                return not data.endswith(JPEG_END)
            return json.loads(data)["made_from"] != self.made_from(pair)
        except (OSError, ValueError, KeyError, TypeError):
            return True

    def _about(self, pair: PhotoPair) -> Dict[str, str]:
        """Return what the files of a pair say about their matches."""
        names = {"image0": pair[0].name, "image1": pair[1].name}
        return {**names, "made_from": self.made_from(pair)}


# --- names


def pair_stem(name0: str, name1: str, max_bytes: int = NAME_BYTES) -> str:
    """Return how the names of a pair's files begin: A_B.

    If A_B_matches.json would be longer than `max_bytes`, A and B are cut to equal lengths, and 16
    hexadecimal digits of the SHA-256 of A_B follow. Equal names always give equal results.

    Args:
        name0: A, the name of the first photograph.
        name1: B, the name of the second photograph.
        max_bytes: maximum length of a file's name in bytes of UTF-8.

    Returns:
        The stem of the names.

    >>> pair_stem("cup0", "cup1")
    'cup0_cup1'
    >>> pair_stem("a" * 128, "b" * 128, max_bytes=60)
    'aaaaaaaaaaaaaa_bbbbbbbbbbbbbb_b0ec87fffe63cd8d'
    """
    stem = f"{name0}_{name1}"
    most = max_bytes - len(f"_{JSON}")
    data = stem.encode("utf-8", "surrogateescape")
    if len(data) <= most:
        return stem
    digest = hashlib.sha256(data).hexdigest()[:DIGITS]
    most_of_each = (most - len(f"__{digest}")) // 2
    return f"{_cut(name0, most_of_each)}_{_cut(name1, most_of_each)}_{digest}"


def _cut(name: str, max_bytes: int) -> str:
    """Return the beginning of a name, without a part of a character at its end."""
    return name.encode("utf-8", "surrogateescape")[:max_bytes].decode("utf-8", "ignore")


def max_name_bytes(folder: Path) -> int:
    """Return how long a file's name in a folder may be, in bytes, at most NAME_BYTES.

    Encrypted folders allow 143 on some systems. The folder need not exist.
    """
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return min(NAME_BYTES, os.pathconf(folder, "PC_NAME_MAX"))
    except (AttributeError, OSError, ValueError):  # such as Windows, where the limit is the same
        return NAME_BYTES


# --- contents


def npz_of(result: MatchResult, **about: str) -> bytes:
    """Return the bytes of a `.npz` of a result, in the common layout.

    It has these arrays:

    keypoints0, keypoints1: (M, 2) and (N, 2) float32 px.
    matches: (M,) int64, -1 without a match.
    match_confidence: (M,) float32.
    frame, turned: () and (2,), see `MatchResult`.

    Refined matches also have aligned0, aligned1 (M, 2) px, deviations (M,) px and correlations
    (M,), float32, which are NaN without a match. Pairs of a scene also have pair_score ().

    Args:
        about: further texts by name, such as the names of the photographs.
    """
    matches, scores = result.dense()
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
    for name in REFINED if result.aligned1 is not None else ():
        refined = getattr(result, name)
        # (K, ...) of the matches -> (M, ...) of the keypoints of image 0
        arrays[name] = np.full((len(matches), *refined.shape[1:]), np.nan, np.float32)
        arrays[name][result.matches[:, 0]] = refined
    # Write the archive to memory, so that the file appears whole.
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def json_of(result: MatchResult, **about: str) -> bytes:
    """Return JSON of a result, with the common names.

    matches: a list of [index0, index1, score].
    frame, turned0, turned1: see `MatchResult`.
    inliers, supported, H_0to1, F_0to1: from `MatchResult.fits`. A model that is not supported fits
        as wrong matches would.
    aligned0, aligned1, deviations, correlations: in the order of the matches. An entry is null
        where refinement failed. All are null if the matches were not refined.

    Args:
        about: further texts by name, such as the names of the photographs.
    """

    def rounded(values: Optional[np.ndarray], digits: int) -> Any:
        """Return a list, with null for numbers that are not finite."""
        if values is None:
            return None
        values = values.astype(float).round(digits)
        # JSON has no NaN.
        return np.where(np.isfinite(values), values, None).tolist()  # pyright: ignore

    fits = result.fits()
    matches0, scores0 = result.dense()
    scores = rounded(result.scores, 6)
    record: Dict[str, Any] = {
        **about,
        "frame": result.frame,
        "turned0": result.turned[0],
        "turned1": result.turned[1],
        "image_size0": result.size0,
        "image_size1": result.size1,
        "keypoints0": rounded(result.keypoints0, 3),
        "keypoints1": rounded(result.keypoints1, 3),
        "matches0": matches0.tolist(),
        "matching_scores0": rounded(scores0, 6),
        "matches": [[*indices, score] for indices, score in zip(result.matches.tolist(), scores)],
        "pair_score": result.pair_score,
        "accepted": result.accepted,
        "inliers": {name: int(fit.inliers.sum()) for name, fit in fits.items()},
        "supported": {name: fit.supported for name, fit in fits.items()},
        **{name: rounded(getattr(result, name), 4) for name in REFINED},
    }
    for name, key in (("H_0to1", "homography"), ("F_0to1", "fundamental")):
        model = fits[key].model
        record[name] = None if model is None else model.tolist()
    return (json.dumps(record) + "\n").encode()
