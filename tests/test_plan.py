"""Memory and hours foretold: the formula against what processes take, and what is said of cards that are not here."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import memory
from pipeline.doctor import plan
from pipeline.processes import machine
from pipeline.processes.distributed import Context
from pipeline.processes.machine import FAIL, GIB, MIB, OK, WARN
from pipeline.train import setup
from pipeline.train.pairs.synthetic import made_batch
from pipeline.train.step import train_step

PAPER = {"init_from": "", "optimizer": "adam", "layers": 9, "neighbours": False}


def steps(device: str, train, pairs: int):
    """For `memory.peak_mib`: two steps of the trainer's own parts; a small network's load the libraries."""
    train = train.model_copy(update={"precision": "float32"})
    small = train.model_copy(update={"dim": 16, "layers": 1, "heads": 2})

    def run(train, pairs: int, keypoints: int) -> None:
        parts, _ = setup.build(train, Context(0, 1, 0, torch.device(device)))
        batch = made_batch(range(pairs), (640, 480), keypoints)
        for _ in range(2):
            train_step(parts.ddp_model, parts.state.optimizer, parts.state.scaler, [batch], pairs, 1, 1.0)

    run(small, 1, 32)
    return lambda: run(train, pairs, train.max_keypoints)


def foretold(train, pairs: int, precision: str = "float32", device: str = "cpu") -> float:
    numbers = sum(p.numel() for p in setup.network(train).parameters())
    return plan.training_bytes(train, pairs, numbers, precision, device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pairs", "changes"),
    [
        (4, {"max_keypoints": 512}),
        (4, {"max_keypoints": 512, "dim": 256}),
        (2, {"max_keypoints": 1024, "layers": 4}),
        (4, {"max_keypoints": 512, "checkpoint_layers": True}),
        (12, {"max_keypoints": 512, "layers": 4, "checkpoint_layers": True}),
    ],
)
def test_the_formula_is_within_15_percent_of_the_peak_of_a_process(make_params, pairs, changes):
    train = make_params("train", **{**PAPER, **changes})
    taken = memory.peak_mib(steps, "cpu", train, pairs) * MIB
    assert foretold(train, pairs) == pytest.approx(taken, rel=0.15)


# card, gigabytes of it, precision that auto chooses, keypoints -> level and what to set
CARDS = [
    ("V100, 16 GB", 16, "float16", 1024, OK, ""),
    ("RTX 3090, 24 GB", 24, "bfloat16", 1024, OK, ""),
    ("RTX 3090, 24 GB, 2,048 keypoints", 24, "bfloat16", 2048, WARN, "train.accumulate: 2"),
    ("T4, 16 GB, 2,048 keypoints", 16, "float16", 2048, WARN, "train.accumulate: 2"),
    ("P100, 16 GB, float32, 2,048 keypoints", 16, "float32", 2048, WARN, "train.accumulate: 2"),
    ("a card of 256 MB", 0.25, "float32", 1024, FAIL, "train.max_keypoints"),
]


@pytest.mark.parametrize(("card", "gigabytes", "chosen", "keypoints", "level", "fix"), CARDS)
def test_cards_that_are_not_here(make_params, card, gigabytes, chosen, keypoints, level, fix):
    """The preset coco2017 on one card: 64 pairs a step."""
    train = make_params("train", **PAPER, batch=64)

    def needed(pairs: int, keypoints: int) -> float:
        return foretold(train.model_copy(update={"max_keypoints": keypoints}), pairs, chosen, "cuda")

    found = machine.judge_memory(needed, 64, 1, keypoints, plan.USABLE * gigabytes * GIB, card)
    assert (found.level, fix in found.text) == (level, True), found.text
    assert "\n" not in found.text


def test_what_is_proposed_fits(make_params):
    train = make_params("train", **PAPER, batch=64, max_keypoints=1024)
    free = foretold(train, 64) / 5
    found = machine.judge_memory(lambda pairs, _: foretold(train, pairs), 64, 1, 1024, free, "a card")
    parts = int(found.text.partition("train.accumulate: ")[2].split()[0])
    assert foretold(train, -(-64 // parts)) <= free < foretold(train, -(-64 // (parts - 2)))


def test_hours_are_measured_once_and_kept(make_params, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".dvc" / "tmp").mkdir(parents=True)
    sections = {
        "train": make_params("train", init_from="", layers=1, max_keypoints=32, steps=100, batch=3),
        "keypoints": make_params("keypoints", views_per_image=2, width=96, height=64),
        "fetch": make_params("fetch"),
    }
    found = {each.subject: each for each in plan.findings(sections, 2, torch.device("cpu"))}
    assert found["memory of a process"].level == OK and " 2 pairs of 32" in found["memory of a process"].text
    assert "100 steps of 3 pairs" in found["training"].text and "16 images" in found["keypoints"].text
    (rates,) = json.loads(plan.KEPT.read_text()).values()
    assert rates["pair"] > 0 and rates["image"] > 0
    monkeypatch.setattr(plan, "seconds_a_pair", lambda *_: pytest.fail("measured again"))
    assert plan.measured(sections, 2, 2, torch.device("cpu")) == rates


@pytest.mark.parametrize("processes", [1, 3, 7])
def test_any_number_of_processes_has_a_micro_batch(make_params, processes):
    """Also those that cannot share a bitwise elastic batch: with auto the launcher takes fewer."""
    assert plan.micro_batch(make_params("train", batch=64, bitwise_elastic=True), processes) == 8
    assert plan.micro_batch(make_params("train", batch=64), processes) == -(-64 // processes)
