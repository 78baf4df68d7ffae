"""Faults at a named place of a training; docs/faults.md lists what they promise."""

import shutil

import pytest

from faults import inject
from faults.group import start, until_done, wait
from pipeline.train import __main__ as train
from pipeline.train import trainer

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
def test_a_signal_saves_and_resumes_to_the_same_bytes(bench):
    fault = "usr1:rank=1,step=3,phase=backward"
    assert carry_out(bench, 2, fault) == [[143, 143], [0, 0]]


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
    assert log.count("step 3: the gradient is not finite") == log.count("not finite") == 1


def train_with_one_skipped(argv):
    trainer.MAX_SKIPPED = 1
    return train.main(argv)


@SLOW
def test_too_many_bad_steps_end_the_run(training):
    codes, log = training(2, "nan:rank=0,step=2;nan:rank=1,step=3", train_with_one_skipped)
    assert codes == [1, 1]
    assert "2 steps had a gradient that was not finite, more than 1;" in log


@SLOW
@pytest.mark.parametrize(
    "fault, text",
    [("oom:step=3", "set run.accumulate: 2"), ("full:step=3,phase=ckpt_fsync", "No space left")],
)
def test_the_message_names_the_fix(training, fault, text):
    codes, log = training(1, fault)
    assert codes == [1] and text in log and "Traceback" not in log
    assert training(1)[0] == [0]  # what was saved before is still good
