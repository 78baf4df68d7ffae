"""The notebook of the tutorial: run from its first cell to its last, and shipped with what that
gave.
"""

import json
import re
from pathlib import Path

import pytest


def read_largest_error(notebook):
    """Read the largest error of the six cameras, in percent of their path, from the last cell."""
    text = "".join(notebook["cells"][-1]["outputs"][0]["text"])
    error = re.fullmatch(r"6 of 6 images.*\n.*: ([\d.]+) % .*\n", text)
    assert error, text
    return float(error[1])


@pytest.mark.slow
def test_the_notebook_places_every_camera(root, tmp_path, monkeypatch):
    for name in ("nbformat", "nbclient", "ipykernel", "pycolmap"):
        pytest.importorskip(name)
    from benchmarks.dev.notebook import run_notebook

    monkeypatch.chdir(root)
    notebook = run_notebook(root / "docs/tutorial.ipynb", tmp_path)
    assert read_largest_error(notebook) < 2  # the focal length is guessed and refined
    assert (tmp_path / "points.ply").stat().st_size > 1000


def test_the_notebook_ships_with_its_outputs(root):
    text = (root / "docs/tutorial.ipynb").read_text()
    notebook = json.loads(text)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1)), "run in order"
    assert read_largest_error(notebook) < 2
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output.get("name") == "stderr" or "ename" in output]
    for private in (str(Path.home()), "/tmp/", "/root", "/home/", "site-packages"):
        assert private not in text
