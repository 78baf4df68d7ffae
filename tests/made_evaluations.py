"""A small workspace for the stage `evaluate`, and runs of it."""

import contextlib
import csv
from unittest import mock

from made_scenes import write_image_set, write_model
from reading import read_json

from pipeline import errors
from pipeline.evaluate import __main__ as evaluate
from pipeline.report import page

PARAMS = """
views:
  homography:
    {scale_min: 0.6, perspective: 0.2, rotation_deg: 30.0, tilt_deg: 0.0, max_upscale: 2.0}
  photometric: {brightness: 0.1, contrast: 0.1, gamma: 0.1, blur: 0.3, noise: 0.01, jpeg: 0.2}
evaluate:
  width: 160
  height: 120
  pairs_per_image: 3
  max_keypoints: 100
"""


def make_workspace(folder, photo):
    """A folder with params.yaml, a model, and two held-out images."""
    (folder / "params.yaml").write_text(PARAMS)
    write_model(folder / "model.safetensors")
    images = {"a.png": photo[:300, :400], "b.png": photo[100:, 150:]}
    write_image_set(folder / "images", images, "test")
    return folder


def words(folder, *extra, out="out"):
    """The command line of an evaluation in a workspace."""
    named = {"model": "model.safetensors", "params": "params.yaml", "images": "images", "out": out}
    paths = [word for name, path in named.items() for word in (f"--{name}", folder / path)]
    return [str(word) for word in (*paths, "--device", "cpu", "--threshold", "0.1", *extra)]


def run(folder, *extra, out="out", charts=False):
    """The exit code of an evaluation, without its charts, which take most of the time."""
    no_charts = mock.patch.object(page.charts, "line_chart", lambda *_, **__: "")
    with contextlib.nullcontext() if charts else no_charts:
        return errors.run(evaluate.main, words(folder, *extra, out=out))


def read_metrics(folder, out="out"):
    """metrics.json of an evaluation."""
    return read_json(folder / out / "metrics.json")


def read_csv(path):
    """The lines of a CSV file."""
    with path.open() as file:
        return list(csv.DictReader(file))
