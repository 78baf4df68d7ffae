"""The stage `keypoints`: bad images, damaged and finished shards, workers and ranks."""

import csv
import errno
import json
import os
import platform
import shutil
import subprocess
import sys

import cv2
import numpy as np
import pytest
from made_params import make_tree
from reading import read_files, read_json

from pipeline import errors
from pipeline.errors import RequestError, WorkError
from pipeline.fetch import __main__ as fetch
from pipeline.fetch import dataset
from pipeline.keypoints import __main__ as keypoints
from pipeline.keypoints import shards, store, views
from pipeline.keypoints.store import KeypointStore
from pipeline.keypoints.views import make_image_views
from superglue_sift.features.images import BadImage, read_gray
from superglue_sift.geometry.two_view import transform

SMALL = {"views_per_image": 3, "width": 128, "height": 96, "max_keypoints": 50}
# The stage in a separate process.
IN_SHARDS_OF_3 = (
    "from pipeline.keypoints import __main__, shards; shards.SHARD_IMAGES = 3; __main__.main()"
)


def make_words(tmp_path, out, *options):
    """Command line of the stage."""
    paths = {"params": "params.yaml", "images": "images", "reports": "reports", "out": out}
    words = [word for name, path in paths.items() for word in (f"--{name}", str(tmp_path / path))]
    return [*words, *options]


