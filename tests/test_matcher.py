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


def test_importing_superglue_sift_does_not_load_torch():
    script = "import sys, superglue_sift; sys.exit('torch' in sys.modules or 'cv2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.fixture
def matcher(untrained):
    return untrained


def test_matches_of_pixels_are_pairs_of_keypoints_that_correspond(matcher, photo, turned):
    result = matcher.match(photo, turned)
    assert result.size0 == result.size1 == (600, 400)
    assert len(result.scores) > 30 and (result.scores > 0.2).all()
    assert len(set(result.matches[:, 0])) == len(set(result.matches[:, 1])) == len(result.matches)
    error = np.linalg.norm(transform(result.points0.astype(float), TURN) - result.points1, axis=1)
    assert (error < 3).mean() > 0.8


def test_a_call_may_turn_refinement_off(matcher, photo, turned):
    images = matcher.extract(photo), matcher.extract(turned)
    assert matcher.match(*images).deviations is not None
    results = [
        matcher.match(*images, refine=False),
        *matcher.match_many(images[0], [images[1]], refine=False),
        *matcher.match_batch([images], refine=False),
    ]
    assert [result.deviations for result in results] == [None] * 3


@pytest.mark.parametrize(
    "scene, refine, is_refined",
    [(False, None, True), (True, None, False), (True, True, True), (False, False, False)],
)
def test_without_refine_scenes_are_not_refined_and_pairs_are(
    model, photo, turned, scene, refine, is_refined
):
    matcher = Matcher.load(model, "cpu", scene=scene, refine=refine, max_keypoints=500, resize=768)
    result = matcher.match(photo, turned)
    assert result.accepted and len(result.matches) > 30
    assert (result.deviations is not None) == matcher.refines == is_refined


def test_features_without_pixels_cannot_be_refined_on_request(matcher, photo, turned):
    pair = matcher.extract(photo), matcher.extract(turned)._replace(gray=None)
    assert matcher.refines and matcher.match(*pair).deviations is None
    with pytest.raises(RequestError, match="refine=True"):
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
    assert_same(expected, matcher.match(*features))
    np.testing.assert_array_equal(features[0].keypoints, expected.keypoints0)


def assert_same(result, expected):
    names = {field.name for field in dataclasses.fields(result)}
    for name in names - {"images", "_fits", "scored_matches"}:
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name))
    np.testing.assert_array_equal(result.matches, expected.matches)
    np.testing.assert_array_equal(result.scores, expected.scores)


def test_tensors_and_pil_images_give_the_matches_of_the_same_pixels(matcher, color_photo):
    bgr = np.ascontiguousarray(color_photo[..., ::-1])
    expected = matcher.match(bgr, bgr[50:])
    image = Image.fromarray(color_photo)
    result = matcher.match(image, image.convert("RGBA").crop((0, 50, *image.size)))
    assert_same(result, expected)
    np.testing.assert_array_equal(result.load_photos()[0].pixels, bgr)
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
    result = matcher.match(first, cv2.resize(second, size, interpolation=cv2.INTER_CUBIC))
    assert least < len(result.matches) / len(expected.matches) < 1.03
    refined = [int(np.isfinite(part.deviations).sum()) for part in (expected, result)]
    assert least < refined[1] / refined[0] < 1.03 and refined[0] > 300
    # in pixels of the file
    F = expected.fit_fundamental().model
    points1 = (result.points1 + 0.5) * (second.shape[1] / side) - 0.5
    assert np.median(compute_epipolar_distances(F, result.points0, points1)) < 0.5


def test_one_image_against_many_computes_its_features_once(matcher, photo, turned, monkeypatch):
    images1 = [turned, photo[:, 50:], photo[100:]]
    expected = [matcher.match(photo, image1) for image1 in images1]
    extracted = []
    extract = Matcher.extract
    monkeypatch.setattr(
        Matcher, "extract", lambda self, image: extracted.append(image) or extract(self, image)
    )
    results = list(matcher.match_many(photo, images1, batch_size=2))
    assert len(extracted) == 4 and sum(image is photo for image in extracted) == 1
    for result, expected_result in zip(results, expected):
        np.testing.assert_array_equal(result.matches, expected_result.matches)


def test_match_batch_reads_one_batch_at_a_time(matcher, photo, turned):
    numbers = []

    def pairs():
        for number in range(5):
            numbers.append(number)
            yield photo[: 100 * number], turned  # the first has no row at all

    results = matcher.match_batch(pairs(), batch_size=2)
    with pytest.raises(RequestError):
        next(results)
    assert numbers == [0, 1]
    assert list(matcher.match_batch([])) == []


@pytest.mark.gpu
def test_a_gpu_gives_the_matches_of_the_cpu(model, photo, turned):
    cpu, gpu = (
        set(map(tuple, Matcher.load(model, device).match(photo, turned).matches))
        for device in ("cpu", "cuda")
    )
    assert len(cpu & gpu) > 0.97 * max(len(cpu), len(gpu))


def test_an_image_without_structure_gives_no_match(matcher, photo):
    flat = np.full((200, 300), 99, np.uint8)
    for pair in ((flat, flat), (flat, photo), (photo, flat)):
        result = matcher.match(*pair)
        assert result.matches.shape == result.points1.shape == (0, 2)


