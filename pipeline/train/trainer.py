"""The training loop of one rank: load batches, step, once in a while validate and save, stop on
request.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Dict, Generator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from pipeline import compat, tracking
from pipeline.errors import STOPPED, LostPeer, WorkError, end_as_lost
from pipeline.features.store import Store
from pipeline.files import json_digest, write_atomic
from pipeline.parameters import params
from pipeline.parameters.schema import TrainParams
from pipeline.processes import distributed, signals
from pipeline.provenance import trained_on
from pipeline.train import identity, precision, replicas, resume, setup, unseen
from pipeline.train.checkpoint import Checkpoints
from pipeline.train.live_line import LiveLine
from pipeline.train.logger import CURVES, TrainingLogger, Window, profiled, write_metrics
from pipeline.train.optimization import learning_rate
from pipeline.train.pairs.augmentation import Augmentation
from pipeline.train.pairs.loader import choose, split_evenly
from pipeline.train.pairs.order import PairOrder, Sample, rank_slice
from pipeline.train.pairs.workers import a_process_died
from pipeline.train.replicas import Saved, Writes
from pipeline.train.step import CLIP_NORM, StepResult, train_step
from pipeline.train.validation import MIN_IMAGES, HeldOut, ratio_test_f1, validate
from superglue_sift.batch import PairBatch

CURVE = "curve."  # of the tensors of a checkpoint that hold the text of a curve
MAX_SKIPPED = 20  # steps without a finite gradient: more mean that the training diverges


class StepBatches:
    """The micro-batches of every step, a function of the step alone.

    pairs: of a step over all ranks (`setup.global_batch`).
    """

    def __init__(
        self, train: TrainParams, store: Store, pairs: int, context: distributed.Context
    ) -> None:
        self.train = train
        self.store = store
        self.pairs = pairs
        self.context = context
        self._order = PairOrder(train.seed, len(store), store.views_per_image)
        self._augmentation = Augmentation.of(train)
        keypoints = min(train.max_keypoints, int(store.counts.max(initial=1)))
        size = setup.step_size(train, pairs, context.world_size, keypoints, store.dtype.itemsize)
        self._load, self._prefetched = choose(train.loader, context.device, size)

    def samples(self, step: int) -> List[List[Sample]]:
        """This rank's pairs of global step `step`, in micro-batches."""
        samples = self._order.step(step, self.pairs)
        context = self.context
        samples = samples[rank_slice(self.pairs, context.rank, context.world_size)]
        return split_evenly(samples, self.train.accumulate)

    def load(self, step: int) -> List[PairBatch]:
        """The PairBatches of `samples`, on the host."""
        train = self.train
        return [
            self._load(self.store, part, train.max_keypoints, self._augmentation)
            for part in self.samples(step)
        ]

    def prefetched(self, steps: Sequence[int]) -> Generator[List[PairBatch], None, None]:
        """`load` of each of `steps`, in advance; closing the generator ends the thread or
        processes.
        """
        return self._prefetched(self.load, steps)


