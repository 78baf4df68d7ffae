"""views/: border-free homographies, what rendering does to content, photometric distortion."""

import math
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_scenes import map_to_photograph

from pipeline.keypoints import views
from pipeline.keypoints.views import MAX_UPSCALE, make_generator, sample_mild_view, sample_view
from superglue_sift.features.images import BadImage
from superglue_sift.geometry.two_view import compute_jacobians, get_corners, transform

sides = st.integers(1, 12).map(lambda n: 32 * n)
limits = st.builds(
    SimpleNamespace,
    scale_min=st.floats(0.05, 1.0),
    perspective=st.floats(0.0, 0.9),
    rotation_deg=st.floats(0.0, 180.0),
    tilt_deg=st.floats(0.0, 80.0),
    max_upscale=st.floats(MAX_UPSCALE, 8.0),
)
USUAL = SimpleNamespace(
    scale_min=0.5, perspective=0.3, rotation_deg=45.0, tilt_deg=0.0, max_upscale=MAX_UPSCALE
)
LIGHTS = {"brightness": 0.5, "contrast": 0.9, "gamma": 0.9, "blur": 3.0, "noise": 0.2, "jpeg": 1.0}
OFF = dict.fromkeys(LIGHTS, 0.0)


def check_view(H, image_size, view_size, max_upscale=MAX_UPSCALE):
    """Inside the image, convex, the same way round, magnified within the bound, at corners and
    between.
    """
    quad = transform(get_corners(view_size), np.linalg.inv(H))
    assert quad.min() >= -1e-6 and (quad <= np.array(image_size) - 1 + 1e-6).all()
    edges = np.roll(quad, -1, axis=0) - quad
    after = np.roll(edges, -1, axis=0)
    assert (edges[:, 0] * after[:, 1] - edges[:, 1] * after[:, 0] > 0).all()
    x, y = np.meshgrid(np.linspace(0, view_size[0] - 1, 5), np.linspace(0, view_size[1] - 1, 5))
    inside = transform(np.stack([x, y], -1).reshape(-1, 2), np.linalg.inv(H))
    scales = np.linalg.svd(compute_jacobians(H, inside), compute_uv=False)
    assert scales.max() <= max_upscale * (1 + 1e-6)


