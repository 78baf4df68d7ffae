"""Behind `evaluate --poses`: all matchers on pairs with known cameras, shared out over processes, with their report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from pipeline.evaluation import matchers, outputs, poses, sharing, summary, webpage
from pipeline.evaluation.intervals import differences, intervals
from pipeline.evaluation.job import Job
from pipeline.evaluation.matchers import OURS, PairMatches
from pipeline.evaluation.options import protocol
from pipeline.evaluation.pairs import Pair, image_size
from pipeline.evaluation.run import Settings, best_median_worst, match_others
from pipeline.evaluation.scoring import matched_points, matchers_of
from pipeline.report import curves, page, tables
from pipeline.runtime.progress import progress
from pipeline.schema import EvaluateParams
from superglue_sift import drawing, sift

UNIT = "the pose error up to 5, 10 and 20 degrees"


@dataclass(frozen=True)
class Loaded:
    """A pair ready to be matched.

    images: (H, W) uint8 as matched, none once that is done; K: their intrinsics, (3, 3) pixels.
    """

    pair: Pair
    images: Tuple[np.ndarray, ...]
    K: Tuple[np.ndarray, np.ndarray]
    T_0to1: np.ndarray


@dataclass(frozen=True)
class PoseEvaluation:
    """Everything but the pairs."""

    job: Job
    settings: Settings

    def load(self, known: poses.PosePair) -> Loaded:
        """Images, intrinsics and keypoints of a pair. Raises RequestError for an unreadable image."""
        args = self.job.args
        views = [
            poses.load_view(args.images, name, K, args.resize)
            for name, K in ((known.name0, known.K0), (known.name1, known.K1))
        ]
        keypoints = [sift.extract(image, self.settings.max_keypoints) for image, _ in views]
        sizes = [image_size(image) for image, _ in views]
        name = f"{known.name0} {known.name1}"
        pair = Pair(name, name, 0, 0, *keypoints, *sizes, np.eye(3), {})
        images, intrinsics = zip(*views)
        return Loaded(pair, images, intrinsics, known.T_0to1)

    def answers(self, pair: Pair) -> Dict[str, PairMatches]:
        """What every matcher says of a pair, ours first."""
        _, ours = next(matchers.match_superglue(self.job.model, [[pair]], self.job.device))
        return {OURS: ours.above(self.settings.threshold), **match_others(pair, self.settings)}

    def match(self, loaded: Optional[Loaded]) -> Optional[Tuple[Loaded, Dict[str, PairMatches]]]:
        """A pair, its images let go, with its answers; None for no pair."""
        if loaded is None:
            return None
        return replace(loaded, images=()), self.answers(loaded.pair)

    def score(self, matched: Optional[Tuple[Loaded, Dict[str, PairMatches]]]) -> List[poses.PoseRow]:
        """Rows of all matchers on one pair; none for no pair."""
        if matched is None:
            return []
        loaded, answers = matched
        name, count = loaded.pair.name, len(loaded.pair.keypoints0)
        return [
            poses.score(name, matcher, count, matched_points(loaded.pair, found)[:2], loaded.K, loaded.T_0to1)
            for matcher, found in answers.items()
        ]

    def rows(self, known: Sequence[poses.PosePair]) -> List[poses.PoseRow]:
        """Rows of all matchers on all pairs, in their order, on every process."""
        found: List[poses.PoseRow] = []
        context = self.job.context

        def load(one: Optional[poses.PosePair]) -> Optional[Loaded]:
            return None if one is None else self.load(one)

        with progress(total=len(known), desc="evaluate", unit="pair", disable=context.rank > 0) as bar:
            for part in sharing.share_out(known, None, load, self.match, self.score, context):
                found += part
                bar.update(bool(part))
        return found

    def draw(self, known: poses.PosePair, rows: Dict[str, poses.PoseRow]) -> np.ndarray:
        """(H, W, 3) picture of a pair: ours above the ratio test. rows: its own, by matcher."""
        loaded = self.load(known)
        answers = self.answers(loaded.pair)
        panels = []
        for name in outputs.PICTURED:
            points0, points1, _ = matched_points(loaded.pair, answers[name])
            right = poses.right_matches((points0, points1), loaded.K, loaded.T_0to1)
            panels.append(
                drawing.Panel(f"{tables.title(name)}: {in_words(rows[name])}", points0, points1, right)
            )
        return drawing.draw(*loaded.images, panels)


def run(job: Job, section: EvaluateParams) -> Optional[Dict[str, object]]:
    """Evaluate and write the report; the figures on the first process, None on the others.

    Raises RequestError for a wrong line or an unreadable image.
    """
    work = PoseEvaluation(job, job.settings(section))
    known = poses.read_pairs(job.args.poses)
    rows = work.rows(known)
    return write(work, section, known, rows) if job.context.is_main else None


def write(
    work: PoseEvaluation, section: EvaluateParams, known: Sequence[poses.PosePair], rows: List[poses.PoseRow]
) -> Dict[str, object]:
    """Files, page and table. Returns the figures."""
    args, out = work.job.args, work.job.args.out
    names = matchers_of(rows)
    errors = {name: [row.error for row in rows if row.matcher == name] for name in names}
    where = f"{args.poses.name}: {len(known)} pairs with known cameras"
    content = page.Content(
        title=f"Evaluation: {where}",
        figures=poses.summarize(rows, names),
        intervals=intervals(rows, names, poses.values_of),
        differences=differences(rows, poses.values_of),
        errors={"essential matrix": curves.error_curve(errors, curves.LIMITS_DEG, "deg")},
        thresholds=[],
        calibration=[],
        robustness=[],
        pictures=drawn(work, known, rows, len(names)),
        protocol=protocol(args, section, work.settings, where, work.job.info),
        notes=[f"{len(known)} pairs, {len(names)} matchers on the same keypoints.", *work.job.extras.skipped],
        unit=UNIT,
    )
    outputs.write_json(out / "metrics.json", content.figures)
    outputs.write_json(out / "protocol.json", dict(content.protocol))
    curves.write_csv(out / "pairs.csv", lines_of(rows))
    curves.write_csv(out / "intervals.csv", content.intervals)
    curves.write_csv(out / "differences.csv", content.differences)
    curves.write_csv(out / "curves" / "error_pose.csv", content.errors["essential matrix"])
    (out / "index.html").write_text(page.render(content), encoding="utf-8")
    print(f"\n{where}\n\n{tables.pose_comparison(content.figures, poses.AUC_DEGREES)}\n")
    print(tables.differences(content.differences))
    print("\n".join([*work.job.extras.skipped, "", f"written to {out}"]), flush=True)
    return content.figures


def drawn(
    work: PoseEvaluation, known: Sequence[poses.PosePair], rows: Sequence[poses.PoseRow], count: int
) -> List[page.Picture]:
    """best-1.png, ..., worst-1.png, and the same for the page. count: rows of each pair."""
    folder = outputs.emptied(work.job.args.out / "pictures")
    ours = rows[::count]
    ranked = sorted(range(len(ours)), key=lambda index: (ours[index].error, -ours[index].correct, index))
    shown = []
    for name, index in best_median_worst(ranked, work.settings.pictures):
        of_pair = {row.matcher: row for row in rows[index * count : (index + 1) * count]}
        picture = work.draw(known[index], of_pair)
        drawing.write(folder / f"{name}.png", picture)
        above, below = (in_words(of_pair[matcher]) for matcher in outputs.PICTURED)
        caption = f"{ours[index].pair}. Above ours: {above}. Below the ratio test: {below}."
        shown.append(page.Picture(name, caption, "", webpage.small_jpeg(picture)))
    return shown


def in_words(row: poses.PoseRow) -> str:
    """A row's counts and error for people."""
    return f"{row.correct} of {row.matches} matches right, pose error {row.error:.2f} degrees"


def lines_of(rows: Sequence[poses.PoseRow]) -> List[Dict[str, object]]:
    """Lines of pairs.csv; error_pose in degrees, `inf` without an estimate."""
    return [
        {
            "pair": row.pair,
            "matcher": row.matcher,
            "keypoints0": row.keypoints,
            "matches": row.matches,
            "correct": row.correct,
            "precision": round(row.precision, summary.DIGITS),
            "matching_score": round(row.matching_score, summary.DIGITS),
            "error_pose": round(row.error, summary.DIGITS),
        }
        for row in rows
    ]
