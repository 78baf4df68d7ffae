"""Match the evaluated pairs by networks, by nearest neighbors, and by functions of the user.

A network is a `Matcher` of the library, so that its matches are those that a user gets. All
matchers get the same keypoints.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping

import numpy as np
import torch

from pipeline.errors import RequestError
from pipeline.evaluate.pairs import LabeledPair
from superglue_sift.features import extractors, nearest
from superglue_sift.matcher import Matcher
from superglue_sift.matches import Matches
from superglue_sift.network.batch import FeaturePair

OURS = "superglue"
SHIPPED = "shipped_weights"
RATIO_TEST = "ratio_test"
RATIO_THRESHOLD = 1.0 - nearest.RATIO  # Smallest confidence of the ratio test
BASELINES = ("nn", "mutual_nn", RATIO_TEST)
MATCHERS = (OURS, *BASELINES)  # Every table has these matchers, in this order
BOUND = "true_matches"  # No matcher but the true matches, the upper bound with these keypoints
NO_THRESHOLD = -1.0  # A threshold that every confidence exceeds
MatchesByMatcher = Dict[str, Matches]  # The matches of each matcher on one pair, by its name
MatchFunction = Callable[[FeaturePair], Matches]  # A matcher of the user


def load_networks(
    files: Mapping[str, Path],
    device: str,
    options: Mapping[str, Any],
    extractor: str,
    notes: List[str],
) -> Dict[str, Matcher]:
    """Load the networks, and return them by name.

    A network is left out if it matches keypoints of another extractor than the evaluated one, or
    if it has the same weights.

    Args:
        files: the model files by name, the evaluated one first.
        device: where the networks run: "auto", "cpu", "cuda" or "cuda:N".
        options: further arguments of `Matcher.load`.
        extractor: the extractor that may be run, the key `keypoints.extractor`.
        notes: the notes of the report, to which lines are added.

    Raises:
        RequestError: If a file cannot be read, if an option is wrong, or if the evaluated network
            matches keypoints of another extractor than SIFT and `extractor`.
    """
    networks: Dict[str, Matcher] = {}
    for name, file in files.items():
        network = Matcher.load(file, device, **options)
        ours = networks.get(OURS, network)
        needed = network.model.config.extractor
        # All rows of a table have the same keypoints, those of the evaluated network.
        if needed != ours.model.config.extractor:
            notes.append(f"{name} is left out: it matches keypoints of {needed}.")
        elif network is not ours and has_equal_weights(network, ours):
            notes.append(f"{name} is left out: it has the weights of the model.")
        else:
            networks[name] = network
    # A model file may name any function, so it is run only if the user names it, too.
    ours = networks[OURS]
    needed = ours.model.config.extractor
    if ours.extractor is None:
        if extractor != needed:
            raise RequestError(
                f"{files[OURS]}: matches keypoints of {needed}, code that is run only when asked"
                f" for: set keypoints.extractor: {needed}"
            )
        networks[OURS] = dataclasses.replace(ours, extractor=extractors.load_extractor(needed))
    # Threads match several pairs at a time.
    return {name: network.use_one_core_per_pair() for name, network in networks.items()}


def has_equal_weights(network: Matcher, other: Matcher) -> bool:
    """Return whether two networks have the same configuration and the same weights."""
    tensors = network.model.state_dict()
    others = other.model.state_dict()
    return network.model.config == other.model.config and all(
        torch.equal(tensor, others[name]) for name, tensor in tensors.items()
    )


class MatcherSet:
    """All compared matchers: networks, baselines and functions of the user.

    Args:
        networks: the networks by name, the evaluated one first.
        functions: the user's matchers by name, from `load_matcher_function`.
    """

    def __init__(
        self, networks: Mapping[str, Matcher], functions: Mapping[str, MatchFunction] = {}
    ):
        self.networks = networks
        self.functions = functions
        self.evaluated = networks[OURS]  # Its extractor finds the keypoints for all
        # Above this confidence a match counts. The other matchers have no threshold. With the rules
        # of a scene, every match that a network returns counts.
        self.thresholds = {RATIO_TEST: RATIO_THRESHOLD}
        for name, network in networks.items():
            self.thresholds[name] = network.threshold if network.rules is None else NO_THRESHOLD
        self._turn = threading.Lock()

    def match(self, labeled_pair: LabeledPair) -> MatchesByMatcher:
        """Return the matches of each matcher, before its threshold.

        With the rules of a scene, a network returns only the matches that it accepts.

        Threads may call this. Functions of the user run one after the other.

        Args:
            labeled_pair: the pair, whose ground truth is not used.
        """
        matches_by_matcher = {}
        for name, network in self.networks.items():
            ((matches, _),) = network.match_features([labeled_pair.features])
            matches_by_matcher[name] = matches
        matches_by_matcher.update(match_baselines(labeled_pair.oriented))
        with self._turn:
            for name, function in self.functions.items():
                matches_by_matcher[name] = function(labeled_pair.oriented)
        return matches_by_matcher


def load_matcher_function(name: str) -> MatchFunction:
    """Import a matching function of the user, which is named as `module:function`.

    The user's function gets the Features of both images. It returns two arrays (M,): the index in
    image 1 of the match of each of the M keypoints of image 0 (-1 without a match), and the
    confidence of this match from 0 to 1.

    Returns:
        A function from a pair to its matches. It raises RequestError if the user's function returns
        anything else.
    """
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)

    def match(pair: FeaturePair) -> Matches:
        """Call the user's function on a pair, and check what it returns."""
        count0, count1 = (len(features.keypoints) for features in pair)
        if not count0 or not count1:
            return Matches.none()
        # Check both arrays (M,), since they come from the user's code.
        arrays = function(*pair)
        is_pair = isinstance(arrays, (tuple, list)) and len(arrays) == 2
        matches0, scores0 = map(np.asarray, arrays if is_pair else ((), ()))
        are_indices = matches0.dtype.kind in "iu" and matches0.shape == scores0.shape == (count0,)
        if not are_indices or matches0.max() >= count1 or not (abs(scores0 - 0.5) <= 0.5).all():
            rule = f"a whole number below {count1} and a confidence from 0 to 1 for each keypoint"
            raise RequestError(f"--also {name}: must give {rule}")
        return Matches.from_dense(matches0, scores0)

    return match


def match_baselines(pair: FeaturePair) -> Dict[str, Matches]:
    """Match the nearest neighbors by descriptor. Return the matches of each baseline by its name.

    The confidence of a match is 1 - ratio of distances. The ratio test has all mutual matches here.
    Its threshold selects those that count, as the threshold of a network does.
    """
    # All three baselines share one product of the descriptors.
    neighbors, is_mutual = nearest.match_nearest(*map(nearest.compute_unit_descriptors, pair))
    mutual = neighbors.select(is_mutual)
    return {"nn": neighbors, "mutual_nn": mutual, RATIO_TEST: mutual}
