"""The speed table does equal work on both sides; weights of verification are learned."""

import copy

import cv2
import numpy as np
import pandas as pd
import pytest
import torch
from made_pairs import scrambled

from benchmarks import dali_views, plain, timing
from benchmarks.dev import verification
from benchmarks.photographs import make_pairs
from benchmarks.timing import Setting
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
    for weight, plain_weight in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(plain_weight.grad, weight.grad, atol=1e-9, rtol=1e-7)


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
    batches = list(load())  # the second epoch
    assert [len(H) for _, _, H in batches] == [dali_views.BATCH, 3]
    views = [torch.cat([batch[place] for batch in batches]).numpy() for place in (0, 1)]
    for i, (view0, view1, H) in enumerate(dali_views.load_views_by_opencv(files, (160, 120))):
        batch = batches[i // dali_views.BATCH][2]
        assert np.allclose(batch[i % dali_views.BATCH], H[0])
        for dali_view, opencv_view in zip(views, (view0, view1)):
            # other decoders and interpolations round otherwise; another view differs by tens
            assert np.abs(dali_view[i].astype(float) - opencv_view[0]).mean() < 3.0


def test_a_match_is_judged_by_the_plane_that_fits_best():
    moved = np.array([[1.0, 0, 30], [0, 1, 0], [0, 0, 1]])
    points = np.array([[10.0, 20], [40, 50]])
    distances = verification.measure_distances(
        [np.eye(3), moved], points, np.add(points, [[27, 0], [0, 5]])
    )
    np.testing.assert_allclose(distances, [3, 5])


def test_weights_are_learned_and_reported():
    rng = np.random.default_rng(0)
    evidence = rng.normal(0, 2, (4000, 2))
    right = rng.uniform(size=4000) < 1 / (1 + np.exp(-evidence @ [1.0, 0.5]))
    pairs = pd.DataFrame(evidence, columns=verification.EVIDENCE)
    pairs = pairs.assign(place=np.arange(4000) % verification.PLACES, kind="court", right=right)
    # Half of these pairs are right, but two thirds of a collection's, so the bias is log 2.
    np.testing.assert_allclose(verification.learn_weights(pairs), [1.0, 0.5, np.log(2)], atol=0.2)
    assert (
        verification.learn_weights(pairs.assign(log_inlier_ratio=-pairs.log_inlier_ratio))[0] == 0
    )  # never negative
    constants, learned, fresh = verification.format_report(pairs).split("\n\n")
    assert constants.startswith("WEIGHTS = np.array([")
    taught = pairs.place < verification.LEARNED
    for table, part in ((learned, pairs[taught]), (fresh, pairs[~taught])):
        name, *numbers = table.splitlines()[-1].split()
        count, of_one, refused, false = map(int, numbers[:4])
        assert (name, count, of_one) == ("all", len(part), part.right.sum())
        assert refused + false < 0.33 * count
