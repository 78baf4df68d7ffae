"""Each option of a training has its documented effect; each test fails if the option does
nothing.
"""

import shutil

import numpy as np
import pytest
import torch
from faults.cells import Workbench
from made_trainings import leave_records_out
from made_views import make_store
from reading import read_json

from pipeline import distributed
from pipeline.keypoints.store import KeypointStore
from pipeline.train import __main__ as train
from pipeline.train import build as parts
from pipeline.train.data import draw_training_pairs, load_batch
from pipeline.train.loss import MatchingObjective
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.network.weights import load_model_file
from superglue_sift.torch_compat import describe_missing_compiler


@pytest.fixture
def bench(tmp_path, untracked):
    return Workbench(tmp_path)


def train_and_load(bench, **keys):
    """Train; the tensors of the last checkpoint."""
    out = bench.folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    keys = {"val_every": 8, "save_every": 8, **keys}  # writing often takes longest
    assert train.main(bench.training("run", tuple(keys.items()))) == 0
    return load_model_file(sorted(out.glob("*/step-*.safetensors"))[-1])[0]


def join_weights(tensors):
    return np.concatenate(
        [t.numpy().ravel() for n, t in sorted(tensors.items()) if n.startswith("model.")]
    )


@pytest.fixture(scope="module")
def default_weights(tmp_path_factory):
    """The weights of the training that no option has changed."""
    with pytest.MonkeyPatch.context() as patch:
        leave_records_out(patch)
        return join_weights(train_and_load(Workbench(tmp_path_factory.mktemp("default"))))


# What augmentation, optimizers and schedules do is tested where they are computed. Here, keys of
# each kind arrive there.
@pytest.mark.parametrize(
    "keys",
    [
        {"optimizer": "sgd"},
        {"schedule": "wsd", "decay_start": 2},
        {"norm": "batch"},
        {"neighbours": False},
        {"zoom": 0.9},
        {"min_keypoints": 4},
        {"precision": "bfloat16"},
        {"batch_per_rank": 4},
        {"sinkhorn_iterations": 5},
        {"seed": 1},
    ],
    ids=str,
)
def test_a_key_changes_the_weights(bench, default_weights, keys):
    assert not np.array_equal(default_weights, join_weights(train_and_load(bench, **keys)))


def test_the_same_keys_give_the_same_weights(bench, default_weights):
    """Without this the test above would pass for keys that do nothing."""
    assert np.array_equal(default_weights, join_weights(train_and_load(bench)))


@pytest.mark.parametrize("keys", [{"accumulate": 2}, {"checkpoint_layers": True}], ids=str)
def test_ways_of_computing_change_nothing_but_rounding(bench, default_weights, keys):
    changes = np.abs(default_weights - join_weights(train_and_load(bench, **keys)))
    # Adam divides by the size of the gradient: where that is only rounding, so is the step
    assert changes.max() < 2e-3 and np.median(changes) < 1e-6


@pytest.mark.gpu
def test_float16_scales_the_loss(bench):
    train_and_load(bench, precision="float16")
    info = read_json(next((bench.folder / "run").glob("*/step-00000008.json")))
    assert info["scaler"]["scale"] > 1


def build(bench, **keys):
    """What `build.build` returns for the training with these keys."""
    _, sections = train.parse_request(bench.arguments(tuple(keys.items())))
    requested = (sections.train, sections.run, distributed.join_group())
    return parts.build_objective_and_state(parts.make_network(*requested), *requested, "float32")


@pytest.fixture
def batch(tmp_path):
    """A batch of `max_keypoints` of the workbench."""
    store = KeypointStore(make_store(tmp_path / "store"))
    return load_batch(store, draw_training_pairs(0, 5, 3, 0, 6), 24)


def test_mixed_precision_reaches_the_layers_and_spares_the_transport(batch):
    objective = MatchingObjective(SuperGlue(SuperGlueConfig(dim=32, layers=1)), "bfloat16")
    kinds = {}
    layer = objective.model.cross_attention[0]
    layer.mlp.register_forward_hook(lambda _, __, out: kinds.update(layer=out.dtype))
    total, _ = objective(batch)
    assert kinds["layer"] == torch.bfloat16 and total.dtype == torch.float32
    total.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in objective.parameters())


def test_recomputing_layers_stores_less(batch):
    totals = {}
    for recompute in (False, True):
        objective = MatchingObjective(SuperGlue(SuperGlueConfig(dim=32, layers=3, rotary=True)))
        objective.model.recompute = recompute
        sizes = []
        pack = lambda tensor, sizes=sizes: sizes.append(tensor.numel()) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            objective(batch)
        totals[recompute] = sum(sizes)
    assert totals[True] < 0.6 * totals[False]


def test_frozen_weights_stay(bench):
    state = build(bench)[2]
    tensors = train_and_load(bench, freeze=["keypoint_encoder.*", "dustbin"])
    for name, value in state.model.state_dict().items():
        if name.startswith(("keypoint_encoder.", "dustbin", "final_projection.weight")):
            is_equal = torch.equal(tensors[f"model.{name}"], value)
            assert is_equal == (not name.startswith("final_projection")), name


def test_deterministic_turns_deterministic_algorithms_on(bench):
    assert not torch.are_deterministic_algorithms_enabled()
    train_and_load(bench, deterministic=True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_compiled_layers_compute_the_same(bench, batch):
    missing = describe_missing_compiler("cpu")
    if missing:
        pytest.skip(missing)
    losses = {}
    for compiled in (False, True):
        objective = build(bench, compile=compiled)[0]
        losses[compiled] = objective(batch)[0].item()
        assert ("compute_descriptors" in vars(objective.model)) is compiled
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
