"""Progress in a log."""

from superglue_sift.progress import Progress


def test_a_short_bar_ends_at_all_items_also_where_its_consumer_stops_there(capfd):
    list(zip(range(12), Progress(range(12), desc="read", unit="image")))
    assert "read: 100% 12/12" in capfd.readouterr().err
    list(zip(range(5), Progress(range(12), desc="read", unit="image")))
    assert "5/12" in capfd.readouterr().err.splitlines()[-1]
    list(Progress(range(12), disable=True))
    list(Progress([], desc="nothing"))
    assert capfd.readouterr().err == ""
