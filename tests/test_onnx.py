"""The network as ONNX and by torch.export gives what torch gives, whatever the batch and the
numbers of keypoints.
"""

import sys

import cv2
import numpy as np
import pytest
import torch
from made_pairs import pair
from made_scenes import TURN, write_model

from superglue_sift import (
    Matcher,
    Pair,
    RequestError,
    from_pairs,
    load_model,
    mutual_matches,
    onnx,
    torch_compat,
)
from superglue_sift.matcher import extract
from superglue_sift.network.batch import Keypoints, choose_orientations
from superglue_sift.network.weights import shipped_weights

# Rounding of float32 through all layers; ONNX Runtime has other kernels.
IN_TORCH = 1e-4
IN_ONNX_RUNTIME = 1e-3


def made_pair(m, n, rng):
    """A pair half of whose keypoints correspond, moved and with noise in their descriptors."""
    made = pair(rng, m, n)
    shared = min(m, n) // 2
    noise = rng.integers(-9, 10, (shared, 128))
    side1 = made.records1
    side1[:shared] = made.records0[:shared]
    side1["descriptor"][:shared] = np.clip(side1["descriptor"][:shared] + noise, 0, 255)
    side1["x"][:shared] += 7
    return made


def inputs(batch):
    """A PairBatch under the names of the ONNX graph."""
    values = {}
    batch = choose_orientations(batch)
    keypoints = Keypoints.of([batch])
    for name, columns in zip(Keypoints._fields[:5], keypoints[:5]):
        for side, column in zip("01", keypoints.images.split(columns)):
            key = name.replace("positions", "keypoints") + side
            values[key] = np.ascontiguousarray(column.float().numpy())
    for side in "01":
        values["image_size" + side] = getattr(batch, "image_size" + side).numpy()
        width = values["keypoints" + side].shape[1]
        values["mask" + side] = np.arange(width) < getattr(batch, "counts" + side).numpy()[:, None]
    return values


def assert_same(model, run, pairs, threshold, tolerance, doubtful=0.0):
    """Compare with torch; returns the number of matches.

    tolerance: of the scores. doubtful: largest part of the keypoints whose answer may differ by
    more, because rounding decides: between two neighbours as near as each other, or of a score at
    the threshold.
    """
    batch = from_pairs(pairs)
    with torch.no_grad():
        log_P = model(batch)
    expected = mutual_matches(log_P, threshold)
    found = dict(zip(onnx.OUTPUTS, run(inputs(batch))))
    for side, values in zip("01", (expected[:2], expected[2:])):
        matches, scores = (value.numpy() for value in values)
        far = np.abs(found["matching_scores" + side] - scores) > tolerance
        assert (far | (found["matches" + side] != matches)).sum() <= doubtful * scores.size
    batch_index, index0, index1 = found["matches"].T
    assert len(index0) == (found["matches0"] >= 0).sum()
    np.testing.assert_array_equal(found["matches0"][batch_index, index0], index1)
    np.testing.assert_array_equal(found["matching_scores0"][batch_index, index0], found["mscores"])
    return len(index0)


SHAPES = [[(5, 7)], [(0, 0)], [(0, 5)], [(5, 0)], [(2, 1)], [(60, 40), (0, 9), (33, 1)]]


def session(path):
    """(inputs by name) -> outputs, by ONNX Runtime on one thread."""
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    made_session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda values: made_session.run(None, values)


def needs_onnx():
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"needs {name}")
    if not torch_compat.can_export():
        pytest.skip(f"torch {torch.__version__} has no torch.export of changing shapes")


def in_torch(module):
    """(inputs by name) -> outputs, by a module that takes them in order."""

    @torch.no_grad()
    def run(values):
        return [
            found.numpy() for found in module(*(torch.from_numpy(values[k]) for k in onnx.INPUTS))
        ]

    return run


@pytest.mark.parametrize(
    "changes",
    [
        {"neighbours": True, "rotary": True},
        {"scale_angle": False, "norm": "batch", "heads": 2},
        None,  # the shipped weights
    ],
)
def test_the_padded_network_matches_as_the_ragged_one(tmp_path, changes):
    path = shipped_weights()
    if changes:
        path = write_model(tmp_path / "m.safetensors", layers=2, **changes)
    model = load_model(path)[0]
    run = in_torch(onnx.PaddedSuperGlue(model, 0.1))
    rng = np.random.default_rng(0)
    for shapes in SHAPES:
        pairs = [made_pair(m, n, rng) for m, n in shapes]
        count = assert_same(model, run, pairs, 0.1, IN_TORCH)
    assert count > 10


@pytest.mark.slow
def test_the_shipped_weights_as_onnx_match_as_torch_does(tmp_path, photo):
    needs_onnx()
    run = session(onnx.export(tmp_path / "m.onnx"))
    model, info = load_model(shipped_weights())
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 300, (12, 2)).tolist()
    pairs = [made_pair(m, n, rng) for m, n in [(0, 9), (2048, 2048), *counts]]
    sides = [extract(view, 256) for view in (photo, cv2.warpPerspective(photo, TURN, (600, 400)))]
    sides[1] = sides[1].resize((3000, 2000))  # a large file, in which SIFT saw a reduced image
    pairs.append(Pair(sides[0].records, sides[1].records, sides[0].size, sides[1].size))
    found = 0
    for one in pairs:
        found += assert_same(model, run, [one], info["match_threshold"], IN_ONNX_RUNTIME, 0.002)
    assert found > 1000
    outputs = dict(zip(onnx.OUTPUTS, run(onnx.inputs_of(*sides))))
    expected = Matcher.load(device="cpu").match(*sides)
    np.testing.assert_array_equal(outputs["matches"][:, 1:], expected.matches)


def test_a_wrong_request_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(RequestError, match=r"must end in \.onnx"):
        onnx.export(tmp_path / "m.pt")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(RequestError, match=r"pip install 'superglue-sift\[onnx\]'"):
        onnx.export(tmp_path / "m.onnx")
