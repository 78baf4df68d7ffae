"""Every stage has one hash on every x86-64 processor with AVX2, of any vendor: `processor.json`.

The tests compute the hashes on the processor they run on. Run them on processors of both vendors.

`PYTHONPATH=.:tests python tests/golden/test_processor.py` writes the file anew, for a change that
is meant to move them. "agreed" names the processors that have computed these hashes so far.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from reading import read_json, read_yaml

from pipeline import presets, provenance
from superglue_sift import environment
from superglue_sift.files import compute_file_sha256
from superglue_sift.network.weights import load_model_file

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("processor.json")
OURS = ("OPENCV_", "OPENBLAS_", "OMP_", "MKL_", "ONEDNN_", "ATEN_", "NPY_", "NPROC_", "TRAIN_")
# By stage: files, or patterns of files. Left out is what names versions and parameters.
OUTPUTS = {
    "fetch": ["data/images/manifest.csv"],
    "keypoints": ["data/keypoints/*/*.safetensors"],
    "train": [
        "checkpoints/best.safetensors",
        "reports/train/curves/*",
        "reports/train/metrics.json",
    ],
    "evaluate": [
        f"reports/evaluate/{name}" for name in ("*.csv", "curves/*", "metrics.json", "pictures/*")
    ],
}
SCRIPT = """
import hashlib
import superglue_sift.features.sift
import cv2
import numpy as np
from skimage import data
from pipeline.keypoints import store, views
from pipeline.params import Homography, Photometric

assert not cv2.ipp.useIPP()
limits = Homography(
    scale_min=0.5, perspective=0.3, rotation_deg=45.0, tilt_deg=40.0, max_upscale=2.0
)
light = Photometric(brightness=0.2, contrast=0.3, gamma=0.2, blur=0.8, noise=0.02, jpeg=0.5)
homographies = hashlib.sha256()
keypoints = hashlib.sha256()
for name in ("astronaut", "coffee"):
    gray = cv2.cvtColor(getattr(data, name)(), cv2.COLOR_RGB2GRAY)
    for index in range(3):
        rng = views.make_generator(0, name, index)
        size = (gray.shape[1], gray.shape[0])
        H = views.sample_view(rng, size, (320, 240), limits)
        homographies.update(H.tobytes())
        view = views.distort(views.render(gray, H, (320, 240)), rng, light)
        features = superglue_sift.features.sift.extract(view, 256)
        keypoints.update(store.pack_records(features).tobytes())
print(homographies.hexdigest(), keypoints.hexdigest())
"""


def plain_environment():
    """Variables of a program, without those by which libraries choose their code."""
    values = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    values.update(PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", MLFLOW_TRACKING_URI="")
    values["PATH"] = f"{Path(sys.executable).parent}:{values['PATH']}"
    return values


def compute_keypoints(values):
    """Hashes of homographies and keypoints in a new process with these variables."""
    command = [sys.executable, "-c", SCRIPT]
    printed = subprocess.check_output(command, env=values, text=True)
    return dict(zip(("homographies", "keypoints"), printed.split()))


def compute_stages(values, folder):
    """Hashes of the outputs of preset `ci`, by the commands of dvc.yaml, in a new folder."""
    folder.mkdir()
    (folder / "params.yaml").write_text(presets.read_preset("ci"))
    (folder / "pretrained").symlink_to(ROOT / "pretrained")
    stages = read_yaml(ROOT / "dvc.yaml")["stages"]
    hashes = {}
    for stage, patterns in OUTPUTS.items():
        command = stages[stage]["cmd"].replace("--robustness 20", "")
        subprocess.run(command, shell=True, cwd=folder, env=values, check=True)
        hashes.update({pattern: hash_files(folder, pattern) for pattern in patterns})
    return hashes


def hash_files(folder, pattern):
    """SHA-256 of the names and contents of files; of weights only the tensors."""
    total = hashlib.sha256()
    paths = sorted(folder.glob(pattern))
    assert paths, pattern
    for path in paths:
        total.update(str(path.relative_to(folder)).encode())
        if path.name == "best.safetensors":
            for name, tensor in sorted(load_model_file(path)[0].items()):
                total.update(name.encode() + tensor.numpy().tobytes())
        else:
            total.update(compute_file_sha256(path).encode())
    return total.hexdigest()


def describe_processor():
    """`GenuineIntel, Intel(R) Xeon(R) Processor, family 6, model 207, with AVX-512`."""
    about = dict(re.findall(r"(\S.*?)\s*: (.*)", environment.CPU_INFO.read_text()))
    wide = "with" if "avx512vl" in about["flags"] else "without"
    kind = f"family {about['cpu family']}, model {about['model']}, {wide} AVX-512"
    return f"{provenance.read_processor()}, {kind}"


def versions():
    return provenance.get_release_versions((*provenance.COMPUTING, "pillow", "scikit-image"))


@pytest.fixture(scope="module")
def stored():
    """`processor.json`; skips where its hashes do not hold."""
    if platform.machine() != "x86_64":
        pytest.skip("the hashes are those of x86-64")
    values = read_json(FILE)
    if values["versions"] != versions():
        pytest.skip(f"the hashes are those of {values['versions']}")
    return values


def test_keypoints_have_the_hashes_of_other_processors(stored):
    assert compute_keypoints(plain_environment()) == stored["views"]


@pytest.mark.slow
def test_the_kernels_of_openblas_do_not_matter(stored):
    for kernels in ("Haswell", "Nehalem"):
        values = {**plain_environment(), "OPENBLAS_CORETYPE": kernels}
        assert compute_keypoints(values) == stored["views"]


@pytest.mark.slow
def test_all_stages_have_the_hashes_of_other_processors(stored, tmp_path, capsys):
    hashes = compute_stages(plain_environment(), tmp_path / "run")
    different = [name for name in hashes if hashes[name] != stored["stages"].get(name)]
    with capsys.disabled():
        print(f"\n{describe_processor()}: {f'other {different}' if different else 'agrees'}")
    assert not different and hashes.keys() == stored["stages"].keys()


def write():
    """Write the hashes of this processor, and which processors have the same."""
    before = read_json(FILE)
    values = plain_environment()
    with tempfile.TemporaryDirectory() as folder:
        stages = compute_stages(values, Path(folder) / "run")
    now = {"versions": versions(), "views": compute_keypoints(values), "stages": stages}
    same = now == {name: before[name] for name in now}
    processor = describe_processor()
    print(f"{processor}: {'agrees' if same else 'DIFFERS'}")
    now["agreed"] = list(dict.fromkeys([*(before["agreed"] if same else []), processor]))
    FILE.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    write()
