"""Presets: complete, explained, rendered with comments, and written only when everything is
right.
"""

import re
import shutil
from pathlib import Path

import pytest
from dvc.utils.serialize import modify_yaml
from made_params import keys_of
from reading import read_yaml

from pipeline import errors, params, presets
from pipeline.params import Params, flatten
from superglue_sift.features.images import list_photos

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


def test_committed_params_are_the_sample_preset_rendered():
    rendered = presets.render("sample")
    assert (ROOT / "params.yaml").read_text() == rendered
    assert (ROOT / "presets/sample.yaml").read_text() == rendered


def written_keys(name):
    """The keys of a preset, without the views of `evaluate`, which are those of `views` again."""
    tree = read_yaml(ROOT / "presets" / f"{name}.yaml")
    return [key for key in flatten(tree) if not key.startswith("evaluate.views.")]


@pytest.mark.parametrize("name", OFFERED)
def test_every_preset_has_the_same_few_keys(name):
    known = set(keys_of(Params, "")) - {*Params.model_fields}
    known -= {"views.homography", "views.photometric"}
    known = {key for key in known if not key.startswith("evaluate.views")}
    assert len(known) <= 70  # nine of them of `run`
    assert written_keys(name) == written_keys("sample") and set(written_keys(name)) == known


@pytest.mark.parametrize("name", OFFERED)
def test_dvc_writes_a_preset_as_it_stands(name, target):
    """So `dvc exp run -S` changes one line of params.yaml."""
    preset = ROOT / "presets" / f"{name}.yaml"
    shutil.copy(preset, target)
    with modify_yaml(str(target)) as tree:
        tree["train"]["steps"] += 1
    changed = set(target.read_text().splitlines()) - set(preset.read_text().splitlines())
    assert [line.split(":")[0] for line in changed] == ["  steps"]


@pytest.mark.parametrize("name", OFFERED)
def test_every_preset_is_copied(name, target, use, image_folder):
    folder = ["--images", image_folder] if name in ("folder", "pretrained") else []
    assert use(name, *folder) == 0
    params.load(target)
    preset = (ROOT / "presets" / f"{name}.yaml").read_text()
    changed = set(target.read_text().splitlines()) ^ set(preset.splitlines())
    assert all(re.match(r"  (path|content): ", line) for line in changed), changed
    assert preset.startswith(f"# Preset {name}: ")


def test_own_images_are_written_as_absolute_paths(target, use, tmp_path, image_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    held_out = tmp_path / "held out: #1"
    shutil.copytree(image_folder, held_out)
    for file in list_photos(held_out):
        file.write_bytes(file.read_bytes() + b"other")
    assert use("--images", "images", "--val-images", "held out: #1") == 0
    fetch = params.load(target).fetch
    assert (fetch.source, fetch.path, fetch.val_path) == (
        "folder",
        str(image_folder),
        str(held_out),
    )
    assert re.fullmatch("[0-9a-f]{16}", fetch.content)


def test_a_changed_folder_changes_the_content(target, use, image_folder):
    assert use("--images", image_folder) == 0
    before = params.load(target).fetch
    assert not presets.refresh(target)
    shutil.copy(image_folder / "coffee.png", image_folder / "nested/again.png")
    (image_folder / "notes.txt").write_text("no image")
    assert presets.refresh(target)
    after = params.load(target).fetch
    assert after.content != before.content
    assert after == before.model_copy(update={"content": after.content})
    assert target.read_text().startswith("# Preset folder: ")
    shutil.copy(ROOT / "params.yaml", target)
    assert not presets.refresh(target)  # no folder


def test_a_file_that_holds_the_preset_keeps_its_edits(target, use, tmp_path, image_folder):
    assert use("--images", image_folder) == 0
    target.write_text(re.sub(r"  steps: \d+", "  steps: 7  # few", target.read_text()))
    other = tmp_path / "other"
    shutil.copytree(image_folder, other)
    assert use("--images", other) == 0
    assert params.load(target).fetch.path == str(other) and params.load(target).train.steps == 7
    assert "  steps: 7  # few\n" in target.read_text()
    assert use("sample") == 0
    assert params.load(target).train.steps == params.load(ROOT / "presets/sample.yaml").train.steps


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sampel"], "preset sampel: not in presets/; there are ci, coco"),
        (["folder"], "preset folder: needs a folder of images; make repro IMAGES=~/photos"),
        (["coco2017", "--images", "images"], "preset coco2017: takes no folder of images"),
        (["--images", "nowhere"], "nowhere: no such folder"),
        (["--images", "empty"], "empty: holds no images (.jpg, "),
        (["--images", "one"], "one: 1 different image(s), and none for val; at least two"),
        (["--val-images", "images"], "goes with IMAGES"),
    ],
)
def test_a_wrong_request_is_one_line_and_changes_nothing(
    arguments, said, target, use, tmp_path, image_folder, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "one"):
        (tmp_path / name).mkdir()
    shutil.copy(image_folder / "coffee.png", tmp_path / "one/coffee.png")
    before = sorted(tmp_path.rglob("*"))
    shutil.copy(ROOT / "params.yaml", target)
    assert use(*arguments) == 2
    *progress, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and said in error
    assert all(line.startswith("reading images") for line in progress)
    assert target.read_bytes() == (ROOT / "params.yaml").read_bytes()
    assert sorted(tmp_path.rglob("*")) == sorted([*before, target])
