"""params.yaml: what is accepted, and that every mistake is one line naming file, key, value and
rule.
"""

import functools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_params import list_keys
from reading import read_yaml
from ruamel.yaml import YAML

from pipeline import params
from pipeline.errors import RequestError
from pipeline.params import Augmentation, Params, RunParams
from pipeline.train import checkpoint

SECTIONS = tuple(Params.model_fields)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree():
    return read_yaml(ROOT / "presets/sample.yaml")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        # a limit, a type, a choice, a pattern
        ({"train.lr": -1}, "train.lr"),
        ({"train.lr": "1e-4"}, "train.lr"),
        ({"train.batch": True}, "train.batch"),
        ({"train.model.layers": "few"}, "train.model.layers"),
        ({"train.model.layers": 3.0}, "train.model.layers"),
        ({"train.model.norm": "group"}, "train.model.norm"),
        ({"keypoints.extractor": "../x"}, "keypoints.extractor"),
        # keys of one section, and of two, that do not fit each other
        ({"train.model.heads": 3}, "heads"),
        ({"train.max_keypoints": 16384}, "train.max_keypoints"),
        ({"run.checkpoint_layers": True, "train.model.norm": "batch"}, "run.checkpoint_layers"),
        # values that another key makes useless
        ({"fetch.path": "own"}, "path"),
        ({"train.warmup_steps": 201}, "warmup_steps"),
        (
            {"train.schedule": "constant_decay", "train.decay_start": 0, "train.warmup_steps": 0},
            "decay_start",
        ),
        ({"train.augmentation.zoom_far": 0.5}, "zoom_far"),
        # no section, an unknown key, a missing key
        ({"train": None}, "train"),
        ({"train.model.layer": 1}, "train.model.layer"),
        ({"train.lr": ...}, "train.lr"),
    ],
)
def test_a_wrong_key_or_value_is_named(tree, changes, key):
    for name, value in changes.items():
        *path, last = name.split(".")
        section = functools.reduce(dict.get, path, tree)
        section[last] = value
        if value is ...:
            del section[last]
    with pytest.raises(RequestError, match=rf"params\.yaml: .*{key}"):
        params.parse(tree, "params.yaml")


@pytest.mark.parametrize(
    "changes",
    [
        {"train.warmup_steps": 200, "train.average": 200, "train.augmentation.min_keypoints": 256},
        {"train.decay_start": 9},  # cosine has none
        {"train.schedule": "wsd", "train.decay_start": 199},
        {"train.schedule": "wsd", "train.decay_start": 10},
        # The only way to a constant learning rate
        {"train.schedule": "constant_decay", "train.decay_start": 1000},
        {"train.augmentation.zoom": 0.1, "train.augmentation.zoom_far": 1.0},
    ],
)
def test_values_at_their_limits_are_accepted(tree, changes):
    for name, value in changes.items():
        *path, last = name.split(".")
        functools.reduce(dict.get, path, tree)[last] = value
    params.parse(tree, "params.yaml")


@pytest.mark.parametrize("text", ["train: [", "train:\n  lr: 1\n  lr: 2\n", "", None])
def test_a_file_that_is_broken_or_missing_is_named(tmp_path, text):
    path = tmp_path / "params.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RequestError, match=str(path)):
        params.load(path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(max_size=8) | st.integers(), inner)
        ),
        max_leaves=12,
    ),
    st.sampled_from([*SECTIONS, "nothing"]),
)
def test_any_content_is_accepted_or_refused_in_one_line(content, section):
    for tree in (
        content,
        {"line\nbreak": content},
        {section: content},
        {section: {"homography": content, "lr": content}},
    ):
        try:
            params.parse(tree, "params.yaml")
        except RequestError as error:
            assert "\n" not in str(error)


