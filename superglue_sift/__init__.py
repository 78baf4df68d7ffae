"""Match two images with SuperGlue on SIFT keypoints.

    from superglue_sift import Matcher

    found = Matcher.load().match("A.jpg", "B.jpg")

The library needs torch, numpy, scipy, OpenCV, Pillow, safetensors and tqdm. `onnx`, `serve` and
HEIC need more, imported on use. `pipeline` trains the models. In reading order:

    matcher, match_result         images in, matches out; geometry and pictures of the matches
    pair_matches, likely,         keypoints to matches; which keypoints the network sees, and
    local_maps                    matches of others
    feature_store                 features of many images, kept on disk
    images                        a file to pixels, rotated upright or as stored
    sift, features, batch         pixels to keypoints, pairs to a batch: all shapes and units
    extractors                    other features and the kinds of their descriptors;
                                  opencv_features: two examples
    superglue                     the network, with attention, sinkhorn (optimal transport)
    geometry, pose, truth         homographies and cameras; which keypoints correspond
    refine, patches, tracks       positions of matches to a fraction of a pixel
    scenes, acceptance,           photographs of one place: which pairs are accepted, all keypoints
    classical                     matched
    weights                       model files
    apps/                         the command line, folders of photographs, the page in the browser
    interop/                      COLMAP, hloc, OpenCV, LightGlue
    onnx                          the network for ONNX Runtime
    drawing, progress             pictures of matches; progress of long work
    system                        errors for the user, atomic writes, how threads wait
    torch_compat                  differences from torch 1.10 to 2.x
    portable                      the same keypoints on every processor
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from superglue_sift import portable

if TYPE_CHECKING:
    from superglue_sift.batch import Pair, PairBatch, from_pairs
    from superglue_sift.features import Features
    from superglue_sift.match_result import MatchResult
    from superglue_sift.matcher import Matcher
    from superglue_sift.sift import extract as extract_sift
    from superglue_sift.superglue import SuperGlue, SuperGlueConfig, mutual_matches
    from superglue_sift.system import RequestError
    from superglue_sift.weights import load_model

__version__ = "0.1.0"

portable.prepare_opencv()  # before any module imports OpenCV

_HOMES = {
    "Matcher": "matcher",
    "MatchResult": "match_result",
    "Features": "features",
    "RequestError": "system",
    "SuperGlue": "superglue",
    "SuperGlueConfig": "superglue",
    "mutual_matches": "superglue",
    "load_model": "weights",
    "extract_sift": "sift",
    "Pair": "batch",
    "PairBatch": "batch",
    "from_pairs": "batch",
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
