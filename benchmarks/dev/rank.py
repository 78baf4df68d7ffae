"""How `sift.rank` was chosen: the right matches that are left when both views keep few keypoints.

    python -m benchmarks.dev.rank data/keypoints/val

The store must hold all keypoints (`keypoints.max_keypoints: 16384`). A rank is response times
scale^power. Right matches are the true ones that are mutual nearest neighbours among all keypoints.
Prints the part of them whose both keypoints are kept, in percent, for each power.
"""

from __future__ import annotations

import argparse
import itertools
from typing import List, Optional

import numpy as np

from pipeline import errors
from pipeline.features.store import Store
from pipeline.train.pairs.loader import load_batch
from pipeline.train.pairs.order import NO_AUGMENTATION, Sample
from superglue_sift.batch import choose_orientations
from superglue_sift.classical import neighbours, unit_rows
from superglue_sift.sift import KEYPOINT
from superglue_sift.truth import UNMATCHED, ground_truth

POWERS = (0.0, 0.5, 0.75, 1.0, 1.25, 1.5)
MOST = 16384  # keypoints of a view, as the schema allows


def main(argv: Optional[List[str]] = None) -> int:
    """Print the table. Raises RequestError if there is no store."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dev.rank", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("store", help="keypoint store of photographs that nothing is measured on")
    parser.add_argument("--keep", type=int, nargs="+", default=[512, 1024, 2048], metavar="N")
    args = parser.parse_args(argv)
    store = Store(args.store)
    kept = np.zeros((len(POWERS), len(args.keep)))
    total = 0
    views = itertools.combinations(range(store.views_per_image), 2)
    for image, (view0, view1) in itertools.product(range(len(store)), list(views)):
        matches = right_matches(store, image, view0, view1)
        total += len(matches)
        sides = [store.view(image, view).records for view in (view0, view1)]
        for row, power in enumerate(POWERS):
            places = [places_of(records, power)[at] for records, at in zip(sides, matches.T)]
            kept[row] += [(np.maximum(*places) < count).sum() for count in args.keep]
    print(f"{total} right matches; kept in both views, in %, by number of keypoints")
    print("power" + "".join(f"{count:8}" for count in args.keep))
    for power, counts in zip(POWERS, kept):
        shares = "".join(f"{100 * count / max(total, 1):8.1f}" for count in counts)
        print(f"{power:5}{shares}")
    return 0


def right_matches(store: Store, image: int, view0: int, view1: int) -> np.ndarray:
    """(K, 2) indices of the keypoints of two views that show one point, and are alike."""
    batch = load_batch(store, [Sample(image, view0, view1, NO_AUGMENTATION)], MOST)
    truth = ground_truth(batch).matches0[0].numpy()
    batch = choose_orientations(batch)
    rows = [unit_rows(batch.records(side)[0].numpy().view(KEYPOINT)[:, 0]) for side in (0, 1)]
    found = neighbours(*rows)
    index0 = np.flatnonzero(found.mutual & (truth > UNMATCHED) & (truth == found.nearest))
    return np.stack([index0, truth[index0]], axis=1)


def places_of(records: np.ndarray, power: float) -> np.ndarray:
    """(n,) place of each keypoint when ranked by response times scale^power, from 0."""
    ranks = records["score"] * records["scale"] ** power
    return np.argsort(np.argsort(-ranks, kind="stable"), kind="stable")


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