def test_no_key_that_a_stage_depends_on_has_a_default():
    """DVC compares the keys of params.yaml: a changed default would re-run nothing."""
    keys = list_keys(Params, "")
    stages = read_yaml(ROOT / "dvc.yaml")["stages"].values()
    dependencies = {name for stage in stages for name in stage.get("params", [])}
    assert dependencies <= {*keys}
    decisive = [
        key for key in keys if any(f"{key}.".startswith(f"{name}.") for name in dependencies)
    ]
    assert len(decisive) > 40
    views = "evaluate.views"  # completed from `views`
    # These two classes are code that the stage depends on, or change nothing by default.
    ours = (views, "train.augmentation.", "train.model.")
    optional = [key for key in decisive if not keys[key].is_required()]
    assert [key for key in optional if not key.startswith(ours)] == []
    assert {*Augmentation().model_dump().values()} == {0}


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("key", RunParams.model_fields)
def test_a_key_of_run_that_decides_the_weights_is_a_dependency(tree, key, norm):
    """A training is named by all that decides its weights: DVC must see the same keys."""
    tree["train"]["model"]["norm"] = norm
    tree["run"]["checkpoint_layers"] = False
    sections = params.parse(tree, "params.yaml")
    value = getattr(sections.run, key)
    others = {bool: lambda: not value, int: lambda: value + 1, str: lambda: "sqrt"}
    changed = sections.run.model_copy(update={key: others[type(value)]()})
    assert changed != sections.run
    before, after = (
        checkpoint.make_fingerprint(
            sections.model_copy(update={"run": run}), "data", "validation", 2
        )
        for run in (sections.run, changed)
    )
    stages = read_yaml(ROOT / "dvc.yaml")["stages"]
    assert before == after or f"run.{key}" in stages["train"]["params"]


def test_allow_training_images_is_a_dependency_of_train_and_evaluate():
    """It decides which photographs validate, and so the weights, and which ones test."""
    stages = read_yaml(ROOT / "dvc.yaml")["stages"]
    users = [
        name for name in stages if "run.allow_training_images" in stages[name].get("params", [])
    ]
    assert users == ["train", "evaluate"]


@pytest.mark.parametrize("blur", [0.0, 3.0])
def test_keys_that_evaluate_views_lacks_are_those_of_views(tree, blur):
    default = params.parse(tree, "params.yaml").evaluate
    assert default.views.photometric.blur == 0.8
    tree["evaluate"] = {**tree["evaluate"], "views": {"photometric": {"blur": blur}}}
    photometric = default.views.photometric.model_copy(update={"blur": blur})
    views = default.views.model_copy(update={"photometric": photometric})
    evaluate = params.parse(tree, "params.yaml").evaluate
    assert evaluate == default.model_copy(update={"views": views})
    stages = read_yaml(ROOT / "dvc.yaml")["stages"]
    assert {"evaluate", "views"} <= {*stages["evaluate"]["params"]}


def test_every_key_that_the_docs_name_exists():
    known_keys = {*SECTIONS, *list_keys(Params, "")}
    names = {key.rpartition(".")[2] for key in known_keys} | {"persist"}  # of dvc.yaml
    pages = [path for pattern in ("*.md", "docs/*.md", "deploy/*/*") for path in ROOT.glob(pattern)]
    pages.remove(ROOT / "CHANGELOG.md")  # of former keys
    section = rf"(?<![\w./])((?:{'|'.join(SECTIONS)})\.(?!yaml|sbatch)[a-z_][a-z_.]*\b)"
    count = 0
    for page in pages:
        text = page.read_text()
        full = re.findall(section, text)
        for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
            tree = YAML(typ="safe", pure=True).load(block)
            full += [f"{name}.{key}" for name, keys in tree.items() for key in keys]
        short = re.findall(r"`([a-z_]+): [^`\n]*`", text)
        unknown = {*full} - known_keys | {*short} - names
        assert not unknown, f"{page.name}: {unknown}"
        count += len(full) + len(short)
    assert count > 30
