"""benchmarks.resolutions: the table of docs/matching.md."""

import re

import pytest

from benchmarks import resolutions


@pytest.mark.slow
def test_a_row_for_each_size_of_the_file(shared_data, monkeypatch, capsys):
    monkeypatch.setattr(resolutions, "SIDES", (256, 1024))
    images = [shared_data / "poses/strecha" / f"Herz-Jesus-P25_000{n}.jpg" for n in (3, 4)]
    assert resolutions.main(list(map(str, images))) == 0
    heading, *_, small, whole = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"1 pairs, at 1024 px \d{3,4} matches, \d{3,4} aligned", heading)
    assert whole == "| 1,024 | 100 | 100 |"
    matches, aligned = map(int, re.fullmatch(r"\| 256 \| (\d+) \| (\d+) \|", small).groups())
    assert 20 < aligned < 90 and 20 < matches < 90


def test_an_odd_number_of_images_is_refused(capsys):
    with pytest.raises(SystemExit):
        resolutions.main(["a.jpg"])
    assert "two of each place" in capsys.readouterr().err
