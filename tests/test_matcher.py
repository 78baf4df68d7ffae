"""Two images in, matches out: what `Matcher` promises, whatever it is given."""

import copy
import dataclasses
import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from made_scenes import TURN
from PIL import Image

from superglue_sift import Features, Matcher, RequestError, torch_compat
from superglue_sift.features.images import read_gray, reduce_image
from superglue_sift.geometry import two_view
from superglue_sift.geometry.two_view import compute_epipolar_distances, transform
from superglue_sift.network.weights import save_model_file


def test_importing_it_does_not_load_torch():
    script = "import sys, superglue_sift; sys.exit('torch' in sys.modules or 'cv2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.fixture
def matcher(untrained):
    return untrained


@pytest.fixture
def turned(photo):
    return cv2.warpPerspective(photo, TURN, (600, 400))


def test_matches_of_pixels_are_pairs_of_keypoints_that_correspond(matcher, photo, turned):
    found = matcher.match(photo, turned)
    assert found.size0 == found.size1 == (600, 400)
    assert len(found.scores) > 30 and (found.scores > 0.2).all()
    assert len(set(found.matches[:, 0])) == len(set(found.matches[:, 1])) == len(found.matches)
    error = np.linalg.norm(transform(found.points0.astype(float), TURN) - found.points1, axis=1)
    assert (error < 3).mean() > 0.8


def test_each_call_may_ask_for_refined_positions_or_not(matcher, photo, turned):
    images = matcher.extract(photo), matcher.extract(turned)
    assert matcher.match(*images).deviations is not None
    found = [
        matcher.match(*images, refine=False),
        *matcher.match_many(images[0], [images[1]], refine=False),
        *matcher.match_batch([images], refine=False),
    ]
    assert [one.deviations for one in found] == [None] * 3


@pytest.mark.parametrize(
    "scene, refine, is_refined",
    [(False, None, True), (True, None, False), (True, True, True), (False, False, False)],
)
def test_refine_means_what_it_says_with_a_scene_too(
    model, photo, turned, scene, refine, is_refined
):
    matcher = Matcher.load(model, "cpu", scene=scene, refine=refine, max_keypoints=500, resize=768)
    result = matcher.match(photo, turned)
    assert result.accepted and len(result.matches) > 30
    assert (result.deviations is not None) == matcher.refines == is_refined


def test_features_without_pixels_cannot_be_refined_on_request(matcher, photo, turned):
    pair = matcher.extract(photo), matcher.extract(turned)._replace(gray=None)
    assert matcher.refines and matcher.match(*pair).deviations is None
    with pytest.raises(RequestError, match="refine=True: the features have no pixels"):
        matcher.match(*pair, refine=True)


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


def assert_same(one, other):
    for name in {each.name for each in dataclasses.fields(one)} - {
        "images",
        "_fits",
        "scored_matches",
    }:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(one.matches, other.matches)
    np.testing.assert_array_equal(one.scores, other.scores)


def test_tensors_and_pil_images_give_the_matches_of_the_same_pixels(matcher, color_photo):
    bgr = np.ascontiguousarray(color_photo[..., ::-1])
    expected = matcher.match(bgr, bgr[50:])
    image = Image.fromarray(color_photo)
    found = matcher.match(image, image.convert("RGBA").crop((0, 50, *image.size)))
    assert_same(expected, found)
    np.testing.assert_array_equal(found.load_photos()[0].pixels, bgr)
    rgb = torch.from_numpy(np.ascontiguousarray(color_photo)).permute(2, 0, 1)
    gray = torch.from_numpy(cv2.cvtColor(bgr, cv2.COLOR_BGR2GRAY))
    for pair in ((rgb, gray[None, 50:]), (rgb[None] / 255, gray[50:] / 255.0)):
        assert_same(expected, matcher.match(*pair))


SIDES = (512, 1536, 4096, 16384)


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_the_resolution_of_a_file_does_not_change_its_matches(shared_data, side):
    """The second photograph, reduced to 1,024 px and resized to `side`, has the matches that it has
    at 1,024, but for a small part.
    """
    # At 512 px keypoints are lost, of which more are matched than those that the network sees
    least = 0.97 if side > 1024 else 0.85
    matcher = Matcher.load(device="cpu")
    folder = shared_data / "poses/strecha"
    paths = [folder / f"Herz-Jesus-P25_{number:04d}.jpg" for number in (3, 4)]
    first, second = (reduce_image(read_gray(path), 1024) for path in paths)
    size = (side, round(side * second.shape[0] / second.shape[1]))
    expected = matcher.match(first, second)
    found = matcher.match(first, cv2.resize(second, size, interpolation=cv2.INTER_CUBIC))
    assert least < len(found.matches) / len(expected.matches) < 1.03
    aligned = [int(np.isfinite(each.deviations).sum()) for each in (expected, found)]
    assert least < aligned[1] / aligned[0] < 1.03 and aligned[0] > 300
    # in pixels of the file
    F = expected.fit_fundamental().model
    there = (found.points1 + 0.5) * (second.shape[1] / side) - 0.5
    assert np.median(compute_epipolar_distances(F, found.points0, there)) < 0.5


