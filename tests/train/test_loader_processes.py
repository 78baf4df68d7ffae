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
from pipeline.train import data

pytestmark = pytest.mark.cu111


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
        "import os, signal, sys; sys.path[:0] = sys.argv[1:]\nfrom test_loader_processes import"
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
