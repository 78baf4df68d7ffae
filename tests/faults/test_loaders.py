"""Processes that make batches: they leave signals to the training, and end with it."""

import multiprocessing
import os
import signal
import time

import pytest
import torch
from made_views import make_step_batches, make_store
from waiting import has_ended, wait_until

from pipeline import workers
from pipeline.keypoints.store import KeypointStore
from pipeline.train import data

pytestmark = pytest.mark.cu111


class Slow(data.StepBatches):
    """Batches whose second step takes for ever, in place of the first the process that made it."""

    def load(self, step):
        if step:
            time.sleep(1000)
        return [torch.tensor(os.getpid())]


@pytest.mark.parametrize("number", workers.STOP_SIGNALS)
def test_processes_that_make_batches_ignore_signals(tmp_path, make_params, monkeypatch, number):
    monkeypatch.setenv("SG_LOADER_PROCESSES", "2")
    store = KeypointStore(make_store(tmp_path))
    source = make_step_batches(store, make_params).prefetch(range(20))
    next(source)
    for process in multiprocessing.active_children():
        os.kill(process.pid, number)
    assert len(list(source)) == 19


def train_and_die(out, make_params, folder):
    source = make_step_batches(KeypointStore(folder), make_params)
    source.__class__ = Slow
    batches = source._prefetch_by_processes(range(9), 2)  # kept, since its end ends the processes
    (process,) = next(batches)
    out.put(int(process))
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_that_make_batches_end_with_a_killed_training(tmp_path, make_params):
    context = multiprocessing.get_context("fork")
    out = context.SimpleQueue()
    arguments = (out, make_params, make_store(tmp_path))
    context.Process(target=train_and_die, args=arguments).start()
    process = out.get()
    wait_until(lambda: has_ended(process), 10)
