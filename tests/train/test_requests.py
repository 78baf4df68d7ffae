"""Wrong requests of `pipeline.train`: one line that names the key or the file, and exit code 2."""

import pytest
from made_trainings import home
from reading import read_error

from pipeline import errors, launch
from pipeline.keypoints.store import KeypointStore
from pipeline.train import __main__ as train
from superglue_sift import environment


@pytest.mark.parametrize(
    ("keys", "options", "said"),
    [
        ({"init_from": "none.safetensors"}, [], "train.init_from: none.safetensors: no such file"),
        ({}, ["--out", __file__], "test_requests.py: cannot be written"),
        ({}, ["--reports", __file__], "test_requests.py: cannot be written"),
        ({"lr": 0.002, "dim": 32}, ["--continue", "run"], "train.model.dim: 16, not 32"),
        ({"steps": 5}, ["--continue", "run"], "it has 6 steps; set train.steps"),
        ({"steps": 7}, ["--continue", "none"], "there is no checkpoint"),
    ],
)
def test_it_is_refused_before_any_process_starts(
    tmp_path, request_of, monkeypatch, capsys, keys, options, said
):
    monkeypatch.chdir(tmp_path)
    if "run" in options:
        assert train.main(request_of("run")) == 0
        options = ["--continue", str(home(tmp_path / "run"))]
    monkeypatch.setenv("NPROC_PER_NODE", "1")
    monkeypatch.setattr(launch, "run_stage", lambda *_: pytest.fail("it is trained"))
    words = ["pipeline.train", *request_of("run", **keys), *options]
    assert errors.run(launch.main, words) == 2
    assert said in read_error(capsys)


def without_angles(folder, patch):
    never = property(lambda _: False, lambda *_: None)
    patch.setattr(KeypointStore, "scale_angle", never, raising=False)


def damage(folder, patch):
    shard = folder / "keypoints/train/shard-00000.safetensors"
    whole = bytearray(shard.read_bytes())
    whole[-1] ^= 1
    shard.write_bytes(whole)


def unprepared(folder, patch):
    patch.delenv(environment.PREPARED, raising=False)


@pytest.mark.parametrize(
    ("prepare", "keys", "options", "said"),
    [
        (None, {"freeze": ["encoder*nothing"]}, [], "train.freeze: 'encoder*nothing' fits no"),
        (without_angles, {}, [], "train.model.neighbours = True"),
        (
            without_angles,
            {"neighbours": False, "rotation_deg": 90.0},
            [],
            "train.augmentation.rotation_deg",
        ),
        (damage, {}, ["--verify"], "shard-00000.safetensors: missing or damaged"),
        (unprepared, {"precision": "portable"}, [], "train.precision = 'portable': torch was load"),
    ],
)
def test_it_is_one_line(tmp_path, request_of, monkeypatch, capsys, prepare, keys, options, said):
    words = [*request_of("run", **keys), *options]
    if prepare:
        prepare(tmp_path, monkeypatch)
    assert errors.run(train.main, words) == 2
    assert said in read_error(capsys)
