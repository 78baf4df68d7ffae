"""The training loop of one rank: step, now and then validate, save, and stop when asked to."""

from __future__ import annotations

import argparse
import time
from typing import Dict, List, Optional

from torch import Tensor

from pipeline import params
from pipeline.errors import STOPPED, RequestError, WorkError
from pipeline.features.store import Store
from pipeline.matching import normalization
from pipeline.matching.superglue import SuperGlue, SuperGlueConfig
from pipeline.pairs.batch import PairBatch
from pipeline.pairs.loader import load_batch, prefetched, split_evenly
from pipeline.pairs.order import PairOrder, rank_slice, validation_pairs
from pipeline.runtime import distributed, repro, signals
from pipeline.runtime.checkpoint import BadCheckpoint, Checkpoints, load_model_file
from pipeline.runtime.progress import progress
from pipeline.stack import grad_scaler
from pipeline.training.journal import Journal
from pipeline.training.objective import MatchingObjective
from pipeline.training.optimization import MovingAverage, freeze, learning_rate, make_optimizer
from pipeline.training.state import TrainState, differences, fingerprint, initialize_from
from pipeline.training.step import train_step
from pipeline.training.validation import validate

MAX_SKIPPED = 20  # steps with a gradient that is not finite before the run gives up


def global_batch(train, world_size: int) -> int:
    """Pairs of one step over all ranks. RequestError when the ranks cannot share `train.batch` evenly."""
    if train.batch_per_rank:
        return train.batch_per_rank * world_size
    if train.batch % world_size:
        legal = [n for n in range(1, min(train.batch, 64) + 1) if train.batch % n == 0]
        raise RequestError(
            f"train.batch = {train.batch} cannot be shared by {world_size} processes: "
            f"set NPROC_PER_NODE to one of {legal}, or another train.batch"
        )
    return train.batch


def initial_weights(path: str) -> Dict[str, Tensor]:
    try:
        return load_model_file(path)[0]
    except (FileNotFoundError, BadCheckpoint) as error:
        raise RequestError(f"train.init_from: {error}") from None


