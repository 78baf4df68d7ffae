"""Which keypoints of a pair the network sees, of more than it could match in a short time, and
matches of the others.

A match needs its keypoint in both images, and which keypoints are in both depends on the other
image, above all on its scale. So they are chosen for each pair: the keypoints that the ratio test
(Lowe 2004, section 7.1) matches at a generous limit, and of the others those of highest rank.
Mutual nearest neighbours that the network did not see are matches, too, if its matches around them
confirm them (docs/results.md).
"""

from __future__ import annotations

from typing import List, NamedTuple, Sequence

import numpy as np

from superglue_sift.features import sift
from superglue_sift.features.nearest import Matches, ratio_matches
from superglue_sift.geometry.local_maps import confirm
from superglue_sift.network.batch import Pair
from superglue_sift.network.pair_matches import PairMatches, match_pairs
from superglue_sift.network.superglue import SuperGlue

# Of the ratio of distances. At 1 the network only sees keypoints with something similar in the
# other image, and finds 20 times as many matches in photographs with nothing in common.
RATIO = 0.95


class Likely(NamedTuple):
    """A pair of which the network saw the likely keypoints.

    found: its matches, whatever their scores. chosen: (m,) and (n,), keypoints that it saw. mutual:
    mutual nearest neighbours of all keypoints.
    """

    pair: Pair
    found: PairMatches
    chosen: Sequence[np.ndarray]
    mutual: Matches

    def extend(self, threshold: float) -> PairMatches:
        """The network's matches, and those that its matches of scores above `threshold` confirm."""
        matches0, scores0 = (values.copy() for values in self.found)
        index0 = np.flatnonzero(scores0 > threshold)
        known = Matches(np.stack([index0, matches0[index0]], axis=1), scores0[index0])
        ends0, ends1 = self.mutual.matches.T
        seen = np.isin(ends0, self.chosen[0]) & np.isin(ends1, self.chosen[1])
        points = sift.positions(self.pair.records0), sift.positions(self.pair.records1)
        more = confirm(known, self.mutual.only(~seen), points)
        added0, added1 = more.matches.T
        lost = np.isin(matches0, added1)  # which the network does not believe
        matches0[lost] = -1
        scores0[lost] = 0.0
        matches0[added0] = added1
        scores0[added0] = more.scores
        return PairMatches(matches0, scores0)


def match_likely(model: SuperGlue, pairs: Sequence[Pair], device: str, most: int) -> List[Likely]:
    """Match each pair by the network, which sees at most `most` keypoints of an image."""
    mutual = [ratio_matches(pair.records0, pair.records1, ratio=1.0) for pair in pairs]
    chosen = [choose(pair[:2], most, near) for pair, near in zip(pairs, mutual)]
    found = match_pairs(model, pairs, device, chosen)
    return [Likely(*each) for each in zip(pairs, found, chosen, mutual)]


def choose(records: Sequence[np.ndarray], most: int, mutual: Matches) -> List[np.ndarray]:
    """Indices (m,) and (n,), ascending, of the keypoints of both images that the network sees, at
    most `most` each.

    records: of both images. mutual: their mutual nearest neighbours.
    """
    if max(map(len, records)) <= most:
        return [np.arange(len(each)) for each in records]
    likely = mutual.above(1.0 - RATIO)
    surest = likely.matches[np.argsort(-likely.scores, kind="stable")[:most]]
    chosen = []
    for each, ends in zip(records, surest.T):
        order = np.argsort(-sift.rank(each), kind="stable")
        others = order[~np.isin(order, ends)]
        chosen.append(np.sort(np.concatenate([ends, others])[:most]))
    return chosen
