"""The speed table: equal work on both sides, and rows that cannot run say why."""

import cv2
import numpy as np
import pytest
import torch
from made_pairs import scrambled

from benchmarks import __main__ as benchmark
from benchmarks import dali_views, images, pack, plain, timing, training
from benchmarks.photographs import make_batch
from benchmarks.timing import Row, Setting
from pipeline.errors import RequestError
from pipeline.train.loss import assignment_loss
from superglue_sift.network.ground_truth import ground_truth
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

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
    models = [scrambled(config).double()]
    models.append(plain.plain_from(models[0]).double())
    batch = make_batch(40, 3)
    truths = ground_truth(batch)
    log_Ps = [model(batch) for model in models]
    torch.testing.assert_close(*log_Ps, atol=1e-9, rtol=0)
    losses = [assignment_loss(log_Ps[0], truths)[0].sum()]
    losses.append(plain.dense_loss(log_Ps[1], truths).sum())
    torch.testing.assert_close(*losses, atol=1e-9, rtol=0)
    for loss in losses:
        loss.backward()
    gradients, others = ({n: p.grad for n, p in m.named_parameters()} for m in models)
    for name in set(gradients) & set(others):
        expected = gradients[name].reshape(others[name].shape)
        torch.testing.assert_close(others[name], expected, atol=1e-9, rtol=1e-7)


def test_the_plain_network_refuses_weights_that_it_has_not():
    with pytest.raises(RuntimeError, match="rotary"):
        plain.plain_from(SuperGlue(SuperGlueConfig(dim=32, layers=1, rotary=True)))


def test_the_interval_holds_the_ratio():
    random = np.random.default_rng(0)
    fast = random.uniform(1, 1.1, 15)
    text = timing.speed_up(3 * fast * random.uniform(0.98, 1.02, 15), fast)
    value, low, high = (float(word.strip("x[],")) for word in text.split())
    assert 2.9 < low <= value <= high < 3.1


def test_views_by_dali_are_those_of_opencv(photo):
    """External source, decoding, resizing, cropping, mirroring, iterator, and a partial batch."""
    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        (row,) = benchmark.run("views", SETTING)
        assert row.problem.startswith("SKIP: NVIDIA DALI is not installed: pip install nvidia-dali")
        pytest.skip("needs NVIDIA DALI")
    quality = [cv2.IMWRITE_JPEG_QUALITY, 95]
    file = cv2.imencode(".jpg", photo, quality)[1].tobytes()
    files = [file] * (dali_views.BATCH + 3)
    found = list(dali_views.dali_views(files, (160, 120), None))
    assert [len(H) for _, _, H in found] == [dali_views.BATCH, 3]
    views = [torch.cat([batch[place] for batch in found]).numpy() for place in (0, 1)]
    for i, (view0, view1, H) in enumerate(dali_views.opencv_views(files, (160, 120))):
        batch = found[i // dali_views.BATCH][2]
        assert np.allclose(batch[i % dali_views.BATCH], H[0])
        for own, theirs in zip(views, (view0, view1)):
            # other decoders and interpolations round otherwise; another view differs by tens
            assert np.abs(own[i].astype(float) - theirs[0]).mean() < 3.0


@pytest.mark.slow
def test_rows_of_images_on_the_bundled_photographs():
    for group in (images.files, images.decoding):
        for row in group(SETTING):
            assert row.value > 0 or row.problem.startswith("SKIP: ")


@pytest.mark.slow
def test_a_batch_is_full_and_repeats_its_pairs():
    batch = make_batch(512, 9)
    assert (batch.counts == 512).all()
    assert torch.equal(batch.records[0][0], batch.records[0][8])


def test_a_failing_group_costs_itself_alone(monkeypatch, capsys):
    def good(_):
        yield timing.row("one", np.full(3, 0.002), np.full(3, 0.004), "plain")
        yield timing.skip("two", "no such device")

    def bad(_):
        yield Row("first", 1.0)
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(benchmark, "GROUPS", {"bad": bad, "good": good})
    assert benchmark.main(["--device", "cpu"]) == 1
    machine, *rows = capsys.readouterr().out.splitlines()
    assert "D = 128" in machine and [row.split()[0] for row in rows] == [
        "first",
        "bad",
        "one",
        "two",
    ]
    assert rows[1].endswith("FAILED: RuntimeError: out of memory")
    assert rows[2].endswith("2.00x [2.00, 2.00] of plain, 4 ms")
    assert rows[3].endswith("SKIP: no such device")


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--dim", "7"]])
def test_wrong_requests_are_named(arguments):
    with pytest.raises(RequestError, match=" ".join(arguments)):
        benchmark.main([*arguments, "--device", "cpu"])


def test_every_way_to_train_works_or_says_what_it_lacks():
    modes = training.list_modes("cpu")
    assert {name for name, (_, _, missing) in modes.items() if missing} >= {
        "AMP, float16",
        "DataParallel",
    }
    context = training.distributed.Context(0, 1, SETTING.device)
    for changes in ({}, {"accumulate": 2}, {"precision": "bfloat16"}):
        _, norm = training.training_step(SETTING, 2, context, changes)()
        assert 0 < norm < 1000


@pytest.mark.slow
def test_a_way_to_train_is_measured_in_processes_of_its_own():
    taken = training.run_mode(SETTING, {"accumulate": 2}, 2)
    assert len(taken) >= 2 and (taken > 0).all()
    with pytest.raises(RuntimeError, match="Error: "):
        training.run_mode(SETTING, {"accumulate": "no number"}, 1)


def test_photographs_are_packed_into_the_room_there_is(image_folder, tmp_path, capsys):
    assert pack.main([str(tmp_path / "out"), str(image_folder), "--mib", "0.1"]) == 0
    packed = list((tmp_path / "out").iterdir())
    assert len(packed) == 4 and sum(path.stat().st_size for path in packed) < 0.1 * 2**20
    assert "4 photographs, quality" in capsys.readouterr().out
