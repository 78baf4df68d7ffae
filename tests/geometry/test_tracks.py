"""One position for each keypoint of several photographs."""

import cv2
import numpy as np
import pytest
from made_matches import make_track_pair
from made_scenes import IDENTITY, SHIFT, TURN

from superglue_sift import errors
from superglue_sift.apps import cli
from superglue_sift.geometry import two_view
from superglue_sift.geometry.tracks import refine_tracks

MATCHES = np.stack([np.arange(80)] * 2, 1)


@pytest.mark.parametrize("deviation_px", [0.05, 0.0])
@pytest.mark.parametrize("factors", [(3, 3), (1, 3), (4, 2)])
def test_positions_do_not_depend_on_the_sizes_of_the_files(factors, deviation_px):
    keypoints, pair = make_track_pair((1, 1), deviation_px)
    expected = refine_tracks(keypoints, [pair], (1, 1))
    file_keypoints, file_pair = make_track_pair(factors, deviation_px)
    positions = refine_tracks(file_keypoints, [file_pair], factors)
    for xy, expected_xy, factor in zip(positions, expected, factors):
        np.testing.assert_allclose(xy / factor, expected_xy, atol=5e-4)


def test_both_keypoints_move_until_refined_matches_agree():
    keypoints, pair = make_track_pair((1, 1), 0.05)
    positions0, positions1 = refine_tracks(keypoints, [pair], (1, 1))

    def measure(points0, points1):
        return np.linalg.norm(two_view.transform(points0, TURN) - points1, axis=1).mean()

    assert measure(*keypoints) > 0.7 and measure(positions0, positions1) < 0.05
    # SIFT's scatter is equal in both images, so both move by about half of the disagreement.
    moves = [
        np.linalg.norm(xy - old, axis=1) for xy, old in zip((positions0, positions1), keypoints)
    ]
    assert 0.8 < moves[0].mean() / moves[1].mean() < 1.25


def test_keypoints_without_a_refined_match_stay():
    keypoints = np.random.default_rng(0).uniform(0, 300, (80, 2)).astype(np.float32)
    deviations = np.where(np.arange(80) < 5, 0.1, np.nan)  # too few
    pair = 0, 1, MATCHES, keypoints + 1, deviations
    for positions in refine_tracks([keypoints, keypoints], [pair], (1, 1)):
        np.testing.assert_array_equal(positions, keypoints)


def test_keypoints_of_a_database_are_where_the_pixels_agree(photo, tmp_path, monkeypatch):
    """Matched keypoints of three views fit the true homography better than SIFT's positions do."""
    pycolmap = pytest.importorskip("pycolmap")
    (tmp_path / "photos").mkdir()
    for name, H in (("0.png", IDENTITY), ("1.png", TURN), ("2.png", SHIFT)):
        view = cv2.warpPerspective(photo, H, photo.shape[::-1], flags=cv2.INTER_CUBIC)
        cv2.imwrite(str(tmp_path / "photos" / name), view)
    monkeypatch.chdir(tmp_path)
    words = "folder photos --out-dir out --no-scene --max-keypoints 300 --device cpu --colmap"
    errors_px = []
    for database_words in ("refined.db", "sift.db --no-refine"):
        assert errors.run_main(cli.main, f"{words} {database_words}".split()) == 0
        with pycolmap.Database.open(database_words.split()[0]) as database:
            ids = [database.read_image_with_name(name).image_id for name in ("0.png", "1.png")]
            points0, points1 = (database.read_keypoints(number)[:, :2] - 0.5 for number in ids)
            index0, index1 = database.read_matches(*ids).T
        offsets = two_view.transform(points0[index0], TURN) - points1[index1]
        errors_px.append(np.median(np.linalg.norm(offsets, axis=1)))
    assert errors_px[0] < 0.6 * errors_px[1]
