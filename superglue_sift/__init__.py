"""Match two images with SuperGlue on SIFT keypoints.

    from superglue_sift import Matcher

    found = Matcher.load().match("A.jpg", "B.jpg")

The library needs torch, numpy, scipy, OpenCV, Pillow, safetensors and tqdm. `onnx`, `serve` and
HEIC need more, imported on use. `pipeline` trains the models. In reading order:

    matcher, match_result         images in, matches out; geometry and pictures of the matches
    matches                       the one type for matches: indices and scores
    features/                     files to pixels, pixels to keypoints with descriptors
    network/                      SuperGlue, optimal transport, ground truth, model files
    geometry/                     two views, refined positions, photographs of one place
    apps/                         the command line, folders of photographs, the page in the browser
    interop/                      COLMAP, hloc, OpenCV, LightGlue
    onnx                          the network for ONNX Runtime
    opencv_features               two examples of other features
    drawing, progress             pictures of matches; progress of long work
    errors, files                 errors for the user, atomic writes
    environment                   the same bytes on every processor, threads that sleep
    torch_compat                  differences from torch 1.10 to 2.x
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from superglue_sift import environment

if TYPE_CHECKING:
    from superglue_sift.errors import RequestError
    from superglue_sift.features.features import Features
    from superglue_sift.features.sift import extract as extract_sift
    from superglue_sift.match_result import MatchResult
    from superglue_sift.matcher import Matcher
    from superglue_sift.network.batch import Pair, PairBatch, from_pairs
    from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig, mutual_matches
    from superglue_sift.network.weights import load_model

__version__ = "0.2.0"

environment.prepare_opencv()  # before any module imports OpenCV

_HOMES = {
    "Matcher": "matcher",
    "MatchResult": "match_result",
    "Features": "features.features",
    "RequestError": "errors",
    "SuperGlue": "network.superglue",
    "SuperGlueConfig": "network.superglue",
    "mutual_matches": "network.superglue",
    "load_model": "network.weights",
    "extract_sift": "features.sift",
    "Pair": "network.batch",
    "PairBatch": "network.batch",
    "from_pairs": "network.batch",
}

__all__ = [
    "Features",
    "MatchResult",
    "Matcher",
    "Pair",
    "PairBatch",
    "RequestError",
    "SuperGlue",
    "SuperGlueConfig",
    "__version__",
    "extract_sift",
    "from_pairs",
    "load_model",
    "mutual_matches",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use: `import superglue_sift` alone does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    return getattr(home, "extract" if name == "extract_sift" else name)
