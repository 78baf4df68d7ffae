"""The precision that `train.precision` selects on a device, and its message."""

from __future__ import annotations

import json

import pytest
import torch

from pipeline import compat
from pipeline.errors import RequestError
from pipeline.processes import distributed
from pipeline.train import optimization, precision, setup, step_time
from pipeline.train.state import TrainState
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

pytestmark = pytest.mark.cu111

AMX = {"avx512f", "avx512_bf16", "amx_bf16", "amx_tile"}
NO_AMX = {"avx512f", "avx512_bf16"}  # Zen 4


@pytest.mark.parametrize(
    "capability, flags, expected",
    [
        ((9, 0), NO_AMX, "bfloat16"),  # H100, H200
        ((8, 0), AMX, "bfloat16"),  # A100
        ((8, 6), NO_AMX, "bfloat16"),  # RTX 30, A10
        ((7, 5), AMX, "float16"),  # T4
        ((7, 0), NO_AMX, "float16"),  # V100
        ((6, 1), AMX, "float32"),  # GTX 10
        (None, AMX, "bfloat16"),
        (None, NO_AMX, "float32"),
        (None, set(), "float32"),
    ],
)
def test_auto_takes_what_is_fast_on_the_device(capability, flags, expected):
    found = precision.resolve("auto", capability, flags)
    assert found.precision == expected and found.reason.startswith("auto")
    assert found.undecided == (capability is None and flags == NO_AMX)  # only there a measurement tells
    if capability:
        assert "{}.{}".format(*capability) in found.reason
    assert precision.resolve("float32", capability, flags).precision == "float32"


def test_bfloat16_on_a_card_before_ampere_is_refused_in_one_line():
    with pytest.raises(RequestError, match=r"bfloat16 needs .*8\.0.* has compute capability 7\.5: .*float16, or auto"):
        precision.resolve("bfloat16", (7, 5), AMX)
    assert precision.resolve("bfloat16", (8, 0), NO_AMX).precision == "bfloat16"
    assert precision.resolve("bfloat16", None, NO_AMX).precision == "bfloat16"  # asked for is asked for


def test_float16_on_a_cpu_says_that_it_does_nothing():
    found = precision.resolve("float16", None, AMX)
    assert found.precision == "float32" and "does nothing" in found.reason
    assert precision.resolve("float16", (8, 0), AMX).precision == "float16"


def test_ranks_on_different_devices_agree_on_what_all_can_do(make_params, monkeypatch):
    cards = [(9, 0), (7, 5), (8, 6)]
    gathered = [tuple(precision.resolve("auto", card, NO_AMX)) for card in cards]
    monkeypatch.setattr(distributed, "all_gather", lambda own: [own, *gathered])
    monkeypatch.setattr(compat, "cpu_flags", lambda: frozenset(AMX))
    parts, _ = setup.build(make_params("train", precision="auto", dim=16, heads=2), distributed.start())
    assert parts.objective.precision == "float16"
    assert "7.5" in str(setup.agreed(precision.on("auto", torch.device("cpu"))))


def test_what_does_nothing_here_is_said(make_params):
    keys = {"precision": "float16", "parallel": "dp", "dim": 16, "heads": 2, "layers": 1}
    parts, messages = setup.build(make_params("train", **keys), distributed.Context(0, 1, 0, torch.device("cpu")))
    assert parts.objective.precision == "float32" and not parts.state.scaler.is_enabled()
    said = "\n".join(messages)
    assert torch.cuda.device_count() > 1 or "--parallel dp does nothing" in said


@pytest.mark.parametrize(("seconds", "expected"), [(0.5, "bfloat16"), (0.95, "float32"), (1.3, "float32")])
def test_where_the_flags_do_not_tell_what_is_faster_is_measured_and_kept(
    make_params, tmp_path, monkeypatch, seconds, expected
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".dvc" / "tmp").mkdir(parents=True)
    monkeypatch.setattr(compat, "cpu_flags", lambda: frozenset(NO_AMX))
    measured = []

    def seconds_a_pair(train, threads, pairs, context):
        measured.append((train.precision, threads, pairs))
        return {"float32": 1.0, "bfloat16": seconds}[train.precision]

    monkeypatch.setattr(step_time, "seconds_a_pair", seconds_a_pair)
    train, alone = make_params("train", precision="auto", batch=8), distributed.Context(0, 1, 0, torch.device("cpu"))
    chosen = step_time.choose(train, alone, 2)
    assert chosen.precision == expected and "1e+03 ms in float32" in str(chosen) and "measured here" in str(chosen)
    assert measured == [("float32", 2, 8), ("bfloat16", 2, 8)]
    assert step_time.choose(train, alone, 2) == chosen and len(measured) == 2  # kept
    step_time.choose(train, alone, 1)
    assert len(measured) == 4  # with other threads
    for keys in ({"precision": "float32"}, {"precision": "auto", "bitwise_elastic": True}):
        assert step_time.choose(make_params("train", **keys), alone, 2).precision == "float32"
    assert len(measured) == 4  # nothing to choose


