"""The compared matchers: trained networks, and nearest neighbours by descriptor, on the same keypoints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

import numpy as np
import torch

from superglue_sift import scenes
from superglue_sift.batch import Pair
from superglue_sift.classical import RATIO, Described
from superglue_sift.descriptors import descriptors_of, kind_of, root_sift_of
from superglue_sift.matcher import PairMatches, match_pairs, match_threshold
from superglue_sift.network.inference import fuse_for_inference
from superglue_sift.network.superglue import SuperGlue
from superglue_sift.sift import positions
from superglue_sift.weights import load_model

OURS = "superglue"
SINKHORN_ITERATIONS = 100  # of the paper, at inference
BASELINES = ("nn", "mutual_nn", "ratio_test")
MATCHERS = (OURS, *BASELINES)  # always compared, in the order of every table
BOUND = "true_matches"  # no matcher: the true matches, an upper bound with these keypoints
SCENE = "superglue_scene"  # ours on pairs that the limits of scenes accept, no match on others
UNRANKED = (BOUND, SCENE)  # rows that are not baselines


@dataclass(frozen=True)
class Network:
    """A trained network. threshold: confidence that its matches exceed; info: the description stored with it."""

    model: SuperGlue
    threshold: float
    file: Path = Path()
    info: Mapping[str, Any] = field(default_factory=dict)


def load_network(file: Path, device: str, threshold: float = 0.0) -> Network:
    """Load a model file for evaluation; threshold 0: the model's own. Raises RequestError."""
    model, info = load_model(file, device, SINKHORN_ITERATIONS)
    return Network(fuse_for_inference(model), threshold or match_threshold(info), file, info)


def without_copies(networks: Mapping[str, Network]) -> Tuple[Dict[str, Network], List[str]]:
    """The networks without copies of ours, and a note for each copy.

    A network with our weights and another threshold stays: its matches differ. Another note is for a training that
    kept its initial weights.
    """
    ours, left, notes = networks[OURS], dict(networks), []
    kept = "Training kept the weights it began with: " if ours.info.get("step") == 0 else ""
    for name, network in networks.items():
        if name == OURS or not same_weights(ours.model, network.model):
            continue
        if network.threshold == ours.threshold:
            del left[name]
            notes.append(f"{kept}{name} is the same model as ours, so it has no rows of its own")
        else:
            notes.append(f"{kept}{name} has the weights of ours and another threshold, {network.threshold:g}")
    if kept and not notes:
        notes.append(f"{kept}no later step was better in validation")
    return left, notes


def same_weights(model0: torch.nn.Module, model1: torch.nn.Module) -> bool:
    """Whether both have the same tensors, bit by bit."""
    state0, state1 = model0.state_dict(), model1.state_dict()
    return state0.keys() == state1.keys() and all(torch.equal(state0[name], state1[name]) for name in state0)


@dataclass(frozen=True)
class Matchers:
    """All compared matchers. networks: ours first; further: baselines by name; scene: add a row SCENE."""

    networks: Mapping[str, Network]
    device: str
    further: Mapping[str, Callable[[Pair], PairMatches]] = field(default_factory=dict)
    scene: bool = False

    @property
    def thresholds(self) -> Dict[str, float]:
        """Thresholds of the networks, by name."""
        return {name: network.threshold for name, network in self.networks.items()}

    def answers(self, pairs: Sequence[Pair], batch: int) -> List[Dict[str, PairMatches]]:
        """Matches of each pair by matcher, `batch` pairs in one pass; of networks every mutual match (see `above`)."""
        answers: List[Dict[str, PairMatches]] = [{} for _ in pairs]
        for name, network in self.networks.items():
            for by_name, matches in zip(answers, match_batches(network.model, pairs, batch, self.device)):
                by_name[name] = matches
        for by_name, pair in zip(answers, pairs):
            if self.scene:
                ours = self.networks[OURS]
                by_name[SCENE] = scene_answer(pair, by_name[OURS], ours.threshold, scenes.Rules())
            by_name.update(match_baselines(pair))
            by_name.update({name: match(pair) for name, match in self.further.items()})
        return answers

    def above(self, answers: Mapping[str, PairMatches]) -> Dict[str, PairMatches]:
        """The answers, of networks only the matches above their thresholds."""
        limits = self.thresholds
        return {name: found.above(limits[name]) if name in limits else found for name, found in answers.items()}


