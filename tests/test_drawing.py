"""superglue_sift/drawing.py: colors, lines and points of a picture of matches."""

import cv2
import numpy as np

from superglue_sift import drawing
from superglue_sift.drawing import GAP, RED, Panel, draw_panels

BLACK = np.zeros((200, 300, 3), np.uint8)
MIDDLE = 300 + GAP // 2  # of a picture of two such images: a column that lines alone cross
BAR = len(drawing.draw_text_bar(608, ""))  # above the images


def make_points(*heights):
    """Points of level matches at these heights."""
    return np.array([[150.0, height] for height in heights]).reshape(-1, 2)


def make_panel(heights, scores, is_wrong=False):
    is_wrong = np.broadcast_to(is_wrong, len(heights))
    points = make_points(*heights)
    return Panel("", points, points, np.array(scores, float), is_wrong)


def read_line_color(picture, height):
    """The color in which a level match crosses the white gap, without the gap's part of it.

    OpenCV's antialiased line covers nine tenths of the pixels it runs through, so this is right to
    a tenth of 255.
    """
    color = picture[BAR + height, MIDDLE].astype(float)
    return (color - (1 - drawing.OPACITY) * 255) / drawing.OPACITY


def test_hues_grow_from_left_to_right_and_are_never_red():
    points = np.stack([np.arange(300.0), np.zeros(300)], axis=1)
    colors = drawing.compute_colors(points, 300).astype(int)
    hues = cv2.cvtColor(colors[None].astype(np.uint8), cv2.COLOR_BGR2HSV)[0, :, 0].astype(int)
    assert (np.diff(hues) >= 0).all() and hues[0] < 30 and hues[-1] > 140
    assert np.abs(colors - RED).max(axis=1).min() > 100


def test_lines_are_translucent_and_have_the_color_of_their_place():
    picture = draw_panels(BLACK, BLACK, [make_panel([40], [1.0])])
    color = drawing.compute_colors(make_points(40), 300)[0]
    np.testing.assert_allclose(read_line_color(picture, 40), color, atol=30)
    np.testing.assert_array_equal(picture[BAR + 70, MIDDLE], 255)
    np.testing.assert_allclose(picture[BAR + 40, 150], color, atol=4)  # ends are opaque


def test_wrong_matches_are_red_crosses_and_over_the_right_ones():
    picture = draw_panels(BLACK, BLACK, [make_panel([40, 40], [0.9, 0.1], [False, True])])
    np.testing.assert_allclose(read_line_color(picture, 40), RED, atol=26)
    # An arm of the cross reaches where a dot does not
    above = picture[BAR + 40 - 3, 145:149].astype(int)
    assert (np.abs(above - RED).max(axis=1) < 100).any()


def test_of_many_matches_those_spread_over_the_image_are_lines_and_the_others_points():
    heights = np.arange(0, 200, 1)
    picture = draw_panels(BLACK, BLACK, [make_panel(heights, np.ones(200))])
    is_crossed = (picture[BAR : BAR + 200, MIDDLE] != 255).any(axis=1)
    assert is_crossed.sum() < 200 and all(part.any() for part in np.split(is_crossed, 10))
    dots = picture[BAR : BAR + 200, 150]
    assert (dots.astype(int).sum(axis=1) > 0).all()
