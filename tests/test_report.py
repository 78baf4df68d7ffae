"""Tables, curves and pictures, and the command that prints the comparison."""

from __future__ import annotations

import csv
import json
import math
import re

import numpy as np
import pytest
from made_scenes import write_model

from pipeline import errors
from pipeline.evaluate.content import error_curve
from pipeline.evaluate.metrics import auc_by_pair
from pipeline.evaluate.scoring import MatchCounts, Row
from pipeline.report import __main__ as report
from pipeline.report import document, outputs, tables

FIGURES = {
    "superglue.pairs": 4,
    "superglue.matches": 51.7,
    "superglue.precision": 0.8,
    "superglue.recall": None,
    "superglue.auc_ransac_1": 0.1,
    "superglue.auc_ransac_3": 0.537,
    "superglue.auc_dlt_1": 0.0,
    "superglue.auc_dlt_3": None,
    "superglue.threshold": 0.25,
    "ratio_test.pairs": 4,
    "ratio_test.matches": None,
}


def test_table_shows_pairs_percentages_and_gaps():
    text = tables.comparison(FIGURES)
    ours = next(line for line in text.splitlines() if line.startswith("SuperGlue (ours)"))
    assert ours.split()[2:6] == ["4", "52", "80.0", "-"] and "53.7" in text
    assert "AUC RANSAC" in text and "AUC DLT" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    above, header = text.splitlines()[4:6]
    starts = [match.start() for match in re.finditer(r"@1\b", header)]
    assert [above.index("AUC RANSAC"), above.index("AUC DLT")] == starts


def test_aligned_areas_stand_below_in_the_columns_of_the_others():
    moved = {"superglue.auc_ransac_aligned_1": 0.625, "superglue.auc_ransac_aligned_3": 0.875}
    text = tables.comparison({**FIGURES, **moved})
    heads, ours, _, gap, below, again, ratio = text.splitlines()[5:12]
    assert heads.startswith("as detected") and gap == "" and below.startswith("aligned")
    assert below.split()[1:] == ["@1", "@3", "@1", "@3"] and again.split()[2:] == [
        "62.5",
        "87.5",
        "-",
        "-",
    ]
    assert again.index("87.5") == ours.index("53.7") and ratio.startswith("ratio test")
    # 3 lines, a gap and a note
    assert len(tables.comparison(FIGURES).splitlines()) == len(text.splitlines()) - 5
    assert tables.metric_title("auc_ransac_aligned_3") == "AUC@3 RANSAC aligned"


def test_the_headline_is_among_the_metrics_shown_first():
    names = [
        f"auc_{name}_{limit}"
        for name in ("dlt", "ransac", "dlt_aligned")
        for limit in (1, 3, 5, 10)
    ]
    shown = [
        "precision",
        *(f"auc_{name}_{limit}" for name in ("dlt", "ransac", "dlt_aligned") for limit in (5, 10)),
    ]
    assert tables.foremost(["precision", *names, "mean_error_dlt"]) == shown
    assert tables.foremost(["auc_pose_5", "auc_pose_10", "auc_pose_20"]) == [
        "auc_pose_5",
        "auc_pose_20",
    ]


def test_table_says_how_many_pairs_the_recall_is_of():
    said = "recall is over 3 of 4 pairs"
    assert said not in tables.comparison(FIGURES)
    text = tables.comparison({**FIGURES, "superglue.recall_pairs": 3, "ratio_test.recall_pairs": 3})
    assert text.count(said) == 1


def test_table_states_the_threshold_and_both_operating_points():
    points = {
        "superglue.recall_at_ratio_precision": 0.91,
        "superglue.precision_at_ratio_recall": 0.97,
    }
    lines = tables.comparison({**FIGURES, **points}).splitlines()
    assert lines[0].split()[2:6] == ["P", "R", "R@P", "P@R"] and "0.25" in " ".join(lines[4:])
    assert lines[1].split()[4:8] == ["80.0", "-", "91.0", "97.0"]
    assert "R@P" not in tables.comparison(FIGURES).splitlines()[0]


