"""The network as ONNX and by torch.export gives what torch gives, for any numbers of keypoints; and
the file for COLMAP keeps its contract.
"""

import sys

import cv2
import numpy as np
import pytest
import torch
from made_pairs import batch_pairs, make_pair
from made_scenes import write_model
from reading import read_error

from superglue_sift import Matcher, errors, find_mutual_matches, load_model, onnx, torch_compat
from superglue_sift.features.extraction import extract_features
from superglue_sift.features.features import TYPICAL_SCORE
from superglue_sift.interop.convert import to_lightglue
from superglue_sift.network.weights import find_shipped_weights

# Rounding of float32 through all layers; ONNX Runtime has other kernels.
IN_TORCH = 1e-4
IN_ONNX_RUNTIME = 1e-3
SHAPES = [(5, 7), (0, 0), (0, 5), (5, 0), (2, 1), (60, 40), (300, 200)]
DOUBLE = 11  # onnx.TensorProto.DOUBLE
needs_sym_min = pytest.mark.skipif(
    not torch_compat.can_export(), reason="needs torch.export of changing shapes"
)


def make_colmap_inputs(*sides):
    """What COLMAP passes, by name, for SIFT features with one orientation each."""
    features = [to_lightglue(side) for side in sides]
    names = {"kpts": "keypoints", "desc": "descriptors"}
    values = {
        name: features[int(name[-1])][names.get(name[:-1], name[:-1])].numpy()
        for name in onnx.COLMAP_INPUTS
    }
    # OpenCV has a diameter, COLMAP sigma
    return {name: v / 2 if name.startswith("scales") else v for name, v in values.items()}


# Each of the following returns (features of image 0, of image 1) -> outputs of the file.


def by_network(model):
    @torch.no_grad()
    def run(*pair):
        log_P = model(*batch_pairs([pair]))
        matches0, scores0, matches1, scores1 = find_mutual_matches(log_P, 0.1)
        m, n = (len(features.keypoints) for features in pair)
        return matches0[:, :m], matches1[:, :n], scores0[:, :m], scores1[:, :n]

    return run


def by_module(module, make_inputs=onnx.make_inputs):
    @torch.no_grad()
    def run(*sides):
        return module(*map(torch.from_numpy, make_inputs(*sides).values()))

    return run


def by_onnx_runtime(path, make_inputs=onnx.make_inputs):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda *sides: session.run(None, make_inputs(*sides))


def assert_same_outputs(run, run_expected, tolerance):
    """For two views half of whose keypoints correspond, with noise in the descriptors."""
    rng = np.random.default_rng(0)
    for m, n in SHAPES:
        sides = make_pair(rng, m, n)
        shared = min(m, n) // 2
        for name in ("keypoints", "scales", "oris", "scores", "descriptors"):
            getattr(sides[1], name)[:shared] = getattr(sides[0], name)[:shared]
        sides[1].descriptors[:shared, 0] ^= rng.integers(0, 8, (shared, 128), np.uint8)
        sides[1].keypoints[:shared, 0] += 7
        outputs, expected = (list(map(np.asarray, f(*sides))) for f in (run, run_expected))
        assert [array.shape for array in outputs] == [array.shape for array in expected]
        wrong = sum((np.abs(a - b) > tolerance).sum() for a, b in zip(outputs, expected))
        # rounding decides between two neighbors as near as each other
        assert wrong <= 0.002 * (m + n)
    assert (outputs[0] >= 0).sum() > 40


@pytest.mark.parametrize(
    "changes",
    [
        {"neighbours": True, "rotary": True},
        {"scale_angle": False, "norm": "batch", "heads": 2},
        None,  # the shipped weights
    ],
)
def test_the_graph_matches_as_the_network(tmp_path, changes):
    path = find_shipped_weights()
    if changes:
        path = write_model(tmp_path / "m.safetensors", layers=2, **changes)
    model, _ = load_model(path)
    assert_same_outputs(by_module(onnx.OnnxSuperGlue(model, 0.1)), by_network(model), IN_TORCH)


@pytest.mark.slow
def test_the_file_matches_as_torch_does(tmp_path, root):
    """A network of one layer, since the translation of all layers takes minutes."""
    pytest.importorskip("onnxscript")
    path = write_model(tmp_path / "m.safetensors", layers=1, neighbours=True, rotary=True)
    written = onnx.export(tmp_path / "m.onnx", path, threshold=0.1)
    assert str(root).encode() not in written.read_bytes()  # no path of this machine
    model, _ = load_model(path)
    assert_same_outputs(by_onnx_runtime(written), by_network(model), IN_ONNX_RUNTIME)


