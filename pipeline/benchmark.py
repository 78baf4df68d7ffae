"""The speed table of this machine: `python -m pipeline.benchmark`, short for `python -m benchmarks`
in a clone.

The rows are in `benchmarks/`, which the wheel does not contain.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Optional, Sequence

from pipeline import errors
from pipeline.errors import RequestError


def main(_argv: Optional[Sequence[str]] = None) -> int:
    root = Path(__file__).resolve().parents[1]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise RequestError(
            f"{root / 'benchmarks'}: not there; the benchmark comes with a clone, not with the"
            " wheel"
        )
    sys.path.insert(0, str(root))
    runpy.run_module("benchmarks", run_name="__main__")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
