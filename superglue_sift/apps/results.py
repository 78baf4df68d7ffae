"""The matches of a pair on disk: JSON, `.npz` in the layout SuperGlue's users know, pictures, overlay and blink GIF."""

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

from superglue_sift import __version__, drawing, geometry
from superglue_sift.errors import RequestError
from superglue_sift.files import DAMAGED, write_atomic
from superglue_sift.geometry import Fit
from superglue_sift.match_result import MatchResult

BLINK_SIDE = 800  # longer side of the GIF in pixels
BLINK_MS = 600
PAIR_LIST = "pairs.csv"
ALIGNED = ("aligned0", "aligned1", "deviations", "correlations")  # of `MatchResult`, what alignment gives
SEAL = 8  # bytes at the end of a `.npz`: the CRC-32 of the rest


def write_json(path: Path, found: MatchResult, fitted: Mapping[str, Fit], about: Mapping[str, Any]) -> None:
    """`record_of` as a file."""
    write_atomic(path, json.dumps(record_of(found, fitted, about)) + "\n")


def record_of(found: MatchResult, fitted: Mapping[str, Fit], about: Mapping[str, Any]) -> Dict[str, Any]:
    """Names as SuperGlue's users know them, `matches` of [index0, index1, score], and `about`, such as file names.

    frame, turned0, turned1: of which pixels the coordinates are, see `MatchResult`. inliers, H_0to1, F_0to1: of what
    was `fitted`.
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
        "matches": [[int(i), int(j), round(float(s), 6)] for (i, j), s in zip(found.matches, found.scores)],
        "pair_score": found.pair_score,
        "accepted": found.accepted,
        "inliers": {name: int(fit.inliers.sum()) for name, fit in fitted.items()},
        "H_0to1": None if H_0to1 is None else H_0to1.tolist(),
        "F_0to1": None if F_0to1 is None else F_0to1.tolist(),
        **aligned_lists(found),
    }


def of_record(record: Mapping[str, Any]) -> MatchResult:
    """`record_of` back, of a JSON file. Raises RequestError for one that is damaged."""
    try:
        keypoints0, keypoints1 = (np.array(record[name], np.float32) for name in ("keypoints0", "keypoints1"))
        rows = np.array(record["matches"], np.float64).reshape(-1, 3)
        sizes = [(int(width), int(height)) for width, height in (record["image_size0"], record["image_size1"])]
        is_aligned = record["aligned1"] is not None
        aligned = {name: np.array(record[name], np.float32) for name in ALIGNED} if is_aligned else {}
        more = {"pair_score": record["pair_score"], "frame": str(record["frame"])}
        turned = int(record["turned0"]), int(record["turned1"])
        pairs, scores = rows[:, :2].astype(np.int64), rows[:, 2].astype(np.float32)
        sides = keypoints0.reshape(-1, 2), keypoints1.reshape(-1, 2)
        found = MatchResult(*sides, pairs, scores, sizes[0], sizes[1], turned=turned, **aligned, **more)
        fits = all(len(values) == len(pairs) for values in aligned.values()) and (pairs >= 0).all()
        if not (fits and np.isfinite(found.points0).all() and np.isfinite(found.points1).all()):
            raise ValueError("matches and their positions")
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise RequestError(f"no matches as JSON, or damaged: {error}") from None
    return found


def aligned_lists(found: MatchResult) -> Dict[str, Any]:
    """As plain lists, in the order of the matches; None for all where nothing was aligned, and for what is not known.

    aligned0, aligned1: [x, y] px of each match. deviations: px, None where the position stayed SIFT's. correlations: -1
    to 1.
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
    """What the result of a pair is made from, as JSON: equal text, equal result up to rounding.

    Args:
        images: a digest of the content of each.
        settings: all else that decides it, by name: the weights by digest, the threshold. Plain JSON values.
    """
    versions = {"superglue_sift": __version__, "torch": torch.__version__.split("+")[0], "opencv": cv2.__version__}
    return json.dumps({"image0": images[0], "image1": images[1], **settings, **versions}, sort_keys=True)


def differs(before: str, now: str) -> str:
    """Why a result made from `before` is not one made from `now`, both of `made_from`: "" where it is."""
    if before == now:
        return ""
    try:
        old, new = json.loads(before), json.loads(now)
        names = [
            name for name in sorted({**old, **new}) if name not in old or name not in new or old[name] != new[name]
        ]
    except (ValueError, TypeError):
        return "does not say what it was made from"
    return f"was made with another {', '.join(names)}"


def write_npz(path: Path, found: MatchResult, made: str) -> None:
    """`npz_of` as a file."""
    write_atomic(path, npz_of(found, made))


