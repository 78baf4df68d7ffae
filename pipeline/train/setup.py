"""Builds a training from its parameters: batch sizes, model, optimiser, parallel wrapper."""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy
import torch
from torch import Tensor, nn

from pipeline import compat, distributed
from pipeline.errors import RequestError
from pipeline.keypoints.store import Store
from pipeline.params import TrainParams
from pipeline.train import precision
from pipeline.train.checkpoint import TrainState
from pipeline.train.objective import DataParallelObjective, MatchingObjective
from pipeline.train.optimization import freeze, make_optimizer
from superglue_sift import environment, torch_compat
from superglue_sift.features.extractors import kind_of
from superglue_sift.network import superglue
from superglue_sift.network.superglue import SuperGlue, SuperGlueConfig
from superglue_sift.network.weights import BadCheckpoint, load_model_file, weights_of

# Mutual nearest keypoints closer than POSITIVE_PX are a true match; keypoints without a neighbour
# closer than NEGATIVE_PX are unmatched; in between SIFT's positions are too uncertain to teach
# either.
POSITIVE_PX = 3.0
NEGATIVE_PX = 5.0
# Keys that should fit initial weights
SHAPE = ("dim", "layers", "heads", "norm", "neighbours", "rotary")


class Parts(NamedTuple):
    """The objective, its parallel wrapper (what a step calls), and the state to save.

    init_threshold: `match_threshold` of `train.init_from`; None without. messages: to print.
    """

    objective: MatchingObjective
    ddp_model: nn.Module
    state: TrainState
    init_threshold: Optional[float]
    messages: List[str]


def global_batch(train: TrainParams, world_size: int) -> int:
    """Pairs of one step over all ranks.

    Raises:
        RequestError: `parallel` needs one rank.
    """
    if world_size > 1 and train.parallel != "ddp":
        raise RequestError(f"--parallel {train.parallel} runs in one process: set NPROC_PER_NODE=1")
    return train.batch_per_rank * world_size or train.batch


def read_model(path: str, asked_by: str) -> Tuple[Dict[str, Tensor], dict]:
    """Tensors and description of a model file; RequestError, beginning with `asked_by`, when it
    cannot be read.
    """
    try:
        return load_model_file(path)
    except (FileNotFoundError, BadCheckpoint) as error:
        raise RequestError(f"{asked_by}: {error}") from None


def check_device(train: TrainParams) -> None:
    """Raises RequestError if this machine lacks what `train` needs."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    precision.on(train.precision, torch.device(kind))
    missing = torch_compat.no_compiler(kind) if train.compile else ""
    if missing:
        raise RequestError(f"--compile: {missing}; install it, or leave out --compile")


def check_features(train: TrainParams, store: Store) -> None:
    """Raises RequestError if the training needs scales and angles and the keypoints of `store` have
    none.
    """
    keys = [name for name in ("neighbours", "rotation_deg", "zoom") if getattr(train, name)]
    if keys and not store.scale_angle:
        raise RequestError(
            f"train.{keys[0]} = {getattr(train, keys[0])}: {store.extractor} gives neither scale"
            " nor angle; set neighbours: false, rotation_deg: 0 and zoom: 0"
        )


def choose_precision(
    train: TrainParams, context: distributed.Context, before: str = ""
) -> precision.Choice:
    """One precision for all ranks, whose devices may differ.

    before: that of the checkpoint from which the training resumes (`precision.resume`).

    Raises:
        RequestError: `portable` in a process on a CPU that was not prepared for it.
    """
    on_gpu = context.device.type == "cuda"
    if train.precision == precision.PORTABLE and not on_gpu and not environment.is_prepared():
        raise RequestError(
            "train.precision: portable needs variables that are set before torch is loaded: start"
            " the training by `python -m pipeline.train`, or set float32"
        )
    choice = precision.on(train.precision, context.device)
    if before:
        choice = precision.resume(train.precision, before, choice, on_gpu, compat.cpu_flags())
    choices = distributed.all_gather(tuple(choice))
    return precision.Choice(*min(choices, key=lambda choice: precision.BY_SUPPORT.index(choice[0])))


def network(train: TrainParams, store: Optional[Store] = None) -> SuperGlue:
    """The untrained network for the keypoints of `store` (None: SIFT's)."""
    values = train.model_dump(include={field.name for field in dataclasses.fields(SuperGlueConfig)})
    values["scale_angle"] = store is None or store.scale_angle
    if store is not None:
        kind, dim = kind_of(store.dtype)
        values.update(extractor=store.extractor, descriptor=kind, descriptor_dim=dim)
    return SuperGlue(SuperGlueConfig(**values))


def build(
    train: TrainParams,
    context: distributed.Context,
    store: Optional[Store] = None,
    chosen: Optional[precision.Choice] = None,
) -> Parts:
    """The parts of a training on `store` (None: SIFT keypoints), equal on every rank.

    chosen: the precision, the same on every rank; None: `choose_precision`.
    """
    portable_gpu = train.precision == precision.PORTABLE and context.device.type == "cuda"
    seed_everything(train.seed, train.deterministic or portable_gpu)
    model = network(train, store)
    chosen = chosen or choose_precision(train, context)
    messages = []
    if train.parallel == "dp" and torch.cuda.device_count() < 2:
        messages.append("--parallel dp does nothing here: it needs several GPUs; leave it out")
    loaded, init_threshold = _initialize(model, train.init_from) if train.init_from else ([], None)
    messages += loaded
    frozen = freeze(model, train.freeze)
    messages += [f"frozen: {', '.join(frozen)}"] if frozen else []
    model.to(context.device)
    model.recompute = train.checkpoint_layers
    superglue.synchronize(model, distributed.differentiable_sum)
    objective = MatchingObjective(model, POSITIVE_PX, NEGATIVE_PX, chosen.precision)
    if train.compile:
        model.compile_layers()
        pairs = -(-global_batch(train, context.world_size) // context.world_size)
        objective.fixed_size = (-(-pairs // train.accumulate), train.max_keypoints)
    state = TrainState(
        model, make_optimizer(train, model), compat.grad_scaler(chosen.precision == "float16")
    )
    wrap = DataParallelObjective if train.parallel == "dp" else distributed.wrap
    return Parts(objective, wrap(objective), state, init_threshold, messages)


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed Python, NumPy and torch (every device). `deterministic` also asks torch and cuBLAS for
    reproducible kernels: slower on a GPU, not on a CPU.

    Training draws from its own generators (seed, epoch, index); this covers libraries that draw
    from the global ones.
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


def _initialize(model: SuperGlue, path: str) -> Tuple[List[str], Optional[float]]:
    """Load what fits of the model file `path`.

    Returns messages and the file's match threshold, if it has one.
    """
    tensors, info = read_model(path, "train.init_from")
    given = weights_of(tensors)
    weights = model.state_dict()
    taken = {n: t for n, t in given.items() if n in weights and t.shape == weights[n].shape}
    model.load_state_dict({**weights, **taken})
    messages = [f"initial weights from {path}: {len(taken)} tensors taken"]
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
    return messages, info.get("match_threshold")
