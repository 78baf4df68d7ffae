"""Match two images with SuperGlue on SIFT keypoints.

    from superglue_sift import Matcher

    result = Matcher.load().match("A.jpg", "B.jpg")

The library needs torch, numpy, scipy, OpenCV, Pillow, tifffile, safetensors and tqdm. COLMAP, hloc,
ONNX, HEIC, relative poses and the page in the browser need further packages, which are imported on
use. `pipeline` trains the models. Read the modules in this order:

    matcher, match_result    match two images, fit geometries, draw the matches.
    matches                  holds matches as indices and scores.
    guided                   adds matches around those of the network.
    scene                    accepts or rejects pairs of photographs of one place.
    features/                reads files to pixels, and finds keypoints with descriptors.
    network/                 has SuperGlue, optimal transport, ground truth and model files.
    geometry/                fits two views, refines positions and tracks: arrays in, arrays out.
    apps/                    has the command line, folders of photographs, the page in the browser.
    interop/                 converts for COLMAP, hloc, OpenCV and LightGlue.
    onnx                     exports the network for ONNX Runtime.
    opencv_features          shows how to use other features.
    drawing, progress        draw matches, and show the progress of long work.
    errors, files            report errors to the user, and write files atomically.
    environment              gives the same bytes on every processor, and threads that sleep.
    torch_compat             hides differences from torch 1.10 to 2.x.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from superglue_sift import environment

if TYPE_CHECKING:
    from superglue_sift.apps.folder import FolderReport, match_folder
    from superglue_sift.errors import RequestError
    from superglue_sift.features.features import Features
    from superglue_sift.features.sift import extract as extract_sift
    from superglue_sift.match_result import MatchResult
    from superglue_sift.matcher import Matcher
    from superglue_sift.network.batch import make_batch
    from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig, find_mutual_matches
    from superglue_sift.network.weights import load_model

__version__ = "0.1.0"

environment.prepare_opencv()  # before any module imports OpenCV

_MODULES = {
    "Matcher": "matcher",
    "MatchResult": "match_result",
    "match_folder": "apps.folder",
    "FolderReport": "apps.folder",
    "Features": "features.features",
    "RequestError": "errors",
    "SuperGlue": "network.superglue",
    "SuperGlueConfig": "network.superglue",
    "find_mutual_matches": "network.superglue",
    "load_model": "network.weights",
    "extract_sift": "features.sift",
    "make_batch": "network.batch",
}

__all__ = [
    "Features",
    "FolderReport",
    "MatchResult",
    "Matcher",
    "RequestError",
    "SuperGlue",
    "SuperGlueConfig",
    "__version__",
    "extract_sift",
    "find_mutual_matches",
    "load_model",
    "make_batch",
    "match_folder",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import superglue_sift` does not import torch.

    Raises:
        AttributeError: For an unknown name.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(home, "extract" if name == "extract_sift" else name)
