"""Each option of a training has its documented effect; each test fails if the option does
nothing.
"""

import shutil

import numpy as np
import pytest
import torch
from faults.cells import Workbench
from made_trainings import leave_mlflow_out
from made_views import made_store
from reading import read_json

from pipeline import distributed
from pipeline.errors import RequestError
from pipeline.keypoints.store import Store
from pipeline.train import __main__ as train
from pipeline.train import trainer
from pipeline.train.data import load_batch, training_pairs
from pipeline.train.loss import MatchingObjective
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.network.weights import load_model_file
from superglue_sift.torch_compat import can_compile


@pytest.fixture
def bench(tmp_path, untracked):
    return Workbench(tmp_path)


def run(bench, name="run", **keys):
    """Train; the tensors of the last checkpoint."""
    out = bench.folder / name
    shutil.rmtree(out, ignore_errors=True)
    assert train.main(bench.training(name, tuple(keys.items()))) == 0
    return load_model_file(sorted(out.glob("*/step-*.safetensors"))[-1])[0]


def weights(tensors):
    return np.concatenate(
        [t.numpy().ravel() for n, t in sorted(tensors.items()) if n.startswith("model.")]
    )


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """The weights of the training that no option has changed."""
    with pytest.MonkeyPatch.context() as patch:
        leave_mlflow_out(patch)
        return weights(run(Workbench(tmp_path_factory.mktemp("usual"))))


def one_batch(folder, keypoints=40):
    store = Store(made_store(folder))
    return load_batch(store, training_pairs(0, 5, 3, 0, 6), keypoints)


@pytest.mark.parametrize(
    "keys",
    [
        {"optimizer": "sgd"},
        {"schedule": "constant_decay", "decay_start": 1},
        {"warmup_steps": 0},
        {"lr": 0.001},
        {"norm": "batch"},
        {"optimizer": "adam"},
        {"schedule": "wsd", "decay_start": 1},
        {"neighbours": False},
        {"rotation_deg": 90.0},
        {"negatives": 0.9},
        {"zoom": 0.9},
        {"min_keypoints": 4},
        {"keypoint_drop": 0.0},
        {"max_keypoints": 12},
        {"precision": "bfloat16"},
        {"batch_per_rank": 4},
        {"sinkhorn_iterations": 5},
        {"seed": 1},
        {"zoom": 0.9, "zoom_far": 1.0},
    ],
    ids=str,
)
def test_every_key_changes_the_weights(bench, usual, keys):
    assert not np.array_equal(usual, weights(run(bench, **keys)))


def test_the_same_keys_give_the_same_weights(bench, usual):
    """Without this the test above would pass for keys that do nothing."""
    assert np.array_equal(usual, weights(run(bench)))


@pytest.mark.parametrize("keys", [{"accumulate": 2}, {"checkpoint_layers": True}], ids=str)
def test_ways_of_computing_change_nothing_but_rounding(bench, usual, keys):
    changed = weights(run(bench, **keys))
    # Adam divides by the size of the gradient: where that is only rounding, so is the step
    assert np.abs(usual - changed).max() < 2e-3 and np.median(np.abs(usual - changed)) < 1e-6


@pytest.mark.gpu
def test_float16_scales_the_loss(bench):
    run(bench, precision="float16")
    info = read_json(next((bench.folder / "run").glob("*/step-00000008.json")))
    assert info["scaler"]["scale"] > 1


def build(bench, **keys):
    """What `trainer.build` returns for the training with these keys."""
    _, sections = train.parse(bench.arguments(tuple(keys.items())))
    return trainer.build(sections.train, sections.run, distributed.start(), "float32")


def test_mixed_precision_reaches_the_layers_and_spares_the_transport(tmp_path):
    batch = one_batch(tmp_path)
    objective = MatchingObjective(SuperGlue(SuperGlueConfig(dim=32, layers=1)), "bfloat16")
    kinds = {}
    layer = objective.model.cross_attention[0]
    layer.mlp.register_forward_hook(lambda _, __, out: kinds.update(layer=out.dtype))
    total, _ = objective(batch)
    assert kinds["layer"] == torch.bfloat16 and total.dtype == torch.float32
    total.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in objective.parameters())


def test_recomputing_layers_keeps_less(tmp_path):
    batch = one_batch(tmp_path)
    kept = {}
    gradients = {}
    for recompute in (False, True):
        torch.manual_seed(0)
        objective = MatchingObjective(SuperGlue(SuperGlueConfig(dim=32, layers=3, rotary=True)))
        objective.model.recompute = recompute
        kept[recompute] = 0

        def keep(tensor, recompute=recompute):
            kept[recompute] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            total, _ = objective(batch)
        total.sum().backward()
        gradients[recompute] = torch.cat([p.grad.flatten() for p in objective.parameters()])
    assert kept[True] < 0.6 * kept[False]
    assert torch.allclose(gradients[True], gradients[False], atol=1e-5)


def test_frozen_weights_stay(bench):
    state = build(bench)[2]
    tensors = run(bench, freeze=["keypoint_encoder.*", "dustbin"])
    for name, value in state.model.state_dict().items():
        if name.startswith(("keypoint_encoder.", "dustbin", "final_projection.weight")):
            same = torch.equal(tensors[f"model.{name}"], value)
            assert same == (not name.startswith("final_projection")), name
    with pytest.raises(RequestError, match="fits no parameter"):
        run(bench, freeze=["encoder*nothing"])


def test_deterministic_kernels(bench):
    assert not torch.are_deterministic_algorithms_enabled()
    run(bench, deterministic=True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_compiled_layers_compute_the_same(bench, tmp_path):
    if not can_compile() or not shutil.which("g++"):
        pytest.skip("needs torch 2 and a C++ compiler")
    batch = one_batch(tmp_path / "store", 24)  # `max_keypoints` of the workbench
    losses = {}
    for compiled in (False, True):
        objective = build(bench, compile=compiled)[0]
        losses[compiled] = objective(batch)[0].item()
        assert ("describe" in vars(objective.model)) is compiled
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"checkpoint_layers": True, "norm": "batch"}, r"run\.checkpoint_layers = true: needs"),
        ({"compile": True, "precision": "portable"}, r"run\.compile = true: compiles for this"),
    ],
)
def test_options_that_exclude_each_other(bench, keys, message):
    with pytest.raises(RequestError, match=message):
        run(bench, **keys)