def test_one_image_against_many_computes_its_features_once(matcher, photo, turned, monkeypatch):
    others = [turned, photo[:, 50:], photo[100:]]
    expected = [matcher.match(photo, other) for other in others]
    seen = []
    extract = Matcher.extract
    monkeypatch.setattr(
        Matcher, "extract", lambda self, image: seen.append(image) or extract(self, image)
    )
    found = list(matcher.match_many(photo, others, batch_size=2))
    assert len(seen) == 4 and sum(image is photo for image in seen) == 1
    for one, other in zip(expected, found):
        np.testing.assert_array_equal(one.matches, other.matches)


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


@pytest.mark.gpu
def test_a_gpu_gives_the_matches_of_the_cpu(model, photo, turned):
    one, other = (Matcher.load(model, device).match(photo, turned) for device in ("cpu", "cuda"))
    shared = set(map(tuple, one.matches)) & set(map(tuple, other.matches))
    assert len(shared) > 0.97 * max(len(one.matches), len(other.matches))


def test_an_image_without_structure_gives_no_match(matcher, photo):
    flat = np.full((200, 300), 99, np.uint8)
    for pair in ((flat, flat), (flat, photo), (photo, flat)):
        found = matcher.match(*pair)
        assert found.matches.shape == found.points1.shape == (0, 2)


def features(count, width, value=9.0, scale=1.0):
    one = np.ones(count)
    descriptors = np.full((count, width), value)
    places = np.stack([np.arange(count), np.zeros(count)], axis=1)
    return Features.of(places, scale * one, one, one, descriptors, (64, 64))


@pytest.mark.parametrize(
    "ask, message",
    [
        (lambda matcher: matcher.extract("no.png"), "no.png: cannot be read"),
        (lambda matcher: matcher.extract(np.zeros((9, 9))), "must be uint8"),
        (lambda matcher: matcher.extract(torch.zeros(9, 9, 3)), r"\(9, 9, 3\): must be \(H, W\)"),
        (lambda matcher: features(5, 256), "of 256 entries: SIFT has 128"),
        (lambda matcher: features(5, 128, np.nan), "descriptors must be finite"),
        (lambda matcher: features(5, 128, scale=-1.0), "scales above 0"),
        (
            lambda matcher: matcher.match(
                features(5, 128)._replace(frame="stored"), features(5, 128)._replace(turned=6)
            ),
            r"stored and of upright pixels: use Matcher.load\(frame='stored'\)",
        ),
        (lambda matcher: Matcher.load("other.safetensors"), "not a SuperGlue model"),
        (
            lambda matcher: Matcher.load(device="toaster"),
            "^device toaster: not available here; name auto, cpu",
        ),
        (lambda matcher: Matcher.load(threshold=1.5), "threshold 1.5: must be between 0 and 1"),
        (lambda matcher: Matcher.load(network_keypoints=0), "network_keypoints 0: must be"),
        (lambda matcher: Matcher.load(frame="lying"), "frame 'lying'"),
        (lambda matcher: Matcher.load(accept=0.3), "accept: only with scene=True"),
    ],
)
def test_a_wrong_request_is_one_line(matcher, tmp_path, monkeypatch, ask, message):
    monkeypatch.chdir(tmp_path)
    about = {"model": {"dim": 128}}
    save_model_file(Path("other.safetensors"), {"a": matcher.model.dustbin}, about)
    with pytest.raises(RequestError, match=message) as error:
        ask(matcher)
    assert "\n" not in str(error.value)


def test_threads_that_share_a_matcher_get_what_one_thread_gets(matcher, photo, turned):
    small, other = photo[::2, ::2], turned[::2, ::2]
    pairs = [(small, other), (other, small), (small[50:], other), (small, small[:, 25:])]
    expected = [matcher.match(*pair) for pair in pairs]
    with ThreadPoolExecutor(4) as pool:
        for one, found in zip(expected, pool.map(lambda pair: matcher.match(*pair), pairs)):
            assert_same(one, found)


