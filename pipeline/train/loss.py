"""The loss of a batch, and the metrics of a validation.

The loss of a pair is the negative log-likelihood of its true assignment (SuperGlue, equation 10),
divided by the number of terms of the sum. The terms are -log P_ij of each true match,
-log P_i,dustbin of each unmatched keypoint of image 0 and -log P_dustbin,j of each unmatched
keypoint of image 1. Ignored keypoints do not count. Without any term the loss is 0. A mean that
gives the matches half of the weight teaches less (docs/recipe.md). Only these entries of P are
gathered; there is no dense target.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Callable, Dict, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor, nn

from pipeline import distributed, provenance
from pipeline.errors import RequestError
from pipeline.keypoints.store import KeypointStore
from pipeline.params import TrainParams
from pipeline.train.augmentation import NO_CHANGE, Augmentation
from pipeline.train.data import Sample, draw_validation_pairs, load_batch, slice_for_rank
from superglue_sift.features.nearest import match_nearest
from superglue_sift.network.batch import PairBatch, choose_orientations, normalize_descriptors
from superglue_sift.network.ground_truth import IGNORED, UNMATCHED, Truth, find_true_matches
from superglue_sift.network.superglue import SuperGlue, mutual_matches

# Mutual nearest keypoints closer than POSITIVE_PX are a true match. Keypoints without a neighbour
# closer than NEGATIVE_PX are unmatched. In between SIFT's positions are too uncertain to teach
# either.
POSITIVE_PX = 3.0
NEGATIVE_PX = 5.0
CONFIDENCE_BINS = 500  # Bins of the histograms from which a threshold is chosen, 0.002 wide
# Validation pairs that are computed together. The number is fixed, so that metrics do not depend
# on the number of processes.
CHUNK = 8
ALL = "all"  # The key of the sums over pairs of every kind
# Names of the three results of `assignment_loss`
LOSSES = ("loss", "loss_positive", "loss_unmatched")
Sums = Dict[str, np.ndarray]
Metrics = Dict[str, float]


def assignment_loss(log_P: Tensor, truth: Truth) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each pair, and its two parts.

    Args:
        log_P: (B, M + 1, N + 1), log assignments from `SuperGlue`.
        truth: ground truth of the batch, with `matches0` (B, M) and `matches1` (B, N).

    Returns:
        Three tensors (B,) float32. The first is the loss, which is differentiable, and 0 for a pair
        without keypoints. The second is the mean over the matches. The third is the mean over the
        unmatched keypoints of each image, averaged over the two images. The last two are detached.
    """
    columns = torch.where(truth.matches0 >= 0, truth.matches0, log_P.shape[2] - 1)
    # (B, M): the column of the match, or of the dustbin. The gather has one dimension, since before
    # torch 1.13 the gradient of any other gather has no deterministic form on a GPU.
    B, M = columns.shape
    rows = torch.arange(B * (M + 1), device=columns.device).view(B, M + 1)[:, :M]
    places = rows * log_P.shape[2] + columns
    losses0 = -log_P.flatten().gather(0, places.flatten()).view(B, M)
    losses1 = -log_P[:, -1, :-1]  # (B, N): the loss if keypoint j goes to the dustbin
    none = losses0.new_zeros(())
    terms = (
        (losses0, truth.matches0 >= 0),
        (losses0, truth.matches0 == UNMATCHED),
        (losses1, truth.matches1 == UNMATCHED),
    )
    # (3, B): add the losses and count the terms, for the three kinds of terms
    sums = torch.stack([torch.where(counted, losses, none).sum(1) for losses, counted in terms])
    numbers = torch.stack([counted.sum(1) for _, counted in terms])
    positive, unmatched0, unmatched1 = (sums / numbers.clamp(min=1)).detach()
    total = sums.sum(0) / numbers.sum(0).clamp(min=1)
    return total, positive, (unmatched0 + unmatched1) / 2


