"""Whether two photographs show one place: what counts as evidence, which matches are added, what a
watermark is, and which real photographs are accepted.
"""

import csv
import itertools
import math

import cv2
import numpy as np
import pytest
from made_pairs import records_at
from made_scenes import MILD

from benchmarks.dev import scenes as bench
from superglue_sift import Matcher, errors
from superglue_sift.apps import cli
from superglue_sift.features import sift
from superglue_sift.features.features import Features
from superglue_sift.geometry import two_view, verification
from superglue_sift.geometry.verification import add_guided_matches
from superglue_sift.matches import Matches

SIZE = (640, 480)


def surface(count, seed=0):
    """Positions (count, 2) in two views of a wavy surface, from cameras that moved and turned."""
    rng = np.random.default_rng(seed)
    points = rng.uniform([-2, -1.5, 0], [2, 1.5, 0], (count, 3))
    points[:, 2] = 6 + np.sin(2 * points[:, 0]) + 0.5 * np.cos(points[:, 1])
    sine, cosine = math.sin(0.2), math.cos(0.2)
    turn = np.array([[cosine, 0, -sine], [0, 1, 0], [sine, 0, cosine]])
    views = [points, points @ turn.T + [-1.0, 0.1, 0.3]]
    return tuple(each[:, :2] / each[:, 2:] * 500 + [320, 240] for each in views)


def anywhere(count, seed=0):
    """Positions (count, 2) of wrong matches."""
    return tuple(np.random.default_rng(seed).uniform(0, [639, 479], (2, count, 2)))


def slide(points0, points1, parts):
    """Move points of image 1 along their epipolar lines, by parts of the way to the epipole."""
    F = two_view.fit_fundamental(points0, points1, 1.5).model
    epipole = np.linalg.svd(F.T)[2][2]
    return points0, points1 + parts[:, None] * (epipole[:2] / epipole[2] - points1)


def both(*pairs):
    """The positions of several pairs, one after the other."""
    return tuple(np.concatenate(each) for each in zip(*pairs))


def matches(first, last, score):
    """Keypoints first to last, each matched with the one of the same number."""
    index = np.arange(first, last)
    return Matches(np.stack([index, index], 1), np.full(len(index), score, np.float32))


def joined(*parts):
    return Matches(
        np.concatenate([part.indices for part in parts]),
        np.concatenate([part.scores for part in parts]),
    )


def features_at(points):
    return [Features(records_at(each), SIZE) for each in points]


def match(points, network, mutual, threshold=0.28, accept=0.5):
    pair = features_at(points)
    return verification.match_one_place(pair, points, network, mutual, threshold, accept)


def probability_of(network, ratio, points):
    return verification.place_probability(verification.verify_pair(network, ratio, points)[1])


# Evidence


def test_one_place_is_probable_and_wrong_matches_are_not():
    points = surface(60)
    found = matches(0, 60, 0.6), matches(0, 60, 0.5)
    F, _ = verification.verify_pair(*found, points)
    assert (two_view.epipolar_distances(F, *points) < 1.5).mean() > 0.95
    assert probability_of(*found, points) > 0.95
    assert 0 < probability_of(*found, anywhere(60)) < 0.1
    few = matches(0, 6, 0.6), matches(0, 6, 0.5), surface(6)
    assert verification.verify_pair(*few)[0] is None and 0 < probability_of(*few) < 0.1


def test_known_lead_and_support():
    """Of the matches that count, half lie on the surface, and all of the ratio test's."""
    points = both(surface(40), anywhere(340))
    unsure = matches(80, 380, verification.COUNTED)
    network = joined(matches(0, 80, 0.9), unsure).above(verification.COUNTED)
    F = two_view.fit_fundamental(*surface(40), 1.5).model
    lead, support = verification.measure_evidence(F, network, matches(0, 40, 0.5), points)
    assert lead == pytest.approx(math.log((40 + verification.FEW) / verification.FEW), abs=0.3)
    # forty matches, all of whose neighbours agree, and twenty more with the usual support
    assert support == pytest.approx((40 * 1 + 20 * 0.75) / 60, abs=0.01)


def test_where_windows_repeat_other_geometries_are_as_good():
    """Half of the matches are off by one window."""
    points0, points1 = surface(60, seed=1)
    points = both(surface(60), (points0, np.add(points1, [40, 25])))
    network, ratio = matches(0, 120, 0.9), matches(0, 60, 0.5)
    F = two_view.fit_fundamental(*surface(60), 1.5).model
    alone = verification.measure_evidence(F, network.only(slice(60)), ratio, points)
    rivalled = verification.measure_evidence(F, network, ratio, points)
    assert rivalled[0] < 0.5 and alone[0] > 2
    # The ratio test finds both.
    disputed = verification.measure_evidence(F, network, matches(0, 120, 0.5), points)
    assert disputed[1] < 0.75 < alone[1]


