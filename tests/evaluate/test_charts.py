"""The page: whole, self-contained, and what it says first."""

import base64
import re

import numpy as np
import pandas as pd
from made_evaluations import make_results

from pipeline.evaluate import report

PICTURE = ("median-1", "A typical pair & <blur>.", np.zeros((100, 200, 3), np.uint8))
HARD = np.linspace(0.5, 8, 12)


def render(results, curves=None):
    text = report.render(results, curves)
    assert all(each.startswith("data:") for each in re.findall(r'(?:src|href)="([^"]*)"', text))
    assert [text.count(f"<{tag}") - text.count(f"</{tag}>") for tag in ("div", "details")] == [0, 0]
    assert "http" not in re.sub("&[a-z]+;", "", text) and "<script" not in text
    return text


def test_the_page_begins_with_the_verdict_three_numbers_and_a_pair(tmp_path):
    (tmp_path / "curves.svg").write_text("<svg/>")
    results = make_results(HARD, HARD + 1, pictures=[PICTURE] * 2)
    page = render(results, tmp_path / "curves.svg")
    first, rest = page.partition("<body>")[2].split("<h2>", 1)
    assert f"<h1>{report.verdict(results)}</h1>" in first and first.count('class="card"') == 3
    assert "made &lt;b&gt;" in first and "01234567" in first
    assert first.count("data:image/jpeg") == 1 and "image/svg+xml" in first
    assert "A typical pair &amp; &lt;blur&gt;." in first and "median-1" not in page
    assert rest.count("data:image/jpeg") == 1  # the other picture, small
    assert "RANSAC, matches as detected" in rest and "<th>AUC, as detected</th>" in rest
    assert "The learning curve" not in render(results)


def test_a_few_photographs_get_no_intervals_and_no_differences():
    page = render(make_results([1.0] * 3, [2.0] * 3))
    assert "Too few photographs to judge" in page
    assert "95 % interval" not in page and "too few" not in page


def test_robustness_is_drawn_at_every_level():
    results = make_results(HARD, HARD + 1)
    rows = results.metrics.loc[["superglue", "ratio_test"]].reset_index()
    frames = [rows.assign(condition="blur (px)", level=level) for level in (10.0, 0.0, 2.0)]
    names = ["condition", "level", *results.metrics.index.names]
    results = results._replace(robustness=pd.concat(frames).set_index(names))
    found = report.robustness_charts(results, report.colours_of(["superglue", "ratio_test"]))
    assert [caption for _, caption in found] == [
        "found matches; at least 12 pairs at each level",
        "AUC@5 RANSAC; at least 12 pairs at each level",
    ]
    svg = svg_of(found[0][0])
    assert svg.index(">2<") < svg.index(">10<")  # levels by value, not as words


def svg_of(chart):
    return base64.b64decode(re.search('base64,([^"]*)', str(chart)).group(1)).decode()


def test_each_matcher_has_one_colour_and_ours_is_drawn_last_and_thicker():
    names = ["superglue", "ratio_test", "mine", "other"]
    colours = report.colours_of(names)
    assert len(set(colours.values())) == 4
    svg = svg_of(report.line_chart(pd.DataFrame(0.5, [0.0, 1.0], names), colours, "y"))
    strokes = re.findall(r"stroke: (#\w{6}); stroke-width: ([\d.]+)", svg)
    drawn = [stroke for stroke in strokes if stroke[0] in colours.values()]
    assert drawn[-1] == (colours["superglue"], "2.6") and len(set(drawn)) == 4
