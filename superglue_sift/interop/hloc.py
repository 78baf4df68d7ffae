"""Write files for hloc, and match for hloc.

This needs `pip install 'superglue-sift[hloc]'`, which brings h5py, and hloc from its sources.

    write_features("features.h5", "a.jpg", features)               a group for each image
    write_matches("matches.h5", "a.jpg", "b.jpg", result)          a group for each pair

In a program that uses hloc, `register()` adds the matcher `superglue_sift` to
`hloc.match_features`:

    match_features.main({"output": "matches-superglue-sift", "model": {"name": "superglue_sift"}},
    pairs, ...)

hloc keeps the pairs that its file has, whatever they were made from. For other settings, name
another `output`. `write_features` and `write_matches` replace earlier arrays.

hloc reads pixels as they are stored, as COLMAP does. For photographs with EXIF data, use
`Matcher.load(frame="stored")`. With `"scene": True` in the model's settings, pairs are matched as
by `superglue-match folder --colmap`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Dict, List, Mapping, Type

import numpy as np
import torch
from torch import Tensor

from superglue_sift.errors import import_extra
from superglue_sift.features.features import Features
from superglue_sift.features.images import STORED
from superglue_sift.files import FileName
from superglue_sift.interop import convert
from superglue_sift.match_result import MatchResult
from superglue_sift.matcher import Matcher

MATCHER_NAME = "superglue_sift"
IMAGE_ARRAYS = ("keypoints", "scores", "descriptors", "scales", "oris")  # of an image
PAIR_ARRAYS = ("matches0", "matching_scores0")  # arrays of a pair


def write_features(path: FileName, name: str, features: Features) -> None:
    """Add the features of an image to a file, in the units of hloc's own SIFT.

    The group `name` gets these arrays:
    - keypoints (N, 2), in pixels,
    - scores (N,),
    - scales (N,), sigma in pixels, which is half a diameter,
    - oris (N,), in degrees,
    - descriptors (128, N), RootSIFT,
    - image_size (2,), width and height.

    Args:
        path: the HDF5 file, which is created if it is missing.
        name: name of the image, as hloc names it.
        features: SIFT features.

    Raises:
        RequestError: If the features are no SIFT, or h5py is not installed.
    """
    data = convert.to_lightglue(features)
    arrays = {
        "keypoints": features.keypoints,
        "scores": features.scores,
        "descriptors": data["descriptors"][0].numpy().T,
        "scales": features.scales / 2,
        "oris": features.oris[:, 0],
        # Whole numbers, since hloc creates tensors of this size
        "image_size": np.array(features.image_size),
    }
    _write_arrays(path, Path(name).as_posix(), arrays)


def write_matches(path: FileName, name0: str, name1: str, result: MatchResult) -> None:
    """Add the matches of a pair to a file.

    The group of the pair gets matches0 (M,) int64, -1 without a match, and matching_scores0 (M,)
    float32.

    Args:
        path: the HDF5 file, which is created if it is missing.
        name0: name of the first image, as hloc names it.
        name1: name of the second image.
        result: the matches.

    Raises:
        RequestError: If h5py is not installed.
    """
    output = convert.to_lightglue_matches(result)
    # hloc names the group of a/b.jpg and c.jpg a-b.jpg/c.jpg.
    pair = "/".join(Path(name).as_posix().replace("/", "-") for name in (name0, name1))
    _write_arrays(path, pair, {name: output[name][0].numpy() for name in PAIR_ARRAYS})


def _write_arrays(path: FileName, group: str, data: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a group of an HDF5 file, in place of earlier arrays of these names.

    The group of image x also has the groups of images x/..., which stay.
    """
    h5py = import_extra("h5py", "hloc")
    # hloc opens its files by the same version of HDF5.
    with h5py.File(str(path), "a", libver="latest") as file:
        for name, value in data.items():
            if isinstance(file.get(f"{group}/{name}"), h5py.Dataset):
                del file[f"{group}/{name}"]
            file.create_dataset(f"{group}/{name}", data=value)


class MatcherForHloc:
    """A matcher for hloc, without hloc's BaseModel. `register` adds that base class."""

    default_conf: ClassVar[Dict[str, Any]] = {"model": None}  # and settings of `Matcher.load`
    required_inputs: ClassVar[List[str]] = [
        f"{name}{view}" for view in "01" for name in ("image", *IMAGE_ARRAYS)
    ]

    def _init(self, conf: Mapping[str, Any]) -> None:
        settings = dict(conf)
        settings.pop("name", None)  # hloc adds the name of the matcher.
        self.matcher = Matcher.load(settings.pop("model"), **settings)

    def _forward(self, data: Mapping[str, Tensor]) -> Dict[str, Tensor]:
        """Match hloc's features of two images.

        Args:
            data: the arrays of both images (`write_features`) as tensors of a batch of one, and the
                images (1, C, H, W), of which only the sizes are used.

        Returns:
            matches0 (1, M) and matching_scores0 (1, M).
        """
        views = []
        for view in "01":
            values = {name: data[name + view] for name in IMAGE_ARRAYS}
            height, width = data["image" + view].shape[-2:]
            # hloc stores sigma, degrees, and descriptors as columns.
            values.update(
                keypoint_scores=values["scores"],
                scales=2 * values["scales"],
                oris=torch.deg2rad(values["oris"]),
                descriptors=values["descriptors"].transpose(-1, -2),
                image_size=torch.tensor([[width, height]], dtype=torch.int64, device="cpu"),
            )
            views.append(convert.from_lightglue(values)._replace(frame=STORED))
        output = convert.to_lightglue_matches(self.matcher.match(*views))
        return {name: output[name].to(data["keypoints0"].device) for name in PAIR_ARRAYS}


def register() -> Type:
    """Register the matcher `superglue_sift` in hloc, by a new module in `sys.modules`.

    Returns:
        The class of the matcher.
    """
    from hloc.utils.base_model import BaseModel  # pyright: ignore[reportMissingImports]

    # hloc finds a matcher by the name of its module, and takes the one subclass of BaseModel.
    matcher = type(
        "SuperGlueSIFT",
        (MatcherForHloc, BaseModel),
        {"__module__": f"hloc.matchers.{MATCHER_NAME}"},
    )
    module = ModuleType(f"hloc.matchers.{MATCHER_NAME}")
    module.SuperGlueSIFT = matcher  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return matcher