def test_a_real_step_of_either_precision_is_measured(make_params, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without .dvc: nothing is kept
    monkeypatch.setattr(compat, "cpu_flags", lambda: frozenset(NO_AMX))
    train = make_params("train", precision="auto", dim=16, heads=2, layers=1, max_keypoints=16)
    found = step_time.choose(train, distributed.start(), 1)
    assert found.precision in precision.TIMED and "measured here" in found.reason and not list(tmp_path.iterdir())


MEASURED = precision.faster({"float32": 1.0, "bfloat16": 0.6})


@pytest.mark.parametrize(
    ("asked", "before", "now", "gpu", "flags", "expected"),
    [
        ("auto", "float32", MEASURED, False, NO_AMX, "float32"),  # another result of the same measurement
        ("auto", "bfloat16", precision.faster({"float32": 1.0, "bfloat16": 2.0}), False, NO_AMX, "bfloat16"),
        ("auto", "float32", precision.Choice("bfloat16", "auto: AMX"), False, AMX, "float32"),
        ("auto", "bfloat16", precision.Choice("float32", "auto: no AMX"), False, set(), "float32"),  # emulated there
        ("auto", "float16", precision.Choice("float32", "auto: no AMX"), False, NO_AMX, "float32"),
        ("auto", "float32", precision.Choice("bfloat16", "auto: Ampere"), True, NO_AMX, "bfloat16"),
        ("float32", "bfloat16", precision.Choice("float32", "as asked"), False, AMX, "float32"),
    ],
)
def test_a_resumed_training_keeps_its_precision_on_a_cpu_that_has_it(asked, before, now, gpu, flags, expected):
    found = precision.resumed(asked, before, now, gpu, flags)
    assert found.precision == expected
    if expected == before:
        assert f"from scratch it would be {now.precision}: " in found.reason and found.reason.count("auto: ") == 1
    else:
        assert found == now


def test_a_checkpoint_goes_on_in_another_precision():
    """`auto` on another machine: bfloat16 has no loss scale to resume, and float16 starts with the default one."""

    class Scaler:
        def __init__(self, values):
            self.values = values

        def state_dict(self):
            return dict(self.values)

        def load_state_dict(self, values):
            if not values:
                raise RuntimeError("The source state dict is empty")  # as torch's own
            self.values = values

    def state(values):
        model = SuperGlue(SuperGlueConfig(dim=16, layers=1, heads=2))
        return TrainState(
            model, torch.optim.SGD(model.parameters(), lr=0.1), Scaler(values), optimization.MovingAverage(model, 0.0)
        )

    saved, resumed = state({}), state({"scale": 65536.0})
    resumed.restore(saved.tensors(), json.loads(json.dumps(saved.info())))
    assert resumed.scaler.values == {"scale": 65536.0}
    assert torch.equal(resumed.model.dustbin, saved.model.dustbin)


@pytest.mark.parametrize("kind, names", [("cpu", "g++"), ("cuda", "gcc")])
def test_compile_without_a_compiler_is_refused_in_one_line(make_params, monkeypatch, kind, names):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(RequestError, match=r"--compile: .*; install it, or leave out --compile") as error:
        setup.check_device(make_params("train", compile=True))
    assert names in str(error.value) or not compat.can_compile()
    setup.check_device(make_params("train"))


def test_bitwise_elastic_asks_for_deterministic_kernels(make_params, monkeypatch):
    """Those of a GPU add in any order otherwise: the same run twice would differ."""
    asked = []
    monkeypatch.setattr("pipeline.train.setup.set_deterministic", lambda: asked.append(True))
    for keys in ({}, {"bitwise_elastic": True}):
        setup.build(make_params("train", dim=16, heads=2, layers=1, **keys), distributed.start())
        assert bool(asked) == bool(keys)
