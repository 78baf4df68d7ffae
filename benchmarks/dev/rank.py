"""How `sift.rank` was chosen: the true matches that are left when both views keep few keypoints.

    python -m benchmarks.dev.rank data/keypoints/val

The store must hold all keypoints (`keypoints.max_keypoints: 16384`). A rank is response times
scale^power, times a factor for points of two orientations. Prints the part of the true matches of
all keypoints whose both keypoints are kept, in percent, for each power and factor.
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
from superglue_sift.truth import UNMATCHED, ground_truth

POWERS = (0.0, 0.5, 0.75, 1.0, 1.25, 1.5)
FACTORS = (1.0, 0.9, 0.8, 0.7)


def main(argv: Optional[List[str]] = None) -> int:
    """Print the table. Raises RequestError if there is no store."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dev.rank", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("store", help="keypoint store of photographs that nothing is measured on")
    parser.add_argument("--keep", type=int, nargs="+", default=[512, 1024, 2048], metavar="N")
    args = parser.parse_args(argv)
    store = Store(args.store)
    rules = list(itertools.product(POWERS, FACTORS))
    kept = np.zeros((len(rules), len(args.keep)))
    total = 0
    views = itertools.combinations(range(store.views_per_image), 2)
    for image, (view0, view1) in itertools.product(range(len(store)), list(views)):
        matches = true_matches(store, image, view0, view1)
        total += len(matches)
        sides = [store.view(image, view).records for view in (view0, view1)]
        for row, rule in enumerate(rules):
            places = [places_of(records, *rule)[at] for records, at in zip(sides, matches.T)]
            kept[row] += [(np.maximum(*places) < count).sum() for count in args.keep]
    print(f"{total} true matches; kept in both views, in %, of so many keypoints")
    print("power  factor" + "".join(f"{count:8}" for count in args.keep))
    for (power, factor), counts in zip(rules, kept):
        shares = "".join(f"{100 * count / max(total, 1):8.1f}" for count in counts)
        print(f"{power:5}  {factor:6}{shares}")
    return 0


def true_matches(store: Store, image: int, view0: int, view1: int) -> np.ndarray:
    """(K, 2) indices of the keypoints of two views that show one point of the photograph."""
    batch = load_batch(store, [Sample(image, view0, view1, NO_AUGMENTATION)], 16384)
    matches0 = ground_truth(batch).matches0[0].numpy()
    index0 = np.flatnonzero(matches0 > UNMATCHED)
    return np.stack([index0, matches0[index0]], axis=1)


def places_of(records: np.ndarray, power: float, factor: float) -> np.ndarray:
    """(n,) place of each keypoint when ranked by this rule, from 0."""
    two = records["second_descriptor"].any(axis=1)
    ranks = records["score"] * records["scale"] ** power * np.where(two, factor, 1.0)
    return np.argsort(np.argsort(-ranks, kind="stable"), kind="stable")


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