def test_a_mirror_image_is_another_place():
    points0, points1 = surface(80)
    given_ = matches(0, 80, 0.9), matches(0, 80, 0.5)
    assert probability_of(*given_, (points0, points1)) > 0.95
    assert probability_of(*given_, (points0, points0 * [-1, 1] + [639, 0])) < 0.01


def test_matches_that_slide_along_their_lines_do_not_count():
    points = surface(60)
    F = two_view.fit_fundamental(*points, 1.5).model
    slid = slide(*points, np.random.default_rng(1).uniform(-0.3, 0.3, 60))
    given_ = F, matches(0, 60, 0.6), matches(0, 60, 0.5)
    straight, moved = (verification.measure_evidence(*given_, each)[0] for each in (points, slid))
    assert moved < 1 < 2 < straight


def test_two_orientations_at_one_position_count_once():
    points = surface(60)
    twice = np.random.default_rng(0).integers(0, 60, 180)
    more = both(points, [each[twice] for each in points])
    F = two_view.fit_fundamental(*points, 1.5).model
    ratio = matches(0, 60, 0.5)
    once = verification.measure_evidence(F, matches(0, 60, 0.6), ratio, points)
    network = joined(matches(0, 60, 0.6), matches(60, 240, 0.5))
    np.testing.assert_allclose(
        verification.measure_evidence(F, network, ratio, more), once, rtol=1e-6
    )


# Guided matching


def test_matches_that_agree_open_a_pair_and_all_that_agree_are_added():
    points = both(surface(200), anywhere(100))
    # The other 160 are left to the ratio test
    network = joined(matches(0, 40, 0.6), matches(200, 220, 0.4))
    found, score = match(points, network, matches(0, 300, 0.5))
    assert 0.5 < score < 1
    right = found.indices[:, 0] < 200
    # Of 100 at random places few lie on their lines
    assert right.sum() == 200 and (~right).sum() < 6
    assert (np.diff(found.indices[:, 0]) > 0).all()
    assert (found.scores[:40] == np.float32(0.6)).all() and found.scores[50] == 0.5
    alone, _ = match(points, network, Matches.none())
    assert (alone.indices[:, 0] < 200).sum() == 40


def test_limits_are_in_pixels_of_the_images_that_sift_saw():
    """Files of four times the size have the same matches, since SIFT saw the same images."""
    points0, points1 = surface(200)
    points = points0, points1 + np.random.default_rng(2).normal(0, 0.8, points1.shape)
    given_ = matches(0, 40, 0.6), matches(0, 200, 0.5)
    expected, score = match(points, *given_)
    files = [
        Features(records_at(4.0 * each), (4 * SIZE[0], 4 * SIZE[1]), detected_size=SIZE)
        for each in points
    ]
    found, again = verification.match_one_place(files, points, *given_, 0.28, 0.5)
    np.testing.assert_array_equal(found.indices, expected.indices)
    assert again == score and 100 < len(found) < 200
    # Enlarged positions have the same matches only with limits that are enlarged as well.
    few, _ = verification.match_one_place(files, (4 * points[0], 4 * points[1]), *given_, 0.28, 0.5)
    assert len(few) < len(found)


