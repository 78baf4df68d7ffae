"""Photographs that a camera stored lying: all eight orientations of EXIF, in every format that
carries them.
"""

import cv2
import numpy as np
import pytest
from made_scenes import TURN
from reading import read_json

from pipeline import errors
from superglue_sift import Matcher
from superglue_sift.apps import cli
from superglue_sift.features import images
from superglue_sift.features.images import STORED, UPRIGHT, decode_color, decode_gray, read_photo
from superglue_sift.geometry.two_view import transform

ALL = range(1, 9)
# where the corner at the top left of the stored pixels lies upright (Exif 2.32, 4.6.4)
CORNERS = {1: "top left", 2: "top right", 3: "bottom right", 4: "bottom left",
           5: "top left", 6: "top right", 7: "bottom right", 8: "bottom left"}  # fmt: skip
SIZE = (60, 40)


def marked():
    """(40, 60, 3): black, white at the top left."""
    image = np.zeros((*SIZE[::-1], 3), np.uint8)
    image[:10, :15] = 255
    return image


def save(path, pixels, orientation):
    """Write BGR or gray pixels as they are, with this orientation in their EXIF data."""
    from PIL import Image

    exif = Image.Exif()
    exif[images.ORIENTATION] = orientation
    kind = {".tif": "TIFF", ".jpg": "JPEG", ".png": "PNG", ".webp": "WEBP"}[path.suffix]
    options = {"tiffinfo": {images.ORIENTATION: orientation}} if kind == "TIFF" else {"exif": exif}
    options.update({"WEBP": {"lossless": True}, "JPEG": {"quality": 97}}.get(kind, {}))
    Image.fromarray(pixels if pixels.ndim == 2 else pixels[..., ::-1]).save(path, kind, **options)


def white_corner(image):
    rows, columns = np.nonzero((image if image.ndim == 2 else image[..., 0]) > 128)
    height, width = image.shape[:2]
    return (
        f"{'bottom' if rows.mean() > height / 2 else 'top'}"
        f" {'right' if columns.mean() > width / 2 else 'left'}"
    )


@pytest.mark.parametrize("ending", [".jpg", ".png", ".webp", ".tif"])
@pytest.mark.parametrize("orientation", ALL)
def test_pixels_upright_and_stored(tmp_path, ending, orientation):
    path = tmp_path / f"a{ending}"
    save(path, marked(), orientation)
    data = path.read_bytes()
    assert images.decode(data, str(path), True, STORED)[1] == orientation
    for decode in (decode_gray, decode_color):
        stored = decode(data, frame=STORED)
        turned = decode(data, frame=UPRIGHT)
        assert stored.shape[:2] == (40, 60) and white_corner(stored) == "top left"
        assert turned.shape[:2] == ((40, 60) if orientation < 5 else (60, 40))
        assert white_corner(turned) == CORNERS[orientation]
        np.testing.assert_array_equal(decode(data), stored)
    if ending != ".webp":  # which OpenCV 4 does not turn
        as_opencv = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        np.testing.assert_array_equal(decode_color(data, frame=UPRIGHT), as_opencv)


@pytest.mark.parametrize("orientation", ALL)
def test_positions_move_as_pixels_do(orientation):
    stored = np.arange(40 * 60, dtype=np.int64).reshape(40, 60)  # each pixel has its own number
    shown = images.turn_upright(stored, orientation)
    y, x = (each.ravel() for each in np.mgrid[:40, :60])
    moved = transform(np.stack([x, y], axis=1).astype(float), images.to_upright(orientation, SIZE))
    np.testing.assert_array_equal(shown[tuple(moved.astype(int).T[::-1])], stored.ravel())
    np.testing.assert_array_equal(images.turn_upright(shown, images.inverse(orientation)), stored)


@pytest.fixture(scope="module")
def views(photo):
    return photo, cv2.warpPerspective(photo, TURN, photo.shape[::-1])


