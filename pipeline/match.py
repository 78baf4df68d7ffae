"""Match two images with a trained model: `superglue-match` by another name.

`python -m pipeline.match A.jpg B.jpg --model models/superglue.safetensors --out matches.png --json
matches.json`
"""

from __future__ import annotations

from superglue_sift import environment

if __name__ == "__main__":
    environment.wait_passively()  # this must come before torch is loaded

from pipeline import errors
from superglue_sift.apps.cli import main

if __name__ == "__main__":
    raise SystemExit(errors.run(main))