@settings(max_examples=300)
@given(
    st.integers(2, 5000),
    st.integers(2, 5000),
    sides,
    sides,
    limits,
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_views_are_border_free_convex_and_bounded(width, height, w, h, limits, difficulty, seed):
    image_size = (width, height)
    view_size = (w, h)
    rng = make_generator(seed, "name", 1)
    try:
        views.require_size("name", image_size, view_size)
    except BadImage:
        return
    H = sample_view(rng, image_size, view_size, limits, difficulty)
    check_view(H, image_size, view_size, limits.max_upscale)
    check_view(sample_mild_view(rng, image_size, view_size), image_size, view_size)


def test_a_view_depends_on_seed_name_and_index_alone():
    def view(*key):
        return sample_view(make_generator(*key), (640, 480), (512, 384), USUAL)

    assert np.array_equal(view(0, "a", 1), view(0, "a", 1))
    different = [view(0, "a", 1), view(1, "a", 1), view(0, "b", 1), view(0, "a", 2)]
    assert len({H.tobytes() for H in different}) == 4


def test_views_of_more_difficulty_spread_further():
    def spread(difficulty):
        views = [
            sample_view(make_generator(0, "a", i), (640, 480), (512, 384), USUAL, difficulty)
            for i in range(60)
        ]
        quads = np.array(
            [transform(get_corners((512, 384)), np.linalg.inv(view)) for view in views]
        )
        return quads.std(axis=0).mean()

    assert spread(0.0) < 1e-9 < spread(0.2) < spread(0.6) < spread(1.0)


def test_a_tilt_squeezes_the_photograph_along_one_direction_by_up_to_its_cosine():
    steep = SimpleNamespace(
        **{**vars(USUAL), "scale_min": 1.0, "perspective": 0.0, "tilt_deg": 60.0}
    )
    ratios = []
    for i in range(200):
        H = sample_view(make_generator(0, "a", i), (640, 480), (512, 384), steep)
        stretches = np.linalg.svd(H[:2, :2] / H[2, 2], compute_uv=False)
        ratios.append(stretches[0] / stretches[1])
    assert 1.9 < max(ratios) <= 2.0 + 1e-6 and min(ratios) < 1.05  # 1 / cos 60 degrees
    assert np.median(ratios) == pytest.approx(math.sqrt(2.0), abs=0.1)  # log-uniform


def waves(x, y):
    """A smooth pattern, gray levels 28 to 228."""
    return 128 + 60 * np.sin(x / 17.0 + 0.3) + 40 * np.cos(y / 23.0 - x / 41.0)


def pattern(width, height, wave=waves):
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return np.rint(wave(x, y)).astype(np.uint8)


@pytest.mark.parametrize("index", range(8))
def test_rendered_content_lies_where_the_homography_says(index):
    H = sample_view(make_generator(3, "waves", index), (640, 480), (512, 384), USUAL)
    view = views.render(pattern(640, 480), H, (512, 384))
    x, y = map_to_photograph(H, (512, 384))
    expected = waves(x, y)
    # bilinear sampling of a pattern of this curvature and OpenCV's 1/32 px grid stay below two
    # levels
    assert np.abs(view - expected).max() < 2.5
    shifted = waves(x + 0.5, y + 0.5)
    assert np.abs(view - expected).mean() < 0.3 * np.abs(view - shifted).mean()


@pytest.mark.parametrize("size", [(2560, 1920), (3000, 1701)])
def test_huge_images_are_shrunk_without_aliasing_and_without_a_shift(size):
    def slow(x, y):
        return waves(x / 5.0, y / 5.0)

    image = pattern(*size, slow)
    checker = ((np.indices((size[1], size[0])).sum(0) % 2) * 40 - 20).astype(np.int16)
    noisy = np.clip(image.astype(np.int16) + checker, 0, 255).astype(np.uint8)
    H = sample_mild_view(make_generator(0, "huge", 0), size, (512, 384))
    expected = slow(*map_to_photograph(H, (512, 384)))
    inside = np.abs(views.render(noisy, H, (512, 384)) - expected)[2:-2, 2:-2]
    assert inside.max() < 6 and inside.mean() < 1.5


def test_distortions_of_zero_change_nothing(photo):
    off = SimpleNamespace(**OFF)
    assert np.array_equal(views.distort(photo, make_generator(0, "a", 1), off), photo)


@pytest.mark.parametrize("key", LIGHTS)
def test_a_distortion_changes_the_picture_and_does_not_move_it(photo, key):
    limits = SimpleNamespace(**{**OFF, key: LIGHTS[key]})
    distorted = [
        views.distort(photo, make_generator(0, "a", i), limits).astype(float) for i in range(4)
    ]
    assert any(np.abs(picture - photo).mean() > 0.5 for picture in distorted)
    middle = photo[:, 8:-8].ravel()
    for picture in distorted:
        shifted = (np.roll(picture, shift, 1)[:, 8:-8].ravel() for shift in (-2, 0, 2))
        correlations = [np.corrcoef(pixels, middle)[0, 1] for pixels in shifted]
        assert correlations[1] == max(correlations) > 0.8


def test_an_image_too_long_for_opencv_is_bad():
    views.require_size("a.png", (32_766, 600), (320, 240))
    with pytest.raises(BadImage, match="36000"):
        views.require_size("a.png", (36_000, 600), (320, 240))


def test_the_strength_of_views_grows_in_equal_steps_to_1(photo, make_params):
    keys = {"views_per_image": 4, "difficulty_first": 0.2, "smallest": 1.0}
    settings = make_params("keypoints", **keys)
    made = views.make_image_views(photo, "a", settings)
    for index, strength in ((1, 0.2), (2, 0.6), (3, 1.0)):
        rng = make_generator(settings.seed, "a", index)
        sizes = photo.shape[::-1], (settings.width, settings.height)
        H = sample_view(rng, *sizes, settings.views.homography, strength)
        np.testing.assert_allclose(made.homographies[index], H)


@pytest.mark.parametrize("scale, is_reduced", [(0.8, False), (0.6, True)])
def test_only_views_below_0_7_px_per_pixel_are_reduced_first(photo, scale, is_reduced):
    H = np.diag([scale, scale, 1.0])
    size = int(scale * photo.shape[1]), int(scale * photo.shape[0])
    warped = cv2.warpPerspective(photo, H, size, None, cv2.INTER_LINEAR, cv2.BORDER_REPLICATE)
    assert np.array_equal(views.render(photo, H, size), warped) != is_reduced


def test_the_mask_of_a_view_has_sharp_edges(photo, make_params, monkeypatch):
    """It has no gray pixel, which would count as visible."""
    masks = []
    extract = views.extractors.load_extractor("sift")

    def keep_mask(view, max_keypoints, mask):
        masks.append(mask)
        return extract(view, max_keypoints, mask)

    monkeypatch.setattr(views.extractors, "load_extractor", lambda _: keep_mask)
    mask = np.zeros_like(photo)
    mask[100:300, 150:450] = 255
    views.make_image_views(photo, "a", make_params("keypoints"), mask)
    assert set(np.unique(masks)) == {0, 255}
