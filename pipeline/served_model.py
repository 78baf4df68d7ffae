"""Serve the matcher by MLflow, which copies this file into a model.

The model gets two images and returns their matches.

    model = mlflow.pyfunc.load_model("models:/superglue-sift@champion")
    model.predict([{"image0": image0, "image1": image1}], params={"threshold": 0.5})

An image is the base64 text of a JPEG, PNG, WebP, ... file, which is matched as by `Matcher.match`:
rotated as its EXIF data say, and without keypoints where it is transparent. It may also be pixels,
(H, W) gray or (H, W, 3) BGR, from 0 to 255.
"""

from __future__ import annotations

import base64
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Mapping

import numpy as np
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature, set_model
from mlflow.pyfunc.model import PythonModel
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import AnyType

from superglue_sift import Matcher, RequestError
from superglue_sift.features.features import Features

WEIGHTS = "weights"  # name of the artifact that holds the weights
MAX_KEYPOINTS = 4096  # largest number of keypoints of an image, in any request
MAX_PIXELS = 50_000_000  # largest number of pixels of an image that is given as pixels
IMAGES = ("image0", "image1")  # the columns of a request
REFINED = ("aligned0", "aligned1", "deviations", "correlations")
ANSWER = ("keypoints0", "keypoints1", "matches", "scores", *REFINED)  # keys of an answer


def signature(threshold: float) -> ModelSignature:
    """Return the signature: the columns image0 and image1, and the parameters with their defaults.

    `threshold` is the model's own threshold.
    """
    inputs = Schema([ColSpec(AnyType(), name) for name in IMAGES])
    params = [
        ParamSpec("threshold", DataType.double, threshold),
        ParamSpec("max_keypoints", DataType.long, MAX_KEYPOINTS),
        ParamSpec("refine", DataType.boolean, True),
    ]
    return ModelSignature(inputs=inputs, params=ParamSchema(params))


def extract(matcher: Matcher, image: Any, name: str) -> Features:
    """Extract features of the image of a request, in the column `name`.

    Raises:
        RequestError: Which names the column.
    """
    if isinstance(image, str):
        try:
            data = base64.b64decode(image, validate=True)
        except ValueError:  # also for letters that are not ASCII
            raise RequestError(f"{name}: neither base64 nor pixels") from None
        return matcher.extract_file(data, name)
    # Nested lists of a JSON request, or an array
    try:
        array = np.asarray(image)
    except ValueError:  # rows of different lengths
        array = np.empty(0)
    is_image = array.ndim == 2 or array.shape[2:] == (3,)
    fits = array.dtype.kind in "iuf" and is_image and 0 < array.size <= 3 * MAX_PIXELS
    if not fits or not (array.min() >= 0 and array.max() <= 255):  # both are False for NaN
        raise RequestError(
            f"{name}: must be base64 of an image file, or pixels (H, W) or (H, W, 3) from 0 to 255"
        )
    return matcher.extract(array.astype(np.uint8))


def as_lists(values: Any) -> Any:
    """Return an array as lists, with None in place of NaN, which JSON does not have."""
    if values is None:
        return None
    array = np.asarray(values)
    return np.where(np.isfinite(array), array, None).tolist()  # pyright: ignore


class Answers:
    """Base of MatcherModel.

    It is a class of its own, because MLflow warns about a `predict` without type hints in a
    subclass of PythonModel.
    """

    matcher: Matcher

    def load_context(self, context: Any) -> None:
        self.matcher = Matcher.load(Path(context.artifacts[WEIGHTS]))

    # It has no type hints, because MLflow would read them as a signature.
    def predict(self, context, model_input, params):
        """Match each row, and return one dict of lists for each row.

        A dict has keypoints0 and keypoints1 (N, 2), matches (K, 2) and scores (K,). It also has
        aligned0 and aligned1 (K, 2) px, deviations (K,) px and correlations (K,), with None where a
        position was not refined. With refine=False, these four are None.

        MLflow gives `params` all keys of the signature. Raises MlflowException (HTTP 400), which
        gives the reason, for an invalid image or parameter.
        """
        try:
            return [self._match(row, **params) for row in model_input.to_dict("records")]
        except RequestError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from None

    def _match(
        self, row: Mapping[str, Any], threshold: float, max_keypoints: int, refine: bool
    ) -> Dict[str, Any]:
        if not 1 <= max_keypoints <= MAX_KEYPOINTS:
            raise RequestError(f"max_keypoints: must be 1 to {MAX_KEYPOINTS}")
        # Threads answer several requests at once. Their copies of the matcher share its network and
        # take turns at it.
        matcher = dataclasses.replace(
            self.matcher, max_keypoints=max_keypoints, threshold=threshold, refine=refine
        )
        with ThreadPoolExecutor(len(IMAGES)) as pool:
            features = list(pool.map(lambda name: extract(matcher, row[name], name), IMAGES))
        result = matcher.match(*features)
        return {name: as_lists(getattr(result, name)) for name in ANSWER}


class MatcherModel(Answers, PythonModel):
    """`Matcher` behind MLflow's interface. It gives one answer for each row of the input."""


# MLflow loads this file from the model's copy.
if __name__ != "pipeline.served_model":
    set_model(MatcherModel())
