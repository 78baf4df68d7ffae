"""dvc.yaml is the table of contents: its stages, what they depend on, and what they leave."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from reading import read_yaml

from pipeline.params import Params

ROOT = Path(__file__).resolve().parents[1]
TREE = read_yaml(ROOT / "dvc.yaml")
# The MLflow run that metrics are added to, another in every clone and after each training
NAMED_ONLY = ("reports/train/mlflow.json",)
# Keys of other sections by which a stage only refuses to go on, or names a run. Those of `run`
# that decide a training have a test of their own (test_params.py).
CHANGE_NO_OUTPUT = {
    "fetch": {"train.init_from", "run.allow_training_images"},
    "train": {"fetch", "run"},
    "evaluate": {"keypoints.extractor"},
}


def list_outputs(stage):
    """Path -> flags of the outputs of a stage."""
    outputs = {}
    for entry in [*stage.get("outs", []), *stage.get("metrics", [])]:
        outputs.update(entry if isinstance(entry, dict) else {entry: {}})
    return outputs


@pytest.mark.parametrize("name", TREE["stages"])
def test_every_key_that_a_stage_reads_is_listed(name):
    """DVC repeats no stage after a change of a key that dvc.yaml does not list."""
    package = ROOT / "pipeline" / name
    text = "".join(
        path.read_text()
        for path in [*package.glob("*.py"), package.with_suffix(".py")]
        if path.exists()
    )
    # For example `sections.train.lr` and `params.load(path).train`
    chains = re.findall(r"(?:sections|load\(\S+\))\.([a-z_]+(?:\.[a-z_]+)?)", text)
    read = {key for key in chains if key.split(".")[0] in Params.model_fields}
    read |= {"train.precision"} if "params.is_portable(" in text else set()
    assert read or name == "export"
    listed = {*TREE["stages"][name]["params"], *CHANGE_NO_OUTPUT.get(name, ())}
    assert {key for key in read if not {key, key.split(".")[0]} & listed} == set()


def test_paths_on_the_command_line_are_those_declared():
    for name, stage in TREE["stages"].items():
        words = [
            word
            for word in re.findall(r"--[\w-]+ (?:\w+=)?(\S+)", stage["cmd"])
            if not word.isdigit()
        ]
        declared = [*stage["deps"], *list_outputs(stage), *NAMED_ONLY]
        for word in words:
            assert any(f"{path}/".startswith(f"{word}/") for path in declared), f"{name}: {word}"


def test_git_ignores_exactly_the_outputs_in_the_cache_of_dvc():
    outputs = {}
    for stage in TREE["stages"].values():
        outputs.update(list_outputs(stage))
    command = ["git", "check-ignore", "--no-index", *outputs]
    ignored = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE).stdout.decode().split()
    cached = {path for path, flags in outputs.items() if flags.get("cache", True)}
    assert {*ignored} == cached < {*outputs}


def test_dvc_reads_the_file():
    command = [sys.executable, "-m", "dvc", "stage", "list", "--names-only"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode().split() == [*TREE["stages"]]


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