class MatchingObjective(nn.Module):
    """SuperGlue with its ground truth and its loss in one module.

    They are one module because DistributedDataParallel has to see the whole forward pass.
    """

    def __init__(self, model: SuperGlue, precision: str = "float32") -> None:
        super().__init__()
        # DistributedDataParallel fills its buckets in the order in which modules are registered.
        self.in_order = nn.ModuleList(model.modules_in_order)
        self.model = model
        self.precision = precision
        # If set, each batch is padded to these numbers of pairs and keypoints, for `compile`.
        self.fixed_size: Optional[Tuple[int, int]] = None

    def forward(self, batch: PairBatch, wait: bool = True) -> Tuple[Tensor, Dict[str, Tensor]]:
        """Compute the loss of a batch with homographies. The batch may be empty.

        Args:
            wait: whether to compute pairs that overflow float32 again in the log domain. The host
                then waits for the GPU. If False, the loss and the gradient of such pairs are nan.

        Returns:
            The sum of the losses of the pairs, (1,) float32, and the values of each pair by name,
            (B,) each. It is not the mean, because this rank does not know the number of pairs of
            the whole step.
        """
        if self.fixed_size:  # The batch may end with empty pairs
            order, batches = [], [batch.pad(*self.fixed_size)]
        else:
            order, batches = batch.split_by_size()
        # The ground truth comes first: its large matrices are freed before activations take memory.
        truths = [find_true_matches(part, POSITIVE_PX, NEGATIVE_PX) for part in batches]
        log_P, finite = self.model.assign(batches, wait, self.precision)
        parts = [assignment_loss(P, truth) for P, truth in zip(log_P, truths)]
        total, positive, unmatched = (torch.cat(values) for values in zip(*parts))
        if not wait:
            total = total * torch.ones_like(total).masked_fill(~finite, math.nan)
        values = dict(zip(LOSSES, (total.detach(), positive, unmatched)))
        # The size classes may have another order than the batch.
        ordered = order == sorted(order)
        index = torch.tensor(order, dtype=torch.int64, device="cpu")
        places = slice(len(batch)) if ordered else index.argsort()
        return total.sum().reshape(1), {name: value[places] for name, value in values.items()}


class Validation:
    """The held-out pairs of a training, which give its metrics.

    The ranks share the pairs. Each rank computes sums, which are exchanged once and then divided,
    so the metrics are the same for any number of processes.
    """

    def __init__(
        self,
        store: KeypointStore,
        samples: List[Sample],
        max_keypoints: int,
        context: distributed.Context,
        augmentation: Augmentation = NO_CHANGE,
    ) -> None:
        """Prepare batches of the pairs `samples`, whose keypoints are in `store`.

        `max_keypoints` is the largest number of keypoints of a view. `augmentation` changes the
        pairs as in `load_batch`.
        """
        self.store = store
        self.samples = samples
        self.context = context
        self._load = lambda part: load_batch(store, part, max_keypoints, augmentation)
        self._kind = lambda sample: augmentation.classify_pair(
            sample.image, len(store), sample.seed
        )
        about = repr((store.digest, samples)).encode()
        self.digest = hashlib.sha256(about).hexdigest()  # Metrics on other pairs cannot be compared

    def compute_metrics(self, objective: MatchingObjective) -> Metrics:
        """Return the mean loss with its parts, precision and recall over all pairs, on every rank.

        `f1` is the largest harmonic mean of precision and recall over all thresholds: confidences
        drift during a training, which would move F1 at a fixed threshold. `threshold`, `precision`
        and `recall` are the values at that maximum. If there are several kinds of pairs, keys such
        as `f1_zoomed` give the F1 of one kind. `matches_negative` is the mean number of matches
        above `threshold` in pairs without any true match. `pairs` is the number of pairs.
        """
        # Add up each kind of pairs, by the network as it is used for matching.
        model = objective.model
        was_training = model.training
        model.eval()
        kinds = self._sum_by_kind(lambda batch: compute_network_sums(objective, batch))
        model.train(was_training)
        sums = kinds.pop(ALL)
        metrics = {name: float(sums[name] / sums["pairs"]) for name in LOSSES}
        metrics.update(find_best_f1(sums), pairs=float(sums["pairs"]))
        # Add the metrics of each kind; `first` is the first bin above the threshold.
        first = round(metrics["threshold"] * CONFIDENCE_BINS)
        for kind, kind_sums in kinds.items() if len(kinds) > 1 else ():
            if kind == "negative":
                count = kind_sums["predicted"][first:].sum()
                metrics["matches_negative"] = float(count / kind_sums["pairs"])
            else:
                metrics[f"f1_{kind}"] = find_best_f1(kind_sums)["f1"]
        return metrics

    def compute_ratio_test_f1(self, objective: MatchingObjective) -> float:
        """Return the largest F1 of the ratio test on the same pairs: the baseline of a training.

        Matches are mutual nearest neighbours, with the confidence 1 - nearest / second nearest
        distance (Lowe 2004). The largest F1 is over all ratios.
        """
        return find_best_f1(
            self._sum_by_kind(lambda batch: compute_ratio_test_sums(objective, batch))[ALL]
        )["f1"]

    def _sum_by_kind(self, sums_of: Callable[[PairBatch], Sums]) -> Dict[str, Sums]:
        """Add the values of `sums_of` over the pairs of each kind, and over ALL pairs.

        Each rank computes a part of the pairs. The result is the same on every rank.
        """
        # Cut the pairs of each kind into chunks, which the ranks share.
        by_kind: Dict[str, List[Sample]] = {}
        for sample in self.samples:
            by_kind.setdefault(self._kind(sample), []).append(sample)
        chunks = [
            (kind, samples[start : start + CHUNK])
            for kind, samples in sorted(by_kind.items())
            for start in range(0, len(samples), CHUNK)
        ]
        mine = slice_for_rank(len(chunks), self.context.rank, self.context.world_size)
        computed = [
            (kind, sums_of(part))
            for kind, samples in chunks[mine]
            for part in self._load(samples).to(self.context.device).split_by_size()[1]
        ]
        sums: Dict[str, Sums] = {ALL: {}}
        # Every rank adds the same chunks in the same order, so the bits of the sums do not depend
        # on the number of processes.
        for kind, part in [part for parts in distributed.all_gather(computed) for part in parts]:
            for total in (sums[ALL], sums.setdefault(kind, {})):
                for name, value in part.items():
                    total[name] = total.get(name, 0.0) + value
        return sums


