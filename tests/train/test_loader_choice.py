"""Batches of a step: numbers of keypoints, locked pages for a GPU."""

import dataclasses
import threading

import pytest
import torch
from made_views import made_store

from pipeline.distributed import Context
from pipeline.keypoints.store import Store
from pipeline.train import data
from superglue_sift.network.batch import PairBatch

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
