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
from pipeline.train import checkpoint, log
from pipeline.train.augmentation import Augmentation
from pipeline.train.build import (
    build_objective_and_state,
    count_pairs_per_step,
    load_initial_weights,
    make_network,
    read_initial_model,
)
from pipeline.train.checkpoint import Info, Metrics, Saved, Tensors, TrainState
from pipeline.train.data import Sample, StepBatches
from pipeline.train.log import TrainingLogger
from pipeline.train.loss import Validation, choose_validation_pairs
from pipeline.train.optimizer import choose_precision, compute_learning_rate, detect_abilities
from superglue_sift.files import compute_json_digest
from superglue_sift.network.batch import PairBatch

CLIP_NORM = 1.0  # largest norm of the gradient, so that no single batch moves the weights far
MAX_SKIPPED = 20  # more steps without a finite gradient mean that the training diverges
# Fewest photographs to choose a threshold from. With fewer it is noise, and the threshold of the
# initial weights is kept.
MIN_IMAGES = 16
# Largest relative difference between the weights of ranks on unlike devices
DRIFT = 0.01
NAMED_PAIRS = 8  # largest number of pairs that the line about a skipped step names


# --- open the data, and check a request


class TrainingData(NamedTuple):
    """What a training reads."""

    store: KeypointStore
    validation: Validation
    # The photographs of this training and of its initial weights, or None if they are not known.
    photographs: Optional[FrozenSet[str]]
    messages: List[str]  # lines to print


def open_data(
    args: argparse.Namespace, sections: Params, context: distributed.Context
) -> TrainingData:
    """Open the stores of keypoints, and choose the validation pairs.

    `args` is the command line. Raises RequestError if the keypoints or the initial weights do not
    fit, or if no validation pair is left.
    """
    train = sections.train
    how = "all" if args.verify else "sample"
    store, held_out = (KeypointStore(args.keypoints / split, how) for split in ("train", "val"))
    check_keypoints(train, store)
    # Validate on photographs that the initial weights were not trained on.
    initial = Path(train.init_from) if train.init_from else None
    if initial:
        read_initial_model(initial)
    samples, messages = choose_validation_pairs(
        train, held_out, sections.run.allow_training_images, initial
    )
    validation = Validation(
        held_out, samples, train.max_keypoints, context, Augmentation.from_parameters(train)
    )
    # Join the photographs of this training and of the initial weights, if both are known.
    names = frozenset(store.photographs) - {""}
    before = provenance.read_photographs(initial) if initial else frozenset()
    photographs = names | before if names and before is not None else None
    return TrainingData(store, validation, photographs, messages)


def check_keypoints(train: TrainParams, store: KeypointStore) -> None:
    """Raise RequestError if the keypoints of `store` lack what the training needs."""
    keys = [name for name in ("neighbours", "rotation_deg", "zoom") if getattr(train, name)]
    if keys and not store.scale_angle:
        raise RequestError(
            f"train.{keys[0]} = {getattr(train, keys[0])}: {store.extractor} gives neither scale"
            " nor angle; set neighbours: false, rotation_deg: 0 and zoom: 0"
        )


