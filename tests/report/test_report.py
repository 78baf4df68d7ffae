"""Tables, and the command that prints the comparison."""

import math
import re
import shutil

import pytest
from reading import read_json

from pipeline import errors
from pipeline.report import __main__ as report
from pipeline.report import document, outputs, tables
from pipeline.report.rows import Measure, Row, table_of


def area(name, limit):
    return Measure("auc", name, limit=limit)


OURS = {
    Measure("pairs"): 4,
    Measure("matches"): 51.7,
    Measure("precision"): 0.8,
    Measure("recall"): None,
    area("ransac", 1): 0.1,
    area("ransac", 5): 0.537,
    area("dlt", 1): 0.0,
    area("dlt", 5): None,
    Measure("threshold"): 0.25,
}
TABLE = {"superglue": OURS, "ratio_test": {Measure("pairs"): 4, Measure("matches"): None}}
ROWS = [Row(name, measure, v) for name, values in TABLE.items() for measure, v in values.items()]


def extend(**values):
    """The table with more values of ours."""
    more = {Measure(name): value for name, value in values.items()}
    return {**TABLE, "superglue": {**OURS, **more}}


def test_table_shows_pairs_percentages_and_gaps():
    text = tables.comparison(TABLE)
    ours = next(line for line in text.splitlines() if line.startswith("SuperGlue (ours)"))
    assert ours.split()[2:6] == ["4", "52", "80.0", "-"] and "53.7" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    above, header = text.splitlines()[4:6]
    starts = [match.start() for match in re.finditer(r"@1\b", header)]
    assert [above.index("AUC RANSAC"), above.index("AUC DLT")] == starts


def test_table_says_how_many_pairs_the_recall_is_of():
    assert "recall is over" not in tables.comparison(TABLE)
    assert "recall is over 3 of 4 pairs" in tables.comparison(extend(recall_pairs=3))


@pytest.mark.parametrize(
    "value, written",
    [
        (0.55622749, 0.5562),
        (0.00004999, 0.0),
        (75.43592, 75.44),
        (217.84, 217.8),
        (60, 60),
        (None, None),
        (math.inf, math.inf),
    ],
)
def test_files_hold_the_digits_that_mean_something(value, written):
    assert outputs.shorten(value) == written


def write(folder, rows):
    """The files of an evaluation with these rows."""
    model = {"file": "m", "sha256": "0123456789", "step": 1}
    content = document.Content("here", rows, [], [], {}, [], [], {"model": model})
    outputs.write(folder, content)


def test_a_value_is_rounded_once(tmp_path):
    """Four decimals, 0.8905, would be printed as 89.0 or 89.1 by chance."""
    more = [Row("nn", Measure("pairs"), 4), Row("nn", Measure("precision"), 0.890546)]
    write(tmp_path, [*ROWS, *more])
    assert read_json(tmp_path / "metrics.json")["nn.precision"] == 0.8905
    assert "89.1" in (tmp_path / document.TEXT).read_text()


@pytest.fixture
def evaluated(tmp_path):
    """The folder of an evaluation."""
    assert table_of(ROWS) == TABLE
    write(tmp_path, ROWS)
    return tmp_path


def test_report_command(evaluated, capsys):
    shutil.rmtree(evaluated / "pictures")
    assert report.main(["--evaluation", str(evaluated)]) == 0
    printed = capsys.readouterr().out
    assert "SuperGlue (ours)" in printed and "pairs.csv" in printed and "make ui" in printed
    assert "pictures  " not in printed


def test_report_command_without_an_evaluation(tmp_path, capsys):
    assert errors.run(report.main, ["--evaluation", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "report.txt: no evaluation here yet" in message and message.count("\n") == 1
