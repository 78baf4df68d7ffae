"""The keypoint store: it is read as it was written, and damage is detected."""

import errno
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reading import read_json

from pipeline.errors import RequestError
from pipeline.keypoints import store
from pipeline.keypoints.store import ImageViews, KeypointStore
from superglue_sift.features.extractors import Extractor
from superglue_sift.features.features import Features

pytestmark = pytest.mark.cu111


def make_features(count, rng):
    """Keypoints of any bytes, in a view of any size."""
    floats = rng.uniform(0, 640, (6, count)).astype(np.float32)
    descriptors = rng.integers(0, 256, (count, 2, 128)).astype(np.uint8)
    size = tuple(rng.integers(64, 640, 2).tolist())
    return Features(floats[:2].T, floats[2], floats[3:5].T, floats[5], descriptors, size)


def make_images(counts):
    """One ImageViews per row of counts."""
    rng = np.random.default_rng(0)
    return [
        ImageViews(
            f"image {i}.jpg",
            (640 + i, 480),
            rng.normal(size=(len(row), 3, 3)),
            [make_features(n, rng) for n in row],
        )
        for i, row in enumerate(counts)
    ]


def write(folder, images, per_shard=2, views=2):
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [images[start : start + per_shard] for start in range(0, len(images), per_shard)]
    rows = [
        {
            **store.write_shard(folder / store.name_shard(i), piece),
            "photographs": [f"photograph of {image.name}" for image in piece],
        }
        for i, piece in enumerate(pieces)
    ]
    (folder / store.INDEX).write_text(json.dumps(store.make_index(rows, views)))
    return folder


def assert_equal(features, expected):
    for name in ("keypoints", "scales", "oris", "scores", "descriptors", "image_size"):
        assert np.array_equal(getattr(features, name), getattr(expected, name)), name


def test_records_without_a_second_orientation():
    """Descriptors of floats have records of another length."""
    rng = np.random.default_rng(0)
    features = make_features(7, rng)
    descriptors = rng.normal(size=(7, 1, 12)).astype(np.float32)
    features = features._replace(oris=features.oris[:, :1], descriptors=descriptors)
    packed = store.pack_records(features)
    assert packed.shape == (7, 4 * (5 + 12))
    assert_equal(store.unpack_records(packed, False, features.image_size), features)


COUNTS = [[5, 0], [1, 2], [0, 0], [300, 7], [2, 2]]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3), min_size=1, max_size=9),
    st.integers(1, 4),
)
def test_a_store_is_read_as_it_was_written(tmp_path_factory, counts, per_shard):
    images = make_images(counts)
    folder = write(tmp_path_factory.mktemp("store"), images, per_shard, views=3)
    keypoint_store = KeypointStore(folder, verify="all")
    assert keypoint_store.images == [image.name for image in images]
    assert keypoint_store.photographs == [f"photograph of {image.name}" for image in images]
    assert len(keypoint_store) == len(images) and keypoint_store.views_per_image == 3
    assert keypoint_store.counts.tolist() == counts
    for i, image in enumerate(images):
        for v in range(3):
            view = keypoint_store.read_view(i, v)
            assert_equal(view.features, image.features[v])
            assert np.array_equal(view.H_image_to_view, image.homographies[v])
            some = keypoint_store.read_view(i, v, np.arange(1, counts[i][v], 2))
            assert_equal(some.features, image.features[v].select(slice(1, None, 2)))


def test_a_store_names_its_extractor(tmp_path):
    extractor = Extractor("mine:f", "float", 256, False, lambda *_: None)
    rows = [{**store.write_shard(tmp_path / store.name_shard(0), []), "photographs": []}]
    (tmp_path / store.INDEX).write_text(json.dumps(store.make_index(rows, 1, extractor)))
    keypoint_store = KeypointStore(tmp_path)
    assert (keypoint_store.extractor, keypoint_store.scale_angle) == (extractor.name, False)
    assert (keypoint_store.descriptor, keypoint_store.descriptor_dim) == ("float", 256)


def test_verifying_all_shards_detects_any_damage(tmp_path):
    folder = write(tmp_path, make_images(COUNTS))
    rng = np.random.default_rng(0)
    for path in sorted(folder.glob("shard-*")):
        whole = path.read_bytes()
        for _ in range(40):
            damaged = bytearray(whole)
            damaged[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
            path.write_bytes(damaged)
            with pytest.raises(RequestError, match=path.name):
                KeypointStore(folder, verify="all")
            path.write_bytes(whole[: rng.integers(len(whole))])
            for verify in ("none", "sample", "all"):
                with pytest.raises(RequestError, match=path.name):
                    KeypointStore(folder, verify=verify)
        path.unlink()
        with pytest.raises(RequestError, match=path.name):
            KeypointStore(folder)
        path.write_bytes(whole)
    KeypointStore(folder, verify="all")


def test_shards_are_hashed_by_default_and_not_with_verify_none(tmp_path, monkeypatch):
    folder = write(tmp_path, make_images([[1, 1]] * 40), per_shard=1)
    monkeypatch.setattr(store, "compute_file_sha256", lambda path: "wrong")
    with pytest.raises(RequestError, match="shard"):
        KeypointStore(folder)
    KeypointStore(folder, verify="none")


def test_a_disk_without_memory_maps_is_read(tmp_path, monkeypatch):
    folder = write(tmp_path, make_images(COUNTS))
    mapped = KeypointStore(folder)

    def refuse(*_, **__):
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(np, "memmap", refuse)
    read = KeypointStore(folder)
    for image, view in ((0, 0), (3, 0), (4, 1)):
        expected = mapped.read_view(image, view).features
        features = read.read_view(image, view).features
        np.testing.assert_array_equal(features.keypoints, expected.keypoints)
        np.testing.assert_array_equal(features.descriptors, expected.descriptors)


def remove_photograph(index):
    del index["shards"][0]["photographs"][0]


def change_photograph(index):
    index["shards"][1]["photographs"][0] = "another one"


def rename_image(index):
    index["shards"][0]["images"][0] = "another one"


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(version=99),
        lambda index: index.update(shards=None),
        remove_photograph,
        change_photograph,
        rename_image,
    ],
)
def test_an_index_that_was_changed_is_refused(tmp_path, change):
    folder = write(tmp_path, make_images(COUNTS))
    index = read_json(folder / store.INDEX)
    change(index)
    (folder / store.INDEX).write_text(json.dumps(index))
    with pytest.raises(RequestError, match=r"store\.json"):
        KeypointStore(folder)


def test_a_missing_and_a_cut_index_are_refused(tmp_path):
    with pytest.raises(RequestError, match=r"store\.json"):
        KeypointStore(tmp_path)
    folder = write(tmp_path, make_images(COUNTS))
    (folder / store.INDEX).write_text("{")
    with pytest.raises(RequestError, match=r"store\.json"):
        KeypointStore(folder)
