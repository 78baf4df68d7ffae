"""The matchers that are compared, on the same keypoints: trained networks, and nearest neighbours by descriptor."""

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
SINKHORN_ITERATIONS = 100  # the paper's, at inference
BASELINES = ("nn", "mutual_nn", "ratio_test")
MATCHERS = (OURS, *BASELINES)  # always there, in the order of every table
BOUND = "true_matches"  # no matcher: the truth in place of an answer, as far as the keypoints' positions go
SCENE = "superglue_scene"  # ours, of pairs that the limits of scenes accept; nothing of the others
UNRANKED = (BOUND, SCENE)  # rows that are no baselines


@dataclass(frozen=True)
class Network:
    """A trained network. threshold: its matches have a higher confidence; info: the description stored with it."""

    model: SuperGlue
    threshold: float
    file: Path = Path()
    info: Mapping[str, Any] = field(default_factory=dict)


def load_network(file: Path, device: str, threshold: float = 0.0) -> Network:
    """A model file as it is judged; threshold 0 is the model's own. Raises RequestError."""
    model, info = load_model(file, device, SINKHORN_ITERATIONS)
    return Network(fuse_for_inference(model), threshold or match_threshold(info), file, info)


def without_copies(networks: Mapping[str, Network]) -> Tuple[Dict[str, Network], List[str]]:
    """The networks without those that are ours once more, and a line for each; one says it of a training that kept
    the weights it began with.

    A network with our weights and another threshold stays: its matches are others.
    """
    ours, left, said = networks[OURS], dict(networks), []
    kept = "Training kept the weights it began with: " if ours.info.get("step") == 0 else ""
    for name, network in networks.items():
        if name == OURS or not same_weights(ours.model, network.model):
            continue
        if network.threshold == ours.threshold:
            del left[name]
            said.append(f"{kept}{name} is the same model as ours, so it has no rows of its own")
        else:
            said.append(f"{kept}{name} has the weights of ours and another threshold, {network.threshold:g}")
    if kept and not said:
        said.append(f"{kept}no later step was better in validation")
    return left, said


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Do both hold the same tensors, bit by bit?"""
    own, theirs = one.state_dict(), other.state_dict()
    return own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)


@dataclass(frozen=True)
class Matchers:
    """All that are compared. networks: ours first; further: baselines by name.

    scene: is there a row SCENE too?
    """

    networks: Mapping[str, Network]
    device: str
    further: Mapping[str, Callable[[Pair], PairMatches]] = field(default_factory=dict)
    scene: bool = False

    @property
    def thresholds(self) -> Dict[str, float]:
        """Those of the networks, by name."""
        return {name: network.threshold for name, network in self.networks.items()}

    def answers(self, pairs: Sequence[Pair], batch: int) -> List[Dict[str, PairMatches]]:
        """What each says of each pair, `batch` pairs in one pass; networks with every mutual match (see `above`)."""
        found: List[Dict[str, PairMatches]] = [{} for _ in pairs]
        for name, network in self.networks.items():
            for own, answer in zip(found, match_batches(network.model, pairs, batch, self.device)):
                own[name] = answer
        for own, pair in zip(found, pairs):
            if self.scene:
                ours = self.networks[OURS]
                own[SCENE] = scene_answer(pair, own[OURS], ours.threshold, scenes.Rules.of_model(ours.info))
            own.update(match_baselines(pair))
            own.update({name: match(pair) for name, match in self.further.items()})
        return found

    def above(self, answers: Mapping[str, PairMatches]) -> Dict[str, PairMatches]:
        """The answers without those matches of a network that are not above its threshold."""
        least = self.thresholds
        return {name: found.above(least[name]) if name in least else found for name, found in answers.items()}


def filled(pair: Pair, answer: PairMatches, threshold: float, rules: scenes.Rules) -> scenes.Filled:
    """`scenes.filled` of a network's answer, with the network's own matches alone."""
    nothing = Described(np.empty((0, 128), np.float32), np.empty(0, np.int64))
    side0, side1 = (scenes.Side(positions(own).astype(np.float64), nothing) for own in (pair.records0, pair.records1))
    index0 = np.flatnonzero(answer.matches0 >= 0)
    matches = np.stack([index0, answer.matches0[index0]], axis=1)
    alone = replace(rules, guided=False)
    return scenes.filled(matches, answer.scores0[index0], threshold, (side0, side1), alone)


def scene_answer(pair: Pair, answer: PairMatches, threshold: float, rules: scenes.Rules) -> PairMatches:
    """A network's matches as those of a scene: of an accepted pair what agrees with its geometry, else nothing."""
    found = filled(pair, answer, threshold, rules)
    matches0, scores0 = np.full_like(answer.matches0, -1), np.zeros_like(answer.scores0)
    matches0[found.matches[:, 0]], scores0[found.matches[:, 0]] = found.matches[:, 1], found.scores
    return PairMatches(matches0, scores0)


def descriptor_distances(records0: np.ndarray, records1: np.ndarray) -> np.ndarray:
    """(M, N) float32 of records (M,), (N,): of RootSIFT; Euclidean, of unit vectors; of bits Hamming's."""
    kind, dim = kind_of(records0.dtype)
    both = [descriptors_of(records) for records in (records0, records1)]
    if kind == "binary":
        signs = [2.0 * np.unpackbits(bits, axis=1).astype(np.float32) - 1.0 for bits in both]
        return (dim - signs[0] @ signs[1].T) / 2.0
    if kind == "sift":
        unit = [root_sift_of(own) for own in both]
    else:
        unit = [own / np.maximum(np.linalg.norm(own, axis=1, keepdims=True), 1e-12) for own in both]
    return np.sqrt(np.maximum(2.0 - 2.0 * unit[0] @ unit[1].T, 0.0))


def match_neighbours(distance: np.ndarray, mutual: bool, ratio: float = 1.0) -> PairMatches:
    """Nearest neighbours in a (M, N) distance matrix, each with score 1.

    mutual: only where each is the other's nearest. ratio: only where the nearest is closer than `ratio` times the
    second nearest (Lowe 2004), which one keypoint in image 1 cannot pass; 1: no such test.
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
    """A network's matches, `size` consecutive pairs in one batch: every mutual one. The same batches, the same bits."""
    for start in range(0, len(pairs), size):
        yield from match_pairs(model, pairs[start : start + size], device)
