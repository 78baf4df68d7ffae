"""Checkpoint files: they are read as they were written, damage is detected, the newest whole one is
used.
"""

import numpy as np
import pytest
import torch
from made_params import make_tree
from reading import read_json

from pipeline import distributed, params
from pipeline.errors import RequestError, WorkError
from pipeline.train import checkpoint
from pipeline.train.optimizer import Muon
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.network.weights import BadCheckpoint, load_model_file, save_model_file
from superglue_sift.torch_compat import make_grad_scaler

pytestmark = pytest.mark.cu111

TENSORS = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "step": torch.tensor(7),
    "none": torch.zeros(0, 4),
}


def are_same(tensors):
    equal = [torch.equal(tensors[name], TENSORS[name]) for name in TENSORS]
    return len(tensors) == len(TENSORS) and all(equal)


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "m.safetensors"
    save_model_file(path, TENSORS, {"step": 7, "model": {"dim": 128}})
    tensors, info = load_model_file(path)
    assert info == {"step": 7, "model": {"dim": 128}}
    assert are_same(tensors)
    assert read_json(path.with_suffix(".json")) == info
    first = path.read_bytes()
    save_model_file(path, TENSORS, info)
    assert path.read_bytes() == first
    # No temporary file stays
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.json", "m.safetensors"]


def test_every_flipped_bit_and_every_cut_is_detected(tmp_path):
    path = tmp_path / "m.safetensors"
    save_model_file(path, TENSORS, {"step": 7})
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(200):
        at = int(rng.integers(len(whole)))
        flipped = bytearray(whole)
        flipped[at] ^= 1 << int(rng.integers(8))
        for damaged in (bytes(flipped), whole[:at]):
            path.write_bytes(damaged)
            try:
                tensors, info = load_model_file(path)
            except BadCheckpoint as error:
                assert str(path) in str(error)
            else:  # a flip in the header's padding changes nothing that is read
                assert info == {"step": 7} and are_same(tensors)


def test_the_newest_two_stay_and_a_damaged_one_is_not_used(tmp_path, capsys):
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, step, {"w": torch.tensor([float(step)])}, {"step": step})
    names = ["step-00000002.safetensors", "step-00000010.safetensors"]
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == names
    assert checkpoint.load_newest(tmp_path)[1] == {"step": 10}
    newest = tmp_path / names[1]
    newest.write_bytes(newest.read_bytes()[:-1])
    tensors, info = checkpoint.load_newest(tmp_path)
    assert info == {"step": 2} and tensors["w"].item() == 2
    assert names[1] in capsys.readouterr().out and newest.is_file()
    assert checkpoint.load_newest(tmp_path / "none") is None


def save_steps(folder, *steps):
    for step in steps:
        checkpoint.save(folder, step, {"w": torch.tensor([float(step)])}, {"step": step})


def test_a_damaged_newest_one_is_deleted_so_that_two_good_ones_stay(tmp_path):
    save_steps(tmp_path, 8, 10)
    newest = tmp_path / "step-00000010.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert checkpoint.load_newest(tmp_path, repair=True)[1] == {"step": 8}
    assert not newest.exists() and not newest.with_suffix(".json").exists()
    save_steps(tmp_path, 9)  # such as at a stop
    good = [load_model_file(path)[1]["step"] for path in tmp_path.glob("*.safetensors")]
    assert sorted(good) == [8, 9]


def test_one_that_cannot_be_read_now_is_not_deleted(tmp_path, monkeypatch):
    """A network folder fails once; the file may be whole."""
    save_steps(tmp_path, 8, 10)
    newest = tmp_path / "step-00000010.safetensors"
    load = checkpoint.load_model_file

    def fail(path):
        if path != newest:
            return load(path)
        raise BadCheckpoint(f"{path}: input/output error") from OSError(5, "input/output error")

    monkeypatch.setattr(checkpoint, "load_model_file", fail)
    assert checkpoint.load_newest(tmp_path, repair=True)[1] == {"step": 8}
    assert newest.is_file()


def test_if_all_are_damaged_all_stay(tmp_path):
    save_steps(tmp_path, 8, 10)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(RequestError, match="all checkpoints are damaged"):
        checkpoint.load_newest(tmp_path, repair=True)
    assert len([*tmp_path.glob("*.safetensors")]) == 2


