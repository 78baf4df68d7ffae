"""Files of a pair: JSON, `.npz` in the common layout of SuperGlue, pictures, overlay and blink
GIF.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple

import cv2
import numpy as np
import torch
from PIL import Image

from superglue_sift import __version__, drawing, geometry, scenes
from superglue_sift.errors import RequestError
from superglue_sift.files import DAMAGED, write_atomic
from superglue_sift.geometry import Fit
from superglue_sift.match_result import MatchResult

BLINK_SIDE = 800  # longer side of the GIF in pixels
BLINK_MS = 600
PAIR_LIST = "pairs.csv"
# Fields of `MatchResult` after alignment
ALIGNED = ("aligned0", "aligned1", "deviations", "correlations")
SEAL = 8  # bytes at the end of a `.npz`: the CRC-32 of the rest


def write_json(
    path: Path, found: MatchResult, fitted: Mapping[str, Fit], about: Mapping[str, Any]
) -> None:
    """Write `record_of` to a file."""
    write_atomic(path, json.dumps(record_of(found, fitted, about)) + "\n")


def record_of(
    found: MatchResult, fitted: Mapping[str, Fit], about: Mapping[str, Any]
) -> Dict[str, Any]:
    """Convert to JSON values with the common names, `matches` of [index0, index1, score], and
    `about`, as file names.

    frame, turned0, turned1: see `MatchResult`. inliers, H_0to1, F_0to1: from `fitted`.
    """
    matches0, scores0 = found.dense()
    models = {name: fit.model for name, fit in fitted.items()}
    H_0to1, F_0to1 = (models.get(name) for name in ("homography", "fundamental"))
    return {
        **about,
        "frame": found.frame,
        "turned0": found.turned[0],
        "turned1": found.turned[1],
        "image_size0": list(found.size0),
        "image_size1": list(found.size1),
        "keypoints0": found.keypoints0.astype(float).round(3).tolist(),
        "keypoints1": found.keypoints1.astype(float).round(3).tolist(),
        "matches0": matches0.tolist(),
        "matching_scores0": scores0.astype(float).round(6).tolist(),
        "matches": [
            [int(i), int(j), round(float(s), 6)] for (i, j), s in zip(found.matches, found.scores)
        ],
        "pair_score": found.pair_score,
        "accepted": found.accepted,
        "inliers": {name: int(fit.inliers.sum()) for name, fit in fitted.items()},
        "H_0to1": None if H_0to1 is None else H_0to1.tolist(),
        "F_0to1": None if F_0to1 is None else F_0to1.tolist(),
        **aligned_lists(found),
    }


def of_record(record: Mapping[str, Any]) -> MatchResult:
    """Inverse of `record_of`. Raises RequestError for a damaged record."""
    try:
        keypoints0, keypoints1 = (
            np.array(record[name], np.float32) for name in ("keypoints0", "keypoints1")
        )
        rows = np.array(record["matches"], np.float64).reshape(-1, 3)
        sizes = [
            (int(width), int(height))
            for width, height in (record["image_size0"], record["image_size1"])
        ]
        is_aligned = record["aligned1"] is not None
        aligned = (
            {name: np.array(record[name], np.float32) for name in ALIGNED} if is_aligned else {}
        )
        more = {"pair_score": record["pair_score"], "frame": str(record["frame"])}
        turned = int(record["turned0"]), int(record["turned1"])
        pairs = rows[:, :2].astype(np.int64)
        scores = rows[:, 2].astype(np.float32)
        sides = keypoints0.reshape(-1, 2), keypoints1.reshape(-1, 2)
        result = MatchResult(
            *sides, pairs, scores, sizes[0], sizes[1], turned=turned, **aligned, **more
        )
        fits = all(len(values) == len(pairs) for values in aligned.values()) and (pairs >= 0).all()
        if not (fits and np.isfinite(result.points0).all() and np.isfinite(result.points1).all()):
            raise ValueError("matches and their positions")
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise RequestError(f"not a JSON file of matches, or damaged: {error}") from None
    return result


def aligned_lists(found: MatchResult) -> Dict[str, Any]:
    """Fields of alignment as lists, in the order of the matches; all None without alignment.

    aligned0, aligned1: [x, y] px of each match. deviations: px, correlations: -1 to 1; None for
    NaN.
    """
    lists: Dict[str, Any] = dict.fromkeys(ALIGNED)
    if found.aligned1 is not None:
        for name in ALIGNED:
            values = np.asarray(getattr(found, name), np.float64).round(4)
            known = values.astype(object)
            known[~np.isfinite(values)] = None
            lists[name] = known.tolist()
    return lists


def made_from(images: Tuple[str, str], settings: Mapping[str, object]) -> str:
    """The inputs of a pair's result as JSON: equal text means equal results up to rounding.

    Args:
        images: digests of their content.
        settings: all other inputs by name, such as a digest of the weights and the threshold. Plain
            JSON values.
    """
    versions = {
        "superglue_sift": __version__,
        "torch": torch.__version__.split("+")[0],
        "opencv": cv2.__version__,
    }
    return json.dumps(
        {"image0": images[0], "image1": images[1], **settings, **versions}, sort_keys=True
    )


def differs(before: str, now: str) -> str:
    """The difference between two texts of `made_from`; "" if there is none."""
    if before == now:
        return ""
    try:
        old = json.loads(before)
        new = json.loads(now)
        names = [
            name
            for name in sorted({**old, **new})
            if (name in old, old.get(name)) != (name in new, new.get(name))
        ]
    except (ValueError, TypeError):
        return "does not state its inputs"
    return f"was made with another {', '.join(names)}"


def write_npz(path: Path, found: MatchResult, made: str) -> None:
    """Write `npz_of` to a file."""
    write_atomic(path, npz_of(found, made))


def npz_of(found: MatchResult, made: str) -> bytes:
    """keypoints0 (M, 2), keypoints1 (N, 2) float32, matches (M,) int64 or -1, match_confidence (M,)
    float32.

    After alignment also aligned0, aligned1 (M, 2) px, deviations (M,) px and correlations (M,)
    float32, NaN without a match; `frame` () and `turned` (2,); and for scenes pair_score, int64.
    See `MatchResult`. `made_from` () is the text of `made_from`.
    """
    data = io.BytesIO()
    matches, scores = found.dense()
    arrays: Dict[str, Any] = {
        "keypoints0": found.keypoints0,
        "keypoints1": found.keypoints1,
        "matches": matches,
    }
    arrays.update(
        match_confidence=scores, frame=np.array(found.frame), turned=np.array(found.turned)
    )
    arrays.update(made_from=np.array(made))
    if found.pair_score is not None:
        arrays["pair_score"] = np.array(found.pair_score)
    for name in ALIGNED if found.aligned1 is not None else ():
        values = getattr(found, name)
        arrays[name] = np.full((len(matches), *values.shape[1:]), np.nan, np.float32)
        arrays[name][found.matches[:, 0]] = values
    np.savez_compressed(data, **arrays)
    return _sealed(data.getvalue())


def read_made_from(path: Path) -> Optional[str]:
    """The `made_from` of a file of `write_npz`; "" if it has none or is damaged, None without a
    file.
    """
    try:
        with np.load(io.BytesIO(_unsealed(path)), allow_pickle=False) as file:
            return str(file["made_from"])
    except FileNotFoundError:
        return None
    except DAMAGED:
        return ""


def _sealed(archive: bytes) -> bytes:
    """Append the CRC-32 of a zip as its comment: eight hexadecimal digits at the end of the
    file.
    """
    body = archive[:-2] + struct.pack("<H", SEAL)
    return body + b"%08x" % zlib.crc32(body)


def _unsealed(path: Path) -> bytes:
    """Read a file of `_sealed`. Raises ValueError if any byte changed or it is another file."""
    content = path.read_bytes()
    if content[-SEAL:] != b"%08x" % zlib.crc32(content[:-SEAL]):
        raise ValueError(f"{path}: damaged")
    return content


def read_npz(path: Path, size0: Tuple[int, int], size1: Tuple[int, int]) -> MatchResult:
    """Read a file of `write_npz`. size0, size1: (width, height) of the images. Raises one of
    DAMAGED.
    """
    with np.load(io.BytesIO(_unsealed(path)), allow_pickle=False) as file:
        matches = file["matches"]
        confidence = file["match_confidence"]
        matched = np.flatnonzero(matches >= 0)
        pairs = np.stack([matched, matches[matched]], axis=1)
        score = int(file["pair_score"]) if "pair_score" in file else None
        aligned = {name: file[name][matched] for name in ALIGNED if name in file}
        keypoints = file["keypoints0"], file["keypoints1"]
        result = MatchResult(
            *keypoints, pairs, confidence[matched], size0, size1, pair_score=score, **aligned
        )
        turned0, turned1 = file["turned"].tolist()
        return result._replace(frame=str(file["frame"]), turned=(turned0, turned1))


@contextlib.contextmanager
def pair_list(folder: Path, root: Path) -> Iterator[Callable[[Any, Any, MatchResult], None]]:
    """A function that adds pairs of a scene to FOLDER/pairs.csv.

    Each has the names of its files below `root`, and its score or why it has none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{PAIR_LIST}.partial"
    with partial.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["image0", "image1", "matches", "pair_score", "accepted", "reason"])

        def name(item: Any) -> str:
            is_file = isinstance(item.image, Path)  # frames of a video are not
            return os.path.relpath(item.image, root) if is_file else item.name

        def add(item0: Any, item1: Any, found: MatchResult) -> None:
            names = [name(item) for item in (item0, item1)]
            score = found.pair_score
            reason = "" if found.accepted else "not accepted"
            if score == scenes.SKIPPED:
                score = ""
                reason = "skipped: too few classical matches"
            rows.writerow([*names, len(found.matches), score, int(found.accepted), reason])

        yield add
    os.replace(partial, folder / PAIR_LIST)