def extract_pair(views, keypoints, width):
    """SIFT of two views, enlarged or reduced to a width of `width` px."""
    size = (width, width * 2 // 3)
    return [extract_features(cv2.resize(view, size), keypoints) for view in views]


def test_inputs_of_a_large_file_are_in_pixels_of_the_reduced_image(photo, turned):
    """SIFT saw a reduced image, and so did the network in training."""
    first, second = extract_pair((photo, turned), 256, 600)
    sides = first, second.resize((3000, 2000))
    matcher = Matcher.load(device="cpu")
    model, _ = load_model(find_shipped_weights())
    matches, *_ = by_module(onnx.OnnxSuperGlue(model, matcher.threshold))(*sides)
    np.testing.assert_array_equal(matches[0], matcher.match(*sides).to_dense()[0])


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("m.onnx --max-keypoints 100", "max_keypoints"),
        ("m.onnx --threshold 2", "threshold"),
        ("m.onnx", "superglue-sift[onnx]"),
    ],
)
def test_a_wrong_request_is_one_line(tmp_path, monkeypatch, capsys, words, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert errors.run_main(onnx.main, words.split()) == 2
    assert name in read_error(capsys)


# The file for COLMAP


def by_colmaps_file(*sides, most=onnx.COLMAP_KEYPOINTS):
    """Matches and scores of the shipped weights, without a file."""
    module = onnx.ColmapSuperGlue(load_model(find_shipped_weights())[0], 0.2, most)
    return [output.numpy() for output in by_module(module, make_colmap_inputs)(*sides)]


@pytest.fixture(scope="module")
def sides(photo, turned):
    """Two large views, whose keypoints have one orientation and no response."""
    views = []
    for view in extract_pair((photo, turned), 300, 1600):
        one_orientation = {"oris": view.oris[:, :1], "descriptors": view.descriptors[:, :1]}
        scores = np.full_like(view.scores, TYPICAL_SCORE)
        views.append(view._replace(**one_orientation, scores=scores, sift_scale=None))
    return views


@needs_sym_min
@pytest.mark.parametrize("is_large_portrait", [False, True])
def test_colmaps_file_matches_as_the_matcher(sides, is_large_portrait):
    if is_large_portrait:
        sides = [
            side._replace(
                keypoints=4 * side.keypoints[:, ::-1],
                scales=8 * side.scales,
                image_size=(4 * side.image_size[1], 4 * side.image_size[0]),
            )
            for side in sides
        ]
    matches, scores = by_colmaps_file(*sides)
    expected = Matcher.load(device="cpu", threshold=0.2).match(*sides)
    assert len(expected.matches) > 80
    matches0, scores0 = expected.to_dense()
    assert (matches != matches0).sum() <= 2  # rounding decides
    assert np.median(np.abs(scores - scores0)) < 1e-3
    assert (scores[matches < 0] == 0).all()


@needs_sym_min
def test_of_too_many_keypoints_those_with_the_best_neighbors_are_matched(sides):
    matches, _ = by_colmaps_file(*sides, most=100)
    index0 = np.flatnonzero(matches >= 0)
    assert len(index0) > 80, "of 100 keypoints chosen for this pair most must match"
    assert (by_colmaps_file(*sides)[0][index0] == matches[index0]).mean() > 0.95
    swapped, _ = by_colmaps_file(*sides[::-1], most=100)
    assert np.array_equal(swapped[matches[index0]], index0)


def test_the_rank_is_the_ratio_of_distances_and_mutual_neighbors_come_first():
    # unit vectors of the plane by their angles, degrees
    angles = np.radians([[0.0, 90.0, 100.0], [4.0, 50.0, 97.0]])
    units = torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)], 2))
    ranks = onnx.rank_by_descriptor(*units)
    # 0 and 4 are mutual, so are 100 and 97; the nearest of 90 is 97, and that of 50 is 90
    nearest, second = np.sin(np.radians([[4, 7, 3, 40], [86, 40, 50, 50]]) / 2)
    ratio0, ratio90, ratio100, ratio50 = nearest / second
    expected = [[ratio0, 1 + ratio90, ratio100], [ratio0, 1 + ratio50, ratio100]]
    assert np.allclose(np.stack(ranks), expected)


@pytest.mark.slow
def test_the_file_keeps_the_contract_of_colmap(tmp_path):
    pytest.importorskip("onnxscript")
    package = pytest.importorskip("onnx")
    path = write_model(tmp_path / "m.safetensors", layers=1)
    written = onnx.export(tmp_path / "colmap.onnx", path, 0.1, "colmap", max_keypoints=50)
    file = package.load(str(written))
    package.checker.check_model(file)
    assert file.ir_version == 8 and file.opset_import[0].version == 18
    graph = file.graph
    # pull request 4098 of COLMAP
    names = "kpts0 kpts1 desc0 desc1 image_size0 image_size1 scales0 scales1 oris0 oris1"
    assert [value.name for value in graph.input] == names.split()
    ranks = [len(value.type.tensor_type.shape.dim) for value in graph.input]
    assert ranks == [3, 3, 3, 3, 2, 2, 2, 2, 2, 2]
    types = {value.name: value.type.tensor_type.elem_type for value in graph.output}
    assert types == {"matches0": package.TensorProto.INT64, "mscores0": package.TensorProto.FLOAT}
    assert_fast_everywhere(graph)
    # fewer and more keypoints than the file matches
    module = onnx.ColmapSuperGlue(load_model(path)[0], 0.1, 50)
    run = by_onnx_runtime(written, make_colmap_inputs)
    assert_same_outputs(run, by_module(module, make_colmap_inputs), IN_ONNX_RUNTIME)


def assert_fast_everywhere(graph):
    """No test for nan of all attention weights, which takes half of the time; no product with a
    transposed float64 matrix, which ONNX Runtime before 1.23 cannot compute.
    """
    assert not any(node.op_type == "IsNaN" for node in graph.node)
    types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    wide = [node for node in products if types[node.output[0]] == DOUBLE]
    assert len(wide) > 10
    assert not any(made_by.get(name) == "Transpose" for node in wide for name in node.input)
