"""Wrong requests of `pipeline.train`: one line that names the key or the file, and exit code 2."""

import pytest
from made_trainings import find_training
from reading import read_error

from pipeline import errors, launch
from pipeline.keypoints.store import KeypointStore
from pipeline.train import __main__ as train
from superglue_sift import environment


@pytest.mark.parametrize(
    ("keys", "options", "name"),
    [
        ({"init_from": "none.safetensors"}, [], "none.safetensors"),
        ({}, ["--out", __file__], "test_requests.py"),
        ({"lr": 0.002, "dim": 32}, ["--continue", "run"], "train.model.dim"),
        ({"steps": 5}, ["--continue", "run"], "train.steps"),
        ({"steps": 7}, ["--continue", "none"], "none"),
    ],
)
def test_a_wrong_request_is_named_before_any_process_starts(
    tmp_path, request_of, monkeypatch, capsys, keys, options, name
):
    monkeypatch.chdir(tmp_path)
    if "run" in options:
        assert train.main(request_of("run")) == 0
        options = ["--continue", str(find_training(tmp_path / "run"))]
    monkeypatch.setenv("NPROC_PER_NODE", "1")
    monkeypatch.setattr(launch, "run_stage", lambda *_: pytest.fail("it is trained"))
    words = ["pipeline.train", *request_of("run", **keys), *options]
    assert errors.run(launch.main, words) == 2
    assert name in read_error(capsys)


def remove_angles(folder, patch):
    is_false = property(lambda _: False, lambda *_: None)
    patch.setattr(KeypointStore, "scale_angle", is_false, raising=False)


def damage(folder, patch):
    shard = folder / "keypoints/train/shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def unset_prepared(folder, patch):
    patch.delenv(environment.PREPARED, raising=False)


@pytest.mark.parametrize(
    ("prepare", "keys", "options", "name"),
    [
        (None, {"freeze": ["encoder*nothing"]}, [], "train.freeze"),
        (remove_angles, {}, [], "train.model.neighbours"),
        (damage, {}, ["--verify"], "shard-00000.safetensors"),
        (unset_prepared, {"precision": "portable"}, [], "train.precision"),
    ],
)
def test_a_request_that_does_not_fit_the_data_or_the_process_is_named(
    tmp_path, request_of, monkeypatch, capsys, prepare, keys, options, name
):
    words = [*request_of("run", **keys), *options]
    if prepare:
        prepare(tmp_path, monkeypatch)
    assert errors.run(train.main, words) == 2
    assert name in read_error(capsys)
