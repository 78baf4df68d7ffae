"""The library alone: what it needs of others, what its wheel holds, and how it matches two
images.
"""

import dataclasses
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from made_scenes import TURN, write_model
from PIL import Image

from superglue_sift import Features, Matcher, RequestError, drawing
from superglue_sift.features import sift
from superglue_sift.features.features import extract
from superglue_sift.features.images import read_gray, reduce
from superglue_sift.features.sift import positions
from superglue_sift.geometry.two_view import corner_error, epipolar_distances, transform
from superglue_sift.network import weights
from superglue_sift.network.weights import save_model_file


def test_importing_it_does_not_load_torch():
    script = "import sys, superglue_sift; sys.exit('torch' in sys.modules or 'cv2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.slow
@pytest.mark.cu111
def test_the_wheel_is_small_and_holds_the_library_alone(tmp_path, root):
    """requirements/test-bounds.sh tries it where nothing else is installed."""
    source = tmp_path / "source"
    for name in ("superglue_sift", "pipeline", "benchmarks", "tests", "pretrained"):
        shutil.copytree(root / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source / name)
    script = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size <= 12e6
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    packages = {name.split("/")[0] for name in names}
    assert {name for name in packages if not name.endswith(".dist-info")} == {"superglue_sift"}
    assert f"superglue_sift/{weights.SHIPPED}" in names


@pytest.fixture
def matcher(untrained):
    return untrained


@pytest.fixture
def turned(photo):
    return cv2.warpPerspective(photo, TURN, (600, 400))


def test_matches_of_pixels_are_pairs_of_keypoints_that_correspond(matcher, photo, turned):
    found = matcher.match(photo, turned)
    assert found.size0 == found.size1 == (600, 400)
    assert (
        found.keypoints0.shape == (len(found.keypoints0), 2)
        and found.keypoints0.dtype == np.float32
    )
    assert found.matches.shape == (len(found.scores), 2) and len(found.scores) > 30
    assert (found.scores > 0.2).all()
    assert len(set(found.matches[:, 0])) == len(set(found.matches[:, 1])) == len(found.matches)
    error = np.linalg.norm(transform(found.points0.astype(float), TURN) - found.points1, axis=1)
    assert (error < 3).mean() > 0.8


def test_files_pixels_and_features_give_the_same_matches(
    matcher, photo, turned, tmp_path, monkeypatch
):
    cv2.imwrite(str(tmp_path / "a.png"), photo)
    cv2.imwrite(str(tmp_path / "b.png"), turned)
    expected = matcher.match(photo, turned)
    features = [
        matcher.extract(tmp_path / "a.png"),
        matcher.extract(cv2.cvtColor(turned, cv2.COLOR_GRAY2BGR)),
    ]
    monkeypatch.setattr(
        "superglue_sift.features.sift.extract", lambda *_: pytest.fail("computed twice")
    )
    found = matcher.match(*features)
    assert_same(expected, found)
    np.testing.assert_array_equal(features[0].keypoints, expected.keypoints0)


def test_a_result_shows_its_picture_in_colour(matcher, color_photo, tmp_path):
    bgr = np.ascontiguousarray(color_photo[..., ::-1])
    path = tmp_path / "a.png"
    cv2.imwrite(str(path), bgr)
    found = matcher.match(path, torch.from_numpy(color_photo.copy()).permute(2, 0, 1))
    picture = found.only(np.arange(200)).show()
    assert repr(picture).startswith(f"Picture({2 * 451 + drawing.GAP}x")
    assert picture._repr_jpeg_()[:2] == b"\xff\xd8"
    above = len(drawing.text_bar(2 * 451 + drawing.GAP, " "))
    own = picture.pixels[above : above + 300, :451]  # below the heading, between the lines
    assert (own == bgr).all(axis=2).mean() > 0.3
    picture.save(tmp_path / "new/m.png")
    np.testing.assert_array_equal(cv2.imread(str(tmp_path / "new/m.png")), picture.pixels)


def test_features_without_their_image_are_shown_with_one_that_is_named(matcher, photo):
    own = matcher.extract(photo)._replace(image=None)
    found = matcher.match(own, photo)
    with pytest.raises(RequestError, match=r"pass them, show\(image0, image1\)"):
        found.show()
    assert found.show(photo).pixels.any()


def assert_same(one, other):
    for name in {each.name for each in dataclasses.fields(one)} - {"images", "_fits", "found"}:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(one.matches, other.matches)
    np.testing.assert_array_equal(one.scores, other.scores)


def test_tensors_and_pil_images_give_the_matches_of_the_same_pixels(matcher, color_photo):
    bgr = np.ascontiguousarray(color_photo[..., ::-1])
    expected = matcher.match(bgr, bgr[50:])
    image = Image.fromarray(color_photo)
    found = matcher.match(image, image.convert("RGBA").crop((0, 50, *image.size)))
    assert_same(expected, found)
    np.testing.assert_array_equal(found.photos()[0].pixels, bgr)
    rgb = torch.from_numpy(np.ascontiguousarray(color_photo)).permute(2, 0, 1)
    assert_same(expected, matcher.match(rgb, rgb[:, 50:]))
    assert_same(expected, matcher.match(rgb / 255, bgr[50:]))
    gray = torch.from_numpy(cv2.cvtColor(bgr, cv2.COLOR_BGR2GRAY))
    assert_same(expected, matcher.match(gray, gray[None, 50:] / 255.0))
    assert_same(expected, matcher.match(rgb[None], gray[None, None, 50:]))


