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
from benchmarks.photographs import photographs
from benchmarks.timing import Setting, row
from pipeline.errors import RequestError
from pipeline.fetch import decoders
from superglue_sift import onnx
from superglue_sift.features.images import decode_gray
from superglue_sift.matcher import Matcher
from superglue_sift.network.weights import fuse_for_inference


def files(setting: Setting) -> Iterator[str]:
    """Time the way from two JPEG files of 640x480 to matches, with SIFT in two threads."""
    model = fuse_for_inference(setting.model())
    matcher = Matcher(model, setting.device, max_keypoints=setting.keypoints, resize=0)
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("a.jpg", "b.jpg")]
        for path, view in zip(paths, two_views()):
            cv2.imwrite(path, view)
        taken = setting.time({"call": lambda: matcher.match(*paths)})
    yield row(f"two JPEG files to matches, {setting.keypoints} keypoints", taken["call"])


def jpegs(times: int) -> List[bytes]:
    return [cv2.imencode(".jpg", image)[1].tobytes() for image in photographs(8)] * times


def decoding(setting: Setting) -> Iterator[str]:
    """Compare the decoders of `keypoints.decoder` with Pillow, on the GPU if there is one."""
    data = jpegs(4)
    for decoder in ("torchvision", "dali"):
        name = f"decoding a JPEG file of 640x480 by {decoder}"
        try:
            decode = decoders.make_decoder(decoder)
        except RequestError as error:
            yield f"{name:56} SKIP: {error}"
            continue
        ways = {
            decoder: functools.partial(decode, data),
            "pillow": lambda: [decode_gray(each) for each in data],
        }
        taken = setting.time(ways, len(data))
        yield row(name, taken[decoder], taken["pillow"], "Pillow in one process")


def views(setting: Setting) -> Iterator[str]:
    """Compare DALI with OpenCV in loading pairs of views of 320x240 from JPEG files."""
    # DALI works two batches ahead, so of these 16 batches two are loaded while OpenCV is timed
    data = jpegs(64)
    gpu = setting.device.index or 0 if setting.device.type == "cuda" else None
    # a training builds the pipeline once, so its start is not timed
    load = dali_views.dali_views(data, (320, 240), gpu)
    ways = {
        "opencv": lambda: list(dali_views.opencv_views(data, (320, 240))),
        "dali": lambda: list(load()),
    }
    taken = setting.time(ways, len(data))
    yield row("JPEG files to pairs of views by DALI", taken["dali"], taken["opencv"], "OpenCV")


def onnx_runtime(setting: Setting) -> Iterator[str]:
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
    features = [matcher.extract(view) for view in two_views()]
    values = onnx.inputs_of(*features)
    ways = {
        "torch": lambda: matcher.match(*features),
        "ONNX": lambda: runtime.run(["matches0"], values),
    }
    taken = setting.time(ways)
    yield row(f"ONNX Runtime on {kind}: matching a pair", taken["ONNX"], taken["torch"], "torch")
    # Compare the indices (M,) of the matches, for the keypoints that either way matches.
    own = ways["ONNX"]()[0][0]
    theirs, _ = ways["torch"]().dense()
    equal = (own == theirs)[(own >= 0) | (theirs >= 0)].mean()
    yield f"ONNX Runtime on {kind}: share of matches equal to torch's {equal:.4f}"


def two_views() -> Tuple[np.ndarray, np.ndarray]:
    """Return a photograph and itself rotated by 10 degrees about its middle."""
    image = photographs(1)[0]
    height, width = image.shape
    rotation = cv2.getRotationMatrix2D((width / 2, height / 2), 10, 1.0)
    return image, cv2.warpAffine(image, rotation, (width, height))
