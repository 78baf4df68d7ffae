"""The matrix of faults, which `make faults` also writes to docs/faults.md; its random faults."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from mlflow_gate import Silent

from faults import cells, inject, random_faults
from faults.group import start, until_done, wait
from pipeline.fetch import __main__ as fetch
from pipeline.tracking import run
from pipeline.train import __main__ as train
from pipeline.train import trainer

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return cells.Workbench(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def training(bench):
    """`training(ranks, fault)`: exit codes of one start of a training, and what it printed."""
    shutil.rmtree(bench.folder / "one", ignore_errors=True)

    def begin(ranks: int, fault: str = "", main=train.main):
        folders = ["--out", f"{bench.folder}/one", "--reports", f"{bench.folder}/one-r"]
        log = bench.folder / "one.log"
        log.write_text("")
        words = [*bench.arguments(), *folders]
        return wait(start(ranks, main, words, log, SG_FAULT=fault)).codes, log.read_text()

    return begin


def carry_out(bench, ranks, fault="", keys=(), **environment):
    """Exit codes of each start of a training that ends with the bytes of an undisturbed one."""
    cell = bench.folder / "cell"
    done = until_done(cell, bench.arguments(keys), ranks, fault, **environment)
    assert done.digest == bench.clean(ranks, keys)
    return done.codes


@SLOW
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_two_runs_give_the_same_bytes(bench, ranks):
    assert carry_out(bench, ranks) == [[0] * ranks]


# where time is short, in validation and in saving, also among the fast tests
@pytest.mark.parametrize(
    "phase",
    [
        pytest.param(phase, marks=[SLOW] * (phase not in ("eval", "ckpt_replace")))
        for phase in inject.PHASES
    ],
)
def test_killed_anywhere_the_weights_are_the_same_bytes(bench, phase):
    assert len(carry_out(bench, 2, f"kill:rank=0,step=5,phase={phase}")) == 2


@SLOW
@pytest.mark.parametrize(
    "keys",
    [
        (),
        (("accumulate", 2),),
        (("norm", "batch"),),
        (("ema", 0.9),),
        (("optimizer", "sgd"),),
        (("schedule", "constant_decay"),),
    ],
)
def test_killed_again_and_again_also_while_resuming(bench, keys):
    fault = (
        "kill:rank=1,step=3,phase=backward;kill:rank=0,step=5,phase=ckpt_replace;"
        "kill:rank=0,step=4,phase=opt_step;kill:rank=1,step=7,phase=eval"
    )
    assert len(carry_out(bench, 2, fault, keys)) == 5


@pytest.mark.parametrize(
    "fault",
    [
        "usr1:rank=1,step=3,phase=backward",
        pytest.param("term:rank=0,step=0,phase=forward", marks=SLOW),
        pytest.param("int:rank=1,step=3,phase=eval", marks=SLOW),
    ],
)
def test_a_signal_saves_and_resumes_to_the_same_bytes(bench, fault):
    assert carry_out(bench, 2, fault) == [[143, 143], [0, 0]]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=SLOW)])
@pytest.mark.parametrize(
    "kind, phase, code", [("group-term", "forward", 143), ("kill", "load_batch", 1)]
)
def test_processes_that_make_batches(bench, ranks, kind, phase, code):
    """A signal to all saves; a killed one counts as a killed rank."""
    fault = f"{kind}:rank={ranks - 1},step=3,phase={phase}"
    codes = carry_out(bench, ranks, fault, SG_LOADER_PROCESSES="2")
    assert codes == [[code] * ranks, [0] * ranks]
    log = (bench.folder / "cell" / "log").read_text()
    assert "Traceback" not in log
    assert ("a process that loads batches died (killed, or out of memory)" in log) == (code == 1)


def test_a_loss_that_is_no_number_is_skipped_by_all_ranks_together(training):
    codes, log = training(2, "nan:rank=1,step=3")
    lines = [line for line in log.splitlines() if "not finite" in line]
    assert codes == [0, 0] and len(lines) == 1
    assert lines[0].startswith("step 3:") and "views" in lines[0]


def train_with_one_skipped(argv):
    trainer.MAX_SKIPPED = 1
    return train.main(argv)


def test_too_many_bad_steps_end_the_run(bench, training):
    codes, log = training(2, "nan:rank=0,step=2;nan:rank=1,step=3", train_with_one_skipped)
    assert codes == [1, 1]
    assert "2 steps had a gradient that was not finite, more than 1;" in log


@pytest.mark.parametrize(
    "fault, text",
    [
        ("oom:step=3", "set TRAIN_OPTIONS='--accumulate 2'"),
        ("full:step=3,phase=ckpt_fsync", "No space left"),
    ],
)
def test_the_message_names_the_fix(training, fault, text):
    codes, log = training(1, fault)
    assert codes == [1] and text in log and "Traceback" not in log
    assert training(1)[0] == [0]  # what was saved before is still good


@SLOW
def test_a_server_that_never_answers_costs_less_than_a_hundredth(bench, monkeypatch):
    seconds = Counter()

    def watch(owner, method):
        inner = getattr(owner, method)

        def timed(*arguments, **named):
            begun = time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                seconds[owner] += time.perf_counter() - begun

        monkeypatch.setattr(owner, method, timed)

    for method in ("log", "artifact", "dataset", "model", "tags"):
        watch(run.Run, method)
    watch(trainer.Training, "_loop")
    silent = Silent()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", silent.uri)
    keys = (("steps", 300), ("log_every", 10), ("val_every", 100), ("save_every", 100))
    folders = ["--out", f"{bench.folder}/silent", "--reports", f"{bench.folder}/silent-r"]
    assert train.main([*bench.arguments(keys), *folders]) == 0 and silent.taken
    assert 0 < seconds[run.Run] < 0.01 * seconds[trainer.Training]


class TestRandomFaults:
    """The campaign itself: that it sees what is broken, and that it continues."""

    @pytest.mark.parametrize("seed", range(20))
    def test_damage_always_changes_a_file(self, tmp_path, seed):
        file = tmp_path / "file"
        file.write_bytes(bytes(1000))
        random_faults.write_damaged(file, random.Random(seed))
        assert file.read_bytes() != bytes(1000)

    @SLOW
    def test_it_sees_a_stage_that_leaves_other_bytes(self, tmp_path, monkeypatch):
        base = random_faults.Base(tmp_path)
        stage = base.stages["fetch"]
        assert not any(find_problems(base, seed) for seed in range(3))
        base.stages["fetch"] = stage._replace(main=fetch_whatever)
        assert any(find_problems(base, seed) for seed in range(8))


def fetch_whatever(argv):
    """`fetch` that takes whatever manifest is there for its own."""
    out = Path(argv[argv.index("--out") + 1])
    return 0 if (out / "manifest.csv").is_file() else fetch.main(argv)


def find_problems(base, seed):
    cell = random_faults.Cell(base, "fetch", random.Random(seed))
    random_faults.damage(cell)
    return cell.problems