def test_an_unsure_match_is_kept_where_its_neighbours_say():
    """Sliding along its epipolar line, a wrong match fits the geometry, but no surface."""
    points = slide(*surface(200), 0.1 * (np.arange(200) >= 150))
    mutual = joined(matches(0, 100, 0.5), matches(100, 200, 0.05))
    found, _ = match(points, matches(0, 40, 0.6), mutual)
    kept = np.bincount(found.indices[:, 0] // 50, minlength=4)  # of each 50
    assert kept[:2].tolist() == [50, 50]  # pass the ratio test
    assert kept[2] > 40 and kept[3] < 5
    unsure = found.scores[found.indices[:, 0] >= 100]
    assert unsure.min() >= 0.5 and unsure.max() <= 0.6001  # the means of those around them


def test_a_pair_below_the_limit_has_no_matches():
    points = anywhere(200)
    wrong, score = match(points, matches(0, 200, 0.6), matches(0, 200, 0.5), accept=0.9)
    assert 0 < score < 0.9 and len(wrong) == 0
    nothing, score = match(points, Matches.none(), Matches.none(), accept=0.0)
    assert len(nothing) == 0 and score > verification.SKIPPED


def test_at_exact_places_a_match_a_pixel_off_its_line_is_left_out():
    points0, points1 = surface(100)
    points1[3:90:9, 1] += 1.5
    off = np.zeros(100, bool)
    off[3:90:9] = True
    # a photograph three times as large, in which keypoints scatter three times as far
    large = (3 * verification.RESIZE, 3 * verification.RESIZE)
    for unit, size in ((1, SIZE), (3, large)):
        kept = verification.agree_with_one_geometry(unit * points0, points1, (size, SIZE))
        # one whose line runs up and down may still lie on it
        assert kept[~off].all() and (off & ~kept).sum() >= 8


# Watermarks


def watermarks_of(points0, points1):
    """Which of these matches are found, among 600 other keypoints anywhere in both images."""
    points = both((points0, points1), anywhere(600, seed=7))
    return verification.find_watermarks(features_at(points), matches(0, len(points0), 1.0))


def points_in(left, top, right, bottom, count, seed=0):
    return np.random.default_rng(seed).uniform([left, top], [right, bottom], (count, 2))


def scatter(points, seed=1):
    return points + np.random.default_rng(seed).normal(0, 0.3, points.shape)


@pytest.mark.parametrize(
    "box",
    [(8, 452, 320, 476), (560, 10, 630, 110), (190, 200, 450, 280)],
    ids=["bar at the bottom", "logo", "middle"],
)
def test_matches_at_one_place_in_a_small_part_of_both_images_are_a_watermarks(box):
    mark = points_in(*box, 60)
    right = points_in(20, 60, 150, 420, 30, seed=3)  # nothing is seen under a watermark
    moved = two_view.transform(right, MILD)
    found = watermarks_of(np.concatenate([mark, right]), np.concatenate([scatter(mark), moved]))
    assert found[:60].mean() > 0.95 and not found[60:].any()
    assert watermarks_of(mark, scatter(mark)).mean() > 0.95


@pytest.mark.parametrize("count", [0, 15, 60, 400])
def test_photographs_of_one_tripod_have_no_watermark(count):
    points = points_in(5, 5, 634, 474, count)
    assert not watermarks_of(points, scatter(points)).any()


def test_where_a_moving_camera_sees_a_place_stand_still_is_no_watermark():
    """Around the fixed point of a zoom matches stay where they were, but those beside them move a
    little.
    """
    points = points_in(5, 5, 634, 474, 600)
    zoomed = (points - [320, 240]) * 1.06 + [320, 240]
    assert not watermarks_of(points, scatter(zoomed)).any()


# Real photographs

NAMES = ("Herz-Jesus-P25_0005.jpg", "Herz-Jesus-P25_0007.jpg", "entry-P10_0003.jpg")


@pytest.fixture(scope="module")
def place():
    """A matcher of the photographs of a place."""
    return Matcher.load(device="cpu", max_keypoints=3000, resize=768, scene=True)


@pytest.fixture(scope="module")
def strecha(shared_data):
    folder = shared_data / "poses/strecha"
    return folder, bench.read_cameras(folder / "cameras_gt.txt")


def test_a_scene_has_settings_of_its_own():
    usual, scene = (Matcher.load(device="cpu", scene=each) for each in (False, True))
    assert (usual.max_keypoints, usual.network_keypoints, usual.resize) == (4096, 1024, 1024)
    assert (scene.max_keypoints, scene.network_keypoints, scene.resize) == (8192, 512, 1600)
    assert usual.refine and not scene.refine
    assert scene.rules.accept == 0.9  # a false pair ruins a model, a refused one costs little


def test_two_photographs_of_a_place_are_accepted_and_two_of_different_places_are_not(
    strecha, place
):
    folder, cameras = strecha
    one, near, other = (place.extract(folder / name) for name in NAMES)
    found = place.match(one, near)
    rejected, again = place.match_batch([(one, other), (one, near)])
    np.testing.assert_array_equal(again.matches, found.matches)
    assert rejected.pair_score == verification.SKIPPED and not rejected.accepted
    assert len(rejected.matches) == 0
    assert found.accepted and found.pair_score > 0.95
    assert len(found.matches) > 850  # 917; the network alone finds 474
    pair = [cameras[name] for name in NAMES[:2]]
    F = bench.compute_fundamental(*pair)
    assert (two_view.epipolar_distances(F, found.points0, found.points1) < 4).mean() > 0.95
    pose = found.relative_pose(*(camera.K for camera in pair))
    turn = pose.R @ pair[0].R @ pair[1].R.T
    assert np.degrees(np.arccos((np.trace(turn) - 1) / 2)) < 1
    kept = list(place.match_many(one, [near, other], accepted_only=True))
    assert [len(each.matches) for each in kept] == [len(found.matches)]


def draw_date(image, number):
    """A black bar at the top with the date and time of photograph `number`."""
    image = cv2.resize(image, (640, 480))
    image[:32] = 0
    words = f"2024-03-{11 + number:02d} 14:{22 + number}:07 CAM 03"
    return cv2.putText(image, words, (8, 24), cv2.FONT_HERSHEY_SIMPLEX, 0.7, 255, 2, cv2.LINE_AA)


def test_unrelated_photographs_with_one_date_bar_are_not_accepted(shared_data, place):
    paths = sorted((shared_data / "coco/val").glob("*.jpg"))[3:7]
    images = [cv2.imread(str(path), cv2.IMREAD_GRAYSCALE) for path in paths]
    photos = [place.extract(draw_date(image, number)) for number, image in enumerate(images)]
    for one, other in itertools.combinations(photos, 2):
        found = place.match(one, other)
        assert not found.accepted and found.pair_score < 0.2
    assert place.match(photos[0], photos[0]).accepted


def test_a_folder_lists_its_pairs_and_the_database_holds_the_accepted_alone(strecha, tmp_path):
    pycolmap = pytest.importorskip("pycolmap")
    (tmp_path / "photos").mkdir()
    for name in NAMES:
        (tmp_path / "photos" / name).symlink_to(strecha[0] / name)
    found = tmp_path / "found"
    words = ["folder", str(tmp_path / "photos"), "--out-dir", str(found)]
    words += ["--max-keypoints", "2000", "--resize", "768", "--device", "cpu"]
    tables, databases = [], []
    for name in ("first.db", "resumed.db"):
        assert errors.run_main(cli.main, [*words, "--colmap", str(tmp_path / name)]) == 0
        tables.append((found / "pairs.csv").read_text())
        with pycolmap.Database.open(str(tmp_path / name)) as database:
            databases.append([database.read_keypoints(number) for number in (1, 2, 3)])
        min(found.glob("*_matches.npz")).unlink()
    assert tables[0] == tables[1] and all(map(np.array_equal, *databases))
    rows = list(csv.DictReader(tables[0].splitlines()))
    assert [row["accepted"] for row in rows] == ["1", "0", "0"]
    assert float(rows[0]["pair_score"]) > 0.95 and rows[0]["reason"] == ""
    for row in rows[1:]:
        skipped = "skipped: too few classical matches"
        assert row["reason"] == ("not accepted" if row["pair_score"] else skipped)
    with pycolmap.Database.open(str(tmp_path / "resumed.db")) as database:
        assert len(database.read_all_images()) == 3
        assert database.num_verified_image_pairs() == 1
        # a few do not fit any more where the pixels agree
        assert 0.9 < database.num_matches() / int(rows[0]["matches"]) <= 1


def test_other_keypoints_are_matched_where_the_matches_around_them_say():
    rng = np.random.default_rng(0)
    points = rng.uniform(50, 450, (120, 2))
    A = np.array([[0.8, -0.6], [0.6, 0.8]])
    one, other = (records_at(np.zeros((120, 2))) for _ in range(2))
    for records, places in ((one, points), (other, points @ A.T + [300, 20])):
        records["x"], records["y"] = places.T
    other["x"][100:110] += 40  # wrong
    index = np.arange(120)
    indices = np.stack([index[:60]] * 2, axis=1)
    # the network does not believe the match of 70 with 95
    found = Matches(np.append(indices, [[70, 95]], axis=0), np.float32([0.9] * 60 + [0.1]))
    selected = np.arange(80), np.arange(80)  # the network got 60 to 79, and did not match them
    pairs = np.stack([index, index], axis=1)
    pairs[119] = 119, 3  # image 1's keypoint is matched
    mutual = Matches(pairs, np.full(120, 0.01, np.float32))
    positions = sift.positions(one), sift.positions(other)
    extended = add_guided_matches(found, mutual, selected, positions, 0.3)
    right = (index < 60) | ((index >= 80) & (index < 100)) | ((index >= 110) & (index < 119))
    assert extended.indices.tolist() == [[i, i] for i in index[right]]
    np.testing.assert_allclose(extended.scores, 0.9, rtol=1e-6)
    few = add_guided_matches(found.only(slice(7)), mutual, selected, positions, 0.3)
    assert len(few) == 7  # eight matches are needed
