"""The loss of a batch, and the metrics of a validation.

The loss of a pair is the negative log-likelihood of its true assignment (SuperGlue, equation 10),
divided by the number of terms of the sum. The terms are -log P_ij of each true match,
-log P_i,dustbin of each unmatched keypoint of image 0 and -log P_dustbin,j of each unmatched
keypoint of image 1. Ignored keypoints do not count. Without any term the loss is 0. A network
learns less from a mean that gives the matches half of the weight (docs/recipe.md). Only these
entries of P are gathered, so no dense target is made.
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
from pipeline.keypoints.store import KeypointStore
from pipeline.params import Augmentation, TrainParams
from pipeline.train.augmentation import NO_CHANGE, classify_pair
from pipeline.train.checkpoint import Metrics
from pipeline.train.data import PairBatch, Sample, draw_validation_pairs, load_batch, slice_for_rank
from superglue_sift.features.nearest import match_nearest
from superglue_sift.network.batch import choose_orientations, count_keypoints, normalize_descriptors
from superglue_sift.network.ground_truth import IGNORED, UNMATCHED, TrueMatches, find_true_matches
from superglue_sift.network.superglue import SuperGlue, find_mutual_matches

# Mutual nearest keypoints closer than POSITIVE_PX are a true match. Keypoints without a neighbor
# closer than NEGATIVE_PX are unmatched. In between SIFT's positions are too uncertain to teach
# either.
POSITIVE_PX = 3.0
NEGATIVE_PX = 5.0
CONFIDENCE_BINS = 500  # Bins of the histograms from which a threshold is chosen, 0.002 wide
# Validation pairs that are computed together. The number is fixed, so that metrics do not depend
# on the number of processes.
CHUNK = 8
ALL = "all"  # The key of the sums over pairs of every kind
# Names of the three results of `compute_assignment_losses`
LOSSES = ("loss", "loss_positive", "loss_unmatched")
Sums = Dict[str, np.ndarray]


def compute_assignment_losses(log_P: Tensor, truth: TrueMatches) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each pair, and its two parts.

    Args:
        log_P: (B, M + 1, N + 1), logarithms of the assignment from `SuperGlue`.
        truth: ground truth of the batch, with `matches0` (B, M) and `matches1` (B, N).

    Returns:
        Three tensors (B,) float32. The first is the loss, which is differentiable, and 0 for a pair
        without keypoints. The second is the mean over the matches. The third is the mean over the
        unmatched keypoints of each image, averaged over the two images. The last two are detached.
    """
    columns = torch.where(truth.matches0 >= 0, truth.matches0, log_P.shape[2] - 1)
    # (B, M): the column of the match, or of the dustbin. The gather below has one dimension, since
    # before torch 1.13 the gradient of any other gather has no deterministic form on a GPU.
    B, M = columns.shape
    rows = torch.arange(B * (M + 1), device=columns.device).view(B, M + 1)[:, :M]
    flat_indices = rows * log_P.shape[2] + columns
    losses0 = -log_P.flatten().gather(0, flat_indices.flatten()).view(B, M)
    losses1 = -log_P[:, -1, :-1]  # (B, N): the loss if keypoint j goes to the dustbin
    zero = losses0.new_zeros(())
    terms = (
        (losses0, truth.matches0 >= 0),
        (losses0, truth.matches0 == UNMATCHED),
        (losses1, truth.matches1 == UNMATCHED),
    )
    # (3, B): the sums of the losses and the numbers of terms, for the three kinds of terms
    sums = torch.stack(
        [torch.where(is_counted, losses, zero).sum(1) for losses, is_counted in terms]
    )
    numbers = torch.stack([is_counted.sum(1) for _, is_counted in terms])
    positive, unmatched0, unmatched1 = (sums / numbers.clamp(min=1)).detach()
    total = sums.sum(0) / numbers.sum(0).clamp(min=1)
    return total, positive, (unmatched0 + unmatched1) / 2


def find_truth(batch: PairBatch) -> TrueMatches:
    """Find the true matches of a batch, with the distances of the loss."""
    return find_true_matches(
        batch.images0, batch.images1, batch.H_0to1, batch.cells, POSITIVE_PX, NEGATIVE_PX
    )


