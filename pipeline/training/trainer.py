"""The training loop of one rank: step, now and then validate, save, and stop when asked to."""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Dict, List, Optional

from pipeline import params, tracking
from pipeline.errors import STOPPED, WorkError
from pipeline.features.store import Store
from pipeline.pairs.order import Sample, validation_pairs
from pipeline.runtime import distributed, faults, signals
from pipeline.runtime.checkpoint import Checkpoints
from pipeline.training import messages, resume, setup
from pipeline.training.batches import StepBatches
from pipeline.training.logger import TrainingLogger, Window, write_metrics
from pipeline.training.optimization import learning_rate
from pipeline.training.profiling import Profile
from pipeline.training.state import OF_THE_RUN, fingerprint, fingerprint_of, identity, stated
from pipeline.training.step import StepResult, elastic_step, train_step
from pipeline.training.validation import validate
from superglue_sift.batch import PairBatch
from superglue_sift.weights import load_model_file


class Training:
    """One rank of one training run on the views of `store`, validated on those of `held_out`."""

    def __init__(
        self,
        args: argparse.Namespace,
        context: distributed.Context,
        stop: signals.Stop,
        store: Store,
        held_out: Store,
    ) -> None:
        self.args, self.context, self.stop = args, context, stop
        self.train = params.load("train", args.params)
        self.batch = setup.global_batch(self.train, context.world_size)
        self.store, self.held_out = store, held_out
        self.batches = StepBatches(self.train, store, self.batch, context)
        self.validation = validation_pairs(
            self.train.seed, len(self.held_out), self.held_out.views_per_image, self.train.val_pairs
        )
        parts, self.told = setup.build(self.train, context, store)
        self.objective, self.wrapped, self.state = parts
        self.checkpoints = Checkpoints(args.out)
        self.fingerprint = fingerprint(self.train, self.store.digest, context.world_size)
        self.identity = identity(self.fingerprint)

    def run(self) -> int:
        """Train to the last step, or until told to stop; 0 or 143."""
        if resume.prepare(self.args, self.fingerprint, self.context.is_main):
            return self._already_finished()
        window = self._resume()
        with TrainingLogger(self, window) as logger:
            logger.began()
            try:
                finished = self._loop(logger)
            except RuntimeError as error:
                if not distributed.lost_peer(error):
                    raise
                raise WorkError(messages.lost_peer(self, error)) from error
            if not finished:
                logger.stopped()
                return STOPPED
            if self.context.is_main:
                self._save_best(finished=True)
            logger.finished()
        return 0

    def _already_finished(self) -> int:
        """The best model is that of this very training, finished: nothing to do but to say so."""
        if self.context.is_main:
            path = self.args.out / "best.safetensors"
            weights, info = load_model_file(path)
            if (
                fingerprint_of(info) != self.fingerprint
            ):  # accepted on request: the next run need not ask again
                self.checkpoints.save_best(weights, {**info, "code": self.fingerprint["code"]})
            write_metrics(self.args.reports, info)
            print(f"{path}: trained with these parameters, data and code, to the last step: nothing to do")
            reports = self.args.reports
            tracking.ship_pending(reports.parent / "run.json", reports, self.identity)
        return 0

    def validate_only(self) -> int:
        """Print the figures of the best model so far, or of `train.init_from`; 0."""
        source = self.train.init_from or self.args.out / "best.safetensors"
        if not self.train.init_from:
            self.state.model.load_state_dict(setup.read_model(source, "--validate-only"))
        figures = validate(
            self.objective, self.held_out, self.validation, self.train.max_keypoints, self.context
        )
        if self.context.is_main:
            print(f"{source}: " + ", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
        return 0

    def _loop(self, logger: TrainingLogger) -> bool:
        """True when the last step is done, False when a signal came first (a checkpoint is then saved)."""
        state, train = self.state, self.train
        steps = range(state.step, train.steps)
        bar = messages.steps_bar(self)
        profile = Profile(train.profile_steps, self.args.reports / "profile", self.context)
        with (
            contextlib.closing(bar),
            contextlib.closing(self.batches.prefetched(steps)) as loader,
            profile,
        ):
            if state.step == 0 and train.init_from:  # the weights as given may stay the best
                bar.set_postfix(logger.validated(self._validate()))
            waiting = time.perf_counter()
            for micro_batches in loader:
                waited = time.perf_counter() - waiting
                stopping = distributed.any_rank(lambda: self.stop.requested)
                self._step(micro_batches, logger, waited)
                profile.stepped()
                bar.update(1)
                if state.step % train.val_every == 0 or state.step == train.steps:
                    bar.set_postfix(logger.validated(self._validate()))
                stop = stopping()
                if state.step % train.save_every == 0 or state.step == train.steps or stop:
                    self._save(logger)
                if stop and state.step < train.steps:
                    return False
                waiting = time.perf_counter()
        return True

    def _step(self, micro_batches: List[PairBatch], logger: TrainingLogger, waited: float) -> None:
        state, train = self.state, self.train
        faults.at_step(state.step)
        distributed.seen_at(state.step)
        lr = learning_rate(train, state.step, self.context.world_size)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        result = self._gradient_step([batch.to(self.context.device) for batch in micro_batches])
        if result.applied:
            state.average.update(state.model, state.step)
        else:
            self._skipped(result)
        state.step += 1
        logger.stepped(result, lr, waited)

    def _gradient_step(self, batches: List[PairBatch]) -> StepResult:
        common = (self.wrapped, self.state.optimizer, self.state.scaler, batches, self.batch)
        try:
            if self.train.bitwise_elastic:
                return elastic_step(*common, self.train.clip_norm)
            return train_step(*common, self.context.world_size, self.train.clip_norm)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            raise WorkError(messages.out_of_memory(self)) from error

    def _skipped(self, result: StepResult) -> None:
        """A gradient was not finite: every rank is here. Say which pairs, and give up after too many."""
        state, train = self.state, self.train
        own = [sample for part in self.batches.samples(state.step) for sample in part]
        named = [self._name(own[place]) for place in result.bad_pairs]
        bad = [name for names in distributed.all_gather(named) for name in names]
        if self.context.is_main:
            print(
                f"step {state.step}: the gradient is not finite, skipped; pairs: {', '.join(bad) or 'none alone'}"
            )
        if state.scaler.is_enabled() and not bad:
            return  # the scaler feels its way to the largest scale that does not overflow
        state.skipped += 1
        if state.skipped > train.max_skipped:
            raise WorkError(
                f"step {state.step}: {state.skipped} steps had a gradient that was not finite, more than "
                f"train.max_skipped = {train.max_skipped}; lower train.lr, or look at the pairs named above"
            )

    def _name(self, sample: Sample) -> str:
        return f"{self.store.images[sample.image]} views {sample.view0} and {sample.view1}"

    def _validate(self) -> Dict[str, float]:
        """Figures of the weights that would be shipped; keeps them as `best` when they are."""
        state, train = self.state, self.train
        faults.at("eval")
        own = {k: v.clone() for k, v in state.model.state_dict().items()} if state.average.values else None
        state.model.load_state_dict(state.weights())
        figures = validate(self.objective, self.held_out, self.validation, train.max_keypoints, self.context)
        if state.keep_best(figures) and self.context.is_main:
            self._save_best()
        if own:
            state.model.load_state_dict(own)
        return figures

    def _save_best(self, finished: bool = False) -> None:
        """Write the best model so far, with all that a finished training leaves to say."""
        state = self.state
        info = {
            "model": state.model.config.to_dict(),
            "step": state.best_step,
            "precision": self.objective.precision,
            "validation": state.best_figures,
            "match_threshold": state.best_figures["threshold"],
            "skipped_steps": state.skipped,
            "finished": finished,
            "training": self.identity,
            "train": stated(self.train),
            **{key: self.fingerprint[key] for key in OF_THE_RUN if key in self.fingerprint},
        }
        self.checkpoints.save_best(state.best_weights, info)

    def _save(self, logger: TrainingLogger) -> None:
        window = logger.window()
        if self.context.is_main:
            info = {**self.state.info(), "fingerprint": self.fingerprint, "log_window": window}
            info["precision"] = self.objective.precision
            self.checkpoints.save(self.state.step, self.state.tensors(), info)
        distributed.barrier()

    def _resume(self) -> Optional[Window]:
        """Take up the checkpoint that `resume.prepare` left; its `TrainingLogger.window`."""
        found, _ = self.checkpoints.load_newest()
        if found is None:
            return None
        self.state.restore(*found)
        if self.context.is_main:
            print(f"resuming at step {self.state.step} of {self.train.steps}")
            before, now = found[1].get("precision"), self.objective.precision
            if before not in (None, now):
                print(
                    f"its steps so far were in {before}, those to come are in {now}: what auto is on this device"
                )
            if self.state.best_weights:  # the file may be that of another training, or gone
                self._save_best()
        return found[1].get("log_window")
