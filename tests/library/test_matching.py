"""Truth, loss and homographies, against values a person can check."""

import math
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_pairs import RAGGED, SIZE, pairs_of, records_at, related, scrambled

from pipeline.evaluate.estimators import fit_dlt
from pipeline.train.loss import MatchingObjective, assignment_loss
from superglue_sift.geometry import two_view
from superglue_sift.network.batch import Pair, from_pairs
from superglue_sift.network.ground_truth import IGNORED, UNMATCHED, Truth, ground_truth
from superglue_sift.network.superglue import SuperGlueConfig

pytestmark = pytest.mark.cu111
IDENTITY = np.eye(3)


def points(*xy):
    return np.array(xy, float).reshape(-1, 2)


class TestTruth:
    @staticmethod
    def truth(keypoints0, keypoints1, H=IDENTITY, cells=None):
        """Of keypoints (M, 2) and (N, 2) of views of 100 x 100 px: (M,) and (N,)."""
        sides = records_at(keypoints0), records_at(keypoints1)
        one = Pair(*sides, (100, 100), (100, 100))
        batch = from_pairs([one], np.array(H, float)[None], cells=cells)
        found = ground_truth(batch)
        return Truth(*(matches[0, : len(side)] for matches, side in zip(found, sides)))

    def test_bands(self):
        zero = points((10, 10), (30, 10), (50, 10), (70, 10), (90, 10))
        one = points((12.9, 10), (33.1, 10), (55.1, 10), (70, 10), (71, 10))
        truth = self.truth(zero, one)
        # up to 3 px match, up to 5 are ignored, more is unmatched; of two the nearer one matches
        assert truth.matches0.tolist() == [0, IGNORED, UNMATCHED, 3, UNMATCHED]
        assert truth.matches1.tolist() == [0, IGNORED, UNMATCHED, 3, IGNORED]

    def test_outside_the_other_view_is_unmatched(self):
        shift = [[1, 0, 60], [0, 1, 0], [0, 0, 1]]
        truth = self.truth(points((41, 50), (5, 5)), points((97, 50), (65, 5)), shift)
        # (41, 50) lands 4 px from a keypoint, but outside; that keypoint, seen from its side, is
        # ignored
        assert truth.matches0.tolist() == [UNMATCHED, 1]
        assert truth.matches1.tolist() == [IGNORED, 1]
        back = self.truth(points((97, 50), (58, 5)), points((41, 50), (2, 5)), np.linalg.inv(shift))
        assert back.matches0.tolist() == [IGNORED, UNMATCHED]  # (58, 5) lands at -2

    def test_outside_a_cell_is_unmatched(self):
        """Image 1 shows the photograph of image 0 in its left half alone."""
        everywhere = np.diag([0, 0, 1.0])
        left = np.diag([1 / 50, 1 / 100, 1])
        zero = points((10, 50), (52, 50), (70, 50))
        truth = self.truth(
            zero, points((11, 50), (48, 50), (70, 50)), cells=np.array([[everywhere, left]])
        )
        assert truth.matches0.tolist() == [0, UNMATCHED, UNMATCHED]
        assert truth.matches1.tolist() == [0, IGNORED, UNMATCHED]

    def test_error_is_the_larger_of_both_directions(self):
        double = [[2, 0, 0], [0, 2, 0], [0, 0, 1]]
        # 2 px in view 1 (right by half of that in view 0): a match; 4 px there would be 2 px here,
        # and is none
        assert self.truth(points((10, 10)), points((22, 20)), double).matches0.tolist() == [0]
        assert self.truth(points((10, 10)), points((24, 20)), double).matches0.tolist() == [IGNORED]

    @settings(max_examples=25)
    @given(seed=st.integers(0, 1000), count=st.integers(1, 40))
    def test_is_consistent_and_symmetric(self, seed, count):
        rng = np.random.default_rng(seed)
        H = np.eye(3) + rng.normal(0, [[0.1, 0.1, 5], [0.1, 0.1, 5], [1e-4, 1e-4, 0]])
        zero, one = rng.uniform(0, 100, (2, count, 2))
        truth = self.truth(zero, one, H)
        back = self.truth(one, zero, np.linalg.inv(H))
        for i, j in enumerate(truth.matches0.tolist()):
            assert j < 0 or truth.matches1[j] == i
        assert torch.equal(truth.matches0, back.matches1) and torch.equal(
            truth.matches1, back.matches0
        )

    def test_points_of_the_horizon(self):
        """They are inf or nan in the other view, and match nothing, not even padding."""
        pairs = pairs_of((9, 5), (3, 8))
        for one in pairs:
            one.records0["x"][:3] = one.records1["x"][:3] = 50.0
        horizon = np.array([[1, 0, 0], [0, 1, 0], [-0.02, 0, 1.0]])  # x = 50
        assert (ground_truth(related(pairs, horizon)).matches0[:, :3] == UNMATCHED).all()


