"""Export the network to ONNX, from keypoints and descriptors to matches.

    python -m superglue_sift.onnx superglue.onnx --model models/superglue.safetensors

Inputs have the names of SuperGlue and LightGlue, with suffix 0 for the first image and 1 for the
second:

    keypoints0 (B, M, 2) float32, pixels       descriptors0 (B, M, 128) float32, SIFT's from 0 to
                                               255
    scores0, scales0, angles0 (B, M) float32   mask0 (B, M) bool, true for keypoints
    image_size0 (B, 2) float32, width, height

The outputs matches0 (B, M) and matches1 (B, N) int64 are -1 without a match. They have the scores
matching_scores0 and matching_scores1 float32. The output matches (K, 3) int64 lists the batch, the
index in image 0 and the index in image 1 of each match, with its score in mscores (K,) float32.

The graph is that of the trained network itself. The export needs `pip install
'superglue-sift[onnx]'` and torch 2.5 or newer.

    python -m superglue_sift.onnx --for colmap superglue-colmap.onnx

This command writes the file that COLMAP 4 takes in place of its own network (`ColmapSuperGlue`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn

from superglue_sift import errors
from superglue_sift.errors import RequestError, check_range, import_extra
from superglue_sift.features.features import Features
from superglue_sift.features.sift import MIN_SCALE, positions
from superglue_sift.files import FileName, check_writable, write_atomic
from superglue_sift.matcher import RESIZE
from superglue_sift.network.batch import Images, Keypoints, Pair, choose_pair
from superglue_sift.network.sinkhorn import log_optimal_transport
from superglue_sift.network.superglue import SIFT_DIM, TYPICAL_SCORE, SuperGlue, mutual_matches
from superglue_sift.network.weights import load_model, match_threshold, shipped_weights
from superglue_sift.torch_compat import can_export, sqrt

OPSET = 18  # the lowest opset that torch's exporter writes without conversion
IR_VERSION = 8  # the exporter's own version, 10, would need ONNX Runtime 1.18 or newer
OF_IMAGE = ("keypoints", "descriptors", "scores", "scales", "angles", "image_size", "mask")
INPUTS = tuple(f"{name}{view}" for view in "01" for name in OF_IMAGE)
# Inputs that have several columns for each keypoint. Other inputs have one number.
WIDTHS = {"keypoints": (2,), "kpts": (2,), "descriptors": (SIFT_DIM,), "desc": (SIFT_DIM,)}
OUTPUTS = ("matches0", "matches1", "matching_scores0", "matching_scores1", "matches", "mscores")
COLMAP_OF_IMAGE = ("kpts", "desc", "image_size", "scales", "oris")
COLMAP_INPUTS = tuple(f"{name}{view}" for name in COLMAP_OF_IMAGE for view in "01")
COLMAP_OUTPUTS = ("matches0", "mscores0")
# COLMAP may find 8,192 keypoints. The file matches at most this number in an image, since time and
# memory grow with its square. With 2,048 keypoints, a pair takes 3 s of one core and 0.7 GB.
COLMAP_KEYPOINTS = 2048
# With a threshold between 0.6 and 0.8, COLMAP's cameras of Strecha's scenes are most exact. Below
# 0.8, one pair is false.
COLMAP_THRESHOLD = 0.7


class PaddedSuperGlue(nn.Module):
    """Wrap the trained network for `torch.export`: from INPUTS to OUTPUTS, on CPU or CUDA.

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
        views = [_with_padding({name: named[name + view] for name in OF_IMAGE}) for view in "01"]
        images = Images([view["mask"] for view in views], padded=[True, True], empty=[True, True])
        names = Keypoints._fields[:-1]
        columns = {name: images.join([view[name] for view in views]) for name in names}
        descriptors = self.model.describe(Keypoints(**columns, images=images))
        ((scores, mask0, mask1),) = self.model.scores(descriptors, images)
        # The transport is in float64, whose range is sufficient for trained scores, since a graph
        # cannot fall back to the log domain.
        iterations = self.model.config.sinkhorn_iterations
        log_P, _ = log_optimal_transport(
            scores.double(), mask0, mask1, self.model.dustbin, iterations, wait=False
        )
        found = mutual_matches(log_P, self.threshold)
        # Drop the row of padding that `_with_padding` added.
        matches0, scores0, matches1, scores1 = (values[:, :-1] for values in found)
        # (B, M) with -1 -> (K, 3) rows of the matches
        batch, index0 = torch.where(matches0 >= 0)
        rows = torch.stack([batch, index0, matches0[batch, index0]], 1)
        return matches0, matches1, scores0, scores1, rows, scores0[batch, index0]


