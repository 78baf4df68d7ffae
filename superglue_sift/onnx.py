"""Export the network to ONNX, from keypoints and descriptors to matches.

    python -m superglue_sift.onnx superglue.onnx --model models/superglue.safetensors

Inputs have the names of SuperGlue and LightGlue, with suffix 0 for the first image and 1 for the
second:

    keypoints0 (1, M, 2) float32, pixels       descriptors0 (1, M, 128) float32, SIFT's from 0 to
                                               255
    scores0, scales0, oris0 (1, M) float32     image_size0 (1, 2) float32, width, height

The outputs matches0 (1, M) and matches1 (1, N) int64 are -1 without a match. They have the scores
matching_scores0 and matching_scores1 float32.

The graph is that of the trained network itself. The export needs `pip install
'superglue-sift[onnx]'` and torch 2.5 or newer.

    python -m superglue_sift.onnx --for colmap superglue-colmap.onnx

This command writes the file that COLMAP 4 takes in place of its own network (`ColmapSuperGlue`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from superglue_sift import errors
from superglue_sift.errors import RequestError, check_range, import_extra
from superglue_sift.features.features import SIFT_DIM, TYPICAL_SCORE, Features
from superglue_sift.features.sift import MIN_SCALE, estimate_sift_scale
from superglue_sift.files import FileName, check_writable, write_atomically
from superglue_sift.matcher import RESIZE
from superglue_sift.network.batch import Images, choose_orientations, make_batch
from superglue_sift.network.perceptron import FLOAT32
from superglue_sift.network.superglue import SuperGlue, find_mutual_matches, find_nearest_neighbors
from superglue_sift.network.weights import find_shipped_weights, load_model, read_match_threshold
from superglue_sift.torch_compat import can_export

OPSET = 18  # the lowest opset that torch's exporter writes without conversion
IR_VERSION = 8  # the exporter's own version, 10, would need ONNX Runtime 1.18 or newer
INPUTS = tuple(
    f"{name}{view}"
    for view in "01"
    for name in ("keypoints", "descriptors", "scores", "scales", "oris", "image_size")
)
OUTPUTS = ("matches0", "matches1", "matching_scores0", "matching_scores1")
COLMAP_INPUTS = tuple(
    f"{name}{view}" for name in ("kpts", "desc", "image_size", "scales", "oris") for view in "01"
)
# Maximum number of keypoints of an image in the graph for COLMAP. COLMAP may find 8,192, but time
# and memory grow with the square.
COLMAP_KEYPOINTS = 2048
# With a threshold between 0.6 and 0.8, COLMAP's cameras of Strecha's scenes are most exact. Below
# 0.8, one pair is false.
COLMAP_THRESHOLD = 0.7
# Shapes of example inputs with five keypoints. All other inputs have the shape (5,).
EXAMPLE_SHAPES = {
    "keypoints": (5, 2),
    "kpts": (5, 2),
    "descriptors": (5, SIFT_DIM),
    "desc": (5, SIFT_DIM),
    "image_size": (2,),
}
# The names of the inputs and outputs of a file, by the program that reads it
FORMS = {"any": (INPUTS, OUTPUTS), "colmap": (COLMAP_INPUTS, ("matches0", "mscores0"))}


class OnnxSuperGlue(nn.Module):
    """Wrap the trained network for `torch.export`: from INPUTS to OUTPUTS, for one pair.

    It has no gradients.
    """

    def __init__(self, model: SuperGlue, threshold: float) -> None:
        """Wrap a network.

        Args:
            model: the network in evaluation mode.
            threshold: minimum probability of a match.
        """
        super().__init__()
        self.model = model
        self.threshold = threshold

    def forward(self, *inputs: Tensor) -> Tuple[Tensor, ...]:
        """Compute OUTPUTS from INPUTS, whose shapes the docstring of the module says."""
        masks = []
        views = []
        for keypoints, descriptors, scores, scales, oris, size in (inputs[:6], inputs[6:]):
            masks.append(pad(torch.ones_like(scores, dtype=torch.bool), (0, 1)))
            # Add one keypoint of padding, (1, M + 1, ...), since a maximum needs at least one.
            scales, oris, scores = (pad(values, (0, 1)) for values in (scales, oris, scores))
            keypoints, descriptors = (pad(t, (0, 0, 0, 1)) for t in (keypoints, descriptors))
            size = size.unsqueeze(1).expand(-1, keypoints.shape[1], -1)
            one_orientation = oris.unsqueeze(2), scores, descriptors.unsqueeze(2)
            views.append((keypoints, scales, *one_orientation, size))
        images = Images(masks, padded=[True, True])
        # (1, M + 1, ...) and (1, N + 1, ...) -> (T, ...)
        tensors: List[Any] = [images.join_images(parts) for parts in zip(*views)]
        joined = Features(*tensors)
        descriptors = self.model.compute_descriptors(joined, images)
        # A graph cannot compute pairs that overflow again in the log domain. So the transport is in
        # float64, whose range is sufficient for trained scores.
        (log_P,), _ = self.model.transport(descriptors, images, False, torch.float64)
        matches0, scores0, matches1, scores1 = find_mutual_matches(log_P, self.threshold)
        return tuple(values[:, :-1] for values in (matches0, matches1, scores0, scores1))


class ColmapSuperGlue(OnnxSuperGlue):
    """Match two images of COLMAP's SIFT, with the inputs of COLMAP's own LightGlue.

    COLMAP checks the names, their order and their ranks. COLMAP_INPUTS are float32, for each image:

    kpts: (1, N, 2) px. The center of the first pixel is (0, 0).
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
        """Wrap a network.

        Args:
            model: the network in evaluation mode.
            threshold: minimum probability of a match.
            max_keypoints: maximum number of keypoints of an image. Keypoints with the best nearest
                neighbors are kept, and the others have no match.
        """
        super().__init__(model, threshold)
        self.max_keypoints = max_keypoints

    def forward(self, *inputs: Tensor) -> Tuple[Tensor, Tensor]:
        """Compute the outputs from COLMAP_INPUTS."""
        view0 = inputs[::2]  # kpts, desc, image_size, scales and oris of image 0
        view1 = inputs[1::2]
        # Keep the keypoints that most likely have a match. A slice [:n] would limit the exported
        # graph to fewer keypoints.
        ranks = rank_by_descriptor(view0[1][0], view1[1][0])
        counts = (torch.sym_min(rank.shape[0], self.max_keypoints) for rank in ranks)
        order0, order1 = (
            rank.argsort()[torch.arange(count, device=rank.device)]
            for rank, count in zip(ranks, counts)
        )
        values = *_convert_from_colmap(order0, *view0), *_convert_from_colmap(order1, *view1)
        matches, _, scores, _ = super().forward(*values)
        # Convert to indices of all keypoints. A keypoint without a match has -1, which takes the
        # last entry, -1.
        index1 = torch.cat([order1, order1.new_full((1,), -1)])[matches[0]]
        zeros = torch.zeros_like(view0[3][0])
        return (
            torch.full_like(zeros, -1, dtype=torch.int64).index_copy(0, order0, index1),
            zeros.index_copy(0, order0, scores[0].float()),
        )


