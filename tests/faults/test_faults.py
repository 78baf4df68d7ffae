"""A small part of the fault matrix in every test run; `make faults` runs all of it and writes
docs/faults.md.
"""

from __future__ import annotations

import random
import signal

import pytest

from faults import campaign, cells, inject, random_faults, stages
from faults.group import start, until_done, wait
from pipeline.fetch import __main__ as fetch
from pipeline.train import trainer


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return cells.Workbench(tmp_path_factory.mktemp("faults"))


def ends_the_same(bench, cell, starts):
    arguments = (bench.arguments(cell.keys), cell.worlds, cell.fault)
    done = until_done(bench.folder / "cell", *arguments, environment=cell.environment)
    assert done.hung == 0 and done.starts == starts
    assert done.digest == bench.clean(cell.worlds[-1], cell.keys)


KILLS = {phase: cells.Cell((2,), f"kill:rank=0,step=5,phase={phase}") for phase in inject.PHASES}


# one in each phase, where time is short in validation and in saving; `make faults` kills every rank
# at more steps
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            cell, marks=[pytest.mark.slow] * (phase not in ("eval", "ckpt_replace")), id=phase
        )
        for phase, cell in KILLS.items()
    ],
)
def test_killed_anywhere_the_weights_are_the_same_bytes(bench, cell):
    ends_the_same(bench, cell, 2)


AGAIN = cells.repeated()


# `make faults` kills with every option
@pytest.mark.slow
@pytest.mark.parametrize("cell", AGAIN[:2], ids=lambda c: f"{c.fault} {c.keys}")
def test_killed_again_and_again(bench, cell):
    ends_the_same(bench, cell, 4)


def test_a_signal_saves_and_resumes_to_the_same_bytes(bench):
    cell = cells.Cell((2,), "usr1:rank=1,step=3,phase=backward")
    done = until_done(bench.folder / "cell", bench.arguments(), cell.worlds, cell.fault)
    assert done.codes == [[143, 143], [0, 0]]
    assert done.digest == bench.clean(2)


LOADERS = cells.loaders()


# SIGTERM to all and a killed process of one rank, then of two; `make faults` has the others
@pytest.mark.parametrize(
    "cell",
    [pytest.param(LOADERS[n], marks=[pytest.mark.slow] * (n > 7)) for n in (1, 6, 10, 13)],
    ids=lambda c: f"{c.worlds[0]}:{c.fault}",
)
def test_processes_that_make_batches(bench, cell):
    """A signal to all processes gives a checkpoint and 143; a killed one counts as a killed
    rank.
    """
    arguments = (bench.arguments(), cell.worlds, cell.fault)
    done = until_done(bench.folder / "cell", *arguments, environment=cell.environment)
    world = cell.worlds[0]
    log = (bench.folder / "cell" / "log").read_text()
    if cell.fault.startswith("kill"):
        assert done.codes == [[1] * world, [0] * world]
        assert (
            "a process that loads batches died (killed, or out of memory)" in log
            and "Traceback" not in log
        )
    else:
        assert done.codes == [[143] * world, [0] * world]
    assert done.digest == bench.clean(world)


def test_a_loss_that_is_no_number_is_skipped_by_all_ranks_together(bench):
    arguments = [
        *bench.arguments(),
        "--out",
        str(bench.folder / "nan"),
        "--reports",
        str(bench.folder / "nan-reports"),
    ]
    log = bench.folder / "nan.log"
    assert wait(start(2, arguments, log, SG_FAULT="nan:rank=1,step=3")).codes == [0, 0]
    lines = [line for line in log.read_text().splitlines() if "not finite" in line]
    assert len(lines) == 1 and lines[0].startswith("step 3:") and "views" in lines[0]


def test_too_many_bad_steps_end_the_run(bench, monkeypatch):
    monkeypatch.setattr(trainer, "MAX_SKIPPED", 1)  # the ranks are forks of this process
    arguments = bench.arguments()
    arguments += [
        "--out",
        str(bench.folder / "many"),
        "--reports",
        str(bench.folder / "many-reports"),
    ]
    log = bench.folder / "many.log"
    codes = wait(start(2, arguments, log, SG_FAULT="nan:rank=0,step=2;nan:rank=1,step=3")).codes
    assert (
        codes == [1, 1]
        and "2 steps had a gradient that was not finite, more than 1;" in log.read_text()
    )


@pytest.mark.parametrize(
    "kind, text", [("oom", "set TRAIN_OPTIONS='--accumulate 2'"), ("full", "No space left")]
)
def test_the_message_names_the_fix(bench, kind, text):
    arguments = [
        *bench.arguments(),
        "--out",
        str(bench.folder / kind),
        "--reports",
        str(bench.folder / "r"),
    ]
    log = bench.folder / f"{kind}.log"
    phase = "forward" if kind == "oom" else "ckpt_fsync"
    assert wait(start(1, arguments, log, SG_FAULT=f"{kind}:step=3,phase={phase}")).codes == [1]
    assert text in log.read_text() and "Traceback" not in log.read_text()
    assert wait(start(1, arguments, log)).codes == [0]  # what was saved before is still good


