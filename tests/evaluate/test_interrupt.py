"""A Ctrl-C ends an evaluation at any moment."""

import inspect
from types import SimpleNamespace

import pytest

from pipeline.evaluate import evaluation


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_generators_over_threads_are_closed_where_they_are_used(monkeypatch, error):
    """Python would lose a Ctrl-C that arrives while it deletes one."""
    generators = []
    prefetch = evaluation.prefetch

    def record(*arguments):
        generators.append(prefetch(*arguments))
        return generators[-1]

    def update(count):
        if error:
            raise error

    monkeypatch.setattr(evaluation, "prefetch", record)
    monkeypatch.setattr(evaluation, "extract_scene_pairs", lambda source, index, _: [index])
    source = type("Source", (list,), {"scenes": [(str(n), 1) for n in range(40)]})(range(40))
    monkeypatch.setattr(evaluation, "score_pair", lambda pair, *_: pair)
    matcher_set = SimpleNamespace(
        evaluated=SimpleNamespace(extract=None), match=lambda pair: pair, thresholds={}
    )
    bar = SimpleNamespace(update=update)
    if error:
        with pytest.raises(KeyboardInterrupt):
            evaluation.match_and_score(source, matcher_set, None, bar)
    else:
        scores, _ = evaluation.match_and_score(source, matcher_set, None, bar)
        assert scores == list(range(40))
    assert len(generators) == 2
    assert {inspect.getgeneratorstate(generator) for generator in generators} == {
        inspect.GEN_CLOSED
    }
