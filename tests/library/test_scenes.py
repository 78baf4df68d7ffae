"""Photographs of a place: which pairs are accepted, with which matches they are filled, and what
cameras they give.
"""

import csv

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_scenes import IDENTITY, SHIFT, TURN
from reading import read_json

from benchmarks.dev import colmap
from superglue_sift import Matcher, errors, matcher
from superglue_sift.apps import cli
from superglue_sift.features import nearest, sift
from superglue_sift.features.sift import root_sift_of
from superglue_sift.geometry import scenes, two_view
from superglue_sift.matches import Matches


def records_of(descriptors, second=None):
    """SIFT records with these descriptors (n, 128), at distinct positions."""
    records = np.zeros(len(descriptors), sift.ORIENTED)
    records["x"] = records["y"] = np.arange(len(descriptors))
    records["descriptor"] = descriptors
    if second is not None:
        records["second_descriptor"] = second
    return records


def plain_matches(rows0, rows1, limit):
    """Mutual nearest neighbours that pass both tests both ways, in the plainest way."""
    distance = np.sqrt(np.maximum(2 - 2 * rows0 @ rows1.T, 0))
    found = set()
    for i, row in enumerate(distance):
        j = int(row.argmin())
        column = distance[:, j]
        near = all(each[0] < limit * each[1] for each in (np.sort(row), np.sort(column)))
        if column.argmin() == i and near and row[j] < limit:
            found.add((i, j))
    return found


@given(st.integers(0, 2**32 - 1), st.integers(2, 600), st.integers(2, 40))
def test_classical_matches_are_those_of_the_definition(seed, count0, count1):
    rng = np.random.default_rng(seed)
    one = rng.gamma(0.6, 40, (count0, 128)).clip(0, 255).astype(np.uint8)
    copied = one[rng.integers(0, count0, count1)].astype(float)
    other = (copied + rng.normal(0, rng.uniform(0, 40), copied.shape)).clip(0, 255).astype(np.uint8)
    sides = [records_of(each) for each in (one, other)]
    found = nearest.ratio_matches(*sides)
    indices, scores = found.indices, found.scores
    rows = root_sift_of(one).astype(float), root_sift_of(other).astype(float)
    matches = set(map(tuple, indices.tolist()))
    # a ratio within rounding of the limit may fall on either side
    least, most = (plain_matches(*rows, limit) for limit in (0.8 - 1e-4, 0.8 + 1e-4))
    assert least <= matches <= most
    assert ((scores > 0.2 - 1e-3) & (scores <= 1)).all()
    assert len(np.unique(indices[:, 0])) == len(np.unique(indices[:, 1])) == len(found)


def test_the_second_orientation_matches_too():
    rng = np.random.default_rng(0)
    one, other = rng.gamma(0.6, 40, (2, 50, 128)).clip(0, 255).astype(np.uint8)
    second = np.zeros_like(other)
    second[7] = one[3]
    sides = records_of(one), records_of(other, second)
    assert nearest.ratio_matches(*sides).indices.tolist() == [[3, 7]]
    alone = records_of(one[:1])
    assert len(nearest.ratio_matches(alone, alone)) == 0  # no ratio


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), unique=True, max_size=30))
def test_matches_that_share_an_end_are_dropped_in_either_order_of_the_images(matches):
    matches = np.array(matches, int).reshape(-1, 2)
    scores = np.random.default_rng(len(matches)).permutation(len(matches)) / 30
    kept = set(nearest.most_confident_each(*matches.T, scores))
    assert kept == set(nearest.most_confident_each(*matches[:, ::-1].T, scores))
    for i in range(len(matches)):
        rivals = (matches == matches[i]).any(axis=1)
        assert (i in kept) == (scores[i] == scores[rivals].max())


def made_pair(right, wrong, seed=0):
    """Two sides whose first `right` keypoints are the same points of a surface, and matches of
    these and `wrong` others.
    """
    rng = np.random.default_rng(seed)
    count = right + wrong
    points = rng.uniform([-2, -2, 0], [2, 2, 0], (count, 3))
    points[:, 2] = 6 + np.sin(2 * points[:, 0]) + np.cos(points[:, 1])
    views = [
        500 * (points - [shift, 0, 0])[:, :2] / (points - [0, 0, depth])[:, 2:]
        for shift, depth in ((0, 0), (1, 0.5))
    ]
    views[1][right:] = rng.uniform(-250, 250, (wrong, 2))
    descriptors = rng.gamma(0.6, 40, (count, 128)).clip(0, 255).astype(np.uint8)
    other = descriptors.copy()
    other[right:] = rng.gamma(0.6, 40, (wrong, 128)).clip(0, 255)
    more = nearest.ratio_matches(records_of(descriptors), records_of(other))
    sides = tuple(scenes.Side(points, (640, 640)) for points in views)
    return sides, np.stack([np.arange(count)] * 2, axis=1), more


