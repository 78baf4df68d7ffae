"""The training loop of one rank: load batches, step, once in a while validate and save, stop on
request.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

from torch import Tensor

from pipeline import distributed, params, signals, trained_on
from pipeline.errors import STOPPED, WorkError
from pipeline.files import json_digest
from pipeline.keypoints.store import Store
from pipeline.params import TrainParams
from pipeline.train import failures, identity, published, resume, setup
from pipeline.train.checkpoint import BEST, Checkpoints, Saved
from pipeline.train.curves import to_tensors
from pipeline.train.logger import TrainingLogger
from pipeline.train.optimization import learning_rate
from pipeline.train.pairs.augmentation import Augmentation
from pipeline.train.pairs.loader import StepBatches
from pipeline.train.step import StepResult, train_step
from pipeline.train.validation import (
    MIN_IMAGES,
    HeldOut,
    choose_pairs,
    list_photographs,
    ratio_test_f1,
    validate,
)
from superglue_sift.network.batch import PairBatch

MAX_SKIPPED = 20  # steps without a finite gradient: more mean that the training diverges


class Training:
    """One rank of one training run on the views of `store`, validated on those of `held_out`."""

    logger: TrainingLogger  # set by `run`

    def __init__(
        self,
        paths: resume.TrainPaths,
        context: distributed.Context,
        stop: signals.Stop,
        store: Store,
        held_out: Store,
    ) -> None:
        self.paths = paths
        self.context = context
        self.stop = stop
        self.store = store
        self.train: TrainParams = params.load("train", paths.params, paths.options)
        self.pairs = setup.global_batch(self.train, context.world_size)
        initial = Path(self.train.init_from) if self.train.init_from else None
        samples, self.messages = choose_pairs(self.train, held_out, initial, paths.keep_seen)
        self.held_out = HeldOut(
            held_out, samples, self.train.max_keypoints, context, Augmentation.of(self.train)
        )
        self.trained_on = list_photographs(self.train, store)
        self.fingerprint = identity.fingerprint(self.train, store.digest, context.world_size)
        self.identity = identity.name_of(self.fingerprint)
        # Of packages and code, from each step on
        self.versions = [{"step": 0, **identity.versions()}]

    def run(self) -> int:
        """Train to the last step, or until asked to stop; 0 or 143."""
        context = self.context
        # One rank writes in each folder: nodes may share them or have their own
        self.writes = distributed.writes(self.paths.out, context)
        writes_curves = distributed.writes(self.paths.reports, context)
        decisive = {
            "validation pairs": json_digest(self.held_out.samples),
            identity.CODE: self.versions[0][identity.CODE],
        }
        resume.agree({**self.fingerprint, **decisive}, context.is_main)
        start = resume.prepare(self.paths, self.fingerprint, self.writes)
        self.checkpoints = Checkpoints(start.folder)
        if start.best:
            if context.is_main:
                published.publish_finished(
                    self.paths, start.folder, start.best, self.fingerprint, self.trained_on
                )
            return 0
        self._build(start.saved)
        self.state.compare_ranks(context.is_main)
        about = (self.identity, self.precision, self.pairs, start.saved)
        with TrainingLogger(self.paths, context, writes_curves, *about) as self.logger:
            baseline = ratio_test_f1(self.objective, self.held_out)
            self.logger.log_start(self.state, self.train.steps, self.store, self.messages, baseline)
            watching = failures.watch_processes(context.rank, self.state)
            with contextlib.closing(self.logger.bar), watching:
                finished = self._loop()
            if not finished:
                self.logger.log_stop(self.state.step)
                return STOPPED
            self._save_best(finished=True)
            self.logger.log_finish(self.state, self.train.init_from)
        return 0

    def validate_only(self) -> int:
        """Print the metrics of `train.init_from`; 0."""
        self._build(None)
        metrics = validate(self.objective, self.held_out)
        if self.context.is_main:
            figures = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            print(*self.messages, f"{self.train.init_from}: {figures}", sep="\n")
        return 0

    def _build(self, saved: Optional[Saved]) -> None:
        """Build model and optimiser, and restore the checkpoint that `resume.prepare` found."""
        train = self.train
        before = saved[1]["precision"] if saved else ""
        self.precision = setup.choose_precision(train, self.context, before)
        parts = setup.build(train, self.context, self.store, self.precision)
        self.objective, self.ddp_model, self.state, self._init_threshold, messages = parts
        self.messages = [str(self.precision), *messages, *self.messages]
        self.batches = StepBatches(train, self.store, self.pairs, self.context)
        if saved:
            self._restore(*saved)

    def _restore(self, tensors: Dict[str, Tensor], info: Dict[str, Any]) -> None:
        state = self.state
        state.restore(tensors, info)
        # A longer schedule goes on in the run of the shorter one
        self.identity = info["training"]
        self.versions = info["versions"]
        other = identity.other_versions(info)
        if other:
            self.versions = [*self.versions, {"step": state.step, **identity.versions()}]
        if self.context.is_main:
            print(f"resuming at step {state.step} of {self.train.steps}")
            for line in identity.changes(info["fingerprint"], self.fingerprint):
                print(line)
            if info["precision"] != self.precision.precision:
                print(
                    f"precision changed on resume: {info['precision']} ->"
                    f" {self.precision.precision} ({self.precision.reason})"
                )
            if other:
                print(
                    f"versions changed on resume: {other}: the weights may differ in their last"
                    " bits"
                )
        if state.best_weights:
            if info.get("validated_on") != self.held_out.digest:
                state.best_figures = self._metrics_of(state.best_weights)
                state.best = state.best_figures["f1"]
            self._save_best()  # the published file may be another training's

    def _loop(self) -> bool:
        """Train. True: the last step is done; False: stopped by a signal, after a checkpoint."""
        state = self.state
        train = self.train
        steps = range(state.step, train.steps)
        with contextlib.closing(self.batches.prefetch(steps)) as loader:
            # The curve begins at the initial weights; a training may end where it was stopped
            if state.step == 0 or (state.step == train.steps != state.validated):
                self._validate()
            waiting = time.perf_counter()
            for micro_batches in loader:
                waited = time.perf_counter() - waiting
                self._step(micro_batches, waited)
                last = state.step == train.steps

                stop = distributed.any_rank(self.stop.requested)
                validating = last or state.step % train.val_every == 0
                saving = last or stop or state.step % (train.save_every or train.val_every) == 0
                if validating or saving:
                    # Nothing is kept of ranks that differ
                    state.compare_ranks(self.context.is_main)

                # once in a while: validate, and keep the weights if they are the best
                if validating:
                    self._validate()

                # once in a while, and before a stop: a checkpoint
                if saving:
                    self._save()
                if stop and not last:
                    return False
                waiting = time.perf_counter()
        return True

    def _step(self, micro_batches: List[PairBatch], waited: float) -> None:
        """One step of the optimiser; `waited` seconds for its batches."""
        state = self.state
        train = self.train
        world_size = self.context.world_size
        lr = learning_rate(train, state.step, world_size)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        accumulate = train.accumulate
        with failures.explain_lack_of_memory(state.step, self.pairs, world_size, accumulate):
            result = train_step(
                self.ddp_model, state.optimizer, state.scaler, micro_batches, self.pairs, world_size
            )
        if not result.applied:
            self._skip(result)
        state.step += 1
        self.logger.add_step(result, waited)

        # once in a while: a point on the curves, the mean over all ranks
        if state.step % train.log_every == 0 or state.step == train.steps:
            metrics = {
                "lr": lr,
                "grad_norm": result.grad_norm,
                "dustbin": float(state.model.dustbin.detach()),
                "skipped_steps": float(state.skipped),
            }
            self.logger.log_point(state.step, metrics)

    def _skip(self, result: StepResult) -> None:
        """Print the pairs of a gradient that is not finite; WorkError after too many. All ranks
        call it.
        """
        state = self.state
        samples = [sample for part in self.batches.samples(state.step) for sample in part]
        names = [
            f"{self.store.images[image]} views {view0} and {view1}"
            for image, view0, view1, _ in (samples[index] for index in result.bad_pairs)
        ]
        bad = [name for names in distributed.all_gather(names) for name in names]
        if self.context.is_main:
            pairs = ", ".join(bad) or "none alone"
            print(f"step {state.step}: the gradient is not finite, skipped; pairs: {pairs}")
        if state.scaler.is_enabled() and not bad:
            return  # the scaler searches for the largest scale that does not overflow
        state.skipped += 1
        if state.skipped > MAX_SKIPPED:
            raise WorkError(
                f"step {state.step}: {state.skipped} steps had a gradient that was not finite, more"
                f" than {MAX_SKIPPED}; lower train.lr, or look at the pairs named above"
            )

    def _validate(self) -> None:
        """Validate the weights that would be shipped, and keep them if they are the best.

        Initial weights of `init_from` may stay the best, an untrained network may not.
        """
        state = self.state
        metrics = validate(self.objective, self.held_out)
        untrained = state.step == 0 and not self.train.init_from
        self.logger.log_validation(state.step, metrics, state.best, untrained)
        state.validated = state.step
        if not untrained and state.keep_best(metrics):
            self._save_best()

    def _metrics_of(self, weights: Dict[str, Tensor]) -> Dict[str, float]:
        """Validation of `weights`; the model's own weights are restored."""
        model = self.state.model
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(weights)
        metrics = validate(self.objective, self.held_out)
        model.load_state_dict(before)
        return metrics

    def _save(self) -> None:
        """Write a checkpoint; all ranks call it."""
        window = self.logger.window()
        if self.writes:
            info = {
                **self.state.info(),
                "fingerprint": self.fingerprint,
                "log_window": window,
                "precision": self.precision.precision,
                "precision_reason": self.precision.reason,
                "training": self.identity,
                "validated_on": self.held_out.digest,
                "versions": self.versions,
            }
            tensors = {**self.state.tensors(), **to_tensors(self.logger.curves)}
            self.checkpoints.save(self.state.step, tensors, info)
        distributed.barrier()

    def _save_best(self, finished: bool = False) -> None:
        """Write the best model so far and its description, and publish them."""
        if not self.writes:
            return
        state = self.state
        info = {
            "model": state.model.config.to_dict(),
            "step": state.best_step,
            "precision": self.precision.precision,
            "validation": state.best_figures,
            "match_threshold": self._threshold(),
            "skipped_steps": state.skipped,
            "finished": finished,
            "training": self.identity,
            "versions": identity.without_code(self.versions),
            "train": identity.describe(self.train),
            trained_on.KEY: trained_on.digest(self.trained_on or ()),
            **{k: v for k, v in self.fingerprint.items() if k in identity.OF_THE_RUN},
        }
        trained_on.write(self.checkpoints.folder / BEST, self.trained_on)
        self.checkpoints.save_best(state.best_weights, info)
        published.publish(self.checkpoints.folder, self.paths.out)

    def _threshold(self) -> float:
        """The match threshold from validation; with few photographs that of the initial weights."""
        photographs = {sample.image for sample in self.held_out.samples}
        if len(photographs) < MIN_IMAGES and self._init_threshold is not None:
            return self._init_threshold
        return self.state.best_figures["threshold"]
