"""Order, batches, and who loads them: what is trained on when, exactly, whoever asks."""

import dataclasses
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from multiprocessing import resource_sharer

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_views import SIZE, made_records, made_store
from waiting import ended, wait_until

from pipeline import signals
from pipeline.distributed import Context
from pipeline.errors import RequestError
from pipeline.keypoints.store import Store, View
from pipeline.prefetch import prefetch
from pipeline.train import data
from pipeline.train.augmentation import NO_AUGMENTATION, Augmentation, make_mosaic
from pipeline.train.data import Sample, load_batch, rank_slice, training_pairs, validation_pairs
from superglue_sift.geometry.two_view import transform
from superglue_sift.network.batch import PairBatch
from superglue_sift.network.ground_truth import IGNORED, UNMATCHED, ground_truth
from superglue_sift.network.superglue import TYPICAL_SCORE

pytestmark = pytest.mark.cu111


@pytest.fixture
def store(tmp_path):
    return Store(made_store(tmp_path))


class TestOrder:
    @settings(max_examples=30)
    @given(
        seed=st.integers(0, 9),
        images=st.integers(1, 30),
        views=st.integers(2, 6),
        epoch=st.integers(0, 3),
    )
    def test_an_epoch_shows_every_image_once(self, seed, images, views, epoch):
        samples = training_pairs(seed, images, views, epoch * images, (epoch + 1) * images)
        assert sorted(s.image for s in samples) == list(range(images))
        assert all(s.view0 != s.view1 and max(s.view0, s.view1) < views for s in samples)

    @settings(max_examples=30)
    @given(positions=st.lists(st.integers(0, 200), max_size=20))
    def test_position_alone_decides(self, positions):
        whole = training_pairs(3, 17, 4, 0, 201)
        assert [training_pairs(3, 17, 4, p)[0] for p in positions] == [whole[p] for p in positions]

    @settings(max_examples=50)
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

    def test_every_second_validation_pair_is_augmented(self, store):
        pairs = validation_pairs(0, len(store), store.views_per_image, 10)
        plain, batch = (
            load_batch(store, pairs, 1000, Augmentation(negatives=s)) for s in (0.0, 1.0)
        )
        matched, matched_plain = (
            (ground_truth(each).matches0 >= 0).any(1) for each in (batch, plain)
        )
        alone = torch.tensor([p.seed == NO_AUGMENTATION for p in pairs])
        assert matched.equal(matched_plain & alone) and matched_plain[~alone].any()


class TestLoader:
    def test_homography_maps_points_of_view_0_to_view_1(self, store):
        # synthetic, with a noise of 0.3 px in each view; a wrong direction or order of products
        # gives tens of pixels
        assert np.median(misses(load_batch(store, [Sample(3, 0, 2, 5)], 1000))) < 1.0

    def test_an_error_surfaces_at_its_step_and_closing_ends_the_thread(self):
        def make(step):
            if step == 2:
                raise OSError("the disk went away")
            return step

        seen = []
        with pytest.raises(OSError, match="went away"):
            for item in prefetch(make, range(5)):
                seen.append(item)  # noqa: PERF402, what came before the error counts
        assert seen == [0, 1]
        before = threading.active_count()
        endless = prefetch(lambda step: step, range(10**6))
        assert next(endless) == 0
        endless.close()
        assert threading.active_count() == before

    def test_a_read_that_hangs_does_not_hold_up_the_end(self, monkeypatch):
        monkeypatch.setattr("pipeline.prefetch.CLOSE_S", 0.01)
        released = threading.Event()
        source = prefetch(lambda step: step == 0 or released.wait(30), range(9), ahead=1)
        assert next(source)
        source.close()
        (thread,) = (each for each in threading.enumerate() if each.name == "prefetch")
        assert thread.daemon  # the process does not wait for it either
        released.set()
        thread.join()


def misses(batch):
    """Of the first pair: how far each keypoint of view 0, mapped to view 1, is from the nearest one
    there, px.
    """
    mapped = transform(batch.keypoints(0)[0].double().numpy(), batch.H_0to1[0].numpy())
    return np.linalg.norm(mapped[:, None] - batch.keypoints(1)[0].numpy(), axis=-1).min(1)


