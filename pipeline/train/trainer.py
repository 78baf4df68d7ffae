"""The training of one rank, from top to bottom: build, loop, step, validate, save, stop."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, Dict, FrozenSet, List, Optional, Sequence, Tuple

import numpy
import torch
from torch import Tensor, nn

from pipeline import compat, distributed, signals, tracking, training_overlap
from pipeline.errors import STOPPED, RequestError, WorkError
from pipeline.files import json_digest, write_atomic
from pipeline.keypoints.store import Store
from pipeline.params import Params, RunParams, TrainParams
from pipeline.train import checkpoint, log
from pipeline.train.augmentation import Augmentation
from pipeline.train.checkpoint import BEST, TrainState
from pipeline.train.data import StepBatches, a_process_died
from pipeline.train.log import TrainingLogger
from pipeline.train.loss import MatchingObjective, Validation, choose_pairs
from pipeline.train.optimizer import (
    BY_SUPPORT,
    PORTABLE,
    Precision,
    choose_precision,
    freeze,
    learning_rate,
    make_optimizer,
)
from superglue_sift import environment, torch_compat
from superglue_sift.features.extractors import kind_of
from superglue_sift.network.batch import PairBatch
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig, synchronize
from superglue_sift.network.weights import BadCheckpoint, load_model_file, weights_of

CLIP_NORM = 1.0  # largest norm of the gradient, so that no single batch moves the weights far
MAX_SKIPPED = 20  # more steps without a finite gradient mean that the training diverges
# Fewest photographs to choose a threshold from. With fewer it is noise, and the threshold of the
# initial weights is kept.
MIN_IMAGES = 16
# Keys of `train` that must be equal for initial weights to fit entirely
SHAPE = ("dim", "layers", "heads", "norm", "neighbours", "rotary")


# Build: batch size, precision, model, parallel wrapper.


def global_batch(train: TrainParams, run: RunParams, world_size: int) -> int:
    """Return the number of pairs of one step over all ranks."""
    return run.batch_per_rank * world_size or train.batch


def check(train: TrainParams, run: RunParams, store: Store) -> None:
    """Check that this machine and the keypoints of `store` have what the training needs.

    Raises RequestError if they do not.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    choose_precision(train.precision, torch.device(kind))
    missing = torch_compat.no_compiler(kind) if run.compile else ""
    if missing:
        raise RequestError(f"run.compile: {missing}; install it, or set false")
    keys = [name for name in ("neighbours", "rotation_deg", "zoom") if getattr(train, name)]
    if keys and not store.scale_angle:
        raise RequestError(
            f"train.{keys[0]} = {getattr(train, keys[0])}: {store.extractor} gives neither scale"
            " nor angle; set neighbours: false, rotation_deg: 0 and zoom: 0"
        )


def read_model(path: str, asked_by: str) -> Tuple[Dict[str, Tensor], dict]:
    """Return the tensors and the description of a model file.

    Raises RequestError, whose text begins with `asked_by`, if the file cannot be read.
    """
    try:
        return load_model_file(path)
    except (FileNotFoundError, BadCheckpoint) as error:
        raise RequestError(f"{asked_by}: {error}") from None


