"""Files of a pair: JSON, `.npz` in the common layout of SuperGlue, pictures, a blinking GIF."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from pathlib import Path
from typing import Any, Callable, Collection, Dict, Iterator, Mapping, Optional, Sequence

import cv2
import numpy as np
import torch
from PIL import Image

from superglue_sift import __version__, drawing
from superglue_sift.features.images import reduce
from superglue_sift.files import DAMAGED
from superglue_sift.geometry import two_view, verification
from superglue_sift.geometry.two_view import Fit, Size
from superglue_sift.match_result import REFINED, MatchResult
from superglue_sift.matches import Matches

OVERLAY_SIDE = 4096  # at most, longer side of the warped pictures in pixels
BLINK_SIDE = 800  # longer side of the GIF in pixels
BLINK_MS = 600
PAIR_LIST = "pairs.csv"
# Endings of the files of a pair
MATCHES = "matches.npz"
JSON = "matches.json"
PICTURE = "matches.jpg"
OVERLAY = "overlay.jpg"
BLINK = "blink.gif"
OVERLAYS = (OVERLAY, BLINK)
ENDINGS = (JSON, PICTURE, *OVERLAYS)  # beside MATCHES
ARRAYS = (
    "keypoints0", "keypoints1", "matches", "match_confidence", "frame", "turned", "made_from",
)  # fmt: skip


def json_of(found: MatchResult, fitted: Mapping[str, Fit], about: Mapping[str, Any]) -> bytes:
    """JSON with the common names, `matches` of [index0, index1, score], and `about`, as file names.

    frame, turned0, turned1: see `MatchResult`. inliers, H_0to1, F_0to1: from `fitted`.
    """
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
        "inliers": {name: int(fit.inliers.sum()) for name, fit in fitted.items()},
    }
    for name, key in (("H_0to1", "homography"), ("F_0to1", "fundamental")):
        model = fitted[key].model
        record[name] = None if model is None else model.tolist()
    return (json.dumps({**record, **aligned_lists(found)}) + "\n").encode()


def aligned_lists(found: MatchResult) -> Dict[str, Any]:
    """Fields of alignment as lists, in the order of the matches; all None without alignment.

    aligned0, aligned1: [x, y] px of each match. deviations: px, correlations: -1 to 1; None for
    NaN.
    """
    lists: Dict[str, Any] = dict.fromkeys(REFINED)
    for name in REFINED if found.aligned1 is not None else ():
        values = np.asarray(getattr(found, name), np.float64).round(4)
        lists[name] = np.where(np.isfinite(values), values, None).tolist()  # pyright: ignore
    return lists


def made_from(images: Sequence[str], settings: Mapping[str, object]) -> str:
    """The inputs of a pair's result as JSON: equal text means equal results up to rounding.

    Args:
        images: digests of the content of both.
        settings: all other inputs by name, such as a digest of the weights and the threshold. Plain
            JSON values.
    """
    made = {
        **dict(zip(("image0", "image1"), images)),
        **settings,
        "superglue_sift": __version__,
        "torch": torch.__version__.split("+")[0],
        "opencv": cv2.__version__,
    }
    return json.dumps(made, sort_keys=True)


def differs(before: str, now: str) -> str:
    """The difference between two texts of `made_from`; "" if there is none."""
    if before == now:
        return ""
    try:
        old = json.loads(before)
    except ValueError:
        return "does not state its inputs"
    new = json.loads(now)
    names = [name for name in sorted({**old, **new}) if old.get(name) != new.get(name)]
    return f"was made with another {', '.join(names)}"


def npz_of(found: MatchResult, made: str) -> bytes:
    """keypoints0 (M, 2), keypoints1 (N, 2) float32, matches (M,) int64 or -1, match_confidence (M,)
    float32.

    After alignment also aligned0, aligned1 (M, 2) px, deviations (M,) px and correlations (M,)
    float32, NaN without a match; `frame` () and `turned` (2,); and for scenes pair_score ().
    See `MatchResult`. `made_from` () is the text of `made_from`.
    """
    matches, scores = found.dense()
    sides = (found.keypoints0, found.keypoints1)
    values = (*sides, matches, scores, found.frame, found.turned, made)
    arrays: Dict[str, Any] = dict(zip(ARRAYS, values))
    if found.pair_score is not None:
        arrays["pair_score"] = found.pair_score
    for name in REFINED if found.aligned1 is not None else ():
        aligned = getattr(found, name)
        arrays[name] = np.full((len(matches), *aligned.shape[1:]), np.nan, np.float32)
        arrays[name][found.matches[:, 0]] = aligned
    data = io.BytesIO()
    np.savez_compressed(data, **arrays)
    return data.getvalue()


def read_arrays(path: Path) -> Optional[Dict[str, np.ndarray]]:
    """The arrays of `npz_of`, with their checksums; none if damaged, None without a file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except FileNotFoundError:
        return None
    except DAMAGED:
        return {}
    return arrays if arrays.keys() >= set(ARRAYS) else {}