def write_picture(path: Path, found: MatchResult, fitted: Mapping[str, Fit]) -> None:
    """Write both images side by side with their matches (`MatchResult.show`)."""
    found.drawn(fitted, found.photos()).save(path)


def write_overlay(stem: Path, found: MatchResult, H_0to1: np.ndarray) -> Tuple[Path, Path]:
    """Warp image 0 onto image 1: STEM_overlay.jpg, half transparent where it covers it, and
    STEM_blink.gif.
    """
    photo0, photo1 = found.photos()
    H_shown = geometry.compose(photo1.to_shown, H_0to1, geometry.inverse(photo0.to_shown))
    image1 = photo1.pixels
    size = image1.shape[1::-1]
    warped = cv2.warpPerspective(photo0.pixels, H_shown, size)
    covered = (
        cv2.warpPerspective(np.full(photo0.pixels.shape[:2], 255, np.uint8), H_shown, size) == 255
    )
    overlay, blink = (stem.with_name(stem.name + end) for end in ("_overlay.jpg", "_blink.gif"))
    drawing.write(overlay, drawing.overlay(warped, image1, covered, 0.5))
    frames = [drawing.overlay(warped, image1, covered, opacity) for opacity in (1.0, 0.0)]
    reduced = (drawing.reduced(frame, BLINK_SIDE)[0] for frame in frames)
    first, second = (
        Image.fromarray(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)) for picture in reduced
    )
    data = io.BytesIO()
    first.save(data, "GIF", save_all=True, append_images=[second], duration=BLINK_MS, loop=0)
    write_atomic(blink, data.getvalue())
    return overlay, blink
