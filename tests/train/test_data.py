"""Order, batches, and who loads them: what is trained on when, exactly, whoever asks."""

import itertools
import multiprocessing
import os
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_views import SIZE, make_features, make_step_batches, make_store

from pipeline.distributed import Context
from pipeline.errors import RequestError
from pipeline.keypoints.store import KeypointStore, View
from pipeline.params import Augmentation
from pipeline.train import data
from pipeline.train.augmentation import NO_AUGMENTATION, choose_second_image, make_mosaic
from pipeline.train.data import (
    Sample,
    draw_training_pairs,
    draw_validation_pairs,
    load_batch,
    slice_for_rank,
)
from pipeline.train.loss import find_truth
from pipeline.workers import prefetch
from superglue_sift.features.features import TYPICAL_SCORE
from superglue_sift.files import GIB, MIB
from superglue_sift.geometry.two_view import transform
from superglue_sift.network.batch import count_keypoints
from superglue_sift.network.ground_truth import IGNORED, UNMATCHED

pytestmark = pytest.mark.cu111
FIELDS = ("keypoints", "scales", "oris", "scores", "descriptors")


@pytest.fixture
def store(tmp_path):
    return KeypointStore(make_store(tmp_path))


class TestOrder:
    @settings(max_examples=30)
    @given(
        seed=st.integers(0, 9),
        images=st.integers(1, 30),
        views=st.integers(2, 6),
        epoch=st.integers(0, 3),
    )
    def test_an_epoch_shows_every_image_once(self, seed, images, views, epoch):
        samples = draw_training_pairs(seed, images, views, epoch * images, (epoch + 1) * images)
        assert sorted(s.image for s in samples) == list(range(images))
        assert all(s.view0 != s.view1 and max(s.view0, s.view1) < views for s in samples)

    @settings(max_examples=30)
    @given(positions=st.lists(st.integers(0, 200), max_size=20))
    def test_a_pair_depends_on_its_position_alone(self, positions):
        whole = draw_training_pairs(3, 17, 4, 0, 201)
        assert [draw_training_pairs(3, 17, 4, p, p + 1)[0] for p in positions] == [
            whole[p] for p in positions
        ]

    @settings(max_examples=50)
    @given(count=st.integers(0, 50), world_size=st.integers(1, 9))
    def test_shares_of_ranks_are_even_and_complete(self, count, world_size):
        items = list(range(count))
        shares = [items[slice_for_rank(count, rank, world_size)] for rank in range(world_size)]
        assert [item for share in shares for item in share] == items
        assert max(map(len, shares)) - min(map(len, shares)) <= 1

    def test_validation_pairs_are_fixed_and_spread(self):
        pairs = draw_validation_pairs(0, 10, 4, 30)
        assert pairs == draw_validation_pairs(0, 10, 4, 30)
        assert {p.image for p in pairs} == set(range(10))
        assert len({p.image for p in draw_validation_pairs(0, 100, 4, 10)}) == 10
        assert (
            len(draw_validation_pairs(0, 2, 2, 1000)) == 4
        )  # no more than there are ordered pairs

    def test_epochs_differ_in_order_and_in_views(self):
        first, second = (draw_training_pairs(0, 30, 4, start, start + 30) for start in (0, 30))
        assert [pair.image for pair in first] != [pair.image for pair in second]
        views0, views1 = ({p.image: (p.view0, p.view1) for p in pairs} for pairs in (first, second))
        # Two draws of 12 ordered pairs of views are equal with probability 1/12.
        assert sum(views0[image] != views1[image] for image in range(30)) > 20

    def test_an_image_of_several_validation_pairs_gives_augmented_and_stored_ones(self):
        pairs = draw_validation_pairs(0, 10, 4, 20)
        kinds = {(pair.image, pair.seed == NO_AUGMENTATION) for pair in pairs}
        assert len(kinds) == 20

    def test_every_second_validation_pair_is_shown_as_it_is_stored(self, store):
        pairs = draw_validation_pairs(0, len(store), store.views_per_image, 10)
        stored = [pair for pair in pairs if pair.seed == NO_AUGMENTATION]
        assert len(stored) == 5
        batch = load_batch(store, stored, 1000, Augmentation(negatives=1.0, rotation_deg=180))
        assert equal(batch, load_batch(store, stored, 1000))


class TestLoader:
    def test_homography_maps_points_of_view_0_to_view_1(self, store):
        # synthetic, with a noise of 0.3 px in each view; a wrong direction or order of products
        # gives tens of pixels
        distances = measure_distances(load_batch(store, [Sample(3, 0, 2, 5)], 1000))
        assert np.median(distances) < 1.0

    def test_an_error_surfaces_at_its_step_and_closing_ends_the_thread(self):
        def make(step):
            if step == 2:
                raise OSError("the disk went away")
            return step

        steps = []
        with pytest.raises(OSError, match="went away"):
            for step in prefetch(make, range(5)):
                steps.append(step)  # noqa: PERF402, what came before the error counts
        assert steps == [0, 1]
        before = threading.active_count()
        endless = prefetch(lambda step: step, range(10**6))
        assert next(endless) == 0
        endless.close()
        assert threading.active_count() == before