def make_features(count, width, value=9.0, scale=1.0):
    ones = np.ones(count)
    descriptors = np.full((count, width), value)
    positions = np.stack([np.arange(count), np.zeros(count)], axis=1)
    return Features.of(positions, scale * ones, ones, ones, descriptors, (64, 64))


def match_frames(matcher):
    """Match features of stored and of upright pixels."""
    features = make_features(5, 128)
    matcher.match(features._replace(frame="stored"), features._replace(turned=6))


@pytest.mark.parametrize(
    "request_wrongly, name",
    [
        (lambda matcher: matcher.extract("no.png"), r"no\.png"),
        (lambda matcher: matcher.extract(np.zeros((9, 9))), "uint8"),
        (lambda matcher: matcher.extract(torch.zeros(9, 9, 3)), r"\(9, 9, 3\)"),
        (lambda matcher: make_features(5, 256), "256"),
        (lambda matcher: make_features(5, 128, np.nan), "descriptors"),
        (match_frames, "frame"),
        (lambda matcher: Matcher.load("other.safetensors"), r"other\.safetensors"),
        (lambda matcher: Matcher.load(device="toaster"), "toaster"),
        (lambda matcher: Matcher.load(accept=0.3), "accept"),
    ],
)
def test_a_wrong_request_is_named(matcher, tmp_path, monkeypatch, request_wrongly, name):
    monkeypatch.chdir(tmp_path)
    info = {"model": {"dim": 128}}
    save_model_file(Path("other.safetensors"), {"a": matcher.model.dustbin}, info)
    with pytest.raises(RequestError, match=name):
        request_wrongly(matcher)


def test_threads_that_share_a_matcher_have_the_results_of_one_thread(matcher, photo, turned):
    image0, image1 = photo[::2, ::2], turned[::2, ::2]
    pairs = [(image0, image1), (image1, image0), (image0[50:], image1), (image0, image0[:, 25:])]
    expected = [matcher.match(*pair) for pair in pairs]
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda pair: matcher.match(*pair), pairs)
        for result, expected_result in zip(results, expected):
            assert_same(result, expected_result)


def test_two_matchers_of_one_model_do_not_change_each_other(model, photo, turned):
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
    expected = set(map(tuple, Matcher.load(model, "cpu").match(photo, turned).matches))
    compiled = Matcher.load(model, "cpu", compile=True)
    for _ in range(2):  # the second time nothing is compiled
        matches = set(map(tuple, compiled.match(photo, turned).matches))
        assert len(matches & expected) >= 0.99 * max(len(matches), len(expected))


def copy_by_pickle(matcher):
    return pickle.loads(pickle.dumps(matcher))  # noqa: S301  # our own


def test_a_matcher_is_pickled_by_its_file_and_settings(model, photo, turned):
    for_scenes = Matcher.load(model, "cpu", scene=True, accept=0.4, max_keypoints=300)
    for_scenes = dataclasses.replace(for_scenes, threshold=0.5)
    unpickled = copy_by_pickle(for_scenes)
    assert repr(unpickled) == repr(for_scenes) and unpickled.rules.accept == 0.4
    for_pairs = Matcher.load(model)
    # "auto" is chosen again, on a machine that may have no GPU.
    assert b"auto" in pickle.dumps(for_pairs)
    assert len(pickle.dumps(for_pairs)) < 2000  # no weights
    assert_same(for_pairs.match(photo, turned), copy_by_pickle(for_pairs).match(photo, turned))
    with pytest.raises(TypeError):
        pickle.dumps(Matcher(for_pairs.model))


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
    network = copy.deepcopy(matcher.model)
    assert dataclasses.replace(matcher, model=network).digest() == matcher.digest()
    with torch.no_grad():
        network.dustbin += 1
    assert dataclasses.replace(matcher, model=network).digest() != matcher.digest()


def test_the_digest_changes_with_all_settings_that_decide_matches(model, tmp_path):
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
def test_matching_in_a_forked_process_is_an_error_and_does_not_hang(matcher, photo):
    context = multiprocessing.get_context("fork")
    messages = context.Queue()

    def match():
        try:
            matcher.match(photo, photo)
        except RequestError as error:
            messages.put(str(error))

    child = context.Process(target=match)
    child.start()
    assert "spawn" in messages.get(timeout=60)
    child.join()


def test_the_selection_of_keypoints_gives_more_right_matches_of_a_magnified_part(photo, untrained):
    """Keypoints of highest rank are large: in the whole view and in its part not the same ones."""
    H = np.array([[3.0, 0, -600], [0, 3, -400], [0, 0, 1]])
    part = cv2.warpPerspective(photo, H, (600, 400), flags=cv2.INTER_CUBIC)
    counts = {}
    for name, most in (("by rank", 200), ("selected", 4096)):
        matcher = Matcher(untrained.model, max_keypoints=most, network_keypoints=200, refine=False)
        result = matcher.match(photo, part)
        errors = np.linalg.norm(two_view.transform(result.points0, H) - result.points1, axis=1)
        counts[name] = int((errors < 3).sum())
    assert counts["selected"] > 1.5 * counts["by rank"]
