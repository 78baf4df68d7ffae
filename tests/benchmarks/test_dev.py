"""benchmarks.dev: every program starts, since each is run only from time to time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.dev import results

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(path.stem for path in (ROOT / "benchmarks" / "dev").glob("[!_]*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_says_how_it_is_used(program):
    command = [sys.executable, "-m", f"benchmarks.dev.{program}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_a_table_names_the_processor_also_where_there_is_no_cpuinfo(monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    results.name_processor.cache_clear()
    assert results.name_processor().endswith(f", {os.cpu_count()} cores")
    results.name_processor.cache_clear()
