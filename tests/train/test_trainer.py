"""Training: the same gradient on any number of ranks, the same weights after any interruption."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from made_trainings import find_training, stop_after
from made_views import make_store
from processes import in_group
from reading import read_json

from pipeline import distributed
from pipeline.keypoints.store import KeypointStore
from pipeline.train import __main__ as train
from pipeline.train.data import draw_training_pairs, load_batch, split_evenly
from pipeline.train.loss import MatchingObjective, Validation
from pipeline.train.step import train_step
from superglue_sift.network.perceptron import synchronize_batch_norms
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.network.weights import save_model_file
from superglue_sift.torch_compat import make_grad_scaler

ROOT = Path(__file__).resolve().parents[2]


def one_step(context, folder, norm, shares, accumulate, seed=0):
    """All weights after two SGD steps, rank r taking `shares[r]` of the pairs; through the real
    step.
    """
    store = KeypointStore(folder)
    torch.manual_seed(seed)
    model = SuperGlue(SuperGlueConfig(dim=32, layers=2, norm=norm, sinkhorn_iterations=20))
    with torch.no_grad():  # the zero start of the residual branches would hide most gradients
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    synchronize_batch_norms(model, distributed.sum_with_gradient)
    objective = distributed.wrap_in_ddp(MatchingObjective(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pairs = sum(shares)
    for step in range(2):
        begin = sum(shares[: context.rank])
        begin += step * pairs
        views = store.views_per_image
        share = draw_training_pairs(0, len(store), views, begin, begin + shares[context.rank])
        batches = [load_batch(store, part, 48) for part in split_evenly(share, accumulate)]
        with mock.patch("pipeline.train.step.CLIP_NORM", UNCLIPPED):
            _, norm, _ = train_step(
                objective, optimizer, make_grad_scaler(False), batches, pairs, context.world_size
            )
        assert 0 < norm < np.inf
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


NORMS = ("layer", "batch")
UNCLIPPED = 1e9  # clipping hides a gradient that is too large


def each_way(context, folder, shares):
    """`one_step` with each norm, and with accumulation; one after the other, since a group takes
    long to start.
    """
    ways = (*((norm, 1) for norm in NORMS), ("layer", 2))
    return np.stack(
        [one_step(context, folder, norm, shares, accumulate) for norm, accumulate in ways]
    )


class TestGradients:
    @pytest.mark.parametrize(
        "shares",
        [pytest.param(sizes, marks=pytest.mark.slow) for sizes in ([3, 3], [5, 1], [2, 0, 4])]
        + [[2, 3, 3]],
        ids=str,
    )
    def test_ranks_equal_one_process_with_the_whole_batch(self, tmp_path, shares):
        folder = str(make_store(tmp_path))
        pairs = sum(shares)
        whole = each_way(distributed.join_group(), folder, [pairs])
        parts = in_group(len(shares), each_way, folder, shares)
        for part in parts:
            assert np.array_equal(part, parts[0])  # every rank holds the same weights, to the bit
        assert np.abs(parts[0] - whole).max() < 1e-6
        assert np.abs(whole[2] - whole[0]).max() < 1e-6  # two micro-batches equal one batch
        for norm, weights in zip(NORMS, whole):
            start = one_step(distributed.join_group(), folder, norm, [pairs], 1, seed=1)
            assert np.abs(start - weights).max() > 1e-3  # the comparison is not blind

    @pytest.mark.parametrize("repair_overflow", [True, False])
    @pytest.mark.parametrize("neighbours", [True, False])
    def test_a_share_without_pairs_has_a_gradient_of_zero(
        self, tmp_path, repair_overflow, neighbours
    ):
        """More processes than pairs: such a rank takes part in every exchange."""
        model = SuperGlue(SuperGlueConfig(dim=16, layers=1, heads=2, neighbours=neighbours))
        batch = load_batch(KeypointStore(make_store(tmp_path)), [], 32)
        total, parts = MatchingObjective(model)(batch, repair_overflow)
        total.sum().backward()
        assert total.item() == 0 and parts["loss"].shape == (0,)
        assert all(float(p.grad.abs().max()) == 0 for p in model.parameters())


class TestResume:
    @pytest.mark.parametrize(
        "keys", [{"average": 4}, {"norm": "batch", "optimizer": "sgd", "accumulate": 2}], ids=str
    )
    def test_a_stopped_run_ends_with_the_same_bytes(self, tmp_path, request_of, monkeypatch, keys):
        assert train.main(request_of("whole", **keys)) == 0
        for step in (1, 3, 5):
            with monkeypatch.context() as patch:
                stop_after(patch, step)
                assert train.main(request_of("parts", **keys)) == 143
            assert (find_training(tmp_path / "parts") / f"step-{step:08d}.safetensors").is_file()
            if step > 1:  # the curve has a point every second step, also where it was stopped
                curve = (tmp_path / "parts-reports/curves/train.csv").read_text()
                assert curve.count("\n") == 1 + step // 2
        assert train.main(request_of("parts", **keys)) == 0
        for name in (
            "step-00000006.safetensors",
            "step-00000006.json",
            "best.safetensors",
            "best.json",
        ):
            files = [find_training(tmp_path / run) / name for run in ("whole", "parts")]
            assert files[0].read_bytes() == files[1].read_bytes(), name
        for name in ("curves/train.csv", "curves/validation.csv", "metrics.json"):
            reports = [tmp_path / f"{run}-reports" / name for run in ("whole", "parts")]
            assert reports[0].read_bytes() == reports[1].read_bytes(), name


class TestRequests:
    def test_learning_shows_on_the_curves(self, tmp_path, request_of):
        (tmp_path / "run-reports/curves").mkdir(parents=True)
        (tmp_path / "run-reports/curves/train.csv").write_text("of another training\n")
        assert train.main(request_of("run", steps=30, val_every=15, lr=0.003, dim=32)) == 0
        metrics = read_json(tmp_path / "run-reports/metrics.json")
        assert metrics["step"] == 30 and 0 < metrics["f1"] <= 100
        rows = (tmp_path / "run-reports/curves/train.csv").read_text().splitlines()
        assert len(rows) == 16
        lines = (tmp_path / "run-reports/curves/validation.csv").read_text().splitlines()
        # From the untrained network on
        assert [line.split(",")[0] for line in lines[1:]] == ["0", "15", "30"]
        losses = [float(row.split(",")[1]) for row in rows[1:]]
        assert np.mean(losses[-3:]) < np.mean(losses[:3])

    @pytest.fixture
    def begin(self, tmp_path, request_of):
        """`begin(out, about, keys, ...)`: train a step from weights of a small network with these
        keys, whose file says this; the rest are keys of the training.
        """
        small = {"dim": 16, "layers": 1, "heads": 2}

        def run(out, about, keys, folder="", **train_keys):
            torch.manual_seed(0)
            config = SuperGlueConfig(**{**small, **keys})
            file = tmp_path / folder / "m.safetensors"
            save_model_file(file, SuperGlue(config).state_dict(), about(config))
            defaults = {**small, "steps": 1, "val_every": 1, "init_from": str(file)}
            assert train.main(request_of(out, **{**defaults, **train_keys})) == 0
            return read_json(tmp_path / out / "best.json")

        return run

    def test_initial_weights_of_another_network_are_taken_as_far_as_they_fit(self, begin, capsys):
        """Without rotary positions the weights of one that has them are left out, and nothing else
        misses them.
        """
        about = lambda config: {"model": config.to_dict()}  # noqa: E731
        begin("run", about, {"layers": 2, "rotary": True}, dim=32, rotary=False, neighbours=False)
        output = capsys.readouterr().out
        for setting in ("dim: 16", "layers: 2", "rotary: True"):
            assert setting in output, output

    @pytest.mark.parametrize(
        "keys, best_step",
        [
            ({}, 0),
            ({"sinkhorn_iterations": 7}, 0),
            ({"layers": 2}, 3),  # the file has a layer more
            ({"rotary": False}, 3),
            ({"heads": 1}, 3),  # all shapes are equal, and the network is another
        ],
        ids=str,
    )
    def test_weights_of_step_0_are_the_best_only_if_they_are_those_of_the_file(
        self, begin, monkeypatch, keys, best_step
    ):
        """Every validation is worse than that of step 0."""
        validate = Validation.compute_metrics
        scores = iter((0.9, 0.3))

        def metrics(*arguments):
            return {**validate(*arguments), "f1": next(scores), "threshold": 0.5}

        monkeypatch.setattr(Validation, "compute_metrics", metrics)
        about = lambda config: {"model": config.to_dict(), "match_threshold": 0.123}  # noqa: E731
        keys = {"neighbours": True, "rotary": True, **keys}  # as in the training
        best = begin("run", about, keys, steps=3, val_every=3)
        assert best["step"] == best_step
        # The file's threshold says nothing about another network
        assert best["match_threshold"] == (0.123 if best_step == 0 else 0.5)

    def test_few_validation_pairs_do_not_change_the_threshold_of_the_initial_weights(
        self, tmp_path, begin, monkeypatch
    ):
        """It is read when the training begins: the file may be gone later."""
        validate = Validation.compute_metrics
        monkeypatch.setattr(
            Validation,
            "compute_metrics",
            lambda *args: (tmp_path / "m.safetensors").unlink(missing_ok=True) or validate(*args),
        )
        about = lambda config: {"match_threshold": 0.123}  # noqa: E731
        keys = {"neighbours": True, "rotary": True}  # as in the training
        assert begin("from", about, keys)["match_threshold"] == 0.123
        best = begin("nothing", about, keys, init_from="")
        assert best["match_threshold"] == best["validation"]["threshold"]

    def test_initial_weights_are_identified_by_their_content(self, tmp_path, begin, capsys):
        for folder, keys, is_same in (
            ("a", {}, False),
            ("b", {}, True),
            ("b", {"layers": 2}, False),
        ):
            best = begin("run", lambda config: {}, keys, folder)
            assert ("nothing to do" in capsys.readouterr().out) == is_same
            assert str(tmp_path) not in json.dumps(best)