class ColmapSuperGlue(nn.Module):
    """The network for two images of COLMAP's SIFT, with the inputs of COLMAP's own LightGlue.

    COLMAP checks the names, their order and their ranks. COLMAP_INPUTS are float32, for each image:

    kpts: (1, N, 2) px. The centre of the first pixel is (0, 0).
    desc: (1, N, 128), RootSIFT.
    image_size: (1, 2), width and height.
    scales: (1, N), sigma in px.
    oris: (1, N), radians.

    COLMAP_OUTPUTS are matches0 (N,) int64, the index in image 1 or -1; and mscores0 (N,) float32,
    the probability of the match, or 0 without one. Two orientations of a point are two keypoints.
    """

    def __init__(
        self, model: SuperGlue, threshold: float, max_keypoints: int = COLMAP_KEYPOINTS
    ) -> None:
        """Wrap a model in evaluation mode. threshold: minimum probability of a match.

        max_keypoints: maximum number of keypoints of an image. Keypoints with the best nearest
            neighbours are kept, and the others have no match.
        """
        super().__init__()
        self.network = PaddedSuperGlue(model, threshold)
        self.max_keypoints = max_keypoints

    def forward(self, *inputs: Tensor) -> Tuple[Tensor, Tensor]:
        """Compute COLMAP_OUTPUTS from COLMAP_INPUTS."""
        named = dict(zip(COLMAP_INPUTS, inputs))
        views = [{name: named[name + view] for name in COLMAP_OF_IMAGE} for view in "01"]
        # Keep the keypoints that most likely have a match, in the units of the network.
        ranks = rank_by_descriptor(named["desc0"][0], named["desc1"][0])
        orders = [_first(rank, self.max_keypoints) for rank in ranks]
        values = [_from_colmap(view, order) for view, order in zip(views, orders)]
        matches, _, scores, *_ = self.network(*(view[name] for view in values for name in OF_IMAGE))
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
    padded = [torch.cat([desc, desc.new_zeros((2, desc.shape[1]))]) for desc in (desc0, desc1)]
    cosines = padded[0] @ padded[1].T
    nearest = [cosines.topk(2, dim=1), cosines.topk(2, dim=0)]
    ratios = []
    for values in (nearest[0].values.T, nearest[1].values):
        # Squared distances of unit vectors: |a - b|^2 = 2 - 2 cos
        distances = (2 - 2 * values).clamp(min=0)
        ratios.append(sqrt(distances[0] / distances[1].clamp(min=1e-6)))
    to1 = nearest[0].indices[:, 0]
    to0 = nearest[1].indices[0]
    ranks = []
    for own, other, to, back in ((*ratios, to1, to0), (*ratios[::-1], to0, to1)):
        mutual = back[to] == torch.arange(to.shape[0], device=to.device)
        ranks.append(torch.where(mutual, torch.minimum(own, other[to]), 1 + own)[:-2])
    return ranks[0], ranks[1]


def _first(rank: Tensor, most: int) -> Tensor:
    """Return the indices (n,) of the `most` smallest of rank (N,), or of all if there are fewer."""
    # A slice [:n] would fix the exported graph to fewer keypoints.
    count = torch.sym_min(rank.shape[0], most)
    return rank.argsort()[torch.arange(count, device=rank.device)]