def scene_answer(pair: Pair, answer: PairMatches, threshold: float, rules: scenes.Rules) -> PairMatches:
    """Matches of a pair of a scene: those that agree with its geometry; none where the pair is not accepted."""
    none = Described(np.empty((0, 128), np.float32), np.empty(0, np.int64))  # there is no guided matching here
    side0, side1 = (scenes.Side(positions(side).astype(np.float64), none) for side in (pair.records0, pair.records1))
    index0 = np.flatnonzero(answer.matches0 >= 0)
    matches = np.stack([index0, answer.matches0[index0]], axis=1)
    unguided = replace(rules, guided=False)
    accepted = scenes.filled(matches, answer.scores0[index0], threshold, (side0, side1), unguided)
    matches0, scores0 = np.full_like(answer.matches0, -1), np.zeros_like(answer.scores0)
    index0, index1 = accepted.matches.T
    matches0[index0], scores0[index0] = index1, accepted.scores
    return PairMatches(matches0, scores0)


def descriptor_distances(records0: np.ndarray, records1: np.ndarray) -> np.ndarray:
    """(M, N) float32 of records (M,), (N,): Euclidean of RootSIFT or unit vectors; Hamming of binary descriptors."""
    kind, dim = kind_of(records0.dtype)
    both = [descriptors_of(records) for records in (records0, records1)]
    if kind == "binary":
        signs = [2.0 * np.unpackbits(bits, axis=1).astype(np.float32) - 1.0 for bits in both]
        return (dim - signs[0] @ signs[1].T) / 2.0
    if kind == "sift":
        unit = [root_sift_of(vectors) for vectors in both]
    else:
        unit = [vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12) for vectors in both]
    return np.sqrt(np.maximum(2.0 - 2.0 * unit[0] @ unit[1].T, 0.0))


def match_neighbours(distance: np.ndarray, mutual: bool, ratio: float = 1.0) -> PairMatches:
    """Nearest neighbours in a (M, N) distance matrix, each with score 1.

    mutual: only where each is the other's nearest. ratio: only where the nearest is closer than `ratio` times the
    second nearest (Lowe 2004), never with a single keypoint in image 1; 1: no ratio test.
    """
    count0, count1 = distance.shape
    if count0 == 0 or count1 == 0:
        return PairMatches(np.full(count0, -1, np.int64), np.zeros(count0, np.float32))
    nearest = distance.argmin(axis=1)
    keep = np.ones(count0, bool)
    if mutual:
        keep &= distance.argmin(axis=0)[nearest] == np.arange(count0)
    if ratio < 1.0:
        second = np.partition(distance, 1, axis=1)[:, 1] if count1 > 1 else np.zeros(count0, np.float32)
        keep &= distance[np.arange(count0), nearest] < ratio * second
    return PairMatches(np.where(keep, nearest, -1).astype(np.int64), keep.astype(np.float32))


def match_baselines(pair: Pair, ratio: float = RATIO) -> Dict[str, PairMatches]:
    """All nearest-neighbour matchers on one pair, by name."""
    distance = descriptor_distances(pair.records0, pair.records1)
    return {
        "nn": match_neighbours(distance, mutual=False),
        "mutual_nn": match_neighbours(distance, mutual=True),
        "ratio_test": match_neighbours(distance, mutual=True, ratio=ratio),
    }


def match_batches(model: torch.nn.Module, pairs: Sequence[Pair], size: int, device: str) -> Iterator[PairMatches]:
    """All mutual matches of a network, `size` consecutive pairs in one batch. Equal batches give equal bits."""
    for start in range(0, len(pairs), size):
        yield from match_pairs(model, pairs[start : start + size], device)
