"""Memory and hours, measured before the work: findings for a simulated GPU, and the file that keeps them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import memory
from pipeline.doctor import plan
from pipeline.image_sets import manifest
from pipeline.image_sets.manifest import Entry
from pipeline.processes.distributed import Context
from pipeline.processes.machine import FAIL, GIB, OK, WARN
from pipeline.train import precision, setup
from pipeline.train.pairs.synthetic import synthetic_batch
from pipeline.train.step import train_step

CARD = torch.device("cuda")


@pytest.fixture
def card(monkeypatch):
    """A simulated GPU of 10 GB; each pair of a step takes `pair` GiB."""

    def of(pair: float) -> None:
        seen = []

        def step(_train, _threads, pairs, _context):
            seen.append(pairs)
            if pairs * pair > 10 * GIB:
                raise RuntimeError("CUDA out of memory. Tried to allocate")
            return 0.5

        stands_for = {
            "get_device_properties": lambda _: SimpleNamespace(total_memory=10 * GIB, name="a card"),
            "get_device_name": lambda _: "a card",
            "reset_peak_memory_stats": lambda _: None,
            "max_memory_allocated": lambda _: seen[-1] * pair,
        }
        for name, answer in stands_for.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(plan, "seconds_a_pair", step)
        monkeypatch.setattr(plan, "seconds_an_image", lambda _: 2.0)
        monkeypatch.setattr(precision, "on", lambda *_: precision.Choice("bfloat16", ""))

    return of


# GiB of a pair -> level, text, number of other findings
PAIRS = [
    (0.125, OK, "8.0 GiB for 64 pairs of 512 keypoints at a time (measured here), 9.0 GiB for it: a card", 2),
    (0.15, WARN, "32 pairs of 512 keypoints at a time", 2),  # fits the card, and leaves nothing for the rest
    (1.0, WARN, "set train.accumulate: 8", 2),
    (11.0, FAIL, "one pair of 512 keypoints does not fit into the 9.0 GiB", 0),
]


@pytest.mark.parametrize(("pair", "level", "said", "more"), PAIRS)
def test_memory_of_a_card_is_that_of_the_steps_that_fit(
    make_params, tmp_path, monkeypatch, card, pair, level, said, more
):
    monkeypatch.chdir(tmp_path)
    card(pair * GIB)
    sections = {
        "train": make_params("train", batch=64, max_keypoints=512, accumulate=1),
        "keypoints": make_params("keypoints"),
        "fetch": make_params("fetch"),
    }
    memory, *others = plan.findings(sections, 1, CARD)
    assert (memory.level, said in memory.text, len(others)) == (level, True, more), memory.text
    assert memory.subject == "memory of a process" and "\n" not in memory.text


def test_another_error_of_a_step_is_no_lack_of_memory(make_params, monkeypatch, card):
    card(GIB)
    monkeypatch.setattr(plan, "seconds_a_pair", lambda *_: int(torch.zeros(2) @ torch.zeros(3)))
    with pytest.raises(RuntimeError):
        plan.training_step(make_params("train"), 1, 4, CARD)


def steps(device: str, train, pairs: int):
    """For `memory.peak_mib`: two steps of the trainer's own parts; a small network's load the libraries."""
    small = train.model_copy(update={"dim": 16, "layers": 1, "heads": 2})

    def run(train, pairs: int, keypoints: int) -> None:
        parts, _ = setup.build(train, Context(0, 1, 0, torch.device(device)))
        batch = synthetic_batch(range(pairs), (640, 480), keypoints)
        for _ in range(2):
            train_step(parts.ddp_model, parts.state.optimizer, parts.state.scaler, [batch], pairs, 1, 1.0)

    run(small, 1, 32)
    return lambda: run(train, pairs, train.max_keypoints)


@pytest.mark.slow
def test_checkpointed_layers_take_a_third_of_the_memory_of_a_process(make_params):
    keys = {"init_from": "", "layers": 9, "neighbours": False, "max_keypoints": 512, "precision": "float32"}
    less, whole = (
        memory.peak_mib(steps, "cpu", make_params("train", **keys, checkpoint_layers=on), 4) for on in (True, False)
    )
    assert less < 0.4 * whole  # 0.25 measured; 0.85 where freed tensors do not go back to the system


def test_hours_are_measured_once_and_kept(make_params, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".dvc" / "tmp").mkdir(parents=True)
    sections = {
        "train": make_params("train", init_from="", layers=1, max_keypoints=32, steps=100, batch=3),
        "keypoints": make_params("keypoints", views_per_image=2, width=96, height=64),
        "fetch": make_params("fetch"),
    }
    found = {each.subject: each for each in plan.findings(sections, 2, torch.device("cpu"))}
    assert set(found) == {"training", "keypoints"}  # no memory is forecast for a CPU
    assert "100 steps of 3 pairs" in found["training"].text and "16 images" in found["keypoints"].text
    rates = json.loads(plan.KEPT.read_text())["values"]
    assert rates["pair"] > 0 and rates["image"] > 0
    monkeypatch.setattr(plan, "seconds_a_pair", lambda *_: pytest.fail("measured again"))
    again = {each.subject: each for each in plan.findings(sections, 2, torch.device("cpu"))}
    assert again == found


def test_photographs_of_a_folder_are_those_that_fetch_listed(make_params, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_params("fetch", source="folder", path="photos")
    assert plan.photographs(folder) == 0
    entries = [Entry(f"{number}.jpg", "train", "train", f"{number}.jpg", 9, "") for number in range(7)]
    manifest.write(plan.MANIFEST, entries)
    assert (plan.photographs(folder), plan.photographs(make_params("fetch"))) == (7, 16)
    plan.MANIFEST.write_text("damaged\n1\n")
    assert plan.photographs(folder) == 0


@pytest.mark.parametrize("processes", [1, 3, 7])
def test_any_number_of_processes_has_a_micro_batch(make_params, processes):
    """Also those that cannot share a bitwise elastic batch: with auto the launcher takes fewer."""
    assert setup.micro_batch(make_params("train", batch=64, bitwise_elastic=True), processes) == 8
    assert setup.micro_batch(make_params("train", batch=64), processes) == -(-64 // processes)
