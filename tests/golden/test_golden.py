"""A change of form changes no figure: losses and assignments as stored in golden.json, to rounding.

`PYTHONPATH=.:tests python tests/golden/test_golden.py` writes the file anew, for a change that is
meant to move them.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from made_pairs import batch_pairs, bound_rounding, crop_padding
from made_views import make_image, make_store
from reading import read_json

from pipeline.keypoints.store import KeypointStore
from pipeline.train.data import draw_training_pairs, load_batch
from pipeline.train.loss import MatchingObjective
from pipeline.train.step import train_step
from superglue_sift import SuperGlue, SuperGlueConfig, load_model
from superglue_sift.network.weights import find_shipped_weights, fuse_for_inference
from superglue_sift.torch_compat import make_grad_scaler

FILE = Path(__file__).with_name("golden.json")
# Scores reach 40, and so do the shipped weights', in 18 layers of four products of 128 terms.
SCORE = 40
# A probability in float32; and where only the descriptors are, which have 128 entries
ROUNDED = bound_rounding(SCORE, 18 * 4 * 128)
EXACT = bound_rounding(SCORE, 2 * 128)
# A loss is a mean of hundreds of log probabilities: few of their roundings are left.
TOLERANCE = bound_rounding(SCORE, 4 * 4)
STEPS = 10
NETWORKS = {
    "layer norm": {},
    "batch norm": {"norm": "batch"},
    "neighbours and rotary": {"neighbours": True, "rotary": True},
}


def compute_losses(folder, **changes):
    """The mean loss of each of ten steps of gradient descent; image 1 of the store has no
    keypoints.
    """
    store = KeypointStore(make_store(folder))
    torch.manual_seed(0)
    model = SuperGlue(SuperGlueConfig(dim=32, layers=2, sinkhorn_iterations=30, **changes))
    with torch.no_grad():  # the zero start of the residual branches would hide most of the network
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    objective = MatchingObjective(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for step in range(STEPS):
        pairs = draw_training_pairs(0, len(store), store.views_per_image, 6 * step, 6 * step + 6)
        batch = load_batch(store, pairs, 48)
        sums, *_ = train_step(objective, optimizer, make_grad_scaler(False), [batch], 6, 1)
        losses.append(sums["loss"] / 6)
    return losses


def compute_assignments(exact):
    """With the shipped weights, for three pairs of different sizes and one with an empty side: the
    largest entry of each row but the last, its place, the dustbins.

    exact: in float64 from the descriptors on; else as `Matcher` computes it.
    """
    model, _ = load_model(find_shipped_weights())
    model = model.double() if exact else fuse_for_inference(model)
    rng = np.random.default_rng(7)
    pairs = [make_image(rng, str(points), 2, points).features for points in (30, 90, 200)]
    pairs.append((pairs[0][0], pairs[0][1].select(slice(0))))
    with torch.no_grad():
        padded = model(*batch_pairs(pairs)).exp()
    assignments = []
    for P, pair in zip(padded, pairs):
        P = crop_padding(P, *(len(features.keypoints) for features in pair))
        best, place = P[:-1].max(1)
        values = {"best": best, "place": place, "dustbin0": P[:-1, -1], "dustbin1": P[-1, :-1]}
        assignments.append({name: value.tolist() for name, value in values.items()})
    return assignments


@pytest.fixture(scope="module")
def golden():
    return read_json(FILE)


@pytest.mark.parametrize("name", NETWORKS)
def test_losses_of_ten_steps(golden, tmp_path, name):
    losses = compute_losses(tmp_path, **NETWORKS[name])
    assert np.abs(np.array(losses) - golden["losses"][name]).max() < TOLERANCE
    assert losses[-1] < losses[0] - 100 * TOLERANCE  # it learns, so the gradient counts


@pytest.mark.parametrize("exact, limit", [(True, EXACT), (False, ROUNDED)])
def test_assignments_of_the_shipped_weights(golden, exact, limit):
    computed = compute_assignments(exact)
    for number, stored in enumerate(golden["assignments"]):
        assert computed[number]["place"] == stored["place"]
        for name, values in stored.items():
            assert np.allclose(computed[number][name], values, rtol=limit, atol=limit)


def write():
    """Write the file anew, all numbers with seven digits after the point."""
    losses = {}
    for name, changes in NETWORKS.items():
        with tempfile.TemporaryDirectory() as folder:
            losses[name] = compute_losses(Path(folder), **changes)
    figures = json.dumps({"losses": losses, "assignments": compute_assignments(exact=True)})
    short = json.loads(figures, parse_float=lambda digits: round(float(digits), 7))
    lines = json.dumps(short, separators=(",", ":")).replace("{", "\n{")
    FILE.write_text(lines.strip() + "\n")


if __name__ == "__main__":
    write()
