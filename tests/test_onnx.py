"""The network as ONNX and by torch.export gives what torch gives, for any numbers of keypoints; and
the file for COLMAP keeps its contract.
"""

import sys

import cv2
import numpy as np
import pytest
import torch
from made_colmap import colmap_inputs_of
from made_pairs import pair, records
from made_scenes import TURN, write_model

from superglue_sift import (
    Features,
    Matcher,
    Pair,
    RequestError,
    from_pairs,
    load_model,
    mutual_matches,
    onnx,
    torch_compat,
)
from superglue_sift.features.features import extract
from superglue_sift.features.sift import KEYPOINT
from superglue_sift.network.superglue import TYPICAL_SCORE
from superglue_sift.network.weights import shipped_weights

# Rounding of float32 through all layers; ONNX Runtime has other kernels.
IN_TORCH = 1e-4
IN_ONNX_RUNTIME = 1e-3
SHAPES = [(5, 7), (0, 0), (0, 5), (5, 0), (2, 1), (60, 40)]
DOUBLE = 11  # onnx.TensorProto.DOUBLE
needs_sym_min = pytest.mark.skipif(
    not torch_compat.can_export(), reason="needs torch.export of changing shapes"
)


def made_sides(m, n, rng):
    """Features of two views half of whose keypoints correspond, with noise in the descriptors."""
    made = pair(rng, m, n)
    shared = min(m, n) // 2
    side1 = made.records1
    side1[:shared] = made.records0[:shared]
    noise = rng.integers(-9, 10, (shared, 128))
    side1["descriptor"][:shared] = np.clip(side1["descriptor"][:shared] + noise, 0, 255)
    side1["x"][:shared] += 7
    return Features(made.records0, made.size0), Features(side1, made.size1)


def disagreements(model, run, sides, threshold, tolerance):
    """How many of the keypoints get another answer than from torch, and how many matches there are.

    tolerance: of the scores.
    """
    one, other = (side.as_found(onnx.RESIZE) for side in sides)
    batch = from_pairs([Pair(one.records, other.records, one.size, other.size)])
    with torch.no_grad():
        matches0, scores0, matches1, scores1 = mutual_matches(model(batch), threshold)
    found = run(onnx.inputs_of(*sides).values())
    wrong = 0
    counts = [len(side.records) for side in sides]
    expected = (matches0, matches1), (scores0, scores1)
    for count, matches, scores, *exact in zip(counts, found[:2], found[2:], *expected):
        assert matches.shape == scores.shape == (1, count)
        far = np.abs(scores - exact[1][:, :count].numpy()) > tolerance
        wrong += (far | (matches != exact[0][:, :count].numpy())).sum()
    return wrong, (found[0] >= 0).sum()


def session(path):
    """(inputs in their order) -> outputs, by ONNX Runtime on one thread."""
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    made = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in made.get_inputs()]
    return lambda values: made.run(None, dict(zip(names, values)))


def in_torch(module):
    """The same, by a module."""

    @torch.no_grad()
    def run(values):
        return [found.numpy() for found in module(*map(torch.from_numpy, values))]

    return run


def needs_onnx():
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"needs {name}")
    if not torch_compat.can_export():
        pytest.skip(f"torch {torch.__version__} has no torch.export of changing shapes")


@pytest.mark.parametrize(
    "changes",
    [
        {"neighbours": True, "rotary": True},
        {"scale_angle": False, "norm": "batch", "heads": 2},
        None,  # the shipped weights
    ],
)
def test_the_graph_matches_as_the_network(tmp_path, changes):
    path = shipped_weights()
    if changes:
        path = write_model(tmp_path / "m.safetensors", layers=2, **changes)
    model = load_model(path)[0]
    run = in_torch(onnx.OnnxSuperGlue(model, 0.1))
    rng = np.random.default_rng(0)
    for m, n in SHAPES:
        wrong, matches = disagreements(model, run, made_sides(m, n, rng), 0.1, IN_TORCH)
        assert wrong == 0
    assert matches > 10


@pytest.mark.slow
def test_the_file_matches_as_torch_does(tmp_path):
    """A network of one layer, since the translation of all layers takes minutes."""
    needs_onnx()
    path = write_model(tmp_path / "m.safetensors", layers=1, neighbours=True, rotary=True)
    run = session(onnx.export(tmp_path / "m.onnx", path, threshold=0.1))
    model = load_model(path)[0]
    rng = np.random.default_rng(1)
    for m, n in (*SHAPES, (300, 200)):
        sides = made_sides(m, n, rng)
        wrong, matches = disagreements(model, run, sides, 0.1, IN_ONNX_RUNTIME)
        # rounding decides between two neighbours as near as each other
        assert wrong <= 0.002 * (m + n)
    assert matches > 50


def test_inputs_of_a_large_file_are_in_pixels_of_the_reduced_image(photo):
    """SIFT saw a reduced image, and so did the network in training."""
    sides = [extract(view, 256) for view in (photo, cv2.warpPerspective(photo, TURN, (600, 400)))]
    sides[1] = sides[1].resize((3000, 2000))
    matcher = Matcher.load(device="cpu")
    module = onnx.OnnxSuperGlue(load_model(shipped_weights())[0], matcher.threshold)
    found = in_torch(module)(onnx.inputs_of(*sides).values())[0][0]
    np.testing.assert_array_equal(found, matcher.match(*sides).dense()[0])


