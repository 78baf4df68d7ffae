"""The model that MLflow serves: it gets two images and returns their matches.

MLflow copies this file into the model.

    model = mlflow.pyfunc.load_model("models:/superglue-sift@champion")
    model.predict([{"image0": image0, "image1": image1}], params={"threshold": 0.5})

An image is the base64 text of a JPEG, PNG, WebP, ... file, which is matched as by `Matcher.match`:
rotated as its EXIF data say, and without keypoints where it is transparent. An image may also be
given as pixels from 0 to 255, (H, W) gray or (H, W, 3) BGR.
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
from superglue_sift.match_result import REFINED

WEIGHTS = "weights"  # Name of the artifact that has the weights
MAX_KEYPOINTS = 4096  # Largest number of keypoints of an image, in any request
MAX_PIXELS = 50_000_000  # Largest number of pixels of an image that is given as pixels
IMAGES = ("image0", "image1")  # The columns of a request
# The keys of the result of a request, which are attributes of MatchResult
RESULT_FIELDS = ("keypoints0", "keypoints1", "matches", "scores", *REFINED)


def make_signature(threshold: float) -> ModelSignature:
    """Make MLflow's signature: the columns image0 and image1, and the parameters of a request.

    `threshold` is the default threshold, that of the model.
    """
    inputs = Schema([ColSpec(AnyType(), name) for name in IMAGES])
    params = [
        ParamSpec("threshold", DataType.double, threshold),
        ParamSpec("max_keypoints", DataType.long, MAX_KEYPOINTS),
        ParamSpec("refine", DataType.boolean, True),
    ]
    return ModelSignature(inputs=inputs, params=ParamSchema(params))


def extract_request_image(matcher: Matcher, image: Any, name: str) -> Features:
    """Extract the features of an image of a request.

    Args:
        matcher: the matcher.
        image: base64 of an image file, or pixels (H, W) or (H, W, 3) from 0 to 255.
        name: the column of the request, for messages.

    Raises:
        RequestError: If `image` is none of these, or if the file cannot be read.
    """
    if isinstance(image, str):
        try:
            data = base64.b64decode(image, validate=True)
        except ValueError:  # Letters that are not ASCII raise this, too
            raise RequestError(f"{name}: neither base64 nor pixels") from None
        return matcher.extract_file(data, name)
    # Nested lists of a JSON request, or an array
    try:
        array = np.asarray(image)
    except ValueError:  # Rows of different lengths raise this
        array = np.empty(0)
    has_image_shape = array.ndim == 2 or array.shape[2:] == (3,)
    is_image = array.dtype.kind in "iuf" and has_image_shape and 0 < array.size <= 3 * MAX_PIXELS
    with np.errstate(invalid="ignore"):  # NaN has no whole number
        pixels = array.astype(np.uint8) if is_image else None
    if pixels is None or not np.array_equal(pixels, array):
        raise RequestError(
            f"{name}: must be base64 of an image file, or pixels (H, W) or (H, W, 3), whole numbers"
            " from 0 to 255"
        )
    return matcher.extract(pixels)


def to_lists(values: Any) -> Any:
    """Convert an array to lists, with None in place of NaN, which JSON does not have."""
    if values is None:
        return None
    array = np.asarray(values)
    return np.where(np.isfinite(array), array, None).tolist()  # pyright: ignore


class BaseMatcherModel:
    """Base of MatcherModel, which does its work.

    MLflow warns about a `predict` without type hints in a direct subclass of PythonModel.
    """

    matcher: Matcher

    def load_context(self, context: Any) -> None:
        """Load the matcher from the artifact WEIGHTS of MLflow's context."""
        self.matcher = Matcher.load(Path(context.artifacts[WEIGHTS]))

    # The method has no type hints, because MLflow would read them as a signature.
    def predict(self, context, model_input, params):
        """Match the two images of each row.

        Args:
            context: MLflow's context, which is not used.
            model_input: a data frame with the columns image0 and image1.
            params: all parameters of the signature, which MLflow completes by their defaults.

        Returns:
            A dict of lists for each row: keypoints0 and keypoints1 (N, 2) px, matches (K, 2) and
            scores (K,). It also has refined0 and refined1 (K, 2) px, deviations (K,) px and
            correlations (K,), with None where a position was not refined. With refine=False, these
            four are None.

        Raises:
            MlflowException: If an image or a parameter is invalid (HTTP 400), with the reason.
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
        # Several threads may run this at once. Their copies of the matcher share its network and
        # take turns at it.
        matcher = dataclasses.replace(
            self.matcher, max_keypoints=max_keypoints, threshold=threshold, refine=refine
        )
        with ThreadPoolExecutor(len(IMAGES)) as pool:
            features = list(
                pool.map(lambda name: extract_request_image(matcher, row[name], name), IMAGES)
            )
        result = matcher.match(*features)
        return {name: to_lists(getattr(result, name)) for name in RESULT_FIELDS}


class MatcherModel(BaseMatcherModel, PythonModel):
    """`Matcher` behind MLflow's interface. It gives one result for each row of the input."""


# MLflow loads this file from the model's copy.
if __name__ != "pipeline.served_model":
    set_model(MatcherModel())
