"""What a training step asks of a GPU: launches and waits. Counted without one, on tensors that have
no memory.
"""

import numpy as np
import pytest
import torch
from made_pairs import scrambled
from made_views import made_store

from pipeline.compat import grad_scaler
from pipeline.keypoints.store import Store
from pipeline.train import trainer
from pipeline.train.data import load_batch, training_pairs
from pipeline.train.loss import MatchingObjective
from superglue_sift import torch_compat
from superglue_sift.network import sinkhorn
from superglue_sift.network.superglue import SuperGlueConfig

META = torch.device("meta")


@pytest.fixture
def launches():
    if not torch_compat.can_compile():
        pytest.skip("torch 1.10 has no dispatch modes")
    import launches

    return launches


@pytest.mark.parametrize("least", [1024, 128])
def test_a_step_takes_few_launches_and_reads_nothing_back(launches, least):
    """64 pairs of 1,024 keypoints, and of 1,024 to 128 as `train.min_keypoints` draws them."""
    counts = np.geomspace(1024, least, 64).round().astype(int).tolist()
    found = launches.launches_of_a_step(counts)
    # four square roots are two launches each here, where a GPU has one
    assert sum(found.values()) <= 1504, found


def test_a_read_from_the_device_is_an_error(launches):
    """Or the counts above would not show that a step reads nothing back."""
    with launches.Launches(), pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device=META).sum().item()


def test_a_device_is_asked_again_when_float32_cannot_hold_a_pair(tmp_path, monkeypatch):
    """Without waiting the gradient is nan; the second attempt waits, and does that pair alone in
    the log domain.
    """
    batch = load_batch(Store(made_store(tmp_path)), training_pairs(0, 5, 3, 0, 3), 33)
    gradients = []
    seen = []
    steps = []
    log_domain = sinkhorn._log_domain
    monkeypatch.setattr(
        sinkhorn, "_log_domain", lambda *problem: seen.append(1) or log_domain(*problem)
    )
    for attempts in ((True,), (False, True)):
        model = scrambled(SuperGlueConfig(dim=32, layers=1, norm="batch")).train()
        with torch.no_grad():  # the scores of one pair lead by more than float32 holds
            model.final_projection.weight.mul_(6)
        objective = MatchingObjective(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        monkeypatch.setattr(trainer, "_attempts", lambda device, attempts=attempts: attempts)
        steps.append(trainer.train_step(objective, optimizer, grad_scaler(False), [batch], 3, 1))
        gradients.append(
            torch.cat([p.detach().flatten() for p in (*model.parameters(), *model.buffers())])
        )
    assert seen and all(not bad for _, _, bad in steps) and steps[0][0] == steps[1][0]
    assert torch.equal(*gradients)  # the running statistics moved once
