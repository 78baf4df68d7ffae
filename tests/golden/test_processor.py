"""Views and SIFT have one hash on every x86-64 processor with AVX2, of any vendor."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("processor.json")
SCRIPT = """
import hashlib
import superglue_sift.sift
import cv2
import numpy as np
from skimage import data
from pipeline.views import homography, render
from pipeline.parameters.schema import Homography, Photometric

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
        rng = homography.generator(0, name, index)
        size = (gray.shape[1], gray.shape[0])
        H = homography.sample_view(rng, size, (320, 240), limits)
        homographies.update(H.tobytes())
        view = render.distort(render.render(gray, H, (320, 240)), rng, light)
        records = superglue_sift.sift.extract(view, 256)
        keypoints.update(records.tobytes())
print(homographies.hexdigest(), keypoints.hexdigest())
"""


def compute(**variables):
    """Hashes of homographies and keypoints in a new process with these variables."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("OPENCV_", "OPENBLAS_"))
    }
    environment.update(variables)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the hashes are those of x86-64")
def test_the_hashes_are_those_of_other_processors():
    stored = json.loads(FILE.read_text())
    assert compute() == [stored["homographies"], stored["keypoints"]]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels of x86-64")
def test_the_kernels_of_openblas_do_not_matter():
    assert compute(OPENBLAS_CORETYPE="Haswell") == compute(OPENBLAS_CORETYPE="Nehalem")
