"""The parts of a release agree: version, citation, changelog, card of weights, bounds, wheel."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from reading import read_yaml

import superglue_sift

ROOT = Path(__file__).resolve().parents[2]


def requirements_of(section):
    """The requirements in one list of pyproject.toml, by name."""
    text = (ROOT / "pyproject.toml").read_text()
    entries = re.search(rf"^{section} = \[(.*?)\]", text, re.MULTILINE | re.DOTALL).group(1)
    requirements = [Requirement(entry) for entry in re.findall(r'"([^"]+)"', entries)]
    return {requirement.name: requirement for requirement in requirements}


def test_version_and_date_are_those_of_citation_and_changelog():
    citation = read_yaml(ROOT / "CITATION.cff")
    heading = re.search(r"^## (\S+), (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version, date = heading.groups()
    assert version == citation["version"] == superglue_sift.__version__
    assert date == str(citation.get("date-released", "unreleased"))
    for text in (
        (ROOT / "Dockerfile").read_text(),
        (ROOT / "docker/mlflow/Dockerfile").read_text(),
    ):
        assert set(re.findall(r"^ARG VERSION=(\S+)", text, re.MULTILINE)) <= {version}


def test_the_card_of_the_weights_states_their_size_and_data():
    card = (ROOT / "pretrained/README.md").read_text()
    weights = ROOT / "pretrained/superglue-sift.safetensors"
    assert f"{weights.stat().st_size / 1e6:.1f} MB" in card
    names = (ROOT / "pretrained/superglue-sift.trained_on.txt").read_text()
    count = len(re.findall(r"^\d+\s*$", names, re.MULTILINE))
    assert f"{count:,} COCO photographs" in card


@pytest.mark.parametrize(
    "name", ["torch", "numpy", "opencv-python", "pillow", "safetensors", "scipy", "tqdm"]
)
def test_a_dependency_has_bounds_that_hold_the_pins_of_both_stacks(name):
    bounds = requirements_of("dependencies")[name].specifier
    assert {bound.operator for bound in bounds} == {">=", "<"}
    lists = [(ROOT / f"requirements/{name}.in").read_text() for name in ("same", "torch")]
    pins = re.findall(rf"^{name}==([0-9.]+)", "".join(lists), re.MULTILINE)
    if name == "torch":
        pins.remove("1.10.2")  # the CUDA 11.1 stack runs from the clone
    assert pins and all(Version(pin) in bounds for pin in pins)


@pytest.mark.slow
def test_the_wheel_holds_the_weights_and_the_page(root, tmp_path):
    # of a copy, since setuptools leaves folders of its own in the sources
    for name in ("superglue_sift", "pretrained"):
        shutil.copytree(root / name, tmp_path / "clone" / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path / "clone")
    words = ["--no-deps", "--no-build-isolation", "-w", tmp_path, tmp_path / "clone"]
    subprocess.run([sys.executable, "-m", "pip", "-q", "wheel", *words], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {*zipfile.ZipFile(wheel).namelist()}
    packages = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"superglue_sift"}
    page = root / "superglue_sift/apps/serve.html"
    modules = {path.relative_to(root).as_posix() for path in (page, *page.parents[1].rglob("*.py"))}
    weights = ("superglue-sift.safetensors", "superglue-sift.trained_on.txt")
    assert modules | {f"superglue_sift/pretrained/{name}" for name in weights} <= names
