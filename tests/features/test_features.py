"""Images in memory, masks, warnings, features of other programs, features that are kept on disk."""

import io
import re
from dataclasses import replace

import cv2
import numpy as np
import pytest
from PIL import Image

from superglue_sift import Features, Matcher
from superglue_sift.apps.store import FeatureStore, PhotoFile
from superglue_sift.errors import RequestError
from superglue_sift.features import sift
from superglue_sift.features.extraction import extract_features, to_gray
from superglue_sift.features.images import ORIENTATION


@pytest.fixture(scope="module")
def matcher():
    return Matcher.load(device="cpu", max_keypoints=200)


@pytest.fixture
def half(photo):
    """A mask that leaves out the left half of `photo`, 600 px wide."""
    mask = np.full(photo.shape, 255, np.uint8)
    mask[:, :300] = 0
    return mask


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF", "BMP"])
def test_a_pil_image_that_cannot_be_read_is_one_line(photo, kind, tmp_path):
    path = tmp_path / "a"
    Image.fromarray(photo).save(path, kind)
    data = path.read_bytes()
    with pytest.raises(RequestError, match="cannot be read"):
        to_gray(Image.open(io.BytesIO(data[: int(0.9 * len(data))])))
    closed = Image.open(path)
    closed.close()
    with pytest.raises(RequestError, match="cannot be read"):
        to_gray(closed)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(RequestError, match=f"^{re.escape(str(path))}: cannot be read"):
        to_gray(Image.open(path))