def check_request(args: argparse.Namespace, sections: Params, world_size: int) -> None:
    """Check a request before any process starts, without building a training.

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
    """Return what tells this training from another, see `checkpoint.make_fingerprint`."""
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
        scaler: torch's GradScaler, enabled for float16 only.
        micro_batches: one or more PairBatches, on the device. Gradients are exchanged with the
            last.
        pairs: number of pairs in this step over all ranks and micro-batches.

    Returns:
        This rank's sums by name (see MatchingObjective), with its number of `pairs`. Then the norm
        of the gradient before clipping. The gradient was applied if this norm is finite. Then the
        loss of each of this rank's pairs, (B,), which is on the device and not read.
    """
    # The running statistics of `norm: batch`. A gradient that is not finite must not change them.
    statistics = [b for b in objective.buffers() if b.is_floating_point()]
    before = [b.clone() for b in statistics]
    for wait in _list_attempts(micro_batches[0].device):
        weight = world_size / pairs
        names, totals, losses = compute_clipped_gradient(
            objective, optimizer, scaler, micro_batches, weight, wait
        )
        grad_norm, *sums = totals.tolist()  # the only device-to-host synchronization of a step
        # The norm is taken after the exchange of gradients, so all ranks decide alike.
        if math.isfinite(grad_norm):
            optimizer.step()  # `scaler.step` would wait for the GPU once more
            scaler.update()
            break
        for statistic, old in zip(statistics, before):
            statistic.copy_(old)
        scaler.update()
    pairs_here = sum(len(batch) for batch in micro_batches)
    return {**dict(zip(names, sums)), "pairs": float(pairs_here)}, grad_norm, losses


def _list_attempts(device: torch.device) -> Tuple[bool, ...]:
    """Return `wait` of each attempt. A GPU waits only if the first gradient is not finite."""
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

    Returns:
        The names of the V values of a pair (see MatchingObjective). Then a tensor (1 + V,) float64:
        the norm of the gradient before clipping, and the sum of each value over all pairs. Then the
        loss of each pair, (B,).
    """
    optimizer.zero_grad()
    values = []  # the values of each micro-batch, by name
    no_sync = getattr(objective, "no_sync", contextlib.nullcontext)
    for number, batch in enumerate(micro_batches, 1):
        last = number == len(micro_batches)
        # Only the last micro-batch exchanges gradients between the ranks.
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
    totals = torch.cat([norm.reshape(1), joined.sum(1)]).double()
    return names, totals, joined[names.index("loss")]


def get_device_name(device: torch.device) -> str:
    """Return the model of a GPU or of the processor, on which rounding depends."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return provenance.read_processor()


def align_and_check_replicas(state: TrainState, is_main: bool, alike: bool = True) -> None:
    """Check that all ranks have the same weights and the same state of the optimizer, to the bit.

    All ranks call this together, before anything of a step is saved. If they differ, raises
    WorkError on rank 0, which names the ranks, and SystemExit on the other ranks.

    If the devices of the ranks are not `alike`, they round differently. Then rank 0's values
    replace those of the other ranks, and only a difference above DRIFT is an error.
    """
    far = False
    if not alike:
        far = distributed.copy_from_main(state.model.state_dict()) > DRIFT
        distributed.copy_from_main(state.collect_changing_tensors())
    digests = state.compute_digests()
    if far:
        digests["weights"] = "far from those of rank 0"
    ranks = distributed.all_gather(digests)
    for part in ranks[0]:
        digests = [digests[part] for digests in ranks]
        # Where two ranks disagree, rank 0's digest counts as the common one.
        common = max(digests, key=digests.count)
        others = [str(rank) for rank, digest in enumerate(digests) if digest != common]
        if others and not is_main:
            raise SystemExit(1)
        if others:
            several = len(others) > 1
            who = f"ranks {' and '.join(others)}" if several else f"rank {others[0]}"
            raise WorkError(
                f"step {state.step}: {who} of {len(ranks)} {'have' if several else 'has'} other"
                f" {part} than most ranks, so nothing of this step is saved; the same command"
                " resumes from the newest checkpoint"
            )


# --- one rank of a training


