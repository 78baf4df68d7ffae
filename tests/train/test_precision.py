"""The precision that `train.precision` selects on a device, and its message."""

import json

import pytest
import torch

from pipeline import compat, distributed
from pipeline.errors import RequestError
from pipeline.train import precision, setup
from pipeline.train.checkpoint import TrainState
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
        (None, NO_AMX, "float32"),  # slower on some
        (None, set(), "float32"),
    ],
)
def test_auto_takes_what_is_fast_on_the_device(capability, flags, expected):
    found = precision.resolve("auto", capability, flags)
    assert found.precision == expected and found.reason.startswith("auto")
    if capability:
        assert "{}.{}".format(*capability) in found.reason
    assert precision.resolve("float32", capability, flags).precision == "float32"


def test_bfloat16_on_a_card_before_ampere_is_refused_in_one_line():
    with pytest.raises(
        RequestError,
        match=r"bfloat16 needs .*8\.0.* has compute capability 7\.5: .*float16, or auto",
    ):
        precision.resolve("bfloat16", (7, 5), AMX)
    assert precision.resolve("bfloat16", (8, 0), NO_AMX).precision == "bfloat16"
    # Asked for is asked for
    assert precision.resolve("bfloat16", None, NO_AMX).precision == "bfloat16"


def test_float16_on_a_cpu_says_that_it_does_nothing():
    found = precision.resolve("float16", None, AMX)
    assert found.precision == "float32" and "does nothing" in found.reason
    assert precision.resolve("float16", (8, 0), AMX).precision == "float16"


def test_ranks_on_different_devices_agree_on_what_all_can_do(make_params, monkeypatch):
    cards = [(9, 0), (7, 5), (8, 6)]
    gathered = [tuple(precision.resolve("auto", card, NO_AMX)) for card in cards]
    monkeypatch.setattr(distributed, "all_gather", lambda own: [own, *gathered])
    monkeypatch.setattr(compat, "cpu_flags", lambda: frozenset(AMX))
    train = make_params("train", precision="auto", dim=16, heads=2)
    parts = setup.build(train, distributed.start())
    assert parts.objective.precision == "float16"
    assert "7.5" in str(setup.choose_precision(train, distributed.start()))


def test_what_does_nothing_here_is_said(make_params):
    keys = {"precision": "float16", "parallel": "dp", "dim": 16, "heads": 2, "layers": 1}
    parts = setup.build(
        make_params("train", **keys), distributed.Context(0, 1, torch.device("cpu"))
    )
    assert parts.objective.precision == "float32" and not parts.state.scaler.is_enabled()
    said = "\n".join(parts.messages)
    assert torch.cuda.device_count() > 1 or "--parallel dp does nothing" in said


@pytest.mark.parametrize(
    ("asked", "before", "now", "gpu", "flags", "expected"),
    [
        ("auto", "float32", precision.Choice("bfloat16", "auto: dim"), False, NO_AMX, "float32"),
        ("auto", "bfloat16", precision.Choice("float32", "auto: dim"), False, NO_AMX, "bfloat16"),
        ("auto", "float16", precision.Choice("float32", "auto: no AMX"), False, NO_AMX, "float32"),
        ("auto", "float32", precision.Choice("bfloat16", "auto: Ampere"), True, NO_AMX, "bfloat16"),
        ("float32", "bfloat16", precision.Choice("float32", "as asked"), False, AMX, "float32"),
    ],
)
def test_a_resumed_training_keeps_its_precision_on_a_cpu_that_has_it(
    asked, before, now, gpu, flags, expected
):
    found = precision.resume(asked, before, now, gpu, flags)
    assert found.precision == expected
    if expected == before:
        assert (
            f"from scratch it would be {now.precision}: " in found.reason
            and found.reason.count("auto: ") == 1
        )
    else:
        assert found == now


@pytest.mark.parametrize("before, after", [({"scale": 1024.0}, 1024.0), ({}, 65536.0)])
def test_a_checkpoint_goes_on_with_its_loss_scale_also_in_another_precision(before, after):
    """`auto` on another machine: bfloat16 has no loss scale to resume, and float16 starts with the
    default one.
    """

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
        return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), Scaler(values))

    saved = state(before)
    resumed = state({"scale": 65536.0})
    resumed.restore(saved.tensors(), json.loads(json.dumps(saved.info())))
    assert resumed.scaler.values == {"scale": after}
    assert torch.equal(resumed.model.dustbin, saved.model.dustbin)


@pytest.mark.parametrize("kind, names", [("cpu", "g++"), ("cuda", "gcc")])
def test_compile_without_a_compiler_is_refused_in_one_line(make_params, monkeypatch, kind, names):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(
        RequestError, match=r"--compile: .*; install it, or leave out --compile"
    ) as error:
        setup.check_device(make_params("train", compile=True))
    assert names in str(error.value) or not compat.can_compile()
    setup.check_device(make_params("train"))
