"""Train on one rank. From top to bottom: build, step, loop, validate, save."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import time
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from pipeline import distributed, provenance, tracking, workers
from pipeline.errors import STOPPED, RequestError, WorkError
from pipeline.keypoints.store import KeypointStore
from pipeline.params import Params, RunParams, TrainParams
from pipeline.train import checkpoint, log
from pipeline.train.augmentation import Augmentation
from pipeline.train.checkpoint import BEST, Info, Metrics, Saved, Tensors, TrainState
from pipeline.train.data import StepBatches
from pipeline.train.log import TrainingLogger
from pipeline.train.loss import MatchingObjective, Validation, choose_pairs
from pipeline.train.optimizer import (
    PORTABLE,
    choose_precision,
    device_abilities,
    freeze,
    learning_rate,
    make_optimizer,
)
from superglue_sift import torch_compat
from superglue_sift.features.extractors import kind_of
from superglue_sift.network.batch import PairBatch
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig, synchronize
from superglue_sift.network.weights import BadCheckpoint, load_model_file, weights_of

CLIP_NORM = 1.0  # largest norm of the gradient, so that no single batch moves the weights far
MAX_SKIPPED = 20  # more steps without a finite gradient mean that the training diverges
# Fewest photographs to choose a threshold from. With fewer it is noise, and the threshold of the
# initial weights is kept.
MIN_IMAGES = 16


# --- build the batch size, the model and the parallel wrapper


def global_batch(train: TrainParams, run: RunParams, world_size: int) -> int:
    """Return the number of pairs of one step over all ranks."""
    return run.batch_per_rank * world_size or train.batch


def check(train: TrainParams, store: KeypointStore) -> None:
    """Raise RequestError if the keypoints of `store` lack what the training needs."""
    keys = [name for name in ("neighbours", "rotation_deg", "zoom") if getattr(train, name)]
    if keys and not store.scale_angle:
        raise RequestError(
            f"train.{keys[0]} = {getattr(train, keys[0])}: {store.extractor} gives neither scale"
            " nor angle; set neighbours: false, rotation_deg: 0 and zoom: 0"
        )


def read_model(path: Path) -> Saved:
    """Return the tensors and the description of the initial weights. Raises RequestError."""
    try:
        return load_model_file(path)
    except (FileNotFoundError, BadCheckpoint) as error:
        raise RequestError(f"train.init_from: {error}") from None


def seed(number: int, deterministic: bool) -> None:
    """Seed torch on every device, for the initial weights.

    With `deterministic`, also ask torch and cuBLAS for reproducible kernels, which are slower on a
    GPU. All other random numbers come from generators of their own (seed, epoch, index).
    """
    torch.manual_seed(number)
    if deterministic:
        # cuBLAS reads it when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def network(train: TrainParams, store: Optional[KeypointStore] = None) -> SuperGlue:
    """Return the untrained network for the keypoints of `store`, or for SIFT keypoints if None."""
    values = train.model_dump(include={field.name for field in dataclasses.fields(SuperGlueConfig)})
    values["scale_angle"] = store is None or store.scale_angle
    if store is not None:
        kind, dim = kind_of(store.dtype)
        values.update(extractor=store.extractor, descriptor=kind, descriptor_dim=dim)
    return SuperGlue(SuperGlueConfig(**values))


def build(
    train: TrainParams,
    run: RunParams,
    context: distributed.Context,
    precision: str,
    store: Optional[KeypointStore] = None,
) -> Tuple[MatchingObjective, nn.Module, TrainState, Tuple[bool, Optional[float]], List[str]]:
    """Build the parts of a training on `store`, which are equal on every rank.

    Args:
        precision: "float32", "bfloat16" or "float16", the same on every rank.
        store: the training keypoints. If None, build the network for SIFT keypoints.

    Returns:
        The objective, its parallel wrapper, which a step calls, the state to save, whether the
        model is that of `train.init_from` with its match threshold or None, and lines to print.
    """
    portable_gpu = train.precision == PORTABLE and context.device.type == "cuda"
    # build the model with fresh or initial weights, and freeze a part of them
    seed(train.seed, run.deterministic or portable_gpu)
    model = network(train, store)
    messages: List[str] = []
    whole, threshold = False, None
    if train.init_from:
        whole, threshold, messages = initialize(model, train.init_from)
    frozen = freeze(model, train.freeze)
    messages += [f"frozen: {', '.join(frozen)}"] if frozen else []
    model.to(context.device)
    model.recompute = run.checkpoint_layers
    synchronize(model, distributed.differentiable_sum)
    # add the loss, and the parallel wrapper around it
    objective = MatchingObjective(model, precision)
    if run.compile:
        model.compile_layers()
        # -(-a // b) is a / b rounded up: compiled code needs one size for all batches
        pairs = -(-global_batch(train, run, context.world_size) // context.world_size)
        objective.fixed_size = (-(-pairs // run.accumulate), train.max_keypoints)
    scaler = torch_compat.grad_scaler(precision == "float16")
    state = TrainState(model, make_optimizer(train, model), scaler)
    return objective, distributed.wrap(objective), state, (whole, threshold), messages


def initialize(model: SuperGlue, path: str) -> Tuple[bool, Optional[float], List[str]]:
    """Load the tensors of the model file `path` that fit.

    Returns:
        Whether `model` now is the model of the file: every tensor was taken, and every value of the
        configuration that acts on a match is equal. Then the file's match threshold, or None. It is
        None, too, if `model` is another model, for which that threshold says nothing. Then lines to
        print about what was taken and what does not fit.
    """
    tensors, info = read_model(Path(path))
    stored = weights_of(tensors)
    weights = model.state_dict()
    # Take each tensor whose name and shape the network has, too
    taken = {n: t for n, t in stored.items() if n in weights and t.shape == weights[n].shape}
    model.load_state_dict({**weights, **taken})
    messages = [f"initial weights from {path}: {len(taken)} tensors taken"]
    # Say what did not fit, and which configuration would make it fit
    left = [name for name in weights if name not in taken]
    if left:
        messages.append(f"  not there, or of another shape: {', '.join(left)}")
    theirs = info.get("model", {})
    other = [
        f"{name}: {theirs[name]}"
        for name, value in model.config.to_dict().items()
        if theirs.get(name, value) != value
    ]
    if other:
        messages.append(f"  they were trained with {', '.join(other)}")
    acting = [text for text in other if not text.startswith("sinkhorn_iterations")]
    whole = not acting and stored.keys() == weights.keys() and not left
    if not whole:
        messages.append("  they are taken in part: validation never keeps the weights of step 0")
    return whole, info.get("match_threshold") if whole else None, messages


# --- step along the gradient of the mean loss over all pairs of all ranks


def train_step(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    micro_batches: Sequence[PairBatch],
    pairs: int,
    world_size: int,
) -> Tuple[Metrics, float]:
    """Do one step over this rank's micro-batches. A gradient that is not finite is not applied.

    Each rank computes the gradient of (sum of its losses) * world size / (pairs of all ranks), and
    DistributedDataParallel averages these. The result is the gradient of one process with the whole
    batch, also if the ranks have different numbers of pairs, or none.

    Args:
        objective: MatchingObjective, in DistributedDataParallel if there are several processes.
        scaler: torch's GradScaler, enabled for float16 only.
        micro_batches: one or more PairBatches, on the device. Gradients are exchanged with the
            last.
        pairs: number of pairs in this step over all ranks and micro-batches.

    Returns:
        This rank's sums by name (see MatchingObjective), with its number of `pairs`. Then the norm
        of the gradient before clipping. The gradient was applied if this norm is finite.
    """
    # The running statistics of `norm: batch`. A gradient that is not finite must not change them.
    statistics = [b for b in objective.buffers() if b.is_floating_point()]
    before = [b.clone() for b in statistics]
    for wait in _attempts(micro_batches[0].device):
        weight = world_size / pairs
        names, totals = compute_gradient(objective, optimizer, scaler, micro_batches, weight, wait)
        grad_norm, *sums = totals.tolist()  # the only device-to-host synchronization of a step
        # The norm is taken after the exchange of gradients, so all ranks decide alike
        if math.isfinite(grad_norm):
            optimizer.step()  # `scaler.step` would wait for the GPU once more
            scaler.update()
            break
        for statistic, old in zip(statistics, before):
            statistic.copy_(old)
        scaler.update()
    own = sum(len(batch) for batch in micro_batches)
    return {**dict(zip(names, sums)), "pairs": float(own)}, grad_norm


def _attempts(device: torch.device) -> Tuple[bool, ...]:
    """Return `wait` of each attempt. A GPU waits only if the first gradient is not finite."""
    return (True,) if device.type == "cpu" else (False, True)


def compute_gradient(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    micro_batches: Sequence[PairBatch],
    weight: float,
    wait: bool,
) -> Tuple[List[str], Tensor]:
    """Compute the gradient of the sum of all losses, times `weight`, and clip it.

    Returns the names of the V values of a pair (see MatchingObjective). Then a tensor (1 + V,)
    float64: the norm of the gradient before clipping, and the sum of each value over all pairs.
    """
    optimizer.zero_grad()
    values = []  # the values of each micro-batch, by name
    no_sync = getattr(objective, "no_sync", contextlib.nullcontext)
    for number, batch in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        # only the last micro-batch exchanges gradients between the ranks
        with contextlib.nullcontext() if last else no_sync():
            total, own = objective(batch, wait)
            scaler.scale(total.sum() * weight).backward()
        values.append(own)
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
    # Join all micro-batches to one tensor (V, B), so that the host reads the GPU once.
    names = list(values[0])
    joined = torch.cat([own[name] for name in names for own in values]).view(len(names), -1)
    return names, torch.cat([norm.reshape(1), joined.sum(1)]).double()


class Training:
    """One rank of one training. It trains on the views of one store and validates on another."""

    logger: TrainingLogger  # set by `run`

    def __init__(
        self,
        args: argparse.Namespace,
        sections: Params,
        context: distributed.Context,
        stop: workers.Stop,
    ) -> None:
        """Open the stores, choose the validation pairs and name the training.

        The network is not built yet. `args` is the command line, and `sections` are those of
        params.yaml. Raises RequestError if the keypoints or the initial weights do not fit, or if
        no validation pair is left.
        """
        how = "all" if args.verify else "sample"
        store, held_out = (KeypointStore(args.keypoints / split, how) for split in ("train", "val"))
        check(sections.train, store)
        self.args = args
        self.sections = sections
        self.context = context
        self.stop = stop
        self.store = store
        train = self.train = sections.train
        run = self.run_params = sections.run
        self.pairs = global_batch(train, run, context.world_size)
        # validate on photographs that the initial weights were not trained on
        initial = Path(train.init_from) if train.init_from else None
        if initial:
            read_model(initial)
        samples, self.messages = choose_pairs(train, held_out, run.allow_training_images, initial)
        self.validation = Validation(
            held_out, samples, train.max_keypoints, context, Augmentation.of(train)
        )
        # join the photographs of this training and of the initial weights, if both are known
        own = frozenset(store.photographs) - {""}
        before = provenance.read_photographs(initial) if initial else frozenset()
        self.trained_on = own | before if own and before is not None else None
        self.fingerprint = checkpoint.fingerprint(train, run, store.digest, context.world_size)
        self.name = checkpoint.name_of(self.fingerprint)
        self.versions = provenance.pin(provenance.COMPUTING)

    def run(self) -> int:
        """Train to the last step, or until a signal asks to stop.

        Returns 0, or 143 after a signal. Raises RequestError or WorkError.
        """
        context = self.context
        args = self.args
        # All ranks must have the same request
        decisive = {
            **self.fingerprint,
            **self.run_params.model_dump(),
            "validation pairs": self.validation.digest,
            "code": provenance.code_version(),
        }
        checkpoint.agree(decisive, context.is_main)
        # Find the folder of the training. One rank writes there; nodes may share it or not.
        self.writes = distributed.writes(args.out, context)
        self.folder, best, saved = checkpoint.find_start(args, self.fingerprint, self.writes)
        if best:
            if context.is_main:
                self._publish_finished(best)
            return 0
        # Build, and begin the reports
        self._build(saved)
        precision = self.computed_by["precision"]
        with TrainingLogger(
            args, self.sections, context, self.name, precision, self.pairs, saved
        ) as self.logger:
            self.baseline = self.validation.ratio_test_f1(self.objective)
            steps = self.train.steps
            self.logger.log_start(self.state, steps, self.store, self.messages, self.baseline)
            with self.logger.bar:
                finished = self._loop()
            if not finished:
                self.logger.log_stop(self.state)
                return STOPPED
            # The last step is done
            self._save_best(finished=True)
            self.logger.log_finish(self.state, self.train.init_from)
        return 0

    def validate_only(self) -> int:
        """Print the metrics of the model `train.init_from`. Return 0."""
        self._build(None)
        metrics = self.validation.metrics(self.objective)
        if self.context.is_main:
            figures = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            print(*self.messages, f"{self.train.init_from}: {figures}", sep="\n")
        return 0

    def _build(self, saved: Optional[Saved]) -> None:
        """Build model and optimizer, and restore the checkpoint that the training starts from."""
        train = self.train
        context = self.context
        # Devices may differ, and all ranks need one precision
        abilities = distributed.all_gather(device_abilities(context.device))
        precision, reason = choose_precision(train.precision, abilities)
        parts = build(train, self.run_params, context, precision, self.store)
        self.objective, self.ddp_model, self.state, initial, messages = parts
        self._begins_whole, self._init_threshold = initial
        self.messages = [f"precision: {precision} ({reason})", *messages, *self.messages]
        # record what may change between two starts of a training
        code = provenance.code_version()
        self.computed_by = {"precision": precision, "code": code, **self.versions}
        self.batches = StepBatches(train, self.run_params, self.store, self.pairs, context)
        if saved:
            self._restore(*saved)

    def _restore(self, tensors: Tensors, info: Info) -> None:
        """Go on from a checkpoint, and print what has changed since."""
        state = self.state
        state.restore(tensors, info)
        # The average of a training that is continued is over other steps
        first = checkpoint.first_averaged(self.fingerprint)
        state.begin_average(first, same=first == checkpoint.first_averaged(info["fingerprint"]))
        before = {**info["fingerprint"], **info["computed_by"]}
        now = {**self.fingerprint, **self.computed_by}
        if self.context.is_main:
            print(f"resuming at step {state.step} of {self.train.steps}")
            for key in checkpoint.changed_keys(before, now):
                print(f"{key} changed on resume: {before.get(key)} -> {now.get(key)}")
        # validate the best model again if its metrics are from other pairs
        if state.best_weights:
            if info.get("validated_on") != self.validation.digest:
                baseline = self.validation.ratio_test_f1(self.objective)
                metrics = self._metrics_of(state.best_weights)
                state.best_metrics = {**metrics, "f1_ratio_test": baseline}
            # The published file may belong to another training
            self._save_best()

    # --- loop

    def _loop(self) -> bool:
        """Train to the last step.

        Returns True when the last step is done. Returns False, with a saved checkpoint, when a
        signal stopped the training.
        """
        state = self.state
        train = self.train
        save_every = self.run_params.save_every or train.val_every
        steps = range(state.step, train.steps)
        with contextlib.closing(self.batches.prefetch(steps)) as loader:
            if state.step == 0:  # the curve begins at the initial weights
                self._validate()
            waiting = time.perf_counter()
            for micro_batches in loader:
                self._step(micro_batches, time.perf_counter() - waiting)
                last = state.step == train.steps
                stop = distributed.any_rank(self.stop.requested)

                # once in a while: validate, and keep the weights if they are the best
                if last or state.step % train.val_every == 0:
                    self._validate()

                # once in a while, and before a stop: save a checkpoint
                if last or stop or state.step % save_every == 0:
                    self._save()
                if stop and not last:
                    return False
                waiting = time.perf_counter()
        return True

    # --- step

    def _step(self, micro_batches: List[PairBatch], waited: float) -> None:
        """Do one step of the optimizer. The loop waited `waited` seconds for its batches."""
        state = self.state
        train = self.train
        world_size = self.context.world_size
        lr = learning_rate(train, self.run_params, state.step, world_size)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        try:
            sums, grad_norm = train_step(
                self.ddp_model, state.optimizer, state.scaler, micro_batches, self.pairs, world_size
            )
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            more = 2 * self.run_params.accumulate
            fix = f"set run.accumulate: {more} (the same steps, in smaller parts)"
            raise WorkError(f"out of memory at step {state.step}: {fix}") from error
        if not math.isfinite(grad_norm):
            self._skip(math.isfinite(sums["loss"]))
        state.step += 1
        if state.step > train.steps - train.average:
            state.add_to_average()
        self.logger.add_step(sums, waited)

        # once in a while: add a point to the curves, the mean over all ranks
        if state.step % self.run_params.log_every == 0 or state.step == train.steps:
            metrics = {
                "lr": lr,
                "grad_norm": grad_norm,
                "dustbin": float(state.model.dustbin.detach()),
                "skipped_steps": float(state.skipped),
            }
            self.logger.log_point(state.step, metrics)

    def _skip(self, finite_loss: bool) -> None:
        """Report that the gradient of a step is not finite. All ranks call this together.

        Raises WorkError after more than MAX_SKIPPED such steps.
        """
        state = self.state
        # float16: the scaler searches for the largest scale that does not overflow
        overflow = state.scaler.is_enabled() and not distributed.any_rank(not finite_loss)
        state.skipped += not overflow
        if self.context.is_main:
            print(f"step {state.step}: the gradient is not finite, skipped")
        if state.skipped > MAX_SKIPPED:
            raise WorkError(
                f"step {state.step}: {state.skipped} steps had a gradient that was not finite, more"
                f" than {MAX_SKIPPED}; lower train.lr"
            )

    # --- validate

    def _validate(self) -> None:
        """Validate the weights that would be shipped, and keep them if they are the best.

        These are the mean of the weights of the last `train.average` steps, if that mean exists
        already, and otherwise the current weights. The initial weights of `init_from` may stay the
        best if all were taken. A network that is untrained, or in part, may not.
        """
        state = self.state
        metrics = {**self._metrics_of(state.average), "f1_ratio_test": self.baseline}
        untrained = state.step == 0 and not self._begins_whole
        self.logger.log_validation(state, metrics, untrained)
        if not untrained and state.keep_best(metrics):
            self._save_best()
        self.logger.write_curves(state.best_step)

    def _metrics_of(self, weights: Tensors) -> Metrics:
        """Return the metrics of the model with `weights` in place of its own.

        Names that `weights` lacks keep the model's own values. The model is restored afterwards.
        """
        model = self.state.model
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({**before, **weights})
        metrics = self.validation.metrics(self.objective)
        model.load_state_dict(before)
        return metrics

    # --- save

    def _save(self) -> None:
        """Write a checkpoint. All ranks call this together."""
        # Sum the next point of the curves over all ranks. Then one rank in each folder writes.
        window = distributed.sum_over_ranks(self.logger.sums)
        if self.writes:
            info = {
                **self.state.info(),
                "computed_by": self.computed_by,
                "curves": self.logger.curves,
                "fingerprint": self.fingerprint,
                "log_window": window,
                "training": self.name,
                "validated_on": self.validation.digest,
            }
            checkpoint.save(self.folder, self.state.step, self.state.tensors(), info)
        distributed.barrier()

    def _save_best(self, finished: bool = False) -> None:
        """Write the best model so far and its description, and publish them."""
        if not self.writes:
            return
        state = self.state
        # few photographs cannot choose a threshold
        threshold = state.best_metrics["threshold"]
        photographs = {sample.image for sample in self.validation.samples}
        if len(photographs) < MIN_IMAGES and self._init_threshold is not None:
            threshold = self._init_threshold
        # describe only what is the same in every run, so that the file has the same bytes
        decided = {"data", "initial_weights", "world_size"}
        info = {
            "model": state.model.config.to_dict(),
            "step": state.best_step,
            "precision": self.computed_by["precision"],
            "validation": state.best_metrics,
            "match_threshold": threshold,
            "skipped_steps": state.skipped,
            "finished": finished,
            "training": self.name,
            "versions": [{"step": 0, **self.versions}],
            "train": checkpoint.describe(self.train),
            provenance.PHOTOGRAPHS_KEY: provenance.photographs_digest(self.trained_on or ()),
            **{k: v for k, v in self.fingerprint.items() if k in decided},
        }
        provenance.write_photographs(self.folder / BEST, self.trained_on)
        checkpoint.save_best(self.folder, self.args.out, state.best_weights, info)

    def _publish_finished(self, best: Info) -> None:
        """Publish a training that is finished already, and say so.

        `best` is the description of its best model. The folder of the training may be missing if
        `args.out` has that model.
        """
        reports = self.args.reports
        if self.folder.is_dir():
            checkpoint.publish(self.folder, self.args.out)
        # the curves come from a checkpoint, because `args.reports` may hold another training's
        saved = checkpoint.load_newest(self.folder)
        if saved:
            log.write_curves(reports, saved[1]["curves"], best["step"])
        log.write_metrics(reports, best)
        done = "trained with these parameters and data, to the last step"
        print(f"{self.folder}: {done}: nothing to do")
        tracking.attach(reports / "log.jsonl", best["training"]).close()
