"""dvc.yaml is the table of contents: its stages, what they depend on, and what they leave."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import import_closure
import pytest
from ruamel.yaml import YAML

from pipeline.parameters.schema import SECTIONS

ROOT = Path(__file__).resolve().parents[1]
TREE: Dict[str, Any] = YAML(typ="safe", pure=True).load(
    (ROOT / "dvc.yaml").read_text(encoding="utf-8")
)
STAGES = ["fetch", "keypoints", "train", "evaluate", "export"]
# In git, the inputs that no stage makes: the weights that ship, and what they were trained on.
SHIPPED = ("pretrained/superglue-sift.safetensors", "pretrained/superglue-sift.trained_on.txt")
# The MLflow run that metrics are added to, another in every clone and after each training;
# downloads, which a clone that pulls need not have.
NAMED_ONLY = ("reports/train/log.jsonl", "data/archives")


def paths(entries: List[Any]) -> Dict[str, Dict[str, Any]]:
    """Path -> flags of a list of outs, metrics or plots."""
    return {
        path: flags
        for entry in entries
        for path, flags in (entry.items() if isinstance(entry, dict) else [(entry, {})])
    }


def left_by(stage: Dict[str, Any]) -> Dict[str, Dict[str, Any]]:
    return {
        **paths(stage.get("outs", [])),
        **paths(stage.get("metrics", [])),
        **paths(stage.get("plots", [])),
    }


def test_the_stages_are_the_sections_of_params_in_order() -> None:
    assert (
        list(TREE["stages"])
        == STAGES
        == [name for name in SECTIONS if name != "views"] + ["export"]
    )
    for name, stage in TREE["stages"].items():
        asked = [
            key
            for key in stage.get("params", [])
            if key.partition(".")[0] != "keypoints" or name == "keypoints"
        ]
        assert asked == {
            "keypoints": ["views", name],
            "evaluate": ["views", name],
            "export": [],
        }.get(name, [name])
        assert stage["desc"]
        assert f"python -m pipeline.{name} " in stage["cmd"] or f" pipeline.{name} " in stage["cmd"]


def test_dependencies_hold_every_file_that_can_change_an_output() -> None:
    assert import_closure.differences(TREE) == []


# the test above reads every import of all of them
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "train")) for name in STAGES]
)
def test_what_a_stage_really_loads_is_among_its_dependencies(name: str) -> None:
    """The same, asked of the interpreter: import the stage and look at what it loaded."""
    modules = import_closure.modules_in(TREE["stages"][name]["cmd"])
    script = (
        "import importlib, sys; [importlib.import_module(name) for name in"
        f" {modules!r}];print('\\n'.join(name for name in sys.modules if name.split('.')[0] in"
        f" {import_closure.PACKAGES!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    # With what they load in their turn
    of_no_matter = import_closure.closure(import_closure.CHANGES_NO_OUTPUT)
    for module in done.stdout.decode().split():
        path = import_closure.module_file(module)
        excluded = any(
            module.startswith(f"{package}.") for package in import_closure.CHANGES_NO_OUTPUT
        )
        if path.endswith("__init__.py") or module in of_no_matter or excluded:
            continue
        assert any(
            import_closure.covers(dependency, path) for dependency in TREE["stages"][name]["deps"]
        ), path


def test_a_missing_and_a_useless_dependency_are_named() -> None:
    stages = {
        "train": {**TREE["stages"]["train"], "deps": ["data/keypoints", "pipeline/presets.py"]}
    }
    lines = import_closure.differences({"stages": stages})
    assert "train: deps lack pipeline/train/step.py" in lines
    assert "train: deps hold pipeline/presets.py, of which nothing can change the output" in lines
    assert not [line for line in lines if "progress" in line or "tracking" in line]


def test_dvc_yaml_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "dvc.yaml").read_text(encoding="utf-8").splitlines()) <= 200


def test_the_data_a_stage_needs_is_what_an_earlier_one_leaves() -> None:
    left: List[str] = []
    for stage in TREE["stages"].values():
        data = [path for path in stage["deps"] if path.split("/")[0] not in import_closure.PACKAGES]
        for path in data:
            assert path in SHIPPED or any(
                path == out or path.startswith(out + "/") for out in left
            ), path
        left += left_by(stage)
    assert len(left) == len(set(left))


def test_paths_on_the_command_line_are_those_declared() -> None:
    for name, stage in TREE["stages"].items():
        words = [
            word
            for word in re.findall(r"--[\w-]+ (?:\w+=)?(\S+)", stage["cmd"])
            if not word.isdigit()
        ]
        known = [*stage["deps"], *left_by(stage), *NAMED_ONLY]
        for word in words:
            assert any(path == word or path.startswith(word + "/") for path in known), (
                f"{name}: {word}"
            )


def test_what_must_outlive_a_kill_persists() -> None:
    best = [f"checkpoints/best.{ending}" for ending in ("safetensors", "json", "trained_on.txt")]
    for path in ("data/images", "data/keypoints", *best):
        flags = next(
            left_by(stage)[path] for stage in TREE["stages"].values() if path in left_by(stage)
        )
        assert flags["persist"], path


def test_metrics_are_kept_in_git_and_everything_else_out_of_it() -> None:
    """One short file is DVC's; the metrics.json of each stage are outputs of it that git keeps."""
    shown = [path for stage in TREE["stages"].values() for path in paths(stage.get("metrics", []))]
    assert shown == ["reports/evaluate/summary.json"]
    metrics = {*shown, *(f"reports/{name}/metrics.json" for name in STAGES[:-1])}
    for stage in TREE["stages"].values():
        for path, flags in left_by(stage).items():
            ignored = not subprocess.run(
                ["git", "check-ignore", "-q", "--no-index", path], cwd=ROOT
            ).returncode
            assert ignored == (path not in metrics), path
            assert path not in metrics or flags["cache"] is False


def test_plots_and_artifacts_are_files_of_the_stages() -> None:
    left = [path for stage in TREE["stages"].values() for path in left_by(stage)]
    plotted = [
        path
        for plot in TREE["plots"]
        for path in (
            [plot]
            if isinstance(plot, str)
            else [file for each in plot.values() for file in each["y"]]
        )
    ]
    for path in [*plotted, *(artifact["path"] for artifact in TREE["artifacts"].values())]:
        assert any(path == out or path.startswith(out + "/") for out in left), path


def test_the_pictures_are_shown_once_after_the_curves() -> None:
    """What a stage calls a plot, `dvc plots show` adds to the list of the file, in front of it."""
    assert not any("plots" in stage for stage in TREE["stages"].values())
    assert [plot for plot in TREE["plots"] if isinstance(plot, str)] == [TREE["plots"][-1]]
    assert TREE["plots"][-1] == "reports/evaluate/pictures"


def test_dvc_reads_the_file_and_reports_nothing_to_anybody() -> None:
    def dvc(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dvc", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, done.stdout.decode()
        return done.stdout.decode()

    assert dvc("stage", "list", "--names-only").split() == STAGES
    config = dvc("config", "--list", "--project")
    for line in ("core.analytics=false", "core.check_update=false", "core.autostage=false"):
        assert line in config
