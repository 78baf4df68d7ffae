"""Nothing a training has reached is lost: what does not fit is set aside, named, and taken up again."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Dict, List

import pytest
from made_views import made_keypoints
from test_training import request_of, stop_after  # noqa: F401 (a fixture)

from pipeline import tracking, train
from pipeline.errors import RequestError
from pipeline.tracking.run import NullRun
from superglue_sift.weights import load_model_file


@pytest.fixture(autouse=True)
def untracked(monkeypatch) -> None:
    """MLflow has tests of its own, and a new store for each of these would take most of their time."""
    monkeypatch.setattr(tracking, "open_run", lambda *_, **__: NullRun())


def weights(path: Path) -> Dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_model_file(path)[0].items()}


def newest(folder: Path) -> Path:
    return sorted(folder.glob("step-*.safetensors"))[-1]


def aside(out: Path) -> List[Path]:
    """What was set aside, oldest first."""
    return sorted((out / "superseded").glob("*/"))


def interrupted(arguments: List[str], monkeypatch, step: int = 4) -> Dict[str, bytes]:
    """A training stopped at `step`; what its newest checkpoint holds."""
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        assert train.main(arguments) == 143
    return weights(newest(Path(arguments[arguments.index("--out") + 1])))


def printed_command(out: str) -> List[str]:
    """The arguments of the command that a line names."""
    line = next(line for line in out.splitlines() if "set aside" in line)
    return shlex.split(re.search(r"python -m pipeline\.launch pipeline\.train (.*)", line).group(1))


@pytest.fixture
def whole(tmp_path, request_of) -> Dict[str, bytes]:  # noqa: F811
    """What the best model of a training is that nobody interrupts."""
    assert train.main(request_of("whole")) == 0
    return weights(tmp_path / "whole" / "best.safetensors")


class TestCauses:
    """For each cause: the checkpoint is still there to the byte, and the command that is printed goes on from it."""

    def test_a_changed_parameter(self, tmp_path, request_of, monkeypatch, capsys, whole):  # noqa: F811
        saved = interrupted(request_of("run"), monkeypatch)
        capsys.readouterr()
        assert train.main(request_of("run", lr=0.001)) == 0
        printed = capsys.readouterr().out
        (place,) = aside(tmp_path / "run")
        assert weights(newest(place)) == saved
        assert "train.lr: 0.0002 in the checkpoint, 0.001 now" in printed and "set train.lr: 0.0002" in printed
        with pytest.raises(RequestError, match=r"train\.lr: 0\.0002"):
            train.main(printed_command(printed))  # params.yaml is still the other one
        request_of("run")  # writes the parameters as they were
        assert train.main(printed_command(printed)) == 0
        assert "resuming at step 4 of 6" in capsys.readouterr().out
        assert weights(tmp_path / "run" / "best.safetensors") == whole

    def test_a_parameter_set_back_needs_no_command(self, tmp_path, request_of, monkeypatch, capsys, whole):  # noqa: F811
        interrupted(request_of("run"), monkeypatch)
        interrupted(request_of("run", lr=0.001), monkeypatch, step=5)
        capsys.readouterr()
        assert train.main(request_of("run")) == 0
        assert "resuming at step 4 of 6" in capsys.readouterr().out
        assert weights(tmp_path / "run" / "best.safetensors") == whole
        assert train.main(request_of("run", lr=0.001)) == 0
        assert "resuming at step 5 of 6" in capsys.readouterr().out

    def test_changed_data(self, tmp_path, request_of, monkeypatch, capsys, whole):  # noqa: F811
        arguments = request_of("run")
        saved = interrupted(arguments, monkeypatch)
        capsys.readouterr()
        others = ["--keypoints", str(made_keypoints(tmp_path / "others", seed=5)), *arguments[2:]]
        assert train.main(others) == 0
        printed = capsys.readouterr().out
        (place,) = aside(tmp_path / "run")
        assert place.name.endswith("-data") and weights(newest(place)) == saved
        assert "bring back the keypoints" in printed
        command = printed_command(printed)
        command[command.index("--keypoints") + 1] = arguments[1]
        assert train.main(command) == 0
        assert "resuming at step 4 of 6" in capsys.readouterr().out
        assert weights(tmp_path / "run" / "best.safetensors") == whole

    def test_changed_code(self, tmp_path, request_of, monkeypatch, capsys, whole):  # noqa: F811
        saved = interrupted(request_of("run"), monkeypatch)
        capsys.readouterr()
        monkeypatch.setattr("pipeline.training.state.code_digest", lambda *_: "changed")
        assert train.main(request_of("run")) == 0
        printed = capsys.readouterr().out
        (place,) = aside(tmp_path / "run")
        assert place.name.endswith("-code") and weights(newest(place)) == saved
        assert printed_command(printed)[-2:] == ["--accept", "code"]
        assert train.main(printed_command(printed)) == 0
        assert "resuming at step 4 of 6" in capsys.readouterr().out
        assert weights(tmp_path / "run" / "best.safetensors") == whole
        assert train.main(request_of("run")) == 0
        assert "nothing to do" in capsys.readouterr().out  # accepted once, for good

    def test_resume_never(self, tmp_path, request_of, monkeypatch, capsys, whole):  # noqa: F811
        saved = interrupted(request_of("run"), monkeypatch)
        capsys.readouterr()
        interrupted([*request_of("run"), "--resume", "never"], monkeypatch, step=2)
        printed = capsys.readouterr().out
        assert "resuming" not in printed
        (place,) = aside(tmp_path / "run")
        assert weights(newest(place)) == saved
        assert train.main(printed_command(printed)) == 0
        assert "resuming at step 4 of 6" in capsys.readouterr().out
        assert weights(tmp_path / "run" / "best.safetensors") == whole
        assert len(aside(tmp_path / "run")) == 1  # now the one that was begun from scratch
        assert train.main(printed_command(printed)) == 0  # given twice, it stays with what it took up
        assert "nothing to do" in capsys.readouterr().out

    def test_never_is_obeyed_once_when_a_lost_rank_restarts_the_training(
        self, tmp_path, request_of, monkeypatch, capsys  # noqa: F811
    ):  # fmt: skip
        interrupted([*request_of("run"), "--resume", "never"], monkeypatch)
        monkeypatch.setenv("SG_RESTARTED", "1")
        assert train.main([*request_of("run"), "--resume", "never"]) == 0
        assert "resuming at step 4 of 6" in capsys.readouterr().out and not aside(tmp_path / "run")

    def test_damaged_checkpoints_alone(self, tmp_path, request_of, monkeypatch):  # noqa: F811
        interrupted(request_of("run"), monkeypatch, step=1)
        damaged = newest(tmp_path / "run")
        damaged.write_bytes(damaged.read_bytes()[:-1])
        before = damaged.read_bytes()
        assert train.main(request_of("run")) == 0
        assert (aside(tmp_path / "run")[0] / damaged.name).read_bytes() == before


class TestWhatIsKept:
    def test_the_newest_is_kept_whole_and_older_ones_keep_their_best(self, tmp_path, request_of, capsys):  # noqa: F811
        for lr in (0.001, 0.002, 0.003):
            assert train.main(request_of("run", lr=lr)) == 0
        printed = capsys.readouterr().out
        older, last = aside(tmp_path / "run")
        assert not list(older.glob("step-*")) and (older / "best.json").is_file()
        assert load_model_file(older / "best.safetensors")[1]["train"]["lr"] == 0.001
        assert len(list(last.glob("step-*.safetensors"))) == 2
        assert {path.name for path in (last / "curves").iterdir()} >= {"train.csv", "validation.csv"}
        size = sum(path.stat().st_size for path in (tmp_path / "run" / "superseded").rglob("*.*")) / 1e6
        assert f"2 of them take {size:.1f} MB" in printed

    def test_a_training_without_a_best_model_keeps_its_checkpoint(self, tmp_path, request_of, monkeypatch):  # noqa: F811
        saved = interrupted(request_of("run"), monkeypatch, step=2)  # before the first validation
        for lr in (0.001, 0.002):
            assert train.main(request_of("run", lr=lr)) == 0
        assert weights(newest(aside(tmp_path / "run")[0])) == saved

    def test_a_finished_one_comes_back_as_it_was(self, tmp_path, request_of, capsys):  # noqa: F811
        out, reports = tmp_path / "run", tmp_path / "run-reports"
        files = ("metrics.json", "curves/train.csv", "curves/validation.csv")
        assert train.main(request_of("run")) == 0
        before = (out / "best.safetensors").read_bytes(), [(reports / name).read_bytes() for name in files]
        for lr in (0.001, 0.002):
            assert train.main(request_of("run", lr=lr)) == 0
        capsys.readouterr()
        assert train.main(request_of("run")) == 0
        assert "nothing to do" in capsys.readouterr().out
        assert before == ((out / "best.safetensors").read_bytes(), [(reports / n).read_bytes() for n in files])

    def test_a_best_model_that_was_put_beside_the_checkpoints_is_not_overwritten(
        self, tmp_path, request_of, monkeypatch, whole  # noqa: F811
    ):  # fmt: skip
        """`dvc checkout` restores best.safetensors of another training while one is interrupted."""
        assert train.main(request_of("other", lr=0.001)) == 0
        interrupted(request_of("run"), monkeypatch)
        for name in ("best.safetensors", "best.json"):
            (tmp_path / "run" / name).write_bytes((tmp_path / "other" / name).read_bytes())
        assert train.main(request_of("run")) == 0
        assert weights(tmp_path / "run" / "best.safetensors") == whole
        (place,) = aside(tmp_path / "run")
        assert weights(place / "best.safetensors") == weights(tmp_path / "other" / "best.safetensors")

    def test_the_best_model_comes_out_of_the_checkpoint_when_its_file_is_gone(
        self, tmp_path, request_of, monkeypatch, whole  # noqa: F811
    ):  # fmt: skip
        interrupted(request_of("run"), monkeypatch, step=5)
        (tmp_path / "run" / "best.safetensors").unlink()
        (tmp_path / "run" / "best.json").unlink()
        assert train.main(request_of("run")) == 0
        assert weights(tmp_path / "run" / "best.safetensors") == whole

    def test_a_finished_best_model_alone_is_enough(self, tmp_path, request_of, capsys):  # noqa: F811
        """As in a clone after `dvc pull`: outputs are there, checkpoints are not."""
        assert train.main(request_of("run")) == 0
        for path in (tmp_path / "run").glob("step-*"):
            path.unlink()
        best = (tmp_path / "run" / "best.safetensors").read_bytes()
        (tmp_path / "run-reports" / "metrics.json").write_text("{}")
        assert train.main(request_of("run")) == 0
        assert "nothing to do" in capsys.readouterr().out
        assert (tmp_path / "run" / "best.safetensors").read_bytes() == best
        assert json.loads((tmp_path / "run-reports" / "metrics.json").read_text())["step"] == 6


class TestRequests:
    def test_a_folder_that_is_none_is_named(self, request_of, tmp_path):  # noqa: F811
        with pytest.raises(RequestError, match="nowhere: no checkpoints there"):
            train.check([*request_of("run"), "--resume", str(tmp_path / "nowhere")])

    def test_a_folder_that_does_not_fit_moves_nothing(self, tmp_path, request_of):  # noqa: F811
        assert train.main(request_of("run")) == 0
        assert train.main(request_of("run", lr=0.001)) == 0
        (place,) = aside(tmp_path / "run")
        before = sorted(path for path in (tmp_path / "run").rglob("*"))
        with pytest.raises(RequestError, match=r"train\.lr: 0\.0002 in the checkpoint, 0\.001 now"):
            train.main([*request_of("run", lr=0.001), "--resume", str(place)])
        assert sorted(path for path in (tmp_path / "run").rglob("*")) == before
