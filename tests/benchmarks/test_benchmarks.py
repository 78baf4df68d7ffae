"""The speed table: equal work on both sides, rows that cannot run say why."""

import cv2
import numpy as np
import pytest
import torch
from made_pairs import scrambled
from reading import read_json

from benchmarks import __main__ as benchmark
from benchmarks import dali_views, images, plain, timing, training
from benchmarks.synthetic import make_batch, make_pairs
from benchmarks.timing import Row, Setting
from pipeline.errors import RequestError
from pipeline.keypoints.store import Store
from pipeline.train.loss import assignment_loss
from superglue_sift.network.ground_truth import ground_truth
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig

SETTING = Setting(
    torch.device("cpu"),
    SuperGlueConfig(dim=16, layers=2, heads=2, sinkhorn_iterations=20),
    seconds=0.5,
)


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """`timing` collects garbage before each round, which takes half a second among the objects of
    all tests.
    """
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)


class TestPlain:
    """Ours must equal the plain path: the table's ratios are worth nothing otherwise."""

    @pytest.mark.parametrize("norm", ["layer", "batch"])
    def test_assignment_loss_and_gradient_equal_ours(self, norm):
        model = scrambled(
            SuperGlueConfig(dim=32, layers=3, heads=4, norm=norm, sinkhorn_iterations=50)
        ).double()
        twin = plain.plain_from(model).double()
        batch = make_batch(40, 3)
        truths = ground_truth(batch)
        ours = model(batch)
        theirs = twin(batch)
        assert max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs)) < 1e-9
        losses = assignment_loss(ours, truths)[0].sum(), plain.dense_loss(theirs, truths).sum()
        assert float((losses[0] - losses[1]).detach().abs()) < 1e-9
        for loss in losses:
            loss.backward()
        gradients, others = (dict(each.named_parameters()) for each in (model, twin))
        for name in (
            "dustbin",
            "final_projection.weight",
            "descriptor_projection.weight",
            "self_attention.0.merge.weight",
            "cross_attention.2.mlp.0.weight",
        ):
            found = others[name].grad.reshape(gradients[name].shape)
            assert torch.allclose(gradients[name].grad, found, atol=1e-9, rtol=1e-7)

    def test_the_plain_network_refuses_weights_that_it_has_not(self):
        with pytest.raises(RuntimeError, match="rotary"):
            plain.plain_from(SuperGlue(SuperGlueConfig(dim=32, layers=1, rotary=True)))


class TestTiming:
    def test_the_interval_holds_the_ratio(self):
        random = np.random.default_rng(0)
        fast = random.uniform(1, 1.1, 15)
        found = timing.speed_up(3 * fast * random.uniform(0.98, 1.02, 15), fast)
        assert found.low <= found.value <= found.high and found.low > 2.9 and found.high < 3.1


class TestRows:
    @pytest.mark.slow
    def test_rows_of_images_on_the_bundled_photographs(self):
        for group in (images.keypoints, images.files, images.aligned):
            (found,) = group(SETTING)
            assert found.unit == "ms" and found.value > 0

    def test_photographs_are_cut_to_one_size(self):
        found = images.photographs(8)
        assert [each.shape for each in found] == [(480, 640)] * 8
        assert all(each.dtype == np.uint8 and each.std() > 10 for each in found)


class TestTable:
    def test_it_is_printed_and_written_and_a_failing_group_costs_itself_alone(
        self, tmp_path, monkeypatch, capsys
    ):
        def good(_):
            yield Row("one", 1.5, "ms", timing.Ratio(2.0, 1.5, 2.5), note="of plain")
            yield Row("two", skipped="no such device")

        def bad(_):
            yield Row("first", 1.0)
            raise RuntimeError("out of memory\nand more")

        monkeypatch.setattr(benchmark, "GROUPS", {"bad": bad, "good": good})
        assert benchmark.main(["--device", "cpu", "--json", str(tmp_path / "rows.json")]) == 1
        printed = capsys.readouterr().out
        assert "2.00x [1.50, 2.50]  of plain" in printed and "SKIP: no such device" in printed
        assert "FAILED: RuntimeError: out of memory\n" in printed
        held = read_json(tmp_path / "rows.json")
        assert [each["name"] for each in held["rows"]] == ["first", "bad", "one", "two"]
        assert "D = 128" in held["machine"]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [(["--only", "nothing"], "--only nothing: must be of"), (["--dim", "7"], "--dim")],
    )
    def test_wrong_requests_are_named(self, arguments, said):
        with pytest.raises(RequestError, match=said):
            benchmark.main([*arguments, "--device", "cpu"])


def test_a_store_of_synthetic_pairs_can_be_read(tmp_path):
    pairs, homographies = make_pairs(8, 2)
    opened = Store(training.write_store(tmp_path, pairs, homographies))
    view = opened.view(1, 1)
    assert view.records.tobytes() == pairs[1].records1.tobytes() and view.size == pairs[1].size1


def test_views_by_dali_are_those_of_opencv(photo):
    """External source, decoding, resizing, cropping, mirroring, iterator, and a partial batch."""
    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        (row,) = benchmark.run("views", SETTING)
        assert row.skipped.startswith("NVIDIA DALI is not installed: pip install nvidia-dali")
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
def test_a_way_to_train_is_measured_in_processes_of_its_own(tmp_path):
    folder = training.write_store(tmp_path, *make_pairs(training.KEYPOINTS, 8))
    taken = training.run_mode(SETTING, folder, training.Mode({"accumulate": 2}, 2))
    assert len(taken.wall) >= 2 and (taken.wall > 0).all()
    modes = training.list_modes("cpu")
    assert modes["AMP, float16"].missing == "needs a GPU" and modes["DataParallel"].missing