def train(
    args: argparse.Namespace, sections: Params, context: distributed.Context, stop: workers.Stop
) -> int:
    """Train to the last step, or until a signal asks to stop.

    Args:
        args: the command line.
        sections: the sections of params.yaml.

    Returns:
        0, or 143 after a signal.

    Raises:
        RequestError: the request does not fit the data, a checkpoint or the other ranks, or another
            training writes in a folder.
        WorkError: memory does not suffice, the training diverges, or the ranks have come apart.
    """
    data = open_data(args, sections, context)
    identity = fingerprint_training(sections, data, context.world_size)
    # All ranks must have the same request, and the same code.
    request = {**identity, **sections.run.model_dump(), **provenance.compute_code_digests("train")}
    checkpoint.check_ranks_agree(request, context.is_main)
    # One rank writes in each folder, and no other training does. Nodes may share a folder or not.
    seconds = distributed.START_SECONDS if checkpoint.is_restart() else 0
    out = distributed.lock_folder(args.out, context, seconds)
    reports = distributed.lock_folder(args.reports, context, seconds)
    with out as writes, reports as reports_here:
        folder = checkpoint.find_folder(args, identity)
        finished = None
        if not checkpoint.is_fresh(args):
            finished = distributed.run_on_main(
                lambda: checkpoint.find_finished_training(args, folder, identity), context.is_main
            )
        if finished:
            if context.is_main:
                publish_finished(args, folder, finished)
            return 0
        saved = checkpoint.load_start(args, folder, identity, writes)
        if context.is_main and not saved:
            data.messages.append(checkpoint.find_related_training(args.out, identity))
        training = Training(args, sections, context, stop, data, folder, writes, saved)
        return training.run(saved, reports_here)


def print_validation(
    args: argparse.Namespace, sections: Params, context: distributed.Context
) -> int:
    """Print the metrics of the model `train.init_from`. Return 0."""
    train = sections.train
    data = open_data(args, sections, context)
    model = make_network(train, sections.run, context, data.store)
    _, _, messages = load_initial_weights(model, train.init_from)
    abilities = distributed.all_gather(detect_abilities(context.device))
    precision, reason = choose_precision(train.precision, abilities)
    objective, _, _ = build_objective_and_state(model, train, sections.run, context, precision)
    metrics = data.validation.compute_metrics(objective)
    if context.is_main:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        lines = [f"precision: {precision} ({reason})", *messages, *data.messages]
        print(*lines, f"{train.init_from}: {figures}", sep="\n")
    return 0


