"""Presets: complete, explained, rendered with comments, and written only when everything is
right.
"""

import re
import shutil
from pathlib import Path

import pytest
from made_params import list_keys
from reading import read_error, read_files, read_yaml
from ruamel.yaml import YAML

from pipeline import errors, params, presets
from pipeline.params import Params, flatten
from superglue_sift.features.photo_folder import list_photos

ROOT = Path(__file__).resolve().parents[2]
OFFERED = sorted(path.stem for path in (ROOT / "presets").glob("*.yaml"))


@pytest.fixture
def target(tmp_path):
    """A params.yaml, not yet written."""
    return tmp_path / "params.yaml"


@pytest.fixture
def use(target):
    """`use(...)`: the exit code of the command that writes it."""
    command = ["--params", target, "use"]
    return lambda *words: errors.run(presets.main, [str(word) for word in (*command, *words)])


@pytest.mark.parametrize("name", OFFERED)
def test_a_preset_has_all_keys_and_the_comments_of_the_sample(name, target, use, image_folder):
    folder = ["--images", image_folder] if name in ("folder", "pretrained") else []
    assert use(name, *folder) == 0
    params.load(target)
    text = target.read_text()
    assert text.startswith(f"# Preset {name}: ")
    # The views of `evaluate` are those of `views` again
    keys = [key for key in flatten(read_yaml(target)) if not key.startswith("evaluate.views.")]
    fields = list_keys(Params, "")
    values = [key for key in fields if not any(other.startswith(f"{key}.") for other in fields)]
    missing = {key for key in values if not key.startswith("evaluate.views")} ^ set(keys)
    assert not missing, f"presets/sample.yaml and pipeline/params.py differ: {missing}"
    sample = (ROOT / "presets/sample.yaml").read_text()
    assert keys == list(flatten(read_yaml(ROOT / "presets/sample.yaml")))
    comments, explained = (
        [line for line in lines.splitlines() if line.lstrip().startswith("#")]
        for lines in (sample.partition("\n\n")[2], text.partition("\n\n")[2])
    )
    assert explained == comments
    # so `dvc exp run -S` changes one line of params.yaml
    text = presets.read_preset(name)
    target.write_text(text)
    dvc = pytest.importorskip("dvc.utils.serialize", reason="needs DVC")
    with dvc.modify_yaml(str(target)) as tree:
        tree["train"]["steps"] += 1
    changed = set(target.read_text().splitlines()) - set(text.splitlines())
    assert [line.split(":")[0] for line in changed] == ["  steps"]


@pytest.mark.parametrize("name", OFFERED)
def test_a_preset_has_its_own_values_and_those_of_the_sample(name):
    """A file has no value that is the same in `sample`, so it shows what is special about it."""
    values = flatten(read_yaml(ROOT / f"presets/{name}.yaml"))
    sample = flatten(read_yaml(ROOT / "presets/sample.yaml"))
    written = flatten(YAML(typ="safe", pure=True).load(presets.read_preset(name)))
    assert written == {**sample, **values}
    if name != "sample":
        assert [key for key, value in values.items() if sample.get(key, ...) == value] == []


def test_own_images_are_written_as_absolute_paths(target, use, tmp_path, image_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    held_out = tmp_path / "held out: #1"
    shutil.copytree(image_folder, held_out)
    for file in list_photos(held_out):
        file.write_bytes(file.read_bytes() + b"other")
    assert use("--images", "images", "--val-images", "held out: #1") == 0
    fetch = params.load(target).fetch
    assert fetch.source == "folder" and re.fullmatch("[0-9a-f]{16}", fetch.content)
    assert (fetch.path, fetch.val_path) == (str(image_folder), str(held_out))


def test_a_changed_folder_changes_the_content(target, use, image_folder):
    assert use("--images", image_folder) == 0
    before = params.load(target).fetch
    assert not presets.rewrite_fetch_content(target)
    shutil.copy(image_folder / "coffee.png", image_folder / "nested/again.png")
    (image_folder / "notes.txt").write_text("no image")
    assert presets.rewrite_fetch_content(target)
    after = params.load(target).fetch
    assert after.content != before.content
    assert after == before.model_copy(update={"content": after.content})
    assert target.read_text().startswith("# Preset folder: ")
    shutil.copy(ROOT / "presets/sample.yaml", target)
    assert not presets.rewrite_fetch_content(target)  # no folder


def test_changed_held_out_images_change_the_content(target, use, tmp_path):
    for name in ("train", "held_out"):
        (tmp_path / name).mkdir()
        for number in range(4):
            (tmp_path / name / f"{number}.jpg").write_bytes(f"{name} {number}".encode())
    assert use("--images", tmp_path / "train", "--val-images", tmp_path / "held_out") == 0
    assert params.load(target).fetch.content == "0fe2fba680ab9228"
    (tmp_path / "held_out/3.jpg").write_bytes(b"another picture")
    assert presets.rewrite_fetch_content(target)
    assert params.load(target).fetch.content == "c7a2e6e878dc7d75"


def test_a_file_that_holds_the_preset_keeps_its_edits(target, use, tmp_path, image_folder):
    assert use("--images", image_folder) == 0
    target.write_text(re.sub(r"  steps: \d+", "  steps: 70  # few", target.read_text()))
    other = shutil.copytree(image_folder, tmp_path / "other")
    assert use("--images", other) == 0
    assert params.load(target).fetch.path == str(other)
    assert "  steps: 70  # few\n" in target.read_text()
    assert use("sample") == 0
    assert target.read_text() == (ROOT / "presets/sample.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["sampel"], "sampel"),
        (["folder"], "folder"),  # without a folder
        (["--images", "one"], "one"),  # a single image
    ],
)
def test_a_wrong_request_is_named_and_changes_nothing(
    arguments, name, target, use, tmp_path, image_folder, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").mkdir()
    shutil.copy(image_folder / "coffee.png", tmp_path / "one/coffee.png")
    shutil.copy(ROOT / "presets/sample.yaml", target)
    before = read_files(tmp_path)
    assert use(*arguments) == 2
    assert name in read_error(capsys)
    assert read_files(tmp_path) == before
