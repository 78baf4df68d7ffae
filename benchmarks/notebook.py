"""Run the tutorial's notebook and keep the outputs.

    python -m benchmarks.notebook docs/tutorial.ipynb

It runs in an empty folder, so that no file is left next to the notebook. It needs nbclient,
ipykernel, matplotlib, scikit-image and pycolmap.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

SECONDS = 600  # of a cell, at most


def executed(path: Path, folder: Path) -> Any:
    """Run the notebook (nbformat 4) of `path` in `folder`, and return it with its outputs.

    Raises nbclient's error of a cell.
    """
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources=resources
    )
    client.record_timing = False
    client.execute(env={**os.environ, "PYTHONPATH": os.getcwd()})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            # lines of progress differ each time
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    notebook.metadata = {name: notebook.metadata[name] for name in ("kernelspec", "language_info")}
    return notebook


def main(file: str) -> None:
    """Run the notebook and write it."""
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(executed(Path(file), Path(folder)), file)


if __name__ == "__main__":
    main(*sys.argv[1:])
