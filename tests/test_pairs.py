"""Order, batches and the loader: what is trained on when, exactly, whoever asks."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_views import SIZE, made_records, made_store

from pipeline.features.store import Store
from pipeline.pairs.loader import load_batch, read_pairs, split_evenly
from pipeline.pairs.order import PairOrder, Sample, rank_slice, validation_pairs
from pipeline.pairs.prefetch import prefetched
from superglue_sift.batch import Pair, from_pairs
from superglue_sift.geometry import transform

pytestmark = pytest.mark.cu111


class TestOrder:
    @settings(max_examples=30, deadline=None)
    @given(
        seed=st.integers(0, 9), images=st.integers(1, 30), views=st.integers(2, 6), epoch=st.integers(0, 3)
    )
    def test_an_epoch_shows_every_image_once(self, seed, images, views, epoch):
        order = PairOrder(seed, images, views)
        samples = [order.sample(p) for p in range(epoch * images, (epoch + 1) * images)]
        assert sorted(s.image for s in samples) == list(range(images))
        assert all(s.view0 != s.view1 and max(s.view0, s.view1) < views for s in samples)

    @settings(max_examples=30, deadline=None)
    @given(positions=st.lists(st.integers(0, 200), max_size=20))
    def test_position_alone_decides(self, positions):
        one = PairOrder(3, 17, 4)
        assert [one.sample(p) for p in positions] == [PairOrder(3, 17, 4).sample(p) for p in positions]

    def test_seed_and_epoch_matter(self):
        first, other = PairOrder(0, 50, 6), PairOrder(1, 50, 6)
        assert [first.sample(p) for p in range(50)] != [other.sample(p) for p in range(50)]
        assert [first.sample(p)[:3] for p in range(50)] != [first.sample(p)[:3] for p in range(50, 100)]

    @pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
    def test_ranks_together_see_the_step_whatever_their_number(self, world_size):
        samples = PairOrder(0, 30, 3).step(7, 12)
        shares = [samples[rank_slice(12, rank, world_size)] for rank in range(world_size)]
        assert [s for share in shares for s in share] == samples
        assert {len(share) for share in shares} == {12 // world_size}

    @settings(max_examples=50, deadline=None)
    @given(count=st.integers(0, 50), world_size=st.integers(1, 9))
    def test_shares_are_even_and_whole(self, count, world_size):
        items = list(range(count))
        shares = [items[rank_slice(count, rank, world_size)] for rank in range(world_size)]
        assert [item for share in shares for item in share] == items
        assert max(map(len, shares)) - min(map(len, shares)) <= 1

    def test_validation_pairs_are_fixed_and_spread(self):
        pairs = validation_pairs(0, 10, 4, 30)
        assert pairs == validation_pairs(0, 10, 4, 30)
        assert {p.image for p in pairs} == set(range(10))
        assert len({p.image for p in validation_pairs(0, 100, 4, 10)}) == 10
        assert len(validation_pairs(0, 2, 2, 1000)) == 4  # no more than there are ordered pairs

    def test_no_pair_to_draw_is_an_error(self):
        with pytest.raises(ValueError, match="no pair"):
            PairOrder(0, 3, 1)


class TestBatch:
    def test_fields_come_back_as_they_went_in(self):
        rng = np.random.default_rng(0)
        sides = [
            made_records(rng, rng.uniform(0, 200, (n, 2)), rng.integers(0, 160, (n, 128)))
            for n in (4, 9, 0, 2)
        ]
        batch = from_pairs([Pair(sides[0], sides[1], SIZE, (64, 48)), Pair(sides[2], sides[3], SIZE, SIZE)])
        assert batch.counts0.tolist() == [4, 0] and batch.counts1.tolist() == [9, 2]
        assert batch.records0.shape == (2, 4, 148) and batch.records1.shape == (2, 9, 148)
        assert batch.image_size1.tolist() == [[64, 48], [320, 240]] and batch.H_0to1 is None
        one = sides[1]
        assert np.array_equal(batch.keypoints1[0].numpy(), np.stack([one["x"], one["y"]], 1))
        for field in ("scale", "angle", "score"):
            assert np.array_equal(getattr(batch, f"{field}s1")[0].numpy(), one[field])
        assert np.array_equal(batch.descriptors1[0].numpy(), one["descriptor"])
        assert not batch.records1[1, 2:].any()

    def test_no_pair_at_all(self):
        batch = from_pairs([])
        assert len(batch) == 0 and batch.keypoints0.shape == (0, 1, 2) and batch.H_0to1.shape == (0, 3, 3)

    def test_truth_for_all_or_none(self):
        one = made_records(np.random.default_rng(0), np.zeros((1, 2)), np.zeros((1, 128)))
        with pytest.raises(ValueError, match="H_0to1"):
            from_pairs([Pair(one, one, SIZE, SIZE), Pair(one, one, SIZE, SIZE, np.eye(3))])
        with pytest.raises(TypeError, match="KEYPOINT"):
            from_pairs([Pair(np.zeros(3), one, SIZE, SIZE)])


class TestLoader:
    def test_homography_maps_points_of_view_0_to_view_1(self, tmp_path):
        store = Store(made_store(tmp_path))
        one = read_pairs(store, [Sample(3, 0, 2, 5)], 1000)[0]
        zero_xy = np.stack([one.records0["x"], one.records0["y"]], 1).astype(np.float64)
        one_xy = np.stack([one.records1["x"], one.records1["y"]], 1).astype(np.float64)
        distance = np.linalg.norm(transform(zero_xy, one.H_0to1)[:, None] - one_xy, axis=-1).min(1)
        # made with a noise of 0.3 px a side; a wrong direction or order of products would be tens of pixels off
        assert np.median(distance) < 1.0

    def test_strongest_first_and_random_drop(self, tmp_path):
        store = Store(made_store(tmp_path))
        whole = read_pairs(store, [Sample(3, 0, 1, 5)], 1000)[0]
        assert np.array_equal(read_pairs(store, [Sample(3, 0, 1, 5)], 8)[0].records0, whole.records0[:8])
        dropped = read_pairs(store, [Sample(3, 0, 1, 5)], 1000, drop=0.9)[0]
        assert len(dropped.records0) < len(whole.records0)
        assert set(dropped.records0["x"]) <= set(whole.records0["x"])
        again = read_pairs(store, [Sample(3, 0, 1, 5)], 1000, drop=0.9)[0]
        assert np.array_equal(again.records0, dropped.records0)

    def test_prefetching_changes_nothing(self, tmp_path):
        store, order = Store(made_store(tmp_path)), PairOrder(0, 5, 3)

        def make(step):
            return load_batch(store, order.step(step, 4), 64, 0.3)

        for step, batch in enumerate(prefetched(make, range(6))):
            assert torch.equal(batch.records0, make(step).records0)
        assert step == 5

    def test_an_error_surfaces_at_its_step_and_closing_ends_the_thread(self):
        def make(step):
            if step == 2:
                raise OSError("the disk went away")
            return step

        seen = []
        with pytest.raises(OSError, match="went away"):
            for item in prefetched(make, range(5)):
                seen.append(item)  # noqa: PERF402, what came before the error counts
        assert seen == [0, 1]
        before = threading.active_count()
        endless = prefetched(lambda step: step, range(10**6))
        assert next(endless) == 0
        endless.close()
        assert threading.active_count() == before

    def test_split_evenly(self):
        assert split_evenly(list(range(7)), 3) == [[0, 1], [2, 3], [4, 5, 6]]
        assert split_evenly([1], 2) == [[], [1]]
