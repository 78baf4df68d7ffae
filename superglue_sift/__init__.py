"""Match two images with SuperGlue on SIFT keypoints.

    from superglue_sift import Matcher

    found = Matcher.load().match("A.jpg", "B.jpg")

A library of its own: it needs torch, numpy, scipy, OpenCV and safetensors; `onnx`, `serve` and GIFs need more, asked
for when they are used. `pipeline` trains what it loads. In reading order:

    matcher, match_result, cli      images in, matches out, and what they can tell; the same from the command line
    many, retrieval, results        folders, lists, videos; which photographs are alike; what is written of a pair
    serve, onnx                     a page for the browser; the network for ONNX Runtime
    interop/                        COLMAP, hloc, OpenCV, kornia, LightGlue, transformers
    scenes, classical               photographs of one place: which pairs are accepted, all keypoints matched
    images, upright                 a file to pixels, turned upright or as stored
    sift, features, batch           pixels to keypoints, pairs to a batch: THE shapes and units
    extractors, descriptors         features of your own, and what their descriptors mean; opencv_features: two examples
    superglue                       the network: keypoint encoder, attention, scores, transport
      attention, packing, normalization     its layers, on ragged sets of keypoints
      sinkhorn, sinkhorn_kernel, assignment its optimal transport, and what comes out
    inference, cuda_graphs          the trained network made fast
    refine, local_maps, tracks      matches to a fraction of a pixel; one position of a keypoint in many pairs
    geometry, truth                 homographies; which keypoints correspond
    weights, drawing                model files, pictures of matches
    errors, files, progress         what is said when a request is wrong; a file whole or not at all; how far, how long
    torch_compat                    from torch 1.10 to 2.x
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from superglue_sift.batch import Pair, PairBatch, from_pairs
    from superglue_sift.errors import RequestError
    from superglue_sift.features import Features
    from superglue_sift.match_result import MatchResult
    from superglue_sift.matcher import Matcher
    from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig, mutual_matches
    from superglue_sift.sift import extract as extract_sift
    from superglue_sift.weights import load_model

__version__ = "0.1.0"

_HOMES = {
    "Matcher": "matcher", "MatchResult": "match_result", "Features": "features", "RequestError": "errors",
    "SuperGlue": "superglue", "SuperGlueConfig": "superglue", "mutual_matches": "superglue", "load_model": "weights",
    "extract_sift": "sift", "Pair": "batch", "PairBatch": "batch", "from_pairs": "batch",
}  # fmt: skip

__all__ = [
    "Features", "MatchResult", "Matcher", "Pair", "PairBatch", "RequestError", "SuperGlue", "SuperGlueConfig",
    "__version__", "extract_sift", "from_pairs", "load_model", "mutual_matches",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The public names, loaded when they are asked for: `import superglue_sift` alone does not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    return getattr(home, "extract" if name == "extract_sift" else name)
