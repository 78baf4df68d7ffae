"""Validation: by kind of pair, and the mark to beat, the F1 of the ratio test on the same pairs."""

import made_views
import numpy as np
import pytest
import torch
from processes import in_group

from pipeline import distributed
from pipeline.keypoints.store import Store
from pipeline.train.augmentation import Augmentation
from pipeline.train.data import load_batch, validation_pairs
from pipeline.train.log import Curve
from pipeline.train.loss import CONFIDENCE_BINS, MatchingObjective, Validation
from superglue_sift.features.nearest import neighbours, unit_rows
from superglue_sift.features.sift import KEYPOINT
from superglue_sift.network.batch import choose_orientations
from superglue_sift.network.ground_truth import IGNORED, ground_truth
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig


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


def test_a_curve_keeps_its_columns_when_it_goes_on_with_other_metrics():
    curve = Curve(None, "step,loss,f1_zoomed\n10,0.5,0.8\n")
    curve.append(20, {"loss": 0.4, "f1_negative": 0.1})
    assert curve.text.splitlines()[-1] == "20,0.4,nan"
