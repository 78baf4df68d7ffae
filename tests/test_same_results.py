"""No speed-up changes results beyond rounding: the sample run compared with the same run by the
plain network.
"""

from __future__ import annotations

import json

import pytest
import torch
from pair_truth import pair_truth

from benchmarks import plain
from pipeline.compat import grad_scaler
from pipeline.features import store
from pipeline.keypoints.image import gray_views
from pipeline.train import optimization, setup
from pipeline.train.objective import MatchingObjective
from pipeline.train.pairs.loader import load_batch
from pipeline.train.pairs.order import PairOrder
from pipeline.train.step import CLIP_NORM, train_step
from superglue_sift.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.truth import Truth

LIMITS = setup.POSITIVE_PX, setup.NEGATIVE_PX


@pytest.fixture(scope="module")
def photographs(tmp_path_factory, photo, make_params):
    """What the stage keypoints makes of two photographs, by the sample's settings."""
    folder = tmp_path_factory.mktemp("views")
    section = make_params("keypoints", views_per_image=3)
    views = [
        gray_views(gray, name, section)
        for name, gray in (("coffee", photo), ("turned", photo.T.copy()))
    ]
    rows = [store.write_shard(folder / store.shard_name(0), views)]
    size = (section.width, section.height)
    (folder / store.INDEX).write_text(json.dumps(store.index(rows, section.views_per_image, size)))
    return store.Store(folder)


class Run:
    """Training by Adam, `batch` pairs a step, in `dtype`, and a plain network with the same
    weights.
    """

    def __init__(self, photographs, section, dtype: torch.dtype) -> None:
        self.photographs = photographs
        self.section = section
        self.order = PairOrder(section.seed, len(photographs), photographs.views_per_image)
        torch.manual_seed(section.seed)
        keys = {
            key: getattr(section, key)
            for key in ("dim", "layers", "heads", "norm", "sinkhorn_iterations")
        }
        self.model = SuperGlue(SuperGlueConfig(**keys)).to(dtype)
        self.twin = plain.plain_from(self.model).to(dtype)
        self.objective = MatchingObjective(self.model, *LIMITS)
        self.optimizers = [optimization.make_optimizer(section, m) for m in (self.model, self.twin)]

    def step(self, number: int) -> float:
        """The mean loss of a step of ours."""
        self._rate(self.optimizers[0], number)
        pairs = self.section.batch
        batch = load_batch(
            self.photographs, self.order.step(number, pairs), self.section.max_keypoints
        )
        done = train_step(
            self.objective, self.optimizers[0], grad_scaler(False), [batch], pairs, 1, CLIP_NORM
        )
        return done.sums["loss"] / pairs

    def plain_loss(self, number: int, twin: plain.PlainSuperGlue) -> torch.Tensor:
        """The mean loss of the same pairs, one after another: the plain network knows no
        padding.
        """
        pairs = self.order.step(number, self.section.batch)
        losses = []
        for pair in pairs:
            batch = load_batch(self.photographs, [pair], self.section.max_keypoints)
            sides = batch.keypoints0[0], batch.keypoints1[0], batch.H_0to1[0]
            truth = pair_truth(*sides, batch.image_size0[0], batch.image_size1[0], *LIMITS)
            losses.append(plain.dense_loss(twin(batch), Truth(*(m[None] for m in truth))))
        return torch.cat(losses).sum() / len(pairs)

    def plain_step(self, number: int) -> float:
        """The same step of the plain network."""
        optimizer = self.optimizers[1]
        self._rate(optimizer, number)
        optimizer.zero_grad()
        loss = self.plain_loss(number, self.twin)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.twin.parameters(), CLIP_NORM)
        optimizer.step()
        return loss.item()

    def _rate(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = optimization.learning_rate(self.section, number, 1)


@pytest.mark.slow
def test_the_sample_run_has_the_losses_of_the_plain_network(photographs, make_params):
    """In float64, so that what float32 rounds, and Adam then magnifies, does not hide a wrong
    gradient.
    """
    run = Run(photographs, make_params("train", batch=4, optimizer="adam", lr=5e-4), torch.float64)
    start = [p.detach().clone() for p in run.twin.parameters()]
    ours, theirs = zip(*((run.step(number), run.plain_step(number)) for number in range(12)))
    assert max(abs(a - b) for a, b in zip(ours, theirs)) < 1e-9
    moved = [(p - before).abs().max().item() for p, before in zip(run.twin.parameters(), start)]
    assert max(moved) > 1e-4


def test_in_float32_each_loss_of_the_sample_run_is_within_1e_5(photographs, make_params):
    """Of the plain network with the weights of that step."""
    run = Run(photographs, make_params("train", batch=4, optimizer="adam", lr=5e-4), torch.float32)
    for number in range(4):
        with torch.no_grad():
            expected = float(run.plain_loss(number, plain.plain_from(run.model)))
        assert abs(run.step(number) - expected) < 1e-5
