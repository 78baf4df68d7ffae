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
from typing import Any, Callable, Dict, Iterable, Iterator, Mapping, Optional, Tuple
from zipfile import BadZipFile

import cv2
import numpy as np
import torch

from superglue_sift import __version__, drawing
from superglue_sift.errors import RequestError
from superglue_sift.files import write_atomic
from superglue_sift.geometry import Fit
from superglue_sift.matcher import MatchResult

BLINK_SIDE = 800  # longer side of the GIF in pixels
BLINK_MS = 600
PAIR_LIST = "pairs.csv"
ALIGNED = ("aligned0", "aligned1", "deviations", "correlations")  # of `MatchResult`, what alignment gives
SEAL = 8  # bytes at the end of a `.npz`: the CRC-32 of the rest
DAMAGED = (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error)  # what reading a torn `.npz` raises
NAMES = {"homography": "homography", "fundamental": "fundamental matrix"}  # of `fits`, as people say
Pixels = Callable[[], Iterable[np.ndarray]]  # both images (H, W, 3) BGR, read when they are drawn


def fits(found: MatchResult) -> Dict[str, Fit]:
    """By name, the homography and the fundamental matrix that most matches agree on."""
    return {"homography": found.homography(), "fundamental": found.fundamental()}


def write_json(path: Path, found: MatchResult, fitted: Mapping[str, Fit], about: Mapping[str, str]) -> None:
    """Names as SuperGlue's users know them, `matches` of [index0, index1, score], and `about`, such as file names."""
    matches0, scores0 = found.dense()
    H_0to1 = fitted["homography"].model
    content = {
        **about,
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
        **aligned_lists(found),
    }
    write_atomic(path, json.dumps(content) + "\n")


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
    """keypoints0 (M, 2), keypoints1 (N, 2) float32, matches (M,) int64 or -1, match_confidence (M,) float32.

    Of matches that were aligned by the pixels also aligned0, aligned1 (M, 2) px, deviations (M,) px and correlations
    (M,) float32, NaN where there is no match; see `MatchResult`. Beside them `made_from` (), the text of `made_from`;
    of photographs of a place also pair_score, int64.
    """
    data, (matches, scores) = io.BytesIO(), found.dense()
    arrays: Dict[str, Any] = {"keypoints0": found.keypoints0, "keypoints1": found.keypoints1, "matches": matches}
    arrays.update(match_confidence=scores, made_from=np.array(made))
    if found.pair_score is not None:
        arrays["pair_score"] = np.array(found.pair_score)
    for name in ALIGNED if found.aligned1 is not None else ():
        values = getattr(found, name)
        arrays[name] = np.full((len(matches), *values.shape[1:]), np.nan, np.float32)
        arrays[name][found.matches[:, 0]] = values
    np.savez_compressed(data, **arrays)
    write_atomic(path, _sealed(data.getvalue()))


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
        return MatchResult(*keypoints, pairs, confidence[own], size0, size1, pair_score=score, **aligned)


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


def write_picture(path: Path, found: MatchResult, fitted: Mapping[str, Fit], pixels: Pixels) -> None:
    """Both images side by side, matches coloured by confidence; red: those that the better of the fits leaves out."""
    image0, image1 = pixels()
    drawing.write(path, drawing.draw(image0, image1, [panel(found, fitted)]))


def panel(found: MatchResult, fitted: Mapping[str, Fit]) -> drawing.Panel:
    """What `drawing.draw` draws of matches and `fits` of them."""
    counts = {name: int(fit.inliers.sum()) for name, fit in fitted.items()}
    name = max(counts, key=lambda key: counts[key])
    fit = ", ".join(f"{count} fit one {NAMES[key]}" for key, count in counts.items())
    wrong = None if fitted[name].model is None else ~fitted[name].inliers
    heading = f"{len(found.matches)} matches: {fit}"
    return drawing.Panel(heading, found.points0, found.points1, found.scores, wrong, f"off the {NAMES[name]}")


def write_overlay(stem: Path, H_0to1: np.ndarray, pixels: Pixels) -> Tuple[Path, Path]:
    """Image 0 warped onto image 1: STEM_overlay.jpg, both half transparent, and STEM_blink.gif, one after the other."""
    image0, image1 = pixels()
    warped = cv2.warpPerspective(image0, H_0to1, (image1.shape[1], image1.shape[0]))
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