def npz_of(found: MatchResult, made: str) -> bytes:
    """keypoints0 (M, 2), keypoints1 (N, 2) float32, matches (M,) int64 or -1, match_confidence (M,) float32.

    Of matches that were aligned by the pixels also aligned0, aligned1 (M, 2) px, deviations (M,) px and correlations
    (M,) float32, NaN where there is no match; see `MatchResult`. Beside them `frame` () and `turned` (2,), of which
    pixels the coordinates are (`MatchResult`), and `made_from` (), the text of `made_from`; of photographs of a place
    also pair_score, int64.
    """
    data, (matches, scores) = io.BytesIO(), found.dense()
    arrays: Dict[str, Any] = {"keypoints0": found.keypoints0, "keypoints1": found.keypoints1, "matches": matches}
    arrays.update(match_confidence=scores, frame=np.array(found.frame), turned=np.array(found.turned))
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
    """What the result in a file of `write_npz` was made from; "" where it does not say or is damaged.

    None where it is not there.
    """
    try:
        with np.load(io.BytesIO(_unsealed(path)), allow_pickle=False) as file:
            return str(file["made_from"])
    except FileNotFoundError:
        return None
    except DAMAGED:
        return ""


def _sealed(archive: bytes) -> bytes:
    """A zip without a comment, given its own CRC-32 as its comment: eight hexadecimal digits, which end the file."""
    body = archive[:-2] + struct.pack("<H", SEAL)
    return body + b"%08x" % zlib.crc32(body)


def _unsealed(path: Path) -> bytes:
    """The content of a file of `_sealed`. Raises ValueError where any byte of it changed, or it is no such file."""
    content = path.read_bytes()
    if content[-SEAL:] != b"%08x" % zlib.crc32(content[:-SEAL]):
        raise ValueError(f"{path}: damaged")
    return content


def read_npz(path: Path, size0: Tuple[int, int], size1: Tuple[int, int]) -> MatchResult:
    """`write_npz` back. size0, size1: (width, height) of the images. Raises one of DAMAGED."""
    with np.load(io.BytesIO(_unsealed(path)), allow_pickle=False) as file:
        matches, confidence = file["matches"], file["match_confidence"]
        own = np.flatnonzero(matches >= 0)
        pairs = np.stack([own, matches[own]], axis=1)
        score = int(file["pair_score"]) if "pair_score" in file else None
        aligned = {name: file[name][own] for name in ALIGNED if name in file}
        keypoints = file["keypoints0"], file["keypoints1"]
        found = MatchResult(*keypoints, pairs, confidence[own], size0, size1, pair_score=score, **aligned)
        turned0, turned1 = file["turned"].tolist()
        return found._replace(frame=str(file["frame"]), turned=(turned0, turned1))


@contextlib.contextmanager
def pair_list(folder: Path) -> Iterator[Callable[[Any, Any, MatchResult], None]]:
    """What to give to a `many.Run` of a scene: it writes FOLDER/pairs.csv, all pairs with their scores."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{PAIR_LIST}.partial"
    with partial.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["image0", "image1", "matches", "pair_score", "accepted"])

        def add(item0: Any, item1: Any, found: MatchResult) -> None:
            rows.writerow([item0.name, item1.name, len(found.matches), found.pair_score, int(found.accepted)])

        yield add
    os.replace(partial, folder / PAIR_LIST)


def write_picture(path: Path, found: MatchResult, fitted: Mapping[str, Fit]) -> None:
    """Both images side by side with their matches, as `MatchResult.show` draws them."""
    found.drawn(fitted, found.photos()).save(path)


def write_overlay(stem: Path, found: MatchResult, H_0to1: np.ndarray) -> Tuple[Path, Path]:
    """Image 0 warped onto image 1: STEM_overlay.jpg, both half transparent, and STEM_blink.gif, one after the other."""
    photo0, photo1 = found.photos()
    H_shown = geometry.compose(photo1.to_shown, H_0to1, np.linalg.inv(photo0.to_shown))
    image1 = photo1.pixels
    warped = cv2.warpPerspective(photo0.pixels, H_shown, (image1.shape[1], image1.shape[0]))
    overlay, blink = (stem.with_name(stem.name + end) for end in ("_overlay.jpg", "_blink.gif"))
    drawing.write(overlay, cv2.addWeighted(warped, 0.5, image1, 0.5, 0))
    reduced = (drawing.reduced(picture, BLINK_SIDE)[0] for picture in (warped, image1))
    first, second = (gif_library().fromarray(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)) for picture in reduced)
    data = io.BytesIO()
    first.save(data, "GIF", save_all=True, append_images=[second], duration=BLINK_MS, loop=0)
    write_atomic(blink, data.getvalue())
    return overlay, blink


def gif_library():
    """Pillow's `Image`: OpenCV's wheels write no GIF. Raises RequestError where it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise RequestError("--homography needs one more package: pip install 'superglue-sift[gif]'") from None
    return Image
