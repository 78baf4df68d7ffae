"""Processes that load batches: the same batches, in the memory there is; they ignore signals, end
with their parent.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from functools import partial
from multiprocessing import resource_sharer

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_views import made_store
from waiting import ended, wait_until

from pipeline import signals
from pipeline.errors import RequestError
from pipeline.keypoints.store import Store
from pipeline.prefetch import prefetch
from pipeline.train.pairs import loader, workers
from pipeline.train.pairs.order import PairOrder
from pipeline.train.pairs.workers import StepSize

pytestmark = pytest.mark.cu111


def made_by(store, step):
    """A step's batch, in a function that every start method can carry."""
    return loader.load_batch(
        store, PairOrder(0, len(store), store.views_per_image).step(step, 4), 30
    )


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
    by_processes = list(workers.prefetch(make, range(5), 2, start_method))
    for one, other in zip(by_thread, by_processes):
        assert all(torch.equal(value, getattr(other, name)) for name, value in vars(one).items())
    assert len(by_processes) == 5 and not multiprocessing.active_children()


@pytest.mark.parametrize("number", signals.STOP_SIGNALS)
def test_they_leave_signals_to_the_training(number):
    source = workers.prefetch(reported, range(20), 2)
    first, _ = next(source)
    for process in multiprocessing.active_children():
        os.kill(process.pid, number)
    assert {pid for pid, _ in source} >= {first}


def test_a_killed_one_is_recognised_and_an_error_of_its_own_is_not():
    source = workers.prefetch(reported, range(1000), 2)
    pid, _ = next(source)
    with pytest.raises(RuntimeError) as error:
        os.kill(pid, signal.SIGKILL)  # torch's handler may raise in this very line
        list(source)
    assert workers.a_process_died(error.value)
    with pytest.raises(RuntimeError) as error:
        list(workers.prefetch(raising, range(3), 1))
    assert not workers.a_process_died(error.value) and "not the loader" in str(error.value)
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
        list(workers.prefetch(killed_while_it_asks_whether_to_end, range(3), 1))
    assert workers.a_process_died(error.value)


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
    assert list(workers.prefetch(left_while_it_hands_over, [0], 1)) == [None]
    assert "Traceback" not in capfd.readouterr().err


def raising(step):
    raise RuntimeError("not the loader")


def test_they_end_with_a_training_that_is_killed():
    code = (
        "import os, signal, sys; sys.path[:0] = sys.argv[1:]\nfrom test_loader_processes import"
        " *\nsource = workers.prefetch(sleeping, range(9), 2); print(next(source),"
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

    STEP = StepSize(pairs=512, keypoints=1024, record=280)

    def test_fewer_processes_where_shared_memory_is_short(self):
        fit = partial(workers.fit, 4, self.STEP, files=1024)
        assert self.STEP.bytes == pytest.approx(512 * 2 * 1024 * 280, rel=1e-3)  # 294 MB
        assert fit(4 << 30) == 4  # 10 steps: 2.9 GB
        assert fit(2 << 30) == 2  # 6 steps: 1.76 GB
        assert fit(64 << 20) == 0  # Docker's: a thread
        assert workers.fit(0, self.STEP, 4 << 30, 1024) == 0

    @settings(max_examples=100)
    @given(
        st.integers(1, 8),
        st.integers(1, 600),
        st.integers(1, 2048),
        st.integers(0, 1 << 33),
        st.integers(128, 4096),
    )
    def test_they_never_take_more_than_there_is(self, most, pairs, keypoints, memory, files):
        step = StepSize(pairs, keypoints, 280)
        found = workers.fit(most, step, memory, files)
        assert 0 <= found <= most
        steps = workers.steps_in_memory(found)
        if found:
            assert steps * step.bytes <= memory and steps * step.files + 128 <= files

    def test_the_environment_asks(self, monkeypatch, capsys):
        choose = partial(workers.choose_processes, torch.device("cpu"), StepSize(4, 30, 280))
        assert choose() == 0
        monkeypatch.setenv("SG_LOADER_PROCESSES", "3")
        monkeypatch.setattr(workers, "memory_of_rank", lambda *_: 1 << 30)
        assert choose() == 3 and not capsys.readouterr().out
        monkeypatch.setattr(workers, "memory_of_rank", lambda *_: 6 * choose.args[1].bytes)
        assert choose() == 2
        assert "2 process(es) instead of 3" in capsys.readouterr().out
        monkeypatch.setenv("SG_LOADER_PROCESSES", "many")
        with pytest.raises(RequestError, match="SG_LOADER_PROCESSES='many'"):
            choose()
