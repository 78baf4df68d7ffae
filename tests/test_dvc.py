"""dvc.yaml is the table of contents: its stages, what they depend on, and what they leave."""

import re
import subprocess
import sys
from pathlib import Path

import import_closure
from reading import read_yaml

from pipeline.params import Params

ROOT = Path(__file__).resolve().parents[1]
TREE = read_yaml(ROOT / "dvc.yaml")
# The MLflow run that metrics are added to, another in every clone and after each training;
# downloads, which a clone that pulls need not have.
NAMED_ONLY = ("reports/train/log.jsonl", "data/archives")


def left_by(stage):
    """Path -> flags of what a stage leaves."""
    left = {}
    for entry in [*stage.get("outs", []), *stage.get("metrics", [])]:
        left.update(entry if isinstance(entry, dict) else {entry: {}})
    return left


def test_dependencies_hold_every_file_that_can_change_an_output():
    lines = import_closure.differences(TREE)
    assert not lines, "dvc.yaml differs from the imports of its stages: " + "; ".join(lines)


def test_a_missing_and_a_useless_dependency_are_named():
    stages = {
        "train": {**TREE["stages"]["train"], "deps": ["data/keypoints", "pipeline/presets.py"]}
    }
    lines = import_closure.differences({"stages": stages})
    assert "train: deps lack pipeline/train/trainer.py" in lines
    assert "train: deps hold pipeline/presets.py, of which nothing can change the output" in lines
    # What lists, names and tables hold is read and written by it
    assert "train: deps lack superglue_sift/files.py" in lines
    assert not [line for line in lines if "progress" in line or "tracking" in line]


def test_a_module_by_which_a_stage_only_prints_is_no_dependency_of_that_stage_alone():
    for name, stage in TREE["stages"].items():
        deps = [path for path in stage["deps"] if path != "pipeline/provenance.py"]
        lines = import_closure.differences({"stages": {name: {**stage, "deps": deps}}})
        named = f"{name}: deps lack pipeline/provenance.py" in lines
        assert named == (name not in ("fetch", "keypoints")), name


def test_paths_on_the_command_line_are_those_declared():
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


def test_git_keeps_what_the_cache_of_dvc_does_not():
    left = {}
    for stage in TREE["stages"].values():
        left.update(left_by(stage))
    command = ["git", "check-ignore", "--no-index", *left]
    ignored = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE).stdout.decode().split()
    cached = [path for path, flags in left.items() if flags.get("cache", True)]
    twice = {*cached} - {*ignored}
    assert not twice, f"add to .gitignore, or say `cache: false` in dvc.yaml: {twice}"
    nowhere = {*ignored} - {*cached}
    assert not nowhere, f".gitignore has outputs of `cache: false`, which nothing keeps: {nowhere}"
    assert len(cached) < len(left)


def test_dvc_reads_the_file():
    command = [sys.executable, "-m", "dvc", "stage", "list", "--names-only"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode().split() == [*TREE["stages"]]


def test_each_section_of_params_is_that_of_a_stage_in_the_same_order():
    """`views` and `run` belong to several stages. A stage may do without a section, as `export`."""
    sections = [name for name in Params.model_fields if name not in ("views", "run")]
    stages = [name for name in TREE["stages"] if name in sections]
    missing = [name for name in sections if name not in stages]
    assert not missing, f"pipeline/params.py has sections without a stage in dvc.yaml: {missing}"
    order = f"the sections of pipeline/params.py have another order than the stages: {stages}"
    assert stages == sections, order


def test_each_stage_runs_the_module_of_its_name():
    for name, stage in TREE["stages"].items():
        module = f"pipeline.{name}"
        assert re.search(rf"\bpython -m (pipeline\.launch )?{module}\b", stage["cmd"]), (
            f"dvc.yaml: the stage {name} runs another module than {module}"
        )
        used = [param for param in stage.get("params", []) if param.split(".")[0] == name]
        assert used or name not in Params.model_fields, (
            f"dvc.yaml: the stage {name} has no params of its section {name}"
        )
