"""Waiting threads sleep in every command that computes: set before OpenMP is loaded, unless the
user has set it.
"""

import os
import re
import subprocess
import sys

import pytest

from superglue_sift import environment

SCRIPT = "import sys; from {} import {}; sys.exit({}())"  # what pip writes for an entry point


def spins_of(words, **said):
    """GOMP_SPINCOUNT as GNU's OpenMP, which torch loads, read it in a separate process."""
    kept = {
        name: value for name, value in os.environ.items() if name not in environment.WAIT_VARIABLES
    }
    values = {**kept, **said, "OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run([sys.executable, *words], env=values, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if not found:
        pytest.skip("this torch is not built with GNU's OpenMP")
    return found.group(1)


def entry_point(root):
    """The script of `superglue-match`."""
    words = re.search(
        r'^superglue-match = "([\w.]+):(\w+)"', (root / "pyproject.toml").read_text(), re.MULTILINE
    )
    return SCRIPT.format(*words.groups(), words.group(2))


def test_threads_of_the_installed_command_sleep_and_what_the_user_says_wins(root):
    words = ["-c", entry_point(root), "--version"]
    assert spins_of(words) == "0"
    assert int(spins_of(words, OMP_WAIT_POLICY="active")) > 1000


@pytest.mark.slow
def test_threads_of_a_training_sleep_while_they_wait():
    assert spins_of(["-m", "pipeline.train", "--help"]) == "0"


def test_a_started_process_waits_passively():
    variables = {"OMP_NUM_THREADS": "4"}
    environment.wait_passively(variables)
    assert variables == {
        "OMP_NUM_THREADS": "4",
        "OMP_WAIT_POLICY": "passive",
        "OPENBLAS_NUM_THREADS": "1",
    }
