"""DALI's and torchvision's image sources give the same pixels and order as the plain ones."""

from __future__ import annotations

import dataclasses
import io
import sys
import threading
from pathlib import Path
from unittest import mock

import cv2
import numpy as np
import pytest
import torch
from made_views import made_store

from benchmarks import dali_views
from pipeline.errors import RequestError
from pipeline.features.store import Store
from pipeline.image_sets import dali_decoder as images_dali
from pipeline.image_sets import decode
from pipeline.image_sets.sources import ImageSet, folder_entries
from pipeline.keypoints import shards
from pipeline.keypoints.pool import Pool, decoder
from pipeline.keypoints.shards import Folder, plan
from pipeline.train.pairs import loader, synthetic
from pipeline.train.pairs import workers as worker_processes
from pipeline.train.pairs.augmentation import Augmentation
from pipeline.train.pairs.order import PairOrder
from superglue_sift.batch import PairBatch
from superglue_sift.images import BadImage

try:
    import nvidia.dali

    DALI = nvidia.dali.__version__
except ImportError:
    DALI = ""
needs_dali = pytest.mark.skipif(not DALI, reason="needs NVIDIA DALI (see docker/locks/dali-*.lock)")


def jpeg(pixels: np.ndarray, mode: str = "RGB", **options) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, "JPEG", **options)
    return stream.getvalue()


@pytest.fixture
def photographs(tmp_path: Path, color_photo: np.ndarray) -> Path:
    """23 files: JPEG of every kind DALI decodes, others that OpenCV does, and some that nobody
    can.
    """
    from PIL import Image

    turned = Image.Exif()
    turned[274] = 6
    folder = tmp_path / "photographs"
    folder.mkdir()
    kinds = (
        {},
        {"progressive": True},
        {"subsampling": 0},
        {"subsampling": 2, "quality": 40},
        {"mode": "L"},
        {"exif": turned},
        {"mode": "CMYK"},
    )
    for index in range(18):
        piece = np.ascontiguousarray(color_photo[index : 240 + index, : 320 + 7 * index])
        (folder / f"{index:02d}.jpg").write_bytes(jpeg(piece, **kinds[index % len(kinds)]))
    Image.fromarray(color_photo).save(folder / "05-colour.png")
    (folder / "07-wrong-name.jpg").write_bytes((folder / "05-colour.png").read_bytes())
    (folder / "09-empty.jpg").write_bytes(b"")
    (folder / "11-cut.jpg").write_bytes((folder / "00.jpg").read_bytes()[:3000])
    (folder / "99-page.jpg").write_bytes(b"<html>gone</html>")
    return folder


def image_set(folder: Path) -> ImageSet:
    names = sorted(path.name for path in folder.iterdir())
    return ImageSet(
        folder_entries(folder, names, "train", "photographs"), {"photographs": str(folder)}
    )


def same(one, other) -> bool:
    if isinstance(one, BadImage) or isinstance(other, BadImage):
        return str(one) == str(other)
    return one.dtype == other.dtype and np.array_equal(one, other)


