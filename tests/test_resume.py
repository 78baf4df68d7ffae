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

from pipeline import prune, tracking
from pipeline.errors import RequestError
from pipeline.tracking.run import NullRun
from pipeline.train import __main__ as train
from pipeline.train import identity
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.weights import load_model_file, save_model_file


@pytest.fixture(autouse=True)
def untracked(monkeypatch) -> None:
    """Other tests cover MLflow, and a new store for each of these would take most of their time."""
    monkeypatch.setattr(tracking, "open_run", lambda *_, **__: NullRun())


def weights(path: Path) -> Dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_model_file(path)[0].items()}


def newest(folder: Path) -> Path:
    return sorted(folder.glob("step-*.safetensors"))[-1]


def aside(out: Path) -> List[Path]:
    """What was set aside, oldest first; names count seconds, and two may fall into one."""
    return sorted((out / "superseded").glob("*/"), key=lambda path: (path.name[:17], path.stat().st_mtime_ns))


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
    """For each cause: the checkpoint is still there to the byte, and the command that is printed resumes it."""

    def test_a_changed_parameter(self, tmp_path, request_of, monkeypatch, capsys, whole):  # noqa: F811
        saved = interrupted(request_of("run"), monkeypatch)
        capsys.readouterr()
        assert train.main(request_of("run", lr=0.001)) == 0
        printed = capsys.readouterr().out
        (place,) = aside(tmp_path / "run")
        assert weights(newest(place)) == saved
        assert "train.lr: 0.005 in the checkpoint, 0.001 now" in printed and "set train.lr: 0.005" in printed
        with pytest.raises(RequestError, match=r"train\.lr: 0\.005"):
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
        assert "restore the keypoints" in printed
        command = printed_command(printed)
        command[command.index("--keypoints") + 1] = arguments[1]
        assert train.main(command) == 0
        assert "resuming at step 4 of 6" in capsys.readouterr().out
        assert weights(tmp_path / "run" / "best.safetensors") == whole

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
    def test_nothing_that_was_set_aside_is_deleted(self, tmp_path, request_of, monkeypatch, capsys):  # noqa: F811
        """A long training, set aside by a second one, is still whole when a third sets the second aside."""
        interrupted(request_of("run", lr=0.001), monkeypatch)
        files = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        for lr in (0.002, 0.003):
            assert train.main(request_of("run", lr=lr, steps=2)) == 0
        printed = capsys.readouterr().out
        older, last = aside(tmp_path / "run")
        assert {path.name: path.read_bytes() for path in older.iterdir() if path.is_file()} == files
        assert len(list(last.glob("step-*.safetensors"))) == 1
        assert {path.name for path in (last / "curves").iterdir()} >= {"train.csv", "validation.csv"}
        size = sum(path.stat().st_size for path in (tmp_path / "run" / "superseded").rglob("*.*")) / 1e6
        assert f"2 trainings set aside, {size:.1f} MB; python -m pipeline.prune --out {tmp_path / 'run'}" in printed
        assert "deleted" not in printed

    def test_a_limit_spares_the_longest_and_names_what_it_deletes(self, tmp_path, request_of, capsys):  # noqa: F811
        for lr, steps in ((0.001, 4), (0.002, 2), (0.003, 2), (0.004, 2)):
            capsys.readouterr()
            assert train.main(request_of("run", lr=lr, steps=steps, superseded_gb=1e-6)) == 0
        kept = [load_model_file(place / "best.safetensors")[1]["train"]["lr"] for place in aside(tmp_path / "run")]
        assert sorted(kept) == [0.001, 0.003]  # the longest, and the one just set aside; in any order within a second
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "deleted" in line and "GB" not in line]
        assert line.startswith("--superseded-gb 1e-06: deleted ") and "of 2 steps" in line

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

    def test_a_best_model_that_was_put_next_to_the_checkpoints_is_not_overwritten(
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


def model_of(out: Path) -> Dict[str, bytes]:
    """Weights and optimiser of the newest checkpoint."""
    return {name: value for name, value in weights(newest(out)).items() if name.startswith(("model.", "optimizer."))}


class TestWhatMayChange:
    """A training resumes where its weights so far are those that the new parameters would have given."""

    @pytest.mark.parametrize(
        "before, step, after, fits",
        [
            ({"schedule": "constant_decay", "decay_start": 99}, 50, {"steps": 500, "decay_start": 200}, True),
            ({"schedule": "constant_decay", "decay_start": 40}, 50, {"decay_start": 50}, False),
            ({"schedule": "constant_decay", "decay_start": 40}, 50, {"steps": 500}, True),
            ({"schedule": "constant_decay", "decay_start": 40}, 50, {"steps": 49}, False),
            ({"schedule": "wsd", "decay_start": 60}, 50, {"steps": 500, "decay_start": 450}, True),
            ({"schedule": "wsd", "decay_start": 60}, 50, {"steps": 500, "schedule": "constant_decay"}, True),
            ({"schedule": "wsd", "decay_start": 40}, 50, {"steps": 500}, False),
            ({"schedule": "cosine"}, 50, {"steps": 500}, False),
            ({"schedule": "cosine", "warmup_steps": 60}, 50, {"steps": 500}, True),
            ({"schedule": "cosine"}, 50, {"decay_start": 7}, True),  # which it does not read
            ({}, 50, {"lr": 0.001}, False),
            ({}, 50, {"log_every": 7, "save_every": 7, "val_every": 7, "val_pairs": 7, "profile_steps": 7}, True),
            ({}, 50, {"superseded_gb": 7.0}, True),
            ({}, 50, {"accumulate": 2, "compile": True, "checkpoint_layers": True, "parallel": "single"}, True),
            ({}, 50, {"cuda_graph": True}, True),
            ({"norm": "batch"}, 50, {"cuda_graph": True}, False),
            ({"norm": "batch"}, 50, {"accumulate": 2}, False),  # statistics of half as many pairs
            ({}, 50, {"seed": 1}, False),
            ({}, 50, {"batch": 16}, False),
        ],
    )
    def test_what_decides_the_weights_so_far(self, make_params, before, step, after, fits):
        usual = {"steps": 100, "warmup_steps": 10, "init_from": ""}
        saved, ours = (
            identity.fingerprint(make_params("train", **keys), "data", 1)
            for keys in ({**usual, **before}, {**usual, **before, **after})
        )
        assert (identity.misfits(saved, ours, step) == []) is fits
        assert len(identity.changes(saved, ours)) == len(after)

    def test_what_only_reports_may_change_at_any_time(self, tmp_path, request_of, monkeypatch, capsys):  # noqa: F811
        assert train.main(request_of("whole")) == 0
        interrupted(request_of("run"), monkeypatch)
        capsys.readouterr()
        assert train.main(request_of("run", log_every=1, save_every=5, val_every=2, val_pairs=6)) == 0
        printed = capsys.readouterr().out.splitlines()
        assert "resuming at step 4 of 6" in printed
        assert "train.save_every changed on resume: 2 -> 5" in printed
        assert model_of(tmp_path / "run") == model_of(tmp_path / "whole") and not aside(tmp_path / "run")
        best = load_model_file(tmp_path / "run" / "best.safetensors")[1]
        assert best["validation"]["pairs"] == 6  # also a best model of before, which was chosen on four
        assert train.main(request_of("run", log_every=3)) == 0
        assert "nothing to do" in capsys.readouterr().out

    def test_a_finished_training_goes_on_for_longer(self, tmp_path, request_of, capsys):  # noqa: F811
        constant = {"schedule": "constant_decay", "decay_start": 99}
        assert train.main(request_of("whole", **constant, steps=9)) == 0
        assert train.main(request_of("run", **constant)) == 0
        named = load_model_file(tmp_path / "run" / "best.safetensors")[1]["training"]
        capsys.readouterr()
        assert train.main(request_of("run", **constant, steps=9)) == 0
        printed = capsys.readouterr().out
        assert "resuming at step 6 of 9" in printed
        assert "train.steps changed on resume: 6 -> 9: earlier steps have the same learning rates" in printed
        assert model_of(tmp_path / "run") == model_of(tmp_path / "whole")
        best = load_model_file(tmp_path / "run" / "best.safetensors")[1]
        assert best["finished"] and best["training"] == named  # it stays in its run of MLflow

    def test_it_may_end_where_it_was_stopped(self, tmp_path, request_of, monkeypatch):  # noqa: F811
        constant = {"schedule": "constant_decay", "decay_start": 99}
        interrupted(request_of("run", **constant), monkeypatch, step=2)  # before the first validation
        assert train.main(request_of("run", **constant, steps=2)) == 0
        best = load_model_file(tmp_path / "run" / "best.safetensors")[1]
        assert best["finished"] and best["step"] == 2

    def test_other_versions_are_said_and_recorded(self, tmp_path, request_of, monkeypatch, capsys):  # noqa: F811
        with monkeypatch.context() as patch:
            patch.setattr(identity, "versions", lambda: {"torch": "1.0"})
            interrupted(request_of("run"), patch)
        monkeypatch.setattr(identity, "versions", lambda: {"torch": "2.0"})
        capsys.readouterr()
        assert train.main(request_of("run")) == 0
        said = [line for line in capsys.readouterr().out.splitlines() if "torch 1.0 (now 2.0)" in line]
        assert len(said) == 1
        best = load_model_file(tmp_path / "run" / "best.safetensors")[1]
        assert best["versions"] == [{"step": 0, "torch": "1.0"}, {"step": 4, "torch": "2.0"}]
        assert train.main(request_of("run")) == 0
        assert "trained under" not in capsys.readouterr().out  # the last steps were of this one
        monkeypatch.undo()
        assert train.main(request_of("run")) == 0
        assert "it was trained under" in capsys.readouterr().out


class TestPrune:
    @pytest.fixture
    def out(self, tmp_path) -> Path:
        """Three trainings that were set aside, of 10, 20 and 30 steps."""
        model = SuperGlue(SuperGlueConfig(dim=16, layers=1, heads=2))
        for day in (1, 2, 3):
            place = tmp_path / "superseded" / f"2026-01-0{day}-000000-train.lr"
            save_model_file(place / f"step-{day * 10:08d}.safetensors", model.state_dict(), {"step": day * 10})
        return tmp_path

    @pytest.mark.parametrize("answer, left", [("", [1, 2, 3]), ("1 3", [2]), ("all", []), (None, [1, 2, 3])])
    def test_it_names_sizes_and_asks(self, out, monkeypatch, capsys, answer, left):
        def input(question: str) -> str:
            assert "Delete which?" in question
            if answer is None:  # nobody is there
                raise EOFError
            return answer

        size = sum(path.stat().st_size for path in aside(out)[0].iterdir()) / 1e6
        monkeypatch.setattr("builtins.input", input)
        assert prune.main(["--out", str(out)]) == 0
        assert f"   1  2026-01-03-000000-train.lr: 30 steps, {size:.1f} MB" in capsys.readouterr().out
        assert [int(place.name[9]) for place in aside(out)] == left

    @pytest.mark.parametrize("answer", ["4", "0", "x", "1 all", "-1"])
    def test_any_other_word_deletes_nothing(self, out, monkeypatch, answer):
        monkeypatch.setattr("builtins.input", lambda _: answer)
        with pytest.raises(RequestError, match="nothing was deleted"):
            prune.main(["--out", str(out)])
        assert len(aside(out)) == 3

    def test_where_there_is_nothing(self, tmp_path, capsys):
        assert prune.main(["--out", str(tmp_path)]) == 0
        assert "nothing was set aside" in capsys.readouterr().out


class TestRequests:
    def test_a_folder_that_is_none_is_named(self, request_of, tmp_path):  # noqa: F811
        with pytest.raises(RequestError, match="nowhere: no checkpoints there"):
            train.check([*request_of("run"), "--resume", str(tmp_path / "nowhere")])

    def test_a_folder_that_does_not_fit_moves_nothing(self, tmp_path, request_of):  # noqa: F811
        assert train.main(request_of("run")) == 0
        assert train.main(request_of("run", lr=0.001)) == 0
        (place,) = aside(tmp_path / "run")
        before = sorted(path for path in (tmp_path / "run").rglob("*"))
        with pytest.raises(RequestError, match=r"train\.lr: 0\.005 in the checkpoint, 0\.001 now"):
            train.main([*request_of("run", lr=0.001), "--resume", str(place)])
        assert sorted(path for path in (tmp_path / "run").rglob("*")) == before