class TestAugmentation:
    @settings(max_examples=20)
    @given(seed=st.integers(0, 2**31 - 1))
    def test_truth_follows_turns(self, tmp_path_factory, seed):
        store = Store(made_store(tmp_path_factory.mktemp("store")))
        samples = [Sample(3, 0, 2, seed), Sample(4, 1, 0, seed)]
        plain = ground_truth(load_batch(store, samples, 1000))
        turned = load_batch(store, samples, 1000, Augmentation(rotation_deg=180))
        truth = ground_truth(turned)
        matched = plain.matches0 >= 0
        assert torch.equal(truth.matches0[matched], plain.matches0[matched])

    def test_pairs_of_different_images_have_no_match(self, store):
        pairs = [Sample(3, 0, 1, seed) for seed in range(8)]
        batch = load_batch(store, pairs, 1000, Augmentation(negatives=1.0))
        truth = ground_truth(batch)
        for matches, counts in ((truth.matches0, batch.counts0), (truth.matches1, batch.counts1)):
            assert all(
                (row[:count] == UNMATCHED).all() for row, count in zip(matches, counts.tolist())
            )
        assert len({batch.records1[i].numpy().tobytes() for i in range(8)}) > 1

    def test_the_seed_of_the_sample_decides_and_nothing_else(self, store):
        augmentation = Augmentation(0.5, 180.0, 0.3, 10, 1.0)
        one = Sample(3, 0, 1, 5)
        other = Sample(4, 2, 1, 6)
        alone = load_batch(store, [one], 30, augmentation)
        together = load_batch(store, [other, one], 30, augmentation)
        count = int(alone.counts0[0])
        assert int(together.counts0[1]) == count
        assert torch.equal(together.records0[1, :count], alone.records0[0, :count])
        assert torch.equal(together.H_0to1[1], alone.H_0to1[0])

    def test_truth_of_a_zoomed_pair_joins_keypoints_of_one_photograph(self, tmp_path):
        store = Store(made_store(tmp_path / "dense", points=400))
        own = {
            bytes(each) for view in range(3) for each in store.view(3, view).records["descriptor"]
        }
        pairs = [Sample(3, 0, 1, seed) for seed in range(20)]
        batch = load_batch(store, pairs, 400, Augmentation(rotation_deg=180, zoom=1.0))
        truth = ground_truth(batch)
        for matches, descriptors in (
            (truth.matches0, batch.descriptors(0)),
            (truth.matches1, batch.descriptors(1)),
        ):
            rows, columns = (matches >= 0).nonzero().T
            assert len(rows) > 200
            assert all(bytes(each[:128]) in own for each in descriptors[rows, columns].numpy())
            foreign = [bytes(each[:128]) not in own for each in descriptors.flatten(0, 1).numpy()]
            # Padding, others
            assert set(matches.flatten()[torch.tensor(foreign)].tolist()) == {IGNORED, UNMATCHED}

    def test_a_part_of_the_pairs_has_one_score(self, store):
        pairs = [Sample(3, 0, 1, seed) for seed in range(200)]
        batch = load_batch(store, pairs, 20, Augmentation(score_drop=0.3))
        whole = load_batch(store, pairs, 20)
        records = [batch.records(side).numpy().view(store.dtype)[..., 0] for side in (0, 1)]
        same = [(side["score"] == np.float32(TYPICAL_SCORE)).all(1) for side in records]
        assert np.array_equal(*same) and 30 < same[0].sum() < 90
        before = whole.records0.numpy().view(store.dtype)[..., 0]
        assert np.array_equal(records[0][~same[0]], before[~same[0]])
        assert np.array_equal(records[0]["descriptor"], before["descriptor"])

    def test_a_mosaic_by_hand(self):
        """Two times smaller: positions about the outer edge, scales halved, small keypoints gone,
        ordered by score times scale.
        """
        # So near the middle that none can be cut off
        xy = np.array([[90, 80], [150, 100], [210, 160.0]])
        records = made_records(np.random.default_rng(0), xy, np.zeros((3, 128)))
        records["scale"] = [8, 3.5, 3.7]
        records["angle"] = [10, 20, 30]
        records["score"] = [0.1, 0.3, 0.2]
        view = View(records, np.eye(3), SIZE)
        small = make_mosaic(view, 2.0, 1.8, lambda random: None, np.random.default_rng(3))
        assert small.size == SIZE and list(small.records["angle"]) == [10, 30]
        assert np.allclose(small.records["scale"], [4, 1.85])
        assert np.allclose(small.records["score"], [0.1, 0.2])
        H = small.H_image_to_view
        corner = small.H_image_to_view[:2, 2]
        assert np.allclose(H[:2, :2], np.eye(2) / 2) and np.allclose(H[2], [0, 0, 1])
        # the outer edge of the view, (-0.5, -0.5), comes to that of its cell, of which three
        # quarters show at least
        edge = corner - 0.25
        assert (edge + 0.5 >= -0.25 * np.array(SIZE) / 2).all() and (
            edge + 0.5 <= np.array(SIZE) * 0.625
        ).all()


