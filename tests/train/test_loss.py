"""The loss, against values a person can check, and on a GPU."""

import math

import pytest
import torch
from made_pairs import RAGGED, pairs_of, related, scrambled

from pipeline.train.loss import MatchingObjective, assignment_loss
from superglue_sift.network.ground_truth import IGNORED, UNMATCHED, Truth
from superglue_sift.network.superglue import SuperGlueConfig

pytestmark = pytest.mark.cu111


@pytest.mark.gpu
@pytest.mark.parametrize("precision, close", [("float32", 1e-3), ("bfloat16", 2e-2)])
def test_a_gpu_finds_the_loss_and_the_gradient_of_the_cpu(precision, close):
    """Of ragged pairs, empty ones among them."""
    batch = related(pairs_of(*RAGGED))
    model = scrambled(SuperGlueConfig(dim=32, layers=2, neighbours=True, rotary=True)).train()
    answers = []
    for device, asked in (("cpu", "float32"), ("cuda", precision)):
        total, parts = MatchingObjective(model.to(device), asked)(batch.to(device), wait=False)
        gradient = torch.cat(
            [g.flatten().cpu() for g in torch.autograd.grad(total, list(model.parameters()))]
        )
        answers.append((parts["loss"].cpu(), gradient))
    (loss, gradient), (found, own) = answers
    assert torch.allclose(loss, found, rtol=close, atol=close)
    assert (gradient - own).norm() < close * gradient.norm()


def test_known_value():
    log_P = torch.log(torch.tensor([[0.5, 0.1, 0.25], [0.1, 0.2, 0.125], [0.25, 0.5, 1.0]]))
    truth = Truth(torch.tensor([[0, UNMATCHED]]), torch.tensor([[0, UNMATCHED]]))
    loss, _, _ = assignment_loss(log_P[None], truth)
    assert loss.item() == pytest.approx(math.log(2) * (1 + 3 + 1) / 3)
    ignored = Truth(torch.tensor([[0, IGNORED]]), torch.tensor([[0, IGNORED]]))
    assert assignment_loss(log_P[None], ignored)[0].item() == pytest.approx(math.log(2))