def rank_by_descriptor(desc0: Tensor, desc1: Tensor) -> Tuple[Tensor, Tensor]:
    """Rank keypoints by their nearest neighbors. A match is likelier for a smaller rank.

    Args:
        desc0: unit descriptors of image 0, (M, D).
        desc1: unit descriptors of image 1, (N, D).

    Returns:
        (M,) and (N,) float32. The rank is Lowe's ratio of distances. Mutual nearest neighbors get
        the smaller ratio of both directions, so that both are kept or none. All others get 1 more.
    """
    # A row of zeros is the nearest neighbor if the other image has no keypoints.
    cosines = pad(desc0, (0, 0, 0, 1)) @ pad(desc1, (0, 0, 0, 1)).T
    neighbors0, neighbors1 = find_nearest_neighbors(cosines[None])
    nearest0, _, ratio0, mutual0 = neighbors0
    nearest1, _, ratio1, mutual1 = neighbors1
    rank0 = torch.where(mutual0, torch.minimum(ratio0, ratio1.gather(1, nearest0)), 1 + ratio0)
    rank1 = torch.where(mutual1, torch.minimum(ratio1, ratio0.gather(1, nearest1)), 1 + ratio1)
    return rank0[0, :-1], rank1[0, :-1]


def _convert_from_colmap(
    order: Tensor, kpts: Tensor, desc: Tensor, size: Tensor, scales: Tensor, oris: Tensor
) -> Tuple[Tensor, ...]:
    """Select keypoints of one image by their indices `order` (n,), and convert them to INPUTS.

    Scales are divided as by `estimate_sift_scale`, since the network was trained with images of up
    to RESIZE px.
    """
    kpts, desc, scales, oris = (t.index_select(1, order) for t in (kpts, desc, scales, oris))
    scales = 2 * scales  # OpenCV's size is a diameter.
    # Use the largest reduction with which no keypoint is smaller than those that SIFT detects.
    smallest = torch.cat([scales[0], scales.new_full((1,), torch.inf)]).amin(0)
    unit = torch.minimum(size[0].amax(0) / RESIZE, smallest / MIN_SCALE).clamp(min=1.0)
    scores = torch.full_like(scales, TYPICAL_SCORE)  # COLMAP stores no scores.
    descriptors = 512 * desc.square()  # The network takes the root.
    return kpts, descriptors, scores, scales / unit, torch.rad2deg(oris), size