@pytest.fixture
def turned_files(tmp_path, views):
    """Both views as files that are stored lying: the first by orientation 6, the second by 3."""
    for name, view, orientation in (("a.png", views[0], 6), ("b.png", views[1], 3)):
        save(tmp_path / name, images.turn_upright(view, images.inverse(orientation)), orientation)
    return tmp_path / "a.png", tmp_path / "b.png"


def run(*words):
    return errors.run(cli.main, [str(word) for word in words])


@pytest.mark.parametrize("frame", images.FRAMES)
def test_json_npz_and_overlay_of_the_command(model, turned_files, tmp_path, frame, capsys):
    common = ["--model", model, "--device", "cpu", "--frame", frame]
    words = ["--json", tmp_path / "m.json", "--out", tmp_path / "m.png", "--homography"]
    assert run(*turned_files, *words, *common) == 0
    found = read_json(tmp_path / "m.json")
    assert found["frame"] == frame
    assert found["image_size0"] == ([600, 400] if frame == UPRIGHT else [400, 600])
    # the overlay is upright in both frames: the warped first photograph covers the second
    overlay = cv2.imread(str(tmp_path / "m_overlay.jpg"), cv2.IMREAD_GRAYSCALE)
    second = read_photo(turned_files[1], frame).pixels[..., 0]
    assert overlay.shape == second.shape
    assert np.abs(overlay.astype(int) - second)[150:250, 250:350].mean() < 12
    assert run(*turned_files, "--out-dir", tmp_path / "found", "--pictures", *common) == 0
    with np.load(tmp_path / "found/a_b_matches.npz") as file:
        assert str(file["frame"]) == frame
        assert file["turned"].tolist() == ([6, 3] if frame == UPRIGHT else [1, 1])
        np.testing.assert_allclose(file["keypoints0"], found["keypoints0"], atol=1e-3)
    picture = cv2.imread(str(tmp_path / "found/a_b_matches.jpg"))
    assert picture.shape[1] == 600 + 8 + 600  # upright


@pytest.mark.parametrize("frame", images.FRAMES)
def test_a_colmap_database_is_of_stored_pixels_in_any_case(
    model, turned_files, tmp_path, frame, capsys
):
    pycolmap = pytest.importorskip("pycolmap")
    folder = turned_files[0].parent
    words = [
        "--out-dir",
        tmp_path / "found",
        "--colmap",
        tmp_path / "d.db",
        "--no-scene",
        "--no-refine",
    ]
    assert run(folder, *words, "--model", model, "--device", "cpu", "--frame", frame) == 0
    assert "pixels as stored" in capsys.readouterr().out
    database = pycolmap.Database.open(str(tmp_path / "d.db"))
    cameras = {camera.camera_id: camera for camera in database.read_all_cameras()}
    stored = Matcher.load(model, "cpu", frame=STORED)
    for image in database.read_all_images():
        keypoints = database.read_keypoints(image.image_id)[:, :2]
        camera = cameras[image.camera_id]
        path = folder / image.name
        own = pycolmap.Bitmap.read(str(path), False)
        assert (camera.width, camera.height) == (own.width, own.height)
        # SIFT of the lying pixels finds most of the places that SIFT of the upright ones does
        expected = stored.extract(path).keypoints + 0.5
        nearest = np.linalg.norm(keypoints[:, None] - expected[None], axis=2).min(axis=1)
        assert np.median(nearest) < 0.1
    assert len(database.read_matches(1, 2)) > 30
    database.close()


def test_a_result_of_stored_and_unrotated_pixels_is_of_stored_ones(model, turned_files, tmp_path):
    """In either order: the pixels of an image without rotation are both."""
    plain = tmp_path / "plain.png"
    cv2.imwrite(str(plain), cv2.imread(str(turned_files[0])))  # upright, without EXIF
    matcher = Matcher.load(model, "cpu", refine=False)
    stored = Matcher.load(model, "cpu", frame=STORED).extract(turned_files[0])
    for pair in ((matcher.extract(plain), stored), (stored, matcher.extract(plain))):
        assert matcher.match(*pair).frame == STORED