def test_table_by_scene_marks_those_of_few_pairs():
    lines = [
        {"scene": s, "matcher": m, "pairs": pairs, "auc_ransac_3": 0.25, "precision": 1.0}
        for s, pairs in (("graf", 5), ("wall", 20))
        for m in ("superglue", "nn")
    ]
    _, graf, wall, *note = tables.by_scene(lines).splitlines()
    assert (
        "25.0 | 100.0" in graf
        and graf.split()[1] == "5*"
        and wall.split()[1] == "20"
        and len(note) == 1
    )
    assert len(tables.by_scene(lines[2:]).splitlines()) == 2
    lines = [{**line, "auc_ransac_aligned_3": 0.5} for line in lines[2:]]
    head, wall = tables.by_scene(lines).splitlines()
    assert head.startswith("AUC@3 RANSAC | aligned | precision") and "25.0 | 50.0 | 100.0" in wall


def test_error_curve_has_the_auc_below_it():
    found = [0.3, 2.2, math.inf, 8.0]
    counts = MatchCounts(0, 0, 0, 0)
    rows = [Row("p", "s", "superglue", 9, 9, counts, {"ransac": error}, {}) for error in found]
    lines = error_curve(rows, "ransac")
    fractions = np.array([line["superglue"] for line in lines])
    assert (
        (np.diff(fractions) >= 0).all() and fractions[-1] == 0.75 and lines[3]["superglue"] == 0.25
    )
    # left and right sums enclose the exact area
    assert fractions[:-1].mean() <= auc_by_pair(found, 10).mean() <= fractions[1:].mean()


def test_csv_keeps_columns_that_only_later_lines_have(tmp_path):
    outputs.write_lines(tmp_path / "deep" / "a.csv", [{"a": 1}, {"a": 2, "b": math.inf}])
    with (tmp_path / "deep" / "a.csv").open() as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": ""}, {"a": "2", "b": "inf"}]
    outputs.write_lines(tmp_path / "empty.csv", [], ("file", "reason"))
    assert (tmp_path / "empty.csv").read_text() == "file,reason\n"


def test_report_command(tmp_path, capsys):
    (tmp_path / "metrics.json").write_text(json.dumps(FIGURES))
    (tmp_path / "pairs.csv").write_text("pair\n")
    assert report.main(["--evaluation", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "SuperGlue (ours)" in printed and "pairs.csv" in printed and "make ui" in printed
    assert "pictures" not in printed.split("Where to look next")[1].replace(
        "parameters, pictures and models", ""
    )


def test_the_hint_names_the_extractor_of_a_model_of_other_features(tmp_path):
    model = write_model(tmp_path / "model.safetensors")
    assert report.next_steps(tmp_path, model)[-1].endswith(
        "A.jpg B.jpg --model models/superglue.safetensors"
    )
    write_model(model, extractor="mine:orb", descriptor="binary", descriptor_dim=256)
    assert report.next_steps(tmp_path, model)[-1].endswith(
        "superglue.safetensors --extractor mine:orb"
    )


def test_in_an_image_no_hint_names_make(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("IMAGE_STACK", "modern")
    (tmp_path / "metrics.json").write_text(json.dumps(FIGURES))
    write_model(tmp_path / "model.safetensors")
    report.main(["--evaluation", str(tmp_path), "--model", str(tmp_path / "model.safetensors")])
    printed = capsys.readouterr().out
    assert "docker run ... ui" in printed and "docker run ... match A.jpg B.jpg" in printed
    assert "make " not in printed and ".venv" not in printed
    assert errors.typed("repro", preset="sample") == "docker run ... repro --preset sample"


def test_the_page_is_made_where_only_its_json_is_there_and_opened_where_there_is_a_browser(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "metrics.json").write_text(json.dumps(FIGURES))
    model = {"file": "m", "sha256": "0123456789", "step": 1}
    document.save(tmp_path, document.Content("here", FIGURES, [], [], {}, [], [], {"model": model}))
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert report.main(["--evaluation", str(tmp_path), "--open"]) == 0
    made = tmp_path / "index.html"
    assert f"open {made}" in capsys.readouterr().out and "SuperGlue on here" in made.read_text()
    opened = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(report.webbrowser, "open", lambda address: opened.append(address) or True)
    made.write_text("as it is")
    assert report.main(["--evaluation", str(tmp_path), "--open"]) == 0
    assert opened == [made.as_uri()] and made.read_text() == "as it is"


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_report_command_without_metrics(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "metrics.json").write_text(content)
    assert errors.run(report.main, ["--evaluation", str(tmp_path)]) == 2
    assert "metrics.json" in capsys.readouterr().err