def publish_finished(args: argparse.Namespace, folder: Path, best: Info) -> None:
    """Publish a training that is finished already, and say so.

    `best` is the description of its best model. `folder` may be missing if `args.out` has that
    model.
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
    tracking.attach(args.reports / "log.jsonl", best["training"]).close()


class Training:
    """One rank of one training. It trains on the views of one store and validates on another.

    Args:
        folder: where its checkpoints are.
        writes: whether this rank writes there.
        saved: the checkpoint that it starts from, or None.
    """

    logger: TrainingLogger  # set by `run`, which also ends it

    def __init__(
        self,
        args: argparse.Namespace,
        sections: Params,
        context: distributed.Context,
        stop: workers.Stop,
        data: TrainingData,
        folder: Path,
        writes: bool,
        saved: Optional[Saved],
    ) -> None:
        # What is asked for
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
        self.pairs = count_pairs_per_step(self.train, self.run_params, context.world_size)
        self.batches = StepBatches(self.train, self.run_params, self.store, self.pairs, context)
        self.identity = fingerprint_training(sections, data, context.world_size)
        self.name = checkpoint.name_training(self.identity)
        # Where it writes
        self.folder = folder
        self.writes = writes
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
        self.alike = len(set(names)) == 1  # whether all ranks round alike
        self.history = [{"step": 0, **computed_by}]  # an entry for each change of these
        # The network with its initial weights, and what trains it
        model = make_network(self.train, self.run_params, context, self.store)
        messages: List[str] = []
        self.begins_whole = False  # whether step 0 has the model of `init_from`
        self.initial_threshold: Optional[float] = None
        if self.train.init_from:
            initial = load_initial_weights(model, self.train.init_from)
            self.begins_whole, self.initial_threshold, messages = initial
        parts = build_objective_and_state(
            model, self.train, self.run_params, context, self.precision
        )
        self.objective, self.ddp_model, self.state = parts
        frozen = sorted(name for name, p in model.named_parameters() if not p.requires_grad)
        messages += [f"frozen: {', '.join(frozen)}"] if frozen else []
        if not self.alike:
            messages.append(
                f"unlike devices ({', '.join(dict.fromkeys(names))}): rank 0's weights replace"
                " those of the other ranks at each validation and checkpoint"
            )
        self.messages = [*messages, *data.messages]
        self.baseline = self.validation.compute_ratio_test_f1(self.objective)  # the F1 to beat
        if saved:
            self._restore(*saved)

    def run(self, saved: Optional[Saved], writes_reports: bool) -> int:
        """Train to the last step, or until a signal asks to stop. Return 0, or 143."""
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
            # The last step is done.
            best = self._save_and_publish_best(finished=True)
            self.logger.log_finish(best, self.train.init_from)
        return 0

    def _restore(self, tensors: Tensors, info: Info) -> None:
        """Go on from a checkpoint, and print what has changed since."""
        state = self.state
        state.restore(tensors, info)
        # The average of a training that is continued is over other steps.
        first = checkpoint.compute_first_averaged_step(self.identity)
        state.begin_average(
            first, same=first == checkpoint.compute_first_averaged_step(info["fingerprint"])
        )
        now = self.history[-1]
        before = info["history"][-1]
        changed = [key for key in checkpoint.list_changed_keys(before, now) if key != "step"]
        self.history = info["history"] + ([{**now, "step": state.step}] if changed else [])
        if self.context.is_main:
            print(f"resuming at step {state.step} of {self.train.steps}")
            for key in checkpoint.list_changed_keys(info["fingerprint"], self.identity):
                values = info["fingerprint"].get(key), self.identity.get(key)
                print(f"{key} changed on resume: {values[0]} -> {values[1]}")
            for key in changed:
                values = before.get(key), now.get(key)
                if key == "code":
                    files = ", ".join(checkpoint.list_changed_keys(info["code"], self.code))
                    print(f"code changed on resume: {files}")
                else:
                    print(f"{key} changed on resume: {values[0]} -> {values[1]}")
        # Validate the best model again if its metrics are from other pairs.
        if state.best_weights:
            if info["fingerprint"]["validation"] != self.validation.digest:
                metrics = self._compute_metrics_of(state.best_weights)
                state.best_metrics = {**metrics, "f1_ratio_test": self.baseline}
            # The published file may belong to another training.
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
        steps = range(state.step, train.steps)
        with contextlib.closing(self.batches.prefetch(steps)) as loader:
            if state.step == 0:  # the curve begins at the initial weights
                align_and_check_replicas(state, self.context.is_main, self.alike)
                self._validate_and_keep_best()
            waiting = time.perf_counter()
            for micro_batches in loader:
                self._step(micro_batches, time.perf_counter() - waiting)
                last = state.step == train.steps
                stop = distributed.is_true_on_any_rank(self.stop.requested)
                validates = last or state.step % train.val_every == 0
                saves = last or stop or state.step % save_every == 0
                if validates or saves:
                    align_and_check_replicas(state, self.context.is_main, self.alike)

                # Validate before a checkpoint is saved, so that the checkpoint has the best F1.
                if validates:
                    self._validate_and_keep_best()

                # Once in a while, and before a stop: save a checkpoint.
                if saves:
                    self._save_checkpoint()
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
            more = 2 * self.run_params.accumulate
            fix = f"set run.accumulate: {more} (the same steps, in smaller parts)"
            raise WorkError(f"out of memory at step {state.step}: {fix}") from error
        if not math.isfinite(grad_norm):
            self._count_skipped_step(losses)
        state.step += 1
        if state.step > train.steps - train.average:
            state.add_to_average()
        self.logger.add_step(sums, waited)

        # Once in a while: add a point to the curves, the mean over all ranks.
        if state.step % self.run_params.log_every == 0 or state.step == train.steps:
            metrics = {
                "lr": lr,
                "grad_norm": grad_norm,
                "dustbin": float(state.model.dustbin.detach()),
                "skipped_steps": float(state.skipped),
            }
            self.logger.log_point(state.step, metrics)

    def _count_skipped_step(self, losses: Tensor) -> None:
        """Report that the gradient of a step is not finite. All ranks call this together.

        `losses` has the loss of each of this rank's pairs. Raises WorkError after more than
        MAX_SKIPPED such steps.
        """
        state = self.state
        step_pairs = [sample for part in self.batches.draw_samples(state.step) for sample in part]
        finite = torch.isfinite(losses).tolist()
        names_here = [
            self._name_pair(sample) for sample, good in zip(step_pairs, finite) if not good
        ]
        names = [name for names in distributed.all_gather(names_here) for name in names]
        # float16: the scaler searches for the largest scale that does not overflow.
        state.skipped += bool(names) or not state.scaler.is_enabled()
        if self.context.is_main:
            more = len(names) - NAMED_PAIRS
            pairs = ", ".join(names[:NAMED_PAIRS]) + (f" and {more} more" if more > 0 else "")
            reason = f"the loss of {pairs} is not, either" if names else "each loss is finite"
            print(f"step {state.step}: the gradient is not finite, skipped; {reason}")
        if state.skipped > MAX_SKIPPED:
            raise WorkError(
                f"step {state.step}: {state.skipped} steps had a gradient that was not finite, more"
                f" than {MAX_SKIPPED}; lower train.lr, or look at the pairs named above"
            )

    def _name_pair(self, sample: Sample) -> str:
        """Return the images and views of a pair: "a.jpg views 0 and 2"."""
        images = self.store.images
        augmentation = Augmentation.from_parameters(self.train)
        second = augmentation.choose_second_image(sample.image, len(images), sample.seed)
        if second == sample.image:
            return f"{images[second]} views {sample.view0} and {sample.view1}"
        return (
            f"{images[sample.image]} view {sample.view0} and {images[second]} view {sample.view1}"
        )

    # --- validate

    def _validate_and_keep_best(self) -> None:
        """Validate the weights that would be shipped, and keep them if they are the best.

        These are the mean of the weights of the last `train.average` steps, if that mean exists
        already, and otherwise the current weights. The initial weights of `init_from` may stay the
        best if all were taken. A network that is untrained, or in part, may not.
        """
        state = self.state
        metrics = {**self._compute_metrics_of(state.average), "f1_ratio_test": self.baseline}
        untrained = state.step == 0 and not self.begins_whole
        self.logger.log_validation(state, metrics, untrained)
        if not untrained and state.keep_if_best(metrics):
            self._save_and_publish_best()
        self.logger.write_curves(state.best_step)

    def _compute_metrics_of(self, weights: Tensors) -> Metrics:
        """Return the metrics of the model with `weights` in place of its own.

        Names that `weights` lacks keep the model's own values. The model is restored afterwards.
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
        # Sum the next point of the curves over all ranks. Then one rank in each folder writes.
        window = distributed.sum_over_ranks(self.logger.sums)
        if self.writes:
            columns, curves = log.pack_curves(self.logger.curves)
            info = {
                **self.state.collect_info(),
                "code": self.code,
                "columns": columns,
                "fingerprint": self.identity,
                "history": self.history,
                "log_window": window,
                "training": self.name,
            }
            tensors = {**self.state.collect_tensors(), **curves}
            checkpoint.save(self.folder, self.state.step, tensors, info)
        distributed.barrier()

    def _save_and_publish_best(self, finished: bool = False) -> Info:
        """Write the best model so far and its description, publish them, and return the latter."""
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
            **{k: v for k, v in self.identity.items() if k in decided},
        }
        if self.writes:
            curves = log.hash_curve_files(self.args.reports) if finished else {}
            origin = {"code": self.code, "curves": curves}
            checkpoint.save_and_publish_best(
                self.folder, self.args.out, state.best_weights, info, self.data.photographs, origin
            )
        return info
