"""No model is tested on photographs that it was trained on, unless that is asked for and marked."""

import json

import pytest
import torch
from made_evaluations import PARAMS, read_csv
from made_evaluations import run as run_evaluation
from made_scenes import write_image_set, write_model
from made_trainings import request_maker
from made_views import VIEWS
from reading import read_json

from pipeline import distributed, errors, export, provenance
from pipeline.errors import RequestError
from pipeline.fetch import dataset
from pipeline.fetch.dataset import Entry, ImageSet
from pipeline.keypoints import store
from pipeline.train import __main__ as train
from pipeline.train import checkpoint, trainer
from superglue_sift.network.weights import SHIPPED

COCO = ["000000000139.jpg", "000000000285.jpg", "000000000632.jpg"]


def photograph(name, size=100, crc32="0badcafe", path="/data/photos", source="folder"):
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
def test_a_photograph_of_coco_is_known_by_its_number(name, place):
    assert photograph(name, **place) == photograph(name, 7, "", **place) == "139"


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
def test_any_other_is_known_by_its_bytes(name, place):
    assert photograph(name, **place) == "0badcafe-100"
    assert photograph(name, crc32="", **place) == ""


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


def evaluated(folder):
    """By matcher, the photographs its metrics are of."""
    rows = [(row["matcher"], row["scene"]) for row in read_csv(folder / "out/pairs.csv")]
    return {matcher: {scene for name, scene in rows if name == matcher} for matcher, _ in rows}


def test_what_the_model_was_trained_on_is_left_out(work, capsys):
    provenance.write_photographs(work / "model.safetensors", ["139", "42"])
    assert run(work) == 0
    assert all(scenes == set(COCO[1:]) for scenes in evaluated(work).values())
    line = "1 of 3 photographs left out: the model was trained on them"
    assert line in capsys.readouterr().out and line in (work / "out/index.html").read_text()
    assert "2 held-out images" in (work / "out/protocol.json").read_text()


@pytest.mark.parametrize("seen, left", [(["285"], (0, 2)), (["139", "285", "632"], (0, 1, 2))])
def test_another_model_is_shown_only_on_what_it_never_saw(work, capsys, seen, left):
    other = write_model(work / "other.safetensors", layers=2)
    provenance.write_photographs(other, seen)
    assert run(work, "--also", f"other={other}") == 0
    printed = capsys.readouterr().out
    found = evaluated(work)
    assert found["superglue"] == {COCO[number] for number in left}
    if len(left) == 3:  # it saw all, so it is not shown
        assert "other is left out: it was trained on all 3 photographs" in printed
        assert "other" not in found
    else:
        assert "1 of 3 photographs left out: other was trained on them" in printed
        assert found["other"] == found["superglue"]


def test_a_model_that_saw_all_is_refused_in_one_line(work, capsys):
    provenance.write_photographs(work / "model.safetensors", ["139", "285", "632"])
    assert run(work) == 2
    said = capsys.readouterr().err
    assert (
        "model.safetensors: was trained on all of the 3 held-out photographs" in said
        and "run.allow_training_images: true" in said
        and "Traceback" not in said
    )


def test_photographs_that_are_kept_are_marked(work, capsys):
    provenance.write_photographs(work / "model.safetensors", ["139", "285"])
    (work / "params.yaml").write_text(
        PARAMS.replace("allow_training_images: false", "allow_training_images: true")
    )
    assert run(work) == 0
    assert evaluated(work)["superglue"] == set(COCO)
    marked = "3 held-out images (test), 2 of 3 photographs are from the training of the model"
    assert marked in capsys.readouterr().out and marked in (work / "out/index.html").read_text()


def test_a_model_without_a_list_is_named_and_nothing_left_out(work, capsys):
    # a training from weights without a list
    provenance.write_photographs(work / "model.safetensors", None)
    assert run(work) == 0
    printed = capsys.readouterr().out
    assert "model.safetensors was trained on is not known" in printed and "left out:" not in printed
    assert evaluated(work)["superglue"] == set(COCO)


def test_the_list_of_another_model_is_refused(work, capsys):
    about = {provenance.PHOTOGRAPHS_KEY: provenance.compute_photographs_digest(["139"])}
    write_model(work / "model.safetensors", about)
    assert run(work) == 2
    assert "model.trained_on.txt: is not the list of model.safetensors" in capsys.readouterr().err
    provenance.write_photographs(work / "model.safetensors", ["139"])
    assert provenance.read_photographs(work / "model.safetensors") == {"139"}


