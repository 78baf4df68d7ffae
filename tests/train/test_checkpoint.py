"""Checkpoint files: what is written comes back, what is damaged is recognised, the newest whole one
is used.
"""

import numpy as np
import pytest
import torch
from reading import read_json

from pipeline.train import checkpoint
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.network.weights import BadCheckpoint, load_model_file, save_model_file

pytestmark = pytest.mark.cu111

TENSORS = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "step": torch.tensor(7),
    "none": torch.zeros(0, 4),
}


def are_same(tensors):
    equal = [torch.equal(tensors[name], TENSORS[name]) for name in TENSORS]
    return len(tensors) == len(TENSORS) and all(equal)


def test_round_trip(tmp_path):
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


def test_every_flip_and_every_cut_is_recognised(tmp_path):
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


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x04\x95", (2**40).to_bytes(8, "little") + b"{}", b"PK\x03\x04" * 9, b"\0" * 64],
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"m\.safetensors"):
        load_model_file(path)
    with pytest.raises(FileNotFoundError):
        load_model_file(tmp_path / "none.safetensors")


def test_the_newest_two_stay_and_best_is_apart(tmp_path):
    for step in (1, 2, 10):
        # Of a writer that was killed
        (tmp_path / f".step-{step:08d}.safetensors.99.tmp").write_bytes(b"half")
        checkpoint.save(tmp_path, step, {"w": torch.tensor([float(step)])}, {"step": step})
    checkpoint.save_best(tmp_path, {"w": torch.zeros(1)}, {"step": 2})
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == [
        "best.safetensors",
        "step-00000002.safetensors",
        "step-00000010.safetensors",
    ]
    assert not list(tmp_path.glob(".*"))
    assert checkpoint.load_newest(tmp_path)[0][1] == {"step": 10}
    newest = tmp_path / "step-00000010.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    (tensors, info), complaints = checkpoint.load_newest(tmp_path)
    assert info == {"step": 2} and tensors["w"].item() == 2
    assert len(complaints) == 1 and "step-00000010" in complaints[0]
    assert checkpoint.load_newest(tmp_path / "none") == (None, [])


def test_the_average_is_the_mean_of_the_weights_added():
    model = SuperGlue(SuperGlueConfig(dim=16, layers=1, heads=2))
    state = checkpoint.TrainState(model, None, None)
    for value in (1.0, 2.0, 6.0):
        with torch.no_grad():
            model.dustbin.fill_(value)
        state.add_to_average()
    assert state.average["dustbin"].item() == 3.0 and state.keep_best({"f1": 0.5})
    assert state.best_weights["dustbin"].item() == 3.0 and model.dustbin.item() == 6.0