# Of zoomed pairs only
FIELDS = [field.name for field in dataclasses.fields(PairBatch) if field.name != "cells"]


def equal(one, other):
    return all(torch.equal(getattr(one, name).cpu(), getattr(other, name)) for name in FIELDS)


@pytest.mark.parametrize("device, locked", [("cpu", 0), ("cuda", 4)])
def test_a_thread_locks_the_pages_of_batches_for_a_gpu(
    tmp_path, make_params, monkeypatch, device, locked
):
    """Without a GPU: copies to its memory are replaced by ones that are noted with their thread."""
    copies = []
    threads = set()

    def pin_memory(batch):
        threads.add(threading.current_thread().name)
        copies.append(dataclasses.replace(batch))
        return copies[-1]

    monkeypatch.setattr(PairBatch, "pin_memory", pin_memory)
    monkeypatch.setattr(PairBatch, "to", lambda batch, where: batch)
    monkeypatch.setattr(data, "memory_of_rank", lambda *_: 0)  # so no processes
    train = make_params("train", max_keypoints=30)
    context = Context(0, 1, torch.device(device))
    source = data.StepBatches(
        train, make_params("run", accumulate=2), Store(made_store(tmp_path / "store")), 4, context
    )
    steps = list(source.prefetch(range(2)))
    batches = [batch for step in steps for batch in step]
    assert len(batches) == 4 and len(copies) == locked
    assert all(any(batch is copy for copy in copies) for batch in batches) == bool(locked)
    assert threads == ({"prefetch"} if locked else set())
    for step, made in enumerate(steps):
        assert all(equal(one, other) for one, other in zip(made, source.load(step)))


def test_all_pairs_of_a_step_have_the_same_numbers_of_keypoints(tmp_path, make_params):
    """On both ranks; the numbers differ between the images and between steps."""
    train = make_params("train", min_keypoints=4, max_keypoints=40, keypoint_drop=0, zoom=0)
    store = Store(made_store(tmp_path / "store", points=100))
    sources = [
        data.StepBatches(train, make_params("run"), store, 8, Context(rank, 2, torch.device("cpu")))
        for rank in (0, 1)
    ]
    seen = set()
    for step in range(6):
        parts = [source.load(step)[0] for source in sources]
        sides = [
            torch.cat([getattr(part, name) for part in parts]) for name in ("counts0", "counts1")
        ]
        # image 001 of the store has no keypoints
        numbers = [set(side.tolist()) - {0} for side in sides]
        assert all(len(number) == 1 for number in numbers)
        seen.add(tuple(number.pop() for number in numbers))
    assert len(seen) > 4 and len({counts for pair in seen for counts in pair}) > 4


def made_by(store, step):
    """A step's batch, in a function that every start method can carry."""
    pairs = data.training_pairs(0, len(store), store.views_per_image, 4 * step, 4 * step + 4)
    return data.load_batch(store, pairs, 30)


def reported(step):
    return os.getpid(), signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def sleeping(step):
    if step:
        time.sleep(1000)
    return os.getpid()


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_make_what_a_thread_makes(tmp_path, start_method):
    make = partial(made_by, Store(made_store(tmp_path / "store")))
    by_thread = list(prefetch(make, range(5)))
    by_processes = list(data.prefetch_by_processes(make, range(5), 2, start_method))
    for one, other in zip(by_thread, by_processes):
        assert all(torch.equal(value, getattr(other, name)) for name, value in vars(one).items())
    assert len(by_processes) == 5 and not multiprocessing.active_children()


@pytest.mark.parametrize("number", signals.STOP_SIGNALS)
def test_they_leave_signals_to_the_training(number):
    source = data.prefetch_by_processes(reported, range(20), 2)
    first, _ = next(source)
    for process in multiprocessing.active_children():
        os.kill(process.pid, number)
    assert {pid for pid, _ in source} >= {first}


def test_a_killed_one_is_recognised_and_an_error_of_its_own_is_not():
    source = data.prefetch_by_processes(reported, range(1000), 2)
    pid, _ = next(source)
    with pytest.raises(RuntimeError) as error:
        os.kill(pid, signal.SIGKILL)  # torch's handler may raise in this very line
        list(source)
    assert data.a_process_died(error.value)
    with pytest.raises(RuntimeError) as error:
        list(data.prefetch_by_processes(raising, range(3), 1))
    assert not data.a_process_died(error.value) and "not the loader" in str(error.value)
    assert not multiprocessing.active_children()


