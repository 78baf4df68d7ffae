"""The verdict, the printed tables, the numbers in files, the command that prints them, and the
page.
"""

import base64
import math
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from made_evaluations import make_results
from reading import read_json

from pipeline import errors
from pipeline import report as command
from pipeline.evaluate import report
from pipeline.evaluate.matchers import OURS

HARD = np.linspace(0.5, 8, 12)
BETTER = "Compared with the ratio test: homographies better; precision and recall equal."


@pytest.mark.parametrize(
    "ours, theirs, said",
    [
        (HARD, HARD + 4, BETTER),
        (HARD + 4, HARD, BETTER.replace("better", "worse")),
        ([1.0], [2.0], "Too few photographs to judge: 1, and at least 6 are needed."),
    ],
)
def test_the_verdict_says_what_is_better_equal_or_worse(ours, theirs, said):
    assert report.make_verdict(make_results(ours, theirs)) == said


def test_a_wide_interval_with_zero_is_no_difference_found():
    verdict = report.make_verdict(make_results([*HARD, 4.0], [*HARD, 6.0]))
    assert verdict.endswith("precision and recall equal; no difference found in homographies.")


def test_text_begins_with_the_summary_and_its_tables_have_percent_and_pixels():
    results = make_results(HARD, HARD + 4)
    assert report.make_text(results).startswith(report.make_summary(results))
    lines = report.make_text(results).splitlines()
    assert lines[0] == BETTER
    ours = [line.split() for line in lines if line.startswith("SuperGlue ")]
    assert ours[0] == ["SuperGlue", "10", "50.0", "50.0", "0.0"]
    assert ours[1][1:5] == ["4.2", "16.4", "28.6", "57.5"]


def test_the_description_of_a_run_is_a_markdown_table_of_four_rows():
    first, table = report.make_note(make_results(HARD, HARD + 4), "test").split("\n\n")
    assert first.startswith(f"**{BETTER}**") and first.endswith("`test/index.html`.")
    head, line, *rows = table.splitlines()
    assert head.split(" | ")[1:3] == ["SuperGlue", "ratio test"] and set(line) <= set("|- ")
    assert len(rows) == 4 and rows[0].startswith("| precision, correct matches | 50.0 | 50.0 |")


@pytest.mark.parametrize("improved", [0.0, 0.1])
def test_one_line_says_that_a_model_is_the_one_it_started_from(improved):
    results = make_results(HARD, HARD + 4)
    start = pd.concat({"shipped": results.values[OURS] - improved}, axis=1)
    table = pd.concat([results.table, results.table.assign(matcher="shipped")])
    protocol = {"models": {OURS: {}, "shipped": {}}}
    values = pd.concat([results.values, start], axis=1)
    changed = results._replace(values=values, table=table, protocol=protocol)
    said = "The trained model is the same as shipped: all its values are equal."
    assert (said in report.make_remarks(changed)) == (not improved)


def make_compared(**ours):
    """Results with the shipped weights beside a model that was trained as `ours` says."""
    models = {
        OURS: {"steps": 200, "photographs": 8, **ours},
        "shipped": {"sha256": "abcdef0123456789" * 4, "photographs": 2999},
    }
    return make_results(HARD, HARD + 4, further=["shipped"], models=models)


def test_a_model_is_shown_beside_the_shipped_weights_and_a_command_that_trains_more():
    results = make_compared()
    differs, trains_more = report.compare_trainings(results)
    assert (
        differs
        == "SuperGlue was trained with 200 steps on 8 photographs, the shipped weights on 2,999."
    )
    assert trains_more.endswith("make repro PRESET=coco2017-val")
    assert report.make_training_verdict(results) == ""
    # a model that was trained on as many photographs, or on unknown ones
    assert len(report.compare_trainings(make_compared(photographs=3000))) == 1
    assert report.compare_trainings(make_compared(photographs=None)) == []
    cards = render(results).partition('class="first"')[0].split('class="card"')[1:]
    values = [re.search(r"<p>shipped weights ([\d.]+) %</p>", card) for card in cards]
    # one error of twelve is within 5 px
    assert [value and value.group(1) for value in values] == ["50.0", "50.0", "8.3"]


def test_a_fine_tuned_model_is_compared_with_the_weights_it_started_from():
    results = make_compared(initial_weights="abcdef0123456789", photographs=3007)
    sentence = "Compared with the shipped weights: homographies better; precision and recall equal."
    assert report.make_training_verdict(results) == sentence
    (differs,) = report.compare_trainings(results)
    assert (
        differs
        == "SuperGlue started from the shipped weights, with 200 steps on 8 more photographs."
    )
    printed = report.make_summary(results).split("\n\n")
    assert printed[0].startswith(BETTER) and printed[1].startswith(sentence)
    assert sentence in render(results) and sentence in report.make_note(results, "test")
    # two photographs decide nothing here either
    few = make_results([1.0] * 2, [2.0] * 2, further=["shipped"])
    few = few._replace(protocol=results.protocol)
    assert report.make_training_verdict(few) == ""


