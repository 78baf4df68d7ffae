"""A training small enough to be killed many times."""

import json
from pathlib import Path

from made_params import make_tree
from made_views import make_stores

from pipeline import params

ROOT = Path(__file__).resolve().parents[2]
STEPS = 8
TRAIN = {
    "init_from": "",
    "precision": "float32",  # auto would be bfloat16 on some machines
    "batch": 8,
    "steps": STEPS,
    "dim": 16,
    "layers": 1,
    "heads": 2,
    "max_keypoints": 24,
    "warmup_steps": 2,
    "val_pairs": 4,
    "val_every": 2,
    "save_every": 2,
    "log_every": 2,
    "decay_start": 3,
    "keypoint_drop": 0.2,
}


def write_params(file, **sections):
    """Write the sample preset with these values in its sections."""
    read = params.load(ROOT / "presets/sample.yaml")
    whole = {
        name: {**getattr(read, name).model_dump(), **values} for name, values in sections.items()
    }
    file.write_text(json.dumps(make_tree(whole)))  # JSON is YAML


class Workbench:
    """A folder with synthetic views, and the arguments of trainings on them."""

    def __init__(self, folder):
        self.folder = folder
        self.keypoints = make_stores(folder / "keypoints")
        self._clean = {}

    def arguments(self, keys=()):
        """Command line of pipeline.train, without --out and --reports."""
        file = self.folder / f"params-{abs(hash(repr(keys)))}.yaml"
        write_params(file, train={**TRAIN, **dict(keys)})
        return ["--keypoints", str(self.keypoints), "--params", str(file)]

    def training(self, name, keys=()):
        """The command line of one below this folder, whose reports are in NAME-r."""
        folder = self.folder / name
        return [*self.arguments(keys), "--out", str(folder), "--reports", f"{folder}-r"]

    def clean(self, ranks, keys=()):
        """Digest of the same training without a fault."""
        from faults.group import until_done

        if (ranks, keys) not in self._clean:
            digest, codes = until_done(self.folder / "clean", self.arguments(keys), ranks)
            assert codes == [[0] * ranks]
            self._clean[ranks, keys] = digest
        return self._clean[ranks, keys]
