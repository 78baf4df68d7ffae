"""A small workspace for the stage `evaluate`, runs of it, and made rows of its table."""

import contextlib
import csv
from unittest import mock

import numpy as np
import pandas as pd
from made_params import format_tree
from made_scenes import write_image_set, write_model
from reading import read_json

from pipeline import errors
from pipeline.evaluate import __main__ as evaluate
from pipeline.evaluate import charts, metrics, report
from pipeline.evaluate.matchers import MATCHERS, OURS

HOMOGRAPHY = {"scale_min": 0.6, "perspective": 0.2, "rotation_deg": 30.0, "tilt_deg": 0.0}
PHOTOMETRIC = {"brightness": 0.1, "contrast": 0.1, "gamma": 0.1, "blur": 0.3, "noise": 0.01}
VIEWS = {
    "homography": {**HOMOGRAPHY, "max_upscale": 2.0},
    "photometric": {**PHOTOMETRIC, "jpeg": 0.2},
}
SECTION = {"width": 160, "height": 120, "pairs_per_image": 3, "max_keypoints": 100}
PARAMS = format_tree({"views": VIEWS, "evaluate": SECTION})


def make_workspace(folder, photo):
    """A folder with params.yaml, a model, and two held-out images."""
    (folder / "params.yaml").write_text(PARAMS)
    write_model(folder / "model.safetensors")
    images = {"a.png": photo[:300, :400], "b.png": photo[100:, 150:]}
    write_image_set(folder / "images", images, "test")
    return folder


def run(folder, *extra, draw=False, threshold=("--threshold", "0.1")):
    """The exit code of an evaluation, without its charts, which take most of the time."""
    words = ["--model", folder / "model.safetensors", "--params", folder / "params.yaml"]
    words += ["--images", folder / "images", "--out", folder / "out"]
    words += ["--device", "cpu", *threshold, *extra]
    no_charts = mock.patch.object(charts, "draw_line_chart", lambda *_, **__: b"")
    with contextlib.nullcontext() if draw else no_charts:
        return errors.run(evaluate.main, list(map(str, words)))


def read_metrics(folder):
    """metrics.json of an evaluation."""
    return read_json(folder / "out/metrics.json")


def read_csv(path):
    """The lines of a CSV file."""
    with path.open() as file:
        return list(csv.DictReader(file))


def make_rows(pair, matcher, error, scene=None, **values):
    """The rows of one matcher on one pair, with the same error by two estimators."""
    metrics_of_pair = {"keypoints0": 20, "keypoints1": 20, "matches": 10, "correct": 5}
    metrics_of_pair.update({"true_matches": 8, "found": 4, "precision": 0.5, "recall": 0.5})
    metrics_of_pair.update(values)
    start = (pair, scene or f"photograph of {pair}", matcher)
    rows = [(*start, "", False, metric, float(value)) for metric, value in metrics_of_pair.items()]
    return rows + [(*start, name, False, "error", error) for name in ("ransac", "dlt")]


NO_MATCHES = np.zeros(0), np.zeros(0, bool), np.zeros(0, bool), 8


def make_results(errors_of_ours, errors_of_others, further=(), models=None, **changes):
    """Results of an evaluation with a photograph for each pair: all matchers but ours have the
    second errors, and `nn` one pixel more. `further` are names of other networks, `models` what
    protocol.json says about networks.
    """
    rows = []
    for number, (ours, others) in enumerate(zip(errors_of_ours, errors_of_others)):
        rows_of_pair = []
        for name in (*MATCHERS, *further):
            error = ours if name == OURS else others + (name == "nn")
            rows_of_pair += make_rows(str(number), name, error)
        rows.append(rows_of_pair)
    table = metrics.make_table(rows)
    networks = [OURS, *further]
    outcomes = {name: [NO_MATCHES] * len(rows) for name in networks}
    values = metrics.compute_pair_values(table, outcomes)
    samples = metrics.bootstrap_scenes(values, outcomes)
    frames = (
        metrics.summarize(values, samples),
        metrics.compare(values, samples, networks),
        pd.DataFrame(),
        metrics.compute_calibration([NO_MATCHES]),
        pd.concat({OURS: metrics.compute_precision_recall_curve([NO_MATCHES])}, names=["matcher"]),
    )
    model = {"file": "m.safetensors", "digest": "0123456789", "step": 7}
    models = {name: {**model, **(models or {}).get(name, {})} for name in networks}
    fields = {"protocol": {"models": models}, **changes}
    return report.Results("made <b>", "photographs", table, values, *frames, **fields)