class MatchingObjective(nn.Module):
    """SuperGlue with its ground truth and its loss in one module.

    They are one module because DistributedDataParallel has to see the whole forward pass.

    Attributes:
        model: the network.
        precision: precision of its layers: "float32", "bfloat16" or "float16".
        fixed_size: numbers of pairs and keypoints to which each batch is padded, or None.
    """

    def __init__(self, model: SuperGlue, precision: str = "float32") -> None:
        super().__init__()
        # DistributedDataParallel fills its buckets in the order in which modules are registered.
        self.in_order = nn.ModuleList(model.modules_in_order)
        self.model = model
        self.precision = precision
        # Compiled layers need batches of one size.
        self.fixed_size: Optional[Tuple[int, int]] = None

    def forward(
        self, batch: PairBatch, repair_overflow: bool = True
    ) -> Tuple[Tensor, Dict[str, Tensor]]:
        """Compute the loss of a batch, which may be empty.

        Args:
            batch: the pairs.
            repair_overflow: whether to compute pairs that overflow float32 again in the log domain.
                The host then waits for the GPU. If False, the loss and the gradient of such pairs
                are nan.

        Returns:
            The sum of the losses of the pairs, (1,) float32, and the values of each pair by name,
            (B,) each. The first is not the mean, because this rank does not know the number of
            pairs of the whole step.
        """
        if self.fixed_size:  # The batch may end with empty pairs
            order, batches = [], [batch.pad(*self.fixed_size)]
        else:
            order, batches = batch.split_by_size()
        # The ground truth comes first: its large matrices are freed before activations take memory.
        truths = [find_truth(part) for part in batches]
        images = [(part.images0, part.images1) for part in batches]
        log_P, finite = self.model.assign(images, repair_overflow, self.precision)
        parts = [compute_assignment_losses(P, truth) for P, truth in zip(log_P, truths)]
        total, positive, unmatched = (torch.cat(values) for values in zip(*parts))
        if not repair_overflow:
            total = total * torch.ones_like(total).masked_fill(~finite, math.nan)
        values = dict(zip(LOSSES, (total.detach(), positive, unmatched)))
        # The size classes may order the pairs differently from the batch.
        is_ordered = order == sorted(order)
        index = torch.tensor(order, dtype=torch.int64, device="cpu")
        positions = slice(len(batch)) if is_ordered else index.argsort()
        return total.sum().reshape(1), {name: value[positions] for name, value in values.items()}


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
        """Note the pairs, which are loaded when they are needed.

        Args:
            store: the keypoints of the held-out images.
            samples: the pairs.
            max_keypoints: largest number of keypoints of a view.
            context: this process among the ranks.
            augmentation: random changes of each pair, determined by its `sample.seed`.
        """
        self.store = store
        self.samples = samples
        self.context = context
        self._load = lambda part: load_batch(store, part, max_keypoints, augmentation)
        self._kind = lambda sample: classify_pair(
            augmentation, sample.image, len(store), sample.seed
        )
        content = repr((store.digest, samples)).encode()
        # Metrics on pairs with another digest cannot be compared.
        self.digest = hashlib.sha256(content).hexdigest()

    def compute_metrics(self, objective: MatchingObjective) -> Metrics:
        """Return the mean loss with its parts, precision and recall over all pairs, on every rank.

        All ranks call this together. `f1` is the largest harmonic mean of precision and recall over
        all thresholds: confidences drift during a training, which would move F1 at a fixed
        threshold. `threshold`, `precision` and `recall` are the values at that maximum. If there
        are several kinds of pairs, keys such as `f1_zoomed` give the F1 of one kind.
        `matches_negative` is the mean number of matches above `threshold` in pairs without any true
        match. `pairs` is the number of pairs.
        """
        # Compute as in matching: BatchNorm with its running statistics.
        model = objective.model
        was_training = model.training
        model.eval()
        kinds = self._sum_by_kind(lambda batch: compute_network_sums(objective, batch))
        model.train(was_training)
        sums = kinds.pop(ALL)
        metrics = {name: float(sums[name] / sums["pairs"]) for name in LOSSES}
        metrics.update(find_best_f1(sums), pairs=float(sums["pairs"]))
        # The first bin above the threshold
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

        All ranks call this together. Matches are mutual nearest neighbors, with the confidence
        1 - nearest / second nearest distance (Lowe 2004). The largest F1 is over all ratios.
        """
        return find_best_f1(
            self._sum_by_kind(lambda batch: compute_ratio_test_sums(objective, batch))[ALL]
        )["f1"]

    def _sum_by_kind(self, sums_of: Callable[[PairBatch], Sums]) -> Dict[str, Sums]:
        """Add the values of `sums_of` over the pairs of each kind, and over ALL pairs.

        Each rank computes a part of the pairs. The result is the same on every rank.
        """
        by_kind: Dict[str, List[Sample]] = {}
        for sample in self.samples:
            by_kind.setdefault(self._kind(sample), []).append(sample)
        chunks = [
            (kind, samples[start : start + CHUNK])
            for kind, samples in sorted(by_kind.items())
            for start in range(0, len(samples), CHUNK)
        ]
        rank_part = slice_for_rank(len(chunks), self.context.rank, self.context.world_size)
        computed = [
            (kind, sums_of(part))
            for kind, samples in chunks[rank_part]
            for part in self._load(samples).to(self.context.device).split_by_size()[1]
        ]
        sums: Dict[str, Sums] = {ALL: {}}
        # Every rank adds the same chunks in the same order, so the bits of the sums do not depend
        # on the number of processes.
        for kind, part in [
            part for parts in distributed.gather_objects(computed) for part in parts
        ]:
            for total in (sums[ALL], sums.setdefault(kind, {})):
                for name, value in part.items():
                    total[name] = total.get(name, 0.0) + value
        return sums


def choose_validation_pairs(
    train: TrainParams, store: KeypointStore, allow_training_images: bool, model: Optional[Path]
) -> Tuple[List[Sample], List[str]]:
    """Choose the validation pairs, of photographs that the initial weights were not trained on.

    Args:
        train: the section `train`.
        store: the keypoints of the held-out images.
        allow_training_images: the key of `run`. If it is True, all photographs count.
        model: the file of the initial weights, or None.

    Returns:
        The pairs, and messages about what was left out and why.

    Raises:
        RequestError: If the initial weights were trained on all of the photographs.
    """
    images = list(range(len(store)))
    messages = []
    if model:
        images, message = provenance.leave_out_photographs(
            model, store.photographs, allow_training_images, str(model), purpose="validation"
        )
        messages += [f"validation: {message}"] if message else []
    # Draw pairs among the photographs that are left, and number them as in the store.
    pairs = draw_validation_pairs(train.seed, len(images), store.views_per_image, train.val_pairs)
    return [pair._replace(image=images[pair.image]) for pair in pairs], messages


@torch.no_grad()
def compute_network_sums(objective: MatchingObjective, batch: PairBatch) -> Sums:
    """Compute sums over a batch. From those of several batches follow their common metrics.

    Args:
        objective: the network with its loss.
        batch: the pairs.

    Returns:
        Arrays by name: `pairs`, (), the number of pairs; the sums of LOSSES, () float64 each; and
        the values of `count_matches`.
    """
    log_P = objective.model(batch.images0, batch.images1)
    truth = find_truth(batch)
    matches0, scores0, _, _ = find_mutual_matches(log_P, threshold=0.0)
    losses = dict(zip(LOSSES, compute_assignment_losses(log_P, truth)))
    return {
        "pairs": np.array(len(batch)),
        **count_matches(matches0, scores0, truth),
        **{name: value.sum().double().cpu().numpy() for name, value in losses.items()},
    }


@torch.no_grad()
def compute_ratio_test_sums(objective: MatchingObjective, batch: PairBatch) -> Sums:
    """Return `count_matches` of the ratio test, on the same descriptors as the network gets.

    Args:
        objective: the network, whose configuration says what the descriptors are.
        batch: the pairs.
    """
    images = choose_orientations(batch.images0, batch.images1)
    kind = objective.model.config.descriptor
    units = [
        normalize_descriptors(features.descriptors[:, :, 0], kind).cpu().numpy()
        for features in images
    ]
    truth = find_truth(batch)
    matches = torch.full_like(truth.matches0, -1)
    scores = torch.zeros(matches.shape, dtype=torch.float32, device=matches.device)
    # The counts are those of real keypoints, without padding.
    counts = (count_keypoints(features).tolist() for features in images)
    for index, (count0, count1) in enumerate(zip(*counts)):
        nearest, is_mutual = match_nearest(units[0][index, :count0], units[1][index, :count1])
        dense = nearest.select(is_mutual).to_dense(count0)
        matches[index, :count0], scores[index, :count0] = map(torch.from_numpy, dense)
    return count_matches(matches, scores, truth)


def count_matches(matches0: Tensor, scores: Tensor, truth: TrueMatches) -> Sums:
    """Count the true matches, and the mutual matches by confidence.

    Args:
        matches0: (B, M) int64, the match of each keypoint of image 0, or -1.
        scores: (B, M), the confidence of each match, from 0 to 1.
        truth: ground truth of the batch.

    Returns:
        Arrays by name: `true`, () int64, the number of true matches, and two histograms over the
        confidence, (CONFIDENCE_BINS,) int64. `predicted` counts matches whose keypoint in image 0
        the truth does not ignore. `correct` counts matches that equal the truth.
    """
    is_counted = (matches0 >= 0) & (truth.matches0 != IGNORED)
    masks = {"predicted": is_counted, "correct": is_counted & (matches0 == truth.matches0)}
    histograms = {
        name: np.histogram(scores[mask].float().cpu().numpy(), CONFIDENCE_BINS, (0.0, 1.0))[0]
        for name, mask in masks.items()
    }
    return {"true": (truth.matches0 >= 0).sum().cpu().numpy(), **histograms}


def find_best_f1(sums: Sums) -> Metrics:
    """Return the largest F1 over all thresholds, with its precision, recall and threshold.

    Args:
        sums: the values of `count_matches`, or their sums over several batches.
    """
    # (CONFIDENCE_BINS,): numbers of matches from the lower edge of each bin upwards
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