@pytest.fixture
def training(tmp_path, make_params, mlflow_store):
    """`training(init_from)`: arguments of a training of a step on photographs 0.., validated on
    100, 101, 102.
    """
    request_of = request_maker(tmp_path, make_params)
    folder = tmp_path / "keypoints"
    for split, first in (("train", 0), ("val", 100)):
        rows = store.read_index(folder / split)["shards"]
        for row in rows:
            row["photographs"] = [str(first + number) for number in range(len(row["images"]))]
        (folder / split / store.INDEX).write_text(json.dumps(store.make_index(rows, VIEWS)))

    def make(init_from, *more, **keys):
        one_step = {"steps": 1, "val_every": 1, "val_pairs": 6, "batch": 2, **keys}
        return [*request_of("run", init_from=str(init_from), **one_step), *more]

    return make


@pytest.fixture
def begun_from(tmp_path):
    """Initial weights."""
    return write_model(tmp_path / "begun.safetensors", dim=16, heads=2)


@pytest.mark.slow
def test_a_training_records_its_photographs_and_those_of_its_initial_weights(
    training, begun_from, tmp_path, capsys
):
    provenance.write_photographs(begun_from, ["7777", "101"])
    assert train.main(training(begun_from)) == 0
    said = capsys.readouterr().out
    assert f"validation: 1 of 3 photographs left out: {begun_from} was trained on them" in said
    own = {str(number) for number in range(5)}
    seen = {*own, "7777", "101"}
    assert provenance.read_photographs(tmp_path / "run/best.safetensors") == seen
    metrics = read_json(tmp_path / "run/best.json")
    assert metrics[provenance.PHOTOGRAPHS_KEY] == provenance.compute_photographs_digest(
        {*own, "7777", "101"}
    )

    words = ["--model", tmp_path / "run/best.safetensors", "--out", tmp_path / "models"]
    assert export.main([*map(str, words)]) == 0
    assert provenance.read_photographs(tmp_path / "models/superglue.safetensors") == {
        *own,
        "7777",
        "101",
    }


def test_validation_alone_leaves_out_what_was_seen(training, begun_from, capsys):
    provenance.write_photographs(begun_from, ["100", "102"])
    said = []
    for allowed in (False, True):
        words = training(begun_from, "--validate-only", allow_training_images=allowed)
        assert train.main(words) == 0
        said.append(capsys.readouterr().out)
    assert f"validation: 2 of 3 photographs left out: {begun_from} was trained on them" in said[0]
    assert f"validation: 2 of 3 photographs are from the training of {begun_from}" in said[1]
    assert said[0].splitlines()[-1] != said[1].splitlines()[-1]
    provenance.write_photographs(begun_from, ["100", "101", "102"])
    with pytest.raises(RequestError, match=r"all of the 3 validation photographs.*run\.allow_tr"):
        train.check_request(training(begun_from), 1)
    assert errors.run(train.main, training(begun_from, "--validate-only")) == 2


def test_allowing_training_images_makes_another_training(training, begun_from):
    """Other validation pairs keep other weights, although the steps are the same."""
    provenance.write_photographs(begun_from, ["100"])
    names = set()
    for allowed in (False, True):
        args, sections = train.parse_request(training(begun_from, allow_training_images=allowed))
        context = distributed.Context(0, 1, torch.device("cpu"))
        data = trainer.open_data(args, sections, context)
        names.add(checkpoint.name_training(trainer.fingerprint_training(sections, data, 1)))
    assert len(names) == 2


def test_the_shipped_weights_name_the_photographs_they_were_trained_on(root, shared_data):
    known = provenance.read_photographs(root / SHIPPED)
    assert known is not None and len(known) == 2999
    for folder in ("train", "extra_gray", "extra_gray_512"):
        names = [path.name for path in (shared_data / "coco" / folder).iterdir()]
        assert {dataset.parse_coco_number(name) for name in names} <= known
    names = [path.name for path in (shared_data / "coco/val").iterdir()]
    assert not known & {dataset.parse_coco_number(name) for name in names}


def test_the_sample_is_not_in_the_training_of_the_shipped_weights(root, tmp_path):
    known = provenance.read_photographs(root / SHIPPED)
    entries = dataset.copy_sample(tmp_path / "images")
    images = ImageSet(entries, {"images": str(tmp_path / "images")}, "sample")
    assert known is not None and not known & {
        images.identify_photograph(entry) for entry in entries
    }
