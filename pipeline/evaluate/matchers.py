"""Match the evaluated pairs by trained networks, and by nearest neighbours of descriptors.

A network is a `Matcher`, so that its matches are those that a user gets. All matchers get the same
keypoints.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence

import numpy as np

from pipeline.errors import RequestError
from pipeline.evaluate.pairs import KnownPair
from superglue_sift.features import nearest
from superglue_sift.features.features import Features
from superglue_sift.matcher import Matcher
from superglue_sift.matches import Matches
from superglue_sift.network.batch import Pair
from superglue_sift.network.weights import load_model_file

OURS = "superglue"
INITIAL = "initial"  # the weights that the evaluated model was trained from
RATIO_TEST = "ratio_test"
RATIO_THRESHOLD = 1.0 - nearest.RATIO  # smallest confidence of the ratio test
BASELINES = ("nn", "mutual_nn", RATIO_TEST)
MATCHERS = (OURS, *BASELINES)  # these matchers are always compared, in the order of every table
BOUND = "true_matches"  # no matcher, but the true matches: an upper bound with these keypoints
ALL = -1.0  # a threshold that every confidence exceeds
MatchesByName = Dict[str, Matches]  # the matches of each matcher on one pair


class Network(NamedTuple):
    """A trained network: a `Matcher` with its settings, and the file that it was loaded from.

    `info` is the description that is stored in the file.
    """

    matcher: Matcher
    file: Path = Path()
    info: Mapping[str, Any] = MappingProxyType({})

    @property
    def threshold(self) -> float:
        """Return the confidence above which a match counts. A scene has dropped the others."""
        return self.matcher.threshold if self.matcher.rules is None else ALL


def load_network(file: Path, device: str, **settings: Any) -> Network:
    """Load a model file for evaluation.

    Args:
        file: a trained model or any checkpoint.
        device: as for `Matcher.load`.
        settings: of `Matcher.load`.

    Raises:
        RequestError: the file cannot be read, or a setting is wrong.
    """
    matcher = Matcher.load(file, device, **settings)
    return Network(matcher, file, load_model_file(file)[1])


class Matchers:
    """All compared matchers.

    Args:
        networks: networks by name, the evaluated one first.
        further: other matchers by name.
    """

    def __init__(
        self,
        networks: Mapping[str, Network],
        further: Mapping[str, Callable[[Pair], Matches]] = MappingProxyType({}),
    ):
        self.networks = networks
        self.further = further
        self.ours = networks[OURS].matcher  # its extractor finds the keypoints of all matchers
        # A match of a matcher counts above this confidence. `match` gives all mutual matches.
        thresholds = {name: network.threshold for name, network in networks.items()}
        self.thresholds = {**thresholds, RATIO_TEST: RATIO_THRESHOLD}

    def extract(self, image: np.ndarray) -> Features:
        """Extract the keypoints of gray pixels (H, W) uint8, which all matchers get."""
        return self.ours.extract(image)

    def match(self, pairs: Sequence[KnownPair], batch: int) -> List[MatchesByName]:
        """Match each pair by each matcher, with `batch` pairs in one pass of a network.

        Equal batches give equal bits. The networks get the features of the pairs.
        """
        by_pair: List[MatchesByName] = [{} for _ in pairs]
        for name, network in self.networks.items():
            for start in range(0, len(pairs), batch):
                part = slice(start, start + batch)
                features = [known.features for known in pairs[part]]
                for by_name, (matches, _) in zip(
                    by_pair[part], network.matcher.match_features(features)
                ):
                    by_name[name] = matches
        # Run the baselines and the user's functions on one pair after the other.
        for by_name, known in zip(by_pair, pairs):
            by_name.update(match_baselines(known.pair))
            by_name.update((name, match(known.pair)) for name, match in self.further.items())
        return by_pair

    def above(self, by_name: Mapping[str, Matches]) -> MatchesByName:
        """Drop the matches below the threshold of each matcher that has a threshold."""
        # All matches of a baseline or of a user's function count, which have no threshold.
        limits = self.thresholds
        return {name: matches.above(limits.get(name, ALL)) for name, matches in by_name.items()}


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
        # Check both arrays (M,), since they come from the user's code.
        views = Features(pair.records0, pair.size0), Features(pair.records1, pair.size1)
        answer = function(*views)
        is_pair = isinstance(answer, (tuple, list)) and len(answer) == 2
        matches0, scores0 = map(np.asarray, answer if is_pair else ((), ()))
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
    # All three share one product of the descriptors.
    neighbours, is_mutual = nearest.neighbours(*map(nearest.unit_rows, pair[:2]))
    mutual = neighbours.only(is_mutual)
    return {"nn": neighbours, "mutual_nn": mutual, RATIO_TEST: mutual}