class TestLoss:
    @pytest.mark.gpu
    @pytest.mark.parametrize("precision, close", [("float32", 1e-3), ("bfloat16", 2e-2)])
    def test_a_gpu_finds_the_loss_and_the_gradient_of_the_cpu(self, precision, close):
        """Of ragged pairs, empty ones among them."""
        batch = related(pairs_of(*RAGGED))
        model = scrambled(SuperGlueConfig(dim=32, layers=2, neighbours=True, rotary=True)).train()
        answers = []
        for device, asked in (("cpu", "float32"), ("cuda", precision)):
            total, parts = MatchingObjective(model.to(device), asked)(batch.to(device), wait=False)
            gradient = torch.cat(
                [g.flatten().cpu() for g in torch.autograd.grad(total, list(model.parameters()))]
            )
            answers.append((parts["loss"].cpu(), gradient))
        (loss, gradient), (found, own) = answers
        assert torch.allclose(loss, found, rtol=close, atol=close)
        assert (gradient - own).norm() < close * gradient.norm()

    def test_known_value(self):
        log_P = torch.log(torch.tensor([[0.5, 0.1, 0.25], [0.1, 0.2, 0.125], [0.25, 0.5, 1.0]]))
        truth = Truth(torch.tensor([[0, UNMATCHED]]), torch.tensor([[0, UNMATCHED]]))
        loss, _, _ = assignment_loss(log_P[None], truth)
        assert loss.item() == pytest.approx(math.log(2) * (1 + 3 + 1) / 3)
        ignored = Truth(torch.tensor([[0, IGNORED]]), torch.tensor([[0, IGNORED]]))
        assert assignment_loss(log_P[None], ignored)[0].item() == pytest.approx(math.log(2))


class TestHomography:
    H = np.array([[1.2, 0.1, 5.0], [-0.05, 0.9, -3.0], [1e-4, 2e-4, 1.0]])

    def error_of(self, H):
        return two_view.corner_error(H, self.H, SIZE)

    def matches(self, seed, count=200):
        """Exact matches in 300 px, and a generator."""
        rng = np.random.default_rng(seed)
        p = rng.uniform(0, 300, (count, 2))
        return p, two_view.transform(p, self.H), rng

    def test_numpy_and_torch_agree(self):
        p, q, _ = self.matches(0)
        H = torch.from_numpy(self.H)
        assert np.allclose(two_view.transform(torch.from_numpy(p), H).numpy(), q)
        assert np.allclose(two_view.transform(q, two_view.inverse(self.H)), p)
        stack = self.H[None]
        assert np.allclose(two_view.compose(two_view.inverse(stack), stack)[0], np.eye(3))

    # OpenCV's framework for RANSAC takes points as float32: 2e-5 px at 300, some hundred times that
    # at the corners
    @pytest.mark.parametrize("fit, limit", [(two_view.fit_ransac, 5e-3), (fit_dlt, 1e-4)])
    def test_fits_exact_points(self, fit, limit):
        p, q, _ = self.matches(0)
        assert self.error_of(fit(p, q)) < limit
        assert fit(p[:3], p[:3]) is None
        assert fit(np.ones((9, 2)), np.ones((9, 2))) is None

    def test_ransac_leaves_wrong_matches_out_and_repeats_itself(self):
        p, q, rng = self.matches(0)
        q = q + rng.normal(0, 0.5, p.shape)
        q[:140] = rng.uniform(0, 300, (140, 2))
        found = [two_view.fit_ransac(p, q, seed=seed) for seed in (0, 1, 2, 0)]
        assert max(map(self.error_of, found)) < 3.0
        assert self.error_of(fit_dlt(p, q)) > 20.0
        assert np.array_equal(found[0], found[3])

    def test_ransac_ends_close_though_some_true_matches_lie_far_off(self, root):
        """Also by the lines for OpenCV in the docs, whose RANSAC alone stops after a few samples
        and keeps the inliers of the best.
        """
        section = (root / "docs/matching.md").read_text().split("### A homography by OpenCV")[1]
        lines = section.split("```python\n")[1].split("```")[0]
        errors = []
        for seed in range(20):
            p, q, rng = self.matches(seed)
            # A quarter of large keypoints
            q = q + np.where(np.arange(200) < 150, 0.2, 2.0)[:, None] * rng.normal(size=p.shape)
            q[::10] = rng.uniform(0, 300, (20, 2))
            cv2.setRNGSeed(seed)
            plain = cv2.findHomography(p, q, cv2.RANSAC, 3.0)[0]
            found = SimpleNamespace(points0=p, points1=q, deviations=None)
            names = {"cv2": cv2, "two_view": two_view, "found": found}
            exec(lines, names)
            errors.append([*map(self.error_of, (two_view.fit_ransac(p, q), names["H"], plain))])
        ours, docs, alone = np.mean(errors, axis=0)
        assert ours < 0.15 and docs < 0.15 and ours < 0.5 * alone

    @pytest.mark.parametrize(
        "exact, rough, stated, limit",
        [(0.1, 0.5, np.nan, 0.7), (0.02, 1.0, 1.0, 0.5), (0.02, 1.0, np.nan, 0.2)],
    )
    def test_exact_matches_decide_where_deviations_are_known(self, exact, rough, stated, limit):
        """Two fifths are aligned; the others are not, or say how far they scatter."""
        errors = []
        for seed in range(10):
            p, q, rng = self.matches(seed, 120)
            aligned = np.arange(120) < 50
            q = q + np.where(aligned, exact, rough)[:, None] * rng.normal(size=p.shape)
            deviations = np.where(aligned, exact, stated)
            fits = two_view.fit_ransac(p, q, deviations=deviations), two_view.fit_ransac(p, q)
            errors.append([*map(self.error_of, fits)])
        weighed, alike = np.mean(errors, axis=0)
        assert weighed < 0.1 and weighed < limit * alike

    def test_dlt_heeds_weights(self):
        p, q, _ = self.matches(0, 40)
        q[:10] += 50
        weights = np.where(np.arange(40) < 10, 0.0, 1.0)
        assert self.error_of(fit_dlt(p, q, weights)) < 1e-4
        assert self.error_of(fit_dlt(p, q)) > 5

    def test_corner_error_of_a_shift(self):
        shift = np.array([[1, 0, 3.0], [0, 1, 4.0], [0, 0, 1]])
        assert two_view.corner_error(shift, np.eye(3), (640, 480)) == pytest.approx(5.0)
        assert two_view.corner_error(None, np.eye(3), (640, 480)) == math.inf