@needs_dali
class TestImages:
    # 1: every batch partial or full alike; 4, 5: a partial last one; 64: one batch only
    @pytest.mark.parametrize("batch", [1, 4, 5, 64])
    def test_pixels_order_and_verdicts_are_those_of_opencv(self, photographs, batch):
        images = image_set(photographs)
        entries = images.entries("train")
        plain = list(decode.decoded(images, entries))
        ours = list(images_dali.decoded(images, entries, batch))
        assert [entry for entry, _ in ours] == [entry for entry, _ in plain] == entries
        if torch.cuda.is_available():
            pytest.skip("nvJPEG's pixels differ by a few levels")
        wrong = [
            entry.name for (entry, one), (_, other) in zip(ours, plain) if not same(one, other)
        ]
        assert wrong == []

    def test_a_second_pass_gives_the_same_and_nothing_twice(self, photographs):
        images = image_set(photographs)
        entries = images.entries("train")
        passes = [list(images_dali.decoded(images, entries, 4)) for _ in range(2)]
        names = [entry.name for entry, _ in passes[0]]
        assert sorted(set(names)) == names and len(names) == len(entries)
        assert all(same(one, other) for (_, one), (_, other) in zip(*passes))

    def test_what_dali_refuses_pillow_decides(self, photographs, monkeypatch, capfd):
        """Without our checks a web page reaches DALI, which drops the whole batch."""
        images = image_set(photographs)
        entries = images.entries("train")
        expected = list(decode.decoded(images, entries))
        plain = decode.is_plain_jpeg
        monkeypatch.setattr(
            decode, "is_plain_jpeg", lambda data, name: data[:1] == b"<" or plain(data, name)
        )
        ours = list(images_dali.decoded(images, entries, 4))
        assert [entry for entry, _ in ours] == entries
        if not torch.cuda.is_available():
            assert all(same(one, other) for (_, one), (_, other) in zip(ours, expected))
        assert "Pillow decodes it" in capfd.readouterr().err

    def test_no_image_and_no_jpeg(self, photographs):
        images = image_set(photographs)
        assert list(images_dali.decoded(images, [])) == []
        others = [entry for entry in images.entries("train") if "-" in entry.name]
        assert [entry for entry, _ in images_dali.decoded(images, others, 2)] == others

    def test_leaving_early_does_not_hang(self, photographs):
        images = image_set(photographs)
        source = images_dali.decoded(images, images.entries("train"), 2)
        next(source)
        source.close()

    @pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
    def test_the_stage_writes_the_same_shards(self, photographs, tmp_path, make_params, workers):
        if torch.cuda.is_available():
            pytest.skip("nvJPEG's pixels differ by a few levels")
        written = {}
        for name in ("pillow", "dali"):
            settings = make_params(
                "keypoints", decoder=name, views_per_image=2, width=128, height=96
            )
            written[name] = shards_of(tmp_path / name, image_set(photographs), settings, workers)
        assert written["dali"] == written["pillow"] and len(written["dali"]) == 5

    def test_shards_stick_to_their_rank(self, photographs):
        """Every pass over a rank's shards brings the same images, and the ranks together all of
        them.
        """
        images = image_set(photographs)
        entries = images.entries("train")
        seen = []
        for _ in range(2):
            ranks = [
                [e.name for e, _ in images_dali.decoded(images, entries[rank::3], 4)]
                for rank in range(3)
            ]
            seen.append(ranks)
        assert seen[0] == seen[1]
        assert sorted(name for names in seen[0] for name in names) == [
            entry.name for entry in entries
        ]

    @pytest.mark.gpu
    def test_the_gpu_decodes_nearly_the_same(self, photographs):
        images = image_set(photographs)
        entries = images.entries("train")
        plain = decode.decoded(images, entries)
        for (entry, one), (_, other) in zip(images_dali.decoded(images, entries, 8), plain):
            assert isinstance(one, BadImage) == isinstance(other, BadImage), entry.name
            if not isinstance(one, BadImage):
                assert one.shape == other.shape
                assert np.abs(one.astype(int) - other).mean() < 1.0, entry.name


def no_torchvision() -> str:
    try:
        decoder("torchvision")
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.cu111
@pytest.mark.skipif(bool(no_torchvision()), reason=no_torchvision())
class TestTorchvision:
    def test_pixels_order_and_verdicts_are_those_of_opencv(self, photographs):
        images = image_set(photographs)
        entries = images.entries("train")
        plain = list(decode.decoded(images, entries))
        ours = list(decode.torchvision_decoded(images, entries))
        assert [entry for entry, _ in ours] == [entry for entry, _ in plain] == entries
        if torch.cuda.is_available():
            pytest.skip("nvJPEG's pixels differ by a few levels")
        wrong = [
            entry.name for (entry, one), (_, other) in zip(ours, plain) if not same(one, other)
        ]
        assert wrong == []

    def test_what_torchvision_refuses_pillow_decides(self, photographs, monkeypatch):
        images = image_set(photographs)
        entries = images.entries("train")
        expected = list(decode.decoded(images, entries))
        monkeypatch.setattr(decode, "is_plain_jpeg", lambda data, name: True)  # PNG, CMYK and all
        ours = list(decode.torchvision_decoded(images, entries))
        names = [
            entry.name for (entry, one), (_, other) in zip(ours, expected) if not same(one, other)
        ]
        # torchvision's JPEG decoder takes CMYK as it is; the stage hands it none
        assert [name for name in names if not _is_cmyk(photographs / name)] == []

    def test_the_stage_writes_the_same_shards(self, photographs, tmp_path, make_params):
        if torch.cuda.is_available():
            pytest.skip("nvJPEG's pixels differ by a few levels")
        written = {}
        for name in ("pillow", "torchvision"):
            settings = make_params(
                "keypoints", decoder=name, views_per_image=2, width=128, height=96
            )
            written[name] = shards_of(tmp_path / name, image_set(photographs), settings, 1)
        assert written["torchvision"] == written["pillow"] and len(written["torchvision"]) == 5

    @pytest.mark.gpu
    def test_nvjpeg_decodes_nearly_the_same(self, photographs):
        images = image_set(photographs)
        entries = images.entries("train")
        for (entry, one), (_, other) in zip(
            decode.torchvision_decoded(images, entries), decode.decoded(images, entries)
        ):
            assert isinstance(one, BadImage) == isinstance(other, BadImage), entry.name
            if not isinstance(one, BadImage):
                assert one.shape == other.shape
                assert np.abs(one.astype(int) - other).mean() < 1.0, entry.name


