"""The HTML page, and what it says of hard pairs."""

import base64
import re
from html.parser import HTMLParser

import cv2
import numpy as np
import pytest

from pipeline.evaluate.matchers import MATCHERS
from pipeline.report import __main__ as report
from pipeline.report import charts, document, page, summary
from pipeline.report.document import Condition
from pipeline.report.rows import Measure, Row

OURS = "superglue"
PRECISION = Measure("precision")
VOID = {"meta", "link", "br", "img", "input"}


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


AUC_5 = Measure("auc", "ransac", limit=5)


def named(matcher, **values):
    """Rows without an interval."""
    return [Row(matcher, Measure(name), value) for name, value in values.items()]


PICTURE = document.Picture("worst-1", "a & <blur>", np.zeros((100, 200, 3), np.uint8))
GAIN = Row(OURS, PRECISION, 0.1, 0.05, 0.2, 40, "nn", "better")
CURVE = [{"error_px": 0.0, "superglue": 0.0}, {"error_px": 10.0, "superglue": 1.0}]
ROWS = [
    *[row for m in MATCHERS for row in named(m, pairs=3)],
    *named(OURS, threshold=0.5, negative_matches=1.25, negative_matches_p95=4.0),
    *named("ratio_test", negative_matches=7.0, negative_matches_p95=20.0),
    *[row for m in (OURS, "ratio_test") for row in named(m, negative_pairs=60)],
    *[Row(m, PRECISION, 0.8, 0.4, 0.6, 3) for m in MATCHERS],
    *[Row(m, Measure("recall"), 0.7, 0.4, 0.6, 3) for m in MATCHERS],
    *[Row(m, AUC_5, 0.5, 0.4, 0.6, 3) for m in MATCHERS],
]


def content(**changes):
    values = {
        "title": "Evaluation <b>",
        "rows": ROWS,
        "differences": [GAIN, GAIN._replace(low=None, verdict="too few")],
        "errors": [(Measure("error", "ransac"), CURVE)],
        "curves": {
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
        "clusters": 52,
        "unit": "photographs",
    }
    return document.Content(**{**values, **changes})


def render(**changes):
    text = page.render(content(**changes))
    assert all(address.startswith("data:") for address in Balanced(text).loaded)
    return text


def test_page_is_whole_and_says_data_and_model():
    text = render()
    assert "http" not in re.sub("&[a-z]+;", "", text)
    assert "Evaluation &lt;b&gt;" in text and "a &amp; &lt;blur&gt;" in text
    assert "80.0<br><small>40.0&ndash;60.0" in text
    assert "viewport" in text and "<caption>AUC RANSAC</caption>" in text
    title = re.search("<title>(.*)</title>", text).group(1)
    assert "Evaluation" in title and "01234567" in title
    verdict = re.search('<p class="verdict">(.*)</p>', text).group(1)
    assert "AUC@5 RANSAC 50.0 %" in verdict and "80.0 % of its matches are right" in verdict
    assert "give 1.2 matches (95th percentile 4), by the ratio test 7.0 (20)" in verdict


SURE = "the best baseline (ratio test, mutual): AUC@5 RANSAC 50.0 %, +1.6 points"
INTERVAL = "(95 % interval +0.7 .. +2.4, 52 photographs)."
PLAIN = {
    "better": f"Better than {SURE} {INTERVAL}",
    "worse": f"Worse than {SURE} {INTERVAL}",
    "equal": f"Equal, within the 95 % interval, to {SURE} {INTERVAL}",
    "too few": (
        "Too few photographs to tell (3 of 6): AUC@5 RANSAC 50.0 %, "
        "+1.6 points from the best baseline (ratio test, mutual)."
    ),
}


@pytest.mark.parametrize("said", PLAIN)
def test_the_verdict_says_one_thing_and_opens_page_and_command(said, tmp_path, capsys):
    """Where the photographs are too few there is no interval that could contradict it."""
    gain = Row(OURS, AUC_5, 0.016, 0.007, 0.024, 99, "ratio_test", said)
    given = content(differences=[gain], clusters=3 if said == "too few" else 52)
    assert summary.verdict(given)[0] == PLAIN[said]
    body = page.render(given).split("</h1>")[1]
    assert body.lstrip().startswith(f'<p class="verdict">{PLAIN[said]}')
    assert summary.note(given).splitlines()[2].startswith("| SuperGlue (ours) | ")
    (tmp_path / document.TEXT).write_text(summary.text(given).partition("\n\n")[2])
    assert report.main(["--evaluation", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(PLAIN[said])


def test_pictures_are_inside_with_their_captions():
    data = base64.b64decode(re.search('src="data:image/jpeg;base64,([^"]*)"', render()).group(1))
    assert np.array_equal(cv2.imdecode(np.frombuffer(data, np.uint8), 1), PICTURE.pixels)


def hard(pairs, ours=0.9, name="precision", **counts):
    """A line of robustness."""
    return Condition(
        "blur (px)",
        "2",
        [
            *named("", pairs=pairs, **counts),
            *named(OURS, **{name: ours}),
            *named("ratio_test", **{name: 0.8}),
        ],
    )


def test_a_few_pairs_are_marked_and_not_compared():
    text = render(robustness=[hard(19), hard(20), hard(40, None)])
    assert text.count('<span class="duel better">90.0 <span>| 80.0') == 1
    assert text.count('<span class="duel ">90.0 <span>| 80.0') == 1
    assert "<small>19* pairs</small>" in text and "<small>20 pairs</small>" in text
    assert "- <span>| 80.0" in text
    text = render(robustness=[hard(30, name="recall", recall_pairs=5)])
    few = '<span class="duel ">90.0 <span>| 80.0</span></span><br><small>5* with true matches'
    assert few in text


def test_a_chart_draws_every_series():
    series = {f"matcher {number}": [(0.0, 0.0), (1.0, number / 8)] for number in range(8)}
    source = re.search('base64,([^"]*)', str(charts.line_chart(series, "x", "y"))).group(1)
    assert [f"matcher {number}" in base64.b64decode(source).decode() for number in range(8)] == [
        True
    ] * 8