def choose_validation_pairs(
    train: TrainParams, store: KeypointStore, allow_training_images: bool, model: Optional[Path]
) -> Tuple[List[Sample], List[str]]:
    """Choose `train.val_pairs` pairs of photographs of `store` that `model` was not trained on.

    If there is no model, or with `allow_training_images`, all photographs count.

    Returns:
        The pairs, and messages about what was left out and why.

    Raises:
        RequestError: the model was trained on all of them.
    """
    # Leave out the photographs that the initial weights were trained on.
    left = list(range(len(store)))
    messages = []
    if model:
        left, message = provenance.leave_out_photographs(
            model, store.photographs, allow_training_images, str(model)
        )
        messages += [f"validation: {message}"] if message else []
    if not left:
        raise RequestError(
            f"{model}: was trained on all of the {len(store)} validation photographs; validate on"
            ' others (fetch.val_path), train from scratch (train.init_from: ""), or keep them with'
            " run.allow_training_images: true"
        )
    # Draw pairs among the photographs that are left, and number them as in the store.
    pairs = draw_validation_pairs(train.seed, len(left), store.views_per_image, train.val_pairs)
    return [pair._replace(image=left[pair.image]) for pair in pairs], messages


@torch.no_grad()
def compute_network_sums(objective: MatchingObjective, batch: PairBatch) -> Sums:
    """Compute the sums of a batch from which the metrics of any set of batches follow.

    Returns:
        Arrays (): the number of pairs, the number of `true` matches, and the sums of the losses of
        `MatchingObjective.forward`, which are float64. Also the histograms of `count_matches`.
    """
    log_P = objective.model(batch)
    truth = find_true_matches(batch, POSITIVE_PX, NEGATIVE_PX)
    matches0, scores0, _, _ = mutual_matches(log_P, threshold=0.0)
    losses = dict(zip(LOSSES, assignment_loss(log_P, truth)))
    return {
        "pairs": np.array(len(batch)),
        **count_matches(matches0, scores0, truth),
        **{name: value.sum().double().cpu().numpy() for name, value in losses.items()},
    }


@torch.no_grad()
def compute_ratio_test_sums(objective: MatchingObjective, batch: PairBatch) -> Sums:
    """Return `count_matches` of the ratio test, on the same descriptors as the network gets."""
    batch = choose_orientations(batch)
    kind = objective.model.config.descriptor
    both = (batch.descriptors0, batch.descriptors1)
    units = [normalize_descriptors(descriptors, kind).cpu().numpy() for descriptors in both]
    truth = find_true_matches(batch, POSITIVE_PX, NEGATIVE_PX)
    matches = torch.full_like(truth.matches0, -1)
    scores = torch.zeros(matches.shape, dtype=torch.float32, device=batch.device)
    for i, (m, n) in enumerate(batch.counts.tolist()):
        # M and n are the numbers of real keypoints of this pair. The rest is padding.
        nearest, mutual = match_nearest(units[0][i, :m], units[1][i, :n])
        dense = nearest.only(mutual).to_dense(m)
        matches[i, :m], scores[i, :m] = map(torch.from_numpy, dense)
    return count_matches(matches, scores, truth)


def count_matches(matches0: Tensor, scores: Tensor, truth: Truth) -> Sums:
    """Count the true matches, and the mutual matches by confidence.

    Args:
        matches0, scores: (B, M), the matches of the keypoints of image 0, -1 where there is none,
            and their confidence.

    Returns:
        `true`, () int64, the number of true matches, and two histograms over the confidence,
        (CONFIDENCE_BINS,) int64. `predicted` counts matches whose keypoint in image 0 the truth
        does not ignore. `correct` counts matches that equal the truth.
    """
    counted = (matches0 >= 0) & (truth.matches0 != IGNORED)
    counted_rows = {"predicted": counted, "correct": counted & (matches0 == truth.matches0)}
    histograms = {
        name: np.histogram(scores[rows].float().cpu().numpy(), CONFIDENCE_BINS, (0.0, 1.0))[0]
        for name, rows in counted_rows.items()
    }
    return {"true": (truth.matches0 >= 0).sum().cpu().numpy(), **histograms}


def find_best_f1(sums: Sums) -> Metrics:
    """Return the largest F1 over all thresholds, with its precision, recall and threshold."""
    # (CONFIDENCE_BINS,): how many matches there are from the lower edge of each bin upwards
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
