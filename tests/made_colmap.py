"""What COLMAP hands over to the file of `superglue_sift.onnx --for colmap`."""

from superglue_sift.interop.convert import to_lightglue
from superglue_sift.onnx import COLMAP_INPUTS


def colmap_inputs_of(side0, side1):
    """COLMAP_INPUTS by name, for one pair of SIFT features with one orientation each."""
    values = {}
    for side, features in zip("01", (side0, side1)):
        given = {name: value.numpy() for name, value in to_lightglue(features).items()}
        given["kpts"] = given["keypoints"]
        given["desc"] = given["descriptors"]
        given["scales"] = given["scales"] / 2  # of OpenCV a diameter, of COLMAP sigma
        values.update({name + side: value for name, value in given.items()})
    return {name: values[name] for name in COLMAP_INPUTS}
