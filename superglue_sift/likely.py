"""Which keypoints of a pair the network sees, of more than it could match in a short time.

A match needs its keypoint in both images, and which keypoints are in both depends on the other
image, above all on its scale. So they are chosen for each pair: the keypoints that the ratio test
(Lowe 2004, section 7.1) matches at a generous limit, and of the others those of highest rank. With
1,024 of 4,096 keypoints the network finds 1.7 to 2 times the right matches of the 1,024 of
highest rank (docs/results.md).
"""

from __future__ import annotations

from typing import List, Optional, Sequence

import numpy as np

from superglue_sift import classical, sift

# Of an image, keypoints to choose from, by rank, for each that is chosen. To choose 1,024 of 4,096
# takes a quarter of the network's time.
POOL = 4
# Of the ratio of distances. At 1 the network only sees keypoints with something similar in the
# other image, and finds 20 times as many matches in photographs with nothing in common.
RATIO = 0.95


def choose(
    records: Sequence[np.ndarray], most: int, found: Optional[classical.Matches] = None
) -> List[np.ndarray]:
    """Indices (m,) and (n,), ascending, of the keypoints of both images that the network sees, at
    most `most` each.

    records: of both images, of one dtype. All keypoints are chosen if neither image has more.
    found: matches of all keypoints by the ratio test at RATIO; None: of those of highest rank,
    computed here.
    """
    if max(map(len, records)) <= most:
        return [np.arange(len(each)) for each in records]
    orders = [np.argsort(-sift.rank(each), kind="stable") for each in records]
    if found is None:
        pools = [order[: POOL * most] for order in orders]
        one, other = (each[pool] for each, pool in zip(records, pools))
        found = classical.ratio_matches(one, other, RATIO)
        ends = [pool[index] for pool, index in zip(pools, found.matches.T)]
        found = found._replace(matches=np.stack(ends, axis=1))
    found = found.above(1.0 - RATIO)
    surest = found.matches[np.argsort(-found.scores, kind="stable")[:most]]
    chosen = []
    for order, likely in zip(orders, surest.T):
        others = order[~np.isin(order, likely)]
        chosen.append(np.sort(np.concatenate([likely, others])[:most]))
    return chosen
