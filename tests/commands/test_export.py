"""The exported model: the same answers, and everything one should know about it."""

import json

import pytest
import torch
from made_params import file_of
from made_scenes import write_model
from reading import read_json

from pipeline import errors, export, params, provenance
from superglue_sift.network.weights import load_model, load_model_file, save_model_file


def write_best(folder, **about):
    """What a training leaves behind."""
    info = {
        "train": {"lr": 0.1},
        "validation": {"f1": 0.5},
        "trained_on": provenance.photographs_digest(()),
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
    assert run(work) == 0
    tensors, info = load_model_file(work / "models/superglue.safetensors")
    original, _ = load_model_file(work / "best.safetensors")
    assert set(tensors) == set(original)
    assert all(torch.equal(tensors[name], original[name]) for name in original)
    described = read_json(work / "models/superglue.json")
    assert described == info
    assert info["model"]["layers"] == 1 and info["step"] == 7
    assert info["metrics"]["superglue.precision"] == 0.5
    assert info["params"]["train.lr"] > 0 and info["params"]["views.homography.scale_min"] > 0
    assert (
        info["provenance"]["data.digest"] == "abc"
        and len(info["provenance"]["source.sha256"]) == 64
    )
    assert info["provenance"]["version"] and info["provenance"]["version.torch"]
    assert "parameters" in capsys.readouterr().out


def test_a_model_carries_the_threshold_chosen_for_it(work):
    for about, stated in (({}, 0.2), ({"match_threshold": 0.3}, 0.3)):
        write_best(work, **about)
        assert run(work) == 0
        assert read_json(work / "models/superglue.json")["match_threshold"] == stated


def test_the_file_is_the_same_in_another_clone_at_another_commit(work, monkeypatch):
    names = ("superglue.safetensors", "superglue.json")
    run(work)
    first = [(work / "models" / name).read_bytes() for name in names]
    clone = work / "other"
    (clone / "models").mkdir(parents=True)
    for name in ("dvc.yaml", "dvc.lock"):
        (clone / name).write_text("another")
    monkeypatch.chdir(clone)
    monkeypatch.setenv("DVC_ROOT", str(clone))
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("IMAGE_DIGEST", "sha256:other")
    run(work)
    assert [(work / "models" / name).read_bytes() for name in names] == first


def test_the_file_names_no_place_of_the_machine_that_trained(work):
    places = {"path": "/home/me/photos", "val_path": "/home/me/held-out", "root": "/home/me"}
    loaded = dict(params.load(work / "params.yaml"))
    sections = {name: section.model_dump() for name, section in loaded.items()}
    sections["fetch"].update(source="folder", content="0123", **places)
    sections["train"]["init_from"] = "/home/me/model.safetensors"
    (work / "params.yaml").write_text(json.dumps(file_of(sections)))  # JSON is YAML
    write_best(work, train=sections["train"], initial_weights="4567")
    assert run(work) == 0
    assert all(b"/home" not in path.read_bytes() for path in (work / "models").iterdir())
    stated = read_json(work / "models/superglue.json")
    assert stated["params"]["fetch.content"] == "0123"
    assert stated["provenance"]["initial_weights.digest"] == "4567"
    assert "lr" in stated["trained_with"] and "init_from" not in stated["trained_with"]


def test_wrong_requests_are_one_line(work, capsys):
    foreign = work / "foreign.safetensors"
    save_model_file(foreign, {"a": torch.ones(1)}, {"model": {"dim": 128, "layers": 1}})
    without = write_model(work / "without.safetensors")
    for option, value, words in (
        ("--model", "nowhere.safetensors", "nowhere.safetensors: no such model"),
        ("--model", foreign, "not a SuperGlue model of this project"),
        ("--model", without, "without.safetensors: has no 'validation', so it is no best"),
        ("--metrics", "nowhere.json", "nowhere.json: no such file"),
        ("--params", "nowhere.yaml", "nowhere.yaml: no such file"),
    ):
        assert run(work, option, value) == 2
        message = capsys.readouterr().err
        assert words in message and message.count("\n") == 1


def test_half_as_many_bytes_give_the_same_weights_to_three_digits(work):
    assert run(work) == 0
    whole = work / "models/superglue.safetensors"
    size = whole.stat().st_size
    tensors, _ = load_model_file(whole)
    assert run(work, "--half") == 0
    halved, _ = load_model_file(whole)
    assert whole.stat().st_size < 0.6 * size and {t.dtype for t in halved.values()} == {
        torch.float16
    }
    assert all(torch.allclose(halved[n].float(), tensors[n], rtol=1e-3, atol=1e-6) for n in tensors)
    model, _ = load_model(whole)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