OTHER_SIDES = (512, 640, 1536, 2048, 8192, 16384)


@pytest.mark.parametrize(
    "side", [4096, *(pytest.param(side, marks=pytest.mark.slow) for side in OTHER_SIDES)]
)
def test_the_resolution_of_a_file_does_not_change_its_matches(shared_data, side):
    """The second photograph, reduced to 1,024 px and resized to `side`, has the matches that it has
    at 1,024, but for a small part.
    """
    # At 512 px keypoints are lost, of which more are matched than those that the network sees
    least = 0.97 if side > 1024 else 0.85
    matcher = Matcher.load(device="cpu")
    folder = shared_data / "poses/strecha"
    paths = [folder / f"Herz-Jesus-P25_{number:04d}.jpg" for number in (3, 4)]
    first, second = (reduce(read_gray(path), 1024) for path in paths)
    size = (side, round(side * second.shape[0] / second.shape[1]))
    expected = matcher.match(first, second)
    found = matcher.match(first, cv2.resize(second, size, interpolation=cv2.INTER_CUBIC))
    assert least < len(found.matches) / len(expected.matches) < 1.03
    aligned = [int(np.isfinite(each.deviations).sum()) for each in (expected, found)]
    assert least < aligned[1] / aligned[0] < 1.03 and aligned[0] > 300
    # in pixels of the file
    F = expected.fundamental().model
    there = (found.points1 + 0.5) * (second.shape[1] / side) - 0.5
    assert np.median(epipolar_distances(F, found.points0, there)) < 0.5