def measure_distances(batch):
    """Of the first pair: how far each keypoint of view 0, mapped to view 1, is from the nearest one
    there, px.
    """
    mapped = transform(batch.images0.keypoints[0].double().numpy(), batch.H_0to1[0].numpy())
    return np.linalg.norm(mapped[:, None] - batch.images1.keypoints[0].numpy(), axis=-1).min(1)


class TestAugmentation:
    @settings(max_examples=20)
    @given(seed=st.integers(0, 2**31 - 1))
    def test_truth_follows_turns(self, tmp_path_factory, seed):
        store = KeypointStore(make_store(tmp_path_factory.mktemp("store")))
        samples = [Sample(3, 0, 2, seed), Sample(4, 1, 0, seed)]
        plain = find_truth(load_batch(store, samples, 1000))
        turned = load_batch(store, samples, 1000, Augmentation(rotation_deg=180))
        truth = find_truth(turned)
        is_matched = plain.matches0 >= 0
        assert torch.equal(truth.matches0[is_matched], plain.matches0[is_matched])

    def test_the_second_image_of_a_negative_pair_is_any_other_one(self):
        augmentation = Augmentation(negatives=1.0)
        images = {choose_second_image(augmentation, 3, 5, seed) for seed in range(100)}
        assert images == {0, 1, 2, 4}

    def test_pairs_of_different_images_have_no_match(self, store):
        pairs = [Sample(3, 0, 1, seed) for seed in range(8)]
        batch = load_batch(store, pairs, 1000, Augmentation(negatives=1.0))
        truth = find_truth(batch)
        for matches, images in zip(truth, (batch.images0, batch.images1)):
            counts = count_keypoints(images).tolist()
            assert all((row[:count] == UNMATCHED).all() for row, count in zip(matches, counts))
        assert len({descriptors.tobytes() for descriptors in batch.images1.descriptors.numpy()}) > 1

    def test_the_augmentation_of_a_pair_depends_on_its_seed_alone(self, store):
        augmentation = Augmentation(
            keypoint_drop=0.5, rotation_deg=180.0, negatives=0.3, min_keypoints=10, zoom=1.0
        )
        sample = Sample(3, 0, 1, 5)
        alone = load_batch(store, [sample], 30, augmentation)
        together = load_batch(store, [Sample(4, 2, 1, 6), sample], 30, augmentation)
        count = int(count_keypoints(alone.images0)[0])
        assert int(count_keypoints(together.images0)[1]) == count
        for name in FIELDS:
            expected = getattr(alone.images0, name)[0, :count]
            assert torch.equal(getattr(together.images0, name)[1, :count], expected)
        assert torch.equal(together.H_0to1[1], alone.H_0to1[0])

    def test_truth_of_a_zoomed_pair_joins_keypoints_of_one_photograph(self, tmp_path):
        store = KeypointStore(make_store(tmp_path / "dense", points=400))
        descriptors_of_3 = {
            bytes(descriptor)
            for view in range(3)
            for descriptor in store.read_view(3, view).features.descriptors[:, 0]
        }
        pairs = [Sample(3, 0, 1, seed) for seed in range(20)]
        batch = load_batch(store, pairs, 400, Augmentation(rotation_deg=180, zoom=1.0))
        truth = find_truth(batch)
        for matches, images in zip(truth, (batch.images0, batch.images1)):
            descriptors = images.descriptors[:, :, 0]
            rows, columns = (matches >= 0).nonzero().T
            assert len(rows) > 200
            assert {*map(bytes, descriptors[rows, columns].numpy())} <= descriptors_of_3
            is_foreign = torch.tensor(
                [bytes(row) not in descriptors_of_3 for row in descriptors.flatten(0, 1).numpy()]
            )
            # Padding, keypoints of other photographs
            assert set(matches.flatten()[is_foreign].tolist()) == {IGNORED, UNMATCHED}

    def test_both_views_of_a_zoomed_negative_pair_show_different_photographs(self, store):
        """Otherwise keypoints that match would count as unmatched."""
        image_of = {
            bytes(descriptor): image
            for image in range(len(store))
            for view in range(store.views_per_image)
            for descriptor in store.read_view(image, view).features.descriptors[:, 0]
        }
        pairs = [Sample(3, 0, 1, seed) for seed in range(20)]
        batch = load_batch(store, pairs, 1000, Augmentation(negatives=1.0, zoom=1.0))
        for pair in range(len(pairs)):
            shown0, shown1 = (
                {image_of.get(bytes(d)) for d in images.descriptors[pair, :, 0].numpy()} - {None}
                for images in (batch.images0, batch.images1)
            )
            assert not shown0 & shown1

    def test_a_part_of_the_pairs_has_one_score(self, store):
        pairs = [Sample(3, 0, 1, seed) for seed in range(200)]
        batch = load_batch(store, pairs, 20, Augmentation(score_drop=0.3))
        same = [
            (images.scores == TYPICAL_SCORE).all(1) for images in (batch.images0, batch.images1)
        ]
        assert torch.equal(*same) and 30 < same[0].sum() < 90
        # the other pairs, and everything else, stay
        whole = load_batch(store, pairs, 20)
        images, expected = batch.images0, whole.images0
        assert torch.equal(images.scores[~same[0]], expected.scores[~same[0]])
        for name in ("keypoints", "scales", "oris", "descriptors"):
            assert torch.equal(getattr(images, name), getattr(expected, name))

    def test_a_mosaic_of_known_keypoints(self):
        """Two times smaller: positions about the outer edge, scales halved, small keypoints gone,
        ordered by score times scale.
        """
        # So near the middle that none can be cut off
        xy = np.array([[90, 80], [150, 100], [210, 160.0]])
        features = make_features(np.random.default_rng(0), xy, np.zeros((3, 128)))
        features.scales[:] = [8, 3.5, 3.7]
        features.oris[:, 0] = [10, 20, 30]
        features.scores[:] = [0.1, 0.3, 0.2]
        view = View(features, np.eye(3))
        small = make_mosaic(view, 2.0, 1.8, lambda random: None, np.random.default_rng(3))
        shrunk = small.features
        assert shrunk.image_size == SIZE and list(shrunk.oris[:, 0]) == [10, 30]
        assert np.allclose(shrunk.scales, [4, 1.85])
        assert np.allclose(shrunk.scores, [0.1, 0.2])
        H = small.H_image_to_view
        corner = small.H_image_to_view[:2, 2]
        assert np.allclose(H[:2, :2], np.eye(2) / 2) and np.allclose(H[2], [0, 0, 1])
        expected = transform(xy[[0, 2]], H)
        assert np.allclose(shrunk.keypoints, expected, atol=1e-4)  # px, float32
        # the cell maps the outer edges of the view to the unit square
        edges = transform(np.array([[-0.5, -0.5], np.subtract(SIZE, 0.5)]), H)
        assert np.allclose(transform(edges, small.cell), [[0, 0], [1, 1]])
        # the outer edge of the view, (-0.5, -0.5), comes to that of its cell, of which three
        # quarters show at least
        edge = corner - 0.25
        assert (edge + 0.5 >= -0.25 * np.array(SIZE) / 2).all() and (
            edge + 0.5 <= np.array(SIZE) * 0.625
        ).all()


