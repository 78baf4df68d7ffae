"""The headline, the numbers of tables and files, the command that prints them, and the page."""

import base64
import math
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from made_evaluations import make_results
from reading import read_error, read_json

from pipeline import errors
from pipeline import report as command
from pipeline.evaluate import charts, report
from pipeline.evaluate.matchers import OURS

HARD = np.linspace(0.5, 8, 12)
BETTER = "Against the ratio test: precision equal, recall equal, homographies better."


@pytest.mark.parametrize(
    "errors_of_ours, errors_of_ratio_test, headline",
    [
        (HARD, HARD + 4, BETTER),
        (HARD + 4, HARD, BETTER.replace("better", "worse")),
        ([*HARD, 4.0], [*HARD, 6.0], BETTER.replace("better", "no difference found")),
        ([1.0], [2.0], "Too few photographs for a verdict: 1 of at least 6."),
    ],
)
def test_headline_has_three_verdicts(errors_of_ours, errors_of_ratio_test, headline):
    results = make_results(errors_of_ours, errors_of_ratio_test)
    assert report.make_headlines(results) == [headline]


def test_a_training_that_kept_its_initial_weights_is_named_first():
    results = make_results(HARD, HARD + 4, models={OURS: {"step": 0}})
    assert report.make_headlines(results) == [report.KEPT, BETTER]


def test_tables_have_percent():
    lines = report.make_text(make_results(HARD, HARD + 4)).splitlines()
    ours = [line.split() for line in lines if line.startswith("SuperGlue ")]
    assert ours[0] == ["SuperGlue", "10", "50.0", "50.0", "0.0"]
    assert ours[1][1:5] == ["4.2", "16.4", "28.6", "57.5"]


@pytest.mark.parametrize(
    "value, written",
    [(0.55622749, 0.5562), (0.00004999, 0.0), (217.84, 217.8), (math.inf, math.inf)],
)
def test_numbers_have_four_digits(value, written):
    assert report.round_number(value) == written


def test_differences_have_no_negative_zero():
    assert report.format_points(-0.0001) == "+0.0" and report.format_points(-0.001) == "-0.1"


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """A folder with an evaluation, which is the current one."""
    monkeypatch.chdir(tmp_path)
    report.write_files(tmp_path / "reports/evaluate", make_results(HARD, HARD + 4))
    return tmp_path


def test_pictures_that_are_no_report_stay(tmp_path):
    holiday = tmp_path / "pictures/holiday.png"
    holiday.parent.mkdir()
    holiday.write_bytes(b"")
    report.write_files(tmp_path, make_results(HARD, HARD + 4))
    assert holiday.exists()


def test_the_command_prints_the_summary(evaluated, capsys):
    assert command.main([]) == 0
    assert capsys.readouterr().out.startswith(BETTER)
    summary = read_json(evaluated / "reports/evaluate/summary.json")
    assert summary["within_5"] == pytest.approx(58.33)
    (evaluated / "reports/evaluate/summary.txt").unlink()
    assert errors.run(command.main, []) == 2
    assert "summary.txt" in read_error(capsys)


LOCK = """
stages:
  evaluate:
    cmd: python -m pipeline.evaluate
    deps:
    - {{path: data/images, md5: {images}.dir}}
    params:
      params.yaml:
        evaluate: {{pairs_per_image: {pairs}}}
        train.precision: {precision}
"""


def commit(folder, auc, images="aa", pairs=3, precision="float32"):
    """Commit an evaluation in a repository of DVC."""
    for name in ("reports/train", "reports/evaluate"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "reports/train/metrics.json").write_text('{"f1": 60.0}')
    (folder / "reports/evaluate/summary.json").write_text(f'{{"auc_5": {auc}}}')
    lock = LOCK.format(images=images, pairs=pairs, precision=precision)
    (folder / "dvc.lock").write_text(lock)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    for words in (["add", "-A"], ["commit", "-qm", f"auc {auc}"]):
        subprocess.run([*git, *words], check=True)


