"""Match the evaluated pairs by trained networks, and by nearest neighbours of descriptors.

All matchers get the same keypoints.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np

from pipeline.errors import RequestError
from superglue_sift.features import nearest
from superglue_sift.features.features import Features
from superglue_sift.features.sift import positions
from superglue_sift.geometry.verification import add_guided_matches
from superglue_sift.matches import Matches
from superglue_sift.network.batch import Pair
from superglue_sift.network.superglue import SuperGlue, match_pairs
from superglue_sift.network.weights import fuse_for_inference, load_model, match_threshold

OURS = "superglue"
SINKHORN_ITERATIONS = 100  # the paper's number at inference
RATIO_TEST = "ratio_test"
RATIO_THRESHOLD = 1.0 - nearest.RATIO  # smallest confidence of the ratio test
BASELINES = ("nn", "mutual_nn", RATIO_TEST)
MATCHERS = (OURS, *BASELINES)  # these matchers are always compared, in the order of every table
BOUND = "true_matches"  # no matcher, but the true matches: an upper bound with these keypoints


class Network(NamedTuple):
    """A trained network.

    Its matches have a confidence above `threshold`. `info` is the description stored with it.
    """

    model: SuperGlue
    threshold: float
    file: Path = Path()
    info: Mapping[str, Any] = MappingProxyType({})


def load_network(file: Path, device: str, threshold: float = 0.0) -> Network:
    """Load a model file for evaluation. If `threshold` is 0, take the model's own threshold.

    Raises RequestError if the file cannot be read.
    """
    model, info = load_model(file, device, SINKHORN_ITERATIONS)
    return Network(fuse_for_inference(model), threshold or match_threshold(info), file, info)


class Matchers:
    """All compared matchers.

    Args:
        networks: networks by name, the evaluated one first.
        further: other matchers by name.
        network_keypoints: number of keypoints of an image that a network gets. If None, it gets
            all.
    """

    def __init__(
        self,
        networks: Mapping[str, Network],
        device: str,
        further: Mapping[str, Callable[[Pair], Matches]] = MappingProxyType({}),
        network_keypoints: Optional[int] = None,
    ):
        self.networks = networks
        self.device = device
        self.further = further
        self.network_keypoints = network_keypoints
        # A match of a matcher counts above this confidence. `answers` gives all mutual matches.
        own = {name: network.threshold for name, network in networks.items()}
        self.thresholds = {**own, RATIO_TEST: RATIO_THRESHOLD}

    def answers(self, pairs: Sequence[Pair], batch: int) -> List[Dict[str, Matches]]:
        """Match each pair by each matcher, with `batch` pairs in one pass of a network.

        Equal batches give equal bits.
        """
        answers: List[Dict[str, Matches]] = [{} for _ in pairs]
        # Keypoints that no network gets are matched as mutual neighbours, which the ratio 1 keeps
        most = self.network_keypoints or sys.maxsize
        mutual = [
            nearest.ratio_matches(*pair[:2], ratio=1.0)
            if self.network_keypoints
            else Matches.none()
            for pair in pairs
        ]
        selected = [
            nearest.select_keypoints(*pair[:2], most, near) for pair, near in zip(pairs, mutual)
        ]
        for name, network in self.networks.items():
            # run the network on batches of pairs
            found: List[Matches] = []
            for start in range(0, len(pairs), batch):
                part = slice(start, start + batch)
                found += match_pairs(network.model, pairs[part], self.device, selected[part])
            for by_name, pair, own, near, chosen in zip(answers, pairs, found, mutual, selected):
                points = positions(pair.records0), positions(pair.records1)
                by_name[name] = add_guided_matches(own, near, chosen, points, network.threshold)
        # run the baselines and the user's functions on one pair after the other
        for by_name, pair in zip(answers, pairs):
            by_name.update(match_baselines(pair))
            by_name.update((name, match(pair)) for name, match in self.further.items())
        return answers

    def above(self, answers: Mapping[str, Matches]) -> Dict[str, Matches]:
        """Drop the matches below the threshold of each matcher that has a threshold."""
        # all matches of a baseline or of a user's function count, which have no threshold
        limits = self.thresholds
        return {name: found.above(limits.get(name, -1.0)) for name, found in answers.items()}


def load_function(name: str) -> Callable[[Pair], Matches]:
    """Load a matcher of the user, given as `module:function`.

    The function gets the Features of both images. It returns, for each of the M keypoints of image
    0, the index of its match in image 1 (-1 without a match) and a confidence from 0 to 1, (M,)
    each. Raises RequestError if there is no such function.
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's code may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RequestError(f"--also {name}: {reason}") from error

    def match(pair: Pair) -> Matches:
        count0 = len(pair.records0)
        count1 = len(pair.records1)
        if not count0 or not count1:
            return Matches.none()
        # check both arrays (M,), since they come from the user's code
        views = Features(pair.records0, pair.size0), Features(pair.records1, pair.size1)
        given = function(*views)
        is_pair = isinstance(given, (tuple, list)) and len(given) == 2
        matches0, scores0 = map(np.asarray, given if is_pair else ((), ()))
        whole = matches0.dtype.kind in "iu" and matches0.shape == scores0.shape == (count0,)
        if not whole or matches0.max() >= count1 or not (abs(scores0 - 0.5) <= 0.5).all():
            rule = f"a whole number below {count1} and a confidence from 0 to 1 for each keypoint"
            raise RequestError(f"--also {name}: must give {rule}")
        return Matches.from_dense(matches0, scores0)

    return match


def match_baselines(pair: Pair) -> Dict[str, Matches]:
    """Match nearest neighbours by descriptor. Return the matches of each baseline by its name.

    The confidence is 1 - ratio of distances. The ratio test gets all mutual matches: its threshold
    of the confidence selects matches, as the threshold of a network does.
    """
    # all three share one product of the descriptors
    found, mutual = nearest.neighbours(*map(nearest.unit_rows, pair[:2]))
    return {"nn": found, "mutual_nn": found.only(mutual), RATIO_TEST: found.only(mutual)}