def equal(batch, expected_batch):
    batches = [
        [*part.images0, *part.images1, part.H_0to1, part.cells] for part in (batch, expected_batch)
    ]
    return all(
        torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected
        for value, expected in zip(*batches)
    )


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_thread_or_processes_load_the_steps_in_order(store, make_params, monkeypatch, processes):
    monkeypatch.setenv("SG_LOADER_PROCESSES", processes)
    source = make_step_batches(store, make_params, accumulate=2)
    steps = list(source.prefetch(range(5)))
    for step, batches in enumerate(steps):
        assert len(batches) == 2 and all(map(equal, batches, source.load(step)))
    assert len(steps) == 5 and not multiprocessing.active_children()


def test_how_many_processes_load_batches(monkeypatch):
    on_gpu = partial(data.choose_loader_processes, torch.device("cuda"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    free = lambda size: lambda _: SimpleNamespace(free=size)  # noqa: E731
    monkeypatch.setattr(data.shutil, "disk_usage", free(8 * GIB))
    assert on_gpu() == 4 and data.choose_loader_processes(torch.device("cpu")) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # a core for each rank and one for its processes
    assert on_gpu() == 1
    monkeypatch.setattr(data.shutil, "disk_usage", free(64 * MIB))  # Docker's default: a thread
    assert on_gpu() == 0
    monkeypatch.setenv("SG_LOADER_PROCESSES", "many")
    with pytest.raises(RequestError, match="SG_LOADER_PROCESSES='many'"):
        on_gpu()


def test_all_pairs_of_a_step_have_the_same_numbers_of_keypoints(tmp_path, make_params):
    """On both ranks; the numbers differ between the images and between steps."""
    keys = {"min_keypoints": 4, "max_keypoints": 40, "keypoint_drop": 0, "zoom": 0}
    store = KeypointStore(make_store(tmp_path / "store", points=100))
    sources = [
        make_step_batches(store, make_params, keys, Context(rank, 2, torch.device("cpu")))
        for rank in (0, 1)
    ]
    counts_of_steps = set()
    for step in range(6):
        parts = [source.load(step)[0] for source in sources]
        # image 001 of the store has no keypoints
        counts = [
            {*torch.cat([count_keypoints(images) for images in sides]).tolist()} - {0}
            for sides in zip(*((part.images0, part.images1) for part in parts))
        ]
        assert all(len(side) == 1 for side in counts)
        counts_of_steps.add(tuple(side.pop() for side in counts))
    assert len(counts_of_steps) > 4 and len({*itertools.chain(*counts_of_steps)}) > 4