def test_the_average_is_the_mean_of_the_weights_added():
    model = SuperGlue(SuperGlueConfig(dim=16, layers=1, heads=2))
    state = checkpoint.TrainState(model, [], None)
    for value in (1.0, 2.0, 6.0):
        with torch.no_grad():
            model.dustbin.fill_(value)
        state.add_to_average()
    assert state.average["dustbin"].item() == 3.0 and state.keep_if_best({"f1": 0.5})
    assert state.best_weights["dustbin"].item() == 3.0 and model.dustbin.item() == 6.0


@pytest.mark.parametrize(
    "ranks, named", [("ab", "rank 1;"), ("baa", "rank 0;"), ("aabca", "rank 2, 3;")]
)
def test_the_ranks_that_differ_from_most_are_named(monkeypatch, ranks, named):
    """A letter stands for the state of a rank."""
    state = checkpoint.TrainState(SuperGlue(SuperGlueConfig(dim=16, layers=1, heads=2)), [], None)
    monkeypatch.setattr(checkpoint.TrainState, "compute_sha256", lambda self: "")
    monkeypatch.setattr(distributed, "gather_objects", lambda item: [*ranks])
    contexts = [distributed.Context(rank, len(ranks), torch.device("cpu")) for rank in (0, 1)]
    with pytest.raises(WorkError, match=f"step 0: .*{named}"):
        checkpoint.check_replicas(state, contexts[0])
    with pytest.raises(SystemExit, match="1"):
        checkpoint.check_replicas(state, contexts[1])
    monkeypatch.setattr(distributed, "gather_objects", lambda item: [*"aaa"])
    checkpoint.check_replicas(state, contexts[0])


def test_the_digest_of_a_state_holds_all_that_ranks_share():
    """The smallest change of a weight, of BatchNorm's statistics, of the optimizer, of the average
    or of a counter changes it.
    """
    model = SuperGlue(SuperGlueConfig(dim=16, layers=1, heads=2, norm="batch"))
    state = checkpoint.TrainState(model, Muon(model, 0.1), make_grad_scaler(False))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    state.add_to_average()

    def nudge(tensor):
        """Raise one element to the next number of float32."""
        value = np.float32(tensor.view(-1)[0].item())
        tensor.data.view(-1)[0] = float(np.nextafter(value, np.float32(np.inf)))

    buffers = [b for b in model.buffers() if b.is_floating_point()]
    momenta = next(iter(state.optimizer.state.values()))
    changes = [
        lambda: nudge(model.dustbin),
        lambda: nudge(buffers[-1]),
        lambda: nudge(momenta["momentum_buffer"]),
        lambda: nudge(state.average["dustbin"]),
        lambda: setattr(state, "skipped", 1),
    ]
    for change in changes:
        before = state.compute_sha256()
        assert state.compute_sha256() == before
        change()
        assert state.compute_sha256() != before


class Scaler:
    """A loss scale, as torch's for float16: it refuses to load nothing."""

    def __init__(self, values):
        self.values = values

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, values):
        if not values:
            raise RuntimeError("The source state dict is empty")
        self.values = values


@pytest.mark.parametrize(("before", "after"), [({}, 65536.0), ({"scale": 4.0}, 4.0)])
def test_a_checkpoint_without_a_loss_scale_is_resumed_with_the_usual_one(before, after):
    """With `auto`, another machine may resume in float16 what was saved in bfloat16."""

    def state_of(values):
        model = SuperGlue(SuperGlueConfig(dim=16, layers=1, heads=2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return checkpoint.TrainState(model, optimizer, Scaler(values))

    saved = state_of(before)
    resumed = state_of({"scale": 65536.0})
    resumed.restore(saved.collect_tensors(), saved.collect_info())
    assert resumed.scaler.values == {"scale": after}
    assert torch.equal(resumed.model.dustbin, saved.model.dustbin)


@pytest.mark.parametrize("key, value", [("lr_scaling", "sqrt"), ("batch_per_rank", 4)])
def test_what_scales_a_step_with_the_processes_makes_another_training(key, value):
    """Otherwise a training would be resumed with another learning rate, or with other pairs.

    The number of processes alone changes nothing but rounding.
    """

    def name(world_size, **keys):
        tree = params.parse(make_tree({"run": keys}), "params.yaml")
        fingerprint = checkpoint.make_fingerprint(tree, "data", "validation", world_size)
        return checkpoint.name_training(fingerprint)

    assert name(1) == name(2)
    assert len({name(1), name(1, **{key: value}), name(2, **{key: value})}) == 3