def test_pil_images_of_every_mode_are_gray(photo):
    gray = Image.fromarray(photo)
    for mode in ("L", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LA"):
        pixels, mask = to_gray(gray.convert(mode))
        # Conversions to colors round by a few levels.
        assert np.abs(pixels.astype(int) - photo).max() <= 4, mode
        assert mask is None
    for mode in ("I", "F"):  # More than 8 bits are scaled
        assert np.corrcoef(to_gray(gray.convert(mode))[0].ravel(), photo.ravel())[0, 1] > 0.99
    for straight, multiplied in (("LA", "La"), ("RGBA", "RGBa")):
        np.testing.assert_array_equal(to_gray(gray.convert(straight).convert(multiplied))[0], photo)
    with pytest.raises(RequestError, match="has no pixels"):
        to_gray(Image.new("RGB", (0, 0)))


def sift_of(positions, size=(60, 40), scale=2.0, oris=0.0):
    """Features of keypoints at positions (n, 2), with the same descriptor."""
    positions = np.array(positions, float)
    one = np.ones(len(positions))
    return Features.of(positions, scale * one, oris * one, one, np.full((len(one), 128), 9), size)


def test_positions_of_other_programs_lie_in_the_image():
    corners = [(-0.5, -0.5), (59.5, -0.5), (59.5, 39.5), (0, 39.5)]
    np.testing.assert_array_equal(sift_of(corners).keypoints, np.float32(corners))
    for x, y in [(1e9, 3), (3, -1e9), (-2, 3), (3, 42), (62, 3)]:
        with pytest.raises(RequestError, match="keypoints: 1 lie outside of the image of 60x40 px"):
            sift_of([(1, 1), (x, y)])
    # COLMAP's coordinates start at the corner of the first pixel.
    colmap = np.array([[0.0, 0.0, 2.0, 0.0], [60.0, 40.0, 2.0, 0.0]])
    descriptors = np.full((2, 128), 45, np.uint8)
    expected = [(-0.5, -0.5), (59.5, 39.5)]
    found = Features.of_colmap(colmap, descriptors, (60, 40))
    np.testing.assert_array_equal(found.keypoints, np.float32(expected))
    with pytest.raises(RequestError, match="outside of the image of 40x60 px"):
        Features.of_colmap(colmap, descriptors, (40, 60))


def test_resizing_keeps_the_edges_of_the_image_together():
    """A pixel centre is at a whole number, so the left edge of an image is at -0.5."""
    features = sift_of([(-0.5, -0.5), (0, 0), (59, 39), (59.5, 39.5)], scale=4.0)
    twice = features.resize((120, 80))
    corners = [(-0.5, -0.5), (0.5, 0.5), (118.5, 78.5), (119.5, 79.5)]
    np.testing.assert_array_equal(twice.keypoints, np.float32(corners))
    assert twice.image_size == (120, 80) and set(twice.scales) == {8.0}
    np.testing.assert_array_equal(twice.resize((60, 40)).keypoints, features.keypoints)
    # Each side has its own factor, and scales have that of the longer side.
    wide = features.resize((120, 40))
    np.testing.assert_array_equal(wide.keypoints[:, 0], twice.keypoints[:, 0])
    np.testing.assert_array_equal(wide.keypoints[:, 1], features.keypoints[:, 1])
    assert set(wide.scales) == {8.0}
    assert features.resize((60, 40)) is features and set(features.scales) == {4.0}


def test_a_keypoint_is_given_once_but_may_have_several_angles():
    with pytest.raises(RequestError, match="keypoints: 4 of them have the position, scale and"):
        sift_of([(3, 3)] * 5)
    assert len(sift_of([(3, 3)] * 5, oris=np.arange(5.0)).keypoints) == 5


def test_the_keypoints_of_opencv_are_taken_as_they_are(photo):
    points, descriptors = cv2.SIFT_create().detectAndCompute(photo, None)
    columns = zip(*((point.pt, point.size, point.angle, point.response) for point in points))
    found = Features.of(*map(np.array, columns), descriptors, photo.shape[::-1])
    assert len(found.keypoints) == len(points)
    # Some of its points have several orientations.
    assert len(np.unique(found.keypoints, axis=0)) < len(points)


def test_a_mask_of_an_image_is_an_array_or_a_file_and_transparency_is_one(
    matcher, photo, half, tmp_path
):
    cv2.imwrite(str(tmp_path / "mask.png"), half)
    cv2.imwrite(str(tmp_path / "alpha.png"), np.dstack([photo] * 3 + [half]))
    found = [
        matcher.extract(photo, mask=half > 0),
        matcher.extract(photo, tmp_path / "mask.png"),
        matcher.extract(tmp_path / "alpha.png"),
        matcher.extract(Image.open(tmp_path / "alpha.png")),
    ]
    assert all(len(each.keypoints) == 200 for each in found)
    assert all(each.keypoints[:, 0].min() > 298 for each in found)
    upper = half.copy()
    upper[200:] = 0
    both = matcher.extract(tmp_path / "alpha.png", mask=upper).keypoints
    assert len(both) > 50 and both[:, 0].min() > 298 and both[:, 1].max() < 201
    with pytest.raises(RequestError, match=r"mask of shape \(9, 9\): the image has \(400, 600\)"):
        matcher.extract(photo, mask=np.ones((9, 9)))


def test_kept_features_follow_their_mask(matcher, photo, half, tmp_path):
    (tmp_path / "photos/sub").mkdir(parents=True)
    (tmp_path / "masks/sub").mkdir(parents=True)
    photo_file = PhotoFile("a", tmp_path / "photos/sub/a.png")
    cv2.imwrite(str(photo_file.path), photo)

    def left_most():
        settings = matcher, tmp_path / "kept", tmp_path / "masks", tmp_path / "photos"
        return FeatureStore(*settings)(photo_file).keypoints[:, 0].min()

    assert left_most() < 290
    cv2.imwrite(str(tmp_path / "masks/sub/a.png.png"), half)
    assert left_most() > 298
    cv2.imwrite(str(tmp_path / "masks/sub/a.png.png"), 255 - half)
    assert left_most() < 290
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_kept_features_are_those_of_their_settings(matcher, photo, tmp_path):
    """Of a photograph that is stored lying, in one folder for all settings."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    path = tmp_path / "a.png"
    Image.fromarray(photo[:200, :300]).save(path, exif=exif)
    settings = {"max_keypoints": 100, "resize": 150, "frame": "stored"}
    changed = [replace(matcher, **{name: value}) for name, value in settings.items()]
    for other in (matcher, *changed):
        for _ in range(2):  # extracted, and read
            kept = FeatureStore(other, tmp_path / "kept")(PhotoFile("a", path))
            expected = other.extract(path)
            for name in (*kept._fields[:6], "frame", "turned", "sift_scale"):
                np.testing.assert_array_equal(getattr(kept, name), getattr(expected, name))
            assert kept.gray is kept.image is None
    assert len(list((tmp_path / "kept").iterdir())) == 1 + len(changed)


def test_a_picture_without_keypoints_or_with_few_gray_levels_gives_a_line(photo, caplog):
    extract_features(photo, 100, name="good.png")
    assert caplog.messages == []
    extract_features(np.full((200, 300), 7, np.uint8), 100, name="flat.png")
    extract_features(photo // 64 * 64, 100, name="poster.png")
    assert caplog.messages[0] == "flat.png: 0 keypoints, 1 of 256 gray levels in use"
    assert caplog.messages[1] == "poster.png: 100 keypoints, 4 of 256 gray levels in use"


@pytest.mark.parametrize(
    "size, resize, named",
    [
        ((4000, 100), 1024, 4000),
        ((100, 4000), 1024, 4000),
        ((8000, 640), 1024, 6000),  # 480 px for the shorter side
        ((4000, 400), 1024, None),
        ((90, 80), 1024, None),
        ((4000, 100), 0, None),
    ],
)
def test_a_slim_picture_that_is_reduced_too_far_gives_a_line(photo, caplog, size, resize, named):
    extract_features(cv2.resize(photo, size), 100, resize, name="panorama.png")
    if named is None:
        assert caplog.messages == []
        return
    (line,) = caplog.messages
    reduced = tuple(round(side * 1024 / max(size)) for side in size)
    assert f"{size[0]}x{size[1]} px are reduced to {reduced[0]}x{reduced[1]}" in line
    assert f"--resize {named} " in line


@pytest.mark.parametrize(
    "size, resize, seen",
    [
        ((640, 480), 1024, (768, 576)),
        ((300, 200), 1024, (600, 400)),  # twice
        ((640, 480), 0, (640, 480)),
        ((800, 600), 1024, (800, 600)),
    ],
)
def test_small_images_are_enlarged_for_sift_and_for_the_network(photo, size, resize, seen):
    shapes = []

    def detect(gray, max_keypoints):
        shapes.append(gray.shape[::-1])
        return sift.extract(gray, max_keypoints)

    gray = cv2.resize(photo, size)
    found = extract_features(gray, 256, resize, detect)
    assert shapes == [seen] and found.sift_scale == seen[0] / size[0]
    assert found.image_size == size and found.gray is gray
    # in pixels of the file
    expected = sift.extract(cv2.resize(gray, seen, interpolation=cv2.INTER_CUBIC), 256)
    np.testing.assert_allclose(
        (found.keypoints + 0.5) * (np.array(seen) / size), expected.keypoints + 0.5, atol=1e-3
    )
    np.testing.assert_allclose(found.scales * found.sift_scale, expected.scales, rtol=1e-6)


def test_the_sift_scale_of_keypoints_of_your_own_is_estimated():
    large, small = (sift_of([(3, 3)], size=(4096, 3000), scale=scale) for scale in (40.0, 4.0))
    assert sift.estimate_sift_scale(large, 1024) == 0.25
    # SIFT finds no keypoint of 1 px, so it saw more than 1,024 px
    assert sift.estimate_sift_scale(small, 1024) == pytest.approx(sift.MIN_SCALE / 4)
    assert sift.estimate_sift_scale(large, 0) == 1.0
    assert sift.estimate_sift_scale(small._replace(sift_scale=0.5), 1024) == 0.5
