"""LightGlue for SIFT (Lindenberger et al. 2023) as an optional baseline.

The package `kornia` or `lightglue` has the network, a safetensors file its weights. We load them
here, because the packages themselves would download and unpickle weights.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path
from typing import Callable, Dict, Optional, Tuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file

from pipeline.errors import RequestError
from superglue_sift.batch import Pair
from superglue_sift.features import Features
from superglue_sift.interop.arrays import to_lightglue
from superglue_sift.matcher import PairMatches

NAME = "lightglue"
# Modules with a class `LightGlue`, in the order they are tried
PACKAGES = ("kornia.feature", "lightglue")
# All layers and keypoints for every pair: no early exit, no pruning.
OPTIONS = {"depth_confidence": -1, "width_confidence": -1}
SIFT = {"input_dim": 128, "add_scale_ori": True}


def load(weights: Path, device: str) -> Tuple[Optional[Callable[[Pair], PairMatches]], str]:
    """The matcher and its package; or None and a message that says which package or file is
    missing.

    Raises RequestError for a file without the weights of LightGlue for SIFT.
    """
    package, network = find_network()
    if network is None:
        return None, "neither kornia nor lightglue is installed (`pip install kornia`)"
    if not weights.is_file():
        return None, f"no weights at {weights} (docs/evaluation.md says where they come from)"
    model = network(features=None, **SIFT, **OPTIONS)
    try:
        # the first version's self_attn.3.x is transformers.3.self_attn.x today
        pattern = r"^(self_attn|cross_attn)\.(\d+)\."
        tensors = {
            re.sub(pattern, r"transformers.\2.\1.", name): torch.from_numpy(array)
            for name, array in load_file(str(weights)).items()
        }
        keys = model.load_state_dict(tensors, strict=False)
    except (SafetensorError, RuntimeError) as error:
        raise RequestError(f"--lightglue {weights}: {str(error).splitlines()[0]}") from None
    learned = dict(model.named_parameters())
    for name in keys.missing_keys:
        if name in learned:
            raise RequestError(f"--lightglue {weights}: not LightGlue for SIFT, {name} is missing")
    model = model.eval().to(device)
    return lambda pair: match(model, pair, device), package


def find_network() -> Tuple[str, Optional[Callable]]:
    """Name and class of the first package that is installed; ("", None) without any."""
    for package in PACKAGES:
        with contextlib.suppress(ImportError, AttributeError):
            return package, importlib.import_module(package).LightGlue
    return "", None


def match(model: torch.nn.Module, pair: Pair, device: str) -> PairMatches:
    """LightGlue's matches of one pair at its own threshold; none where a view has no keypoint."""
    count = len(pair.records0)
    if not count or not len(pair.records1):
        return PairMatches(np.full(count, -1, np.int64), np.zeros(count, np.float32))
    first = features(pair.records0, pair.size0, device)
    second = features(pair.records1, pair.size1, device)
    with torch.no_grad():
        output = model({"image0": first, "image1": second})
    matches0 = output["matches0"][0].cpu().numpy().astype(np.int64)
    scores0 = output["matching_scores0"][0].float().cpu().numpy()
    return PairMatches(matches0, np.where(matches0 >= 0, scores0, 0.0))


def features(records: np.ndarray, size: Tuple[int, int], device: str) -> Dict[str, torch.Tensor]:
    """LightGlue's input for one image, a batch of one; it requires all keypoints inside the
    image.
    """
    data = to_lightglue(Features(records, size))
    data["keypoints"] = torch.minimum(data["keypoints"].clamp(min=0.0), torch.tensor(size).float())
    return {name: value.to(device) for name, value in data.items()}