def test_two_matchers_of_one_model_do_not_touch_each_other(model, photo, turned):
    first = Matcher.load(model, "cpu")
    expected = first.match(photo, turned)
    second = Matcher.load(model, "cpu", threshold=0.9, max_keypoints=100, precision="bfloat16")
    assert len(second.match(photo, turned).keypoints0) == 100
    assert first.threshold == 0.2
    assert_same(expected, first.match(photo, turned))


@pytest.mark.slow
def test_compiled_layers_give_the_matches_of_the_others(model, photo, turned):
    missing = torch_compat.describe_missing_compiler("cpu")
    if missing:
        pytest.skip(missing)
    expected = Matcher.load(model, "cpu").match(photo, turned)
    compiled = Matcher.load(model, "cpu", compile=True)
    for _ in range(2):  # the second time nothing is compiled
        found = set(map(tuple, compiled.match(photo, turned).matches))
        both = found & set(map(tuple, expected.matches))
        assert len(both) >= 0.99 * max(len(found), len(expected.matches))


def copy_by_pickle(matcher):
    return pickle.loads(pickle.dumps(matcher))  # noqa: S301  # our own


def test_a_matcher_is_pickled_by_its_file_and_settings(model, photo, turned):
    place = Matcher.load(model, "cpu", scene=True, accept=0.4, max_keypoints=300)
    place = dataclasses.replace(place, threshold=0.5)
    again = copy_by_pickle(place)
    assert repr(again) == repr(place) and again.rules.accept == 0.4
    usual = Matcher.load(model, "cpu")
    assert len(pickle.dumps(usual)) < 2000  # no weights
    assert_same(usual.match(photo, turned), copy_by_pickle(usual).match(photo, turned))
    with pytest.raises(TypeError, match=r"create it by Matcher\.load"):
        pickle.dumps(Matcher(usual.model))


@pytest.mark.parametrize(
    "setting", [{"frame": "Stored"}, {"threshold": 30}, {"network_keypoints": 0}], ids=str
)
def test_a_setting_is_checked_and_cannot_be_assigned(model, setting):
    matcher = Matcher.load(model, "cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(matcher, *next(iter(setting.items())))
    with pytest.raises(RequestError, match=next(iter(setting))):
        dataclasses.replace(matcher, **setting)


def test_a_network_that_is_replaced_has_another_digest(model):
    matcher = Matcher.load(model, "cpu")
    other = copy.deepcopy(matcher.model)
    assert dataclasses.replace(matcher, model=other).digest() == matcher.digest()
    with torch.no_grad():
        other.dustbin += 1
    assert dataclasses.replace(matcher, model=other).digest() != matcher.digest()


def test_the_digest_is_that_of_everything_that_decides_matches(model, tmp_path):
    path = tmp_path / "copy.safetensors"
    path.write_bytes(model.read_bytes())
    digest = Matcher.load(model, "cpu").digest()
    assert Matcher.load(path, "cpu").digest() == digest  # of the content, not of the name
    settings = {
        "max_keypoints": 9,
        "network_keypoints": 9,
        "resize": 999,
        "threshold": 0.9,
        "precision": "bfloat16",
        "refine": False,
        "frame": "stored",
        "scene": True,
    }
    changed = [Matcher.load(model, "cpu", **{name: value}) for name, value in settings.items()]
    changed += [Matcher.load(model, "cpu", scene=True, accept=0.5), Matcher.load(device="cpu")]
    changed += [Matcher.load(model, "cpu", scene=True, min_matches=5)]
    digests = {digest, *(matcher.digest() for matcher in changed)}
    assert len(digests) == 1 + len(changed)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_is_refused_in_one_line(matcher, photo):
    context = multiprocessing.get_context("fork")
    said = context.Queue()

    def match():
        try:
            matcher.match(photo, photo)
        except RequestError as error:
            said.put(str(error))

    child = context.Process(target=match)
    child.start()
    assert "use multiprocessing.get_context('spawn')" in said.get(timeout=60)
    child.join()


def test_of_a_magnified_part_more_right_matches_are_found(photo, untrained):
    """Keypoints of highest rank are large: in the whole view and in its part not the same ones."""
    H = np.array([[3.0, 0, -600], [0, 3, -400], [0, 0, 1]])
    part = cv2.warpPerspective(photo, H, (600, 400), flags=cv2.INTER_CUBIC)
    right = {}
    for name, most in (("by rank", 200), ("selected", 4096)):
        matcher = Matcher(untrained.model, max_keypoints=most, network_keypoints=200, refine=False)
        found = matcher.match(photo, part)
        away = np.linalg.norm(two_view.transform(found.points0, H) - found.points1, axis=1)
        right[name] = int((away < 3).sum())
    assert right["selected"] > 1.5 * right["by rank"]
