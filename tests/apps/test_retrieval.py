"""Pairs that accepted pairs propose. (test_pairing.py finds photographs that look alike.)"""

from types import SimpleNamespace

import numpy as np

from superglue_sift.apps import retrieval


def test_photographs_without_keypoints_look_like_none():
    words = np.eye(2, 128, dtype=np.float32)
    assert not retrieval.vlad(words[:0], words).any()
    assert retrieval.nearest_pairs(["alone"], lambda _name: words, 1) == []


def test_pairs_that_are_accepted_with_a_third_are_proposed_best_first():
    known = retrieval.Expansion("abcde")

    def add(pair, score):
        known(*pair, SimpleNamespace(pair_score=score, accepted=score >= 10))

    for pair, score in (("ba", 50), ("bc", 30), ("cd", 40), ("de", 9), ("ad", 0)):
        add(pair, score)
    # a and c through b, 30; b and d through c, 30; a and d were tried; nothing through d and e, who
    # do not go together
    assert known.propose() == [("a", "c"), ("b", "d")]
    add("ac", 60)
    assert known.propose() == [("b", "d")]
    add("be", 70)
    # a and e through b, 50; c and e, 30; b and d, 30: with one for each image a-e, then b-d, and
    # c-e for c
    assert known.propose(1) == [("a", "e"), ("b", "d"), ("c", "e")]
    assert retrieval.Expansion("ab").propose() == []
