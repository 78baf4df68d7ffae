"""The notebook of the tutorial: run from its first cell to its last, and shipped with what that
gave.
"""

import json
import re
from pathlib import Path

import pytest


def largest_error(notebook):
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
    assert largest_error(notebook) < 2  # the focal length is guessed and refined
    assert (tmp_path / "points.ply").stat().st_size > 1000


def test_the_notebook_ships_with_its_outputs(root):
    text = (root / "docs/tutorial.ipynb").read_text()
    notebook = json.loads(text)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    ran = [cell["execution_count"] for cell in code]
    assert ran == list(range(1, len(code) + 1)), "run in order"
    assert largest_error(notebook) < 2 and len(text) < 600_000 and text.count('"image/') == 2
    outputs = [one for cell in code for one in cell["outputs"]]
    assert not [one for one in outputs if one.get("name") == "stderr" or "ename" in one]
    for private in (str(Path.home()), "/tmp/", "/root", "/home/", "site-packages"):
        assert private not in text
