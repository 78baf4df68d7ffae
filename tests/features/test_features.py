"""Images in memory, masks, warnings, features of other programs, features stored on disk."""

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
def test_a_pil_image_that_cannot_be_read_is_refused_by_its_path(photo, kind, tmp_path):
    path = tmp_path / "a"
    Image.fromarray(photo).save(path, kind)
    data = path.read_bytes()
    with pytest.raises(RequestError):
        to_gray(Image.open(io.BytesIO(data[: int(0.9 * len(data))])))
    closed = Image.open(path)
    closed.close()
    with pytest.raises(RequestError):
        to_gray(closed)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(RequestError, match=re.escape(str(path))):
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
    with pytest.raises(RequestError):
        to_gray(Image.new("RGB", (0, 0)))


def make_features(positions, size=(60, 40), scale=2.0, oris=0.0):
    """Features of keypoints at positions (n, 2), with the same descriptor."""
    positions = np.array(positions, float)
    ones = np.ones(len(positions))
    descriptors = np.full((len(ones), 128), 9)
    return Features.of(positions, scale * ones, oris * ones, ones, descriptors, size)


def test_positions_of_other_programs_lie_in_the_image():
    corners = [(-0.5, -0.5), (59.5, -0.5), (59.5, 39.5), (0, 39.5)]
    np.testing.assert_array_equal(make_features(corners).keypoints, np.float32(corners))
    for x, y in [(1e9, 3), (3, -1e9), (-2, 3), (3, 42), (62, 3)]:
        with pytest.raises(RequestError, match="60x40"):
            make_features([(1, 1), (x, y)])
    # COLMAP's coordinates start at the corner of the first pixel.
    colmap = np.array([[0.0, 0.0, 2.0, 0.0], [60.0, 40.0, 2.0, 0.0]])
    descriptors = np.full((2, 128), 45, np.uint8)
    keypoints = Features.of_colmap(colmap, descriptors, (60, 40)).keypoints
    np.testing.assert_array_equal(keypoints, np.float32([(-0.5, -0.5), (59.5, 39.5)]))
    with pytest.raises(RequestError, match="40x60"):
        Features.of_colmap(colmap, descriptors, (40, 60))


def test_resizing_keeps_the_edges_of_the_image_together():
    """A pixel center is at a whole number, so the left edge of an image is at -0.5."""
    features = make_features([(-0.5, -0.5), (0, 0), (59, 39), (59.5, 39.5)], scale=4.0)
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


def test_equal_keypoints_are_refused_unless_their_angles_differ():
    with pytest.raises(RequestError, match="keypoints"):
        make_features([(3, 3)] * 5)
    assert len(make_features([(3, 3)] * 5, oris=np.arange(5.0)).keypoints) == 5


def test_keypoints_of_opencv_with_several_orientations_are_accepted(photo):
    points, descriptors = cv2.SIFT_create().detectAndCompute(photo, None)
    columns = zip(*((point.pt, point.size, point.angle, point.response) for point in points))
    keypoints = Features.of(*map(np.array, columns), descriptors, photo.shape[::-1]).keypoints
    assert len(keypoints) == len(points)
    # Some of its points have several orientations.
    assert len(np.unique(keypoints, axis=0)) < len(points)


def test_a_mask_is_an_array_or_a_file_or_the_transparency_of_the_image(
    matcher, photo, half, tmp_path
):
    cv2.imwrite(str(tmp_path / "mask.png"), half)
    cv2.imwrite(str(tmp_path / "alpha.png"), np.dstack([photo] * 3 + [half]))
    for features in (
        matcher.extract(photo, mask=half > 0),
        matcher.extract(photo, tmp_path / "mask.png"),
        matcher.extract(tmp_path / "alpha.png"),
        matcher.extract(Image.open(tmp_path / "alpha.png")),
    ):
        assert len(features.keypoints) == 200 and features.keypoints[:, 0].min() > 298
    upper = half.copy()
    upper[200:] = 0
    x, y = matcher.extract(tmp_path / "alpha.png", mask=upper).keypoints.T
    assert len(x) > 50 and x.min() > 298 and y.max() < 201
    with pytest.raises(RequestError, match="mask"):
        matcher.extract(photo, mask=np.ones((9, 9)))


