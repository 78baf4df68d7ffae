"""The notebook of the tutorial, run from its first cell to its last."""

from __future__ import annotations

import re

import pytest


@pytest.mark.slow
def test_the_notebook_places_every_camera(root, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("pycolmap")
    monkeypatch.setenv("PYTHONPATH", str(root), prepend=":")
    notebook = nbformat.read(root / "docs" / "tutorial.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not kept: they would grow old"
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    said = notebook.cells[-1].outputs[0].text
    placed, images, off = re.fullmatch(r"(\d) of (\d) images placed, the worst ([\d.]+) % .*\n", said).groups()
    assert placed == images == "6"
    assert float(off) < 2, said  # of the path; the focal length is guessed and refined
    assert (tmp_path / "points.ply").stat().st_size > 1000
