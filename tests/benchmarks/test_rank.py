"""benchmarks.dev.rank: the part of the true matches that few keypoints leave, by rule of rank."""

import numpy as np
from made_views import made_store

from benchmarks.dev import rank
from superglue_sift.sift import ORIENTED


def test_all_matches_are_left_if_all_keypoints_are_kept(tmp_path, capsys):
    folder = made_store(tmp_path / "store", points=60)
    assert rank.main([str(folder), "--keep", "1", "1000"]) == 0
    first, heading, *rows = capsys.readouterr().out.splitlines()
    assert int(first.split()[0]) > 100 and heading.split() == ["power", "1", "1000"]
    assert len(rows) == len(rank.POWERS)
    for row in rows:
        few, every = map(float, row.split()[1:])
        assert few < 10 and every == 100.0


def test_places_by_hand():
    records = np.zeros(3, ORIENTED)
    records["score"] = [0.3, 0.1, 0.12]
    records["scale"] = [1.0, 4.0, 3.0]
    assert rank.places_of(records, 0.0).tolist() == [0, 2, 1]
    assert rank.places_of(records, 1.0).tolist() == [2, 0, 1]
