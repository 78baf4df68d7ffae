"""Model files: foreign, altered and hostile ones are refused; the shipped weights are found."""

import shutil

import pytest
from made_scenes import write_model

from superglue_sift import Matcher, RequestError
from superglue_sift.network import weights
from superglue_sift.network.weights import save_model_file


def write_changed(path, **about):
    """An untrained model whose description says something else."""
    tensors, info = weights.load_model_file(write_model(path))
    model = {**info["model"], **about.pop("model", {})}
    save_model_file(path, tensors, {**info, "model": model, **about})
    return path


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"layers": 10**7}, r"layers = 10000000: must be a whole number from 1 to 65536"),
        ({"layers": 200}, "its configuration needs"),
        ({"heads": 3}, r"heads = 3: must divide dim \(128\)"),
        ({"dim": 4096}, "its configuration needs"),
        ({"dim": 1e9}, "dim = 1000000000.0"),
        ({"descriptor": {}}, r"descriptor \{\}"),
        ({"hidden": 1}, "hidden"),
    ],
)
def test_a_hostile_model_file_is_refused_before_anything_is_made_of_it(
    tmp_path, monkeypatch, changed, message
):
    path = write_changed(tmp_path / "m.safetensors", model=changed)
    monkeypatch.setattr(weights, "SuperGlue", lambda *_: pytest.fail("made"))
    with pytest.raises(RequestError, match=rf"m.safetensors: not a SuperGlue model.*{message}"):
        Matcher.load(path, "cpu")


@pytest.mark.parametrize("value", ["much", 2.0, float("nan")])
def test_a_hostile_threshold_is_refused(tmp_path, value):
    path = write_changed(tmp_path / "m.safetensors", match_threshold=value)
    with pytest.raises(RequestError, match="match_threshold"):
        Matcher.load(path, "cpu")


def test_without_a_name_the_shipped_weights_are_taken(monkeypatch, tmp_path, photo):
    package = tmp_path / "superglue_sift"
    monkeypatch.setattr(weights, "__file__", str(package / "network" / "weights.py"))
    with pytest.raises(RequestError, match="name a trained model file"):
        Matcher.load()
    for place in (tmp_path, package):  # a clone, a wheel
        write_model(place / weights.SHIPPED)
        assert len(Matcher.load(device="cpu").match(photo, photo).matches) > 30
        shutil.rmtree(place / "pretrained")


def test_an_error_of_torch_does_not_blame_the_file(tmp_path, monkeypatch):
    def without_numpy(array):
        raise RuntimeError("Numpy is not available")

    path = write_model(tmp_path / "m.safetensors")
    monkeypatch.setattr(weights.torch, "from_numpy", without_numpy)
    with pytest.raises(RuntimeError, match="Numpy is not available"):
        weights.load_model(path)
