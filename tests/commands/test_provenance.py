"""No model is tested on photographs that it was trained on, unless that is asked for and marked."""

import json

import pytest
import torch
from made_evaluations import PARAMS, read_csv
from made_evaluations import run as run_evaluation
from made_scenes import write_image_set, write_model
from made_trainings import make_request_function
from made_views import VIEWS
from reading import read_error, read_json

from pipeline import distributed, errors, export, provenance
from pipeline.errors import RequestError
from pipeline.fetch import dataset
from pipeline.fetch.dataset import Entry, ImageSet
from pipeline.keypoints import store
from pipeline.train import __main__ as train
from pipeline.train import checkpoint
from pipeline.train import train as story
from superglue_sift.network.weights import SHIPPED

COCO = ["000000000139.jpg", "000000000285.jpg", "000000000632.jpg"]


def identify(name, size=100, crc32="0badcafe", path="/data/photos", source="folder"):
    """The identifier of a photograph of this name in a folder or zip."""
    entry = Entry(name, "test", "images", name, size, crc32)
    return ImageSet([entry], {"images": path}, source).identify_photograph(entry)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("000000000139.jpg", {"source": "coco2017-val"}),
        ("000000000139.jpg", {"path": "data/images/../../coco/val2017"}),
        ("000000000139.jpg", {"path": "/data/unlabeled2017.zip"}),
        ("val2017/000000000139.jpg", {}),
        ("coco/train2014/000000000139.png", {}),
        ("COCO_val2014_000000000139.jpg", {}),
        ("x/COCO_train2014_000000000139.jpg", {}),
    ],
)
def test_the_identifier_of_a_photograph_of_coco_is_its_number(name, place):
    assert identify(name, **place) == identify(name, 7, "", **place) == "139"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(
            (name, {"source": "coco2017"})
            for name in (
                "IMG_0001.jpg",
                "139.jpg",
                "a000000000139.jpg",
                "000000000139",
                "0000000000139.jpg",
                "202401011200.jpg",
            )
        ),
        # Frames of a video
        ("000000000139.jpg", {}),
        ("video/000000000139.jpg", {"path": "/data/val2017"}),
        ("000000000139.jpg", {"path": "/data/val2017/frames"}),
        ("000000000139.jpg", {"source": ""}),
    ],
)
def test_the_identifier_of_any_other_photograph_is_of_its_bytes(name, place):
    assert identify(name, **place) == "0badcafe-100"
    assert identify(name, crc32="", **place) == ""


@pytest.fixture
def work(tmp_path, photo):
    """Three held-out photographs of COCO's names, and a model that was trained on another
    one.
    """
    (tmp_path / "params.yaml").write_text(PARAMS)
    provenance.write_photographs(write_model(tmp_path / "model.safetensors"), ["42"])
    pieces = (photo[:300, :400], photo[100:, 150:], photo[50:350, :450])
    write_image_set(tmp_path / "images", dict(zip(COCO, pieces)), "test")
    about = tmp_path / "images/source.json"
    about.write_text(json.dumps({**read_json(about), "source": "coco2017-val"}))
    return tmp_path


def run(folder, *extra):
    """An evaluation without alignment, which has no part in what is left out and takes half of the
    time.
    """
    return run_evaluation(folder, "--no-refine", *extra)


def read_scenes(folder):
    """The photographs of the metrics of each matcher."""
    rows = [(row["matcher"], row["scene"]) for row in read_csv(folder / "out/pairs.csv")]
    return {matcher: {scene for name, scene in rows if name == matcher} for matcher, _ in rows}


def test_photographs_of_the_training_are_left_out_and_counted(work, capsys):
    provenance.write_photographs(work / "model.safetensors", ["139", "42"])
    assert run(work) == 0
    assert all(scenes == set(COCO[1:]) for scenes in read_scenes(work).values())
    line = "1 of 3 photographs left out"
    assert line in capsys.readouterr().out and line in (work / "out/index.html").read_text()
    assert "2 held-out images" in (work / "out/protocol.json").read_text()


@pytest.mark.parametrize(
    "photographs, evaluated", [(["285"], (0, 2)), (["139", "285", "632"], (0, 1, 2))]
)
def test_photographs_of_the_training_of_another_model_are_left_out(
    work, capsys, photographs, evaluated
):
    """A model that was trained on all of them is left out itself."""
    other = write_model(work / "other.safetensors", layers=2)
    provenance.write_photographs(other, photographs)
    assert run(work, "--also", f"other={other}") == 0
    printed = capsys.readouterr().out
    scenes = read_scenes(work)
    assert scenes["superglue"] == {COCO[number] for number in evaluated}
    if len(evaluated) == 3:
        assert "other is left out" in printed and "other" not in scenes
    else:
        assert "1 of 3 photographs left out: other" in printed
        assert scenes["other"] == scenes["superglue"]


def test_a_model_that_was_trained_on_all_photographs_is_refused(work, capsys):
    provenance.write_photographs(work / "model.safetensors", ["139", "285", "632"])
    assert run(work) == 2
    line = read_error(capsys)
    assert "model.safetensors" in line and "run.allow_training_images" in line


