"""The exported model: the same answers, and everything one should know about it."""

import json

import pytest
import torch
from made_params import make_tree
from made_scenes import write_model
from reading import read_error, read_files, read_json

from pipeline import errors, export, params, provenance
from superglue_sift.network.weights import load_model, load_model_file


def write_best(folder, **about):
    """What a training leaves behind."""
    info = {
        "train": {"lr": 0.1},
        "validation": {"f1": 0.5},
        "versions": [{"torch": "1.10.2"}, {"step": 5, "torch": "2.0.1"}],
        "trained_on": provenance.compute_photographs_digest(()),
    }
    write_model(folder / "best.safetensors", about={**info, **about})


@pytest.fixture
def work(tmp_path, root):
    write_best(tmp_path)
    (tmp_path / "metrics.json").write_text('{"superglue.pairs": 3, "superglue.precision": 0.5}')
    (tmp_path / "params.yaml").write_text((root / "presets/sample.yaml").read_text())
    return tmp_path


def run(folder, *extra):
    words = ["--model", folder / "best.safetensors", "--metrics", folder / "metrics.json"]
    words += ["--out", folder / "models", "--params", folder / "params.yaml", *extra]
    return errors.run(export.main, [str(word) for word in words])


def test_export_keeps_weights_and_says_where_they_come_from(work, capsys):
    write_best(work, match_threshold=0.3)
    assert run(work) == 0
    tensors, info = load_model_file(work / "models/superglue.safetensors")
    original, _ = load_model_file(work / "best.safetensors")
    assert set(tensors) == set(original)
    assert all(torch.equal(tensors[name], original[name]) for name in original)
    assert read_json(work / "models/superglue.json") == info
    assert info["model"]["layers"] == 1 and info["step"] == 7 and info["match_threshold"] == 0.3
    assert info["metrics"]["superglue.precision"] == 0.5
    assert info["params"]["train.lr"] > 0 and info["params"]["views.homography.scale_min"] > 0
    assert info["provenance"]["data.digest"] == "abc"
    assert info["provenance"]["version.torch"] == "2.0.1"  # of the last steps
    assert len(info["provenance"]["source.sha256"]) == 64
    assert "parameters" in capsys.readouterr().out


def test_the_file_is_the_same_in_another_clone_at_another_commit(work, monkeypatch):
    run(work)
    first = read_files(work / "models")
    clone = work / "other"
    clone.mkdir()
    for name in ("dvc.yaml", "dvc.lock"):
        (clone / name).write_text("another")
    monkeypatch.chdir(clone)
    for name, value in {"DVC_ROOT": str(clone), "WORLD_SIZE": "8", "IMAGE_STACK": "x"}.items():
        monkeypatch.setenv(name, value)
    run(work)
    assert read_files(work / "models") == first


def test_the_file_names_no_place_of_the_machine_that_trained(work):
    places = {"path": "/home/me/photos", "val_path": "/home/me/held-out", "root": "/home/me"}
    loaded = dict(params.load(work / "params.yaml"))
    sections = {name: section.model_dump() for name, section in loaded.items()}
    sections["fetch"].update(source="folder", content="0123", **places)
    sections["train"]["init_from"] = "/home/me/model.safetensors"
    (work / "params.yaml").write_text(json.dumps(make_tree(sections)))  # JSON is YAML
    write_best(work, train=sections["train"], initial_weights="4567")
    assert run(work) == 0
    assert all(b"/home" not in path.read_bytes() for path in (work / "models").iterdir())
    stated = read_json(work / "models/superglue.json")
    assert stated["params"]["fetch.content"] == "0123"
    assert stated["provenance"]["initial_weights.digest"] == "4567"
    assert "lr" in stated["trained_with"] and "init_from" not in stated["trained_with"]


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--model", "without.safetensors"),
        ("--metrics", "nowhere.json"),
        ("--out", "without.safetensors"),
    ],
)
def test_a_wrong_request_is_one_line(work, capsys, option, name):
    write_model(work / "without.safetensors")
    assert run(work, option, work / name) == 2
    assert name in read_error(capsys)


def test_half_as_many_bytes_give_the_same_weights_to_three_digits(work):
    assert run(work, "--half") == 0
    halved = work / "models/superglue.safetensors"
    assert halved.stat().st_size < 0.6 * (work / "best.safetensors").stat().st_size
    stored, _ = load_model_file(halved)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    model, original = (
        load_model(path)[0].state_dict() for path in (halved, work / "best.safetensors")
    )
    torch.testing.assert_close(model, original, rtol=1e-3, atol=1e-6)
