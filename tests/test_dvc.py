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

from pipeline import params

ROOT = Path(__file__).resolve().parents[1]
TREE: Dict[str, Any] = YAML(typ="safe", pure=True).load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
STAGES = ["fetch", "keypoints", "train", "evaluate", "export"]
# Where evaluation adds its figures. The id in it is another after each training, also where the weights are the same.
NAMED_ONLY = "reports/train/mlflow_run.json"


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
    assert list(TREE["stages"]) == STAGES == list(params.SECTIONS)
    for name, stage in TREE["stages"].items():
        assert stage["params"] == [name]
        assert stage["desc"]
        assert f"python -m pipeline.{name} " in stage["cmd"] or f" pipeline.{name} " in stage["cmd"]


def test_dependencies_equal_the_import_closure() -> None:
    """`python tests/import_closure.py --write` mends it."""
    assert import_closure.differences(TREE) == []


@pytest.mark.parametrize("name", STAGES)
def test_what_a_stage_really_loads_is_among_its_dependencies(name: str) -> None:
    """The same, asked of the interpreter: import the stage and look at what it loaded."""
    modules = import_closure.modules_in(TREE["stages"][name]["cmd"])
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules!r}];"
        "print('\\n'.join(module.__file__ for name, module in sys.modules.items()"
        " if name.split('.')[0] == 'pipeline' and getattr(module, '__file__', None)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    loaded = {Path(line).relative_to(ROOT).as_posix() for line in done.stdout.decode().split()}
    assert loaded <= set(TREE["stages"][name]["deps"])


def test_the_data_a_stage_needs_is_what_an_earlier_one_leaves() -> None:
    left: List[str] = []
    for stage in TREE["stages"].values():
        data = [path for path in stage["deps"] if not path.startswith("pipeline/")]
        for path in data:
            assert any(path == out or path.startswith(out + "/") for out in left), path
        left += left_by(stage)
    assert len(left) == len(set(left))


def test_paths_on_the_command_line_are_those_declared() -> None:
    for name, stage in TREE["stages"].items():
        words = [word for word in re.findall(r"--[\w-]+ (\S+)", stage["cmd"]) if not word.isdigit()]
        known = [*stage["deps"], *left_by(stage), NAMED_ONLY]
        for word in words:
            assert any(path == word or path.startswith(word + "/") for path in known), f"{name}: {word}"


def test_what_must_outlive_a_kill_persists() -> None:
    for path in ("data/archives", "data/keypoints", "checkpoints"):
        flags = next(left_by(stage)[path] for stage in TREE["stages"].values() if path in left_by(stage))
        assert flags["persist"], path
    assert TREE["stages"]["fetch"]["outs"][1]["data/archives"]["cache"] is False


def test_metrics_are_kept_in_git_and_everything_else_out_of_it() -> None:
    metrics = {path for stage in TREE["stages"].values() for path in paths(stage.get("metrics", []))}
    assert set(TREE["metrics"]) == metrics
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
            [plot] if isinstance(plot, str) else [file for each in plot.values() for file in each["y"]]
        )
    ]
    for path in [*plotted, *(artifact["path"] for artifact in TREE["artifacts"].values())]:
        assert any(path == out or path.startswith(out + "/") for out in left), path


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


def test_the_closure_follows_every_kind_of_import(tmp_path: Path) -> None:
    files = {
        "pipeline/__init__.py": "def __getattr__(name):\n    from pipeline.room import offered\n",
        "pipeline/stage.py": "import os, pipeline.direct\nfrom pipeline.room import inner as other\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pipeline.never\n",
        "pipeline/direct.py": "def f():\n    if True:\n        from pipeline import lazy\n",
        "pipeline/lazy.py": "",
        "pipeline/never.py": "",
        "pipeline/room/__init__.py": "from . import sibling\n",
        "pipeline/room/sibling.py": "from ..room.cousin import name\n",
        "pipeline/room/cousin.py": "from pipeline import stage\n",
        "pipeline/room/inner.py": "",
        "pipeline/room/offered.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = import_closure.closure("pipeline.stage", root=tmp_path)
    assert found == sorted(set(files) - {"pipeline/never.py", "pipeline/room/offered.py"})


def test_a_command_names_the_modules_it_runs() -> None:
    cmd = "python -m pipeline.launch pipeline.train --keypoints data/pipeline.keypoints"
    assert import_closure.modules_in(cmd) == ["pipeline.launch", "pipeline.train"]