@pytest.fixture
def pictures(tmp_path, photo):
    """Nine small readable pictures."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index in range(9):
        cv2.imwrite(
            str(folder / f"{index}.jpg"), np.roll(photo, 37 * index, axis=1)[: 200 + index, :300]
        )
    return folder


@pytest.fixture
def stage(tmp_path, make_params, monkeypatch):
    """`stage(folder, ...)` fetches a folder and makes its keypoints, in shards of 3; gives the
    folder of the stores.
    """
    monkeypatch.setattr(shards, "SHARD_IMAGES", 3)

    def run(folder, out="kp", workers=1, **changes):
        source = {"source": "folder", "path": str(folder), "val_fraction": 0.4}
        tree = {
            "fetch": make_params("fetch", **source).model_dump(),
            "keypoints": make_params("keypoints", **{**SMALL, **changes}).model_dump(),
        }
        params = tmp_path / "params.yaml"
        params.write_text(json.dumps(make_tree(tree)))  # JSON is YAML
        options = ["--params", str(params), "--reports", str(tmp_path / "reports")]
        archives = str(tmp_path / "archives")
        fetch.main([*options, "--out", str(tmp_path / "images"), "--archives", archives])
        keypoints.main(make_words(tmp_path, out, "--workers", str(workers)))
        return tmp_path / out

    return run


def read_bad_images(tmp_path):
    with (tmp_path / "reports/bad_images.csv").open(newline="") as stream:
        rows = list(csv.reader(stream))
    assert rows[0] == ["file", "reason"]
    return dict(rows[1:])


def test_stores_hold_all_views_of_train_and_val(stage, pictures, tmp_path, make_params):
    out = stage(pictures)
    stores = {split: KeypointStore(out / split, verify="all") for split in ("train", "val")}
    metrics = read_json(tmp_path / "reports/metrics.json")
    for split, split_store in stores.items():
        counts = split_store.counts
        assert counts.shape == (len(split_store), 3) and counts.max() <= 50
        assert metrics[split]["images"] == len(split_store)
        assert metrics[split]["views"] == counts.size
    assert metrics["bad_images"] == 0 and read_bad_images(tmp_path) == {}
    store = stores["train"]
    settings = make_params("keypoints", **SMALL)
    gray = read_gray(pictures / store.images[1])
    image_views = make_image_views(gray, store.images[1], settings)
    for index in range(3):
        view = store.read_view(1, index)
        for name in ("keypoints", "scales", "oris", "scores", "descriptors", "image_size"):
            expected = getattr(image_views.features[index], name)
            assert np.array_equal(getattr(view.features, name), expected)
        assert np.array_equal(view.H_image_to_view, image_views.homographies[index])
        assert view.features.image_size == (128, 96)


def test_views_have_random_sizes_between_the_smallest_and_the_full_one(make_params, photo):
    settings = make_params("keypoints", **{**SMALL, "views_per_image": 8, "smallest": 0.5})
    image_views = make_image_views(photo, "coffee.png", settings)
    widths, heights = np.array([features.image_size for features in image_views.features]).T
    assert len(set(widths)) > 4 and widths.min() >= 64 and widths.max() <= 128
    assert np.abs(widths / heights - 4 / 3).max() < 0.05
    reseeded = make_image_views(photo, "coffee.png", settings.model_copy(update={"seed": 1}))
    is_equal = np.isclose(image_views.homographies, reseeded.homographies)
    assert not is_equal.all(axis=(1, 2)).any()
    for features in image_views.features:
        assert len(features.keypoints) > 5
        assert (features.keypoints.max(0) < features.image_size).all()


def test_transparent_pixels_give_no_keypoints_in_any_view(stage, pictures):
    alpha = np.zeros((200, 300), np.uint8)
    for path in sorted(pictures.iterdir())[1:]:
        visible = alpha.copy()
        visible[:, 150:] = 255
        gray = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)[:200]
        path.unlink()
        cv2.imwrite(str(path.with_suffix(".png")), np.dstack([gray] * 3 + [visible]))
    store = KeypointStore(stage(pictures) / "train")
    index = next(i for i, name in enumerate(store.images) if name.endswith(".png"))
    for number in range(3):
        view = store.read_view(index, number)
        keypoints = view.features.keypoints.astype(float)
        assert len(keypoints) > 5
        assert transform(keypoints, np.linalg.inv(view.H_image_to_view))[:, 0].min() > 148


def test_bytes_do_not_depend_on_workers_or_the_order_of_files(stage, pictures, tmp_path):
    expected = read_files(stage(pictures, "one", workers=1))
    assert read_files(stage(pictures, "two", workers=2)) == expected
    reversed_pictures = tmp_path / "reversed/pictures"
    reversed_pictures.mkdir(parents=True)
    for path in sorted(pictures.iterdir(), reverse=True):
        shutil.copyfile(path, reversed_pictures / path.name)
    assert read_files(stage(reversed_pictures, "three")) == expected


def test_only_damaged_and_changed_shards_are_made_again(stage, pictures, photo, monkeypatch):
    out = stage(pictures)
    before = read_files(out)
    written = []
    write = shards.write_shard_and_note
    monkeypatch.setattr(
        shards,
        "write_shard_and_note",
        lambda shard, *rest: written.append(shard.path) or write(shard, *rest),
    )
    assert read_files(stage(pictures)) == before and not written
    damaged = out / "train/shard-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert read_files(stage(pictures)) == before and written == [damaged]
    name = KeypointStore(out / "train").images[0]
    cv2.imwrite(str(pictures / name), photo[100:300, :300])  # no copy of another one
    after = read_files(stage(pictures))
    changed = {path for path in before if before[path] != after[path]}
    assert changed == {"train/shard-00000.safetensors", "train/store.json"}


def test_shards_of_other_parameters_are_deleted(stage, pictures):
    reference = read_files(stage(pictures, "new", difficulty_first=0.5))
    out = stage(pictures, "old")
    (out / "train/shard-00099.safetensors").write_bytes(b"x")
    (out / "train/.shard-00000.safetensors.tmp").write_bytes(b"x")
    stage(pictures, "old", difficulty_first=0.5)
    assert read_files(out) == reference


def make_bad(folder, photo):
    """Write bad files (test_images.py has more kinds), and return their names."""
    data = cv2.imencode(".jpg", photo)[1].tobytes()
    pixel = cv2.imencode(".png", photo[:1, :1])[1].tobytes()
    (folder / "truncated.jpg").write_bytes(data[: len(data) // 2])
    (folder / "page.jpg").write_bytes(b"<html><body>404</body></html>")
    (folder / "pixel.png").write_bytes(pixel)
    (folder / "gone.jpg").symlink_to("nowhere")
    return {"truncated.jpg", "page.jpg", "pixel.png", "gone.jpg"}


def test_other_files_in_the_folder_of_a_store_stay(stage, pictures, tmp_path):
    photograph = tmp_path / "kp/train/a.jpg"
    photograph.parent.mkdir(parents=True)
    photograph.write_bytes(b"")
    stage(pictures)
    assert photograph.exists()


def test_exactly_the_bad_images_are_listed_and_none_is_used(
    stage, pictures, photo, tmp_path, monkeypatch
):
    for level in (0, 100, 200):  # one of them at least is not for testing
        cv2.imwrite(str(pictures / f"flat-{level}.png"), np.full((200, 300), level, np.uint8))
    good = {path.name for path in pictures.iterdir()}
    bad = make_bad(pictures, photo)
    monkeypatch.setattr(keypoints, "MAX_BAD_FRACTION", 0.5)
    out = stage(pictures, workers=2)
    reasons = read_bad_images(tmp_path)
    used = [
        name
        for split in ("train", "val")
        for name in KeypointStore(out / split, verify="all").images
    ]
    test_images = {
        entry.name for entry in dataset.open_manifest(tmp_path / "images").select_entries("test")
    }
    assert set(reasons) == bad - test_images and all(reasons.values())
    assert set(used) == good - test_images
    assert read_json(tmp_path / "reports/metrics.json")["train"]["views_without_keypoints"] > 0


def test_too_many_bad_images_stop_the_stage_and_are_listed(stage, pictures, photo, tmp_path):
    bad = make_bad(pictures, photo)
    with pytest.raises(WorkError, match=r"bad_images\.csv"):
        stage(pictures)
    assert read_bad_images(tmp_path) and set(read_bad_images(tmp_path)) <= bad
    assert not (tmp_path / "kp/train/store.json").exists()


def test_a_bad_image_that_can_be_read_now_is_used(stage, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(keypoints, "MAX_BAD_FRACTION", 0.5)
    whole = read_files(stage(pictures, out="whole"))
    read = dataset.ImageSet.read
    absent = KeypointStore(tmp_path / "whole/train").images[0]

    def refuse(images, entry):
        if entry.name == absent:
            raise BadImage(entry.name, "HEIC needs one more package")
        return read(images, entry)

    with monkeypatch.context() as without:
        without.setattr(dataset.ImageSet, "read", refuse)
        stage(pictures)
    assert set(read_bad_images(tmp_path)) == {absent}
    assert read_files(stage(pictures)) == whole and not read_bad_images(tmp_path)


def test_a_split_without_images_stops_the_stage(stage, pictures, tmp_path, monkeypatch):
    stage(pictures)
    monkeypatch.setattr(keypoints, "MAX_BAD_FRACTION", 1.0)
    for path in pictures.iterdir():  # after fetch, which looks itself whether any image can be used
        path.write_bytes(b"")
    with pytest.raises(WorkError, match="train"):
        keypoints.main(make_words(tmp_path, "other", "--workers", "1"))


def test_a_missing_manifest_is_named(tmp_path, root):
    with pytest.raises(RequestError, match=r"manifest\.csv"):
        keypoints.main(["--params", str(root / "presets/sample.yaml"), "--images", str(tmp_path)])


def test_a_full_disk_is_reported_and_finished_shards_are_kept(
    stage, pictures, tmp_path, monkeypatch, capsys
):
    write = store.write_atomically

    def full(path, data):
        if path.name == "shard-00001.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, data)

    monkeypatch.setattr(store, "write_atomically", full)
    assert errors.run(lambda _: stage(pictures)) == 1
    assert f"{tmp_path}/kp/train/shard-00001" in capsys.readouterr().err
    assert (tmp_path / "kp/train/shard-00000.safetensors").exists()


@pytest.mark.slow
def test_two_ranks_give_the_same_bytes(stage, pictures, tmp_path, root):
    """As torchrun starts them, but for its rendezvous, which the stage does not need."""
    reference = read_files(stage(pictures, "reference"))
    words = make_words(tmp_path, "ranks", "--workers", "1")
    command = [sys.executable, "-c", IN_SHARDS_OF_3, *words]
    ranks = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks.append(subprocess.Popen(command, cwd=root, env=env, stderr=subprocess.DEVNULL))
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    assert read_files(tmp_path / "ranks") == reference


def test_the_partial_file_of_another_rank_is_not_deleted(stage, pictures, tmp_path, monkeypatch):
    """Rank 0 deletes what does not belong here when all ranks are done, not when it starts."""
    partial = tmp_path / "kp/train/.shard-00001.safetensors.tmp"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"a part")
    exists = []
    write = shards.write_shard_and_note
    monkeypatch.setattr(
        shards,
        "write_shard_and_note",
        lambda *args: exists.append(partial.exists()) or write(*args),
    )
    stage(pictures)
    assert exists and all(exists) and not partial.exists()


def test_waiting_for_the_shard_of_a_dead_rank_ends(stage, pictures, tmp_path, monkeypatch):
    """A shard of other parameters does not count as its shard."""
    (tmp_path / "kp/train").mkdir(parents=True)
    (tmp_path / "kp/train/shard-00001.json").write_text('{"fingerprint": "another"}')
    monkeypatch.setattr(keypoints, "SILENCE_SECONDS", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")  # and no rank 1
    with pytest.raises(WorkError, match=r"shard-00001\.safetensors"):
        stage(pictures)


# Of three views of a photograph, by VERSION of `pipeline.keypoints.views`: number of keypoints, and
# the sums of their x, y and descriptors.
GOLDEN = {
    2: [[256, 42291, 32035, 812257], [256, 43088, 29042, 774362], [256, 43370, 34137, 735981]]
}


@pytest.mark.skipif(cv2.__version__ != "4.11.0", reason="another OpenCV finds other keypoints")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the sums are those of x86-64")
def test_keypoints_of_this_version_have_their_known_sums(make_params, photo):
    """Shards are kept by their parameters, photographs and VERSION: without a new one old shards
    would stay.
    """
    settings = make_params("keypoints", views_per_image=3)
    sums_of_views = []
    for features in make_image_views(photo, "coffee.png", settings).features:
        sums = [*features.keypoints.sum(0), features.descriptors[:, 0].sum(dtype=np.int64)]
        sums_of_views.append([len(features.keypoints), *(round(float(value)) for value in sums)])
    assert {views.VERSION: sums_of_views} == GOLDEN, (
        "raise VERSION in pipeline/keypoints/views.py, and replace the sums above"
    )