def _is_cmyk(path: Path) -> bool:
    from PIL import Image

    return Image.open(path).mode == "CMYK"


def shards_of(folder: Path, images: ImageSet, settings, workers: int) -> list:
    """Bytes of the shards of five images that a pool of the stage makes."""
    with mock.patch.object(shards, "SHARD_IMAGES", 5):
        folder = Folder(folder, plan(images.entries("train"), settings))
    todo = folder.open(folder.shards)
    with Pool(images, settings, workers) as pool:
        results = pool.map([entry for shard in todo for entry in shard.entries])
        for shard in todo:
            folder.write(shard, [next(results) for _ in shard.entries])
    return [(folder.path / shard.file).read_bytes() for shard in folder.shards]


# Of zoomed pairs only
FIELDS = [field.name for field in dataclasses.fields(PairBatch) if field.name != "cells"]


def equal(one, other) -> bool:
    return all(torch.equal(getattr(one, name).cpu(), getattr(other, name)) for name in FIELDS)


VIEW = (160, 120)


def jpegs(photo: np.ndarray, count: int) -> list:
    """Files of different sizes, smoothed so that half a gray level of rounding is what the resizers
    may differ by.
    """
    smooth = cv2.GaussianBlur(photo, (0, 0), 2)
    return [
        jpeg(np.ascontiguousarray(smooth[3 * i :, 5 * i :]), "L", quality=95) for i in range(count)
    ]


def views_of(source) -> tuple:
    batches = list(source)
    return tuple(np.concatenate([np.asarray(batch[i]) for batch in batches]) for i in range(3))


@needs_dali
class TestViews:
    """The guides' loader: resize, crop, mirror and brightness by DALI, and the homographies they
    make.
    """

    @pytest.mark.parametrize("batch", [1, 3, 7, 16])  # with a partial last one, and one batch only
    def test_views_and_homographies_are_those_of_opencv(self, photo, batch):
        files = jpegs(photo, 7)
        batches = list(dali_views.dali_views(files, VIEW, batch))
        assert [len(H) for _, _, H in batches] == [batch] * (7 // batch) + [7 % batch] * bool(
            7 % batch
        )
        ours = views_of(batches)
        plain = views_of(dali_views.opencv_views(files, VIEW))
        np.testing.assert_allclose(ours[2], plain[2])
        for side in range(2):
            assert ours[side].shape == plain[side].shape == (7, 1, VIEW[1], VIEW[0])
            assert np.abs(ours[side].astype(int) - plain[side]).mean((1, 2, 3)).max() < 0.5

    def test_a_mirrored_view_has_a_mirrored_homography(self, photo):
        """View 0 warped by H is view 1 where both show the same; taken as not mirrored it is
        not.
        """
        files = jpegs(photo, 12)
        draws = [dali_views.draw_pair(0, i, VIEW) for i in range(12)]
        mirrored = [one.mirror != other.mirror for one, other in draws]
        assert 0 < sum(mirrored) < 12
        views0, views1, H = views_of(dali_views.dali_views(files, VIEW, 4))
        assert [bool(np.linalg.det(each) < 0) for each in H] == mirrored
        for i, (one, other) in enumerate(draws):
            scale = other.brightness / one.brightness
            errors = [
                difference(views0[i, 0] * scale, views1[i, 0], each)
                for each in (H[i], _unmirror(H[i]))
            ]
            assert errors[0] < 4
            assert not mirrored[i] or errors[1] > 3 * errors[0]


