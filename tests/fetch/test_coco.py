"""Downloads that survive: resumed, checked, hardly a byte sent twice."""

import hashlib
import io
import json
import random
import zipfile
from pathlib import Path

import cv2
import pytest
from faulty_server import FaultyServer
from made_trainings import leave_records_out
from reading import read_json
from ruamel.yaml import YAML

from pipeline import export, presets
from pipeline.errors import WorkError
from pipeline.evaluate import __main__ as evaluate
from pipeline.fetch import __main__ as fetch_stage
from pipeline.fetch import coco, dataset
from pipeline.keypoints import __main__ as keypoints
from pipeline.train import __main__ as train

BLOCK = 1 << 15
TEN = dataset.SAMPLE["train"][:2] + dataset.SAMPLE["val"] + dataset.SAMPLE["test"]


def make_zip():
    """A zip of one photograph, which nobody decodes, in some ten blocks."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as out:
        out.writestr(zipfile.ZipInfo("a.jpg"), random.Random(0).randbytes(10 * BLOCK))
    return stream.getvalue()


DATA = make_zip()
ARCHIVE = coco.Archive("file.zip", hashlib.md5(DATA).hexdigest(), 1, len(DATA))


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """Small blocks, and the seconds that the downloads would have waited."""
    seconds = []
    monkeypatch.setattr(coco, "sleep", seconds.append)
    monkeypatch.setattr(coco, "BLOCK", BLOCK)
    return seconds


@pytest.fixture
def server(monkeypatch):
    server = FaultyServer(DATA)
    monkeypatch.setenv(coco.MIRROR, server.url)
    yield server
    server.close()


def fetch(folder):
    target = folder / "file.zip"
    assert coco.RemoteArchive(ARCHIVE).download(target).names == ["a.jpg"]
    assert target.read_bytes() == DATA
    assert sorted(path.name for path in folder.iterdir()) == ["file.zip"]


CASES = {
    "cut at the beginning, in the middle, at the end": [3, BLOCK + 9_999, 3 * BLOCK - 1],
    "busy": [BLOCK + 1, "503", "503", "503"],
    "the whole file, whatever was requested": [BLOCK, "whole", "whole"],
    "silence": ["stall"],
    "as many cuts in a row as it tries": [1_000] * (coco.TRIES - 1),
}


@pytest.mark.parametrize("faults", CASES.values(), ids=CASES)
def test_a_download_survives_faults_with_at_most_a_block_sent_twice(
    server, tmp_path, faults, monkeypatch
):
    monkeypatch.setattr(coco, "SILENCE_S", 0.3)
    server.faults = list(faults)
    fetch(tmp_path)
    assert not server.faults and len(server.requests) == len(faults) + 1
    assert server.sent <= len(DATA) * (1 + faults.count("whole")) + BLOCK * len(faults)


def test_a_link_to_another_disk_is_followed(server, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "file.zip").symlink_to("disk/real.zip")
    coco.RemoteArchive(ARCHIVE).download(tmp_path / "file.zip")
    assert (tmp_path / "file.zip").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real.zip"]
    assert (tmp_path / "disk/real.zip").read_bytes() == DATA


def test_a_download_is_resumed_from_the_second_address(server, tmp_path, monkeypatch):
    second_server = FaultyServer(DATA)
    monkeypatch.delenv(coco.MIRROR)
    monkeypatch.setattr(coco, "TLS", server.url)
    monkeypatch.setattr(coco, "PLAIN", second_server.url)
    server.faults = [2 * BLOCK + 5, *["404"] * (coco.TRIES - 1)]
    fetch(tmp_path)
    assert len(server.requests) == coco.TRIES
    assert second_server.requests == [f"bytes={2 * BLOCK}-{len(DATA) - 1}"]
    second_server.close()


@pytest.mark.parametrize("fault", ["503", "whole"])
def test_after_some_tries_a_download_ends_and_keeps_what_it_has(server, tmp_path, waits, fault):
    server.faults = [BLOCK, *[fault] * (coco.TRIES - 1)]
    with pytest.raises(WorkError, match=rf"{server.url}/file\.zip.*COCO_MIRROR"):
        fetch(tmp_path)
    assert sum(waits) > 50 and not server.faults
    server.requests.clear()
    fetch(tmp_path)
    assert server.requests == [f"bytes={BLOCK}-{len(DATA) - 1}"]


def test_a_file_with_a_wrong_checksum_is_deleted(server, tmp_path):
    server.data = bytes([DATA[0] ^ 1]) + DATA[1:]
    with pytest.raises(WorkError, match=hashlib.md5(server.data).hexdigest()):
        fetch(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [BLOCK + 7, len(DATA)])
def test_a_killed_download_is_resumed_at_its_last_byte(server, tmp_path, size):
    (tmp_path / "file.zip.part").write_bytes(DATA[:size])
    fetch(tmp_path)
    assert server.sent == len(DATA) - size


@pytest.mark.slow
def test_a_coco_preset_from_a_server_to_a_model(tmp_path, root, monkeypatch):
    """The preset coco2017-val, of ten photographs and a few steps, from the archive's address."""
    leave_records_out(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("val2017.zip", "w") as out:
        for number, name in enumerate(TEN):
            photo = cv2.imread(str(dataset.find_sample_folder() / name))
            jpeg = cv2.imencode(".jpg", photo)[1].tobytes()
            out.writestr(f"val2017/{number:012d}.jpg", jpeg)
    server = FaultyServer(Path("val2017.zip").read_bytes())
    md5 = hashlib.md5(server.data).hexdigest()
    archive = coco.Archive("val2017.zip", md5, len(TEN), len(server.data))
    monkeypatch.setitem(coco.SOURCES, "coco2017-val", [archive])
    monkeypatch.setenv(coco.MIRROR, server.url)
    tree = YAML(typ="safe", pure=True).load(presets.read_preset("coco2017-val"))
    tree["fetch"].update(val_fraction=0.4)
    tree["keypoints"].update(views_per_image=3, width=160, height=120, max_keypoints=64)
    few = {"steps": 4, "batch": 2, "val_every": 2, "val_pairs": 4, "max_keypoints": 64}
    small = {"init_from": "", "warmup_steps": 1, "decay_start": 2, "precision": "float32"}
    tree["train"].update(**few, **small)
    tree["train"]["model"].update(dim=16, layers=1)
    tree["train"]["augmentation"].update(min_keypoints=0)
    tree["evaluate"].update(width=160, height=120, max_keypoints=64, pairs_per_image=2)
    Path("params.yaml").write_text(json.dumps(tree))  # JSON is YAML
    stages = [(fetch_stage, []), (keypoints, ["--workers", "1"]), (train, [])]
    stages += [(evaluate, ["--model", "checkpoints/best.safetensors"]), (export, [])]
    for stage, words in stages:
        assert stage.main(words) in (0, None)
    server.close()
    images = dataset.open_manifest(Path("data/images"))
    assert sorted(map(images.identify_photograph, images.listed)) == [str(n) for n in range(10)]
    metrics = read_json(Path("reports/evaluate/metrics.json"))
    assert metrics["ratio_test.precision"] > 0.3
    assert Path("models/superglue.safetensors").is_file()
