"""LightGlue for SIFT (Lindenberger et al. 2023) as one more baseline, where its package and weights lie ready.

Not ours and no part of the installation: `kornia` or `lightglue` brings the network, torch's hub cache its weights.
Nothing is downloaded: what is missing is named instead. The weights are read by torch without running code in them.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import sys
from pathlib import Path
from typing import Callable, Dict, Iterator, Optional, Tuple

import numpy as np
import torch

from pipeline.evaluation.matchers import PairMatches, root_sift
from pipeline.evaluation.pairs import Pair

NAME = "lightglue"
PACKAGES = ("kornia.feature", "lightglue")  # whose `LightGlue` it is, in the order they are tried


class Absent(Exception):
    """What LightGlue lacks here, in words."""


def load(device: str) -> Tuple[Optional[Callable[[Pair], PairMatches]], str]:
    """The matcher and the package it comes from; or None and what is missing."""
    try:
        package, network = found_network()
        with hub_without_network(), contextlib.redirect_stdout(sys.stderr):  # kornia prints that it is loaded
            # the whole network for every pair: neither layers nor keypoints are left out for speed
            model = network(features="sift", depth_confidence=-1, width_confidence=-1)
    except Absent as missing:
        return None, str(missing)
    model = model.eval().to(device)
    return lambda pair: match(model, pair, device), package


def found_network() -> Tuple[str, Callable]:
    """Name of the first package that is installed, and its class. Raises Absent."""
    for package in PACKAGES:
        try:
            return package, importlib.import_module(package).LightGlue
        except (ImportError, AttributeError):
            continue
    raise Absent("neither kornia nor lightglue is installed (`pip install kornia`)")


@contextlib.contextmanager
def hub_without_network() -> Iterator[None]:
    """Inside, torch's hub gives weights from its cache alone, and takes nothing from the file but tensors.

    Raises Absent from within where the file is not there, or where this torch cannot read it so.
    """
    original = torch.hub.load_state_dict_from_url

    def cached(url: str, *_, file_name: Optional[str] = None, **__) -> Dict[str, torch.Tensor]:
        file = Path(torch.hub.get_dir()) / "checkpoints" / (file_name or url.rsplit("/", 1)[-1])
        if not file.is_file():
            raise Absent(f"its weights are not at {file} (from {url}; nothing is downloaded here)")
        if "weights_only" not in inspect.signature(original).parameters:
            raise Absent(f"torch {torch.__version__} would run code in {file.name}; it takes torch 2")
        return original(url, map_location="cpu", file_name=file.name, weights_only=True)

    torch.hub.load_state_dict_from_url = cached
    try:
        yield
    finally:
        torch.hub.load_state_dict_from_url = original


def match(model: torch.nn.Module, pair: Pair, device: str) -> PairMatches:
    """LightGlue's matches of one pair at its own threshold; none where a view has no keypoint."""
    count = len(pair.keypoints0)
    if not count or not len(pair.keypoints1):
        return PairMatches(np.full(count, -1, np.int64), np.zeros(count, np.float32))
    sides = zip((pair.keypoints0, pair.keypoints1), (pair.size0, pair.size1))
    data = {f"image{side}": features(*one, device) for side, one in enumerate(sides)}
    with torch.no_grad():
        found = model(data)
    matches0 = found["matches0"][0].cpu().numpy().astype(np.int64)
    scores0 = found["matching_scores0"][0].float().cpu().numpy()
    return PairMatches(matches0, np.where(matches0 >= 0, scores0, 0.0))


def features(keypoints: np.ndarray, size: Tuple[int, int], device: str) -> Dict[str, torch.Tensor]:
    """One image of LightGlue's input, a batch of one: pixels, RootSIFT, diameters in pixels, angles in radians."""
    width, height = size
    places = np.stack(
        [keypoints["x"].clip(0, width), keypoints["y"].clip(0, height)], axis=-1
    )  # as it demands
    values = {
        "keypoints": places,
        "descriptors": root_sift(keypoints["descriptor"]),
        "scales": keypoints["scale"],
        "oris": keypoints["angle"] * (math.pi / 180),
        "image_size": np.array(size, np.float32),
    }
    return {
        name: torch.from_numpy(np.asarray(value, np.float32))[None].to(device)
        for name, value in values.items()
    }
