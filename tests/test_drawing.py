"""superglue_sift/drawing.py: what the colours, lines and points of a picture of matches say."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from superglue_sift import drawing
from superglue_sift.drawing import BAR, GAP, RED, Panel, draw

BLACK = np.zeros((200, 300, 3), np.uint8)
MIDDLE = 300 + GAP // 2  # of a picture of two such images: a column that lines alone cross
VIOLET, YELLOW = np.array([84, 1, 68]), np.array([37, 231, 253])  # BGR, the ends of viridis


def rows(*heights):
    """Points of level matches at these heights."""
    return np.array([[150.0, height] for height in heights]).reshape(-1, 2)


def panel(heights, scores, wrong=None, **more):
    wrong = None if wrong is None else np.array(wrong, bool)
    return Panel("", rows(*heights), rows(*heights), np.array(scores, float), wrong, **more)


def crossing(picture, height):
    """The colour in which a level match crosses the white gap, freed of what shines through.

    OpenCV's antialiased line covers nine tenths of the pixels it runs through, so this is right to a tenth of 255.
    """
    seen = picture[BAR + height, MIDDLE].astype(float)
    return (seen - (1 - drawing.OPACITY) * 255) / drawing.OPACITY


def test_colours_are_viridis_from_0_to_1():
    colours = np.array(drawing.colour_table())
    np.testing.assert_allclose(colours[[0, 255]], [VIOLET, YELLOW], atol=2)
    assert drawing.colour_of(-1) == drawing.colour_of(0) and drawing.colour_of(2) == drawing.colour_of(1)
    light = cv2.cvtColor(colours[None].astype(np.uint8), cv2.COLOR_BGR2LAB)[0, :, 0].astype(int)
    assert (np.diff(light) >= -1).all() and light[-1] - light[0] > 150, "brighter is surer, in gray prints too"
    assert drawing.css_colours()[255] == "#{2:02x}{1:02x}{0:02x}".format(*drawing.colour_table()[255])


def test_lines_are_half_transparent_and_coloured_by_confidence():
    picture = draw(BLACK, BLACK, [panel([40, 100], [0.0, 1.0])])
    np.testing.assert_allclose(crossing(picture, 40), VIOLET, atol=26)
    np.testing.assert_allclose(crossing(picture, 100), YELLOW, atol=26)
    np.testing.assert_array_equal(picture[BAR + 70, MIDDLE], 255)
    np.testing.assert_allclose(picture[BAR + 40, 150], VIOLET, atol=4)  # ends are opaque


def test_wrong_matches_are_red_crosses_and_over_the_right_ones():
    picture = draw(BLACK, BLACK, [panel([40, 40, 100], [0.9, 0.1, 0.9], [False, True, False])])
    np.testing.assert_allclose(crossing(picture, 40), RED, atol=26)
    np.testing.assert_allclose(crossing(picture, 100), drawing.colour_of(0.9), atol=26)
    above = picture[BAR + 40 - 3, 145:149].astype(int)  # an arm of the cross reaches where a dot does not
    assert (np.abs(above - RED).max(axis=1) < 100).any()


def test_of_many_matches_the_strongest_are_lines_and_the_others_points():
    heights = np.arange(0, 200, 1)
    scores = np.random.default_rng(0).permutation(200) / 199.0
    picture = draw(BLACK, BLACK, [panel(heights, scores)])
    crossed = (picture[BAR : BAR + 200, MIDDLE] != 255).any(axis=1)
    weak = scores < 50 / 199  # the 50 weakest of 200
    assert crossed[~weak].all()
    alone = weak & np.r_[True, weak[:-1]] & np.r_[weak[1:], True]  # the antialiased edge of a line reaches a pixel far
    assert alone.sum() >= 2 and not crossed[alone].any()
    dots = picture[BAR : BAR + 200, 150]
    assert (dots.astype(int).sum(axis=1) > 0).all()


def test_the_legend_says_what_is_there():
    plain, marked = (drawing.legend_bar(700, [panel([1], [1.0], wrong)]) for wrong in (None, [True]))
    many = drawing.legend_bar(700, [panel(range(151), np.ones(151))])
    assert plain.shape == marked.shape == many.shape == (BAR, 700, 3)
    assert not (plain == RED).all(axis=2).any() and (marked == RED).all(axis=2).any()
    assert (many[:, 400:] != many[0, -1]).any() and not (plain[:, 400:] != plain[0, -1]).any()
    assert drawing.legend_bar(40, [panel([1], [1.0], [True])]).shape == (BAR, 40, 3)


def test_panels_lie_below_each_other_and_photographs_stay_in_colour(tmp_path):
    image0, image1 = np.full((60, 80), 90, np.uint8), np.full((50, 70, 3), (10, 90, 200), np.uint8)
    one = Panel("x" * 200, rows(10)[:, ::-1] * 0 + 5, np.full((1, 2), 5.0), np.ones(1), np.array([False]))
    picture = draw(image0, image1, [one, one])
    assert picture.shape == (2 * (60 + BAR) + BAR, 80 + GAP + 70, 3)
    np.testing.assert_array_equal(picture[BAR + 40, 80 + GAP + 40], (10, 90, 200))
    np.testing.assert_array_equal(picture[BAR + 40, 40], 90)
    drawing.write(tmp_path / "new" / "a.png", picture)
    np.testing.assert_array_equal(cv2.imread(str(tmp_path / "new" / "a.png")), picture)


def test_large_images_are_reduced_and_points_with_them():
    large = np.zeros((300, 2 * drawing.SIDE, 3), np.uint8)
    ends = np.array([[1000.5, 100.5]])
    picture = draw(large, BLACK, [Panel("", ends, rows(100), np.ones(1))])
    assert picture.shape == (200 + 2 * BAR, drawing.SIDE + GAP + 300, 3)
    np.testing.assert_allclose(picture[BAR + 50, 500], YELLOW, atol=4)  # the centre of 1000.5 is that of pixel 500


def test_a_picture_of_no_matches():
    assert draw(BLACK, BLACK, [Panel("nothing", np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(0))]).any()


def test_what_cannot_be_encoded_is_an_os_error():
    with pytest.raises((OSError, cv2.error)):
        drawing.encode(".nothing", BLACK)