def _unmirror(H: np.ndarray) -> np.ndarray:
    return np.array([[-1, 0, VIEW[0] - 1], [0, 1, 0], [0, 0, 1]]) @ H


def difference(view0: np.ndarray, view1: np.ndarray, H: np.ndarray) -> float:
    """Mean difference in gray levels where view 0, warped by H, covers view 1 and neither is
    saturated.
    """
    warped = cv2.warpPerspective(view0.astype(np.float32), H, VIEW, borderValue=-1000.0)
    both = (warped > 0) & (warped < 250) & (view1 < 250)
    assert both.sum() > 500
    return float(np.abs(warped - view1)[both].mean())


class TestChoice:
    def test_synthetic_pairs_look_like_stored_ones(self, tmp_path):
        store = Store(made_store(tmp_path / "store"))
        samples = PairOrder(0, len(store), store.views_per_image).step(0, 6)
        batch = synthetic.load_batch(store, samples, 50, Augmentation(drop=0.3))
        stored = loader.load_batch(store, samples, 50)
        for name in FIELDS:
            assert getattr(batch, name).dtype == getattr(stored, name).dtype
        assert batch.counts0.tolist() == batch.counts1.tolist() == [50] * 6
        assert equal(batch, synthetic.load_batch(store, samples, 50))

    def test_the_parameter_chooses(self):
        assert loader.choose("plain", None) == (loader.load_batch, loader.prefetched)
        assert loader.choose("synthetic", None) == (synthetic.load_batch, loader.prefetched)

    @pytest.mark.parametrize("name", ["synthetic", "plain"])
    @pytest.mark.parametrize("device, locked", [("cpu", 0), ("cuda", 4)])
    def test_a_thread_locks_the_pages_of_batches_for_a_gpu(
        self, tmp_path, monkeypatch, name, device, locked
    ):
        """Without a GPU: `pin_memory` is replaced by one that copies, and notes the copy and its
        thread.
        """
        store = Store(made_store(tmp_path / "store"))
        copies = []
        threads = set()

        def pin_memory(batch):
            threads.add(threading.current_thread().name)
            copies.append(dataclasses.replace(batch))
            return copies[-1]

        monkeypatch.setattr(loader.PairBatch, "pin_memory", pin_memory)
        # No memory: no processes
        monkeypatch.setattr(worker_processes, "memory_of_rank", lambda *_: 0)
        load, ahead = loader.choose(
            name, torch.device(device), worker_processes.StepSize(4, 30, 280, 2)
        )
        order = PairOrder(0, len(store), store.views_per_image)

        def make(step):
            return [load(store, part, 30) for part in loader.split_evenly(order.step(step, 4), 2)]

        steps = list(ahead(make, range(2)))
        batches = [batch for step in steps for batch in step]
        assert len(batches) == 4 and len(copies) == locked
        assert all(any(batch is copy for copy in copies) for batch in batches) == bool(locked)
        assert threads == ({"prefetch"} if locked else set())
        assert all(
            equal(one, other)
            for step, made in enumerate(steps)
            for one, other in zip(made, make(step))
        )

    def test_missing_dali_is_one_line_with_the_fix(self, monkeypatch):
        for name in ("nvidia.dali", "nvidia.dali.plugin.pytorch"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(
            RequestError, match=r"pip install nvidia-dali-cuda1.*keypoints\.decoder: pillow"
        ) as error:
            decoder("dali")
        assert "\n" not in str(error.value)

    def test_missing_torchvision_is_one_line_with_the_fix(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torchvision", None)
        with pytest.raises(RequestError, match=r"set keypoints\.decoder: pillow") as error:
            decoder("torchvision")
        assert "\n" not in str(error.value)
