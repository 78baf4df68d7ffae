"""Learning curves of several runs in one picture, from the files of their trainings."""

from __future__ import annotations

import json

import numpy as np
import pytest
from made_views import made_store

from benchmarks.dev import learning
from pipeline.errors import RequestError
from pipeline.features.store import Store
from pipeline.parameters import params
from pipeline.train.pairs.order import validation_pairs


def made_run(folder, batch, speed, f1s):
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "reports" / "curves").mkdir(parents=True)
    (folder / "checkpoints" / "best.json").write_text(json.dumps({"train": {"batch": batch}}))
    steps = [10 * (i + 1) for i in range(len(f1s))]
    rows = ["step,loss,precision,recall,f1"] + [
        f"{s},1.0,0.5,0.5,{f1}" for s, f1 in zip(steps, f1s)
    ]
    (folder / "reports" / "curves" / "validation.csv").write_text("\n".join(rows) + "\n")
    (folder / "reports" / "timing.csv").write_text(
        "step,pairs_per_s\n" + "".join(f"{s},{speed}\n" for s in range(5, steps[-1] + 1, 5))
    )
    return folder


def test_pairs_and_minutes_go_on_from_one_folder_to_the_next(tmp_path):
    first = made_run(tmp_path / "a", batch=6, speed=1.0, f1s=[0.1, 0.2])
    then = made_run(tmp_path / "b", batch=12, speed=2.0, f1s=[0.3])
    points = learning.curve([first, then])
    assert [point.pairs for point in points] == [60, 120, 240]
    assert [point.minutes for point in points] == pytest.approx([1.0, 2.0, 3.0])
    assert [point.metrics["f1"] for point in points] == [0.1, 0.2, 0.3]
    with pytest.raises(RequestError, match=r"best\.json"):
        learning.curve([tmp_path / "nowhere"])


def test_a_run_is_ahead_from_where_it_stays_ahead(tmp_path):
    points = learning.curve([made_run(tmp_path / "a", 1, 1.0, [0.5, 0.7, 0.6, 0.65, 0.8])])
    assert learning.crossing(points, 0.62).pairs == 40
    assert learning.crossing(points, 0.9) is None


def test_the_ratio_test_is_the_more_precise_of_the_baselines(tmp_path, root):
    store = Store(made_store(tmp_path / "store"))
    train = params.load("train", root / "presets" / "sample.yaml")
    samples = validation_pairs(0, len(store), store.views_per_image, 8)
    found = learning.baselines(store, samples, train)
    mutual = found["mutual nearest neighbour"]
    ratio = found["ratio test, mutual"]
    # descriptors of the synthetic store differ by noise only, so both find nearly all true matches
    assert mutual["recall"] > 0.9 and ratio["precision"] >= mutual["precision"] > 0.5
    assert all(
        np.isclose(f["f1"], 2 / (1 / f["precision"] + 1 / f["recall"])) for f in found.values()
    )


def test_wrong_words_are_refused_in_one_line(tmp_path, capsys):
    from pipeline import errors

    assert errors.run(learning.main, ["nameless"]) == 2
    assert errors.run(learning.main, [f"a={tmp_path}/nothing"]) == 2
    assert "NAME=FOLDER" in capsys.readouterr().err
