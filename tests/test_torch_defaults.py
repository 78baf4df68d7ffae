"""A program that embeds the matcher may have changed torch's default dtype, or default device."""

import ast

import numpy as np
import pytest
import torch
from made_pairs import label_pairs
from made_scenes import TURN
from test_architecture import nodes

from pipeline.train.loss import MatchingObjective, compute_ratio_test_sums
from superglue_sift import Matcher
from superglue_sift.features import sift
from superglue_sift.interop import convert
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

# Functions of torch that make a tensor on the default device, and of these the ones whose dtype is
# the default for some arguments.
ON_DEFAULT_DEVICE = "empty ones arange eye full linspace rand randn randint randperm zeros asarray"
ON_DEFAULT_DEVICE += " tensor scalar_tensor logspace tril_indices triu_indices"
OF_DEFAULT_DTYPE = "empty ones eye full linspace rand randn zeros tensor logspace"


@pytest.fixture(params=["float64", "float16", "meta"])
def change_defaults(request):
    """A function that changes a default of torch until the end of the test."""
    if request.param != "meta":
        yield lambda: torch.set_default_dtype(getattr(torch, request.param))
        torch.set_default_dtype(torch.float32)
        return
    if not hasattr(torch, "set_default_device"):
        pytest.skip("torch 1.10 has no default device")
    # A tensor on the device "meta" has no content, so its use shows.
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)


def match_all(matcher, images):
    """Match two images as a user would: refined, by features of LightGlue, and by the ratio test.

    Returns the arrays of all results.
    """
    features = [matcher.extract(image) for image in images]
    result = matcher.match(*features, refine=False)
    refined = result.refine(*features, "cpu")
    # To LightGlue and back
    views = [convert.from_lightglue(convert.to_lightglue(view)) for view in features]
    output = convert.to_lightglue_matches(result)
    converted = convert.from_lightglue_matches(output, *views)
    arrays = [result.points0, result.points1, result.scores, converted.matches]
    return [*arrays, refined.points0, refined.points1, refined.deviations]


def train_once(photo, turned, config):
    """Compute loss, gradient and metrics of a new network on one pair of known homography."""
    torch.manual_seed(0)
    batch = label_pairs([[sift.extract(image, 200) for image in (photo, turned)]], TURN)
    network = SuperGlue(config)
    objective = MatchingObjective(network)
    total, values = objective(batch)
    total.backward()
    gradients = [parameter.grad.numpy() for parameter in network.parameters()]
    sums = compute_ratio_test_sums(objective, batch)
    return [total.detach().numpy(), *gradients, *values.values(), *sums.values()]


@pytest.mark.parametrize("scene", [False, True])
def test_matches_are_the_same_with_other_defaults(model, photo, turned, change_defaults, scene):
    images = photo, torch.from_numpy(turned)
    settings = {"device": "cpu", "max_keypoints": 300, "scene": scene}
    loaded_before = Matcher.load(model, **settings)
    expected = match_all(loaded_before, images)
    assert len(expected[0]) > 30
    change_defaults()
    for matcher in (loaded_before, Matcher.load(model, **settings)):
        for array, expected_array in zip(match_all(matcher, images), expected):
            assert array.dtype == expected_array.dtype
            np.testing.assert_array_equal(array, expected_array)


@pytest.mark.parametrize(
    "config",
    [
        SuperGlueConfig(dim=32, layers=1),
        SuperGlueConfig(dim=128, layers=1, norm="batch", rotary=True, neighbours=True),
    ],
)
def test_a_training_step_is_the_same_with_other_defaults(photo, turned, change_defaults, config):
    expected = train_once(photo, turned, config)
    change_defaults()
    for array, expected_array in zip(train_once(photo, turned, config), expected):
        np.testing.assert_array_equal(array, expected_array)


def test_every_new_tensor_has_its_dtype_and_device():
    wrong = []
    for name, node in nodes(ast.Call):
        owner, _, function = ast.unparse(node.func).rpartition(".")
        keywords = {word.arg for word in node.keywords}
        needed = {"device"} if function in ON_DEFAULT_DEVICE.split() else set()
        needed |= {"dtype"} if function in OF_DEFAULT_DTYPE.split() else set()
        # `**options` may hold both.
        if owner == "torch" and not name.startswith("benchmarks") and None not in keywords:
            wrong += [f"{name}:{node.lineno} needs {word}" for word in needed - keywords]
    assert wrong == []