def _from_colmap(view: Dict[str, Tensor], order: Tensor) -> Dict[str, Tensor]:
    """Convert the keypoints `order` (n,) of one image to the names and units of OF_IMAGE.

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
    return {
        "keypoints": (kpts + 0.5) / unit - 0.5,
        "descriptors": 512 * desc.square(),  # the network takes the root
        "scores": torch.full_like(scales, TYPICAL_SCORE),  # COLMAP stores no scores
        "scales": scales / unit,
        "angles": torch.rad2deg(oris),
        "image_size": view["image_size"] / unit,
        "mask": torch.ones_like(scales, dtype=torch.bool),
    }


def _with_padding(values: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """Rename the inputs of one image for `Keypoints`, and add a masked row.

    A maximum needs at least one row.
    """
    padded = {
        name: torch.cat([t, t.new_zeros((t.shape[0], 1, *t.shape[2:]))], 1)
        for name, t in values.items()
        if name != "image_size"
    }
    size = values["image_size"].unsqueeze(1).expand(-1, padded["mask"].shape[1], -1)
    return {**padded, "positions": padded["keypoints"], "image_size": size}


# The names of inputs and outputs of a file, for each program that reads it
FORMS = {"any": (INPUTS, OUTPUTS), "colmap": (COLMAP_INPUTS, COLMAP_OUTPUTS)}


def inputs_of(features0: Features, features1: Features) -> Dict[str, np.ndarray]:
    """Return the graph's INPUTS by name, for one pair of features from `Matcher.extract`."""
    features0, features1 = (view.as_found(RESIZE) for view in (features0, features1))
    values: Dict[str, np.ndarray] = {}
    pair = choose_pair(Pair(features0.records, features1.records, features0.size, features1.size))
    for view, records, size in zip("01", pair[:2], pair[2:]):
        columns = {name + "s": records[name] for name in ("descriptor", "score", "scale", "angle")}
        columns.update(keypoints=positions(records), image_size=np.array(size))
        values.update(
            {name + view: value.astype(np.float32)[None] for name, value in columns.items()}
        )
        values["mask" + view] = np.ones((1, len(records)), bool)
    return values


def program(model: SuperGlue, threshold: float, form: str, max_keypoints: int) -> Any:
    """Create a `torch.export.ExportedProgram` for any numbers of keypoints.

    With the form "any", it also takes any batch size. form, max_keypoints: see `export`. Raises
    RequestError for torch before 2.5, and for a model that is not for SIFT.
    """
    if not can_export():
        reason = "cannot export a network with dynamic shapes: install 2.5 or newer"
        raise RequestError(f"torch {torch.__version__} {reason}")
    if model.config.descriptor != "sift":
        raise RequestError(
            "only models for SIFT can be exported to ONNX; this one is for"
            f" {model.config.extractor}"
        )
    # The axes of keypoints, and of the batch, may have any length.
    dim = torch.export.Dim
    counts = {"0": dim("keypoints0"), "1": dim("keypoints1")}
    if form == "colmap":
        module: nn.Module = ColmapSuperGlue(model, threshold, max_keypoints)
        pairs = 1
        axes = {}
    else:
        module = PaddedSuperGlue(model, threshold)
        pairs = 2
        axes = {0: dim("batch")}
    # Example inputs, and their dynamic axes
    values = []
    shapes = []
    for name in FORMS[form][0]:
        kind = name[:-1]
        of_image = kind == "image_size"
        shape = (2,) if of_image else (5, *WIDTHS.get(kind, ()))
        dtype = torch.bool if kind == "mask" else torch.float32
        values.append(torch.ones((pairs, *shape), dtype=dtype))
        shapes.append(axes if of_image else {**axes, 1: counts[name[-1]]})
    with torch.no_grad():
        return torch.export.export(module.eval(), tuple(values), dynamic_shapes=(tuple(shapes),))


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
    network, info = load_model(model or shipped_weights())
    if threshold is None:
        threshold = COLMAP_THRESHOLD if form == "colmap" else match_threshold(info)
    # Trace the network, and translate it.
    names = dict(zip(("input_names", "output_names"), FORMS[form]))
    exported = program(network, threshold, form, max_keypoints)
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
        help="minimum probability of a match (default: the model's own; for colmap"
        f" {COLMAP_THRESHOLD})",
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
