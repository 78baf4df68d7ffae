"""The HTML page, what it says of hard pairs, and pairs under growing disturbances."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_scenes import write_image_set

from pipeline.errors import RequestError
from pipeline.evaluate import content as contents
from pipeline.evaluate import heldout, metrics
from pipeline.evaluate.matchers import MATCHERS
from pipeline.evaluate.scoring import MatchCounts, PairResult, Row, ScoredMatches
from pipeline.image_sets import sources
from pipeline.report import __main__ as report
from pipeline.report import charts, document, page, summary, tables
from superglue_sift import drawing

VOID = {"meta", "link", "br", "line", "circle", "polyline", "input"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed wrongly; collects what the page would load."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.loaded = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.loaded += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag


OURS = {
    "superglue.auc_ransac_5": 0.5,
    "superglue.precision": 0.8,
    "superglue.recall": 0.7,
    "superglue.threshold": 0.5,
    "superglue.unrelated_matches": 1.25,
    "superglue.unrelated_matches_p95": 4.0,
    "superglue.unrelated_pairs": 60,
    "ratio_test.unrelated_matches": 7.0,
    "ratio_test.unrelated_matches_p95": 20.0,
    "ratio_test.unrelated_pairs": 60,
}
MADE = {"commit": "abcdef01", "date": "2026-01-31"}
MATCHES = {
    "superglue": [[1.0, 2.0, 101.0, 2.0, 0.9, 1.0], [3.0, 4.0, 150.0, 9.0, 0.3, 0.0]],
    "ratio_test": [],
}


PICTURE = document.Picture("worst-1", "a & <blur>", "/9g=", 200, 100, MATCHES)


def content(**changes):
    lines = [
        {"matcher": m, "figure": f, "value": 0.5, "low": 0.4, "high": 0.6, "pairs": 3}
        for m in MATCHERS
        for f in ("precision", "auc_ransac_3")
    ]
    difference = {
        "figure": "precision",
        "baseline": "nn",
        "value": 0.1,
        "low": 0.05,
        "high": 0.2,
        "pairs": 40,
    }
    difference["clusters"] = 40
    values = {
        "title": "Evaluation <b>",
        "metrics": {**{f"{m}.pairs": 3 for m in MATCHERS}, **OURS},
        "intervals": lines,
        "differences": [
            {**difference, "verdict": "better"},
            {**difference, "low": None, "verdict": "too few"},
        ],
        "curves": {
            "error_ransac": [
                {"error_px": 0.0, "superglue": 0.0},
                {"error_px": 10.0, "superglue": 1.0},
            ],
            "precision_recall": [{"threshold": 0.0, "precision": 0.5, "recall": None}],
            "precision_at_recall": [{"recall": 0.5, "superglue": 0.5}],
            "operating_points": [{"matcher": "nn", "recall": 0.4, "precision": 0.3}],
            "calibration": [],
        },
        "robustness": [],
        "pictures": [PICTURE],
        "protocol": {
            "views": "640x480",
            "model": {"file": "m.safetensors", "sha256": "0123456789", "step": 7},
        },
        "notes": ["3 pairs"],
    }
    return document.Content(**{**values, **changes})


def test_page_is_whole_and_needs_no_other_file():
    text = page.render(content(), {}, MADE)
    found = Balanced(text)
    assert all(address.startswith("data:") for address in found.loaded)
    assert "src=" not in text and "http" not in re.sub("&[a-z]+;", "", text)
    assert "Evaluation &lt;b&gt;" in text and "a &amp; &lt;blur&gt;" in text
    assert (
        "Better than the best baseline in: precision." in text
        and "50.0<br><small>40.0&ndash;60.0" in text
    )
    assert "viewport" in text and "<caption>AUC RANSAC</caption>" in text


def test_aligned_areas_have_a_table_of_their_own():
    moved = [{**line, "figure": "auc_ransac_aligned_3"} for line in content().intervals[1::2]]
    metrics_of = {**content().metrics, "superglue.auc_ransac_aligned_5": 0.75}
    curves = {
        "error_ransac_aligned": [
            {"error_px": 0.0, "superglue": 0.0},
            {"error_px": 10.0, "superglue": 1.0},
        ]
    }
    page_of = content(intervals=[*content().intervals, *moved], metrics=metrics_of, curves=curves)
    text = page.render(page_of, {}, MADE)
    Balanced(text)
    tables_of = re.findall("<caption>(.*?)</caption><tr><th></th>(.*?)</tr>", text)
    assert tables_of == [
        ("Matches", "<th>precision</th>"),
        ("AUC RANSAC", "<th>@3</th>"),
        ("AUC RANSAC, matches aligned by the pixels", "<th>@3</th>"),
    ]
    assert "Homography from RANSAC aligned: fraction of pairs" in text
    assert "with matches aligned by the pixels 75.0 %" in text
    assert "aligned" not in page.render(content(), {}, MADE)


def test_title_and_verdict_say_data_model_commit_date_and_how_good():
    text = page.render(content(), {}, MADE)
    title = re.search("<title>(.*)</title>", text).group(1)
    assert all(word in title for word in ("Evaluation", "01234567", "abcdef01", "2026-01-31"))
    verdict = re.search('<p class="verdict">(.*)</p>', text).group(1)
    assert "AUC@5 RANSAC 50.0 %" in verdict and "80.0 % of its matches are right" in verdict
    assert "give 1.2 matches (95th percentile 4), by the ratio test 7.0 (20)" in verdict


PLAIN = {
    "better": (
        "Better than the best baseline (ratio test, mutual): AUC@5 RANSAC 50.0 %, "
        "+1.6 points (95 % interval +0.7 .. +2.4, 52 photographs)."
    ),
    "worse": (
        "Worse than the best baseline (ratio test, mutual): AUC@5 RANSAC 50.0 %, "
        "+1.6 points (95 % interval +0.7 .. +2.4, 52 photographs)."
    ),
    "equal": (
        "Equal, within the 95 % interval, to the best baseline (ratio test, mutual): AUC@5 RANSAC"
        " 50.0 %, +1.6 points (95 % interval +0.7 .. +2.4, 52 photographs)."
    ),
    "too few": (
        "Too few photographs to tell (3 of 6): AUC@5 RANSAC 50.0 %, "
        "+1.6 points from the best baseline (ratio test, mutual)."
    ),
}


@pytest.mark.parametrize("said", PLAIN)
def test_the_verdict_says_one_thing_and_opens_page_note_and_command(said, tmp_path, capsys):
    """Where the photographs are too few there is no interval that could contradict it."""
    line = {
        "figure": "auc_ransac_5",
        "baseline": "ratio_test",
        "value": 0.016,
        "low": 0.007,
        "high": 0.024,
    }
    lines = [{**line, "pairs": 99, "clusters": 3 if said == "too few" else 52, "verdict": said}]
    given = content(differences=lines, unit="photographs")
    assert summary.verdict(given)[0] == PLAIN[said]
    assert (
        page.render(given, {}, MADE)
        .split("</h1>")[1]
        .lstrip()
        .startswith(f'<p class="verdict">{PLAIN[said]}')
    )
    assert summary.note(given, "test", "{run_id}").startswith(PLAIN[said])
    document.save(tmp_path, given)
    (tmp_path / "metrics.json").write_text(json.dumps(given.metrics))
    assert report.main(["--evaluation", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(PLAIN[said])


def test_pictures_show_matches_above_the_threshold_and_hold_all():
    text = page.render(content(), {}, MADE)
    shown = re.findall(
        r'<path d="([^"]*)" class="(\w+)"(?: stroke="([^"]*)")? data-score="([^"]*)"( hidden)?',
        text,
    )
    colour = drawing.css_colours([[1.0, 2.0]], 96)[0]
    assert shown == [
        ("M1 2L101 2", "right", colour, "0.9", ""),
        ("M3 4L150 9", "wrong", "", "0.3", " hidden"),
    ]


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=400))
def test_of_many_matches_some_are_lines_and_wrong_ones_on_top(matches):
    marks = page.marks(
        [[1.0, 2.0, 103.0, 4.0, score, float(right)] for score, right in matches], PICTURE
    )
    assert sum(mark.line for mark in marks) == min(len(marks), drawing.LINES)
    assert {mark.path for mark in marks} <= {"M1 2L103 4", "M1 2h0M103 4h0"}
    assert [mark.right for mark in marks] == sorted((mark.right for mark in marks), reverse=True)


def test_the_curves_of_the_training_are_drawn_where_they_are(tmp_path):
    (tmp_path / "train.csv").write_text("step,loss\n10,2.0\n20,1.0\n")
    (tmp_path / "validation.csv").write_text("step,loss,precision,recall\n20,1.5,0.5,0.25\n")
    assert "<h2>Training</h2>" not in page.render(content(), page.training_curves(None), MADE)
    text = page.render(content(), page.training_curves(tmp_path), MADE)
    Balanced(text)
    first = text[text.index("<h2>Training</h2>") :]
    assert first.index("<svg") < first.index("Training and validation loss")


def test_a_page_is_made_again_from_its_json(tmp_path):
    document.save(tmp_path, content())
    assert document.load(tmp_path) == content()
    (tmp_path / document.JSON).write_text("{}")
    with pytest.raises(RequestError, match=r"report\.json: cannot be read"):
        document.load(tmp_path)


def test_a_browser_opens_it_without_complaint(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    (tmp_path / "index.html").write_text(
        page.render(content(pictures=[]), {}, MADE), encoding="utf-8"
    )
    words = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--window-size=390,800",
    ]
    address = (tmp_path / "index.html").as_uri()
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [browser, *words, profile, f"--screenshot={tmp_path / 'page.png'}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    assert (tmp_path / "page.png").stat().st_size > 5000


def wide_content():
    """As many columns as an evaluation has: four estimators' tables of four areas, six metrics by
    condition.
    """
    names = ["precision", "recall", "recall_at_ratio_precision", "precision_at_ratio_recall"]
    areas = [
        f"auc_{name}_{px}"
        for name in ("ransac", "dlt", "ransac_aligned", "dlt_aligned")
        for px in (1, 3, 5, 10)
    ]
    line = {"value": 0.973, "low": 0.901, "high": 0.998, "pairs": 120}
    intervals = [
        {**line, "matcher": m, "figure": name} for m in MATCHERS for name in (*names, *areas)
    ]
    verdict = {"baseline": "mutual_nn", "clusters": 40, "verdict": "better"}
    shown = [
        "precision",
        "recall",
        "auc_ransac_5",
        "auc_dlt_5",
        "auc_ransac_aligned_5",
        "recall_at_ratio_precision",
    ]
    hard = {f"{m}.{name}": 0.973 for m in ("superglue", "ratio_test") for name in shown}
    return content(
        intervals=intervals,
        differences=[{**line, **verdict, "figure": name} for name in (*names, *areas)],
        robustness=[{"condition": "rotation_deg", "level": "120 .. 181", "pairs": 40, **hard}],
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_no_table_is_cut_off_on_a_screen_or_on_a_phone(tmp_path, width):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    measure = (
        "<body style=margin:0><iframe id=f"
        f" style='width:{width}px;height:900px;border:0'></iframe><script>f.srcdoc = atob(PAGE);"
        " f.onload = () => { const d = f.contentDocument; document.title ="
        " [f.contentWindow.innerWidth, d.documentElement.scrollWidth,"
        " ...Array.from(d.querySelectorAll('.wide')).map(e => e.scrollWidth -"
        " e.clientWidth)].join(' '); }</script>"
    )
    page_of = base64.b64encode(page.render(wide_content(), {}, MADE).encode()).decode()
    (tmp_path / "frame.html").write_text(measure.replace("PAGE", f"'{page_of}'"), encoding="utf-8")
    words = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1400,1000",
        "--dump-dom",
    ]
    command = [
        browser,
        *words,
        f"--user-data-dir={tmp_path / 'profile'}",
        (tmp_path / "frame.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = [int(word) for word in re.search("<title>(.*?)</title>", done.stdout).group(1).split()]
    assert found[:2] == [width, width] and len(found) == 2 + 8 and not any(found[2:])


def test_page_with_robustness_and_without_numbers():
    line = {"condition": "blur (px)", "level": "2", "pairs": 40, "superglue.precision": 0.9}
    found = {"recall_pairs": 21, "superglue.recall": 1.0, "ratio_test.recall": 0.0}
    lines = [
        {**line, **found, "ratio_test.precision": 0.8},
        {**line, **found, "superglue.precision": None, "ratio_test.precision": 0.8},
    ]
    text = page.render(content(robustness=lines), {}, MADE)
    Balanced(text)
    assert (
        '<span class="duel better">90.0 <span>| 80.0</span></span>' in text
        and "- <span>| 80.0" in text
    )
    assert text.count("21 with true matches") == 2
    empty = content(
        metrics={}, intervals=[], differences=[], curves={"error_ransac": []}, pictures=[]
    )
    Balanced(page.render(empty, {}, MADE))


def test_a_few_pairs_are_marked_and_not_compared():
    line = {
        "condition": "blur (px)",
        "level": "2",
        "superglue.precision": 0.9,
        "ratio_test.precision": 0.8,
    }
    text = page.render(content(robustness=[{**line, "pairs": 19}, {**line, "pairs": 20}]), {}, MADE)
    assert text.count('<span class="duel better">90.0 <span>| 80.0') == 1
    assert text.count('<span class="duel ">90.0 <span>| 80.0') == 1
    assert "<small>19* pairs</small>" in text and "<small>20 pairs</small>" in text
    many = {"pairs": 30, "superglue.recall": 0.9, "ratio_test.recall": 0.8}
    lines = [{"condition": "blur (px)", "level": "2", **many, "recall_pairs": 5}]
    text = page.render(content(robustness=lines), {}, MADE)
    assert (
        '<td><span class="duel ">90.0 <span>| 80.0</span></span><br><small>5* with true matches'
        in text
    )


def test_a_further_model_has_its_own_sentence_in_the_summary():
    line = {"figure": "precision", "value": 0.1, "low": 0.05, "high": 0.2, "pairs": 40}
    lines = [
        {**line, "baseline": "nn", "verdict": "worse"},
        {**line, "baseline": "shipped", "verdict": "better"},
    ]
    text = page.render(content(differences=lines), {}, MADE)
    assert (
        "Worse than the best baseline in: precision." in text
        and "Better than shipped in: precision." in text
    )


def test_a_chart_has_a_line_and_a_name_for_each_series():
    points = [(x / 30, x / 60) for x in range(30)]
    svg = charts.line_chart(
        {"a & b": points, "c": [(0, 0), (1, 1)], "none": []}, "x <1>", "y", (0, 1), diagonal=True
    )
    Balanced(svg)
    assert svg == charts.line_chart(
        {"a & b": points, "c": [(0, 0), (1, 1)], "none": []}, "x <1>", "y", (0, 1), diagonal=True
    )
    assert (
        svg.count(charts.COLOURS[0]) > 1
        and svg.count(charts.COLOURS[1]) > 1
        and "currentColor" in svg
    )
    assert all(f">{word}</text>" in svg for word in ("a &amp; b", "c", "x &lt;1&gt;", "y"))
    assert 'aria-label="y, x &lt;1&gt;"' in svg and charts.INK not in svg


def test_the_legend_names_only_the_verdicts_that_are_there():
    line = {
        "figure": "precision",
        "baseline": "nn",
        "value": 0.1,
        "low": 0.05,
        "high": 0.2,
        "pairs": 40,
    }
    text = page.render(
        content(differences=[{**line, "clusters": 40, "verdict": "worse"}]), {}, MADE
    )
    assert re.findall(r'<i class="(better|worse|few)"></i>', text) == ["worse"]


def test_names_of_metrics():
    assert (
        tables.metric_title("auc_ransac_10") == "AUC@10 RANSAC"
        and tables.metric_title("recall") == "recall"
    )


def row(error=1.0, matcher="superglue", **conditions):
    counts = MatchCounts(20, 15, 30, 12)
    return Row("p", "s", matcher, 200, 300, counts, {"ransac": error, "dlt": error}, conditions)


def test_rows_fall_into_bins_once_per_condition():
    scored = ScoredMatches(
        np.array([0.9, 0.8, 0.7]), np.array([1, 1, 0], bool), np.array([1, 1, 0], bool), 4
    )
    found = [
        PairResult(
            (0, 0),
            {m: row(matcher=m, rotation_deg=d, scale=1.0) for m in MATCHERS},
            {"superglue": scored},
        )
        for d in (0.0, 15.0, 180.0)
    ]
    lines = metrics.by_condition(found)
    turned = {line["level"]: line["pairs"] for line in lines if line["condition"] == "rotation_deg"}
    assert turned == {"0 .. 15": 1, "15 .. 30": 1, "120 .. 181": 1}
    assert [line["pairs"] for line in lines if line["condition"] == "scale"] == [3]
    assert [line["level"] for line in lines if line["condition"] == "keypoints"] == ["128 .. 256"]
    assert lines[0]["superglue.auc_ransac_5"] == pytest.approx(0.8)
    # the ratio test has 15 of 20 right and 12 of 30 found; down to 0.8 two of two are right, two of
    # four found
    assert lines[0]["superglue.recall_at_ratio_precision"] == 0.5
    assert lines[0]["ratio_test.recall_at_ratio_precision"] == 0.4


def test_two_pictures_show_what_ours_gains():
    """Errors from 10 px on are one failure: beyond them nothing is gained; the right matches decide
    between equals.
    """

    def pair(ours, other, correct=15):
        counts = MatchCounts(20, correct, 30, 12)
        own = Row("p", "s", "superglue", 9, 9, counts, {"ransac": ours}, {})
        return {"superglue": own, "ratio_test": row(other, "ratio_test")}

    rows = [
        pair(1.0, 1.5),
        pair(9.5, math.inf),
        pair(3.0, 2.0),
        pair(0.5, 12.0),
        pair(0.5, 10.0, 16),
    ]
    assert contents.gain_choice(rows) == [("gain-median", 0), ("gain-most", 4)]
    assert contents.gain_choice(rows[:1]) == [("gain-median", 0), ("gain-most", 0)]


def test_disturbances_do_what_they_say(photo):
    for name, (disturb, levels) in heldout.LEVELS.items():
        changes = [np.abs(disturb(photo, level).astype(float) - photo).mean() for level in levels]
        assert (
            disturb(photo, levels[-1]).dtype == np.uint8
            and disturb(photo, levels[-1]).shape == photo.shape
        )
        growing = changes[:-1] if "illumination" in name else changes
        assert growing == sorted(growing), name
    assert abs(heldout.brightness(photo, 0.5).mean() - photo.mean() / 2) < 1
    difference = heldout.noise(np.full((200, 200), 128, np.uint8), 10.0).astype(float) - 128
    assert difference.std() == pytest.approx(10.0, rel=0.05)


def test_levels_differ_in_the_second_view_alone(tmp_path, photo, make_params):
    folder = write_image_set(tmp_path / "images", {"a.png": photo}, "test")
    images = sources.open_manifest(folder)
    section = make_params("evaluate", width=160, height=120)
    source = heldout.HeldOutPairs(images, images.entries("test"), section)
    disturb, _ = heldout.LEVELS["blur (px)"]
    clear, blurred = (heldout.disturbed(source, 1, disturb, level).load(0) for level in (0.0, 2.0))
    np.testing.assert_array_equal(clear.images[0], blurred.images[0])
    np.testing.assert_array_equal(clear.pairs[0].truth, blurred.pairs[0].truth)
    assert len(clear.pairs) == 1 and not np.array_equal(clear.images[1], blurred.images[1])
