"""Nothing a training has reached is lost: each has a folder, which is resumed or finished."""

import re

import pytest
from made_trainings import find_newest_checkpoint, find_training, interrupt, read_weights
from reading import read_files, read_json

from pipeline import provenance
from pipeline.errors import RequestError
from pipeline.train import __main__ as train
from pipeline.train import train as story
from superglue_sift import environment
from superglue_sift.network.weights import load_model_file, save_model_file


@pytest.fixture
def whole(tmp_path, request_of):
    """What the best model of a training is that nobody interrupts."""
    assert train.main(request_of("whole")) == 0
    return read_weights(tmp_path / "whole/best.safetensors")


@pytest.fixture
def output_of(request_of, capsys):
    """`output_of(out, *options, **train_keys)`: what a training prints that gets done."""

    def run(out, *options, **keys):
        capsys.readouterr()
        assert train.main([*request_of(out, **keys), *options]) == 0
        return capsys.readouterr().out

    return run


class TestFolders:
    """Each training has a folder; what another one changes in it is nothing."""

    def test_each_of_two_trainings_is_resumed_where_it_was_stopped(
        self, tmp_path, request_of, output_of, monkeypatch, whole
    ):
        interrupt(request_of("run"), monkeypatch)
        first = find_training(tmp_path / "run")
        files = read_files(first)
        interrupt(request_of("run", lr=0.001), monkeypatch, step=5)
        assert read_files(first) == files
        assert "resuming at step 4 of 6" in output_of("run")
        assert read_weights(tmp_path / "run/best.safetensors") == whole
        assert "resuming at step 5 of 6" in output_of("run", lr=0.001)

    def test_fresh_begins_anew_beside_it(
        self, tmp_path, request_of, output_of, monkeypatch, capsys, whole
    ):
        saved = interrupt(request_of("run"), monkeypatch)
        first = find_training(tmp_path / "run")
        capsys.readouterr()
        interrupt([*request_of("run"), "--fresh"], monkeypatch, step=2)
        assert "resuming" not in capsys.readouterr().out
        assert read_weights(find_newest_checkpoint(first)) == saved
        assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == [
            first.name,
            f"{first.name}-2",
        ]
        assert "resuming at step 2 of 6" in output_of("run")  # the newest of both
        assert read_weights(tmp_path / "run/best.safetensors") == whole

    @pytest.mark.parametrize("variable", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
    def test_fresh_is_obeyed_once_when_the_training_is_started_again(
        self, tmp_path, request_of, output_of, monkeypatch, variable
    ):
        interrupt([*request_of("run"), "--fresh"], monkeypatch)
        monkeypatch.setenv(variable, "1")
        assert "resuming at step 4 of 6" in output_of("run", "--fresh")
        find_training(tmp_path / "run")  # the only one

    def test_fresh_is_obeyed_in_a_job_that_slurm_has_requeued(
        self, tmp_path, request_of, output_of, monkeypatch
    ):
        assert train.main(request_of("run")) == 0
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert "nothing to do" not in output_of("run", "--fresh")
        assert len([*(tmp_path / "run").glob("*/step-00000006.safetensors")]) == 2

    @pytest.mark.slow
    def test_a_fresh_training_killed_before_its_first_checkpoint_is_still_fresh(
        self, tmp_path, request_of, output_of, monkeypatch, whole
    ):
        assert train.main(request_of("run")) == 0
        with monkeypatch.context() as patch:
            patch.setattr(story, "train_step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                train.main([*request_of("run"), "--fresh"])
        output = output_of("run")
        assert "resuming" not in output and "nothing to do" not in output
        assert read_weights(tmp_path / "run/best.safetensors") == whole
        assert len(list((tmp_path / "run").glob("*/step-00000006.safetensors"))) == 2

    def test_damaged_checkpoints_are_never_used_nor_changed(
        self, tmp_path, request_of, output_of, monkeypatch
    ):
        interrupt(request_of("run"), monkeypatch, step=3)
        first, second = sorted(find_training(tmp_path / "run").glob("step-*.safetensors"))
        second.write_bytes(second.read_bytes()[:-1])
        assert "resuming at step 2 of 6" in output_of("run")
        for path in (first, *find_training(tmp_path / "run").glob("step-*.safetensors")):
            path.write_bytes(b"")
        with pytest.raises(RequestError, match="--fresh"):
            train.main(request_of("run"))
        assert "nothing to do" not in output_of("run", "--fresh")
        assert first.read_bytes() == b""


class TestPublished:
    """checkpoints/best.*, reports/train: those of the training that ran last."""

    def test_a_finished_training_is_published_again(self, tmp_path, request_of, output_of):
        best = [f"run/best.{end}" for end in ("safetensors", "json", "trained_on.txt")]
        reports = ("metrics.json", "curves/train.csv", "curves/validation.csv")
        names = [*best, *(f"run-reports/{name}" for name in reports)]

        def read_published():
            return [(tmp_path / name).read_bytes() for name in names]

        assert train.main(request_of("run")) == 0
        before = read_published()
        assert train.main(request_of("run", lr=0.001)) == 0
        assert before != read_published()
        assert "nothing to do" in output_of("run")
        assert before == read_published()

    def test_a_resumed_training_publishes_its_own(self, tmp_path, request_of, monkeypatch, whole):
        """`dvc checkout` restores the best model and the curves of another training while one is
        interrupted.
        """
        interrupt(request_of("run"), monkeypatch, step=5)
        for name in ("best.safetensors", "best.json"):
            (tmp_path / "run" / name).unlink()
        for curve in (tmp_path / "run-reports/curves").iterdir():
            curve.write_text("of another training")
        assert train.main(request_of("run")) == 0
        assert read_weights(tmp_path / "run/best.safetensors") == whole
        for curve in (tmp_path / "run-reports/curves").iterdir():
            assert (
                curve.read_bytes() == (tmp_path / "whole-reports/curves" / curve.name).read_bytes()
            )


def read_best_info(folder):
    """The description of the best model of `run`."""
    return load_model_file(folder / "run/best.safetensors")[1]


def read_training_state(out):
    """Weights and optimizer of the newest checkpoint."""
    return {
        name: value
        for name, value in read_weights(find_newest_checkpoint(out)).items()
        if name.startswith(("model.", "optimizer."))
    }


class TestWhatMayChange:
    """A training resumes where its weights so far are those that the new parameters would have
    given.
    """

    def test_log_every_and_save_every_may_change_on_resume(
        self, tmp_path, request_of, output_of, monkeypatch
    ):
        assert train.main(request_of("whole")) == 0
        interrupt(request_of("run"), monkeypatch)
        printed = output_of("run", log_every=1, save_every=5).splitlines()
        assert "resuming at step 4 of 6" in printed
        assert read_training_state(tmp_path / "run") == read_training_state(tmp_path / "whole")
        find_training(tmp_path / "run")  # the only one
        assert "nothing to do" in output_of("run", log_every=3)

    def test_a_training_is_continued_with_other_validations(
        self, tmp_path, request_of, output_of, monkeypatch
    ):
        """They decide which weights are kept, so the training gets another name."""
        assert train.main(request_of("whole")) == 0
        interrupt(request_of("run"), monkeypatch)
        first = find_training(tmp_path / "run")
        keys = {"val_every": 2, "val_pairs": 6}
        printed = output_of("run", "--continue", str(first), **keys)
        assert "resuming at step 4 of 6" in printed
        assert "train.val_every changed on resume: 3 -> 2" in printed
        assert read_training_state(tmp_path / "run") == read_training_state(tmp_path / "whole")
        best = read_best_info(tmp_path)
        # Also a best model of before, which was chosen on four
        assert best["validation"]["pairs"] == 6 and best["training"] != first.name

    def test_a_finished_training_is_continued_with_a_longer_schedule(
        self, tmp_path, request_of, output_of, monkeypatch
    ):
        constant = {"schedule": "constant_decay", "decay_start": 99}
        assert train.main(request_of("whole", **constant, steps=9)) == 0
        assert train.main(request_of("run", **constant)) == 0
        short = find_training(tmp_path / "run")
        before = read_files(short)
        longer = [*request_of("run", **constant, steps=9), "--continue", str(short)]
        saved = interrupt(longer, monkeypatch, step=8)
        assert saved and "resuming at step 8 of 9" in output_of("run", **constant, steps=9)
        assert read_training_state(tmp_path / "run") == read_training_state(tmp_path / "whole")
        assert read_files(short) == before
        names = [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()]
        assert read_best_info(tmp_path)["training"] in names and len(names) == 2

    def test_a_stopped_training_is_finished_at_its_step(
        self, tmp_path, request_of, output_of, monkeypatch
    ):
        saved = interrupt(request_of("run"), monkeypatch)
        stopped = find_training(tmp_path / "run")
        output_of("run", "--continue", str(stopped), steps=4)
        curve = (tmp_path / "run-reports/curves/validation.csv").read_text().splitlines()
        assert [row.partition(",")[0] for row in curve[1:]] == ["0", "3", "4"]
        assert read_json(tmp_path / "run-reports/metrics.json")["step"] == 4
        best = read_best_info(tmp_path)
        assert best["finished"] and best["train"]["steps"] == 4
        finished = load_model_file(
            tmp_path / "run" / best["training"] / "step-00000004.safetensors"
        )
        assert finished[0]["model.dustbin"].numpy().tobytes() == saved["model.dustbin"]
        assert "nothing to do" in output_of("run", steps=4)

    @pytest.mark.parametrize("steps", [7, 8, 9])
    def test_a_continued_training_averages_its_own_last_steps(
        self, tmp_path, request_of, monkeypatch, steps
    ):
        """The mean of the last three steps begins with the weights of the checkpoint of step 6 at
        the earliest, and not with those of steps 4 and 5.
        """
        keys = {"schedule": "constant_decay", "decay_start": 99, "average": 3}
        assert train.main(request_of("run", **keys)) == 0
        checkpoint = load_model_file(find_newest_checkpoint(tmp_path / "run"))[0]
        weights = {6: checkpoint["model.dustbin"].item()}
        inner = story.train_step

        def take_step(objective, *arguments):
            results = inner(objective, *arguments)
            weights[max(weights) + 1] = objective.model.dustbin.item()
            return results

        monkeypatch.setattr(story, "train_step", take_step)
        longer = [
            *request_of("run", **keys, steps=steps),
            "--continue",
            str(find_training(tmp_path / "run")),
        ]
        assert train.main(longer) == 0
        average = load_model_file(find_newest_checkpoint(tmp_path / "run"))[0][
            "average.dustbin"
        ].item()
        averaged = [weights[step] for step in range(max(steps - 2, 6), steps + 1)]
        mean = sum(averaged) / len(averaged)
        # A rounding unit of float32 for each of the three steps of the mean
        assert average == pytest.approx(mean, rel=3 * 2**-24)

    def test_changes_of_versions_and_code_are_printed(self, request_of, output_of, monkeypatch):
        interrupt(request_of("run"), monkeypatch, step=2)
        monkeypatch.setattr(provenance, "get_release_versions", lambda names: {"torch": "9.0"})
        change_code(monkeypatch)
        lines = output_of("run").splitlines()
        assert "resuming at step 2 of 6" in lines
        for change in (r"code changed on resume: \w{16} -> 0000", r"torch .*: \S+ -> 9.0"):
            assert [line for line in lines if re.fullmatch(change, line)]

    def test_portable_bytes_are_not_claimed_after_another_number_of_processes(
        self, tmp_path, request_of, output_of, monkeypatch
    ):
        monkeypatch.setattr(environment, "is_prepared", lambda: True)
        interrupt(request_of("run", precision="portable"), monkeypatch, step=3)
        # As if two processes had begun it
        path = find_newest_checkpoint(tmp_path / "run")
        tensors, info = load_model_file(path)
        info["history"][0]["processes"] = 2
        save_model_file(path, tensors, info)
        # The next start knows it, too, although its number is that of the last one
        interrupt(request_of("run", precision="portable"), monkeypatch, step=4)
        output = output_of("run", precision="portable")
        assert "processes at step 3" in output and "the same bytes" not in output


def change_code(monkeypatch):
    """As if a file of code had been edited."""
    monkeypatch.setattr(provenance, "compute_code_digest", lambda stage: "0000")


class TestFinished:
    """One entry of dvc.lock stands for one model."""

    @pytest.mark.parametrize("keys", [{"val_every": 2}, {"val_pairs": 6}], ids=str)
    def test_what_decides_which_weights_are_kept_makes_another_training(
        self, tmp_path, output_of, keys
    ):
        output_of("run")
        first = read_best_info(tmp_path)["training"]
        assert "nothing to do" not in output_of("run", **keys)
        assert read_best_info(tmp_path)["training"] != first
        assert "nothing to do" in output_of("run")  # both are there
        assert read_best_info(tmp_path)["training"] == first

    def test_other_code_trains_again_beside_it(self, tmp_path, request_of, output_of, monkeypatch):
        output_of("run")
        finished = find_training(tmp_path / "run")
        files = read_files(finished)
        change_code(monkeypatch)
        interrupt(request_of("run"), monkeypatch, step=2)
        lines = output_of("run").splitlines()
        assert "resuming at step 2 of 6" in lines  # in the new folder
        assert "nothing to do" in output_of("run")
        assert read_files(finished) == files
        folders = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()}
        assert folders == {finished.name, f"{finished.name}-2"}
        # The first line says so
        monkeypatch.setattr(provenance, "compute_code_digest", lambda stage: "1111")
        line, *_ = output_of("run").splitlines()
        assert f"{finished.name}-3" in line and "dvc commit -f train" in line

    @pytest.mark.parametrize("pattern", ["step-*", "best.*"])
    def test_what_is_left_of_a_finished_training_is_not_changed(self, tmp_path, output_of, pattern):
        """Without its checkpoints nobody knows its code, and without the model it is unfinished."""
        output_of("run")
        folder = find_training(tmp_path / "run")
        for path in folder.glob(pattern):
            path.unlink()
        files = read_files(folder)
        assert "nothing to do" not in output_of("run")
        assert files.items() <= read_files(folder).items()