def test_photographs_of_the_training_that_are_allowed_are_marked(work, capsys):
    provenance.write_photographs(work / "model.safetensors", ["139", "285"])
    (work / "params.yaml").write_text(
        PARAMS.replace("allow_training_images: false", "allow_training_images: true")
    )
    assert run(work) == 0
    assert read_scenes(work)["superglue"] == set(COCO)
    mark = "2 of 3 photographs are from the training"
    assert mark in capsys.readouterr().out and mark in (work / "out/index.html").read_text()


def test_a_model_without_a_list_of_photographs_is_named(work, capsys):
    # a training from weights without a list
    provenance.write_photographs(work / "model.safetensors", None)
    assert run(work) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert read_scenes(work)["superglue"] == set(COCO)


def test_the_list_of_another_model_is_refused(work, capsys):
    about = {provenance.PHOTOGRAPHS_KEY: provenance.compute_photographs_digest(["139"])}
    write_model(work / "model.safetensors", about)
    assert run(work) == 2
    assert "model.trained_on.txt" in read_error(capsys)
    provenance.write_photographs(work / "model.safetensors", ["139"])
    assert provenance.read_photographs(work / "model.safetensors") == {"139"}


@pytest.fixture
def training(tmp_path, make_params, mlflow_store):
    """`training(init_from)`: arguments of a training of a step on photographs 0.., validated on
    100, 101, 102.
    """
    make_request = make_request_function(tmp_path, make_params)
    folder = tmp_path / "keypoints"
    for split, first in (("train", 0), ("val", 100)):
        rows = store.read_index(folder / split)["shards"]
        for row in rows:
            row["photographs"] = [str(first + number) for number in range(len(row["images"]))]
        (folder / split / store.INDEX).write_text(json.dumps(store.make_index(rows, VIEWS)))

    def make(init_from, *options, **keys):
        one_step = {"steps": 1, "val_every": 1, "val_pairs": 6, "batch": 2, **keys}
        return [*make_request("run", init_from=str(init_from), **one_step), *options]

    return make


@pytest.fixture
def initial_model(tmp_path):
    """The file of initial weights."""
    return write_model(tmp_path / "initial.safetensors", dim=16, heads=2)


@pytest.mark.slow
def test_a_training_records_its_photographs_and_those_of_its_initial_weights(
    training, initial_model, tmp_path, capsys
):
    provenance.write_photographs(initial_model, ["7777", "101"])
    assert train.main(training(initial_model)) == 0
    assert f"1 of 3 photographs left out: {initial_model}" in capsys.readouterr().out
    photographs = {*map(str, range(5)), "7777", "101"}
    assert provenance.read_photographs(tmp_path / "run/best.safetensors") == photographs
    digest = read_json(tmp_path / "run/best.json")[provenance.PHOTOGRAPHS_KEY]
    assert digest == provenance.compute_photographs_digest(photographs)
    words = ["--model", tmp_path / "run/best.safetensors", "--out", tmp_path / "models"]
    assert export.main([*map(str, words)]) == 0
    exported = tmp_path / "models/superglue.safetensors"
    assert provenance.read_photographs(exported) == photographs


def test_validation_leaves_out_photographs_of_the_training(training, initial_model, capsys):
    provenance.write_photographs(initial_model, ["100", "102"])
    outputs = []
    for allowed in (False, True):
        words = training(initial_model, "--validate-only", allow_training_images=allowed)
        assert train.main(words) == 0
        outputs.append(capsys.readouterr().out)
    assert f"2 of 3 photographs left out: {initial_model}" in outputs[0]
    assert "2 of 3 photographs are from the training" in outputs[1]
    assert outputs[0].splitlines()[-1] != outputs[1].splitlines()[-1]
    provenance.write_photographs(initial_model, ["100", "101", "102"])
    with pytest.raises(RequestError, match=r"run\.allow_training_images"):
        train.check_request(training(initial_model), 1)
    assert errors.run(train.main, training(initial_model, "--validate-only")) == 2


def test_allowing_training_images_makes_another_training(training, initial_model):
    """Other validation pairs keep other weights, although the steps are the same."""
    provenance.write_photographs(initial_model, ["100"])
    names = set()
    for allowed in (False, True):
        args, sections = train.parse_request(training(initial_model, allow_training_images=allowed))
        context = distributed.Context(0, 1, torch.device("cpu"))
        data = story.open_data(sections, args.keypoints, args.verify, context)
        digests = data.store.digest, data.validation.digest
        names.add(checkpoint.name_training(checkpoint.make_fingerprint(sections, *digests, 1)))
    assert len(names) == 2


def test_the_shipped_weights_name_the_photographs_they_were_trained_on(root, shared_data):
    photographs = provenance.read_photographs(root / SHIPPED)
    assert photographs is not None and len(photographs) == 2999
    for folder in ("train", "extra_gray", "extra_gray_512"):
        names = [path.name for path in (shared_data / "coco" / folder).iterdir()]
        assert {dataset.parse_coco_number(name) for name in names} <= photographs
    names = [path.name for path in (shared_data / "coco/val").iterdir()]
    assert not photographs & {dataset.parse_coco_number(name) for name in names}


def test_the_sample_is_not_in_the_training_of_the_shipped_weights(root, tmp_path):
    photographs = provenance.read_photographs(root / SHIPPED)
    entries = dataset.copy_sample(tmp_path / "images")
    images = ImageSet(entries, {"images": str(tmp_path / "images")}, "sample")
    assert photographs
    assert photographs.isdisjoint(images.identify_photograph(entry) for entry in entries)
