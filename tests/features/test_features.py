"""features/features.py and store.py: masks, warnings, features that are kept on disk."""

import cv2
import numpy as np
import pytest
from PIL import Image

from superglue_sift import Matcher
from superglue_sift.errors import RequestError
from superglue_sift.features import sift
from superglue_sift.features.features import extract
from superglue_sift.features.sift import positions
from superglue_sift.features.store import FeatureStore, Item


@pytest.fixture(scope="module")
def matcher():
    return Matcher.load(device="cpu", max_keypoints=200)


@pytest.fixture
def half(photo):
    """A mask that leaves out the left half of `photo`, 600 px wide."""
    mask = np.full(photo.shape, 255, np.uint8)
    mask[:, :300] = 0
    return mask


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
    assert all(len(each.records) == 200 for each in found)
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
    item = Item("a", tmp_path / "photos/sub/a.png")
    cv2.imwrite(str(item.image), photo)

    def left_most():
        settings = matcher, tmp_path / "kept", tmp_path / "masks", tmp_path / "photos"
        return FeatureStore(*settings)(item).keypoints[:, 0].min()

    assert left_most() < 290
    cv2.imwrite(str(tmp_path / "masks/sub/a.png.png"), half)
    assert left_most() > 298
    cv2.imwrite(str(tmp_path / "masks/sub/a.png.png"), 255 - half)
    assert left_most() < 290
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_a_picture_without_keypoints_or_with_few_gray_levels_gives_a_line(photo, caplog):
    extract(photo, 100, name="good.png")
    assert caplog.messages == []
    extract(np.full((200, 300), 7, np.uint8), 100, name="flat.png")
    extract(photo // 64 * 64, 100, name="poster.png")
    assert caplog.messages[0] == "flat.png: 0 keypoints, 1 of 256 gray levels in use"
    assert caplog.messages[1] == "poster.png: 100 keypoints, 4 of 256 gray levels in use"


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
    found = extract(gray, 256, resize, detect)
    assert shapes == [seen] and found.as_found(resize).size == seen
    assert found.size == size and found.gray is gray
    np.testing.assert_allclose(  # in pixels of the file
        positions(found.as_found(resize).records) + 0.5,
        (found.keypoints + 0.5) * (np.array(seen) / size),
        atol=1e-3,
    )