def from_arrays(arrays: Mapping[str, np.ndarray], size0: Size, size1: Size) -> MatchResult:
    """The result of `read_arrays`. size0, size1: (width, height) of the images."""
    matches = arrays["matches"]
    matched = np.flatnonzero(matches >= 0)
    turned0, turned1 = arrays["turned"].tolist()
    aligned: Dict[str, Any] = {name: arrays[name][matched] for name in REFINED if name in arrays}
    return MatchResult(
        arrays["keypoints0"],
        arrays["keypoints1"],
        Matches.from_dense(matches, arrays["match_confidence"]),
        size0,
        size1,
        pair_score=float(arrays["pair_score"]) if "pair_score" in arrays else None,
        frame=str(arrays["frame"]),
        turned=(turned0, turned1),
        **aligned,
    )


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
            score = f"{found.pair_score:.4f}"
            reason = "" if found.accepted else "not accepted"
            if found.pair_score == verification.SKIPPED:
                score = ""
                reason = "skipped: too few classical matches"
            counts = (len(found.matches), score, int(found.accepted))
            rows.writerow([name(item0), name(item1), *counts, reason])

        yield add
    os.replace(partial, folder / PAIR_LIST)


def files_of(
    found: MatchResult,
    fitted: Mapping[str, Fit],
    about: Mapping[str, Any],
    endings: Collection[str] = ENDINGS,
    picture: str = ".jpg",
) -> Dict[str, bytes]:
    """The files of a pair by their endings, without MATCHES; no overlays without a homography.

    fitted, about: see `json_of`. picture: extension of the picture, which is its format.
    """
    files: Dict[str, bytes] = {}
    if JSON in endings:
        files[JSON] = json_of(found, fitted, about)
    if PICTURE in endings:
        files[PICTURE] = found.show(fits=fitted).encode(picture)
    H = fitted["homography"].model
    if H is not None and (OVERLAY in endings or BLINK in endings):
        files.update(_overlays(found, H))
    return files


def _overlays(found: MatchResult, H_0to1: np.ndarray) -> Dict[str, bytes]:
    """Image 0 warped onto image 1: half transparent, and both blinking."""
    images = []
    to_shown = []
    for photo in found.photos():
        image = reduce(photo.pixels, OVERLAY_SIDE)
        sizes = (photo.pixels.shape[1::-1], image.shape[1::-1])
        to_shown.append(two_view.compose(two_view.resizing(*sizes), photo.to_shown))
        images.append(image)
    image0, image1 = images
    H_shown = two_view.compose(to_shown[1], H_0to1, two_view.inverse(to_shown[0]))
    size = image1.shape[1::-1]
    warped = cv2.warpPerspective(image0, H_shown, size)
    whole = np.full(image0.shape[:2], 255, np.uint8)
    covered = cv2.warpPerspective(whole, H_shown, size) == 255
    laid = np.where(covered[..., None], warped, image1)
    half = cv2.addWeighted(laid, 0.5, image1, 0.5, 0)
    shown, under = (
        Image.fromarray(reduce(frame, BLINK_SIDE)[..., ::-1]) for frame in (laid, image1)
    )
    blink = io.BytesIO()
    shown.save(blink, "GIF", save_all=True, append_images=[under], duration=BLINK_MS, loop=0)
    return {OVERLAY: drawing.Picture(half).encode(), BLINK: blink.getvalue()}