def make_inputs(features0: Features, features1: Features) -> Dict[str, np.ndarray]:
    """Make the arrays that ONNX Runtime takes for a pair of images.

    Args:
        features0: SIFT features of image 0, from `Matcher.extract`.
        features1: SIFT features of image 1.

    Returns:
        The arrays by the names of INPUTS, float32.
    """
    images = [
        make_batch([features._replace(sift_scale=estimate_sift_scale(features, RESIZE))])
        for features in (features0, features1)
    ]
    arrays: Dict[str, np.ndarray] = {}
    for view, features, batch in zip("01", (features0, features1), choose_orientations(*images)):
        count = len(features.keypoints)
        values = batch._replace(oris=batch.oris[:, :, 0], descriptors=batch.descriptors[:, :, 0])
        for name in ("keypoints", "descriptors", "scores", "scales", "oris"):
            arrays[name + view] = getattr(values, name)[:, :count].float().numpy()
        arrays["image_size" + view] = batch.image_size.numpy()
    return arrays


def export(
    path: FileName,
    model: Optional[FileName] = None,
    threshold: Optional[float] = None,
    form: str = "any",
    max_keypoints: Optional[int] = None,
) -> Path:
    """Write a trained model as ONNX, opset 18, in one .onnx file. This takes a minute or more.

    Args:
        path: the file.
        model: a model file. If None, it is that of the shipped weights.
        threshold: minimum probability of a match, which the file's metadata contain. If None, it is
            COLMAP_THRESHOLD for COLMAP, and otherwise the model's own or 0.2.
        form: a key of FORMS.
        max_keypoints: for COLMAP, see `ColmapSuperGlue`. If None, it is COLMAP_KEYPOINTS.

    Raises:
        RequestError: If an argument is wrong, if there is no such model, if packages are missing,
            or if the file cannot be written.
    """
    path = Path(path)
    if max_keypoints is not None:
        check_range("max_keypoints", max_keypoints, 1)
        if form != "colmap":
            raise RequestError("max_keypoints: only with form='colmap' (--for colmap)")
    if threshold is not None:
        check_range("threshold", threshold, 0, 1)
    check_writable(path)
    onnx = import_extra("onnx", "onnx")
    import_extra("onnxscript", "onnx")  # torch's exporter needs it.
    if not can_export():
        reason = "cannot export a network with dynamic shapes: install 2.5 or newer"
        raise RequestError(f"torch {torch.__version__} {reason}")
    network, info = load_model(model or find_shipped_weights())
    if network.config.descriptor != "sift":
        source = network.config.extractor
        raise RequestError(f"only models for SIFT can be exported; this one is for {source}")
    if threshold is None:
        threshold = COLMAP_THRESHOLD if form == "colmap" else read_match_threshold(info)
    module = OnnxSuperGlue(network, threshold)
    if form == "colmap":
        module = ColmapSuperGlue(network, threshold, max_keypoints or COLMAP_KEYPOINTS)
    inputs, outputs = FORMS[form]
    # The graph takes any numbers of keypoints, but the trace needs examples.
    counts = {view: torch.export.Dim("keypoints" + view) for view in "01"}
    values = [torch.ones((1, *EXAMPLE_SHAPES.get(name[:-1], (5,))), **FLOAT32) for name in inputs]
    shapes = [{} if "size" in name else {1: counts[name[-1]]} for name in inputs]
    with torch.no_grad():
        exported = torch.export.export(
            module.eval(), tuple(values), dynamic_shapes=(tuple(shapes),)
        )
    program = torch.onnx.export(
        exported,
        dynamo=True,
        input_names=inputs,
        output_names=outputs,
        opset_version=OPSET,
        verbose=False,
    )
    assert program is not None
    proto = program.model_proto  # Each access returns a new object.
    # Older ONNX Runtimes reject IR version 10.
    proto.ir_version = IR_VERSION
    # Stack traces and names of Python take an eighth of the file, and have paths of this machine.
    for node in proto.graph.node:
        node.ClearField("metadata_props")
    onnx.helper.set_model_props(proto, {"match_threshold": repr(threshold)})
    write_atomically(path, proto.SerializeToString())
    return path


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command `python -m superglue_sift.onnx`; return the exit code."""
    parser = errors.make_parser("superglue_sift.onnx", __doc__)
    add = parser.add_argument
    add("out", type=Path, help="the file to write (.onnx)")
    add("--model", type=Path, help="model file (default: the shipped weights)")
    add(
        "--threshold",
        type=float,
        help=f"minimum probability (default: the model's own; for colmap {COLMAP_THRESHOLD})",
    )
    add("--for", dest="form", choices=list(FORMS), default="any", help="the program that reads it")
    add(
        "--max-keypoints",
        type=int,
        help="with --for colmap: of an image, those with the best nearest neighbors in the other"
        f" (default {COLMAP_KEYPOINTS})",
    )
    args = parser.parse_args(argv)
    print("translating the network, which takes a minute or more", file=sys.stderr, flush=True)
    path = export(args.out, args.model, args.threshold, args.form, args.max_keypoints)
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    print(f"{path}: {size}, opset {OPSET}; inputs {', '.join(FORMS[args.form][0])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run_main(main))