@pytest.mark.parametrize(
    "size, resize, seen",
    [
        ((640, 480), 1024, (768, 576)),
        ((300, 200), 1024, (600, 400)),  # twice
        ((640, 480), 700, (700, 525)),
        ((640, 480), 600, (600, 450)),
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


def test_one_image_against_many_computes_its_features_once(matcher, photo, turned, monkeypatch):
    others = [turned, photo[:, 50:], photo[100:]]
    expected = [matcher.match(photo, other) for other in others]
    seen = []
    extract = matcher.extract
    monkeypatch.setattr(matcher, "extract", lambda image: seen.append(image) or extract(image))
    found = list(matcher.match_many(photo, others, batch_size=2))
    assert len(seen) == 4 and sum(image is photo for image in seen) == 1
    for one, other in zip(expected, found):
        np.testing.assert_array_equal(one.matches, other.matches)
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-5)  # rounding of a batch


def test_a_batch_answers_pair_by_pair_and_reads_no_further(matcher, photo, turned):
    read = []

    def pairs():
        for number in range(5):
            read.append(number)
            yield photo[: 100 * number], turned  # the first has no row at all

    answers = matcher.match_batch(pairs(), batch_size=2)
    with pytest.raises(RequestError, match="must be uint8"):
        next(answers)
    assert read == [0, 1]
    assert list(matcher.match_batch([])) == []


def test_homography_and_fundamental_matrix_explain_the_matches(matcher, photo, turned):
    found = matcher.match(photo, turned)
    H, inliers = found.homography()
    assert corner_error(H, TURN, (600, 400)) < 2 and inliers.shape == (len(found.matches),)
    assert inliers.mean() > 0.7
    F, inliers = found.fundamental(1.0)
    distance = epipolar_distances(F, found.points0, found.points1)
    assert (distance[inliers] < 2).all() and inliers.mean() > 0.7
    assert_same(found.homography(), found.homography())
    assert_same(found.fundamental(), found.fundamental())


@pytest.mark.parametrize("count", [0, 3, 7])
def test_too_few_matches_fit_nothing(matcher, photo, turned, count):
    found = matcher.match(photo, turned)
    few = found.only(np.arange(count))
    assert few.fundamental().model is None and few.fundamental().inliers.shape == (count,)
    assert (few.homography().model is None) == (count < 4)


@pytest.mark.gpu
def test_a_gpu_gives_the_matches_of_the_cpu(model, photo, turned):
    one, other = (Matcher.load(model, device).match(photo, turned) for device in ("cpu", "cuda"))
    shared = set(map(tuple, one.matches)) & set(map(tuple, other.matches))
    assert len(shared) > 0.97 * max(len(one.matches), len(other.matches))


def test_an_image_without_structure_gives_no_match(matcher, photo):
    flat = np.full((200, 300), 99, np.uint8)
    for pair in ((flat, flat), (flat, photo), (photo, flat)):
        found = matcher.match(*pair)
        assert (
            found.matches.shape == (0, 2)
            and found.scores.shape == (0,)
            and found.points1.shape == (0, 2)
        )


def features(count, width, value=9.0, at=0.0, scale=1.0, size=(64, 64)):
    one = np.ones(count)
    places = np.full((count, 2), at)
    descriptors = np.full((count, width), value)
    return Features.of(places, np.full(count, scale), one, one, descriptors, size)


@pytest.mark.parametrize(
    "ask, message",
    [
        (lambda matcher: matcher.extract("no.png"), "no.png: cannot be read"),
        (lambda matcher: matcher.extract(np.zeros((9, 9))), "must be uint8"),
        (lambda matcher: matcher.extract(torch.zeros(9, 9, 3)), r"\(9, 9, 3\): must be \(H, W\)"),
        (lambda matcher: matcher.extract(torch.full((9, 9), 2.0)), "from 0 to 1"),
        (lambda matcher: features(5, 256), r"\(5, 256\): must be \(5, 128\)"),
        (lambda matcher: features(5, 128, at=np.nan), "scores must be finite"),
        (lambda matcher: features(5, 128, np.nan), "descriptors must be whole numbers"),
        (lambda matcher: features(5, 128, scale=-1.0), "scales must be 0 or more"),
        (lambda matcher: features(5, 128, size=(0, 64)), r"size \(0, 64\): must be"),
        (
            lambda matcher: matcher.match(
                features(5, 128)._replace(frame="stored"), features(5, 128)._replace(turned=6)
            ),
            r"stored and of upright pixels: use Matcher.load\(frame='stored'\)",
        ),
        (lambda matcher: Matcher.load(device="meta"), "^device meta: not available here"),
        (lambda matcher: Matcher.load("other.safetensors"), "not a SuperGlue model"),
        (
            lambda matcher: Matcher.load(device="toaster"),
            "^device toaster: not available here; name auto, cpu",
        ),
        (lambda matcher: Matcher.load(threshold=1.5), "threshold 1.5: must be between 0 and 1"),
        (
            lambda matcher: Matcher.load(max_keypoints=2.5),
            "max_keypoints 2.5: must be a whole number",
        ),
        (lambda matcher: Matcher.load(frame="lying"), "frame 'lying'"),
        (lambda matcher: Matcher.load(accept=0.3), "accept: only with scene=True"),
        (
            lambda matcher: matcher.extract([[0, 1]]),
            "type list: must be a file, a PIL image, an array or a tensor",
        ),
    ],
)
def test_a_wrong_request_is_one_line(matcher, tmp_path, monkeypatch, ask, message):
    monkeypatch.chdir(tmp_path)
    about = {"model": {"dim": 128}}
    save_model_file(Path("other.safetensors"), {"a": matcher.model.dustbin}, about)
    with pytest.raises(RequestError, match=message) as error:
        ask(matcher)
    assert "\n" not in str(error.value)


def write_changed(path, **about):
    """An untrained model whose description says something else."""
    tensors, info = weights.load_model_file(write_model(path))
    model = {**info["model"], **about.pop("model", {})}
    save_model_file(path, tensors, {**info, "model": model, **about})
    return path


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"layers": 10**7}, r"layers = 10000000: must be a whole number from 1 to 256"),
        ({"layers": 200}, r"self_attention\.1\.query_key_value\.weight: has nothing"),
        ({"heads": 3}, r"heads = 3: must divide dim \(128\)"),
        ({"dim": 4096}, r"descriptor_projection\.weight: has \(128, 128\)"),
        ({"dim": 1e9}, "dim = 1000000000.0"),
        ({"norm": "none"}, "norm 'none'"),
        ({"descriptor": {}}, r"descriptor \{\}"),
        ({"hidden": 1}, "hidden"),
    ],
)
def test_a_hostile_model_file_is_refused_before_anything_is_made_of_it(
    tmp_path, monkeypatch, changed, message
):
    path = write_changed(tmp_path / "m.safetensors", model=changed)
    monkeypatch.setattr(weights, "SuperGlue", lambda *_: pytest.fail("made"))
    with pytest.raises(RequestError, match=message) as error:
        Matcher.load(path, "cpu")
    assert "m.safetensors: not a SuperGlue model" in str(error.value) and "\n" not in str(
        error.value
    )


@pytest.mark.parametrize("value", ["much", None, [], 2.0, float("nan"), True])
def test_a_hostile_threshold_is_refused(tmp_path, value):
    path = write_changed(tmp_path / "m.safetensors", match_threshold=value)
    with pytest.raises(RequestError, match="match_threshold"):
        Matcher.load(path, "cpu")


def test_without_a_name_the_shipped_weights_are_taken(monkeypatch, tmp_path, photo):
    package = tmp_path / "superglue_sift"
    monkeypatch.setattr(weights, "__file__", str(package / "network" / "weights.py"))
    with pytest.raises(RequestError, match="name a trained model file"):
        Matcher.load()
    for place in (tmp_path, package):  # a clone, a wheel
        write_model(place / weights.SHIPPED)
        assert len(Matcher.load(device="cpu").match(photo, photo).matches) > 30
        shutil.rmtree(place / "pretrained")
