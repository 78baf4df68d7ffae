"""What a training step asks of a GPU, found without one: operations that have no deterministic form
there, and waits of the host.
"""

import re
from unittest import mock

import numpy as np
import pytest
import torch
from made_pairs import label_pairs, make_pairs, make_scrambled
from made_params import make_tree, read_sample
from made_views import make_store
from processes import in_group

from pipeline import distributed, params
from pipeline.keypoints.store import KeypointStore
from pipeline.train import step as step_module
from pipeline.train.build import build_objective_and_state, make_network
from pipeline.train.data import PairBatch, draw_training_pairs, load_batch, split_evenly
from pipeline.train.loss import MatchingObjective
from pipeline.train.optimizer import choose_precision, detect_abilities, make_optimizer
from pipeline.train.step import compute_clipped_gradient, train_step
from superglue_sift import torch_compat
from superglue_sift.network import sinkhorn
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.torch_compat import make_grad_scaler

META = torch.device("meta")

# Operations that torch.use_deterministic_algorithms names in its documentation of torch 1.10 to
# 2.13, by their names in a profile. None of these has a deterministic form on CUDA in every version
# (`index_put_impl_` with accumulate, `index_add_` and the one-dimensional `scatter_add_` have).
RAISING = """
avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
max_pool3d_with_indices_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward
fractional_max_pool2d_backward fractional_max_pool3d_backward max_unpool2d max_unpool3d
upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
upsample_trilinear3d_backward reflection_pad1d_backward reflection_pad2d_backward
reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward
replication_pad3d_backward nll_loss_forward nll_loss2d_forward _ctc_loss_backward
_embedding_bag_backward put_ histc bincount kthvalue median nanmedian grid_sampler_2d_backward
grid_sampler_3d_backward cumsum cumsum_ cumprod scatter_reduce scatter_reduce_
"""
ONE_DIMENSION = ("scatter_add", "scatter_add_")  # before torch 1.13 only these are deterministic
# Shapes and decisions that depend on values, for which the host waits for a GPU
WAITING = {"nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}

WAYS = [
    {},
    {"checkpoint_layers": True},
    {"accumulate": 2},
    {"accumulate": 2, "checkpoint_layers": True},
    {"norm": "batch"},
    {"norm": "batch", "accumulate": 2},
    {"optimizer": "adam"},
    {"optimizer": "sgd"},
    {"deterministic": True},
    {"precision": "bfloat16", "checkpoint_layers": True},
    {"freeze": ["keypoint_encoder.*"], "rotary": True, "neighbours": False},
]


@pytest.fixture
def path_of_a_gpu(monkeypatch):
    """Take a GPU's way through the code, on a CPU."""
    monkeypatch.setattr(PairBatch, "split_by_size", lambda self: ([*range(len(self))], [self]))
    monkeypatch.setattr(sinkhorn, "_split_pairs", lambda Z: [slice(None)])
    monkeypatch.setattr(step_module, "_list_attempts", lambda device: (False, True))


def sections_of(keys):
    """The sections `train` and `run` of a small training with these keys of either."""
    small = {"dim": 16, "heads": 2, "layers": 2, "precision": "float32", "batch": 6}
    sections = params.parse(
        make_tree({"train": {**read_sample()["train"], **small, **keys}}), "params"
    )
    return sections.train, sections.run


def take_two_steps(context, folder, keys, profile=None):
    """All weights after two steps in this way; `profile` records the second."""
    train, run = sections_of(keys)
    store = KeypointStore(folder)
    precision, _ = choose_precision(train.precision, [detect_abilities(context.device)])
    network = make_network(train, run, context, store)
    _, model, state = build_objective_and_state(network, train, run, context, precision)
    share = train.batch // context.world_size
    for step in range(2):
        begin = step * train.batch + context.rank * share
        pairs = draw_training_pairs(0, len(store), store.views_per_image, begin, begin + share)
        batches = [load_batch(store, part, 40) for part in split_evenly(pairs, run.accumulate)]
        work = (model, state.optimizer, state.scaler, batches, train.batch, context.world_size)
        if profile is None or step == 0:
            train_step(*work)
        else:
            with profile:
                train_step(*work)
    torch.use_deterministic_algorithms(False)
    return torch.cat([p.detach().flatten() for p in state.model.parameters()]).numpy()


@pytest.mark.cu111
@pytest.mark.parametrize("keys", WAYS, ids=str)
def test_a_step_is_deterministic_on_cuda_and_the_host_waits_once(tmp_path, path_of_a_gpu, keys):
    profile = torch.autograd.profiler.profile(record_shapes=True)
    context = distributed.Context(0, 1, torch.device("cpu"))
    take_two_steps(context, make_store(tmp_path), keys, profile)
    calls = [(event.name[len("aten::") :], event.input_shapes) for event in profile.function_events]
    names = {name for name, _ in calls}
    assert {"gather", "exp_", "bmm"} <= names  # the profile has recorded the step
    assert not names & set(re.findall(r"\w+", RAISING))
    assert all(len(shapes[0]) == 1 for name, shapes in calls if name in ONE_DIMENSION)
    # one value of a tensor fills in `scatter`, so the order of writes does not matter
    assert all(len(shapes) == 4 and not shapes[3] for name, shapes in calls if name == "scatter")
    # the one wait is the `tolist` of norm and sums
    assert not names & WAITING


def train_in_every_way(context, folder):
    return [take_two_steps(context, folder, keys) for keys in WAYS]


@pytest.mark.cu111
@pytest.mark.slow
def test_two_ranks_train_in_every_way(tmp_path):
    """Also where torch 1.10 recomputes layers under DistributedDataParallel."""
    folder = str(make_store(tmp_path))
    single = train_in_every_way(distributed.Context(0, 1, torch.device("cpu")), folder)
    rank0, rank1 = in_group(2, train_in_every_way, folder)
    for keys, weights, weights0, weights1 in zip(WAYS, single, rank0, rank1):
        assert np.array_equal(weights0, weights1), keys
        # a step of Muon or Adam moves by 0.005
        assert np.abs(weights0 - weights).max() < 0.05, keys


def step_on_meta(make_optimizer_of, scaler):
    """Network, truth, loss, gradient, clipping and optimizer on `meta`: tensors of this device have
    shapes and no memory, so a read from it is an error. It takes a GPU's path through the code.
    """
    counts = [64, 48, 16]
    batch = label_pairs(make_pairs(*zip(counts, counts), orientations=2)).to(META)
    assert batch.images0.mask.device == META and batch.images1.descriptors.device == META
    model = SuperGlue(SuperGlueConfig(neighbours=True)).to(META).train()
    optimizer = make_optimizer_of(model)
    work = (MatchingObjective(model), optimizer, scaler, [batch], 1.0, False)
    # clipping works on lists of tensors on a GPU, on `meta` one by one
    lists = mock.patch("torch.nn.utils.clip_grad._has_foreach_support", return_value=True)
    with lists:
        _, totals, _ = compute_clipped_gradient(*work)
    optimizer.step()
    scaler.update()
    return totals


@pytest.mark.skipif(not torch_compat.can_compile(), reason="torch 1.10 has no kernels for meta")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("optimizer", ["muon", "adam", "sgd"])
def test_a_step_reads_nothing_back(make_params, monkeypatch, optimizer, scaled):
    """float16's scaler, too, knows from the norm of the gradient whether the step is applied."""
    train = make_params("train", optimizer=optimizer)
    monkeypatch.setattr(
        torch_compat, "get_fused_adam_options", dict
    )  # the fused kernel does not know `meta`
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    totals = step_on_meta(lambda model: make_optimizer(train, model), scaler)
    with pytest.raises((RuntimeError, NotImplementedError)):  # as any read before would have been
        totals.tolist()


def test_a_step_is_repeated_when_float32_cannot_hold_a_pair(tmp_path, monkeypatch):
    """Without waiting the gradient is nan. The second attempt waits, and does that pair alone in
    the log domain.
    """
    batch = load_batch(KeypointStore(make_store(tmp_path)), draw_training_pairs(0, 5, 3, 0, 3), 33)
    gradients = []
    problems = []
    steps = []
    log_domain = sinkhorn._solve_in_log_domain
    monkeypatch.setattr(
        sinkhorn, "_solve_in_log_domain", lambda *args: problems.append(args) or log_domain(*args)
    )
    for attempts in ((True,), (False, True)):
        model = make_scrambled(SuperGlueConfig(dim=32, layers=1, norm="batch")).train()
        with torch.no_grad():  # the scores of one pair lead by more than float32 holds
            model.final_projection.weight.mul_(6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        monkeypatch.setattr(
            step_module, "_list_attempts", lambda device, attempts=attempts: attempts
        )
        work = (MatchingObjective(model), optimizer, make_grad_scaler(False), [batch], 3, 1)
        steps.append(train_step(*work))
        gradients.append(
            torch.cat([p.detach().flatten() for p in (*model.parameters(), *model.buffers())])
        )
    assert problems and steps[0][0] == steps[1][0]
    assert all(np.isfinite(norm) for _, norm, _ in steps)
    assert torch.equal(*gradients)  # the running statistics moved once
