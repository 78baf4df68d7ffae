"""The loss, against values a person can check, and the metrics of a validation."""

import math

import made_views
import numpy as np
import pytest
import torch
from made_pairs import RAGGED, pairs_of, related, scrambled
from processes import in_group

from pipeline import distributed
from pipeline.keypoints.store import Store
from pipeline.train.augmentation import Augmentation
from pipeline.train.data import load_batch, validation_pairs
from pipeline.train.loss import CONFIDENCE_BINS, MatchingObjective, Validation, assignment_loss
from superglue_sift.features.nearest import neighbours, unit_rows
from superglue_sift.features.sift import KEYPOINT
from superglue_sift.network.batch import choose_orientations
from superglue_sift.network.ground_truth import IGNORED, UNMATCHED, Truth, ground_truth
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

pytestmark = pytest.mark.cu111


@pytest.mark.gpu
@pytest.mark.parametrize("precision, close", [("float32", 1e-3), ("bfloat16", 2e-2)])
def test_a_gpu_finds_the_loss_and_the_gradient_of_the_cpu(precision, close):
    """Of ragged pairs, empty ones among them."""
    batch = related(pairs_of(*RAGGED))
    model = scrambled(SuperGlueConfig(dim=32, layers=2, neighbours=True, rotary=True)).train()
    answers = []
    for device, asked in (("cpu", "float32"), ("cuda", precision)):
        total, parts = MatchingObjective(model.to(device), asked)(batch.to(device), wait=False)
        gradient = torch.cat(
            [g.flatten().cpu() for g in torch.autograd.grad(total, list(model.parameters()))]
        )
        answers.append((parts["loss"].cpu(), gradient))
    (loss, gradient), (found, own) = answers
    assert torch.allclose(loss, found, rtol=close, atol=close)
    assert (gradient - own).norm() < close * gradient.norm()


def test_known_value():
    log_P = torch.log(torch.tensor([[0.5, 0.1, 0.25], [0.1, 0.2, 0.125], [0.25, 0.5, 1.0]]))
    truth = Truth(torch.tensor([[0, UNMATCHED]]), torch.tensor([[0, UNMATCHED]]))
    loss, _, _ = assignment_loss(log_P[None], truth)
    assert loss.item() == pytest.approx(math.log(2) * (1 + 3 + 1) / 3)
    ignored = Truth(torch.tensor([[0, IGNORED]]), torch.tensor([[0, IGNORED]]))
    assert assignment_loss(log_P[None], ignored)[0].item() == pytest.approx(math.log(2))


def objective():
    torch.manual_seed(0)
    return MatchingObjective(SuperGlue(SuperGlueConfig(dim=16, layers=1, heads=2)))


def mark_of(context, folder):
    store = Store(folder)
    samples = validation_pairs(0, len(store), store.views_per_image, 12)
    return Validation(store, samples, 48, context).ratio_test_f1(objective())


def by_hand(folder):
    """The best F1 over the ratios of the bins, pair by pair with the matcher of the evaluation."""
    store = Store(folder)
    batch = choose_orientations(
        load_batch(store, validation_pairs(0, len(store), store.views_per_image, 12), 48)
    )
    truth = ground_truth(batch, 3.0, 5.0).matches0.numpy()
    records = [
        [each[i, : counts[i]].numpy().reshape(-1).view(KEYPOINT) for i in range(len(batch))]
        for each, counts in (
            (batch.records0, batch.counts0.tolist()),
            (batch.records1, batch.counts1.tolist()),
        )
    ]
    best = 0.0
    for ratio in 1.0 - np.arange(CONFIDENCE_BINS) / CONFIDENCE_BINS:
        right = found = 0
        for own, other, partners in zip(*records, truth):
            near, mutual = neighbours(unit_rows(own), unit_rows(other))
            passed = near.only(mutual).above(max(1.0 - ratio, 1e-9))
            matches, _ = passed.to_dense(len(own))
            asked = partners[: len(matches)]
            counted = (matches >= 0) & (asked != IGNORED)
            found = found + counted.sum()
            right = right + (counted & (matches == asked)).sum()
        best = max(best, 2 * right / (found + (truth >= 0).sum()))
    return best


def test_the_mark_is_the_best_f1_of_the_ratio_test_whatever_the_ratio(tmp_path, monkeypatch):
    """2 TP / (found + true) is the harmonic mean of precision and recall."""
    easy = made_views.made_records
    harder = lambda rng, xy, rows: easy(rng, xy, rows + rng.normal(0, 70, rows.shape))  # noqa: E731
    monkeypatch.setattr(made_views, "made_records", harder)
    folder = str(made_views.made_store(tmp_path))
    mark = mark_of(distributed.start(), folder)
    assert 0.2 < mark < 1.0 and mark == pytest.approx(by_hand(folder), abs=0.01)
    assert in_group(2, mark_of, folder) == [mark, mark]


def test_every_kind_of_pair_has_its_own_metrics(tmp_path):
    store = Store(made_views.made_store(tmp_path, images=8, points=60))
    samples = validation_pairs(0, len(store), store.views_per_image, 48)
    some = Augmentation(rotation_deg=180, negatives=0.3, zoom=0.5)
    of = lambda pairs: Validation(store, pairs, 48, distributed.start(), some)  # noqa: E731
    kinds = dict.fromkeys(("stored", "negative", "zoomed", "changed"), 0)
    for sample in samples:
        kinds[some.kind(sample.image, len(store), sample.seed)] += 1
    assert kinds["stored"] == 24 and min(kinds.values()) > 1
    model = objective()
    metrics = of(samples).metrics(model)
    alone = [
        sample for sample in samples if some.kind(sample.image, len(store), sample.seed) == "zoomed"
    ]
    of_zoomed = of(alone).metrics(model)
    assert of_zoomed["f1"] == metrics["f1_zoomed"] and "f1_zoomed" not in of_zoomed
    assert metrics["matches_negative"] >= 0 and "f1_negative" not in metrics