@pytest.mark.parametrize(
    "value, written",
    [(0.55622749, 0.5562), (0.00004999, 0.0), (217.84, 217.8), (math.inf, math.inf)],
)
def test_files_hold_the_digits_that_mean_something(value, written):
    assert report.round_number(value) == written


def test_differences_have_no_negative_zero():
    assert report.format_points(-0.0001) == "+0.0" and report.format_points(-0.001) == "-0.1"


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """A folder with an evaluation, which is the current one."""
    monkeypatch.chdir(tmp_path)
    report.write_files(tmp_path / "reports/evaluate", make_results(HARD, HARD + 4), "<html></html>")
    return tmp_path


def test_the_command_prints_it_and_where_to_look(evaluated, capsys):
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == BETTER
    assert any("report.txt" in line for line in lines) and "make ui" in lines[-1]
    short = read_json(evaluated / "reports/evaluate/summary.json")
    assert short["within_5"] == pytest.approx(58.33)
    (evaluated / "reports/evaluate/summary.txt").unlink()
    assert errors.run(command.main, []) == 2
    message = capsys.readouterr().err
    assert "summary.txt: no evaluation here yet" in message and message.count("\n") == 1


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


def test_two_have_a_change_and_more_a_mean_and_all_say_what_cannot_be_compared(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for words in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(words, check=True)
    commit(tmp_path, 50.0)
    commit(tmp_path, 53.0, precision="portable")
    assert command.main(["HEAD~1", "HEAD"]) == 0
    printed = capsys.readouterr().out
    assert "auc_5    50.0  53.0  +3.00" in printed and "compared" not in printed
    assert command.main(["HEAD", "HEAD~1"]) == 0
    assert "auc_5  53.0    50.0  -3.00" in capsys.readouterr().out
    commit(tmp_path, 90.0, images="bb", pairs=4)
    assert command.main(["HEAD~1", "HEAD"]) == 0
    printed = capsys.readouterr().out
    said = "HEAD~1 and HEAD have other photographs and another protocol: their metrics cannot be"
    assert said in printed
    assert command.main(["HEAD~2", "HEAD~1", "HEAD"]) == 0
    rows = {row.split()[0]: row.split()[1:] for row in capsys.readouterr().out.splitlines()}
    assert rows["auc_5"] == ["50.0", "53.0", "90.0", "64.33", "40.0"]
    assert rows["f1"] == ["60.0", "60.0", "60.0", "60.00", "0.0"]
    (tmp_path / "dvc.lock").write_text(LOCK.format(images="cc", pairs=4, precision="float32"))
    assert command.main(["HEAD", "workspace"]) == 0
    assert "HEAD and workspace have other photographs: their" in capsys.readouterr().out
    assert errors.run(command.main, ["nowhere"]) == 2
    assert "nowhere: no experiment or commit with metrics" in capsys.readouterr().err


# The page

PICTURE = ("median-1", "A typical pair & <blur>.", np.zeros((100, 200, 3), np.uint8))


def render(results, curves=None):
    text = report.render_page(results, curves)
    assert all(each.startswith("data:") for each in re.findall(r'(?:src|href)="([^"]*)"', text))
    assert [text.count(f"<{tag}") - text.count(f"</{tag}>") for tag in ("div", "details")] == [0, 0]
    assert "http" not in re.sub("&[a-z]+;", "", text) and "<script" not in text
    return text


def test_the_page_begins_with_the_verdict_three_numbers_and_a_pair(tmp_path):
    (tmp_path / "curves.svg").write_text("<svg/>")
    results = make_results(HARD, HARD + 1, pictures=[PICTURE] * 2)
    page = render(results, tmp_path / "curves.svg")
    first, rest = page.partition("<body>")[2].split("<h2>", 1)
    assert f"<h1>{report.make_verdict(results)}</h1>" in first and first.count('class="card"') == 3
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
    charts = report.draw_robustness_charts(
        results, report.assign_colours(["superglue", "ratio_test"])
    )
    assert [caption for _, caption in charts] == [
        "recall; at least 12 pairs at each level",
        "AUC@5 RANSAC; at least 12 pairs at each level",
    ]
    svg = svg_of(charts[0][0])
    assert svg.index(">2<") < svg.index(">10<")  # levels by value, not as words


def svg_of(chart):
    return base64.b64decode(re.search('base64,([^"]*)', str(chart)).group(1)).decode()


def test_each_matcher_has_one_colour_and_ours_is_drawn_last_and_thicker():
    names = ["superglue", "ratio_test", "mine", "other"]
    colours = report.assign_colours(names)
    assert len(set(colours.values())) == 4
    svg = svg_of(report.draw_line_chart(pd.DataFrame(0.5, [0.0, 1.0], names), colours, "y"))
    strokes = re.findall(r"stroke: (#\w{6}); stroke-width: ([\d.]+)", svg)
    drawn = [stroke for stroke in strokes if stroke[0] in colours.values()]
    assert drawn[-1] == (colours["superglue"], "2.6") and len(set(drawn)) == 4
