"""The speed table: equal work on both sides, and rows that cannot run say why."""

import copy
import re

import cv2
import numpy as np
import pytest
import torch
from made_pairs import scrambled
from reading import read_error

from benchmarks import __main__ as benchmark
from benchmarks import dali_views, images, plain, timing, training
from benchmarks.dev import pack
from benchmarks.photographs import make_pairs
from benchmarks.timing import Setting
from pipeline import errors
from pipeline.train.loss import compute_assignment_losses, find_truth
from superglue_sift.network.superglue import SuperGlueConfig

SETTING = Setting(
    torch.device("cpu"),
    SuperGlueConfig(dim=16, layers=2, heads=2, sinkhorn_iterations=20),
    keypoints=64,
    seconds=0.5,
)


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_assignment_loss_and_gradient_equal_those_of_the_plain_network(norm):
    """The ratios of the table are worth nothing otherwise."""
    config = SuperGlueConfig(dim=32, layers=3, heads=4, norm=norm, sinkhorn_iterations=50)
    model = scrambled(config).double()
    other = copy.deepcopy(model)
    batch = make_pairs(40, 3)
    truths = find_truth(batch)
    images = batch.images0, batch.images1
    log_P, plain_log_P = model(*images), plain.assign(other, *images)
    torch.testing.assert_close(plain_log_P, log_P, atol=1e-9, rtol=0)
    loss = compute_assignment_losses(log_P, truths)[0].sum()
    plain_loss = plain.compute_dense_loss(plain_log_P, truths).sum()
    torch.testing.assert_close(plain_loss, loss, atol=1e-9, rtol=0)
    loss.backward()
    plain_loss.backward()
    for own, theirs in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(theirs.grad, own.grad, atol=1e-9, rtol=1e-7)


def test_the_interval_holds_the_ratio():
    random = np.random.default_rng(0)
    fast = random.uniform(1, 1.1, 15)
    text = timing.format_speed_up(3 * fast * random.uniform(0.98, 1.02, 15), fast)
    value, low, high = (float(word.strip("x[],")) for word in text.split())
    assert 2.9 < low <= value <= high < 3.1


def test_views_by_dali_are_those_of_opencv(photo):
    """External source, decoding, resizing, warping, iterator, and a partial batch."""
    pytest.importorskip("nvidia.dali")
    quality = [cv2.IMWRITE_JPEG_QUALITY, 95]
    file = cv2.imencode(".jpg", photo, quality)[1].tobytes()
    files = [file] * (dali_views.BATCH + 3)
    load = dali_views.make_dali_loader(files, (160, 120), None)
    list(load())
    found = list(load())  # the second epoch
    assert [len(H) for _, _, H in found] == [dali_views.BATCH, 3]
    views = [torch.cat([batch[place] for batch in found]).numpy() for place in (0, 1)]
    for i, (view0, view1, H) in enumerate(dali_views.load_views_by_opencv(files, (160, 120))):
        batch = found[i // dali_views.BATCH][2]
        assert np.allclose(batch[i % dali_views.BATCH], H[0])
        for own, theirs in zip(views, (view0, view1)):
            # other decoders and interpolations round otherwise; another view differs by tens
            assert np.abs(own[i].astype(float) - theirs[0]).mean() < 3.0


@pytest.mark.slow
def test_rows_of_images_on_the_bundled_photographs():
    for group in (images.time_files, images.time_decoders):
        for row in group(SETTING):
            assert re.search(r"/s  \d|: 0\.\d|SKIP: ", row)


def test_a_failing_group_costs_itself_alone(monkeypatch, capsys):
    def good(_):
        yield timing.format_row("one", np.full(3, 0.002), np.full(3, 0.004), "plain")
        raise ImportError("No module named 'two'")

    def bad(_):
        yield "first"
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(benchmark, "GROUPS", {"bad": bad, "good": good})
    assert benchmark.main(["--device", "cpu"]) == 1
    machine, *rows = capsys.readouterr().out.splitlines()
    assert "D = 128" in machine and [row.split()[0] for row in rows] == [
        "first",
        "bad",
        "one",
        "good",
    ]
    assert rows[1].endswith("FAILED: RuntimeError: out of memory")
    assert rows[2].endswith("2.00x [2.00, 2.00] of plain, 4 ms")
    assert rows[3].endswith("SKIP: No module named 'two'")


@pytest.mark.parametrize("words", ["--only nothing", "--dim 7"])
def test_a_wrong_request_is_one_line(words, capsys):
    assert errors.run(benchmark.main, [*words.split(), "--device", "cpu"]) == 2
    assert words in read_error(capsys)


@pytest.mark.slow
def test_every_way_to_train_works_or_says_what_it_lacks():
    modes = training.list_modes("cpu")
    assert {name for name, (_, _, missing) in modes.items() if missing} >= {
        "AMP, float16",
        "DataParallel",
    }
    context = training.distributed.Context(0, 1, SETTING.device)
    for changes in ({}, {"accumulate": 2}, {"precision": "bfloat16"}):
        _, norm, _ = training.make_training_step(SETTING, 2, context, changes)()
        assert 0 < norm < 1000


@pytest.mark.slow
def test_a_way_to_train_is_measured_in_processes_of_its_own():
    taken = training.run_mode(SETTING, {"accumulate": 2}, 2)
    assert len(taken) >= 2 and (taken > 0).all()
    with pytest.raises(RuntimeError, match="Error: "):
        training.run_mode(SETTING, {"accumulate": "no number"}, 1)


def test_photographs_are_packed(image_folder, tmp_path):
    assert pack.main([str(tmp_path / "out"), str(image_folder)]) == 0
    packed = list((tmp_path / "out").iterdir())
    assert len(packed) == 4 and sum(path.stat().st_size for path in packed) < 0.15 * 2**20
