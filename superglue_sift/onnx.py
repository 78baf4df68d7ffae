"""Export the network to ONNX, from keypoints and descriptors to matches.

    python -m superglue_sift.onnx superglue.onnx --model models/superglue.safetensors

Inputs have the names of SuperGlue and LightGlue, with suffix 0 for the first image and 1 for the
second:

    keypoints0 (1, M, 2) float32, pixels       descriptors0 (1, M, 128) float32, SIFT's from 0 to
                                               255
    scores0, scales0, angles0 (1, M) float32   image_size0 (1, 2) float32, width, height

The outputs matches0 (1, M) and matches1 (1, N) int64 are -1 without a match. They have the scores
matching_scores0 and matching_scores1 float32.

The graph is that of the trained network itself. The export needs `pip install
'superglue-sift[onnx]'` and torch 2.5 or newer.

    python -m superglue_sift.onnx --for colmap superglue-colmap.onnx

This command writes the file that COLMAP 4 takes in place of its own network (`ColmapSuperGlue`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from superglue_sift import errors
from superglue_sift.errors import RequestError, check_range, import_extra
from superglue_sift.features.features import Features
from superglue_sift.features.sift import MIN_SCALE, positions
from superglue_sift.files import FileName, check_writable, write_atomic
from superglue_sift.matcher import RESIZE
from superglue_sift.network.batch import Images, Pair, choose_pair
from superglue_sift.network.sinkhorn import log_optimal_transport
from superglue_sift.network.superglue import SIFT_DIM, TYPICAL_SCORE, SuperGlue, mutual_matches
from superglue_sift.network.weights import load_model, match_threshold, shipped_weights
from superglue_sift.torch_compat import can_export, sqrt

OPSET = 18  # the lowest opset that torch's exporter writes without conversion
IR_VERSION = 8  # the exporter's own version, 10, would need ONNX Runtime 1.18 or newer
OF_IMAGE = ("keypoints", "descriptors", "scores", "scales", "angles", "image_size")
INPUTS = tuple(f"{name}{view}" for view in "01" for name in OF_IMAGE)
# Inputs that have several columns for each keypoint. Other inputs have one number.
WIDTHS = {"keypoints": (2,), "kpts": (2,), "descriptors": (SIFT_DIM,), "desc": (SIFT_DIM,)}
OUTPUTS = ("matches0", "matches1", "matching_scores0", "matching_scores1")
COLMAP_OF_IMAGE = ("kpts", "desc", "image_size", "scales", "oris")
COLMAP_INPUTS = tuple(f"{name}{view}" for name in COLMAP_OF_IMAGE for view in "01")
# COLMAP may find 8,192 keypoints. The file matches at most this number in an image, since time and
# memory grow with its square. With 2,048 keypoints, a pair takes 3 s of one core and 0.7 GB.
COLMAP_KEYPOINTS = 2048
# With a threshold between 0.6 and 0.8, COLMAP's cameras of Strecha's scenes are most exact. Below
# 0.8, one pair is false.
COLMAP_THRESHOLD = 0.7
# The names of inputs and outputs of a file, for each program that reads it
FORMS = {"any": (INPUTS, OUTPUTS), "colmap": (COLMAP_INPUTS, ("matches0", "mscores0"))}


class OnnxSuperGlue(nn.Module):
    """Wrap the trained network for `torch.export`: from INPUTS to OUTPUTS, for one pair.

    It has no gradients.
    """

    def __init__(self, model: SuperGlue, threshold: float) -> None:
        """Wrap a model in evaluation mode. threshold: minimum probability of a match."""
        super().__init__()
        self.model = model
        self.threshold = threshold

    def forward(self, *inputs: Tensor) -> Tuple[Tensor, ...]:
        """Compute OUTPUTS from INPUTS. The module's docstring says their shapes."""
        named = dict(zip(INPUTS, inputs))
        masks = []
        views = []
        for view in "01":
            columns = [named[name + view][..., None] for name in ("scales", "angles", "scores")]
            keypoints = torch.cat([named["keypoints" + view], *columns], 2)  # (1, M, 5)
            # A row of padding, since a maximum needs at least one row
            keypoints, descriptors = (
                pad(values, (0, 0, 0, 1)) for values in (keypoints, named["descriptors" + view])
            )
            size = named["image_size" + view].unsqueeze(1).expand(-1, keypoints.shape[1], -1)
            masks.append(pad(torch.ones_like(named["scores" + view], dtype=torch.bool), (0, 1)))
            views.append((keypoints, descriptors, size))
        images = Images(masks, padded=[True, True])
        # (1, M + 1, ...) and (1, N + 1, ...) -> (T, ...)
        keypoints, data, size = map(images.join, zip(*views))
        descriptors = self.model.describe(keypoints, data, size, images)
        ((scores, mask0, mask1),) = self.model.scores(descriptors, images)
        # The transport is in float64, whose range is sufficient for trained scores, since a graph
        # cannot fall back to the log domain.
        iterations = self.model.config.sinkhorn_iterations
        log_P, _ = log_optimal_transport(
            scores.double(), mask0, mask1, self.model.dustbin, iterations, wait=False
        )
        matches0, scores0, matches1, scores1 = mutual_matches(log_P, self.threshold)
        return tuple(values[:, :-1] for values in (matches0, matches1, scores0, scores1))