def precision_of_ranks(
    train: TrainParams, context: distributed.Context, before: str = ""
) -> Precision:
    """Choose one precision for all ranks, whose devices may differ. Return it with its reason.

    Args:
        before: precision of the checkpoint from which the training resumes, or "".

    Raises:
        RequestError: `portable` was asked for, but this process on a CPU was not prepared for it.
    """
    on_cpu = context.device.type == "cpu"
    if train.precision == PORTABLE and on_cpu and not environment.is_prepared():
        raise RequestError(
            "train.precision: portable needs variables that are set before torch is loaded: start"
            " the training by `python -m pipeline.train`, or set float32"
        )
    choices = distributed.all_gather(choose_precision(train.precision, context.device, before))
    # every device supports the smallest of the choices
    return min(choices, key=lambda choice: BY_SUPPORT.index(choice[0]))


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed the generators of Python, NumPy and torch on every device.

    With `deterministic`, also ask torch and cuBLAS for reproducible kernels, which are slower on a
    GPU. A training draws from its own generators (seed, epoch, index). These seeds are for
    libraries that draw from the global generators.
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if not deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # must be set before cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def network(train: TrainParams, store: Optional[Store] = None) -> SuperGlue:
    """Return the untrained network for the keypoints of `store`. Without it, use SIFT's
    keypoints."""
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
    store: Optional[Store] = None,
) -> Tuple[MatchingObjective, nn.Module, TrainState, Optional[float], List[str]]:
    """Build the parts of a training on `store`, which are equal on every rank.

    Args:
        precision: "float32", "bfloat16" or "float16", the same on every rank.
        store: the training keypoints. If None, build the network for SIFT keypoints.

    Returns:
        The objective; its parallel wrapper, which a step calls; the state to save; the match
        threshold of `train.init_from`, or None; and lines to print.
    """
    portable_gpu = train.precision == PORTABLE and context.device.type == "cuda"
    # model: fresh, initial, or partly frozen weights
    seed_everything(train.seed, run.deterministic or portable_gpu)
    model = network(train, store)
    messages: List[str] = []
    threshold = _initialize(model, train.init_from, messages) if train.init_from else None
    frozen = freeze(model, train.freeze)
    messages += [f"frozen: {', '.join(frozen)}"] if frozen else []
    model.to(context.device)
    model.recompute = run.checkpoint_layers
    synchronize(model, distributed.differentiable_sum)
    # loss, and the parallel wrapper around it
    objective = MatchingObjective(model, precision)
    if run.compile:
        model.compile_layers()
        # -(-a // b) is a / b rounded up: compiled code needs one size for all batches
        pairs = -(-global_batch(train, run, context.world_size) // context.world_size)
        objective.fixed_size = (-(-pairs // run.accumulate), train.max_keypoints)
    scaler = compat.grad_scaler(precision == "float16")
    state = TrainState(model, make_optimizer(train, model), scaler)
    return objective, distributed.wrap(objective), state, threshold, messages


def _initialize(model: SuperGlue, path: str, messages: List[str]) -> Optional[float]:
    """Load the tensors of the model file `path` that fit, and say in `messages` which do not.

    Returns the file's match threshold, or None if it has none.
    """
    tensors, info = read_model(path, "train.init_from")
    given = weights_of(tensors)
    weights = model.state_dict()
    # tensors fit if the network has one of the same name and shape
    taken = {n: t for n, t in given.items() if n in weights and t.shape == weights[n].shape}
    model.load_state_dict({**weights, **taken})
    messages.append(f"initial weights from {path}: {len(taken)} tensors taken")
    # say what did not fit, and which keys of `train` would make it fit
    left = [name for name in weights if name not in taken]
    for title, names in (
        ("skipped, another shape", [name for name in left if name in given]),
        ("missing there", [name for name in left if name not in given]),
    ):
        if names:
            messages.append(f"  {title}: {', '.join(names)}")
    theirs = info.get("model", {})
    ours = model.config.to_dict()
    for name in SHAPE:
        if name in theirs and theirs[name] != ours[name]:
            now, before = (str(values[name]).lower() for values in (ours, theirs))
            messages.append(
                f"  train.{name} is {now}: these weights were trained with {before}; set that to"
                " use them fully"
            )
    return info.get("match_threshold")


# Step: the gradient of the mean loss over all pairs of all ranks, clipping and update.


def train_step(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    micro_batches: Sequence[PairBatch],
    pairs: int,
    world_size: int,
) -> Tuple[Dict[str, float], float, List[int]]:
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
        of the gradient before clipping; if it is finite, the gradient was applied. Last, the
        indices of this rank's pairs whose loss was not finite, if the gradient was not applied.
    """
    # The running statistics of `norm: batch`. A gradient that is not finite must not change them.
    statistics = [b for b in objective.buffers() if b.is_floating_point()]
    before = [b.clone() for b in statistics]
    for wait in _attempts(micro_batches[0].device):
        optimizer.zero_grad()
        names, values = backward(objective, scaler, micro_batches, world_size / pairs, wait)
        totals = clip_and_sum(values, optimizer, scaler)
        grad_norm, *sums = totals.tolist()  # the only device-to-host synchronisation of a step
        # The norm is taken after the exchange of gradients, so all ranks decide alike
        applied = math.isfinite(grad_norm)
        if applied:
            optimizer.step()  # `scaler.step` would wait for the GPU once more
        else:
            for statistic, old in zip(statistics, before):
                statistic.copy_(old)
        scaler.update()
        if applied:
            break
    # (B,): the loss of each pair, over all micro-batches
    losses = values[names.index("loss")]
    bad = [] if applied else torch.nonzero(~torch.isfinite(losses))[:, 0].tolist()
    return {**dict(zip(names, sums)), "pairs": float(losses.numel())}, grad_norm, bad


def _attempts(device: torch.device) -> Tuple[bool, ...]:
    """Return `wait` of each attempt. A GPU waits only if the first gradient is not finite."""
    return (True,) if device.type == "cpu" else (False, True)


def backward(
    objective: nn.Module, scaler: Any, micro_batches: Sequence[PairBatch], weight: float, wait: bool
) -> Tuple[List[str], Tensor]:
    """Add the gradient of the sum of all losses, times `weight`.

    Returns the names of the V values of a pair (see MatchingObjective), and the values, (V, B),
    where B is the number of pairs of all micro-batches.
    """
    values: Dict[str, List[Tensor]] = {}
    no_sync = getattr(objective, "no_sync", contextlib.nullcontext)
    for number, batch in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        # only the last micro-batch exchanges gradients between the ranks
        with contextlib.nullcontext() if last else no_sync():
            total, parts = objective(batch, wait)
            scaler.scale(total.sum() * weight).backward()
        for name, value in parts.items():
            values.setdefault(name, []).append(value)
    # one tensor (V, B), so that the host reads the GPU once
    joined = torch.cat([value for each in values.values() for value in each])
    return list(values), joined.view(len(values), -1)


def clip_and_sum(values: Tensor, optimizer: torch.optim.Optimizer, scaler: Any) -> Tensor:
    """Clip the gradient and add up the logged values (V, B), so that the host reads the GPU once.

    Returns (1 + V,) float64: the norm of the gradient before clipping, and the sum of each value.
    """
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
    return torch.cat([norm.reshape(1), values.sum(1)]).double()


class Training:
    """One rank of one training. It trains on the views of `store` and validates on `held_out`."""

    logger: TrainingLogger  # set by `run`

    def __init__(
        self,
        args: argparse.Namespace,
        sections: Params,
        context: distributed.Context,
        stop: signals.Stop,
        store: Store,
        held_out: Store,
    ) -> None:
        """Choose the validation pairs and name the training, without building the network.

        args is the command line and sections are the sections of params.yaml. Raises RequestError
        if no validation pair is left.
        """
        self.args = args
        self.sections = sections
        self.context = context
        self.stop = stop
        self.store = store
        train = self.train = sections.train
        run = self.run_params = sections.run
        self.pairs = global_batch(train, run, context.world_size)
        initial = Path(train.init_from) if train.init_from else None
        samples, self.messages = choose_pairs(train, held_out, run.allow_training_images, initial)
        self.validation = Validation(
            held_out, samples, train.max_keypoints, context, Augmentation.of(train)
        )
        self.trained_on = list_photographs(train, store)
        self.fingerprint = checkpoint.fingerprint(train, run, store.digest, context.world_size)
        self.name = checkpoint.name_of(self.fingerprint)
        # The versions of packages and code, with the step from which they count
        self.versions = [{"step": 0, **checkpoint.versions()}]

    def run(self) -> int:
        """Train to the last step, or until a signal asks to stop.

        Returns 0, or 143 after a signal. Raises RequestError or WorkError.
        """
        context = self.context
        args = self.args
        # One rank writes in each folder. Nodes may share the folders or have folders of their own.
        self.writes = distributed.writes(args.out, context)
        writes_curves = distributed.writes(args.reports, context)
        # All ranks must have the same request. Then find the folder of the training.
        decisive = {
            **self.run_params.model_dump(),
            "validation pairs": json_digest(self.validation.samples),
            checkpoint.CODE: self.versions[0][checkpoint.CODE],
        }
        checkpoint.agree({**self.fingerprint, **decisive}, context.is_main)
        self.folder, best, saved = checkpoint.find_start(args, self.fingerprint, self.writes)
        if best:
            if context.is_main:
                self._publish_finished(best)
            return 0
        # Build, and begin the reports
        self._build(saved)
        self.state.compare_ranks(context.is_main)
        precision, reason = self.precision
        tags = {"precision": precision, "precision_reason": reason}
        about = (writes_curves, self.name, tags, self.pairs, saved)
        with TrainingLogger(args, self.sections, context, *about) as self.logger:
            self.baseline = self.validation.ratio_test_f1(self.objective)
            steps = self.train.steps
            self.logger.log_start(self.state, steps, self.store, self.messages, self.baseline)
            with contextlib.closing(self.logger.bar):
                finished = self._loop_watched()
            if not finished:
                self.logger.log_stop(self.state.step)
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

    def _build(self, saved: Optional[checkpoint.Saved]) -> None:
        """Build model and optimiser, and restore the checkpoint that the training starts from."""
        train = self.train
        context = self.context
        before = saved[1]["precision"] if saved else ""
        self.precision = precision_of_ranks(train, context, before)
        parts = build(train, self.run_params, context, self.precision[0], self.store)
        self.objective, self.ddp_model, self.state, self._init_threshold, messages = parts
        precision = "precision: {} ({})".format(*self.precision)
        self.messages = [precision, *messages, *self.messages]
        self.batches = StepBatches(train, self.run_params, self.store, self.pairs, context)
        if saved:
            self._restore(*saved)

    def _restore(self, tensors: Dict[str, Tensor], info: Dict[str, Any]) -> None:
        # Tensors and numbers; then versions; then the best model, whose metrics may be of other
        # pairs
        state = self.state
        state.restore(tensors, info)
        if state.step <= self.train.steps - self.train.average:
            state.drop_average()  # the checkpoint's average belongs to a shorter training
        self.versions = info["versions"]
        other = checkpoint.other_versions(info)
        if other:
            self.versions = [*self.versions, {"step": state.step, **checkpoint.versions()}]
        if self.context.is_main:
            self._print_changes(info, other)
        if state.best_weights:
            if info.get("validated_on") != self.validation.digest:
                baseline = self.validation.ratio_test_f1(self.objective)
                metrics = self._metrics_of(state.best_weights)
                state.best_metrics = {**metrics, "f1_ratio_test": baseline}
                state.best = state.best_metrics["f1"]
            # The published file may belong to another training
            self._save_best()

    def _print_changes(self, info: Dict[str, Any], other_versions: str) -> None:
        """Print where the training resumes, and what has changed since the checkpoint."""
        before = info["fingerprint"]
        print(f"resuming at step {self.state.step} of {self.train.steps}")
        for key in checkpoint.changed_keys(before, self.fingerprint):
            if key != "train.init_from":
                print(f"{key} changed on resume: {before.get(key)} -> {self.fingerprint.get(key)}")
        precision, reason = self.precision
        if info["precision"] != precision:
            print(f"precision changed on resume: {info['precision']} -> {precision} ({reason})")
        if other_versions:
            print(
                f"versions changed on resume: {other_versions}: the weights may differ in their"
                " last bits"
            )

    # Loop.

    def _loop_watched(self) -> bool:
        """Run `_loop`. If a process that loads batches dies, kill this rank too.

        The launcher then starts all ranks again, as after any lost rank.
        """
        try:
            return self._loop()
        except RuntimeError as error:
            if not a_process_died(error):
                raise
            reason = "a process that loads batches died (killed, or out of memory)"
            line = f"rank {self.context.rank} at step {self.state.step}: {reason}: {error}"
            print(" ".join(line.split()), file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)  # the launcher starts all ranks again
            raise

    def _loop(self) -> bool:
        """Train to the last step.

        Returns True when the last step is done. Returns False when a signal stopped the training;
        its checkpoint is then saved.
        """
        state = self.state
        train = self.train
        save_every = self.run_params.save_every or train.val_every
        steps = range(state.step, train.steps)
        with contextlib.closing(self.batches.prefetch(steps)) as loader:
            # The curve begins at the initial weights, and a resumed training may have no step left
            if state.step == 0 or (state.step == train.steps != state.validated):
                self._validate()
            waiting = time.perf_counter()
            for micro_batches in loader:
                waited = time.perf_counter() - waiting
                self._step(micro_batches, waited)
                last = state.step == train.steps
                stop = distributed.any_rank(self.stop.requested)
                validating = last or state.step % train.val_every == 0
                saving = last or stop or state.step % save_every == 0
                if validating or saving:
                    # Ranks that differ end the training before anything is kept
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
        """Do one step of the optimiser. The loop waited `waited` seconds for its batches."""
        state = self.state
        train = self.train
        world_size = self.context.world_size
        lr = learning_rate(train, self.run_params, state.step, world_size)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        common = (self.ddp_model, state.optimizer, state.scaler)
        try:
            sums, grad_norm, bad = train_step(*common, micro_batches, self.pairs, world_size)
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise self._explain_memory() from error
            raise
        if not math.isfinite(grad_norm):
            self._skip(bad)
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

    def _explain_memory(self) -> WorkError:
        """Return an error that names the fix, to raise in place of torch's error."""
        accumulate = self.run_params.accumulate
        at_a_time = -(-self.pairs // self.context.world_size // accumulate)
        return WorkError(
            f"out of memory at step {self.state.step} with {at_a_time} pairs at a time: set"
            f" run.accumulate: {accumulate * 2} (the same steps, {max(at_a_time // 2, 1)} pairs at"
            f" a time), or train.batch: {max(self.pairs // 2, self.context.world_size)}"
        )

    def _skip(self, bad_pairs: List[int]) -> None:
        """Print the pairs whose gradient is not finite. All ranks call this together.

        Raises WorkError after more than MAX_SKIPPED such steps.
        """
        state = self.state
        samples = [sample for part in self.batches.samples(state.step) for sample in part]
        names = [
            f"{self.store.images[image]} views {view0} and {view1}"
            for image, view0, view1, _ in (samples[index] for index in bad_pairs)
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

    # Validate.

    def _validate(self) -> None:
        """Validate the weights that would be shipped, and keep them if they are the best.

        These are the mean of the weights of the last `train.average` steps, if that mean exists
        already, and otherwise the current weights. The initial weights of `init_from` may stay the
        best. An untrained network may not.
        """
        state = self.state
        metrics = self._metrics_of(state.average)
        metrics["f1_ratio_test"] = self.baseline
        untrained = state.step == 0 and not self.train.init_from
        self.logger.log_validation(state, metrics, untrained)
        state.validated = state.step
        if not untrained and state.keep_best(metrics):
            self._save_best()
        self.logger.draw(state.best_step)

    def _metrics_of(self, weights: Dict[str, Tensor]) -> Dict[str, float]:
        """Return the metrics of the model with `weights` in place of its own.

        Names that `weights` lacks keep the model's own values. The model is restored afterwards.
        """
        model = self.state.model
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({**before, **weights})
        metrics = self.validation.metrics(self.objective)
        model.load_state_dict(before)
        return metrics

    # Save.

    def _save(self) -> None:
        """Write a checkpoint. All ranks call this together."""
        # all ranks give their sums, then one rank in each folder writes
        window = self.logger.window()
        if self.writes:
            info = {
                **self.state.info(),
                "fingerprint": self.fingerprint,
                "log_window": window,
                "precision": self.precision[0],
                "precision_reason": self.precision[1],
                "training": self.name,
                "validated_on": self.validation.digest,
                "versions": self.versions,
            }
            tensors = {**self.state.tensors(), **log.curve_tensors(self.logger.curves)}
            checkpoint.save(self.folder, self.state.step, tensors, info)
        distributed.barrier()

    def _save_best(self, finished: bool = False) -> None:
        """Write the best model so far and its description, and publish them."""
        if not self.writes:
            return
        state = self.state
        decided = {"data", "initial_weights", "world_size"}
        # only what is the same in every run, so that the file has the same bytes
        info = {
            "model": state.model.config.to_dict(),
            "step": state.best_step,
            "precision": self.precision[0],
            "validation": state.best_metrics,
            "match_threshold": self._threshold(),
            "skipped_steps": state.skipped,
            "finished": finished,
            "training": self.name,
            "versions": checkpoint.without_code(self.versions),
            "train": checkpoint.describe(self.train),
            training_overlap.KEY: training_overlap.digest(self.trained_on or ()),
            **{k: v for k, v in self.fingerprint.items() if k in decided},
        }
        training_overlap.write(self.folder / BEST, self.trained_on)
        checkpoint.save_best(self.folder, state.best_weights, info)
        checkpoint.publish(self.folder, self.args.out)

    def _threshold(self) -> float:
        """Return the match threshold of the best validation.

        With fewer than MIN_IMAGES photographs, return the threshold of the initial weights instead,
        if they have one.
        """
        photographs = {sample.image for sample in self.validation.samples}
        if len(photographs) < MIN_IMAGES and self._init_threshold is not None:
            return self._init_threshold
        return self.state.best_metrics["threshold"]

    def _publish_finished(self, best: Dict[str, Any]) -> None:
        """Publish a training that is finished already, and say so.

        `best` is the description of its best model. The folder of the training may be missing if
        `args.out` has that model. Raises RequestError if its curves are deleted.
        """
        out = self.args.out
        reports = self.args.reports
        folder = self.folder
        done = f"{folder}: trained with these parameters and data, to the last step"
        # the curves come from a checkpoint, because `args.reports` may hold another training's
        saved = checkpoint.load_newest(folder)[0]
        if saved:
            log.write_curves(reports, saved[0], best["step"])
        elif folder.is_dir() and not log.has_metrics(reports, best):
            raise RequestError(
                f"{done}, but its checkpoints step-*, which held its curves, are deleted, and"
                f" {reports} is of another training; --fresh trains it anew, in a new folder"
            )
        # what later stages read: the model, its list of photographs, and the metrics
        if folder.is_dir():
            checkpoint.publish(folder, out)
        if not training_overlap.list_of(out / BEST).is_file():
            training_overlap.write(out / BEST, self.trained_on)
        write_atomic(reports / log.METRICS, log.text_of_metrics(best))
        print(f"{done}: nothing to do")
        other = checkpoint.other_versions(saved[1] if saved else best)
        if other:
            print(f"it was trained under {other}; --fresh trains it anew, in a new folder")
        tracking.attach(reports / "log.jsonl", best["training"]).close()


def list_photographs(train: TrainParams, store: Store) -> Optional[FrozenSet[str]]:
    """Return the photographs of `store` and the photographs that the initial weights have seen.

    Returns None if the photographs of either are unknown.
    """
    known = frozenset(store.photographs) - {""}
    before = training_overlap.read(Path(train.init_from)) if train.init_from else frozenset()
    return before | known if known and before is not None else None
