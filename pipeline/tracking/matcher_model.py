"""The matcher as MLflow serves it: two images in, matches out. MLflow copies this file into the
model.

    model = mlflow.pyfunc.load_model("models:/superglue-sift@champion")
    model.predict([{"image0": image0, "image1": image1}], params={"threshold": 0.5})

An image is the base64 text of a JPEG, PNG, WebP, ... file, rotated as its EXIF data say, or pixels:
(H, W) gray or (H, W, 3) BGR, 0 to 255.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Mapping

import cv2
import numpy as np
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature, set_model
from mlflow.pyfunc.model import PythonModel
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import AnyType

from superglue_sift import Matcher, RequestError
from superglue_sift.apps.results import aligned_lists
from superglue_sift.features.images import UPRIGHT, BadImage, decode_gray

WEIGHTS = "weights"  # name of the artifact
MAX_KEYPOINTS = 4096  # of an image, in any request
MAX_PIXELS = 50_000_000  # of an image given as pixels
# threshold 0: the model's own
PARAMS = {"threshold": 0.0, "max_keypoints": MAX_KEYPOINTS, "refine": True}


def signature() -> ModelSignature:
    """Columns image0 and image1, and the parameters."""
    kinds = {float: DataType.double, int: DataType.long, bool: DataType.boolean}
    inputs = Schema([ColSpec(AnyType(), name) for name in ("image0", "image1")])
    specs = [ParamSpec(name, kinds[type(value)], value) for name, value in PARAMS.items()]
    return ModelSignature(inputs=inputs, params=ParamSchema(specs))


def input_example() -> List[Dict[str, str]]:
    """Two small synthetic photographs: the second is the first, rotated by 20 degrees."""
    spots = np.random.default_rng(0).integers(0, 256, (30, 40)).astype(np.uint8)
    image0 = cv2.resize(spots, (160, 120), interpolation=cv2.INTER_CUBIC)
    image1 = cv2.warpAffine(image0, cv2.getRotationMatrix2D((80, 60), 20, 1), (160, 120))
    files = [cv2.imencode(".jpg", image)[1].tobytes() for image in (image0, image1)]
    return [{f"image{side}": base64.b64encode(file).decode() for side, file in enumerate(files)}]


def pixels(image: Any, name: str) -> np.ndarray:
    """The image of a request, (H, W) or (H, W, 3) uint8. Raises RequestError or BadImage, naming
    the column.
    """
    if isinstance(image, str):
        try:
            return decode_gray(base64.b64decode(image, validate=True), name, UPRIGHT)
        except binascii.Error:
            raise RequestError(f"{name}: neither base64 nor pixels") from None
    try:
        array = np.asarray(image)
    except ValueError:  # rows of different lengths
        array = np.empty(0)
    fits = array.dtype.kind in "iuf" and array.ndim in (2, 3) and 0 < array.size <= 3 * MAX_PIXELS
    if not fits or not (array.min() >= 0 and array.max() <= 255):  # NaN is neither
        raise RequestError(
            f"{name}: must be base64 of an image file, or pixels (H, W) or (H, W, 3) from 0 to 255"
        )
    return array.astype(np.uint8)


class Answers:
    """Base of MatcherModel, since MLflow warns of a `predict` without type hints in a subclass of
    PythonModel.
    """

    matcher: Matcher

    def load_context(self, context: Any) -> None:
        self.matcher = Matcher.load(Path(context.artifacts[WEIGHTS]))

    # Without types: MLflow reads them as a signature
    def predict(self, context, model_input, params=None):
        """For each row keypoints0, keypoints1 (N, 2), matches (K, 2), scores (K,), as lists;
        aligned0, aligned1 (K, 2), deviations (K,) px, None where a position was not refined,
        correlations (K,); None with refine=False.

        Raises MlflowException (HTTP 400) for an invalid image or parameter, with the reason in one
        line.
        """
        asked = {**PARAMS, **(params or {})}
        rows = model_input.to_dict("records") if hasattr(model_input, "to_dict") else model_input
        try:
            return [self._match(row, asked) for row in rows]
        except (RequestError, BadImage) as error:
            raise MlflowException.invalid_parameter_value(str(error)) from None

    def _match(self, row: Mapping[str, Any], asked: Mapping[str, Any]) -> Dict[str, Any]:
        threshold = float(asked["threshold"])
        max_keypoints = int(asked["max_keypoints"])
        if not 0 <= threshold < 1 or not 1 <= max_keypoints <= MAX_KEYPOINTS:
            raise RequestError(f"threshold must be 0 to 1, max_keypoints 1 to {MAX_KEYPOINTS}")
        matcher = dataclasses.replace(
            self.matcher,
            max_keypoints=max_keypoints,
            threshold=threshold or self.matcher.threshold,
            refine=bool(asked["refine"]),
        )
        matches = matcher.match(*(pixels(row[name], name) for name in ("image0", "image1")))
        names = ("keypoints0", "keypoints1", "matches", "scores")
        return {
            **{name: np.asarray(getattr(matches, name)).tolist() for name in names},
            **aligned_lists(matches),
        }


class MatcherModel(Answers, PythonModel):
    """`Matcher` behind MLflow's interface. One answer for each row of the input."""


if __name__ != "pipeline.tracking.matcher_model":  # loaded by MLflow from the model's copy
    set_model(MatcherModel())
