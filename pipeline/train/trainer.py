"""Train on one rank. From top to bottom: data, step, training, loop, validate, save."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from pathlib import Path
from typing import Any, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from pipeline import distributed, provenance, tracking, workers
from pipeline.errors import STOPPED, RequestError, WorkError
from pipeline.keypoints.store import KeypointStore
from pipeline.params import Params, TrainParams
from pipeline.train import build, checkpoint, log
from pipeline.train.augmentation import choose_second_image
from pipeline.train.checkpoint import Info, Metrics, Saved, Tensors
from pipeline.train.data import PairBatch, Sample, StepBatches
from pipeline.train.log import TrainingLogger
from pipeline.train.loss import Validation, choose_validation_pairs
from pipeline.train.optimizer import (
    choose_precision,
    compute_learning_rate,
    detect_abilities,
    get_device_name,
)
from superglue_sift.files import compute_json_digest

CLIP_NORM = 1.0  # Largest norm of the gradient, so that no single batch moves the weights far
MAX_SKIPPED = 20  # More steps without a finite gradient mean that the training diverges
# Smallest number of photographs to choose a threshold from. With fewer, noise would choose it, and
# the threshold of the initial weights is taken.
MIN_IMAGES = 16
NAMED_PAIRS = 8  # Largest number of pairs that the line about a skipped step names


# --- open the data, and check a request


class TrainingData(NamedTuple):
    """What a training reads.

    Attributes:
        store: the keypoints to train on.
        validation: the validation pairs.
        photographs: identifiers of the photographs of this training and of its initial weights, or
            None if they are not known.
        messages: lines to print.
    """

    store: KeypointStore
    validation: Validation
    photographs: Optional[FrozenSet[str]]
    messages: List[str]


def open_data(
    args: argparse.Namespace, sections: Params, context: distributed.Context
) -> TrainingData:
    """Open the stores of keypoints, and choose the validation pairs.

    Args:
        args: the command line.
        sections: the sections of params.yaml.
        context: this process among the ranks.

    Raises:
        RequestError: If the keypoints or the initial weights do not fit, or if no validation pair
            is left.
    """
    train = sections.train
    verify = "all" if args.verify else "sample"
    store, held_out = (KeypointStore(args.keypoints / split, verify) for split in ("train", "val"))
    check_keypoints(train, store)
    initial = Path(train.init_from) if train.init_from else None
    if initial:
        build.read_initial_model(initial)
    samples, messages = choose_validation_pairs(
        train, held_out, sections.run.allow_training_images, initial
    )
    validation = Validation(held_out, samples, train.max_keypoints, context, train.augmentation)
    # The weights have seen the photographs of this training and of the initial weights.
    photographs: Optional[FrozenSet[str]] = frozenset(store.photographs) - {""} or None
    if initial and photographs:
        initial_photographs = provenance.read_photographs(initial)
        photographs = None if initial_photographs is None else photographs | initial_photographs
    return TrainingData(store, validation, photographs, messages)


def check_keypoints(train: TrainParams, store: KeypointStore) -> None:
    """Check that the keypoints have what the training needs.

    Args:
        train: the section `train`.
        store: the keypoints.

    Raises:
        RequestError: If a key needs scales and angles, and the keypoints have none.
    """
    values = {
        "model.neighbours": train.model.neighbours,
        "augmentation.rotation_deg": train.augmentation.rotation_deg,
        "augmentation.zoom": train.augmentation.zoom,
    }
    keys = [name for name, value in values.items() if value]
    if keys and not store.scale_angle:
        raise RequestError(
            f"train.{keys[0]} = {values[keys[0]]}: {store.extractor} gives neither scale nor angle;"
            " set neighbours: false, rotation_deg: 0 and zoom: 0"
        )


def check_request(args: argparse.Namespace, sections: Params, world_size: int) -> None:
    """Check a request before any process starts, without building a training.

    Args:
        args: the command line.
        sections: the sections of params.yaml.
        world_size: number of processes.

    Raises:
        RequestError: If the stores, the initial weights or the checkpoint to continue do not fit.
    """
    context = distributed.Context(0, world_size, torch.device("cpu"))
    data = open_data(args, sections, context)
    if args.continued:
        checkpoint.load_to_continue(
            args.continued, fingerprint_training(sections, data, world_size)
        )


def fingerprint_training(sections: Params, data: TrainingData, world_size: int) -> Info:
    """Return what tells a training from another, as `checkpoint.make_fingerprint` describes."""
    return checkpoint.make_fingerprint(
        sections.train, sections.run, data.store.digest, data.validation.digest, world_size
    )


# --- step along the gradient of the mean loss over all pairs of all ranks


def train_step(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    micro_batches: Sequence[PairBatch],
    pairs: int,
    world_size: int,
) -> Tuple[Metrics, float, Tensor]:
    """Do one step over this rank's micro-batches. A gradient that is not finite is not applied.

    Each rank computes the gradient of (sum of its losses) * world size / (pairs of all ranks), and
    DistributedDataParallel averages these. The result is the gradient of one process with the whole
    batch, also if the ranks have different numbers of pairs, or none.

    Args:
        objective: MatchingObjective, in DistributedDataParallel if there are several processes.
        optimizer: what changes the weights.
        scaler: torch's GradScaler, enabled for float16 only.
        micro_batches: one or more PairBatches, on the device. Gradients are exchanged with the
            last.
        pairs: number of pairs in this step over all ranks and micro-batches.
        world_size: number of ranks.

    Returns:
        Three values. The first has this rank's sums of the values of `MatchingObjective.forward`,
        by name, and its number of `pairs`. The second is the norm of the gradient before clipping.
        The gradient was applied if this norm is finite. The third, (B,), is the loss of each of
        this rank's pairs. It stays on the device, and is not read.
    """
    # A gradient that is not finite must not change the running statistics of `norm: batch`.
    statistics = [b for b in objective.buffers() if b.is_floating_point()]
    saved_statistics = [b.clone() for b in statistics]
    for wait in _list_attempts(micro_batches[0].device):
        weight = world_size / pairs
        names, totals, losses = compute_clipped_gradient(
            objective, optimizer, scaler, micro_batches, weight, wait
        )
        grad_norm, *sums = totals.tolist()  # The only device-to-host synchronization of a step
        # The norm is taken after the exchange of gradients, so all ranks decide alike.
        if math.isfinite(grad_norm):
            optimizer.step()  # Method `scaler.step` would wait for the GPU once more
            scaler.update()
            break
        for statistic, saved in zip(statistics, saved_statistics):
            statistic.copy_(saved)
        scaler.update()
    pairs_here = sum(len(batch) for batch in micro_batches)
    return {**dict(zip(names, sums)), "pairs": float(pairs_here)}, grad_norm, losses


def _list_attempts(device: torch.device) -> Tuple[bool, ...]:
    """Return whether each attempt at a step waits. On a GPU only the second attempt does."""
    return (True,) if device.type == "cpu" else (False, True)


def compute_clipped_gradient(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    micro_batches: Sequence[PairBatch],
    weight: float,
    wait: bool,
) -> Tuple[List[str], Tensor, Tensor]:
    """Compute the gradient of the sum of all losses, times `weight`, and clip it.

    Args:
        objective: MatchingObjective, in DistributedDataParallel if there are several processes.
        optimizer: has the parameters, whose gradients are set.
        scaler: torch's GradScaler, enabled for float16 only.
        micro_batches: one or more PairBatches, on the device.
        weight: factor of the losses.
        wait: as in `MatchingObjective.forward`.

    Returns:
        Three values. The first has the names of the V values of a pair (`MatchingObjective`). The
        second is (1 + V,) float64: the norm of the gradient before clipping, and the sum of each
        value over all pairs. The third, (B,), is the loss of each pair.
    """
    optimizer.zero_grad()
    values = []  # The values of each micro-batch, by name
    no_sync = getattr(objective, "no_sync", contextlib.nullcontext)
    for position, batch in enumerate(micro_batches, 1):
        is_last = position == len(micro_batches)
        # Only the last micro-batch exchanges gradients between the ranks.
        with contextlib.nullcontext() if is_last else no_sync():
            total, pair_values = objective(batch, wait)
            scaler.scale(total.sum() * weight).backward()
        values.append(pair_values)
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
    # (V, B): one tensor for all micro-batches, so that the host reads the GPU once
    names = list(values[0])
    joined = torch.cat([pair_values[name] for name in names for pair_values in values]).view(
        len(names), -1
    )
    totals = torch.cat([norm.reshape(1), joined.sum(1)]).double()
    return names, totals, joined[names.index("loss")]


# --- one rank of a training


def train(
    args: argparse.Namespace, sections: Params, context: distributed.Context, stop: workers.Stop
) -> int:
    """Train to the last step, or until a signal asks to stop.

    Args:
        args: the command line.
        sections: the sections of params.yaml.
        context: this process among the ranks.
        stop: the request to stop, which a signal makes.

    Returns:
        The exit code: 0, or 143 after a signal.

    Raises:
        RequestError: If the request does not fit the data, a checkpoint or the other ranks, or if
            another training writes into a folder.
        WorkError: If memory does not suffice, if the training diverges, or if the ranks differ.
    """
    data = open_data(args, sections, context)
    fingerprint = fingerprint_training(sections, data, context.world_size)
    request = {
        **fingerprint,
        **sections.run.model_dump(),
        **provenance.compute_code_digests("train"),
    }
    checkpoint.check_ranks_agree(request, context.is_main)
    # One rank writes into each folder, and no other training does. Nodes may share a folder or not.
    seconds = distributed.START_SECONDS if checkpoint.is_restart() else 0
    out_lock = distributed.lock_folder(args.out, context, seconds)
    reports_lock = distributed.lock_folder(args.reports, context, seconds)
    with out_lock as is_writer, reports_lock as writes_reports:
        folder = checkpoint.find_folder(args, fingerprint)
        finished = None
        if not checkpoint.is_fresh(args):
            finished = distributed.run_on_main(
                lambda: checkpoint.find_finished_training(args, folder, fingerprint),
                context.is_main,
            )
        if finished:
            if context.is_main:
                publish_finished(args, folder, finished)
            return 0
        saved = checkpoint.load_start(args, folder, fingerprint, is_writer)
        if context.is_main and not saved:
            data.messages.append(checkpoint.find_related_training(args.out, fingerprint))
        training = Training(args, sections, context, stop, data, folder, is_writer, saved)
        return training.run(saved, writes_reports)


def print_validation(
    args: argparse.Namespace, sections: Params, context: distributed.Context
) -> int:
    """Print the metrics of the model `train.init_from`. Return the exit code, 0.

    Args:
        args: the command line.
        sections: the sections of params.yaml.
        context: this process among the ranks.

    Raises:
        RequestError: If the keypoints or the model do not fit.
    """
    train = sections.train
    data = open_data(args, sections, context)
    model = build.make_network(train, sections.run, context, data.store)
    _, _, messages = build.load_initial_weights(model, train.init_from)
    abilities = distributed.all_gather(detect_abilities(context.device))
    precision, reason = choose_precision(train.precision, abilities)
    objective, _, _ = build.build_objective_and_state(
        model, train, sections.run, context, precision
    )
    metrics = data.validation.compute_metrics(objective)
    if context.is_main:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        lines = [f"precision: {precision} ({reason})", *messages, *data.messages]
        print(*lines, f"{train.init_from}: {figures}", sep="\n")
    return 0


def publish_finished(args: argparse.Namespace, folder: Path, best: Info) -> None:
    """Publish the model, the curves and the metrics of a training that is finished, and say so.

    Args:
        args: the command line.
        folder: the folder of the training. It may be missing if `args.out` has the best model.
        best: the description of the best model.
    """
    if folder.is_dir():
        checkpoint.publish_best(folder, args.out)
    # The curves come from a checkpoint. Without one, `find_finished_training` has checked the files
    # of the curves.
    saved = checkpoint.load_newest(folder)
    if saved:
        log.write_curves(args.reports, log.unpack_curves(*saved), best["step"])
    log.write_metrics(args.reports, best)
    print(f"{folder}: trained with these parameters and data, to the last step: nothing to do")
    now = provenance.pin(provenance.COMPUTING)
    before = {name: value for name, value in best["versions"][-1].items() if name != "step"}
    for name in checkpoint.list_changed_keys(before, now):
        print(
            f"  trained with {name} {before.get(name)}, here {now.get(name)}: --fresh trains again"
        )
    tracking.attach(args.reports / tracking.RECORD, best["training"]).close()


class Training:
    """One rank of one training. It trains on the views of one store and validates on another.

    Args:
        args: the command line.
        sections: the sections of params.yaml.
        context: this process among the ranks.
        stop: the request to stop, which a signal makes.
        data: what the training reads.
        folder: where its checkpoints are.
        is_writer: whether this rank writes there.
        saved: the checkpoint that it starts from, or None.
    """

    logger: TrainingLogger  # Set by `run`, which also ends it

    def __init__(
        self,
        args: argparse.Namespace,
        sections: Params,
        context: distributed.Context,
        stop: workers.Stop,
        data: TrainingData,
        folder: Path,
        is_writer: bool,
        saved: Optional[Saved],
    ) -> None:
        # The request
        self.args = args
        self.sections = sections
        self.train = sections.train
        self.run_params = sections.run
        self.context = context
        self.stop = stop
        # What it reads, and which training it is
        self.data = data
        self.store = data.store
        self.validation = data.validation
        self.pairs = build.count_pairs_per_step(self.train, self.run_params, context.world_size)
        self.batches = StepBatches(self.train, self.run_params, self.store, self.pairs, context)
        self.fingerprint = fingerprint_training(sections, data, context.world_size)
        self.name = checkpoint.name_training(self.fingerprint)
        # Where it writes
        self.folder = folder
        self.is_writer = is_writer
        # What computes it. Devices may differ, and all ranks need one precision.
        abilities = distributed.all_gather(detect_abilities(context.device))
        self.precision, self.reason = choose_precision(self.train.precision, abilities)
        self.versions = provenance.pin(provenance.COMPUTING)
        self.code = provenance.compute_code_digests("train")
        computed_by = {
            "precision": self.precision,
            "processes": context.world_size,
            "code": compute_json_digest(self.code),
            **self.versions,
        }
        names = distributed.all_gather(get_device_name(context.device))
        self.same_devices = len(set(names)) == 1  # Then all ranks round alike
        self.history = [{"step": 0, **computed_by}]  # One more entry for each change on resume
        # The network with its initial weights, and what trains it
        model = build.make_network(self.train, self.run_params, context, self.store)
        messages: List[str] = []
        self.starts_as_initial_model = False  # Whether step 0 has the model of `init_from`
        self.initial_threshold: Optional[float] = None
        if self.train.init_from:
            initial = build.load_initial_weights(model, self.train.init_from)
            self.starts_as_initial_model, self.initial_threshold, messages = initial
        parts = build.build_objective_and_state(
            model, self.train, self.run_params, context, self.precision
        )
        self.objective, self.ddp_model, self.state = parts
        frozen = sorted(name for name, p in model.named_parameters() if not p.requires_grad)
        messages += [f"frozen: {', '.join(frozen)}"] if frozen else []
        if not self.same_devices:
            messages.append(
                f"unlike devices ({', '.join(dict.fromkeys(names))}): rank 0's weights replace"
                " those of the other ranks at each validation and checkpoint"
            )
        self.messages = [*messages, *data.messages]
        self.baseline = self.validation.compute_ratio_test_f1(self.objective)  # The F1 to beat
        if saved:
            self._restore(*saved)

    def run(self, saved: Optional[Saved], writes_reports: bool) -> int:
        """Train to the last step, or until a signal asks to stop.

        Args:
            saved: the checkpoint that the training starts from, or None.
            writes_reports: whether this rank writes into the folder of reports.

        Returns:
            The exit code: 0, or 143 after a signal.
        """
        reason = log.describe_precision(self.reason, self.history)
        lines = [f"precision: {self.precision} ({reason})", *filter(None, self.messages)]
        with TrainingLogger(
            self.args,
            self.sections,
            self.context,
            self.name,
            self.precision,
            self.pairs,
            saved,
            writes_reports,
        ) as self.logger:
            self.logger.log_start(self.state, self.train.steps, self.store, lines, self.baseline)
            with self.logger.bar:
                finished = self._loop()
            if not finished:
                self.logger.log_stop(self.state)
                return STOPPED
            best = self._save_and_publish_best(finished=True)
            self.logger.log_finish(best, self.train.init_from)
        return 0

    def _restore(self, tensors: Tensors, info: Info) -> None:
        """Restore the state of a checkpoint, and print what has changed since."""
        state = self.state
        state.restore(tensors, info)
        # In a training that continues another one, the average is over other steps.
        first = checkpoint.compute_first_averaged_step(self.fingerprint)
        state.begin_average(
            first,
            is_same_average=first == checkpoint.compute_first_averaged_step(info["fingerprint"]),
        )
        now = self.history[-1]
        before = info["history"][-1]
        changed = [key for key in checkpoint.list_changed_keys(before, now) if key != "step"]
        self.history = info["history"] + ([{**now, "step": state.step}] if changed else [])
        if self.context.is_main:
            print(f"resuming at step {state.step} of {self.train.steps}")
            for key in checkpoint.list_changed_keys(info["fingerprint"], self.fingerprint):
                values = info["fingerprint"].get(key), self.fingerprint.get(key)
                print(f"{key} changed on resume: {values[0]} -> {values[1]}")
            for key in changed:
                values = before.get(key), now.get(key)
                if key == "code":
                    files = ", ".join(checkpoint.list_changed_keys(info["code"], self.code))
                    print(f"code changed on resume: {files}")
                else:
                    print(f"{key} changed on resume: {values[0]} -> {values[1]}")
        # Metrics on other pairs cannot be compared, so the best model is validated again.
        if state.best_weights:
            if info["fingerprint"]["validation"] != self.validation.digest:
                metrics = self._compute_metrics_of(state.best_weights)
                state.best_metrics = {**metrics, "f1_ratio_test": self.baseline}
            # The published files may belong to another training.
            self._save_and_publish_best()

    # --- loop

    def _loop(self) -> bool:
        """Train to the last step.

        Returns:
            True when the last step is done. Returns False, with a saved checkpoint, when a signal
            stopped the training.
        """
        state = self.state
        train = self.train
        save_every = self.run_params.save_every or train.val_every
        start = state.step
        # A checkpoint may have the point of its step already.
        validated_step = max((row["step"] for row in self.logger.curves.get("val", [])), default=-1)
        with contextlib.closing(self.batches.prefetch(range(start, train.steps))) as loader:
            while True:
                is_last = state.step == train.steps
                stops = distributed.is_true_on_any_rank(self.stop.requested)
                # The curve begins at the initial weights.
                validates = is_last or state.step % train.val_every == 0
                validates &= state.step > validated_step
                saves = is_last or stops or (state.step % save_every == 0 and state.step > start)
                if validates or saves:
                    checkpoint.align_and_check_replicas(
                        state, self.context.is_main, self.same_devices
                    )
                # The validation comes first, so that the checkpoint has its F1.
                if validates:
                    self._validate_and_keep_best()
                    validated_step = state.step
                if saves:
                    self._save_checkpoint()
                if is_last or stops:
                    return is_last
                waiting = time.perf_counter()
                micro_batches = next(loader)
                self._step(micro_batches, time.perf_counter() - waiting)

    # --- step

    def _step(self, micro_batches: List[PairBatch], waited: float) -> None:
        """Do one step of the optimizer, for whose batches the loop waited `waited` seconds."""
        state = self.state
        train = self.train
        world_size = self.context.world_size
        lr = compute_learning_rate(train, self.run_params, state.step, world_size)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        try:
            sums, grad_norm, losses = train_step(
                self.ddp_model, state.optimizer, state.scaler, micro_batches, self.pairs, world_size
            )
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            accumulate = 2 * self.run_params.accumulate
            fix = f"set run.accumulate: {accumulate} (the same steps, in smaller parts)"
            raise WorkError(f"out of memory at step {state.step}: {fix}") from error
        if not math.isfinite(grad_norm):
            self._count_skipped_step(losses)
        state.step += 1
        if state.step > train.steps - train.average:
            state.add_to_average()
        self.logger.add_step(sums, waited)

        if state.step % self.run_params.log_every == 0 or state.step == train.steps:
            metrics = {
                "lr": lr,
                "grad_norm": grad_norm,
                "dustbin": float(state.model.dustbin.detach()),
                "skipped_steps": float(state.skipped),
            }
            self.logger.log_point(state.step, metrics)

    def _count_skipped_step(self, losses: Tensor) -> None:
        """Count and report a step whose gradient is not finite. All ranks call this together.

        `losses` (B,) has the loss of each of this rank's pairs. Raises WorkError after more than
        MAX_SKIPPED such steps.
        """
        state = self.state
        step_pairs = [sample for part in self.batches.draw_samples(state.step) for sample in part]
        is_finite = torch.isfinite(losses).tolist()
        rank_names = [
            self._name_pair(sample) for sample, is_good in zip(step_pairs, is_finite) if not is_good
        ]
        names = [name for names in distributed.all_gather(rank_names) for name in names]
        # With float16, the scaler searches for the largest scale that does not overflow. This is no
        # sign of divergence, and does not count.
        state.skipped += bool(names) or not state.scaler.is_enabled()
        if self.context.is_main:
            unnamed = len(names) - NAMED_PAIRS
            pairs = ", ".join(names[:NAMED_PAIRS]) + (f" and {unnamed} more" if unnamed > 0 else "")
            reason = f"the loss of {pairs} is not, either" if names else "each loss is finite"
            print(f"step {state.step}: the gradient is not finite, skipped; {reason}")
        if state.skipped > MAX_SKIPPED:
            raise WorkError(
                f"step {state.step}: {state.skipped} steps had a gradient that was not finite, more"
                f" than {MAX_SKIPPED}; lower train.lr, or look at the pairs named above"
            )

    def _name_pair(self, sample: Sample) -> str:
        """Return the images and views of a pair, such as "a.jpg views 0 and 2"."""
        images = self.store.images
        second = choose_second_image(
            self.train.augmentation, sample.image, len(images), sample.seed
        )
        if second == sample.image:
            return f"{images[second]} views {sample.view0} and {sample.view1}"
        return (
            f"{images[sample.image]} view {sample.view0} and {images[second]} view {sample.view1}"
        )

    # --- validate

    def _validate_and_keep_best(self) -> None:
        """Validate the weights that would be shipped. If they are the best, save and publish them.

        These are the mean of the weights of the last `train.average` steps, if there is one yet,
        and otherwise the current weights. The initial weights of `init_from` may stay the best if
        all of them were taken. A network that is partly or fully untrained may not be the best.
        """
        state = self.state
        metrics = {**self._compute_metrics_of(state.average), "f1_ratio_test": self.baseline}
        untrained = state.step == 0 and not self.starts_as_initial_model
        self.logger.log_validation(state, metrics, untrained)
        if not untrained and state.keep_if_best(metrics):
            self._save_and_publish_best()
        self.logger.write_curves(state.best_step)

    def _compute_metrics_of(self, weights: Tensors) -> Metrics:
        """Return the metrics of the model with `weights` in place of its current weights.

        Parameters that `weights` lacks keep their values. The model is restored afterwards.
        """
        model = self.state.model
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({**before, **weights})
        metrics = self.validation.compute_metrics(self.objective)
        model.load_state_dict(before)
        return metrics

    # --- save

    def _save_checkpoint(self) -> None:
        """Write a checkpoint. All ranks call this together."""
        # The next point of the curves may have begun, so its sums are saved, too.
        window = distributed.sum_over_ranks(self.logger.sums)
        if self.is_writer:
            columns, curves = log.pack_curves(self.logger.curves)
            info = {
                **self.state.collect_info(),
                "code": self.code,
                "columns": columns,
                "fingerprint": self.fingerprint,
                "history": self.history,
                "log_window": window,
                "training": self.name,
            }
            tensors = {**self.state.collect_tensors(), **curves}
            checkpoint.save(self.folder, self.state.step, tensors, info)
        distributed.barrier()

    def _save_and_publish_best(self, finished: bool = False) -> Info:
        """Save and publish the best model so far, and return its description."""
        state = self.state
        # Few photographs cannot choose a threshold.
        threshold = state.best_metrics["threshold"]
        photographs = {sample.image for sample in self.validation.samples}
        if len(photographs) < MIN_IMAGES and self.initial_threshold is not None:
            threshold = self.initial_threshold
        # Describe only what is the same in every run, so that the file has the same bytes.
        decided = {"data", "initial_weights", "world_size"}
        info = {
            "model": state.model.config.to_dict(),
            "step": state.best_step,
            "precision": self.precision,
            "validation": state.best_metrics,
            "match_threshold": threshold,
            "skipped_steps": state.skipped,
            "finished": finished,
            "training": self.name,
            "versions": checkpoint.list_package_versions(self.history),
            "train": checkpoint.describe_parameters(self.train),
            provenance.PHOTOGRAPHS_KEY: provenance.compute_photographs_digest(
                self.data.photographs or ()
            ),
            **{k: v for k, v in self.fingerprint.items() if k in decided},
        }
        if self.is_writer:
            curves = log.hash_curve_files(self.args.reports) if finished else {}
            origin = {"code": self.code, "curves": curves}
            checkpoint.save_and_publish_best(
                self.folder, self.args.out, state.best_weights, info, self.data.photographs, origin
            )
        return info
