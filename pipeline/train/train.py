"""Train SuperGlue on one rank. `train` is the whole story, from the data to the published model."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import FrozenSet, List, NamedTuple, Optional, Tuple

import torch

from pipeline import distributed, provenance, tracking, workers
from pipeline.errors import STOPPED, RequestError, WorkError
from pipeline.keypoints.store import KeypointStore
from pipeline.params import Params, name_data
from pipeline.train import build, checkpoint, log
from pipeline.train.checkpoint import BEST, Info, Metrics
from pipeline.train.data import StepBatches
from pipeline.train.log import TrainingLog
from pipeline.train.loss import MatchingObjective, Validation, choose_validation_pairs
from pipeline.train.optimizer import choose_precision, compute_learning_rate, detect_abilities
from pipeline.train.step import train_step
from superglue_sift.network.weights import ModelFile, Tensors
from superglue_sift.progress import Progress

MAX_SKIPPED = 20  # More steps without a finite gradient mean that the training diverges
# Smallest number of photographs to choose a threshold from. With fewer, noise would choose it. A
# training that began as exactly the model of `init_from` then keeps the threshold of that model.
MIN_IMAGES = 16
# What decides the weights beside the parameters, and is published with them
PUBLISHED = ("data", "initial_weights", "world_size")


class Folders(NamedTuple):
    """The folders of a training.

    Attributes:
        keypoints: the stores of keypoints, which the stage `keypoints` wrote.
        out: the checkpoints of all trainings, and the best model of the last one.
        reports: metrics and curves.
    """

    keypoints: Path
    out: Path
    reports: Path


def train(  # noqa: C901, a story that is told in one piece
    params: Params,
    folders: Folders,
    stop: workers.Stop,
    fresh: bool = False,
    continued: Optional[Path] = None,
    verify: str = "sample",
    preset: str = "",
) -> int:
    """Train to the last step, or until a signal asks to stop. Every rank calls this.

    Args:
        params: all parameters.
        folders: what is read and written.
        stop: the request to stop, which a signal makes.
        fresh: whether to begin again although there is a training with these parameters and data.
        continued: the folder of a training to begin from, with another schedule, or None. It counts
            only until this training has a checkpoint of its own.
        verify: "all" to check every shard of the keypoints, or "sample".
        preset: the name of the preset, for the name of the run in MLflow.

    Returns:
        The exit code: 0 at the last step, or 143 if a signal stopped the training before.

    Raises:
        RequestError: If the request does not fit the data, a checkpoint or the other ranks, or if
            another training writes into the folder.
        WorkError: If the training diverges, if the ranks differ, or if one is lost.
    """
    options, run = params.train, params.run
    with distributed.process_group() as context, contextlib.ExitStack() as stack:
        # --- the data, and which training it is
        data = open_data(params, folders.keypoints, verify, context)
        store, validation, photographs, data_messages = data
        fingerprint = checkpoint.make_fingerprint(
            params, store.digest, validation.digest, context.world_size
        )
        training_name = checkpoint.name_training(fingerprint)
        code = provenance.compute_code_digest("train")
        checkpoint.check_ranks_agree({**fingerprint, **run.model_dump(), "code": code}, context)

        # --- where it starts
        # After a fault, the processes from before may hold the lock for some seconds.
        patience = distributed.START_SECONDS if checkpoint.is_restart() else 0
        stack.enter_context(distributed.lock_folder(folders.out, context, patience))
        folder, saved, can_publish = checkpoint.find_start(
            folders.out, training_name, code, fresh, context
        )
        if can_publish:
            if context.is_main:
                publish_finished(folder, folders, training_name)
            return 0
        if saved is None and continued:
            saved = checkpoint.load_to_continue(continued, fingerprint)
        if context.is_first_of_node:
            # A restart after a fault finds this folder, and does not begin again with --fresh.
            folder.mkdir(parents=True, exist_ok=True)
            if saved and not checkpoint.get_path(folder, saved.info["step"]).is_file():
                # The checkpoint is of another training or node, and a node resumes from its own.
                checkpoint.save(folder, saved.info["step"], *saved)

        # --- the network, its initial weights, and what trains it
        # Devices may differ, and all ranks need one precision.
        abilities = distributed.gather_objects(detect_abilities(context.device))
        precision, reason = choose_precision(options.precision, abilities)
        model = build.make_network(options, run, context, store)
        messages: List[str] = []
        starts_as_initial_model = False  # Whether step 0 has the model of `init_from`
        initial_threshold: Optional[float] = None
        if options.init_from:
            initial = build.load_initial_weights(model, options.init_from)
            starts_as_initial_model, initial_threshold, messages = initial
        objective, ddp_objective, state = build.build_objective_and_state(
            model, options, run, context, precision
        )
        # `build_objective_and_state` froze the parameters of `train.freeze`.
        frozen = sorted(n for n, p in model.named_parameters() if not p.requires_grad)
        messages += [f"frozen: {', '.join(frozen)}"] if frozen else []
        baseline = validation.compute_ratio_test_f1(objective)  # The F1 to beat

        # --- resume
        computed_by = {
            "precision": precision,
            "processes": context.world_size,
            "code": code,
            **provenance.get_release_versions(provenance.COMPUTING),
        }
        history = [{"step": 0, **computed_by}]
        if saved:
            history, changes = resume(state, saved, fingerprint, computed_by)
            if context.is_main:
                print(f"resuming at step {state.step} of {options.steps}", *changes, sep="\n")
            # Metrics on other pairs cannot be compared.
            if state.best_weights and saved.info["fingerprint"]["validation"] != validation.digest:
                metrics = compute_metrics_of(state.best_weights, objective, validation)
                state.best_metrics = {**metrics, "f1_ratio_test": baseline}

        def publish(finished: bool = False) -> Info:
            """Save and publish the best weights so far, and return their description."""
            # Equal runs write the same bytes, so there is no time, host or path in it.
            threshold = state.best_metrics["threshold"]
            images = {sample.image for sample in validation.samples}
            if len(images) < MIN_IMAGES and initial_threshold is not None:
                threshold = initial_threshold
            info = {
                "model": model.config.to_dict(),
                "step": state.best_step,
                "precision": precision,
                "validation": state.best_metrics,
                "match_threshold": threshold,
                "skipped_steps": state.skipped,
                "finished": finished,
                "training": training_name,
                "versions": checkpoint.list_package_versions(history),
                "train": checkpoint.describe_parameters(options),
                provenance.PHOTOGRAPHS_KEY: provenance.compute_photographs_digest(
                    photographs or ()
                ),
                **{key: value for key, value in fingerprint.items() if key in PUBLISHED},
            }
            if context.is_first_of_node:
                checkpoint.save_best(folder, state.best_weights, info, photographs)
                checkpoint.publish_best(folder, folders.out)
            return info

        # --- the reports
        pairs_per_step = build.count_pairs_per_step(options, run, context.world_size)
        device = context.device.type
        mlflow_run = stack.enter_context(
            tracking.open_run(
                folders.reports,
                {**params.model_dump(), "world_size": context.world_size},
                tags={
                    "device": device,
                    "training": training_name,
                    "preset": preset,
                    "precision": precision,
                    "data": store.digest,
                },
                resume=state.step > 0,
                enabled=context.is_main,  # Only rank 0 has a run in MLflow
                training=training_name,
                name=" ".join(filter(None, dict.fromkeys((preset, name_data(params.fetch))))),
            )
        )
        if context.is_main:
            weights = sum(p.numel() for p in model.parameters())
            print(
                f"training {weights / 1e6:.2f} M weights on {len(store)} images of"
                f" {store.views_per_image} views, {pairs_per_step} pairs a step,"
                f" {context.world_size} process(es) on {device}"
            )
            described = log.describe_precision(reason, history)
            print(f"precision: {precision} ({described})", *messages, *data_messages, sep="\n")
        elif context.is_first_of_node:
            print(
                f"rank {context.rank} of {context.world_size} trains from step {state.step} of"
                f" {options.steps}; rank 0 prints the progress",
                flush=True,
            )
        bar = stack.enter_context(
            Progress(
                total=options.steps,
                initial=state.step,
                desc="train",
                unit="step",
                disable=not context.is_main,
            )
        )
        reports = TrainingLog(
            folders.reports, mlflow_run, bar, context, pairs_per_step, baseline, saved
        )
        # The published files may belong to another training.
        if state.best_weights:
            publish()
        if saved:
            reports.write_curves(state.best_step)

        # --- the loop: validate, save, step
        start_step = state.step
        save_every = run.save_every or options.val_every
        batches = StepBatches(options, run, store, pairs_per_step, context)
        loader = stack.enter_context(
            contextlib.closing(batches.prefetch(range(start_step, options.steps)))
        )
        while True:
            is_last = state.step == options.steps
            stops = distributed.is_true_on_any_rank(stop.requested)
            # Step 0 is validated, too. A checkpoint may have the point of its step already.
            validates = is_last or state.step % options.val_every == 0
            validates = validates and state.step > reports.get_validated_step()
            is_due = state.step > start_step and state.step % save_every == 0
            saves = is_last or stops or is_due
            if validates or saves:
                checkpoint.check_replicas(state, context)

            # Validate the weights that would be shipped: the mean of the last `train.average`
            # steps, or the current weights as long as `state.average` is empty. Step 0 can be the
            # best only if it has exactly the model of `init_from`.
            if validates:
                metrics = compute_metrics_of(state.average, objective, validation)
                metrics = {**metrics, "f1_ratio_test": baseline}
                is_untrained = state.step == 0 and not starts_as_initial_model
                # This line compares with the best so far, so it comes before `keep_if_best`.
                reports.log_validation(state, metrics, is_untrained)
                if not is_untrained and state.keep_if_best(metrics):
                    publish()
                reports.write_curves(state.best_step)

            # After the validation, so that the checkpoint has its point and the best weights. The
            # sums of steps that have no point yet are in it, too.
            if saves:
                unlogged_sums = distributed.sum_over_ranks(reports.sums)
                if context.is_first_of_node:
                    columns, curves = log.pack_curves(reports.curves)
                    info = {
                        **state.collect_info(),
                        "columns": columns,
                        "fingerprint": fingerprint,
                        "history": history,
                        "unlogged_sums": unlogged_sums,
                    }
                    checkpoint.save(folder, state.step, {**state.collect_tensors(), **curves}, info)
                # torchrun ends all ranks when one was stopped, so each waits for those that write.
                distributed.barrier()
            if is_last or stops:
                break

            # Step along the gradient of all pairs.
            began = time.perf_counter()
            micro_batches = next(loader)
            waited = time.perf_counter() - began
            lr = compute_learning_rate(options, run, state.step, context.world_size)
            for group in state.optimizer.param_groups:
                group["lr"] = lr
            sums, grad_norm, losses = train_step(
                ddp_objective,
                state.optimizer,
                state.scaler,
                micro_batches,
                pairs_per_step,
                context.world_size,
            )
            if not math.isfinite(grad_norm):
                count_skipped_step(state, losses, context)
            state.step += 1
            if state.step >= options.steps - options.average + 1:
                state.add_to_average()
            reports.add_step(sums, waited)
            if state.step % run.log_every == 0 or state.step == options.steps:
                metrics = {
                    "lr": lr,
                    "grad_norm": grad_norm,
                    "dustbin": float(model.dustbin.detach()),
                    "skipped_steps": float(state.skipped),
                }
                reports.log_point(state.step, metrics)
        bar.close()

        # --- the end
        if not is_last:
            # After the last step, the validation has written the curves.
            reports.write_curves(state.best_step)
            if context.is_first_of_node:
                without = " without --fresh" if fresh else ""
                print(
                    f"stopped at step {state.step}; the same command{without} resumes there",
                    flush=True,
                )
            mlflow_run.close("KILLED")
            return STOPPED
        best = publish(finished=True)
        if context.is_main:
            log.write_metrics(folders.reports, best)
            for file in (log.METRICS, log.PICTURE):
                mlflow_run.add_artifact(folders.reports / file)
            model_file = folders.out / BEST
            mlflow_run.register_model(model_file, model_file.with_suffix(".json"), best["step"])
            print(
                f"best validation at step {best['step']}:"
                f" {log.describe_validation(best['validation'])}"
                f" ({best['validation']['pairs']:.0f} pairs)"
            )
            if options.init_from and best["step"] == 0:
                print(
                    f"validation kept the weights of {options.init_from}: training on these images"
                    " did not raise their F1"
                )
        elif context.is_first_of_node:
            print(f"trained to step {options.steps}; rank 0 prints the metrics")
        return 0


# --- the data


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
    params: Params, keypoints: Path, verify: str, context: distributed.Context
) -> TrainingData:
    """Open the stores of keypoints, check that they fit, and choose the validation pairs.

    Args:
        params: all parameters.
        keypoints: the folder of the stores.
        verify: "all" to check every shard, or "sample".
        context: this process among the ranks.

    Raises:
        RequestError: If the keypoints or the initial weights do not fit, or if no validation pair
            is left.
    """
    options = params.train
    store, held_out = (KeypointStore(keypoints / split, verify) for split in ("train", "val"))
    values = {
        "model.neighbours": options.model.neighbours,
        "augmentation.rotation_deg": options.augmentation.rotation_deg,
        "augmentation.zoom": options.augmentation.zoom,
    }
    keys = [key for key, value in values.items() if value]
    if keys and not store.scale_angle:
        raise RequestError(
            f"train.{keys[0]} = {values[keys[0]]}: {store.extractor} gives neither scale nor angle;"
            " set neighbours: false, rotation_deg: 0 and zoom: 0"
        )
    initial = Path(options.init_from) if options.init_from else None
    if initial:
        build.read_initial_model(initial)  # Raises now, before any process starts
    samples, messages = choose_validation_pairs(
        options, held_out, params.run.allow_training_images, initial
    )
    validation = Validation(held_out, samples, options.max_keypoints, context, options.augmentation)
    # The weights have seen the photographs of this training and of the initial weights.
    # The identifier of a photograph that could not be read is "".
    identified = frozenset(store.photographs) - {""}
    photographs: Optional[FrozenSet[str]] = identified or None
    if initial and photographs:
        initial_photographs = provenance.read_photographs(initial)
        photographs = None if initial_photographs is None else photographs | initial_photographs
    return TrainingData(store, validation, photographs, messages)


def check_request(
    params: Params, folders: Folders, continued: Optional[Path], verify: str, world_size: int
) -> None:
    """Check a request before any process starts.

    Args:
        params: all parameters.
        folders: what is read and written.
        continued: as for `train`.
        verify: as for `train`.
        world_size: number of processes.

    Raises:
        RequestError: If the stores, the initial weights or the checkpoint to continue do not fit.
    """
    context = distributed.Context(0, world_size, torch.device("cpu"))
    data = open_data(params, folders.keypoints, verify, context)
    if continued:
        digests = data.store.digest, data.validation.digest
        checkpoint.load_to_continue(
            continued, checkpoint.make_fingerprint(params, *digests, world_size)
        )


# --- parts of the story


def resume(
    state: checkpoint.TrainState, saved: ModelFile, fingerprint: Info, computed_by: Info
) -> Tuple[List[Info], List[str]]:
    """Restore the state of a checkpoint, and note what has changed since.

    Args:
        state: the state of the training, which changes.
        saved: the checkpoint, perhaps of a training that this one continues.
        fingerprint: the fingerprint of this training.
        computed_by: the precision, the number of processes, the code and the versions of packages.

    Returns:
        The history of `computed_by`, an entry for the start of the training and for each change,
        and lines about what has changed since the checkpoint.
    """
    tensors, info = saved
    state.restore(tensors, info)
    before = info["fingerprint"]
    # With another schedule, the average is over other steps, and begins again.
    average_from, average_from_before = (
        values["train.steps"] - values["train.average"] + 1 for values in (fingerprint, before)
    )
    if average_from != average_from_before:
        state.average = {}
        state.averaged = 0
        if state.step >= average_from:
            state.add_to_average()
    history = info["history"]
    last = {**history[-1], "step": state.step}
    now = {"step": state.step, **computed_by}
    changes = [
        f"{key} changed on resume: {old.get(key)} -> {new.get(key)}"
        for old, new in ((before, fingerprint), (last, now))
        for key in checkpoint.list_changed_keys(old, new)
    ]
    return history if last == now else [*history, now], changes


def publish_finished(folder: Path, folders: Folders, training_name: str) -> None:
    """Publish the model, the curves and the metrics of a training that is finished.

    Args:
        folder: the folder of the training.
        folders: where to publish.
        training_name: the name of the training.
    """
    best = checkpoint.read_finished_best(folder)
    saved = checkpoint.load_newest(folder)
    assert best and saved
    checkpoint.publish_best(folder, folders.out)
    log.write_curves(folders.reports, log.unpack_curves(*saved), best["step"])
    log.write_metrics(folders.reports, best)
    print(f"{folder}: trained with these parameters and data, to the last step: nothing to do")
    # MLflow's server may not have all of this run yet.
    tracking.attach(folders.reports / tracking.RECORD, training_name).close()


def compute_metrics_of(
    weights: Tensors, objective: MatchingObjective, validation: Validation
) -> Metrics:
    """Return the metrics of the model with `weights` in place of its current weights.

    Parameters that `weights` lacks keep their values. The model is restored afterwards. All ranks
    call this together.
    """
    model = objective.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({**before, **weights})
    metrics = validation.compute_metrics(objective)
    model.load_state_dict(before)
    return metrics


def count_skipped_step(
    state: checkpoint.TrainState, losses: torch.Tensor, context: distributed.Context
) -> None:
    """Report a step whose gradient is not finite, and count it. All ranks call this together.

    A step is not counted if GradScaler only lowers its scale.

    Args:
        state: the state of the training.
        losses: (B,), the loss of each of this rank's pairs.
        context: this process among the ranks.

    Raises:
        WorkError: After more than MAX_SKIPPED such steps.
    """
    count = distributed.sum_over_ranks({"pairs": float((~torch.isfinite(losses)).sum())})["pairs"]
    # If all losses are finite, the overflow is GradScaler's, which searches for its scale.
    state.skipped += bool(count) or not state.scaler.is_enabled()
    if context.is_main:
        print(
            f"step {state.step + 1}: skipped, its gradient is not finite; the loss of {count:.0f}"
            " pairs is not finite"
        )
    if state.skipped > MAX_SKIPPED:
        raise WorkError(
            f"step {state.step + 1}: {state.skipped} steps had a gradient that was not finite, more"
            f" than {MAX_SKIPPED}; lower train.lr"
        )


def print_validation(params: Params, folders: Folders, verify: str) -> None:
    """Print the metrics of the model `train.init_from`, without training. Every rank calls this.

    Args:
        params: all parameters.
        folders: what is read.
        verify: as for `train`.

    Raises:
        RequestError: If the keypoints or the model do not fit.
    """
    options = params.train
    with distributed.process_group() as context:
        data = open_data(params, folders.keypoints, verify, context)
        model = build.make_network(options, params.run, context, data.store)
        _, _, messages = build.load_initial_weights(model, options.init_from)
        abilities = distributed.gather_objects(detect_abilities(context.device))
        precision, reason = choose_precision(options.precision, abilities)
        objective, _, _ = build.build_objective_and_state(
            model, options, params.run, context, precision
        )
        metrics = data.validation.compute_metrics(objective)
        if context.is_main:
            figures = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            lines = [f"precision: {precision} ({reason})", *messages, *data.messages]
            print(*lines, f"{options.init_from}: {figures}", sep="\n")
