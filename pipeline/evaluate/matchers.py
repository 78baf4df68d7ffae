"""Match the evaluated pairs by networks, by nearest neighbours, and by functions of the user.

A network is a `Matcher` of the library, so that its matches are those that a user gets. All
matchers get the same keypoints.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence

import numpy as np

from pipeline.errors import RequestError
from pipeline.evaluate.pairs import LabeledPair
from superglue_sift.features import nearest
from superglue_sift.features.features import Features
from superglue_sift.matcher import Matcher
from superglue_sift.matches import Matches
from superglue_sift.network.batch import FeaturePair
from superglue_sift.network.weights import load_model_file

OURS = "superglue"
SHIPPED = "shipped_weights"
RATIO_TEST = "ratio_test"
RATIO_THRESHOLD = 1.0 - nearest.RATIO  # Smallest confidence of the ratio test
BASELINES = ("nn", "mutual_nn", RATIO_TEST)
MATCHERS = (OURS, *BASELINES)  # Every table has these matchers, in this order
BOUND = "true_matches"  # No matcher but the true matches, the upper bound with these keypoints
NO_THRESHOLD = -1.0  # A threshold that every confidence exceeds
MatchesByMatcher = Dict[str, Matches]  # The matches of each matcher on one pair, by its name


class Network(NamedTuple):
    """A trained network.

    Attributes:
        matcher: the `Matcher` of the library, with its settings.
        file: the file from which it was loaded.
        info: the description that is stored in the file.
    """

    matcher: Matcher
    file: Path = Path()
    info: Mapping[str, Any] = MappingProxyType({})

    @property
    def threshold(self) -> float:
        """Return the confidence above which a match counts.

        With `scene`, the matcher has dropped all other matches itself.
        """
        return self.matcher.threshold if self.matcher.rules is None else NO_THRESHOLD


def load_network(file: Path, device: str, **settings: Any) -> Network:
    """Load a model file for evaluation.

    Args:
        file: a trained model or any checkpoint.
        device: where the network runs: "auto", "cpu", "cuda" or "cuda:N".
        settings: further arguments of `Matcher.load`.

    Raises:
        RequestError: If the file cannot be read, or if a setting is wrong.
    """
    matcher = Matcher.load(file, device, **settings)
    return Network(matcher, file, load_model_file(file)[1])


class MatcherSet:
    """All compared matchers: networks, baselines and functions of the user.

    Args:
        networks: the networks by name, the evaluated one first.
        functions: the user's matchers by name, from `load_matcher_function`.
    """

    def __init__(
        self,
        networks: Mapping[str, Network],
        functions: Mapping[str, Callable[[FeaturePair], Matches]] = MappingProxyType({}),
    ):
        self.networks = networks
        self.functions = functions
        self.evaluated = networks[OURS].matcher  # Its extractor finds the keypoints for all
        # Above this confidence a match counts. The other matchers have no threshold.
        thresholds = {name: network.threshold for name, network in networks.items()}
        self.thresholds = {**thresholds, RATIO_TEST: RATIO_THRESHOLD}

    def extract(self, image: np.ndarray) -> Features:
        """Extract the features of gray pixels (H, W) uint8, which all matchers get."""
        return self.evaluated.extract(image)

    def match(self, labeled_pairs: Sequence[LabeledPair], batch: int) -> List[MatchesByMatcher]:
        """Match each pair by each matcher, and return all matches, whatever their confidence.

        Args:
            labeled_pairs: the pairs, whose ground truth is not used.
            batch: number of pairs in one pass of a network. Equal batches give equal bits.

        Returns:
            The matches of each matcher, for each pair.
        """
        results: List[MatchesByMatcher] = [{} for _ in labeled_pairs]
        for name, network in self.networks.items():
            for start in range(0, len(labeled_pairs), batch):
                part = slice(start, start + batch)
                features = [labeled_pair.features for labeled_pair in labeled_pairs[part]]
                network_matches = network.matcher.match_features(features)
                for matches_by_matcher, (matches, _) in zip(results[part], network_matches):
                    matches_by_matcher[name] = matches
        # Run the baselines and the user's functions on one pair after the other.
        for matches_by_matcher, labeled_pair in zip(results, labeled_pairs):
            pair = labeled_pair.pair
            matches_by_matcher.update(match_baselines(pair))
            matches_by_matcher.update((name, match(pair)) for name, match in self.functions.items())
        return results

    def apply_thresholds(self, matches_by_matcher: Mapping[str, Matches]) -> MatchesByMatcher:
        """Drop the matches that do not count, because they are below the threshold of a matcher."""
        return {
            name: matches.above(self.thresholds.get(name, NO_THRESHOLD))
            for name, matches in matches_by_matcher.items()
        }


def load_matcher_function(name: str) -> Callable[[FeaturePair], Matches]:
    """Import a matching function of the user, which is named as `module:function`.

    The user's function gets the Features of both images. It returns two arrays (M,): the index in
    image 1 of the match of each of the M keypoints of image 0 (-1 without a match), and the
    confidence of this match from 0 to 1.

    Returns:
        A function from a pair to its matches. It raises RequestError if the user's function returns
        anything else.

    Raises:
        RequestError: If there is no such function.
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's code may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RequestError(f"--also {name}: {reason}") from error

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
    """Match the nearest neighbours by descriptor. Return the matches of each baseline by its name.

    The confidence of a match is 1 - ratio of distances. The ratio test has all mutual matches here.
    Its threshold selects those that count, as the threshold of a network does.
    """
    # All three baselines share one product of the descriptors.
    neighbours, is_mutual = nearest.match_nearest(*map(nearest.unit_descriptors, pair))
    mutual = neighbours.only(is_mutual)
    return {"nn": neighbours, "mutual_nn": mutual, RATIO_TEST: mutual}