def test_commits_are_compared_and_differences_of_their_data_are_named(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for words in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(words, check=True)
    commit(tmp_path, 50.0)
    commit(tmp_path, 53.0, precision="portable")
    assert command.main(["HEAD~1", "HEAD"]) == 0
    printed = capsys.readouterr().out
    assert "auc_5    50.0  53.0  +3.00" in printed and "photographs" not in printed
    assert command.main(["HEAD", "HEAD~1"]) == 0
    assert "auc_5  53.0    50.0  -3.00" in capsys.readouterr().out
    commit(tmp_path, 90.0, images="bb", pairs=4)
    assert command.main(["HEAD~1", "HEAD"]) == 0
    printed = capsys.readouterr().out
    assert "photographs" in printed and "protocol" in printed
    assert command.main(["HEAD~2", "HEAD~1", "HEAD"]) == 0
    rows = {row.split()[0]: row.split()[1:] for row in capsys.readouterr().out.splitlines()}
    assert rows["auc_5"] == ["50.0", "53.0", "90.0", "64.33", "40.0"]
    assert rows["f1"] == ["60.0", "60.0", "60.0", "60.00", "0.0"]
    (tmp_path / "dvc.lock").write_text(LOCK.format(images="cc", pairs=4, precision="float32"))
    assert command.main(["HEAD", "workspace"]) == 0
    assert "photographs" in capsys.readouterr().out
    assert errors.run(command.main, ["nowhere"]) == 2
    assert "nowhere" in read_error(capsys)


# The page

PICTURE = ("median-1", "A typical pair & <blur>.", np.zeros((100, 200, 3), np.uint8))


def render(results, curves=None):
    text = report.render_page(results, b"<svg/>", curves)
    assert all(url.startswith("data:") for url in re.findall(r'(?:src|href)="([^"]*)"', text))
    assert [text.count(f"<{tag}") - text.count(f"</{tag}>") for tag in ("div", "details")] == [0, 0]
    assert "http" not in re.sub("&[a-z]+;", "", text) and "<script" not in text
    return text


def test_the_page_has_the_verdict_the_pictures_and_escaped_text(tmp_path):
    (tmp_path / "curves.svg").write_text("<svg/>")
    results = make_results(HARD, HARD + 1, pictures=[PICTURE] * 2)
    page = render(results, tmp_path / "curves.svg")
    assert f"<h1>{report.make_headlines(results)[0]}</h1>" in page
    assert "made &lt;b&gt;" in page and "A typical pair &amp; &lt;blur&gt;." in page
    assert page.count("data:image/jpeg") == 2


def test_robustness_is_drawn_at_every_level():
    results = make_results(HARD, HARD + 1)
    rows = results.metrics.loc[["superglue", "ratio_test"]].reset_index()
    frames = [rows.assign(condition="blur (px)", level=level) for level in (10.0, 0.0, 2.0)]
    names = ["condition", "level", *results.metrics.index.names]
    robustness_charts = charts.draw_robustness_charts(
        pd.concat(frames).set_index(names), "ransac", charts.assign_colors([OURS, "ratio_test"])
    )
    assert len(robustness_charts) == 2
    svg = svg_of(robustness_charts[0][0])
    assert svg.index(">2<") < svg.index(">10<")  # levels by value, not as words


def svg_of(chart):
    return base64.b64decode(re.search('base64,([^"]*)', str(chart)).group(1)).decode()


def test_each_matcher_has_one_color_and_ours_is_drawn_last_and_thicker():
    names = ["superglue", "ratio_test", "mine", "other"]
    colors = charts.assign_colors(names)
    assert len(set(colors.values())) == 4
    lines = pd.DataFrame(0.5, [0.0, 1.0], names)
    svg = charts.draw_line_chart(lines, colors, "x", "y").decode()
    strokes = re.findall(r"stroke: (#\w{6}); stroke-width: ([\d.]+)", svg)
    drawn = [stroke for stroke in strokes if stroke[0] in colors.values()]
    assert drawn[-1] == (colors["superglue"], "2.6") and len(set(drawn)) == 4
