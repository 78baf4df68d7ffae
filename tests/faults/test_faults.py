"""Faults at a named place of a training; docs/faults.md lists what they promise."""

import shutil

import numpy as np
import pytest
from reading import read_files, read_json
from waiting import wait_until

from faults import inject
from faults.group import digest, start, until_done, wait
from pipeline.train import __main__ as train
from pipeline.train import train as story

SLOW = pytest.mark.slow


@pytest.fixture
def training(bench):
    """`training(ranks, fault)`: exit codes of one start of a training, and what it printed."""
    shutil.rmtree(bench.folder / "one", ignore_errors=True)

    def begin(ranks, fault="", main=train.main):
        log = bench.folder / "one.log"
        log.write_text("")
        processes = start(ranks, main, bench.training("one"), log, SG_FAULT=fault)
        return wait(processes), log.read_text()

    return begin


def carry_out(bench, ranks, fault, **environment):
    """Exit codes of each start of a training that ends with the bytes of an undisturbed one."""
    cell = bench.folder / "cell"
    digest, codes = until_done(cell, bench.arguments(), ranks, fault, **environment)
    assert digest == bench.clean(ranks)
    return codes


@SLOW
@pytest.mark.parametrize("phase", inject.PHASES)
def test_killed_anywhere_the_weights_are_the_same_bytes(bench, phase):
    assert len(carry_out(bench, 2, f"kill:rank=0,step=5,phase={phase}")) == 2


@SLOW
def test_killed_again_and_again_also_while_resuming(bench):
    kills = ("rank=1,step=3,phase=backward", "rank=0,step=5,phase=ckpt_replace")
    kills += ("rank=0,step=4,phase=opt_step", "rank=1,step=7,phase=eval")
    assert len(carry_out(bench, 2, ";".join(f"kill:{kill}" for kill in kills))) == 5


@SLOW
def test_a_signal_saves_and_resumes_to_the_same_bytes(bench):
    fault = "usr1:rank=1,step=3,phase=backward"
    assert carry_out(bench, 2, fault) == [[143, 143], [0, 0]]


@SLOW
def test_two_ranks_that_stop_between_two_points_have_the_curve_of_one_process(bench):
    """A point is a mean over the pairs of all ranks, also over those before the stop."""
    folder = bench.folder / "cell"
    curves = []
    for ranks, fault in ((1, ""), (2, "usr1:rank=1,step=4,phase=forward")):
        until_done(folder, bench.arguments(), ranks, fault)
        lines = (folder / "reports/curves/train.csv").read_text().splitlines()
        curves.append(np.array([line.split(",") for line in lines[1:]], float))
    assert "resuming at step 5 of 8" in (folder / "log").read_text()
    # Ranks add in another order, and eight steps amplify the rounding of float32.
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-3)


@SLOW
def test_two_ranks_that_stopped_between_two_points_finish_at_their_step(bench):
    """All ranks exchange the sums of the point that the stop has begun."""
    folder = bench.folder / "early"
    folder.mkdir()
    out = ["--out", f"{folder}/checkpoints", "--reports", f"{folder}/reports"]
    log = folder / "log"
    words = [*bench.arguments(), *out]
    assert wait(start(2, train.main, words, log, SG_FAULT="usr1:step=4")) == [143, 143]
    (stopped,) = (path.parent for path in folder.glob("checkpoints/*/step-00000005.safetensors"))
    words = [*bench.arguments((("steps", 5),)), *out, "--continue", str(stopped)]
    assert wait(start(2, train.main, words, log)) == [0, 0]
    assert read_json(folder / "reports/metrics.json")["step"] == 5


@SLOW
def test_a_signal_after_the_last_step_also_ends_the_pipeline(bench):
    """DVC starts the next stage when this one returns 0."""
    assert carry_out(bench, 2, "int:rank=0,step=7,phase=eval") == [[143, 0], [0, 0]]


@SLOW
@pytest.mark.parametrize(
    "fault, code",
    [("group-term:rank=0,step=3,phase=forward", 143), ("kill:rank=0,step=3,phase=load_batch", 1)],
)
def test_processes_that_make_batches(bench, fault, code):
    """A signal to all saves. If one of them is killed, the same command resumes."""
    assert carry_out(bench, 1, fault, SG_LOADER_PROCESSES="2") == [[code], [0]]
    assert ("Traceback" in (bench.folder / "cell/log").read_text()) == (code == 1)


@SLOW
def test_a_loss_that_is_no_number_is_skipped_by_all_ranks_together(training):
    codes, log = training(2, "nan:rank=1,step=3")
    assert codes == [0, 0]
    (line,) = [line for line in log.splitlines() if "not finite" in line]
    # The fault counts from 0. Rank 1 has four of eight pairs.
    assert line.startswith("step 4: ") and line.endswith("the loss of 4 pairs is not finite")


def train_with_one_skipped(argv):
    story.MAX_SKIPPED = 1
    return train.main(argv)


@SLOW
def test_too_many_bad_steps_end_the_run(training):
    codes, log = training(2, "nan:rank=0,step=2;nan:rank=1,step=3", train_with_one_skipped)
    assert codes == [1, 1]
    assert "step 4: 2 steps had a gradient that was not finite" in log


@SLOW
def test_a_rank_whose_weights_differ_ends_the_run_and_nothing_of_the_step_is_saved(bench, training):
    codes, log = training(2, "scale:rank=1,step=2,phase=stepped")
    assert codes == [1, 1]
    (line,) = [line for line in log.splitlines() if line.startswith("failed")]
    assert "step 4: " in line and "rank 1;" in line
    out = bench.folder / "one"
    assert [path.stem for path in out.glob("*/step-*.safetensors")] == ["step-00000002"]
    assert read_json(out / "best.json")["step"] == 2
    # Without the fault it goes on from there
    assert training(2)[0] == [0, 0] and digest(out) == bench.clean(2)


@SLOW
def test_a_second_training_in_the_same_folder_gets_one_line(bench, training):
    """The first is suspended. The system releases its lock when it is killed."""
    log = bench.folder / "first.log"
    keys = (("seed", 1),)  # another training, with the same best model and reports
    environment = {"SG_FAULT": "stop:step=3"}
    (first,) = start(1, train.main, bench.training("one", keys), log, **environment)
    checkpoints = bench.folder / "one"
    wait_until(lambda: [*checkpoints.glob("*/step-00000002.safetensors")])
    before = read_files(checkpoints)
    codes, text = training(1)
    assert codes == [2]
    (line,) = text.splitlines()
    assert f"{checkpoints}: another run writes there" in line
    assert read_files(checkpoints) == before
    first.kill()
    first.join()
    assert training(1)[0] == [0]


@SLOW
def test_a_full_disk_is_one_line(training):
    codes, log = training(1, "full:step=3,phase=ckpt_fsync")
    assert codes == [1] and "No space left" in log and "Traceback" not in log
    assert training(1)[0] == [0]  # what was saved before is still good
