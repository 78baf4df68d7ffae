"""benchmarks.dev.colmap_slot: what COLMAP hands over, and the table."""

import numpy as np
import pytest
import torch
from made_scenes import SHIFT, TURN, write_sequence

from benchmarks.dev import colmap, colmap_slot
from benchmarks.dev.colmap_slot import Scored, right_at
from pipeline import errors
from superglue_sift import load_model, onnx, torch_compat
from superglue_sift.weights import shipped_weights


def test_right_matches_at_a_precision():
    scores = np.array([0.9, 0.7, 0.5, 0.3])
    right = np.array([True, True, False, True])
    scored = [Scored(9, scores, right, 0.0), Scored(9, scores - 0.01, ~right, 0.0)]
    assert right_at(scored, 0.6) == 1.0
    assert right_at(scored, 1.0) == 0.5
    assert right_at(scored, 0.5) == 2.0


class InTorch:
    """The file, in torch."""

    def __init__(self, _file):
        self.network = onnx.ColmapSuperGlue(load_model(shipped_weights())[0], 0.3)

    @torch.no_grad()
    def run(self, _names, inputs):
        return [v.numpy() for v in self.network(*(torch.from_numpy(v) for v in inputs.values()))]


@pytest.mark.slow
@pytest.mark.skipif(not torch_compat.can_export(), reason="needs torch.sym_min")
def test_the_table_is_printed_by_one_command(photo, tmp_path, monkeypatch, capsys):
    pytest.importorskip("pycolmap")
    write_sequence(tmp_path / "sequences/coffee", photo, {2: TURN, 3: SHIFT})
    monkeypatch.setattr(colmap, "load_slot", InTorch)
    words = [tmp_path / "x.onnx", "--pairs", tmp_path / "sequences", "--keypoints", "300"]
    assert errors.exit_code(colmap_slot.main, [str(word) for word in words]) == 0
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title == "sequences: 2 pairs"
    rows = {way: list(map(float, row)) for way, *row in map(str.split, lines) if row[4] != "-"}
    assert [line.split()[0] for line in lines] == list(colmap_slot.WAYS)
    for way in ("slot", "opencv"):
        keypoints, matches, P, right, at, *auc = rows[way]
        assert P > 85 and right > 100 and auc[-1] > 60
        assert keypoints >= matches >= right >= at
    assert errors.exit_code(colmap_slot.main, ["x.onnx"]) == 2
