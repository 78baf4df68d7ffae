"""Model files: foreign, altered and hostile ones are refused; the shipped weights are found."""

import shutil

import pytest
from made_scenes import write_model

from superglue_sift import Matcher, RequestError
from superglue_sift.network import weights
from superglue_sift.network.weights import save_model_file


def write_changed(path, **changes):
    """An untrained model with a changed description."""
    tensors, info = weights.load_model_file(write_model(path))
    model = {**info["model"], **changes.pop("model", {})}
    save_model_file(path, tensors, {**info, "model": model, **changes})
    return path


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"layers": 10**7}, "layers"),
        ({"dim": 4096}, ""),  # does not fit the tensors
        ({"heads": 3}, "heads"),  # does not divide dim
        ({"descriptor": {}}, "descriptor"),
        ({"hidden": 1}, "hidden"),
    ],
)
def test_a_hostile_model_file_is_refused_before_a_network_is_made(
    tmp_path, monkeypatch, changes, key
):
    path = write_changed(tmp_path / "m.safetensors", model=changes)
    monkeypatch.setattr(weights, "SuperGlue", lambda *_: pytest.fail("made"))
    with pytest.raises(RequestError, match=rf"m\.safetensors.*{key}"):
        Matcher.load(path, "cpu")


@pytest.mark.parametrize("value", ["much", 2.0, float("nan")])
def test_a_hostile_threshold_is_refused(tmp_path, value):
    path = write_changed(tmp_path / "m.safetensors", match_threshold=value)
    with pytest.raises(RequestError, match="match_threshold"):
        Matcher.load(path, "cpu")


def test_without_a_file_the_shipped_weights_are_loaded(monkeypatch, tmp_path, photo):
    package = tmp_path / "superglue_sift"
    monkeypatch.setattr(weights, "__file__", str(package / "network" / "weights.py"))
    with pytest.raises(RequestError):
        Matcher.load()
    for place in (tmp_path, package):  # a clone, a wheel
        write_model(place / weights.SHIPPED)
        assert len(Matcher.load(device="cpu").match(photo, photo).matches) > 30
        shutil.rmtree(place / "pretrained")


def test_an_error_of_torch_is_no_error_of_the_file(tmp_path, monkeypatch):
    def without_numpy(array):
        raise RuntimeError("Numpy is not available")

    path = write_model(tmp_path / "m.safetensors")
    monkeypatch.setattr(weights.torch, "from_numpy", without_numpy)
    with pytest.raises(RuntimeError, match="Numpy is not available"):
        weights.load_model(path)
