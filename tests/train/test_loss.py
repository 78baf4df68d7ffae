"""The loss, against values a person can check, and the metrics of a validation."""

import math
from collections import Counter

import made_views
import numpy as np
import pytest
import torch
from made_pairs import RAGGED, label_pairs, make_pairs, make_scrambled
from processes import in_group

from pipeline import distributed
from pipeline.keypoints.store import KeypointStore
from pipeline.params import Augmentation
from pipeline.train.augmentation import classify_pair
from pipeline.train.data import draw_validation_pairs
from pipeline.train.loss import (
    CONFIDENCE_BINS,
    MatchingObjective,
    Validation,
    compute_assignment_losses,
    find_best_f1,
)
from superglue_sift.network.ground_truth import IGNORED, UNMATCHED, TrueMatches
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

pytestmark = pytest.mark.cu111


@pytest.mark.gpu
@pytest.mark.parametrize("precision, close", [("float32", 1e-3), ("bfloat16", 2e-2)])
def test_a_gpu_computes_the_loss_and_the_gradient_of_the_cpu(precision, close):
    """Of ragged pairs, empty ones among them."""
    batch = label_pairs(make_pairs(*RAGGED))
    model = make_scrambled(SuperGlueConfig(dim=32, layers=2, neighbours=True, rotary=True)).train()
    results = []
    for device, name in (("cpu", "float32"), ("cuda", precision)):
        total, parts = MatchingObjective(model.to(device), name)(
            batch.to(device), repair_overflow=False
        )
        gradient = torch.cat(
            [g.flatten().cpu() for g in torch.autograd.grad(total, list(model.parameters()))]
        )
        results.append((parts["loss"].cpu(), gradient))
    (loss, gradient), (gpu_loss, gpu_gradient) = results
    assert torch.allclose(loss, gpu_loss, rtol=close, atol=close)
    assert (gradient - gpu_gradient).norm() < close * gradient.norm()


def test_the_loss_of_known_probabilities():
    log_P = torch.log(torch.tensor([[0.5, 0.1, 0.25], [0.1, 0.2, 0.125], [0.25, 0.5, 1.0]]))
    truth = TrueMatches(torch.tensor([[0, UNMATCHED]]), torch.tensor([[0, UNMATCHED]]))
    loss, _, _ = compute_assignment_losses(log_P[None], truth)
    assert loss.item() == pytest.approx(math.log(2) * (1 + 3 + 1) / 3)
    ignored = TrueMatches(torch.tensor([[0, IGNORED]]), torch.tensor([[0, IGNORED]]))
    assert compute_assignment_losses(log_P[None], ignored)[0].item() == pytest.approx(math.log(2))


def objective():
    torch.manual_seed(0)
    return MatchingObjective(SuperGlue(SuperGlueConfig(dim=16, layers=1, heads=2)))


def compute_mark(context, folder):
    store = KeypointStore(folder)
    samples = draw_validation_pairs(0, len(store), store.views_per_image, 12)
    return Validation(store, samples, 48, context).compute_ratio_test_f1(objective())


def test_the_best_f1_by_hand():
    predicted = np.zeros(CONFIDENCE_BINS)
    correct = np.zeros(CONFIDENCE_BINS)
    for confidence, count, correct_count in ((100, 4, 0), (200, 3, 2), (400, 2, 2)):
        predicted[confidence] = count
        correct[confidence] = correct_count
    sums = {"true": np.array(5.0), "predicted": predicted, "correct": correct}
    # above bin 100 of 500: 4 of 5 matches are right, and 4 of 5 true ones are found
    expected = {"precision": 0.8, "recall": 0.8, "f1": 0.8, "threshold": 101 / 500}
    assert find_best_f1(sums) == pytest.approx(expected)


def test_the_mark_of_the_ratio_test_is_the_same_on_any_number_of_ranks(tmp_path, monkeypatch):
    easy = made_views.make_features
    harder = lambda rng, xy, rows: easy(rng, xy, rows + rng.normal(0, 70, rows.shape))  # noqa: E731
    monkeypatch.setattr(made_views, "make_features", harder)
    folder = str(made_views.make_store(tmp_path))
    mark = compute_mark(distributed.join_group(), folder)
    assert 0.2 < mark < 1.0
    assert in_group(2, compute_mark, folder) == [mark, mark]


def test_zoomed_and_negative_pairs_have_metrics_of_their_own(tmp_path):
    store = KeypointStore(made_views.make_store(tmp_path, images=8, points=60))
    samples = draw_validation_pairs(0, len(store), store.views_per_image, 48)
    augmentation = Augmentation(rotation_deg=180, negatives=0.3, zoom=0.5)
    kinds = [
        classify_pair(augmentation, sample.image, len(store), sample.seed) for sample in samples
    ]
    counts = Counter(kinds)
    assert set(counts) == {"stored", "negative", "zoomed", "changed"}
    assert counts["stored"] == 24 and min(counts.values()) > 1
    model = objective()

    def compute_metrics(samples):
        context = distributed.join_group()
        return Validation(store, samples, 48, context, augmentation).compute_metrics(model)

    metrics = compute_metrics(samples)
    zoomed = [sample for sample, kind in zip(samples, kinds) if kind == "zoomed"]
    metrics_of_zoomed = compute_metrics(zoomed)
    assert metrics_of_zoomed["f1"] == metrics["f1_zoomed"]
    assert "f1_zoomed" not in metrics_of_zoomed
    assert metrics["matches_negative"] >= 0 and "f1_negative" not in metrics