class Training:
    """One rank of one training run on the views of `store`, validated on those of `held_out`."""

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
        self.train: TrainParams = params.load("train", paths.params, paths.options)
        self.pairs = setup.global_batch(self.train, context.world_size)
        self.store = store
        self.batches = StepBatches(self.train, store, self.pairs, context)
        initial = Path(self.train.init_from) if self.train.init_from else None
        self.validation = unseen.validation(self.train, held_out, initial, paths.keep_seen)
        augmentation = Augmentation.of(self.train)
        self.held_out = HeldOut(
            held_out, self.validation.samples, self.train.max_keypoints, context, augmentation
        )
        self.trained_on = unseen.trained_with(self.train, store)
        self.precision = setup.choose_precision(self.train, context)
        parts, self.messages = setup.build(self.train, context, store, self.precision)
        self.messages += self.validation.messages
        self.objective, self.ddp_model, self.state, self._init_threshold = parts
        self.checkpoints: Checkpoints  # set by `run`
        self._compared = -1  # step at which the replicas were last compared
        self.fingerprint = identity.fingerprint(self.train, self.store.digest, context.world_size)
        # A longer schedule keeps that of the shorter one
        self.identity = identity.name_of(self.fingerprint)
        # Of packages and code, from each step on
        self.versions = [{"step": 0, **identity.versions()}]

    def run(self) -> int:
        """Train to the last step, or until asked to stop; 0 or 143."""
        self.writes = Writes(
            *(
                distributed.writes(folder, self.context)
                for folder in (self.paths.out, self.paths.reports)
            )
        )
        decisive = {
            "validation pairs": json_digest(self.validation.samples),
            identity.CODE: identity.versions()[identity.CODE],
        }
        resume.agree({**self.fingerprint, **decisive}, self.context.is_main)
        start = resume.prepare(self.paths, self.fingerprint, self.writes.checkpoints)
        self.checkpoints = Checkpoints(start.folder)
        if start.best:
            return self._already_finished(start.folder, start.best)
        window, curves = self._resume(start.saved) if start.saved else (None, {})
        self._compare_replicas()
        about = (self.identity, self.precision, self.pairs, self.state.step, window, curves)
        with TrainingLogger(self.paths, self.context, self.writes.curves, *about) as logger:
            weights = sum(p.numel() for p in self.state.model.parameters())
            logger.log_start(weights, self.store, [str(self.precision), *self.messages])
            try:
                finished = self._loop(logger)
            except RuntimeError as error:
                if a_process_died(error):
                    where = f"rank {self.context.rank} at step {self.state.step}"
                    end_as_lost(
                        f"{where}: a process that loads batches died (killed, or out of memory):"
                        f" {error}"
                    )
                if not distributed.lost_peer(error):
                    raise
                raise LostPeer(
                    f"rank {self.context.rank} at step {self.state.step}: another rank died or"
                    f" hangs ({str(error).splitlines()[0]})"
                ) from error
            if not finished:
                logger.log_stop(self.state.step)
                return STOPPED
            self._save_best(finished=True)
            logger.log_finish(self.state.best_step, self.state.best_figures, self.train.init_from)
        return 0

    def _already_finished(self, folder: Path, info: Dict[str, Any]) -> int:
        """Report that this training is finished, and publish it; `info` describes its best
        model.
        """
        if self.context.is_main:
            reports = self.paths.reports
            saved = self.checkpoints.load_newest()[0]
            if saved:
                resume.publish(folder, self.paths.out)
                for kind, text in _curves_of(saved[0]).items():
                    write_atomic(reports / "curves" / CURVES[kind], text)
            published = self.paths.out / resume.BEST
            if not trained_on.list_of(published).is_file():
                trained_on.write(published, self.trained_on)
            write_metrics(reports, info)
            print(
                f"{folder}: trained with these parameters and data, to the last step: nothing to do"
            )
            other = identity.other_versions(saved[1] if saved else info)
            if other:
                print(f"it was trained under {other}; --fresh trains it anew, in a new folder")
            tracking.attach(reports.parent / "run.json", info["training"]).close()
        return 0

    def validate_only(self) -> int:
        """Print the metrics of the best model so far, or of `train.init_from`; 0."""
        source = self.train.init_from or self.paths.out / "best.safetensors"
        if not self.train.init_from:
            weights = setup.read_model(source, "--validate-only")[0] if self.context.is_main else {}
            self.state.model.load_state_dict(distributed.broadcast_tensors(weights, 0))
        chosen = self.validation
        if self.context.is_main:
            chosen = unseen.validation(
                self.train, self.held_out.store, Path(source), self.paths.keep_seen
            )
        metrics = validate(
            self.objective, self.held_out._replace(samples=distributed.broadcast(chosen.samples))
        )
        if self.context.is_main:
            print(*chosen.messages, sep="\n", end="\n" if chosen.messages else "")
            print(
                f"{source}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            )
        return 0

    def _loop(self, logger: TrainingLogger) -> bool:
        """Train. True: the last step is done; False: stopped by a signal, after a checkpoint."""
        state = self.state
        train = self.train
        steps = range(state.step, train.steps)
        profile_steps = train.profile_steps if self.context.is_main else 0
        with (
            contextlib.closing(self._live_line()) as line,
            contextlib.closing(self.batches.prefetched(steps)) as loader,
            profiled(profile_steps, self.paths.reports / "profile") as step_profiled,
        ):
            initial = state.step == 0  # the curve begins at the initial weights
            # Stopped before its last validation
            if initial or (state.step == train.steps != state.validated):
                self._report_validation(logger, line)
            waiting = time.perf_counter()
            for micro_batches in loader:
                waited = time.perf_counter() - waiting
                stopping = distributed.any_rank(lambda: self.stop.requested)
                self._step(micro_batches, logger, waited)
                line.step(logger.last_sums)
                step_profiled()
                if state.step % train.val_every == 0 or state.step == train.steps:
                    self._report_validation(logger, line)
                stop = stopping()
                if (
                    state.step % (train.save_every or train.val_every) == 0
                    or state.step == train.steps
                    or stop
                ):
                    self._compare_replicas()
                    self._save(logger)
                if stop and state.step < train.steps:
                    return False
                waiting = time.perf_counter()
        return True

    def _step(self, micro_batches: List[PairBatch], logger: TrainingLogger, waited: float) -> None:
        state = self.state
        train = self.train
        distributed.write_heartbeat(state.step)
        lr = learning_rate(train, state.step, self.context.world_size)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        result = self._gradient_step([batch.to(self.context.device) for batch in micro_batches])
        if result.applied:
            state.ema.update(state.model, state.step)
        else:
            self._skipped(result)
        state.step += 1
        logger.add_step(result, waited)
        if state.step % train.log_every == 0 or state.step == train.steps:
            dustbin = float(state.model.dustbin.detach())
            metrics = {"lr": lr, "grad_norm": result.grad_norm, "dustbin": dustbin}
            logger.log_point(state.step, {**metrics, "skipped_steps": float(state.skipped)})

    def _live_line(self) -> LiveLine:
        """The progress line, on rank 0."""
        baseline = ratio_test_f1(self.objective, self.held_out)
        return LiveLine(
            self.train.steps, self.state.step, baseline, self.state.best, self.context.is_main
        )

    def _gradient_step(self, batches: List[PairBatch]) -> StepResult:
        state = self.state
        arguments = (self.ddp_model, state.optimizer, state.scaler, batches, self.pairs)
        try:
            return train_step(*arguments, self.context.world_size, CLIP_NORM)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            train = self.train
            world_size = self.context.world_size
            pairs = -(-self.pairs // world_size // train.accumulate)
            raise WorkError(
                f"out of memory at step {self.state.step} with {pairs} pairs at a time: set"
                f" TRAIN_OPTIONS='--accumulate {train.accumulate * 2}' (the same steps,"
                f" {max(pairs // 2, 1)} pairs at a time), or train.batch:"
                f" {max(self.pairs // 2, world_size)}"
            ) from error

    def _skipped(self, result: StepResult) -> None:
        """Print the pairs of a gradient that was not finite, and give up after too many; all ranks
        call it.
        """
        state = self.state
        samples = [sample for part in self.batches.samples(state.step) for sample in part]
        names = [self._name(samples[index]) for index in result.bad_pairs]
        bad = [name for names in distributed.all_gather(names) for name in names]
        if self.context.is_main:
            print(
                f"step {state.step}: the gradient is not finite, skipped; pairs:"
                f" {', '.join(bad) or 'none alone'}"
            )
        if state.scaler.is_enabled() and not bad:
            return  # the scaler searches for the largest scale that does not overflow
        state.skipped += 1
        if state.skipped > MAX_SKIPPED:
            raise WorkError(
                f"step {state.step}: {state.skipped} steps had a gradient that was not finite, more"
                f" than {MAX_SKIPPED}; lower train.lr, or look at the pairs named above"
            )

    def _name(self, sample: Sample) -> str:
        return f"{self.store.images[sample.image]} views {sample.view0} and {sample.view1}"

    def _report_validation(self, logger: TrainingLogger, line: LiveLine) -> None:
        """Validate, log it and show it."""
        metrics = self._validate()
        logger.log_validation(self.state.step, metrics)
        line.validated(self.state.step, metrics)

    def _validate(self) -> Dict[str, float]:
        """Metrics of the weights that would be shipped; kept as `best` if they are the best.

        Initial weights of `init_from` may stay the best, an untrained network may not.
        """
        state = self.state
        self._compare_replicas()
        state.validated = state.step
        metrics = self._metrics_of(state.weights())
        if (state.step > 0 or self.train.init_from) and state.keep_best(metrics):
            self._save_best()
        return metrics

    def _metrics_of(self, weights: Dict[str, Tensor]) -> Dict[str, float]:
        """Validation of `weights`; the model's own weights are restored."""
        model = self.state.model
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(weights)
        metrics = validate(self.objective, self.held_out)
        model.load_state_dict(before)
        return metrics

    def _compare_replicas(self) -> None:
        """Once a step: end the run if the ranks hold different weights."""
        if self._compared != self.state.step:
            replicas.check(self.state, self.context.is_main)
            self._compared = self.state.step

    def _save_best(self, finished: bool = False) -> None:
        """Write the best model so far and its description."""
        if not self.writes.checkpoints:
            return
        state = self.state
        info = {
            "model": state.model.config.to_dict(),
            "step": state.best_step,
            "precision": self.objective.precision,
            "validation": state.best_figures,
            "match_threshold": self._threshold(),
            "skipped_steps": state.skipped,
            "finished": finished,
            "training": self.identity,
            "versions": identity.without_code(self.versions),
            "train": identity.stated(self.train),
            trained_on.KEY: trained_on.digest(self.trained_on or ()),
            **{
                key: self.fingerprint[key] for key in identity.OF_THE_RUN if key in self.fingerprint
            },
        }
        folder = self.checkpoints.folder
        trained_on.write(folder / resume.BEST, self.trained_on)
        self.checkpoints.save_best(state.best_weights, info)
        resume.publish(folder, self.paths.out)

    def _threshold(self) -> float:
        """The match threshold of the best model, from validation; with few images that of the
        initial weights.
        """
        if self.validation.images < MIN_IMAGES and self._init_threshold is not None:
            return self._init_threshold
        return self.state.best_figures["threshold"]

    def _save(self, logger: TrainingLogger) -> None:
        window = logger.window()
        if self.writes.checkpoints:
            info = {**self.state.info(), "fingerprint": self.fingerprint, "log_window": window}
            chosen = {
                "precision": self.precision.precision,
                "precision_reason": self.precision.reason,
            }
            info.update(chosen, training=self.identity, versions=self.versions)
            curves = {
                f"{CURVE}{kind}": curve.text for kind, curve in logger.curves.items() if curve.text
            }
            texts = {
                name: torch.tensor(list(text.encode()), dtype=torch.uint8)
                for name, text in curves.items()
            }
            self.checkpoints.save(self.state.step, {**self.state.tensors(), **texts}, info)
        distributed.barrier()

    def _resume(self, saved: Saved) -> Tuple[Optional[Window], Dict[str, str]]:
        """Restore the checkpoint that `resume.prepare` found. Returns its `TrainingLogger.window`,
        and its curves.
        """
        tensors, info = saved
        self.state.restore(tensors, info)
        before = info["fingerprint"]
        other = identity.other_versions(info)
        self.identity = info["training"]
        self.versions = info["versions"]
        if other:
            self.versions = [*self.versions, {"step": self.state.step, **identity.versions()}]
        began = info.get("precision", self.precision.precision)
        self._keep_precision(began)
        if self.context.is_main:
            print(f"resuming at step {self.state.step} of {self.train.steps}")
            for line in identity.changes(before, self.fingerprint):
                print(line)
            if began != self.precision.precision:
                print(
                    f"precision changed on resume: {began} -> {self.precision.precision}"
                    f" ({self.precision.reason})"
                )
            if other:
                print(
                    f"versions changed on resume: {other}: the weights may differ in their last"
                    " bits"
                )
        if self.state.best_weights:
            if before.get("train.val_pairs") != self.train.val_pairs:
                metrics = self._metrics_of(self.state.best_weights)
                self.state.best = metrics["f1"]
                self.state.best_figures = metrics
            self._save_best()  # the published file may be another training's
        return info.get("log_window"), _curves_of(tensors)

    def _keep_precision(self, began: str) -> None:
        """Go on in the precision in which the training began, where all ranks can
        (`precision.resumed`).
        """
        gpu = self.context.device.type == "cuda"
        kept = precision.resumed(
            self.train.precision, began, self.precision, gpu, compat.cpu_flags()
        )
        self.precision = setup.agreed(kept)
        self.objective.precision = self.precision.precision


def _curves_of(tensors: Dict[str, Tensor]) -> Dict[str, str]:
    """The text of each curve in a checkpoint."""
    return {
        name[len(CURVE) :]: bytes(tensor.tolist()).decode()
        for name, tensor in tensors.items()
        if name.startswith(CURVE)
    }
