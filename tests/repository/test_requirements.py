"""The locks: compiled from the lists next to them, hashed throughout, and alike where the stacks
must be.
"""

import shutil
import subprocess
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from reading import read_pins

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
PYTHON = {"modern": "3.11", "cu111": "3.9"}
LOCKS = ["modern", "modern-dev", "modern-extras", "cu111", "cu111-dev"]


def wanted(name, stack):
    """The requirements of an .in file that hold on a stack."""
    lines = (line.split("#")[0].strip() for line in (REQUIREMENTS / name).read_text().splitlines())
    found = [Requirement(line) for line in lines if line]
    python = {"python_version": PYTHON[stack]}
    return [each for each in found if each.marker is None or each.marker.evaluate(python)]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_what_its_list_asks_for(name):
    stack, _, source = name.partition("-")
    source = source or "same"
    lock = read_pins(REQUIREMENTS / f"{name}.lock")
    for requirement in wanted(f"{source}.in", stack):
        name = requirement.name.lower().replace(".", "-").replace("_", "-")
        if name == "torch":
            assert name not in lock
            continue
        assert Version(lock[name]) in requirement.specifier, requirement


def test_the_stacks_agree_where_a_difference_would_show():
    modern, cu111 = (read_pins(REQUIREMENTS / f"{stack}.lock") for stack in ("modern", "cu111"))
    for name in ("opencv-python", "dvc", "poselib", "ruamel-yaml", "psutil"):
        assert modern[name] == cu111[name], name


def test_programs_of_an_environment_find_its_python_without_activation(tmp_path):
    """`.venv/bin/dvc exp run` starts stages by the name `python`."""
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    shutil.copy(REQUIREMENTS / "stages.pth", site)
    stage = "python -c 'import sys; print(sys.prefix)'"
    program = f"import subprocess; subprocess.run({stage!r}, shell=True, check=True)"
    python = tmp_path / "venv/bin/python"
    bare = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([python, "-c", program], env=bare, stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode().strip() == str(tmp_path / "venv")
