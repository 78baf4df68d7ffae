"""What COLMAP hands over to the file of `superglue_sift.onnx --for colmap`."""

from __future__ import annotations

from typing import Dict

import numpy as np

from superglue_sift import Features
from superglue_sift.interop.arrays import to_lightglue
from superglue_sift.onnx import COLMAP_INPUTS


def colmap_inputs_of(side0: Features, side1: Features) -> Dict[str, np.ndarray]:
    """COLMAP_INPUTS by name, for one pair of SIFT features with one orientation each."""
    values: Dict[str, np.ndarray] = {}
    for side, features in zip("01", (side0, side1)):
        given = {name: value.numpy() for name, value in to_lightglue(features).items()}
        given["kpts"] = given["keypoints"]
        given["desc"] = given["descriptors"]
        given["scales"] = given["scales"] / 2  # of OpenCV a diameter, of COLMAP sigma
        values.update({name + side: value for name, value in given.items()})
    return {name: values[name] for name in COLMAP_INPUTS}