def test_matches_that_agree_open_a_pair_and_all_that_agree_fill_it():
    sides, matches, more = made_pair(right=200, wrong=100)
    # The other 160 are left to the classical matcher
    network = np.concatenate([matches[:40], matches[200:220]])
    scores = np.concatenate([np.full(20, 0.95), np.full(20, 0.6), np.full(20, 0.4)])
    network = Matches(network, scores.astype(np.float32))
    found, score = scenes.fill(network, 0.28, sides, 0.5, more)
    assert 0.9 < score < 1
    right = found.indices[:, 0] < 200
    # Of 20 at random places few lie on their lines
    assert right.sum() == 200 and (~right).sum() < 3
    assert (found.indices[:, 0] == found.indices[:, 1]).all()
    alone, _ = scenes.fill(network, 0.28, sides, 0.5, Matches.none())
    assert (alone.indices[:, 0] < 200).sum() == 40


def test_an_unsure_match_is_kept_where_its_neighbours_say():
    """Sliding along its epipolar line, a wrong match fits the geometry, but no surface."""
    sides, matches, _ = made_pair(right=200, wrong=0)
    epipole = np.array([1000.0, 0.0])  # the first camera's centre, in image 1
    sides[1].points[150:] += 0.1 * (epipole - sides[1].points[150:])  # some 100 px
    scores = np.repeat(np.float32([0.5, 0.05]), 100)
    network = Matches(matches[:40], np.full(40, 0.6, np.float32))
    found, _ = scenes.fill(network, 0.28, sides, 0.5, Matches(matches, scores))
    kept = np.bincount(found.indices[:, 0] // 50, minlength=4)  # of each 50
    assert kept[:2].tolist() == [50, 50]  # sure
    assert kept[2] > 40 and kept[3] < 5
    unsure = found.scores[found.indices[:, 0] >= 100]
    assert unsure.min() >= 0.5 and unsure.max() <= 0.6  # the means of those around them


def test_at_exact_places_a_match_a_pixel_off_its_line_is_left_out():
    sides, *_ = made_pair(right=100, wrong=0)
    points0, points1 = (side.points.astype(np.float32) for side in sides)
    points1[3:90:9, 1] += 1.5
    size = sides[0].size
    kept = scenes.consistent(points0, points1, (size, size))
    off = np.zeros(100, bool)
    off[3:90:9] = True
    # one whose line runs up and down may still lie on it
    assert kept[~off].all() and (off & ~kept).sum() >= 8
    assert scenes.consistent(points0[:5], points1[:5], (size, size)).all()
    # a photograph three times as large, in which keypoints scatter three times as far
    large = (3 * scenes.RESIZE, 3 * scenes.RESIZE)
    np.testing.assert_array_equal(scenes.consistent(3 * points0, points1, (large, size)), kept)


def test_a_pair_below_the_limit_gives_nothing():
    sides, matches, more = made_pair(right=200, wrong=100)
    network = Matches(matches, np.full(300, 0.6, np.float32))
    wrong = network.only(slice(200, None))
    found, score = scenes.fill(wrong, 0.28, sides, scenes.ACCEPT, more)
    assert 0 < score < scenes.ACCEPT and len(found) == 0
    right = network.only(slice(200)), 0.28, sides
    assert len(scenes.fill(*right, 1.0, more)[0]) == 0
    assert len(scenes.fill(*right, 0.9, more)[0]) == 200
    none, score = scenes.fill(Matches.none(), 0.28, sides, 0.0, Matches.none())
    assert len(none) == 0 and score > scenes.SKIPPED


def test_wrong_matches_at_which_opencv_fails_have_no_geometry():
    """Nine classical matches of two sides of the door of Herz-Jesus."""
    points0 = [154.1, 453.7, 565.3, 418.0, 562.3, 605.9, 553.7, 606.7, 817.8, 493.8, 288.1, 470.1]
    points0 += [557.6, 602.0, 327.2, 476.6, 780.8, 307.8]
    points1 = [68.2, 522.9, 67.0, 531.7, 131.2, 609.4, 126.7, 609.8, 333.2, 555.6, 115.2, 538.9]
    points1 += [129.2, 607.3, 128.9, 542.2, 319.8, 419.8]
    found = two_view.fit_fundamental(*(np.reshape(p, (9, 2)) for p in (points0, points1)), 1.5)
    assert found.model is None and found.inliers.shape == (9,) and not found.inliers.any()


# Real photographs


@pytest.fixture(scope="module")
def strecha(shared_data):
    folder = shared_data / "poses/strecha"
    return folder, colmap.read_cameras(folder / "cameras_gt.txt")


def test_two_photographs_of_a_place_are_accepted_and_two_of_different_places_are_not(
    strecha, place, monkeypatch
):
    folder, cameras = strecha
    names = ["Herz-Jesus-P25_0005.jpg", "Herz-Jesus-P25_0007.jpg", "entry-P10_0003.jpg"]
    one, near, other = (place.extract(folder / name) for name in names)
    asked = []
    of_network = matcher.match_pairs
    monkeypatch.setattr(
        matcher,
        "match_pairs",
        lambda model, pairs, *more: asked.append(len(pairs)) or of_network(model, pairs, *more),
    )
    found = place.match(one, near)
    rejected, again = place.match_batch([(one, other), (one, near)])
    assert asked == [1, 1]  # not of (one, other)
    np.testing.assert_array_equal(again.matches, found.matches)
    assert rejected.pair_score == scenes.SKIPPED and not rejected.accepted
    assert len(rejected.matches) == 0
    assert found.accepted and found.pair_score > 0.95
    assert len(found.matches) > 850  # 917; the network alone finds 474
    truth = colmap.pose_between(cameras[names[0]], cameras[names[1]])
    F = colmap.fundamental(truth)
    assert (two_view.epipolar_distances(F, found.points0, found.points1) < 4).mean() > 0.95
    pose = found.relative_pose(truth.K0, truth.K1)
    true = truth.T_0to1[:3, :3]
    assert np.degrees(np.arccos((np.trace(pose.R @ true.T) - 1) / 2)) < 1
    both = list(place.match_many(one, [near, other], accepted_only=True))
    assert [len(each.matches) for each in both] == [len(found.matches)]


def test_a_folder_lists_its_pairs_and_the_database_holds_the_accepted_alone(strecha, tmp_path):
    pycolmap = pytest.importorskip("pycolmap")
    names = ("Herz-Jesus-P25_0005.jpg", "Herz-Jesus-P25_0006.jpg", "entry-P10_0003.jpg")
    (tmp_path / "photos").mkdir()
    for name in names:
        image = cv2.imread(str(strecha[0] / name), cv2.IMREAD_GRAYSCALE)
        small = cv2.resize(image, (768, 512), interpolation=cv2.INTER_AREA)
        cv2.imwrite(str(tmp_path / "photos" / name), small)
    words = f"{tmp_path}/photos --out-dir {tmp_path}/found --json-files --max-keypoints 2000"
    tables = []
    keypoints = []
    for name in ("first.db", "again.db", "resumed.db"):  # from all that is done, and from a part
        if name == "resumed.db":
            min((tmp_path / "found").glob("*_matches.npz")).unlink()
        command = [*words.split(), "--device", "cpu", "--colmap", str(tmp_path / name)]
        assert errors.exit_code(cli.main, command) == 0
        with (tmp_path / "found/pairs.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["accepted"] for row in rows] == ["1", "0", "0"]
        assert float(rows[0]["pair_score"]) > 0.95 and rows[0]["reason"] == ""
        for row in rows[1:]:
            skipped = "skipped: too few classical matches"
            assert row["reason"] == ("not accepted" if row["pair_score"] else skipped)
            assert float(row["pair_score"] or 0) < scenes.ACCEPT
        with pycolmap.Database.open(str(tmp_path / name)) as database:
            assert len(database.read_all_images()) == 3
            # a few do not fit any more where the pixels agree
            assert 0.9 < database.num_matches() / int(rows[0]["matches"]) <= 1
            assert database.num_verified_image_pairs() == 1
            images = database.read_all_images()
            keypoints.append([database.read_keypoints(each.image_id) for each in images])
        tables.append((tmp_path / "found/pairs.csv").read_bytes())
    assert tables == [tables[0]] * 3
    for again in keypoints[1:]:
        assert all(map(np.array_equal, again, keypoints[0]))
    about = sorted((tmp_path / "found").glob("*_*.json"))
    about = [read_json(path) for path in about]
    assert [each["accepted"] for each in about] == [True, False, False]
    assert abs(about[0]["pair_score"] - float(rows[0]["pair_score"])) < 1e-4


def test_keypoints_of_a_database_are_where_the_pixels_agree(photo, tmp_path, monkeypatch):
    """Matched keypoints of three views fit the true homography better than SIFT's places do."""
    pycolmap = pytest.importorskip("pycolmap")
    (tmp_path / "photos").mkdir()
    for name, H in (("0.png", IDENTITY), ("1.png", TURN), ("2.png", SHIFT)):
        moved = cv2.warpPerspective(photo, H, photo.shape[::-1], flags=cv2.INTER_CUBIC)
        cv2.imwrite(str(tmp_path / "photos" / name), moved)
    monkeypatch.chdir(tmp_path)
    words = "photos --out-dir found --no-scene --max-keypoints 300 --device cpu --colmap"
    errors_px = []
    for more in ("exact.db", "sift.db --no-refine"):
        assert errors.exit_code(cli.main, f"{words} {more}".split()) == 0
        with pycolmap.Database.open(more.split()[0]) as database:
            key = {image.name: image.image_id for image in database.read_all_images()}
            ids = (key["0.png"], key["1.png"])
            first, second = (database.read_keypoints(each)[:, :2] - 0.5 for each in ids)
            index0, index1 = database.read_matches(*ids).T
        apart = two_view.transform(first[index0], TURN) - second[index1]
        errors_px.append(np.median(np.linalg.norm(apart, axis=1)))
    assert errors_px[0] < 0.6 * errors_px[1]


def test_a_scene_has_settings_of_its_own():
    usual, scene = (Matcher.load(device="cpu", scene=each) for each in (False, True))
    assert (usual.max_keypoints, usual.network_keypoints, usual.resize) == (4096, 1024, 1024)
    assert (scene.max_keypoints, scene.network_keypoints, scene.resize) == (8192, 512, 1600)
    assert usual.refine and not scene.refine