def killed_while_it_asks_whether_to_end(step):
    """Stop as a process does that is killed in `done_event.is_set` of torch's loop."""
    frame = sys._getframe()
    while "done_event" not in frame.f_locals:
        frame = frame.f_back
    lock = getattr(frame.f_locals["done_event"], "_cond", None)
    if lock:
        lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def lose_a_process():
    with pytest.raises(RuntimeError) as error:
        list(data.prefetch_by_processes(killed_while_it_asks_whether_to_end, range(3), 1))
    assert data.a_process_died(error.value)


def test_one_killed_at_a_bad_moment_leaves_no_lock():
    training = multiprocessing.get_context("fork").Process(target=lose_a_process)
    training.start()
    training.join(timeout=60)
    training.kill()  # one that waits for the lock
    training.join()
    assert training.exitcode == 0


def left_while_it_hands_over(step):
    """Connect to the thread that hands over file descriptors, and leave as a main process that ends
    does.
    """
    resource_sharer._resource_sharer._start()
    socket.socket(socket.AF_UNIX).connect(resource_sharer._resource_sharer._address)
    resource_sharer.stop(timeout=10)


def test_one_whose_main_process_left_prints_no_traceback(capfd):
    assert list(data.prefetch_by_processes(left_while_it_hands_over, [0], 1)) == [None]
    assert "Traceback" not in capfd.readouterr().err


def raising(step):
    raise RuntimeError("not the loader")


def test_they_end_with_a_training_that_is_killed():
    code = (
        "import os, signal, sys; sys.path[:0] = sys.argv[1:]\nfrom test_data import"
        " *\nsource = data.prefetch_by_processes(sleeping, range(9), 2); print(next(source),"
        " flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    tests = os.path.dirname(__file__)
    command = [sys.executable, "-c", code, tests, os.path.dirname(tests), *sys.path]
    said, _ = psutil.Popen(command, stdout=-1).communicate(timeout=120)
    wait_until(lambda: ended(int(said)), 10)


class TestRoom:
    """What fits, and what does not: the numbers of 512 pairs of 1,024 keypoints are those of a
    crash on 2 GiB.
    """

    BYTES = data.size_of_step(512, 1024, 280)

    def test_fewer_processes_where_shared_memory_is_short(self):
        fit = partial(data.fit, 4, self.BYTES, data.TENSORS, files=1024)
        assert pytest.approx(512 * 2 * 1024 * 280, rel=1e-3) == self.BYTES  # 294 MB
        assert fit(4 << 30) == 4  # 10 steps: 2.9 GB
        assert fit(2 << 30) == 2  # 6 steps: 1.76 GB
        assert fit(64 << 20) == 0  # Docker's: a thread
        assert data.fit(0, self.BYTES, data.TENSORS, 4 << 30, 1024) == 0

    @settings(max_examples=100)
    @given(
        st.integers(1, 8),
        st.integers(1, 600),
        st.integers(1, 2048),
        st.integers(0, 1 << 33),
        st.integers(128, 4096),
    )
    def test_they_never_take_more_than_there_is(self, most, pairs, keypoints, memory, files):
        step = data.size_of_step(pairs, keypoints, 280)
        found = data.fit(most, step, data.TENSORS, memory, files)
        assert 0 <= found <= most
        steps = data.steps_in_memory(found)
        if found:
            assert steps * step <= memory and steps * data.TENSORS + 128 <= files

    def test_the_environment_asks(self, monkeypatch, capsys):
        size = data.size_of_step(4, 30, 280)
        choose = partial(data.choose_processes, torch.device("cpu"), size, data.TENSORS)
        assert choose() == 0
        monkeypatch.setenv("SG_LOADER_PROCESSES", "3")
        monkeypatch.setattr(data, "memory_of_rank", lambda *_: 1 << 30)
        assert choose() == 3 and not capsys.readouterr().out
        monkeypatch.setattr(data, "memory_of_rank", lambda *_: 6 * size)
        assert choose() == 2
        assert "2 process(es) instead of 3" in capsys.readouterr().out
        monkeypatch.setenv("SG_LOADER_PROCESSES", "many")
        with pytest.raises(RequestError, match="SG_LOADER_PROCESSES='many'"):
            choose()
