"""superglue_sift/drawing.py: what the colors, lines and points of a picture of matches say."""

import cv2
import numpy as np
import pytest

from superglue_sift import drawing
from superglue_sift.drawing import GAP, RED, Panel, draw_panels

BLACK = np.zeros((200, 300, 3), np.uint8)
MIDDLE = 300 + GAP // 2  # of a picture of two such images: a column that lines alone cross
BAR = len(drawing.draw_text_bar(608, ""))  # above the images


def rows(*heights):
    """Points of level matches at these heights."""
    return np.array([[150.0, height] for height in heights]).reshape(-1, 2)


def panel(heights, scores, wrong=False):
    wrong = np.broadcast_to(wrong, len(heights))
    return Panel("", rows(*heights), rows(*heights), np.array(scores, float), wrong)


def crossing(picture, height):
    """The color in which a level match crosses the white gap, freed of what shines through.

    OpenCV's antialiased line covers nine tenths of the pixels it runs through, so this is right to
    a tenth of 255.
    """
    seen = picture[BAR + height, MIDDLE].astype(float)
    return (seen - (1 - drawing.OPACITY) * 255) / drawing.OPACITY


def test_colors_are_places_from_left_to_right_and_never_red():
    points = np.stack([np.arange(300.0), np.zeros(300)], axis=1)
    colors = drawing.compute_colors(points, 300).astype(int)
    hues = cv2.cvtColor(colors[None].astype(np.uint8), cv2.COLOR_BGR2HSV)[0, :, 0].astype(int)
    assert (np.diff(hues) >= 0).all() and hues[0] < 30 and hues[-1] > 140
    assert np.abs(colors - RED).max(axis=1).min() > 100


def test_lines_shine_through_and_have_the_color_of_their_place():
    picture = draw_panels(BLACK, BLACK, [panel([40], [1.0])])
    middle = drawing.compute_colors(rows(40), 300)[0]
    np.testing.assert_allclose(crossing(picture, 40), middle, atol=30)
    np.testing.assert_array_equal(picture[BAR + 70, MIDDLE], 255)
    np.testing.assert_allclose(picture[BAR + 40, 150], middle, atol=4)  # ends are opaque


def test_wrong_matches_are_red_crosses_and_over_the_right_ones():
    picture = draw_panels(BLACK, BLACK, [panel([40, 40], [0.9, 0.1], [False, True])])
    np.testing.assert_allclose(crossing(picture, 40), RED, atol=26)
    # An arm of the cross reaches where a dot does not
    above = picture[BAR + 40 - 3, 145:149].astype(int)
    assert (np.abs(above - RED).max(axis=1) < 100).any()


def test_of_many_matches_those_spread_over_the_image_are_lines_and_the_others_points():
    heights = np.arange(0, 200, 1)
    picture = draw_panels(BLACK, BLACK, [panel(heights, np.ones(200))])
    crossed = (picture[BAR : BAR + 200, MIDDLE] != 255).any(axis=1)
    assert crossed.sum() < 200 and all(part.any() for part in np.split(crossed, 10))
    dots = picture[BAR : BAR + 200, 150]
    assert (dots.astype(int).sum(axis=1) > 0).all()


@pytest.mark.parametrize("width", [608, 2568])
def test_letters_grow_with_the_picture_and_long_text_has_more_lines(width):
    bar = drawing.draw_text_bar(width, "H")
    letter = np.ptp(np.flatnonzero((bar > 200).any(axis=(1, 2)))) + 1
    # capital letters take two thirds of a font's size
    assert 0.55 < letter / max(width / drawing.LETTERS, drawing.SMALLEST) < 0.9
    long = drawing.draw_text_bar(width, " ".join(["matches"] * 40))
    assert len(long) > 2 * len(bar)
    assert (long[:, -width // 100 :] < 100).all(), "text leaves the picture"
