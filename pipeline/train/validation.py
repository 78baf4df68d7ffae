"""Validation on held-out pairs, split over the ranks: each computes sums, which are exchanged once
and divided.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Callable, Dict, FrozenSet, List, NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from pipeline import distributed, trained_on
from pipeline.errors import RequestError
from pipeline.keypoints.store import Store
from pipeline.params import TrainParams
from pipeline.train.objective import MatchingObjective, assignment_loss
from pipeline.train.pairs.augmentation import Augmentation
from pipeline.train.pairs.loader import NO_CHANGE, load_batch
from pipeline.train.pairs.order import Sample, rank_slice, validation_pairs
from superglue_sift.features.nearest import neighbours
from superglue_sift.network.batch import PairBatch, choose_orientations
from superglue_sift.network.ground_truth import IGNORED, Truth
from superglue_sift.network.superglue import mutual_matches, unit_vectors

CONFIDENCE_BINS = 500  # of the histograms from which a threshold is chosen: steps of 0.002
# Pairs computed together; fixed, so that metrics do not depend on the number of processes
CHUNK = 8

# Fewest photographs to choose a threshold from; with fewer it is noise, and the initial weights'
# threshold is kept.
MIN_IMAGES = 16
ALL = "all"  # kinds of pairs
Sums = Dict[str, np.ndarray]


def choose_pairs(
    train: TrainParams, store: Store, model: Optional[Path], keep_seen: bool
) -> Tuple[List[Sample], List[str]]:
    """Choose `train.val_pairs` pairs of photographs that `model` was not trained on.

    model: None, or with `keep_seen`: photographs that it was trained on count too.

    Returns:
        The pairs, and messages about what was left out and why.

    Raises:
        RequestError: it was trained on all of them.
    """
    left = list(range(len(store)))
    messages = []
    if model:
        left, message = trained_on.leave_out(model, store.photographs, keep_seen, str(model))
        messages += [f"validation: {message}"] if message else []
    if not left:
        raise RequestError(
            f"{model}: was trained on all of the {len(store)} validation photographs; validate on"
            ' others (fetch.val_path), train from scratch (train.init_from: ""), or keep them with'
            " --keep-seen"
        )
    pairs = validation_pairs(train.seed, len(left), store.views_per_image, train.val_pairs)
    return [pair._replace(image=left[pair.image]) for pair in pairs], messages


def list_photographs(train: TrainParams, store: Store) -> Optional[FrozenSet[str]]:
    """The known photographs of a training on `store` and of its initial weights; None if those of
    either are not known at all.
    """
    known = frozenset(store.photographs) - {""}
    before = trained_on.read(Path(train.init_from)) if train.init_from else frozenset()
    return before | known if known and before is not None else None


class HeldOut(NamedTuple):
    """Pairs to validate on: the `samples` of `store`, shared by the ranks of `context`.

    max_keypoints: largest number of keypoints of a view. augmentation: see `loader.load_batch`.
    """

    store: Store
    samples: List[Sample]
    max_keypoints: int
    context: distributed.Context
    augmentation: Augmentation = NO_CHANGE

    @property
    def digest(self) -> str:
        """SHA-256 of the pairs: metrics on others do not compare."""
        return hashlib.sha256(repr((self.store.digest, self.samples)).encode()).hexdigest()

    def sums(self, sums_of: Callable[[PairBatch], Sums]) -> Dict[str, Sums]:
        """The values of `sums_of` by name, added over the pairs of each kind and over all (ALL), on
        every rank; each rank computes a part.
        """
        chunks = self._chunks()
        mine = chunks[rank_slice(len(chunks), self.context.rank, self.context.world_size)]
        computed = []
        for kind, samples in mine:
            batch = load_batch(self.store, samples, self.max_keypoints, self.augmentation)
            parts = batch.to(self.context.device).size_classes()[1]
            computed += [(kind, sums_of(part)) for part in parts]
        sums: Dict[str, Sums] = {ALL: {}}
        # every rank adds the same chunks in the same order: the bits do not depend on the number of
        # processes
        for kind, part in [part for parts in distributed.all_gather(computed) for part in parts]:
            for total in (sums[ALL], sums.setdefault(kind, {})):
                for name, value in part.items():
                    total[name] = total.get(name, 0.0) + value
        return sums

    def _chunks(self) -> List[Tuple[str, List[Sample]]]:
        """Pairs of one kind (`Augmentation.kind`) that are computed together."""
        by_kind: Dict[str, List[Sample]] = {}
        for sample in self.samples:
            by_kind.setdefault(self.augmentation.kind(sample, len(self.store)), []).append(sample)
        return [
            (kind, samples[start : start + CHUNK])
            for kind, samples in sorted(by_kind.items())
            for start in range(0, len(samples), CHUNK)
        ]


def validate(objective: MatchingObjective, held_out: HeldOut) -> Dict[str, float]:
    """Mean loss with its parts, and precision and recall, over all pairs, on every rank.

    `f1` is the largest harmonic mean of precision and recall over all thresholds: confidences drift
    during a training, which would move F1 at a fixed threshold. `threshold`, `precision` and
    `recall` belong to it. `pairs` is the number of pairs. `loss_zoomed`, `f1_zoomed` and so on are
    those of one kind of pairs, `matches_negative` the mean number of matches above `threshold` of
    pairs that have none. The metrics are the same for any number of processes.
    """
    model = objective.model
    was_training = model.training
    model.eval()
    kinds = held_out.sums(partial(_sums, objective))
    model.train(was_training)
    sums = kinds.pop(ALL)
    losses = ("loss", "loss_positive", "loss_unmatched")
    metrics = {name: float(sums[name] / sums["pairs"]) for name in losses}
    metrics.update(_separation(sums), pairs=float(sums["pairs"]))
    surest = round(metrics["threshold"] * CONFIDENCE_BINS)
    for kind, own in kinds.items():
        metrics[f"loss_{kind}"] = float(own["loss"] / own["pairs"])
        if kind == "negative":
            metrics["matches_negative"] = float(own["predicted"][surest:].sum() / own["pairs"])
        else:
            metrics[f"f1_{kind}"] = _separation(own)["f1"]
    return metrics


def ratio_test_f1(objective: MatchingObjective, held_out: HeldOut) -> float:
    """`f1` of the ratio test on the same pairs, over all ratios: the baseline of a training.

    Matches are mutual nearest neighbours, with the confidence 1 - nearest / second nearest distance
    (Lowe 2004).
    """
    return _separation(held_out.sums(partial(_ratio_sums, objective))[ALL])["f1"]


@torch.no_grad()
def _sums(objective: MatchingObjective, batch: PairBatch) -> Sums:
    """Sums of a batch that give the loss, and precision and recall at any threshold, of any set of
    batches.

    Returns:
        () float64 each: `pairs`, `true` (number of true matches), and the sums of
        `MatchingObjective.forward`; and (CONFIDENCE_BINS,) float64, by confidence: `predicted`,
        mutual best matches whose keypoint in image 0 is not ignored by the truth, and `correct`,
        those that equal the truth.
    """
    log_P = objective.model(batch)
    truth = objective.truth(batch)
    losses = assignment_loss(log_P, truth)
    matches0, scores0, _, _ = mutual_matches(log_P, threshold=0.0)
    sums = {
        "loss": losses.total.sum(),
        "loss_positive": losses.positive.sum(),
        "loss_unmatched": (losses.unmatched0.sum() + losses.unmatched1.sum()) / 2,
    }
    return {
        "pairs": np.asarray(float(len(batch))),
        **_counts(matches0, scores0, truth),
        **{name: value.double().cpu().numpy() for name, value in sums.items()},
    }


@torch.no_grad()
def _ratio_sums(objective: MatchingObjective, batch: PairBatch) -> Sums:
    """`_counts` of the ratio test, on the descriptors that the network sees."""
    batch = choose_orientations(batch)
    config = objective.model.config
    kind = (config.descriptor, config.descriptor_dim)
    units = [unit_vectors(batch.descriptors(side), *kind).cpu().numpy() for side in (0, 1)]
    truth = objective.truth(batch)
    matches = torch.full_like(truth.matches0, -1)
    scores = torch.zeros(matches.shape, device=batch.device)
    for i, (m, n) in enumerate(zip(batch.counts0.tolist(), batch.counts1.tolist())):
        found, mutual = neighbours(units[0][i, :m], units[1][i, :n])
        dense = found.only(mutual).to_dense(m)
        matches[i, :m], scores[i, :m] = map(torch.from_numpy, dense)
    return _counts(matches, scores, truth)


def _counts(matches0: Tensor, scores: Tensor, truth: Truth) -> Sums:
    """`true`, `predicted` and `correct` of mutual matches (B, M) with scores (B, M)."""
    counted = (matches0 >= 0) & (truth.matches0 != IGNORED)
    correct = counted & (matches0 == truth.matches0)
    return {
        "true": (truth.matches0 >= 0).sum().cpu().numpy().astype(np.float64),
        "predicted": _histogram(scores[counted]),
        "correct": _histogram(scores[correct]),
    }


def _histogram(confidences: Tensor) -> np.ndarray:
    return np.histogram(confidences.float().cpu().numpy(), CONFIDENCE_BINS, (0.0, 1.0))[0].astype(
        np.float64
    )


def _separation(sums: Sums) -> Dict[str, float]:
    """The largest F1 over all thresholds, with its precision, recall and threshold."""
    # for a threshold at the lower edge of each bin
    correct, predicted = (np.cumsum(sums[name][::-1])[::-1] for name in ("correct", "predicted"))
    precision = correct / np.maximum(predicted, 1.0)
    recall = correct / max(float(sums["true"]), 1.0)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    best = int(f1.argmax())
    return {
        "precision": float(precision[best]),
        "recall": float(recall[best]),
        "f1": float(f1[best]),
        "threshold": best / len(precision),
    }
