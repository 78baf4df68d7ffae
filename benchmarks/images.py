"""Measure the work that begins with pixels, one row for each task.

The groups are files, decoders, views and onnx.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Iterator, List, Tuple

import cv2
import numpy as np

from benchmarks import dali_views
from benchmarks.photographs import load_photographs
from benchmarks.timing import Setting, format_row
from pipeline.errors import RequestError
from pipeline.fetch import decoders
from superglue_sift import onnx
from superglue_sift.features.images import decode_gray
from superglue_sift.matcher import Matcher
from superglue_sift.network.weights import fuse_for_inference


def time_files(setting: Setting) -> Iterator[str]:
    """Time the matching of two JPEG files of 640x480, with SIFT in two threads."""
    model = fuse_for_inference(setting.make_model())
    matcher = Matcher(model, setting.device, max_keypoints=setting.keypoints, resize=0)
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("a.jpg", "b.jpg")]
        for path, view in zip(paths, make_two_views()):
            cv2.imwrite(path, view)
        seconds = setting.time({"call": lambda: matcher.match(*paths)})
    yield format_row(f"two JPEG files to matches, {setting.keypoints} keypoints", seconds["call"])


def encode_jpegs(times: int) -> List[bytes]:
    """Encode eight photographs as JPEG, and repeat them `times` times."""
    return [cv2.imencode(".jpg", image)[1].tobytes() for image in load_photographs(8)] * times


def time_decoders(setting: Setting) -> Iterator[str]:
    """Compare the decoders of `keypoints.decoder` with Pillow, on the GPU if there is one."""
    data = encode_jpegs(4)
    for decoder in ("torchvision", "dali"):
        name = f"decoding a JPEG file of 640x480 by {decoder}"
        try:
            decode = decoders.make_decoder(decoder)
        except RequestError as error:
            yield f"{name:56} SKIP: {error}"
            continue
        ways = {
            decoder: functools.partial(decode, data),
            "pillow": lambda: [decode_gray(jpeg) for jpeg in data],
        }
        seconds = setting.time(ways, len(data))
        yield format_row(name, seconds[decoder], seconds["pillow"], "Pillow in one process")


def time_view_loaders(setting: Setting) -> Iterator[str]:
    """Compare DALI with OpenCV in loading pairs of views of 320x240 from JPEG files."""
    # DALI works two batches ahead, so of these 16 batches two are loaded while OpenCV is timed.
    data = encode_jpegs(64)
    gpu = setting.device.index or 0 if setting.device.type == "cuda" else None
    # A training builds the pipeline once, so its start is not timed.
    load = dali_views.make_dali_loader(data, (320, 240), gpu)
    ways = {
        "opencv": lambda: list(dali_views.load_views_by_opencv(data, (320, 240))),
        "dali": lambda: list(load()),
    }
    seconds = setting.time(ways, len(data))
    yield format_row(
        "JPEG files to pairs of views by DALI", seconds["dali"], seconds["opencv"], "OpenCV"
    )


def time_onnx_runtime(setting: Setting) -> Iterator[str]:
    """Compare the shipped weights in ONNX Runtime with torch, in time and in matches."""
    import onnxruntime

    kind = setting.device.type.upper()
    provider = f"{kind}ExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise RequestError(f"this onnxruntime has no {provider}")
    with tempfile.TemporaryDirectory() as folder:
        file = onnx.export(Path(folder) / "model.onnx")
        runtime = onnxruntime.InferenceSession(str(file), providers=[provider])
    device = str(setting.device)
    matcher = Matcher.load(device=device, max_keypoints=setting.keypoints, refine=False)
    features = [matcher.extract(view) for view in make_two_views()]
    values = onnx.make_inputs(*features)
    ways = {
        "torch": lambda: matcher.match(*features),
        "ONNX": lambda: runtime.run(["matches0"], values),
    }
    seconds = setting.time(ways)
    yield format_row(
        f"ONNX Runtime on {kind}: matching a pair", seconds["ONNX"], seconds["torch"], "torch"
    )
    # Compare the indices (M,) of the matches, for the keypoints that either way matches.
    onnx_matches = ways["ONNX"]()[0][0]
    torch_matches, _ = ways["torch"]().to_dense()
    is_matched = (onnx_matches >= 0) | (torch_matches >= 0)
    equal = (onnx_matches == torch_matches)[is_matched].mean()
    yield f"ONNX Runtime on {kind}: share of matches equal to torch's {equal:.4f}"


def make_two_views() -> Tuple[np.ndarray, np.ndarray]:
    """Return a photograph and itself rotated by 10 degrees about its middle."""
    image = load_photographs(1)[0]
    height, width = image.shape
    rotation = cv2.getRotationMatrix2D((width / 2, height / 2), 10, 1.0)
    return image, cv2.warpAffine(image, rotation, (width, height))
