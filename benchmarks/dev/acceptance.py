"""Learn the weights by which a scene accepts pairs (`superglue_sift.geometry.acceptance`).

`python -m benchmarks.dev.acceptance data/images`.

IMAGES is the folder that `fetch` has written. Pairs are made of its validation photographs
(`benchmarks.dev.places`), as the second one of two places also of some for training. Printed are
the weights, to be copied into that module; how often pairs of a given probability are of one place;
and how often pairs of each kind are refused or accepted wrongly at the limit. For the last two,
each photograph is judged by weights learned without it. Pairs of one and of two places weigh the
same in total. A pair of one place with another geometry is a wrong one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from benchmarks.dev import places
from benchmarks.dev.command import make_parser
from pipeline import errors
from pipeline.image_sets.sources import open_manifest
from pipeline.views.homography import generator
from superglue_sift import matcher
from superglue_sift.apps import retrieval
from superglue_sift.features.images import decode_gray
from superglue_sift.features.sift import root_sift_of
from superglue_sift.geometry import acceptance, scenes
from superglue_sift.progress import Progress

OTHERS = 150  # photographs for training that are shown beside those for validation
DESCRIPTORS = 600  # of each photograph, to find similar ones
SAME = 0.4  # cosine of photographs that do show one place: 0.52 of two of one boy, 0.21 of others
PARTS = 8  # of the photographs, each judged by weights of the others
PENALTY = 1.0  # of the squares of the weights, per deviation of the feature
BINS = (0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1)


class Example(NamedTuple):
    """A made pair. features: (4,); right: the inliers are of one place, and right matches."""

    photo: str
    kind: str
    features: np.ndarray
    right: bool


class Weights(NamedTuple):
    """Of a logistic regression: one of each feature, and the bias."""

    values: np.ndarray
    bias: float

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """(n,) of features (n, 4)."""
        return expit(features @ self.values + self.bias)


def read_photographs(folder: Path) -> Tuple[Dict[str, np.ndarray], int]:
    """Gray photographs by name, those for validation first, and the number of these."""
    images = open_manifest(folder)
    entries = images.entries("val")
    more = images.entries("train")[-OTHERS:]
    read = {each.name: decode_gray(images.read(each), each.name) for each in [*entries, *more]}
    return read, len(entries)


def most_similar(ours: matcher.Matcher, photos: Dict[str, np.ndarray]) -> List[str]:
    """Of each photograph the one that looks most like it, without those of the same place."""
    rows = [ours.extract(gray).records["descriptor"][:DESCRIPTORS] for gray in photos.values()]
    words = retrieval.vocabulary([root_sift_of(each[::6]) for each in rows])
    vectors = np.stack([retrieval.vlad(root_sift_of(each), words) for each in rows])
    cosines = vectors @ vectors.T  # 1 with itself
    names = list(photos)
    return [names[index] for index in np.where(cosines < SAME, cosines, -1).argmax(1)]


def examine(ours: matcher.Matcher, photo: str, kind: str, pair: places.Made) -> Optional[Example]:
    """A made pair as a scene that skips none sees it; None if one is right and no geometry fits."""
    sides = [ours.extract(image) for image in (pair.image0, pair.image1)]
    screened = scenes.screen(sides, ours.resize)
    found, _ = ours.match_screened([screened])[0]
    one, other = (scenes.side_of(side, ours.resize) for side in screened.sides)
    matched = scenes.matched_of(found, (one, other))
    judged = acceptance.judge(matched)
    index0, index1 = found.only(judged.inliers).indices.T
    right = pair.right(screened.sides[0].keypoints[index0], screened.sides[1].keypoints[index1])
    if len(pair.planes) and not judged.features.any():
        return None
    return Example(photo, kind, judged.features, bool(len(right) and right.mean() > 0.5))


def make_examples(folder: Path) -> List[Example]:
    """All examples, of the shipped weights, computed one per core at a time."""
    ours = matcher.Matcher.load(device="cpu", scene=True)
    photos, count = read_photographs(folder)
    names = list(photos)
    similar = most_similar(ours, photos)
    ours.side_by_side()
    asked = [
        (place, kind, index)
        for place in range(count)
        for kind, (_, often) in places.KINDS.items()
        for index in range(often)
    ]

    def example(item: Tuple[int, str, int]) -> Optional[Example]:
        place, kind, index = item
        rng = generator(0, f"{kind} {names[place]}", index)
        other = names[(place + 1 + rng.integers(len(names) - 1)) % len(names)]
        other = similar[place] if kind == "similar" else other
        pair = places.KINDS[kind][0](rng, photos[names[place]], photos[other])
        return examine(ours, names[place], kind, pair)

    with ThreadPoolExecutor(ours.workers) as pool:
        shown = Progress(pool.map(example, asked), total=len(asked), desc="pairs", unit="pairs")
        return [each for each in shown if each is not None]


def learn(features: np.ndarray, right: np.ndarray) -> Weights:
    """Logistic regression of (n, 4) on (n,) bool."""
    deviation = features.std(0) + 1e-9
    rows = np.column_stack([features / deviation, np.ones(len(features))])
    signs = np.where(right, 1.0, -1.0)
    each = np.where(right, 0.5 / right.mean(), 0.5 / (1 - right.mean()))

    def loss(weights: np.ndarray) -> float:
        wrong = each @ np.logaddexp(0.0, -signs * (rows @ weights))
        return float(wrong + 0.5 * PENALTY * weights[:-1] @ weights[:-1])

    found = minimize(loss, np.zeros(rows.shape[1])).x
    return Weights(found[:-1] / deviation, float(found[-1]))


def judge_held_out(examples: Sequence[Example]) -> np.ndarray:
    """(n,) probabilities of the examples, by weights learned without their photographs."""
    features = np.array([each.features for each in examples])
    right = np.array([each.right for each in examples])
    names = sorted({each.photo for each in examples})
    part = np.array([names.index(each.photo) % PARTS for each in examples])
    found = np.zeros(len(examples))
    for number in range(min(PARTS, len(names))):
        here = part == number
        found[here] = learn(features[~here], right[~here]).probabilities(features[here])
    return found


def report(examples: Sequence[Example]) -> List[str]:
    """The lines to print."""
    right = np.array([each.right for each in examples])
    weights = learn(np.array([each.features for each in examples]), right)
    held = judge_held_out(examples)
    values = ", ".join(f"{value:.2f}" for value in weights.values)
    lines = [f"{len(examples)} pairs, {right.sum()} right", ""]
    lines += [f"WEIGHTS = np.array([{values}])", f"BIAS = {weights.bias:.2f}", ""]
    lines += [f"{'probability':14}{'pairs':>7}{'mean':>9}{'right':>9}"]
    for low, high in zip(BINS, BINS[1:]):
        here = (held >= low) & (held < high if high < 1 else held <= 1)
        if here.any():
            shares = f"{held[here].mean():9.3f}{right[here].mean():9.3f}"
            lines.append(f"{f'{low} to {high}':14}{here.sum():7}{shares}")
    lines += ["", f"{'kind':14}{'pairs':>7}{'right':>9}{'refused':>9}{'wrong':>9}{'accepted':>10}"]
    kinds = np.array([each.kind for each in examples])
    accepted = held >= scenes.ACCEPT
    for kind in [*places.KINDS, "all"]:
        here = (kinds == kind) | (kind == "all")
        counts = [here & right, here & right & ~accepted, here & ~right, here & ~right & accepted]
        cells = "".join(f"{each.sum():{width}}" for each, width in zip(counts, (9, 9, 9, 10)))
        lines.append(f"{kind:14}{here.sum():7}{cells}")
    return lines


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Make the pairs, learn, and print."""
    parser = make_parser("acceptance", __doc__)
    parser.add_argument("images", type=Path, metavar="IMAGES", help="folder with manifest.csv")
    print("\n".join(report(make_examples(parser.parse_args(argv).images))))
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
