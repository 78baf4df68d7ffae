"""One position for each keypoint of several photographs."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
from made_scenes import IDENTITY, SHIFT, TURN

from superglue_sift import errors
from superglue_sift.apps import cli
from superglue_sift.geometry import two_view
from superglue_sift.geometry.tracks import refine_tracks
from superglue_sift.match_result import MatchResult
from superglue_sift.matches import Matches


def test_positions_of_a_track_do_not_depend_on_the_size_of_its_photographs():
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 300, (80, 2))
    places = [p + rng.normal(0, 0.5, p.shape) for p in (points, two_view.transform(points, SHIFT))]
    matches = np.stack([np.arange(80)] * 2, 1)
    found = []
    for unit in (1, 3):
        sides = [(unit * place).astype(np.float32) for place in places]
        size = (1600 * unit, 1200 * unit)
        result = MatchResult(*sides, Matches(matches, np.ones(80, np.float32)), size, size)
        refined1 = sides[0] + unit * SHIFT[:2, 2].astype(np.float32)
        deviations = np.full(80, 0.05 * unit, np.float32)
        result = replace(result, refined0=sides[0], refined1=refined1, deviations=deviations)
        found.append([side / unit for side in refine_tracks(sides, [(0, 1, result)])])
    np.testing.assert_allclose(found[0], found[1], atol=2e-3)
    assert np.abs(found[0][1] - found[0][0] - SHIFT[:2, 2]).mean() < 0.05  # 0.56 before


def test_keypoints_of_a_database_are_where_the_pixels_agree(photo, tmp_path, monkeypatch):
    """Matched keypoints of three views fit the true homography better than SIFT's places do."""
    pycolmap = pytest.importorskip("pycolmap")
    (tmp_path / "photos").mkdir()
    for name, H in (("0.png", IDENTITY), ("1.png", TURN), ("2.png", SHIFT)):
        moved = cv2.warpPerspective(photo, H, photo.shape[::-1], flags=cv2.INTER_CUBIC)
        cv2.imwrite(str(tmp_path / "photos" / name), moved)
    monkeypatch.chdir(tmp_path)
    words = "folder photos --out-dir found --no-scene --max-keypoints 300 --device cpu --colmap"
    errors_px = []
    for more in ("exact.db", "sift.db --no-refine"):
        assert errors.run_main(cli.main, f"{words} {more}".split()) == 0
        with pycolmap.Database.open(more.split()[0]) as database:
            key = {image.name: image.image_id for image in database.read_all_images()}
            ids = (key["0.png"], key["1.png"])
            first, second = (database.read_keypoints(each)[:, :2] - 0.5 for each in ids)
            index0, index1 = database.read_matches(*ids).T
        apart = two_view.transform(first[index0], TURN) - second[index1]
        errors_px.append(np.median(np.linalg.norm(apart, axis=1)))
    assert errors_px[0] < 0.6 * errors_px[1]
