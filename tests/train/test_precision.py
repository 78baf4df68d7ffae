"""The precision that `train.precision` selects on a device, and its message."""

import json

import pytest
import torch

from pipeline import compat, distributed
from pipeline.errors import RequestError
from pipeline.train import optimizer, trainer
from pipeline.train.checkpoint import TrainState
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

pytestmark = pytest.mark.cu111

AMX = {"avx512f", "avx512_bf16", "amx_bf16", "amx_tile"}
NO_AMX = {"avx512f", "avx512_bf16"}  # Zen 4


@pytest.fixture
def choose(monkeypatch):
    """`choose(asked, capability, flags)`: the precision on a GPU of this capability, or a CPU."""

    def call(asked, capability, flags, before=""):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        device = torch.device("cuda" if capability else "cpu")
        return optimizer.choose_precision(asked, device, before, flags)

    return call


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
def test_auto_takes_what_is_fast_on_the_device(choose, capability, flags, expected):
    found, reason = choose("auto", capability, flags)
    assert found == expected and reason.startswith("auto")
    if capability:
        assert "{}.{}".format(*capability) in reason
    assert choose("float32", capability, flags)[0] == "float32"


def test_what_a_device_cannot_do(choose):
    with pytest.raises(
        RequestError,
        match=r"bfloat16 needs .*8\.0.* has compute capability 7\.5: .*float16, or auto",
    ):
        choose("bfloat16", (7, 5), AMX)
    assert choose("bfloat16", (8, 0), NO_AMX)[0] == "bfloat16"
    # what is asked for is done, also where it is slow
    assert choose("bfloat16", None, NO_AMX)[0] == "bfloat16"
    found, reason = choose("float16", None, AMX)
    assert found == "float32" and "does nothing" in reason
    assert choose("float16", (8, 0), AMX)[0] == "float16"


def test_ranks_on_different_devices_agree_on_what_all_can_do(choose, make_params, monkeypatch):
    gathered = [choose("auto", card, NO_AMX) for card in [(9, 0), (7, 5), (8, 6)]]
    monkeypatch.setattr(distributed, "all_gather", lambda own: [own, *gathered])
    monkeypatch.setattr(compat, "cpu_flags", lambda: frozenset(AMX))
    alone = distributed.Context(0, 1, torch.device("cpu"))
    found, reason = trainer.precision_of_ranks(make_params("train", precision="auto"), alone)
    assert found == "float16" and "7.5" in reason


@pytest.mark.parametrize(
    "asked, before, capability, flags, expected",
    [
        ("auto", "float32", None, AMX, "float32"),
        ("auto", "bfloat16", None, NO_AMX, "bfloat16"),
        ("auto", "bfloat16", None, set(), "float32"),
        ("auto", "float16", None, NO_AMX, "float32"),
        ("auto", "float32", (8, 0), NO_AMX, "bfloat16"),
        ("float32", "bfloat16", None, AMX, "float32"),
    ],
)
def test_a_resumed_training_keeps_its_precision_on_a_cpu_that_has_it(
    choose, asked, before, capability, flags, expected
):
    found, reason = choose(asked, capability, flags, before)
    assert found == expected and reason.count("auto: ") == (asked == "auto")
    assert ("as before; from scratch it would be" in reason) == (found == before)


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
    with pytest.raises(RequestError, match=r"run\.compile: .*; install it, or set false") as error:
        trainer.check(make_params("train"), make_params("run", compile=True), None)
    assert names in str(error.value) or not compat.can_compile()
