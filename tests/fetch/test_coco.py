"""Downloads that survive: resumed, checked, hardly a byte sent twice."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import cv2
import pytest
from faulty_server import FaultyServer
from made_trainings import leave_mlflow_out
from reading import read_json, read_yaml
from waiting import wait_until

from pipeline import export
from pipeline.errors import RequestError, WorkError
from pipeline.evaluate import __main__ as evaluate
from pipeline.fetch import __main__ as fetch_stage
from pipeline.fetch import coco, dataset
from pipeline.fetch.coco import download, verify
from pipeline.keypoints import __main__ as keypoints
from pipeline.train import __main__ as train

DATA = random.Random(0).randbytes(3_000_000)
MD5 = hashlib.md5(DATA).hexdigest()
SIZE = len(DATA)
TEN = dataset.SAMPLE["train"][:2] + dataset.SAMPLE["val"] + dataset.SAMPLE["test"]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    waits = []
    monkeypatch.setattr(coco, "sleep", waits.append)
    monkeypatch.setattr("urllib3.util.retry.time.sleep", waits.append)
    return waits


@pytest.fixture
def server():
    made = FaultyServer(DATA)
    yield made
    made.close()


def fetch(server, folder, size=SIZE):
    target = folder / "file.zip"
    download([f"{server.url}/file.zip"], target, MD5, size)
    assert target.read_bytes() == server.data
    assert sorted(path.name for path in folder.iterdir()) == ["file.zip", "file.zip.json"]
    return target


def once_over(server, allowance=1.02):
    """How many bytes were sent, against the size of the file."""
    assert server.sent <= allowance * len(server.data), (
        f"{server.sent / len(server.data):.3f} times the file"
    )


CASES = {
    "cut at 1 %": [30_000],
    "cut at 50 %": [1_500_000],
    "cut at 99 %": [2_970_000],
    "416": [1_000_000, "416"],
    "503 three times": ["503", "503", "503"],
    "wrong length": ["short_length"],
    "changed ETag": [1_000_000, "new_etag"],
}


@pytest.mark.parametrize("name", CASES)
def test_each_fault_is_survived_with_hardly_a_byte_sent_twice(server, tmp_path, name):
    server.faults = list(CASES[name])
    fetch(server, tmp_path)
    # a lie about the length is closed at once; what the kernel had under way is lost
    lost_on_the_way = {"wrong length": 1.6}
    once_over(server, lost_on_the_way.get(name, 1.02))
    assert len(server.requests) <= len(CASES[name]) + 3


def test_a_server_without_ranges_serves_too(tmp_path):
    server = FaultyServer(DATA, ranges=False)
    server.faults = [1_000_000]
    fetch(server, tmp_path)
    once_over(server, 1.4)
    server.close()


@pytest.mark.parametrize("seed", [1, 4])
def test_twenty_random_cuts_cost_at_most_two_percent(server, tmp_path, seed):
    rng = random.Random(seed)
    server.faults = [rng.randrange(150_000) for _ in range(20)]
    fetch(server, tmp_path)
    once_over(server)


def test_a_server_that_stops_to_honour_ranges_half_way_is_survived(server, tmp_path):
    server.faults = [1_000_000, "whole"]
    fetch(server, tmp_path)
    assert server.requests == [None, "bytes=1000000-"] and server.sent == 1_000_000 + len(DATA)


def test_a_second_address_takes_over_where_the_first_one_left(server, tmp_path):
    other = FaultyServer(DATA)
    server.faults = [1_000_000, *["404"] * 9]
    target = tmp_path / "file.zip"
    download([f"{server.url}/a", f"{other.url}/b"], target, MD5, len(DATA))
    assert target.read_bytes() == DATA and other.requests == ["bytes=1000000-"]
    other.close()


def test_it_gives_up_after_some_tries_and_keeps_what_it_has(server, tmp_path, no_waiting):
    server.faults = [1_000_000, *["503"] * 50]
    with pytest.raises(
        WorkError,
        match=r"too many 503 error responses.*1000000 bytes are kept, run again.*COCO_MIRROR",
    ):
        fetch(server, tmp_path)
    assert len(server.requests) == 1 + coco.TRIES + 1 and no_waiting.count(1) == coco.TRIES
    server.faults = []
    fetch(server, tmp_path)
    once_over(server)


def test_a_wrong_checksum_is_put_aside_and_both_are_named(server, tmp_path):
    server.data = bytes([DATA[0] ^ 1]) + DATA[1:]
    wrong = hashlib.md5(server.data).hexdigest()
    with pytest.raises(
        WorkError, match=f"wrong MD5 {wrong}, expected {MD5}; moved to .*file.zip.bad"
    ):
        fetch(server, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file.zip.bad"]
    (tmp_path / "file.zip.bad").unlink()
    server.data = DATA
    fetch(server, tmp_path)


def test_another_file_under_the_name_is_refused(server, tmp_path):
    with pytest.raises(WorkError, match="the file has 3000000 bytes there, 5 are expected"):
        fetch(server, tmp_path, size=5)


def test_a_full_disk_is_said_before_the_download(server, tmp_path, monkeypatch):
    monkeypatch.setattr(coco.shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    with pytest.raises(WorkError, match=r"needs 0\.0 GB, 0\.0 GB are free"):
        fetch(server, tmp_path)
    assert server.requests == []


def test_killed_after_its_last_byte_it_asks_for_nothing(server, tmp_path):
    (tmp_path / "file.zip.part").write_bytes(DATA)
    fetch(server, tmp_path)
    assert server.requests == []


def test_killed_at_random_it_goes_on(server, tmp_path, root):
    """SIGKILL to the downloading process: what is in its file is not sent again."""
    program = (
        "import sys; from pathlib import Path; from pipeline.fetch import coco\n"
        f"coco.download([sys.argv[1]], Path(sys.argv[2]), sys.argv[3], {len(DATA)})\n"
    )
    command = [sys.executable, "-c", program, server.url, str(tmp_path / "file.zip"), MD5]
    part = tmp_path / "file.zip.part"
    server.pace = 0.05
    for fraction in (0.15, 0.35, 0.55, 0.75):
        process = subprocess.Popen(command, cwd=root)
        least = fraction * len(DATA)
        wait_until(lambda least=least: part.exists() and part.stat().st_size >= least)
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = part.stat().st_size
    before = -1
    while before != server.sent:  # it still sends a piece or two to the one that was killed
        before = server.sent
        time.sleep(0.5)
    server.pace = 0.0
    subprocess.run(command, cwd=root, check=True)
    assert (tmp_path / "file.zip").read_bytes() == DATA
    assert server.sent - before <= len(DATA) - kept


def test_a_file_that_is_here_is_hashed_once_and_again_when_it_has_changed(tmp_path, monkeypatch):
    target = tmp_path / "file.zip"
    assert verify(target, MD5, tmp_path) is None
    target.write_bytes(DATA)
    known = verify(target, MD5, tmp_path)
    assert known == {"size": SIZE, "md5": MD5}
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.fetch.coco.md5_of", lambda _: pytest.fail("hashed again"))
        assert verify(target, MD5, tmp_path) == known
    os.utime(target)
    assert verify(target, MD5, tmp_path) == known  # the same bytes at another time
    content = bytearray(DATA)
    content[len(content) // 2] ^= 1
    target.write_bytes(content)
    with pytest.raises(RequestError, match=r"file\.zip: wrong MD5"):
        verify(target, MD5, tmp_path)


@pytest.mark.slow
def test_a_coco_preset_from_a_server_to_a_model(tmp_path, root, monkeypatch):
    """The preset coco2017-val, of ten photographs and a few steps, from the archive's address."""
    leave_mlflow_out(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("val2017.zip", "w") as out:
        for number, name in enumerate(TEN):
            photo = cv2.imread(str(dataset.sample_folder() / name))
            jpeg = cv2.imencode(".jpg", photo)[1].tobytes()
            out.writestr(f"val2017/{number:012d}.jpg", jpeg)
    server = FaultyServer(Path("val2017.zip").read_bytes())
    md5 = hashlib.md5(server.data).hexdigest()
    archive = coco.Archive("val2017.zip", md5, len(TEN), len(server.data))
    monkeypatch.setitem(coco.SOURCES, "coco2017-val", [archive])
    monkeypatch.setenv(coco.MIRROR, server.url)
    tree = read_yaml(root / "presets/coco2017-val.yaml")
    tree["fetch"].update(val_fraction=0.4)
    tree["keypoints"].update(views_per_image=3, width=160, height=120, max_keypoints=64)
    few = {"steps": 4, "batch": 2, "val_every": 2, "val_pairs": 4, "max_keypoints": 64}
    small = {"dim": 16, "layers": 1, "init_from": "", "warmup_steps": 1, "decay_start": 2}
    tree["train"].update(**few, **small, min_keypoints=0, precision="float32")
    tree["evaluate"].update(width=160, height=120, max_keypoints=64, pairs_per_image=2)
    Path("params.yaml").write_text(json.dumps(tree))  # JSON is YAML
    stages = [(fetch_stage, []), (keypoints, ["--workers", "1"]), (train, [])]
    stages += [(evaluate, ["--model", "checkpoints/best.safetensors"]), (export, [])]
    for stage, words in stages:
        assert stage.main(words) in (0, None)
    server.close()
    listed = dataset.open_manifest(Path("data/images")).listed
    assert sorted(entry.photograph for entry in listed) == [str(n) for n in range(10)]
    metrics = read_json(Path("reports/evaluate/metrics.json"))
    assert metrics["ratio_test.precision"] > 0.3
    assert Path("models/superglue.safetensors").is_file()