def test_a_wrong_request_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(RequestError, match=r"must end in \.onnx"):
        onnx.export(tmp_path / "m.pt")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(RequestError, match=r"pip install 'superglue-sift\[onnx\]'"):
        onnx.export(tmp_path / "m.onnx")


# The file for COLMAP


@pytest.fixture(scope="module")
def network():
    return onnx.ColmapSuperGlue(load_model(shipped_weights())[0], 0.2)


@pytest.fixture(scope="module")
def sides(photo):
    """A photograph and a view of it, 2,400 px wide: SIFT's keypoints without a response."""
    found = []
    for view in (photo, cv2.warpPerspective(photo, TURN, (600, 400))):
        large = cv2.resize(view, None, fx=4, fy=4, interpolation=cv2.INTER_CUBIC)
        side = extract(large, 300)
        one = np.zeros(len(side.records), KEYPOINT)
        for name in KEYPOINT.names or ():
            one[name] = side.records[name]
        one["score"] = TYPICAL_SCORE
        found.append(Features(one, side.size))
    return found


@needs_sym_min
def test_colmaps_file_matches_as_the_matcher(network, sides):
    matches, scores = in_torch(network)(colmap_inputs_of(*sides).values())
    expected = Matcher.load(device="cpu", threshold=0.2).match(*sides)
    assert len(expected.matches) > 80
    matches0, scores0 = expected.dense()
    assert (matches != matches0).sum() <= 2  # rounding decides
    assert np.median(np.abs(scores - scores0)) < 1e-3
    assert (scores[matches < 0] == 0).all()


@needs_sym_min
def test_of_too_many_keypoints_those_with_the_best_neighbours_are_matched(network, sides):
    few = in_torch(onnx.ColmapSuperGlue(network.network.model, 0.2, 100))
    matches, _ = few(colmap_inputs_of(*sides).values())
    index0 = np.flatnonzero(matches >= 0)
    index1 = matches[index0]
    assert len(index0) > 80, "of 100 keypoints chosen for this pair most must match"
    all_matches, _ = in_torch(network)(colmap_inputs_of(*sides).values())
    assert (all_matches[index0] == index1).mean() > 0.95
    back, _ = few(colmap_inputs_of(*sides[::-1]).values())
    assert np.array_equal(back[index1], index0)


def test_the_rank_is_the_ratio_of_distances_and_mutual_neighbours_come_first():
    # unit vectors of the plane by their angles, degrees
    angles = np.radians([[0.0, 90.0, 100.0], [4.0, 50.0, 97.0]])
    rank0, rank1 = onnx.rank_by_descriptor(
        *torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)], 2))
    )

    def ratio(near, far):
        return float(np.sin(np.radians(near / 2)) / np.sin(np.radians(far / 2)))

    # 0 and 4 are mutual, so are 100 and 97; the nearest of 90 is 97, and that of 50 is 90
    assert np.allclose(rank0, [ratio(4, 86), 1 + ratio(7, 40), ratio(3, 50)])
    assert np.allclose(rank1, [ratio(4, 86), 1 + ratio(40, 50), ratio(3, 50)])


@pytest.mark.slow
def test_the_file_keeps_the_contract_of_colmap(tmp_path):
    needs_onnx()
    import onnx as onnx_package

    path = write_model(tmp_path / "m.safetensors", layers=1)
    written = onnx.export(tmp_path / "colmap.onnx", path, 0.1, "colmap", max_keypoints=50)
    file = onnx_package.load(str(written))
    onnx_package.checker.check_model(file)
    graph = file.graph
    assert file.ir_version == 8 and file.opset_import[0].version == 18
    # pull request 4098 of COLMAP
    names = "kpts0 kpts1 desc0 desc1 image_size0 image_size1 scales0 scales1 oris0 oris1"
    assert [each.name for each in graph.input] == names.split()
    ranks = [len(each.type.tensor_type.shape.dim) for each in graph.input]
    assert ranks == [3, 3, 3, 3, 2, 2, 2, 2, 2, 2]
    types = {each.name: each.type.tensor_type.elem_type for each in graph.output}
    kinds = onnx_package.TensorProto
    assert types == {"matches0": kinds.INT64, "mscores0": kinds.FLOAT}
    assert_fast_everywhere(graph)
    # fewer and more keypoints than the file matches
    run_file = session(written)
    run = in_torch(onnx.ColmapSuperGlue(load_model(path)[0], 0.1, 50))
    rng = np.random.default_rng(0)
    for shape in [(0, 0), (0, 5), (5, 0), (1, 7), (60, 40), (300, 200)]:
        values = colmap_inputs_of(*(Features(records(rng, n), (320, 240)) for n in shape)).values()
        for expected, found in zip(run(values), run_file(values)):
            assert found.shape == expected.shape
            # rounding decides between two neighbours as near as each other
            assert (np.abs(found - expected) > IN_ONNX_RUNTIME).sum() <= 1


def assert_fast_everywhere(graph):
    """No test for nan of all attention weights, which takes half of the time; no product with a
    transposed float64 matrix, which ONNX Runtime before 1.23 cannot compute.
    """
    assert not any(node.op_type == "IsNaN" for node in graph.node)
    types = {each.name: each.type.tensor_type.elem_type for each in graph.value_info}
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    wide = [node for node in products if types[node.output[0]] == DOUBLE]
    assert len(wide) > 10
    assert not any(made_by.get(name) == "Transpose" for node in wide for name in node.input)