class ColmapSuperGlue(nn.Module):
    """The network for two images of COLMAP's SIFT, with the inputs of COLMAP's own LightGlue.

    COLMAP checks the names, their order and their ranks. COLMAP_INPUTS are float32, for each image:

    kpts: (1, N, 2) px. The centre of the first pixel is (0, 0).
    desc: (1, N, 128), RootSIFT.
    image_size: (1, 2), width and height.
    scales: (1, N), sigma in px.
    oris: (1, N), radians.

    The outputs are:

    matches0: (N,) int64, the index of the match in image 1, or -1 without a match.
    mscores0: (N,) float32, the probability of the match, or 0 without a match.

    Two orientations of a point are two keypoints.
    """

    def __init__(
        self, model: SuperGlue, threshold: float, max_keypoints: int = COLMAP_KEYPOINTS
    ) -> None:
        """Wrap a model in evaluation mode. threshold: minimum probability of a match.

        max_keypoints: maximum number of keypoints of an image. Keypoints with the best nearest
            neighbours are kept, and the others have no match.
        """
        super().__init__()
        self.network = OnnxSuperGlue(model, threshold)
        self.max_keypoints = max_keypoints

    def forward(self, *inputs: Tensor) -> Tuple[Tensor, Tensor]:
        """Compute the outputs from COLMAP_INPUTS."""
        named = dict(zip(COLMAP_INPUTS, inputs))
        views = [{name: named[name + view] for name in COLMAP_OF_IMAGE} for view in "01"]
        # Keep the keypoints that most likely have a match, in the units of the network. A slice
        # [:n] would fix the exported graph to fewer keypoints.
        orders = []
        for rank in rank_by_descriptor(named["desc0"][0], named["desc1"][0]):
            count = torch.sym_min(rank.shape[0], self.max_keypoints)
            orders.append(rank.argsort()[torch.arange(count, device=rank.device)])
        values = [_from_colmap(view, order) for view, order in zip(views, orders)]
        matches, _, scores, _ = self.network(*values[0], *values[1])
        # Back to indices of all keypoints. The index -1, no match, takes the last entry, also -1.
        index1 = torch.cat([orders[1], orders[1].new_full((1,), -1)])[matches[0]]
        found = torch.full_like(named["scales0"][0], -1, dtype=torch.int64)
        return (
            found.index_copy(0, orders[0], index1),
            torch.zeros_like(named["scales0"][0]).index_copy(0, orders[0], scores[0].float()),
        )


def rank_by_descriptor(desc0: Tensor, desc1: Tensor) -> Tuple[Tensor, Tensor]:
    """Rank keypoints with unit descriptors (M, D) and (N, D). A smaller rank is a likelier match.

    Returns (M,) and (N,) float32. The rank is Lowe's ratio of distances. Mutual nearest neighbours
    get the smaller ratio of both directions, so that both are kept or none. All others get 1 more.
    """
    # Two rows of zeros give a second neighbour also in an image of 0 or 1 keypoints.
    cosines = pad(desc0, (0, 0, 0, 2)) @ pad(desc1, (0, 0, 0, 2)).T
    sides = []
    for values in (cosines, cosines.T):
        best = values.topk(2, dim=1)
        # Squared distances of unit vectors: |a - b|^2 = 2 - 2 cos
        nearest, second = (2 - 2 * best.values).clamp(min=0).unbind(1)
        sides.append((best.indices[:, 0], sqrt(nearest / second.clamp(min=1e-6))))
    ranks = []
    for (to, own), (back, other) in (sides, sides[::-1]):
        mutual = back[to] == torch.arange(to.shape[0], device=to.device)
        ranks.append(torch.where(mutual, torch.minimum(own, other[to]), 1 + own)[:-2])
    return ranks[0], ranks[1]


def _from_colmap(view: Dict[str, Tensor], order: Tensor) -> List[Tensor]:
    """Convert the keypoints `order` (n,) of one image to the units of OF_IMAGE, in this order.

    Sizes are divided as by `Features.as_found`, since the network knows images of up to RESIZE px.
    """
    kpts, desc, scales, oris = (
        view[name].index_select(1, order) for name in ("kpts", "desc", "scales", "oris")
    )
    scales = 2 * scales  # OpenCV's size is a diameter
    # The largest reduction that makes no keypoint smaller than SIFT finds
    smallest = torch.cat([scales[0], scales.new_full((1,), torch.inf)]).amin(0)
    unit = torch.minimum(view["image_size"][0].amax(0) / RESIZE, smallest / MIN_SCALE).clamp(
        min=1.0
    )
    scores = torch.full_like(scales, TYPICAL_SCORE)  # COLMAP stores no scores
    descriptors = 512 * desc.square()  # the network takes the root
    places = (kpts + 0.5) / unit - 0.5
    return [
        places, descriptors, scores, scales / unit, torch.rad2deg(oris), view["image_size"] / unit
    ]  # fmt: skip


