"""Rows and means: exact answers on synthetic pairs, every pair in every mean, conditions of
homographies.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_pairs import records_at
from made_scenes import SHIFT, TURN

from pipeline import bootstrap
from pipeline.evaluate import confidence, content, estimators, matchers, metrics, scoring
from pipeline.evaluate.conditions import conditions_of
from pipeline.evaluate.estimators import fit_dlt
from pipeline.evaluate.inputs import KnownPair
from pipeline.evaluate.matchers import OURS
from pipeline.report.rows import Measure
from superglue_sift.geometry.two_view import corner_error, transform
from superglue_sift.matches import Matches
from superglue_sift.network.batch import Pair

SIZE = (320, 240)
RANSAC = Measure("error", "ransac")
DLT = Measure("error", "dlt")


def pair_of(points0, points1, H):
    pair = Pair(records_at(points0), records_at(points1), SIZE, SIZE)
    return KnownPair("p", "s", (0, 0), pair, H)


@pytest.fixture
def settings(make_params):
    return scoring.Settings(make_params("evaluate"))


def score(known, answer, settings):
    """The row of one matcher."""
    return scoring.score_pair(known, {OURS: answer}, {}, settings).rows[OURS]


@pytest.fixture
def exact():
    """Twenty points and their exact images, in another order."""
    rng = np.random.default_rng(3)
    points0 = rng.uniform([80, 60], [240, 180], (20, 2))
    order = rng.permutation(20)
    points1 = transform(points0, TURN)[order]
    return pair_of(points0, points1, TURN), np.argsort(order)


def test_perfect_matches_give_perfect_metrics(exact, settings):
    known, partner = exact
    np.testing.assert_array_equal(scoring.true_matches(known.pair, TURN), partner)
    row = score(known, Matches.from_dense(partner, np.ones(20, np.float32)), settings)
    assert row.counts == scoring.MatchCounts(20, 20, 20, 20)
    assert row.errors[RANSAC] < 0.01 and row.errors[DLT] < 0.01


def test_a_match_near_its_partner_is_correct_and_not_found(settings):
    """Precision asks for less than 3 px, strictly; recall asks for the true partner itself."""
    points0 = np.array([[10.0, 10], [60, 10], [110, 10], [160, 10]])
    points1 = np.concatenate([points0, [[62.5, 10], [113.0, 10]]])
    known = pair_of(points0, points1, np.eye(3))
    answer = Matches.from_dense(np.array([0, 4, 5, -1]), np.ones(4, np.float32))
    row = score(known, answer, settings)
    assert row.counts == scoring.MatchCounts(matches=3, correct=2, truth=4, found=1)


def test_a_few_sure_matches_do_not_decide_alone():
    """Four matches at p = 1 and sixty at 0.5, all right to 0.7 px: near to what no weights give."""
    generator = np.random.default_rng(0)
    errors = []
    for _ in range(50):
        points0 = generator.uniform(0, (640, 480), (64, 2))
        points1 = transform(points0, TURN) + generator.normal(0, 0.7, (64, 2))
        scores = np.where(np.arange(64) < 4, 1.0, 0.5)
        weights = estimators.weights_of(OURS, scores)
        fits = fit_dlt(points0, points1, weights), fit_dlt(points0, points1)
        errors.append([corner_error(H, TURN, (640, 480)) for H in fits])
    weighted, alike = np.median(errors, axis=0)
    assert alike < 0.6 and weighted < 1.1 * alike


def test_pairs_without_keypoints_have_a_row(settings):
    for points0, points1 in (([], []), ([[1, 2]], []), ([], [[3, 4]])):
        known = pair_of(np.reshape(points0, (-1, 2)), np.reshape(points1, (-1, 2)), SHIFT)
        assert scoring.true_matches(known.pair, SHIFT).shape == (len(points0),)
        for answer in matchers.match_baselines(known.pair).values():
            row = score(known, answer, settings)
            assert math.isinf(row.errors[RANSAC]) and row.counts.truth == 0


def row(error, matches=10, correct=5, truth=8, found=4):
    counts = scoring.MatchCounts(matches, correct, truth, found)
    errors = {RANSAC: error, DLT: error}
    return scoring.PairRow("p", "s", OURS, 20, 20, counts, errors, {"scale": 1.0})


def summarize(rows):
    return {measure.name: value for measure, value in metrics.summarize(rows).items()}


def test_no_pair_is_dropped_from_a_mean():
    rows = [row(0.5), row(math.inf, matches=0, correct=0, found=0), row(2.0, truth=0, found=0)]
    found = summarize(rows)
    assert found["pairs"] == 3 and found["recall_pairs"] == 2 and found["estimated_ransac"] == 2
    assert found["precision"] == pytest.approx((0.5 + 0 + 0.5) / 3, abs=1e-6)
    assert found["recall"] == (0.5 + 0) / 2
    assert found["auc_ransac_1"] == pytest.approx(0.5 / 3, abs=1e-6)
    assert found["auc_ransac_10"] == pytest.approx((0.95 + 0 + 0.8) / 3, abs=1e-6)
    assert found["mean_error_ransac"] == 1.25 and found["median_error_ransac"] == 2.0
    nothing = summarize([row(math.inf), row(math.inf)])
    assert nothing["median_error_ransac"] is None and nothing["mean_error_dlt"] is None


def made_scored(scores, correct, found, truth):
    columns = np.array(scores, float), np.array(correct, bool), np.array(found, bool)
    return scoring.ScoredMatches(*columns, truth)


def test_threshold_curve_and_calibration():
    scored = [made_scored([0.9, 0.3], [1, 0], [1, 0], 2), made_scored([0.35], [1], [0], 0)]
    low, high, none = confidence.threshold_curve(confidence.sweep(scored), (0.0, 0.35, 0.95))
    assert low["precision"] == pytest.approx(0.75) and low["recall"] == pytest.approx(0.5)
    assert high["precision"] == high["matches"] == pytest.approx(0.5)
    assert (none["precision"], none["recall"], none["matches"]) == (0.0, 0.0, 0.0)
    lines = confidence.calibration(scored)
    assert [line["matches"] for line in lines] == [2, 1]
    assert confidence.calibration_error(lines) == pytest.approx((2 * abs(0.325 - 0.5) + 0.1) / 3)


verdicts = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=8)


@given(st.lists(st.tuples(verdicts, st.integers(0, 3)), min_size=1, max_size=6), st.floats(0, 1))
def test_operating_points_are_those_of_trying_every_threshold(cases, least):
    """With ties among confidences, pairs without matches and pairs without truth."""
    scored = []
    for matches, missed in cases:
        tenths, correct, found = zip(*matches) if matches else ((), (), ())
        found = [right and hit for right, hit in zip(correct, found)]
        scored.append(made_scored(np.array(tenths) / 10, correct, found, sum(found) + missed))
    tried = []
    for threshold in (-0.1, 0.0, 0.1, 0.2, 0.3, 0.4):
        counts = [one.above(threshold).counts for one in scored]
        recall, asked = bootstrap.mean_finite([count.recall for count in counts])
        tried.append((np.mean([count.precision for count in counts]), recall))
    found = confidence.sweep(scored)
    if not asked:
        assert np.isnan(found.recall).all()
        return
    swept = confidence.recall_at_precision(found.precision, found.recall, np.float64(least))
    assert swept == pytest.approx(max((r for p, r in tried if p >= least - 1e-12), default=0.0))
    swept = confidence.recall_at_precision(found.recall, found.precision, np.float64(least))
    assert swept == pytest.approx(max((p for p, r in tried if r >= least - 1e-12), default=0.0))


def test_rows_fall_into_bins_once_per_condition():
    scored = {OURS: made_scored([0.9, 0.8, 0.7], [1, 1, 0], [1, 1, 0], 4)}
    counts = scoring.MatchCounts(20, 15, 30, 12)
    found = []
    for degrees in (0.0, 15.0, 180.0):
        hard = {"rotation_deg": degrees, "scale": 1.0}
        rows = {
            name: scoring.PairRow("p", "s", name, 200, 300, counts, {RANSAC: 1.0, DLT: 1.0}, hard)
            for name in (OURS, "ratio_test")
        }
        found.append(scoring.PairResult((0, 0), rows, scored))
    conditions = metrics.by_condition(found)
    pairs = {
        (condition, level): {row.name: row.value for row in rows}
        for condition, level, rows in conditions
    }
    turned = {level: v["pairs"] for (name, level), v in pairs.items() if name == "rotation_deg"}
    assert turned == {"0 .. 15": 1, "15 .. 30": 1, "120 .. 181": 1}
    assert pairs["scale", "1 .. 1.25"]["pairs"] == 3
    assert [level for name, level in pairs if name == "keypoints"] == ["128 .. 256"]
    first = pairs["rotation_deg", "0 .. 15"]
    assert first["superglue.auc_ransac_5"] == pytest.approx(0.8)
    # the ratio test has 15 of 20 right and 12 of 30 found; down to 0.8 two of two are right, two of
    # four found
    assert first["superglue.recall_at_ratio_precision"] == 0.5
    assert first["ratio_test.recall_at_ratio_precision"] == 0.4


def test_error_curve_has_the_auc_below_it():
    found = [0.3, 2.2, math.inf, 8.0]
    results = [scoring.PairResult((0, 0), {OURS: row(error)}, {}) for error in found]
    lines = content.error_curve(results, RANSAC)
    fractions = np.array([line[OURS] for line in lines])
    assert (np.diff(fractions) >= 0).all() and fractions[-1] == 0.75 and fractions[3] == 0.25
    # left and right sums enclose the exact area
    area = bootstrap.auc_by_pair(found, 10).mean()
    assert fractions[:-1].mean() <= area <= fractions[1:].mean()


@pytest.mark.parametrize(
    "H, hard",
    [
        (np.eye(3), {}),
        (np.diag([2.0, 2.0, 1.0]), {"scale": 2}),
        (np.array([[0.0, -1, 239], [1, 0, 0], [0, 0, 1]]), {"rotation_deg": 90}),
        (np.array([[1.0, 0, 160], [0, 1, 0], [0, 0, 1]]), {"overlap": 0.5}),
        (np.diag([2.0, 1.0, 1.0]), {"tilt": 2, "scale": 2**0.5}),
        # depth 1 at the left, 2 at the right
        (np.array([[1.0, 0, 0], [0, 1, 0], [1 / 319, 0, 1]]), {"perspective": 8}),
    ],
)
def test_conditions_of_a_homography(H, hard):
    found = conditions_of(H, SIZE, SIZE)
    easy = {"rotation_deg": 0, "scale": 1, "tilt": 1, "perspective": 1}
    expected = hard if "perspective" in hard else {**easy, **hard}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ["ransac", "dlt", "surest", "opencv", "magsac", "poselib"])
def test_every_estimator_finds_an_exact_homography(exact, make_params, name):
    known, partner = exact
    settings = scoring.Settings(make_params("evaluate"), estimators.choose([name]))
    answer = Matches.from_dense(partner, np.ones(20, np.float32))
    error = Measure("error", name)
    assert score(known, answer, settings).errors[error] < 0.05
    few = Matches.from_dense(np.where(np.arange(20) < 3, partner, -1), np.ones(20, np.float32))
    assert math.isinf(scoring.estimate_errors(known, OURS, few, settings)[error])


@pytest.mark.parametrize("matcher", [OURS, *matchers.BASELINES])
@pytest.mark.parametrize("estimator", ["dlt", "surest"])
def test_least_squares_uses_the_confidences_of_every_matcher(exact, settings, estimator, matcher):
    """One wrong match, of which its matcher is unsure: with equal weights it would decide."""
    known, partner = exact
    scores = np.full(20, 0.95, np.float32)
    wrong = partner.copy()
    wrong[[0, 1]] = partner[[1, 0]]
    equal = Matches.from_dense(wrong, scores.copy())
    scores[:2] = 0.1
    answer = Matches.from_dense(wrong, scores)
    error = Measure("error", estimator)
    assert scoring.estimate_errors(known, matcher, answer, settings)[error] < 0.1
    assert scoring.estimate_errors(known, matcher, equal, settings)[error] > 5


def test_the_surest_of_few_matches_are_at_least_four():
    for count in range(4, 12):
        scores = np.linspace(0.3, 0.9, count)
        surest = estimators.surest_of("ratio_test", scores)
        assert surest.sum() == max(4, math.ceil(0.4 * count)) and surest[-4:].all()
