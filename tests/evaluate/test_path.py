"""What is measured is what users get: the evaluation and `Matcher` take one path.

All photographs come with scikit-image, so that every clone runs these tests.
"""

import cv2
import numpy as np
import pytest
from made_evaluations import read_csv, read_metrics
from reading import read_json

from pipeline import errors
from pipeline.evaluate import __main__ as evaluate
from pipeline.evaluate import matchers
from pipeline.evaluate.matchers import OURS, RATIO_TEST
from pipeline.evaluate.pair_files import HPatchesPairs
from pipeline.evaluate.pairs import extract_scene_pairs
from superglue_sift import Matcher
from superglue_sift.network.weights import find_shipped_weights

# Fewer keypoints than of a user, so that the tests are quick; the network gets a quarter of them.
FEW = {"max_keypoints": 400, "network_keypoints": 100}
OPTIONS = ["--max-keypoints", "400", "--network-keypoints", "100", "--no-refine"]
NAMES = ("astronaut", "chelsea", "coffee", "rocket", "camera", "moon", "gravel", "brick")


def make_views(photo, number):
    """A photograph (H, W), a rotated, smaller, darker view of it, and the homography."""
    height, width = photo.shape
    turn = cv2.getRotationMatrix2D((width / 2, height / 2), 25 + 20 * number, 0.7)
    H = np.vstack([turn, [4e-4, -2e-4, 1]])
    view = cv2.warpPerspective(photo, H, (width, height), flags=cv2.INTER_AREA)
    return photo, cv2.convertScaleAbs(view, alpha=0.6, beta=10), H


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    """A folder in HPatches layout: one pair of each of eight photographs."""
    from skimage import data

    folder = tmp_path_factory.mktemp("sequences")
    for number, name in enumerate(NAMES):
        photo = getattr(data, name)()
        if photo.ndim == 3:
            photo = cv2.cvtColor(photo, cv2.COLOR_RGB2GRAY)
        image0, image1, H = make_views(photo, number)
        (folder / name).mkdir()
        cv2.imwrite(str(folder / name / "1.png"), image0)
        cv2.imwrite(str(folder / name / "2.png"), image1)
        np.savetxt(folder / name / "H_1_2", H)
    return folder


def evaluate_pairs(folder, out, *options):
    """Evaluate the shipped weights on a folder of pairs, with these options."""
    words = ["--pairs", folder, "--out", out, "--estimators", "ransac", *options]
    assert errors.run(evaluate.main, list(map(str, words))) == 0


def test_the_evaluation_and_a_matcher_find_the_same_matches(sequences):
    source = HPatchesPairs(sequences)
    networks = matchers.load_networks({OURS: find_shipped_weights()}, "cpu", FEW, "sift", [])
    matcher_set = matchers.MatcherSet(networks)
    matcher = Matcher.load(device="cpu", refine=False, **FEW)
    for index in (0, 2):
        (pair,) = extract_scene_pairs(source, index, matcher_set.evaluated.extract)
        matches = matcher_set.match(pair)[OURS].keep_above(matcher_set.thresholds[OURS])
        result = matcher.match(*source.files[index])
        np.testing.assert_array_equal(matches.indices, result.matches)
        np.testing.assert_array_equal(matches.scores, result.scores)
        np.testing.assert_array_equal(pair.features[0].keypoints, result.keypoints0)
        # More than the network could find: guided matches are among them.
        assert len(matches) > FEW["network_keypoints"]


@pytest.mark.slow
def test_without_options_pairs_are_matched_as_the_command_does(sequences, tmp_path):
    only = tmp_path / "only"
    only.mkdir()
    (only / "rocket").symlink_to(sequences / "rocket")
    evaluate_pairs(only, tmp_path / "out")
    (row,) = [row for row in read_csv(tmp_path / "out/pairs.csv") if row["matcher"] == OURS]
    result = Matcher.load(device="cpu").match(*(only / "rocket" / f"{n}.png" for n in (1, 2)))
    assert int(row["matches"]) == len(result.matches)
    assert int(row["keypoints0"]) == len(result.keypoints0) > 400
    protocol = read_json(tmp_path / "out/protocol.json")["matcher"]
    assert protocol == {"max_keypoints": 4096, "network_keypoints": 1024, "resize": 1024}
    # The metrics of refined matches are there, as the command refines.
    assert f"{OURS}.auc_ransac_refined_5" in read_metrics(tmp_path)


@pytest.mark.slow
def test_network_keypoints_change_what_the_network_gets_and_nothing_else(sequences, tmp_path):
    rows = []
    for name, options in (("few", OPTIONS), ("all", [*OPTIONS, "--network-keypoints", "400"])):
        evaluate_pairs(sequences, tmp_path / name, *options)
        rows.append(read_csv(tmp_path / name / "pairs.csv"))
    rows_of_few, rows_of_all = ([row for row in part if row["matcher"] != OURS] for part in rows)
    assert rows_of_few == rows_of_all
    rows_of_few, rows_of_all = ([row for row in part if row["matcher"] == OURS] for part in rows)
    assert rows_of_few != rows_of_all
    for row, row_of_all in zip(rows_of_few, rows_of_all):
        for key in ("pair", "keypoints0", "keypoints1", "true_matches"):
            assert row[key] == row_of_all[key]


@pytest.mark.slow
def test_a_model_has_the_same_report_by_path_and_as_shipped(sequences, tmp_path):
    only = tmp_path / "only"
    only.mkdir()
    (only / "coffee").symlink_to(sequences / "coffee")
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(find_shipped_weights().read_bytes())
    evaluate_pairs(only, tmp_path / "shipped", *OPTIONS)
    evaluate_pairs(only, tmp_path / "named", *OPTIONS, "--model", copy)
    for file in ("pairs.csv", "metrics.json", "report.txt", "intervals.csv", "differences.csv"):
        texts = [(tmp_path / name / file).read_text() for name in ("shipped", "named")]
        assert texts[0] == texts[1]


def test_the_shipped_weights_beat_the_ratio_test(sequences, tmp_path):
    """Recall at the ratio test's precision, on eight photographs.

    The difference here is above 20 points, and the margin is half of that, so that no rounding of a
    processor decides.
    """
    evaluate_pairs(sequences, tmp_path / "out", "--max-keypoints", "400", "--no-refine")
    values = {
        name: read_json(tmp_path / "out/metrics.json")[f"{name}.recall_at_ratio_precision"]
        for name in (OURS, RATIO_TEST)
    }
    assert values[OURS] > values[RATIO_TEST] + 0.10
