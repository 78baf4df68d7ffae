"""The choice of a loader: synthetic pairs, and batches in locked pages for a GPU."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from made_views import made_store

from pipeline.features.store import Store
from pipeline.train.pairs import loader
from pipeline.train.pairs import workers as worker_processes
from pipeline.train.pairs.order import PairOrder
from superglue_sift.batch import PairBatch

# Of zoomed pairs only
FIELDS = [field.name for field in dataclasses.fields(PairBatch) if field.name != "cells"]


def equal(one, other) -> bool:
    return all(torch.equal(getattr(one, name).cpu(), getattr(other, name)) for name in FIELDS)


@pytest.mark.parametrize("name", ["synthetic", "plain"])
@pytest.mark.parametrize("device, locked", [("cpu", 0), ("cuda", 4)])
def test_a_thread_locks_the_pages_of_batches_for_a_gpu(tmp_path, monkeypatch, name, device, locked):
    """Without a GPU: `pin_memory` is replaced by one that copies, and notes the copy and its
    thread.
    """
    store = Store(made_store(tmp_path / "store"))
    copies = []
    threads = set()

    def pin_memory(batch):
        threads.add(threading.current_thread().name)
        copies.append(dataclasses.replace(batch))
        return copies[-1]

    monkeypatch.setattr(loader.PairBatch, "pin_memory", pin_memory)
    # No memory: no processes
    monkeypatch.setattr(worker_processes, "memory_of_rank", lambda *_: 0)
    load, ahead = loader.choose(
        name, torch.device(device), worker_processes.StepSize(4, 30, 280, 2)
    )
    order = PairOrder(0, len(store), store.views_per_image)

    def make(step):
        return [load(store, part, 30) for part in loader.split_evenly(order.step(step, 4), 2)]

    steps = list(ahead(make, range(2)))
    batches = [batch for step in steps for batch in step]
    assert len(batches) == 4 and len(copies) == locked
    assert all(any(batch is copy for copy in copies) for batch in batches) == bool(locked)
    assert threads == ({"prefetch"} if locked else set())
    assert all(
        equal(one, other) for step, made in enumerate(steps) for one, other in zip(made, make(step))
    )
