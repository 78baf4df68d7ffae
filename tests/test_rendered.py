"""Rendered scenes: their depths agree with their cameras; the limits chosen on them."""

from __future__ import annotations

import csv
import json

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_scenes import write_image_set, write_model

from pipeline import errors
from pipeline.evaluate import __main__ as evaluate
from pipeline.evaluate import acceptance, poses, rendered
from pipeline.evaluate.acceptance import STRICT, Scores
from pipeline.evaluate.inputs import Pose
from pipeline.evaluate.matchers import scene_answer
from pipeline.image_sets import sources
from pipeline.parameters.schema import Photometric
from pipeline.views import places
from superglue_sift import classical, scenes, sift
from superglue_sift.batch import Pair
from superglue_sift.matcher import PairMatches
from superglue_sift.weights import load_model_file, shipped_weights

K = np.array([[500.0, 0, 159.5], [0, 500, 119.5], [0, 0, 1]])
SIZE = (320, 240)
AT_ORIGIN = places.Camera(K, np.eye(3), np.zeros(3))
CLEAR = Photometric(brightness=0.0, contrast=0.0, gamma=0.0, blur=0.0, noise=0.0, jpeg=0.0)


def wall(depth: float, texture: np.ndarray, half: float = 3.0) -> places.Plane:
    """A square that faces the camera at the origin."""
    edge = 2 * half
    corner = np.array([-half, -half, depth])
    return places.Plane(corner, np.array([edge, 0, 0.0]), np.array([0.0, edge, 0]), texture)


def test_a_wall_at_five_metres_moves_by_fifty_pixels():
    """f = 500 px, 0.5 m to the right: 500 * 0.5 / 5."""
    plain = [wall(5.0, np.full((60, 60), 99, np.uint8))]
    right = AT_ORIGIN._replace(t=np.array([-0.5, 0, 0]))
    first, second = (places.photograph(plain, camera, SIZE) for camera in (AT_ORIGIN, right))
    np.testing.assert_allclose(first.depth, 5.0, rtol=1e-5)
    assert (first.gray == 99).all()
    point = places.backprojected(np.array([[159.5, 119.5], [259.5, 19.5]]), np.array([5.0, 5.0]), AT_ORIGIN)
    np.testing.assert_allclose(point, [[0, 0, 5], [1, -1, 5]], atol=1e-12)
    np.testing.assert_allclose(places.projected(point, right)[0], [[109.5, 119.5], [209.5, 19.5]])
    # 50 of 320 columns leave the picture, as far as every sixth pixel says
    assert places.overlap(first, AT_ORIGIN, second, right) == pytest.approx(270 / 320, abs=0.02)


def test_the_nearer_surface_is_shown_and_what_it_hides_is_not_seen_again():
    far, near = wall(8.0, np.full((60, 60), 50, np.uint8), 6.0), wall(4.0, np.full((60, 60), 200, np.uint8), 0.5)
    for planes in ([far, near], [near, far]):
        picture = places.photograph(planes, AT_ORIGIN, SIZE)
        assert picture.gray[120, 160] == 200 and picture.depth[120, 160] == pytest.approx(4)
        assert picture.gray[20, 20] == 50 and picture.depth[20, 20] == pytest.approx(8)
    # a square of 1 m at 4 m, of 125 x 125 pixels
    assert (picture.depth < 5).sum() == pytest.approx(125 * 125, rel=0.02)
    hidden = (picture.depth < 5).mean()
    alone = places.photograph([far], AT_ORIGIN, SIZE)
    assert places.overlap(alone, AT_ORIGIN, picture, AT_ORIGIN) == pytest.approx(1 - hidden, abs=0.01)


def test_nothing_behind_the_camera_is_shown():
    picture = places.photograph([wall(-5.0, np.zeros((60, 60), np.uint8))], AT_ORIGIN, SIZE)
    assert (picture.gray == places.BACKGROUND).all() and np.isinf(picture.depth).all()


