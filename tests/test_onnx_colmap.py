"""The file for COLMAP keeps its contract and gives what the matcher gives."""

import cv2
import numpy as np
import pytest
import torch
from made_colmap import colmap_inputs_of
from made_pairs import records
from made_scenes import TURN
from test_onnx import IN_ONNX_RUNTIME, needs_onnx, session

from superglue_sift import Features, Matcher, load_model, onnx, torch_compat
from superglue_sift.features.features import extract
from superglue_sift.features.sift import KEYPOINT
from superglue_sift.network.superglue import TYPICAL_SCORE
from superglue_sift.network.weights import shipped_weights

needs_sym_min = pytest.mark.skipif(
    not torch_compat.can_export(), reason="needs torch.export of changing shapes"
)


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


@torch.no_grad()
def run(module, values):
    return [found.numpy() for found in module(*map(torch.from_numpy, values.values()))]


@needs_sym_min
def test_it_matches_as_the_matcher(network, sides):
    matches, scores = run(network, colmap_inputs_of(*sides))
    expected = Matcher.load(device="cpu", threshold=0.2).match(*sides, refine=False)
    assert len(expected.matches) > 80
    matches0, scores0 = expected.dense()
    assert (matches != matches0).sum() <= 2  # rounding decides
    assert np.median(np.abs(scores - scores0)) < 1e-3
    assert (scores[matches < 0] == 0).all()


@needs_sym_min
def test_of_too_many_keypoints_those_with_the_best_neighbours_are_matched(network, sides):
    few = onnx.ColmapSuperGlue(network.network.model, 0.2, 100)
    matches, _ = run(few, colmap_inputs_of(*sides))
    assert matches.shape == (len(sides[0].records),)
    index0 = np.flatnonzero(matches >= 0)
    index1 = matches[index0]
    assert len(index0) > 80, "of 100 keypoints chosen for this pair most must match"
    assert len(set(index1)) == len(index1)
    all_matches, _ = run(network, colmap_inputs_of(*sides))
    assert (all_matches[index0] == index1).mean() > 0.95
    back, _ = run(few, colmap_inputs_of(*sides[::-1]))
    assert np.array_equal(back[index1], index0)


def test_the_rank_is_the_ratio_of_distances_and_mutual_neighbours_come_first():
    # unit vectors of the plane by their angles, degrees
    angles = (np.array([0.0, 90.0, 100.0]), np.array([4.0, 50.0, 97.0]))
    unit = [
        torch.tensor(np.stack([np.cos(np.radians(a)), np.sin(np.radians(a))], 1)) for a in angles
    ]

    def ratio(near, far):
        return float(np.sin(np.radians(near / 2)) / np.sin(np.radians(far / 2)))

    rank0, rank1 = onnx.rank_by_descriptor(*unit)
    # 0 and 4 are mutual, so are 100 and 97; the nearest of 90 is 97, and that of 50 is 90
    assert np.allclose(rank0, [ratio(4, 86), 1 + ratio(7, 40), ratio(3, 50)])
    assert np.allclose(rank1, [ratio(4, 86), 1 + ratio(40, 50), ratio(3, 50)])


DOUBLE = 11  # onnx.TensorProto.DOUBLE
SHAPES = [(0, 0), (0, 5), (5, 0), (1, 1), (1, 7), (60, 40), (2500, 2100)]


@pytest.mark.slow
def test_the_file_keeps_the_contract_of_colmap(network, sides, tmp_path):
    needs_onnx()
    import onnx as onnx_package

    written = onnx.export(tmp_path / "colmap.onnx", threshold=0.2, form="colmap")
    graph = onnx_package.load(str(written))
    onnx_package.checker.check_model(graph)
    assert graph.ir_version == 8 and graph.opset_import[0].version == 18
    # pull request 4098 of COLMAP
    names = "kpts0 kpts1 desc0 desc1 image_size0 image_size1 scales0 scales1 oris0 oris1"
    assert [each.name for each in graph.graph.input] == names.split()
    ranks = [len(each.type.tensor_type.shape.dim) for each in graph.graph.input]
    assert ranks == [3, 3, 3, 3, 2, 2, 2, 2, 2, 2]
    types = [each.type.tensor_type.elem_type for each in graph.graph.output]
    assert types == [onnx_package.TensorProto.INT64, onnx_package.TensorProto.FLOAT]
    assert [each.name for each in graph.graph.output] == ["matches0", "mscores0"]
    assert_fast_everywhere(graph.graph)

    run_file = session(written)
    rng = np.random.default_rng(0)
    pairs = [[Features(records(rng, n), (320, 240)) for n in shape] for shape in SHAPES]
    doubtful = 0
    for pair in [*pairs, sides]:
        values = colmap_inputs_of(*pair)
        matches, scores = run(network, values)
        in_file = run_file(values)
        assert in_file[0].shape == in_file[1].shape == matches.shape
        far = np.abs(in_file[1] - scores) > IN_ONNX_RUNTIME
        doubtful += (far | (in_file[0] != matches)).sum()
    assert doubtful <= 5


def assert_fast_everywhere(graph):
    """No test for nan of all attention weights, which takes half of the time; no product with a
    transposed float64 matrix, which ONNX Runtime before 1.23 cannot compute.
    """
    assert not any(node.op_type == "IsNaN" for node in graph.node)
    types = {each.name: each.type.tensor_type.elem_type for each in graph.value_info}
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    wide = [
        node for node in graph.node if node.op_type == "MatMul" and types[node.output[0]] == DOUBLE
    ]
    assert len(wide) > 50
    assert not any(made_by.get(name) == "Transpose" for node in wide for name in node.input)