class Training:
    """One rank of one training run."""

    def __init__(self, args: argparse.Namespace, context: distributed.Context, stop: signals.Stop) -> None:
        self.args, self.context, self.stop = args, context, stop
        self.train = params.load("train", args.params)
        self.batch = global_batch(self.train, context.world_size)
        self.store, self.held_out = Store(args.keypoints / "train"), Store(args.keypoints / "val")
        self.order = PairOrder(self.train.seed, len(self.store), self.store.views_per_image)
        self.validation = validation_pairs(
            self.train.seed, len(self.held_out), self.held_out.views_per_image, self.train.val_pairs
        )
        self._build()
        self.checkpoints = Checkpoints(args.out)
        self.fingerprint = fingerprint(self.train, self.store.digest, context.world_size)

    def _build(self) -> None:
        """Model, optimiser and what belongs to them, equal on every rank: all start from the same seed."""
        train, context = self.train, self.context
        repro.seed_everything(train.seed, train.deterministic)
        model = SuperGlue(
            SuperGlueConfig(
                dim=train.dim,
                layers=train.layers,
                heads=train.heads,
                norm=train.norm,
                scale_angle=train.scale_angle,
                sinkhorn_iterations=train.sinkhorn_iterations,
            )
        )
        if train.init_from:
            self._take_over(model, train.init_from)
        freeze(model, train.freeze)
        model.to(context.device)
        if train.sync_batchnorm:
            normalization.synchronize(model, distributed.differentiable_sum)
        self.objective = MatchingObjective(model, train.positive_px, train.negative_px, train.precision)
        self.wrapped = distributed.wrap(self.objective)
        self.state = TrainState(
            model,
            make_optimizer(train, model),
            grad_scaler(train.precision == "float16" and context.device.type == "cuda"),
            MovingAverage(model, train.ema),
        )

    def _take_over(self, model: SuperGlue, path: str) -> None:
        taken, skipped, missing = initialize_from(model, initial_weights(path))
        if self.context.is_main:
            print(f"initial weights from {path}: {len(taken)} tensors taken")
            for title, names in (("skipped, another shape", skipped), ("missing there", missing)):
                if names:
                    print(f"  {title}: {', '.join(names)}")

    def run(self) -> int:
        """Train to the last step, or until told to stop; 0 or 143."""
        resumed_run = self._resume()
        with Journal(self, resumed_run) as journal:
            journal.began()
            finished = self._loop(journal)
            if not finished:
                journal.stopped()
                return STOPPED
            journal.finished()
        return 0

    def _loop(self, journal: Journal) -> bool:
        """True when the last step is done, False when a signal came first (a checkpoint is then saved)."""
        state, train = self.state, self.train
        bar = progress(
            total=train.steps, initial=state.step, desc="train", unit="step", disable=not self.context.is_main
        )
        loader = prefetched(self._micro_batches, range(state.step, train.steps))
        waiting = time.perf_counter()
        for micro_batches in loader:
            waited = time.perf_counter() - waiting
            self._step(micro_batches, journal, waited)
            bar.update(1)
            if state.step % train.val_every == 0 or state.step == train.steps:
                bar.set_postfix(journal.validated(self._validate()))
            stopping = distributed.any_rank(self.stop.requested)
            if state.step % train.save_every == 0 or state.step == train.steps or stopping:
                self._save(journal)
            if stopping and state.step < train.steps:
                loader.close()
                bar.close()
                return False
            waiting = time.perf_counter()
        bar.close()
        return True

    def _micro_batches(self, step: int) -> List[PairBatch]:
        """This rank's share of global step `step`, on the host, in `train.accumulate` parts."""
        samples = self.order.step(step, self.batch)[
            rank_slice(self.batch, self.context.rank, self.context.world_size)
        ]
        parts = split_evenly(samples, self.train.accumulate)
        batches = [
            load_batch(self.store, part, self.train.max_keypoints, self.train.keypoint_drop) for part in parts
        ]
        return [b.pinned() for b in batches] if self.context.device.type == "cuda" else batches

    def _step(self, micro_batches: List[PairBatch], journal: Journal, waited: float) -> None:
        state, context = self.state, self.context
        lr = learning_rate(self.train, state.step, context.world_size)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        result = train_step(
            self.wrapped,
            state.optimizer,
            state.scaler,
            [batch.to(context.device) for batch in micro_batches],
            self.batch,
            context.world_size,
            self.train.clip_norm,
        )
        if result.applied:
            state.average.update(state.model, state.step)
        else:
            state.skipped += 1
            if state.skipped > MAX_SKIPPED and not state.scaler.is_enabled():
                raise WorkError(
                    f"step {state.step}: {state.skipped} gradients were not finite; lower train.lr or train.clip_norm"
                )
        state.step += 1
        journal.stepped(result, lr, waited)

    def _validate(self) -> Dict[str, float]:
        """Figures of the weights that would be shipped; keeps them as `best` when they are."""
        state, train = self.state, self.train
        own = {k: v.clone() for k, v in state.model.state_dict().items()} if state.average.values else None
        state.model.load_state_dict(state.weights())
        figures = validate(self.objective, self.held_out, self.validation, train.max_keypoints, self.context)
        if state.best is None or figures["f1"] > state.best:
            state.best, state.best_step = figures["f1"], state.step
            if self.context.is_main:
                self.checkpoints.save_best(state.model.state_dict(), self._model_info(figures))
        if own:
            state.model.load_state_dict(own)
        return figures

    def _model_info(self, figures: Dict[str, float]) -> dict:
        return {
            "model": self.state.model.config.to_dict(),
            "step": self.state.step,
            "validation": figures,
            "data": self.store.digest,
            "train": self.train.model_dump(),
        }

    def _save(self, journal: Journal) -> None:
        if self.context.is_main:
            info = {**self.state.info(), "fingerprint": self.fingerprint, "mlflow_run": journal.run_id}
            self.checkpoints.save(self.state.step, self.state.tensors(), info)
        distributed.barrier()

    def _resume(self) -> Optional[str]:
        """Take up the newest whole checkpoint that fits; the id of its run. Rank 0 decides for all."""
        found, complaints = self.checkpoints.load_newest() if self.args.resume != "never" else (None, [])
        if self.context.is_main:
            for complaint in complaints:
                print(f"warning: {complaint}; the one before it is used")
        reasons = self._misfits(found[1]) if found else ["no checkpoint"]
        if distributed.broadcast(reasons):
            self._start_anew(found, reasons)
            return None
        self.state.restore(*found)
        if self.context.is_main:
            print(f"resuming at step {self.state.step} of {self.train.steps}")
        return found[1].get("mlflow_run")

    def _misfits(self, info: dict) -> List[str]:
        changed = differences(info.get("fingerprint", {}), self.fingerprint)
        return [line for line in changed if line.split(":")[0] not in self.args.accept]

    def _start_anew(self, found, reasons: List[str]) -> None:
        if self.args.resume == "must":
            raise RequestError(f"{self.args.out}: cannot resume: {'; '.join(reasons)}")
        if self.context.is_main:
            if found:
                print(f"{self.args.out} holds another training ({'; '.join(reasons)}): starting anew")
            self.checkpoints.clear()
        distributed.barrier()