def camera_at(centre, target=(0.0, 0.0, 6.0), roll: float = 0.0) -> places.Camera:
    return places.looking_at(K, np.array(centre), np.array(target), roll)


metres = st.floats(-1.5, 1.5)


@given(metres, metres, st.floats(-2, 1), st.floats(-0.5, 0.5))
def test_a_camera_sees_its_target_in_the_middle(x, y, z, roll):
    camera = camera_at((x, y, z), roll=roll)
    np.testing.assert_allclose(camera.R @ camera.R.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(camera.R) == pytest.approx(1)
    point, depth = places.projected(np.array([[0.0, 0.0, 6.0]]), camera)
    np.testing.assert_allclose(point, [[159.5, 119.5]], atol=1e-9)
    assert depth[0] == pytest.approx(np.linalg.norm([x, y, z - 6]))


@given(metres, metres, st.floats(-2, 1), st.floats(-0.5, 0.5))
def test_depths_are_those_of_the_plane_that_the_ray_meets(x, y, z, roll):
    camera = camera_at((x, y, z), roll=roll)
    picture = places.photograph([wall(6.0, np.zeros((4, 4), np.uint8), 9.0)], camera, SIZE)
    v, u = (grid.ravel() for grid in np.mgrid[0:240:40, 0:320:40])
    points = places.backprojected(np.stack([u, v], axis=1).astype(float), picture.depth[v, u].astype(float), camera)
    np.testing.assert_allclose(points[:, 2], 6.0, rtol=1e-5)


@pytest.fixture(scope="module")
def textures(tmp_path_factory) -> rendered.RenderedScenes:
    """Scenes of photographs that ship inside scikit-image, without changes of light."""
    from skimage import data

    names = ("astronaut", "brick", "camera", "chelsea", "clock", "coffee", "coins", "gravel", "page", "rocket")
    folder = tmp_path_factory.mktemp("textures")
    write_image_set(folder, {f"{name}.png": getattr(data, name)() for name in names}, "val")
    images = sources.open_manifest(folder)
    return rendered.RenderedScenes(images, images.entries("val"), 2, CLEAR, seed=3)


def test_pixels_of_a_pair_agree_where_depths_say_they_show_the_same(textures, photo):
    """A picture warped from the other one by depth and cameras equals it."""
    plane = wall(6.0, cv2.resize(photo, (1200, 1200)), 3.0)
    cameras = [camera_at((-0.6, 0.2, 0.0)), camera_at((0.7, -0.1, 0.4), roll=0.1)]
    first, second = (places.photograph([plane], camera, SIZE) for camera in cameras)
    v, u = (grid.ravel() for grid in np.mgrid[0:240, 0:320])
    points = places.backprojected(np.stack([u, v], axis=1).astype(float), first.depth[v, u].astype(float), cameras[0])
    found = places.projected(points, cameras[1])[0].astype(np.float32).reshape(240, 320, 2)
    made = cv2.remap(second.gray, found[..., 0], found[..., 1], cv2.INTER_LINEAR)
    inside = ((found > 1) & (found < np.array(SIZE) - 2)).all(axis=-1)
    assert inside.mean() > 0.5
    assert np.abs(made.astype(int) - first.gray)[inside].mean() < 4
    moved = np.roll(made, 2, axis=1)
    assert np.abs(moved.astype(int) - first.gray)[inside].mean() > 8


@pytest.mark.parametrize("number", [0, 1])
def test_a_scene_has_pairs_that_overlap_and_pairs_of_opposite_sides(textures, monkeypatch, number):
    monkeypatch.setattr(rendered, "SIZE", (480, 360))
    scene = textures.load(number)
    near = [view for view in scene.pairs if isinstance(view.truth, Pose)]
    apart = [view for view in scene.pairs if not isinstance(view.truth, Pose)]
    assert 3 <= len(near) <= rendered.PAIRS == len(apart) and all(np.isnan(view.truth).all() for view in apart)
    sides = [{view.first // rendered.PICTURES, view.second // rendered.PICTURES} for view in scene.pairs]
    assert all(len(own) == 1 for own in sides[: len(near)]) and all(len(own) == 2 for own in sides[len(near) :])
    for view in near[-2:]:  # what the classical matcher finds lies where the cameras say
        records = [sift.extract(scene.images[each], 1000) for each in (view.first, view.second)]
        matches = classical.ratio_matches(*(classical.described(own) for own in records))[0]
        points = [sift.positions(own)[matches[:, side]].astype(float) for side, own in enumerate(records)]
        back = Pose(view.truth.K1, view.truth.K0, np.linalg.inv(view.truth.T_0to1))
        right, wrong = (poses.correct_matches(*points, truth).mean() for truth in (view.truth, back))
        assert len(matches) > 30 and right > 0.8 and wrong < 0.6 * right


def test_a_scene_is_the_same_each_time(textures, monkeypatch):
    monkeypatch.setattr(rendered, "SIZE", (192, 144))
    one, other = textures.load(0), textures.load(0)
    assert all((a == b).all() for a, b in zip(one.images, other.images))
    assert [view.name for view in one.pairs] == [view.name for view in other.pairs]
    assert not (one.images[0] == textures.load(1).images[0]).all()


def test_opposite_sides_hold_no_common_photograph(textures):
    from pipeline.views import buildings

    left, right = (buildings._half(np.arange(12).reshape(1, 12), which) for which in (0, 1))
    assert set(left[0]) | set(right[0]) == set(range(12)) and not set(left[0]) & set(right[0])


# The limits


def made(near, apart, at: int = 6):
    """Pairs with these scores at one strict threshold; at lower ones 30 more of all, at higher ones none."""
    values = [[own + 30] * at + [own] + [0] * (len(STRICT) - at - 1) for own in (*near, *apart)]
    return [Scores(place < len(near), own) for place, own in enumerate(values)]


def test_limits_stand_between_what_overlaps_and_what_does_not():
    """1.5 times 8; at thresholds below it would be 1.5 times 38, which no pair reaches; above it all score 0."""
    found = acceptance.choose(made([20, 30, 45, 60], [0, 3, 5, 8]))
    assert found == (0.8, 12, 1.0, 0.0)


def test_eight_matches_always_agree_so_fewer_say_nothing():
    assert acceptance.choose(made([40, 50], [0, 0])).accept == 11  # 1.5 times 7


@given(st.lists(st.integers(0, 80), min_size=1, max_size=8), st.lists(st.integers(0, 80), min_size=1, max_size=8))
def test_no_pair_that_shares_nothing_is_accepted_and_order_does_not_matter(near, apart):
    found = acceptance.choose(made(near, apart))
    assert found.false == 0.0 and 0.0 <= found.accepted <= 1.0 and found.strict in STRICT
    assert found == acceptance.choose(made(near, apart)[::-1])
    higher = acceptance.choose(made(near, [score + 8 for score in apart]))
    assert higher.strict != found.strict or higher.accept >= found.accept


def test_a_curve_holds_the_fractions_of_all_limits():
    pairs = made([20, 30], [8, 12])
    line = next(line for line in acceptance.curve(pairs) if (line["strict"], line["accept"]) == (0.8, 12))
    assert line == {"strict": 0.8, "accept": 12, "accepted": 1.0, "false": 0.5}
    with pytest.raises(ValueError, match="pairs that share nothing"):
        acceptance.choose(pairs[:2])


def made_pair():
    """40 points in depth before two cameras, 10 matches of which are wrong."""
    rng = np.random.default_rng(0)
    points = rng.uniform([-1, -1, 4], [1, 1, 9], (50, 3))
    records = []
    for camera in (AT_ORIGIN, camera_at((0.8, 0.1, 0.0))):
        own = np.zeros(50, sift.ORIENTED)
        own["x"], own["y"] = places.projected(points, camera)[0].T
        records.append(own)
    matches0 = np.arange(50)
    matches0[40:] = np.roll(matches0[40:], 3)
    scores = np.where(np.arange(50) < 20, 0.9, 0.6).astype(np.float32)
    return Pair(*records, SIZE, SIZE), PairMatches(matches0, scores)


def test_the_row_of_scenes_holds_what_agrees_in_an_accepted_pair():
    pair, answer = made_pair()
    found = scene_answer(pair, answer, 0.5, scenes.Rules(strict=0.8, accept=20))
    assert (found.matches0[:40] == np.arange(40)).all() and (found.matches0[40:] >= 0).sum() <= 2
    np.testing.assert_array_equal(found.scores0[:40], answer.scores0[:40])
    refused = scene_answer(pair, answer, 0.5, scenes.Rules(strict=0.8, accept=21))
    assert (refused.matches0 == -1).all() and not refused.scores0.any()


@pytest.fixture
def work(tmp_path, photo, root):
    write_model(tmp_path / "model.safetensors", about={"strict_threshold": 0.6, "accept_pairs": 9})
    write_image_set(tmp_path / "images", {"a.png": photo, "b.png": photo[:, ::-1]}, "test")
    (tmp_path / "params.yaml").write_text(
        (root / "presets" / "sample.yaml").read_text().replace("image: 20", "image: 1")
    )
    return tmp_path


def run(folder, *extra) -> int:
    words = ["--model", folder / "model.safetensors", "--images", folder / "images", "--out", folder / "out"]
    words += ["--params", folder / "params.yaml", "--device", "cpu", *extra]
    return errors.run(evaluate.main, [str(word) for word in words])


@pytest.mark.slow
def test_evaluate_chooses_limits_on_rendered_scenes(work, capsys, monkeypatch):
    assert run(work, "--scenes", "1") == 0
    assert "photographs are too few to choose limits on, 16 are needed" in capsys.readouterr().out
    assert "superglue.accept_pairs" not in json.loads((work / "out" / "metrics.json").read_text())
    monkeypatch.setattr(rendered, "ENOUGH_IMAGES", 1)
    assert run(work, "--scenes", "1") == 0
    metrics = json.loads((work / "out" / "metrics.json").read_text())
    assert metrics["superglue.strict_threshold"] in STRICT and metrics["superglue.accept_pairs"] >= 11
    assert metrics["superglue.scene_pairs"] <= metrics["superglue.scene_pairs_apart"] == rendered.PAIRS
    with (work / "out" / "curves" / "acceptance.csv").open() as file:
        lines = [{name: float(value) for name, value in line.items()} for line in csv.DictReader(file)]
    assert len(lines) == len(STRICT) * len(acceptance.ACCEPT)
    assert lines[0] == {"strict": 0.5, "accept": 8, "accepted": lines[0]["accepted"], "false": lines[0]["false"]}
    assert metrics["superglue.scene_false"] == 0 <= metrics["superglue.scene_accepted"] <= 1
    assert "pairs of a scene are accepted by" in capsys.readouterr().out
    assert "pairs of a scene are accepted by" in (work / "out" / "index.html").read_text()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--scenes", "2", "--pairs", "x"], "--scenes needs held-out images"),
        (["--scenes", "2", "--paper", "4"], "--scenes: of the plain evaluation"),
        (["--scenes", "-1"], "--scenes -1: must be 0 or more"),
    ],
)
def test_wrong_requests_are_one_line(work, capsys, words, line):
    assert run(work, *words) == 2
    assert line in capsys.readouterr().err


def test_textures_need_a_photograph_that_can_be_read(tmp_path):
    write_image_set(tmp_path, {}, "val", broken=["broken.jpg"])
    images = sources.open_manifest(tmp_path)
    with pytest.raises(errors.RequestError, match="no photograph could be read"):
        rendered.RenderedScenes(images, images.entries("val"), 1, CLEAR, 0)


def test_the_shipped_weights_state_limits_that_rendered_scenes_chose():
    info = load_model_file(shipped_weights())[1]
    assert info["strict_threshold"] in STRICT and info["accept_pairs"] in acceptance.ACCEPT
    assert scenes.Rules.of_model(info).accept == info["accept_pairs"]