def test_stored_features_follow_their_mask(matcher, photo, half, tmp_path):
    (tmp_path / "photos/sub").mkdir(parents=True)
    (tmp_path / "masks/sub").mkdir(parents=True)
    photo_file = PhotoFile("a", tmp_path / "photos/sub/a.png")
    cv2.imwrite(str(photo_file.path), photo)

    def find_leftmost():
        settings = matcher, tmp_path / "features", tmp_path / "masks", tmp_path / "photos"
        return FeatureStore(*settings)(photo_file).keypoints[:, 0].min()

    assert find_leftmost() < 290
    cv2.imwrite(str(tmp_path / "masks/sub/a.png.png"), half)
    assert find_leftmost() > 298
    cv2.imwrite(str(tmp_path / "masks/sub/a.png.png"), 255 - half)
    assert find_leftmost() < 290
    assert len(list((tmp_path / "features").iterdir())) == 3


def test_stored_features_are_those_of_their_settings(matcher, photo, tmp_path):
    """Of a photograph that is stored lying, in one folder for all settings."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    path = tmp_path / "a.png"
    Image.fromarray(photo[:200, :300]).save(path, exif=exif)
    settings = {"max_keypoints": 100, "resize": 150, "frame": "stored"}
    changed = [replace(matcher, **{name: value}) for name, value in settings.items()]
    for extracting in (matcher, *changed):
        for _ in range(2):  # extracted, and read
            features = FeatureStore(extracting, tmp_path / "features")(PhotoFile("a", path))
            expected = extracting.extract(path)
            for name in (*features._fields[:6], "frame", "turned", "sift_scale"):
                np.testing.assert_array_equal(getattr(features, name), getattr(expected, name))
            assert features.gray is features.image is None
    assert len(list((tmp_path / "features").iterdir())) == 1 + len(changed)


def test_a_picture_without_keypoints_or_with_few_gray_levels_is_logged(photo, caplog):
    extract_features(photo, 100, name="good.png")
    assert caplog.messages == []
    extract_features(np.full((200, 300), 7, np.uint8), 100, name="flat.png")
    extract_features(photo // 64 * 64, 100, name="poster.png")
    assert [line.split(":")[0] for line in caplog.messages] == ["flat.png", "poster.png"]


@pytest.mark.parametrize(
    "size, resize, suggestion",
    [
        ((100, 4000), 1024, "--resize 4000 "),
        ((8000, 640), 1024, "--resize 6000 "),  # 480 px for the shorter side
        ((4000, 400), 1024, None),
        ((4000, 100), 0, None),
    ],
)
def test_a_panorama_that_is_reduced_too_far_is_logged(photo, caplog, size, resize, suggestion):
    extract_features(cv2.resize(photo, size), 100, resize, name="panorama.png")
    assert len(caplog.messages) == (suggestion is not None)
    assert all("panorama.png" in line and suggestion in line for line in caplog.messages)


@pytest.mark.parametrize(
    "size, resize, sift_size",
    [
        ((640, 480), 1024, (768, 576)),
        ((300, 200), 1024, (600, 400)),  # twice
        ((640, 480), 0, (640, 480)),
        ((800, 600), 1024, (800, 600)),
    ],
)
def test_small_images_are_enlarged_for_sift_and_for_the_network(photo, size, resize, sift_size):
    sizes = []

    def detect(gray, max_keypoints):
        sizes.append(gray.shape[::-1])
        return sift.extract(gray, max_keypoints)

    gray = cv2.resize(photo, size)
    features = extract_features(gray, 256, resize, detect)
    assert sizes == [sift_size] and features.sift_scale == sift_size[0] / size[0]
    assert features.image_size == size and features.gray is gray
    # in pixels of the file
    expected = sift.extract(cv2.resize(gray, sift_size, interpolation=cv2.INTER_CUBIC), 256)
    keypoints = (features.keypoints + 0.5) * (np.array(sift_size) / size) - 0.5
    np.testing.assert_allclose(keypoints, expected.keypoints, atol=1e-3)
    np.testing.assert_allclose(features.scales * features.sift_scale, expected.scales, rtol=1e-6)


def test_the_sift_scale_of_keypoints_of_your_own_is_estimated():
    large, small = (
        make_features([(3, 3)], size=(4096, 3000), scale=scale) for scale in (40.0, 4.0)
    )
    assert sift.estimate_sift_scale(large, 1024) == 0.25
    # SIFT finds no keypoint of 1 px, so it saw more than 1,024 px
    assert sift.estimate_sift_scale(small, 1024) == pytest.approx(sift.MIN_SCALE / 4)
    assert sift.estimate_sift_scale(large, 0) == 1.0
    assert sift.estimate_sift_scale(small._replace(sift_scale=0.5), 1024) == 0.5
