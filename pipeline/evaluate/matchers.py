"""The compared matchers: trained networks, and nearest neighbours by descriptor, on the same
keypoints.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np

from pipeline.errors import RequestError
from superglue_sift.features import nearest
from superglue_sift.features.features import Features
from superglue_sift.features.sift import positions
from superglue_sift.geometry import verification
from superglue_sift.geometry.guided_matching import add_guided_matches
from superglue_sift.matches import Matches
from superglue_sift.network.batch import Pair
from superglue_sift.network.superglue import SuperGlue, match_pairs
from superglue_sift.network.weights import fuse_for_inference, load_model, match_threshold

OURS = "superglue"
SINKHORN_ITERATIONS = 100  # of the paper, at inference
RATIO_TEST = "ratio_test"
RATIO_THRESHOLD = 1.0 - nearest.RATIO  # of its confidence
BASELINES = ("nn", "mutual_nn", RATIO_TEST)
MATCHERS = (OURS, *BASELINES)  # always compared, in the order of every table
BOUND = "true_matches"  # no matcher: the true matches, an upper bound with these keypoints
SCENE = "superglue_scene"  # ours on pairs that the limits of scenes accept, no match on others
UNRANKED = (BOUND, SCENE)  # rows that are not baselines


class Network(NamedTuple):
    """A trained network. threshold: confidence that its matches exceed. info: the description
    stored with it.
    """

    model: SuperGlue
    threshold: float
    file: Path = Path()
    info: Mapping[str, Any] = MappingProxyType({})


def load_network(file: Path, device: str, threshold: float = 0.0) -> Network:
    """Load a model file for evaluation. If `threshold` is 0, take the model's own. Raises
    RequestError.
    """
    model, info = load_model(file, device, SINKHORN_ITERATIONS)
    return Network(fuse_for_inference(model), threshold or match_threshold(info), file, info)


class Matchers:
    """All compared matchers.

    networks: by name, ours first. further: other matchers by name. scene: add a row SCENE.
    network_keypoints: number of keypoints of an image that a network sees; if None, it sees all.
    """

    def __init__(
        self,
        networks: Mapping[str, Network],
        device: str,
        further: Mapping[str, Callable[[Pair], Matches]] = MappingProxyType({}),
        scene: bool = False,
        network_keypoints: Optional[int] = None,
    ):
        self.networks = networks
        self.device = device
        self.further = further
        self.scene = scene
        self.network_keypoints = network_keypoints
        # Smallest confidences by name. `answers` gives all mutual matches of these matchers.
        own = {name: network.threshold for name, network in networks.items()}
        self.thresholds = {**own, RATIO_TEST: RATIO_THRESHOLD}

    def answers(self, pairs: Sequence[Pair], batch: int) -> List[Dict[str, Matches]]:
        """Match each pair by each matcher, `batch` pairs in one pass of a network. Equal batches
        give equal bits.
        """
        answers: List[Dict[str, Matches]] = [{} for _ in pairs]
        most = self.network_keypoints or sys.maxsize
        mutual = [nearest.ratio_matches(*pair[:2], ratio=1.0) for pair in pairs]
        selected = [
            nearest.select_keypoints(*pair[:2], most, near) for pair, near in zip(pairs, mutual)
        ]
        for name, network in self.networks.items():
            parts = [slice(start, start + batch) for start in range(0, len(pairs), batch)]
            found = [
                match_pairs(network.model, pairs[part], self.device, selected[part])
                for part in parts
            ]
            every = itertools.chain.from_iterable(found)
            for by_name, pair, own, near, seen in zip(answers, pairs, every, mutual, selected):
                points = positions(pair.records0), positions(pair.records1)
                by_name[name] = add_guided_matches(own, near, seen, points, network.threshold)
                if self.scene and name == OURS:
                    by_name[SCENE] = match_scene(pair, own, near, network.threshold)
        for by_name, pair in zip(answers, pairs):
            by_name.update(match_baselines(pair))
            by_name.update((name, match(pair)) for name, match in self.further.items())
        return answers

    def above(self, answers: Mapping[str, Matches]) -> Dict[str, Matches]:
        """Drop the matches below the threshold of each matcher that has one."""
        limits = self.thresholds
        return {name: found.above(limits.get(name, -1.0)) for name, found in answers.items()}


def load_function(name: str) -> Callable[[Pair], Matches]:
    """Load a matcher of the user's, `module:function`. Raises RequestError if there is none.

    The function gets the Features of both images, and returns indices in image 1, -1 without a
    match, and confidences from 0 to 1, (M,) each.
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # any: it is the user's code
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RequestError(f"--also {name}: {reason}") from error

    def match(pair: Pair) -> Matches:
        count0 = len(pair.records0)
        count1 = len(pair.records1)
        if not count0 or not count1:
            return Matches.none()
        sides = Features(pair.records0, pair.size0), Features(pair.records1, pair.size1)
        matches0, scores0 = map(np.asarray, function(*sides))
        whole = matches0.dtype.kind in "iu" and matches0.shape == scores0.shape == (count0,)
        if not whole or matches0.max() >= count1:
            rule = f"a whole number below {count1} and a confidence for each keypoint"
            raise RequestError(f"--also {name}: must give {rule}")
        if not ((scores0 >= 0) & (scores0 <= 1))[matches0 >= 0].all():
            raise RequestError(f"--also {name}: gives confidences that are not from 0 to 1")
        return Matches.from_dense(matches0, scores0)

    return match


def match_scene(pair: Pair, found: Matches, mutual: Matches, threshold: float) -> Matches:
    """Matches of a pair of a scene, as `Matcher` finds them; none where it is not accepted.

    found: all matches of the network; mutual: mutual nearest neighbours of all keypoints.
    """
    views = [Features(pair.records0, pair.size0), Features(pair.records1, pair.size1)]
    settings = threshold, 0, verification.ACCEPT
    return verification.match_one_place(views, found, mutual, *settings)[0]


def match_baselines(pair: Pair) -> Dict[str, Matches]:
    """Match nearest neighbours by descriptor, by name, with the confidence 1 - ratio of distances.

    The ratio test gets all mutual ones: its threshold of the confidence chooses, as a network's
    does.
    """
    found, mutual = nearest.neighbours(*map(nearest.unit_rows, pair[:2]))
    return {"nn": found, "mutual_nn": found.only(mutual), RATIO_TEST: found.only(mutual)}
