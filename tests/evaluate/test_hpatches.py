"""Reading folders in HPatches layout: what is accepted, what is refused and in which words."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from made_scenes import IDENTITY, SHIFT, TURN, write_sequence

from pipeline.errors import RequestError
from pipeline.evaluate import hpatches
from pipeline.evaluate.hpatches import HPatchesPairs
from superglue_sift.geometry.two_view import transform


@pytest.fixture
def small(photo):
    return np.ascontiguousarray(photo[:240, :320])


def test_pairs_of_every_sequence_sorted_by_name(tmp_path, small):
    write_sequence(tmp_path / "b", small, {2: SHIFT})
    write_sequence(tmp_path / "a", small, {2: IDENTITY, 10: TURN})
    source = HPatchesPairs(tmp_path, short_side=0)
    scenes = [source.load(index) for index in range(len(source))]
    assert [pair.name for scene in scenes for pair in scene.pairs] == ["a/1-2", "a/1-10", "b/1-2"]
    assert [name for name, _ in source.scenes] == ["a", "b"]
    np.testing.assert_allclose(scenes[0].pairs[1].truth, TURN / TURN[2, 2], rtol=1e-6)
    assert scenes[0].images[scenes[0].pairs[1].second].shape == small.shape


def test_a_sequence_itself_and_other_formats_are_read(tmp_path, small):
    folder = write_sequence(tmp_path / "only", small, {2: SHIFT})
    (folder / "1.png").unlink()
    cv2.imwrite(str(folder / "1.ppm"), cv2.cvtColor(small, cv2.COLOR_GRAY2BGR))
    (folder / "H_1_2").rename(folder / "H_1_2.txt")
    scene = HPatchesPairs(folder, short_side=0).load(0)
    assert scene.name == "only" and len(scene.pairs) == 1


def test_resizing_takes_the_homography_along(tmp_path, photo):
    write_sequence(tmp_path / "a", photo, {2: TURN})
    scene = HPatchesPairs(tmp_path, short_side=200).load(0)
    assert scene.images[0].shape == (200, 300)
    # outer edges stay together when an image is resized, so a point moves by (x + 0.5) * scale -
    # 0.5
    points = np.array([[10.0, 20.0], [500.0, 300.0], [0.0, 0.0]])
    small = (points + 0.5) * 0.5 - 0.5
    expected = (transform(points, TURN) + 0.5) * 0.5 - 0.5
    np.testing.assert_allclose(transform(small, scene.pairs[0].truth), expected, atol=1e-6)


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("H_1_2", "1 0 0\n0 1 0\n", "expected 3 rows of 3 numbers"),
        ("H_1_2", "1 0 zero\n0 1 0\n0 0 1\n", "not a homography"),
        ("H_1_2", "1 0 0\n2 0 0\n0 0 1\n", "cannot be inverted"),
        ("H_1_2", "1 0 nan\n0 1 0\n0 0 1\n", "cannot be inverted"),
        ("H_1_7", "1 0 0\n0 1 0\n0 0 1\n", "no image 7.png"),
    ],
)
def test_wrong_homographies_are_named(tmp_path, small, name, text, words):
    (write_sequence(tmp_path / "a", small, {2: SHIFT}) / name).write_text(text)
    with pytest.raises(RequestError, match=words) as error:
        HPatchesPairs(tmp_path)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_missing_parts_are_named(tmp_path, small):
    folder = write_sequence(tmp_path / "a", small, {2: SHIFT, 3: TURN})
    cv2.imwrite(str(folder / "2.jpg"), small)
    with pytest.raises(RequestError, match="exists twice"):
        HPatchesPairs(tmp_path)
    (folder / "2.jpg").unlink()
    (folder / "H_1_3").unlink()
    with pytest.raises(RequestError, match=r"3\.png: no homography H_1_3"):
        HPatchesPairs(tmp_path)
    (folder / "3.png").unlink()
    (folder / "1.png").unlink()
    with pytest.raises(RequestError, match="no image 1"):
        HPatchesPairs(tmp_path)


def test_folders_without_sequences(tmp_path, small):
    with pytest.raises(RequestError, match="no such folder"):
        HPatchesPairs(tmp_path / "nowhere")
    with pytest.raises(RequestError, match="no sequence found"):
        HPatchesPairs(tmp_path)
    (tmp_path / "lonely").mkdir()
    cv2.imwrite(str(tmp_path / "lonely/1.png"), small)
    with pytest.raises(RequestError, match="only image 1"):
        HPatchesPairs(tmp_path)


@pytest.mark.parametrize("size, side", [((1, 500), 480), ((40, 16_001), 0)])
def test_an_image_that_would_be_too_long_is_named(size, side):
    with pytest.raises(RequestError, match=r"strip\.png: .* at most 16000 are possible"):
        hpatches.resize_short_side(np.zeros(size, np.uint8), side, Path("strip.png"))
