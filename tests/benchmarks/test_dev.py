"""benchmarks.dev: every program starts, since each is run only from time to time."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(path.stem for path in (ROOT / "benchmarks" / "dev").glob("[!_]*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_says_how_it_is_used(program):
    command = [sys.executable, "-m", f"benchmarks.dev.{program}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