def test_the_injector_refuses_what_it_does_not_know():
    assert inject.parse("kill:rank=1,step=7,phase=eval;nan")[1] == inject.Fault("nan", {}, 1)
    for wrong in ("bomb", "kill:where=here", "kill:phase=never"):
        with pytest.raises(ValueError, match="SG_FAULT"):
            inject.parse(wrong)
    assert inject.SIGNALS["kill"] == signal.SIGKILL


class TestRandomFaults:
    """The campaign itself: what it draws, that it sees what is broken, and that it continues."""

    def test_a_cell_is_a_function_of_its_number_and_every_stage_is_drawn(self):
        every = [campaign.drawn(0, number) for number in range(1000)]
        assert every == [campaign.drawn(0, number) for number in range(1000)]
        wanted = {
            (kind, stage) for kind, about in campaign.KINDS.items() for stage in about.weights
        }
        assert set(every) == wanted and {stage for _, stage in wanted} == set(stages.stages())

    def test_the_page_has_the_promises(self):
        page = (campaign.ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
        assert all(f"| {kind.promise} |" in page for kind in campaign.KINDS.values())

    @pytest.mark.parametrize("seed", range(20))
    def test_damage_always_changes_a_file(self, tmp_path, seed):
        file = tmp_path / "file"
        file.write_bytes(bytes(1000))
        how = random_faults.damage(file, random.Random(seed))
        content = file.read_bytes()
        assert content != bytes(1000) and (len(content) < 1000) == (how == "torn")

    def test_a_killed_campaign_continues_and_counts(self, tmp_path):
        results = tmp_path / "faults.jsonl"
        found = random_faults.Found("fetch", "SIGKILL", True, [])
        broken = found._replace(stage="match", problems=["other bytes: a"], silent=True, lost=7)
        for number, (kind, each) in enumerate([("kill", found), ("damage", broken)]):
            line = {"seed": 0, "number": number, "kind": kind, "commit": "c", **each._asdict()}
            campaign.keep(results, line, tmp_path)
        with results.open("a") as file:
            file.write('{"seed": 0, "numb')  # killed while it wrote
        assert list(campaign.cells_left(4, 0, results)) == [2, 3] and list(
            campaign.cells_left(2, 1, results)
        ) == [0, 1]
        text = campaign.table(4, 0, results)
        assert "| fetch | 1 | 1 | 0 | 0 | 0 |" in text and "| match | 1 | 0 | 0 | 1 | 7 |" in text
        assert "cell 1, match, SIGKILL: other bytes: a" in text

    @pytest.mark.slow
    def test_it_sees_a_stage_that_leaves_other_bytes(self, tmp_path, monkeypatch):
        base = stages.Base(tmp_path / "work", tmp_path)
        base.work.mkdir()
        base.make()
        stage = base.known["fetch"]._replace(read=())  # so that only outputs are damaged
        clock = random_faults.Clock()
        good = [
            random_faults.run(base, clock, stage, random_faults.torn, str(seed))
            for seed in range(3)
        ]
        assert any(each.struck for each in good) and not any(each.problems for each in good)
        # takes whatever is there for its own
        monkeypatch.setattr(
            fetch,
            "_up_to_date",
            lambda options, _: [] if (options.out / "manifest.csv").is_file() else None,
        )
        seen = [
            random_faults.run(base, clock, stage, random_faults.torn, str(seed))
            for seed in range(8)
        ]
        assert any(each.silent for each in seen)


# Options of several ranks. They stand here, and tests/faults runs first, because torch 1.10 cannot
# fork a training from a process that has used autograd.
@pytest.mark.slow
@pytest.mark.parametrize("scaling, factor", [("linear", 2.0), ("sqrt", 2.0**0.5)])
def test_the_learning_rate_grows_with_the_ranks_and_their_pairs(bench, scaling, factor):
    keys = (("batch_per_rank", 4), ("lr_scaling", scaling), ("steps", 2), ("val_every", 2))
    rates = {}
    for world in (1, 2):
        until_done(bench.folder / "cell", bench.arguments(keys), [world], "")
        curve = (
            (bench.folder / "cell" / "reports" / "curves" / "train.csv").read_text().splitlines()
        )
        rates[world] = float(dict(zip(*(line.split(",") for line in curve[:2])))["lr"])
        assert f", {4 * world} pairs a step" in (bench.folder / "cell" / "log").read_text()
    assert rates[2] == pytest.approx(factor * rates[1], rel=1e-5)
