"""Run the tutorial's notebook and keep the outputs.

    python -m benchmarks.dev.notebook docs/tutorial.ipynb

It runs in an empty folder, so that no file is left next to the notebook. It needs nbclient,
ipykernel, matplotlib, scikit-image and pycolmap.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any, Optional, Sequence

SECONDS = 600  # of a cell, at most


def run_notebook(path: Path, folder: Path) -> Any:
    """Run a notebook.

    Args:
        path: the notebook, which stays as it is.
        folder: where it runs.

    Returns:
        The notebook (nbformat 4) with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell fails.
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
            # Lines of progress differ each time.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {name: notebook.metadata[name] for name in ("kernelspec", "language_info")}
    return notebook


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the notebook and write it."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("notebook", type=Path, help="for instance docs/tutorial.ipynb")
    path = parser.parse_args(argv).notebook
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(run_notebook(path, Path(folder)), path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