def inputs_of(features0: Features, features1: Features) -> Dict[str, np.ndarray]:
    """Return the graph's INPUTS by name, for one pair of features from `Matcher.extract`."""
    features0, features1 = (view.as_found(RESIZE) for view in (features0, features1))
    values: Dict[str, np.ndarray] = {}
    pair = choose_pair(Pair(features0.records, features1.records, features0.size, features1.size))
    for view, records, size in zip("01", pair[:2], pair[2:]):
        columns = [records[name] for name in ("descriptor", "score", "scale", "angle")]
        for name, column in zip(OF_IMAGE, (positions(records), *columns, np.array(size))):
            values[name + view] = column.astype(np.float32)[None]
    return values


def export(
    path: FileName,
    model: Optional[FileName] = None,
    threshold: Optional[float] = None,
    form: str = "any",
    max_keypoints: int = COLMAP_KEYPOINTS,
) -> Path:
    """Write a trained model as ONNX, opset 18, in one .onnx file. This takes a minute or more.

    model: a model file. If None, take the shipped weights.
    threshold: minimum probability of a match, which the file's metadata contain. If None, it is
        COLMAP_THRESHOLD for COLMAP, and otherwise the model's own or 0.2.
    form: a key of FORMS.
    max_keypoints: see `ColmapSuperGlue`.

    Raises RequestError if there is no such model, if the file cannot be written or has another
    extension, or if packages are missing.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise RequestError(f"{path}: must end in .onnx")
    check_writable(path)
    onnx = import_extra("onnx", "onnx")
    import_extra("onnxscript", "onnx")  # torch's exporter needs it
    if not can_export():
        reason = "cannot export a network with dynamic shapes: install 2.5 or newer"
        raise RequestError(f"torch {torch.__version__} {reason}")
    network, info = load_model(model or shipped_weights())
    if network.config.descriptor != "sift":
        source = network.config.extractor
        raise RequestError(
            f"only models for SIFT can be exported to ONNX; this one is for {source}"
        )
    if threshold is None:
        threshold = COLMAP_THRESHOLD if form == "colmap" else match_threshold(info)
    module: nn.Module = OnnxSuperGlue(network, threshold)
    if form == "colmap":
        module = ColmapSuperGlue(network, threshold, max_keypoints)
    # Example inputs of five keypoints, of which there may be any number
    counts = {view: torch.export.Dim("keypoints" + view) for view in "01"}
    inputs, outputs = FORMS[form]
    values = []
    shapes: List[Dict[int, Any]] = []
    for name in inputs:
        of_image = name.startswith("image_size")
        values.append(torch.ones((1, *((2,) if of_image else (5, *WIDTHS.get(name[:-1], ()))))))
        shapes.append({} if of_image else {1: counts[name[-1]]})
    # Trace the network, and translate it.
    with torch.no_grad():
        exported = torch.export.export(
            module.eval(), tuple(values), dynamic_shapes=(tuple(shapes),)
        )
    names = {"input_names": inputs, "output_names": outputs}
    written = torch.onnx.export(exported, dynamo=True, **names, opset_version=OPSET, verbose=False)
    assert written is not None
    file = written.model_proto  # a property that returns a new object
    # Older versions of ONNX Runtime read the file with this version.
    file.ir_version = IR_VERSION
    onnx.helper.set_model_props(file, {"match_threshold": repr(threshold)})
    write_atomic(path, file.SerializeToString())
    return path


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command `python -m superglue_sift.onnx`; return the exit code."""
    about = str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m superglue_sift.onnx", description=about)
    parser.add_argument("out", type=Path, help="the file to write (.onnx)")
    parser.add_argument("--model", type=Path, help="model file (default: the shipped weights)")
    parser.add_argument(
        "--threshold",
        type=float,
        help=f"minimum probability (default: the model's own; for colmap {COLMAP_THRESHOLD})",
    )
    parser.add_argument(
        "--for", dest="form", choices=list(FORMS), default="any", help="the program that reads it"
    )
    parser.add_argument(
        "--max-keypoints",
        type=int,
        default=COLMAP_KEYPOINTS,
        help="with --for colmap: of an image, those with the best nearest neighbours in the other"
        " (default %(default)s)",
    )
    args = parser.parse_args(argv)
    check_range("--max-keypoints", args.max_keypoints, 1)
    if args.threshold is not None:
        check_range("--threshold", args.threshold, 0, 1)
    print("translating the network, which takes a minute or more", file=sys.stderr, flush=True)
    path = export(args.out, args.model, args.threshold, args.form, args.max_keypoints)
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    print(f"{path}: {size}, opset {OPSET}; inputs {', '.join(FORMS[args.form][0])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.exit_code(main))
