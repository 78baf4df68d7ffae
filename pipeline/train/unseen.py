"""Photographs that a training and its initial weights were trained on, and validation without
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import FrozenSet, List, NamedTuple, Optional

from pipeline.errors import RequestError
from pipeline.features.store import Store, read_index
from pipeline.parameters.schema import TrainParams
from pipeline.provenance import trained_on
from pipeline.train.pairs.order import Sample, validation_pairs


class Validation(NamedTuple):
    """samples: the pairs; images: number of photographs they come from; messages: what was left out
    and why.
    """

    samples: List[Sample]
    images: int
    messages: List[str]


def photographs_of(store: Store) -> Optional[List[str]]:
    """Identifier of each image of a store (`Entry.photograph`); None if the store has none."""
    shards = [shard for shard in read_index(store.path)["shards"] if shard["images"]]
    if not all("photographs" in shard for shard in shards):
        return None
    return [name for shard in shards for name in shard["photographs"]]


def trained_with(train: TrainParams, store: Store) -> Optional[FrozenSet[str]]:
    """The photographs of a training on `store` and of its initial weights; None if not all are
    known.
    """
    images = photographs_of(store)
    before = trained_on.read(Path(train.init_from)) if train.init_from else frozenset()
    return None if images is None or before is None else (before | frozenset(images)) - {""}


def validation(
    train: TrainParams, held_out: Store, model: Optional[Path], keep: bool = False
) -> Validation:
    """`train.val_pairs` pairs of photographs that `model` was not trained on (None, or `keep`: of
    all).

    Raises RequestError if it was trained on all of them.
    """
    seen = trained_on.read(model) if model else frozenset()
    messages = []
    if seen is None and model:
        messages.append(f"validation: {trained_on.unknown(model)}")
    names = photographs_of(held_out) or [""] * len(held_out)
    left = [image for image, name in enumerate(names) if name not in (seen or ())]
    out = len(names) - len(left)
    if out and keep:
        messages.append(
            f"validation: {out} of {len(names)} photographs are from the training of {model}"
        )
        left = list(range(len(names)))
    elif out and not left:
        raise RequestError(
            f"{model}: was trained on all of the {out} validation photographs; validate on others"
            ' (fetch.val_path), train from scratch (train.init_from: ""), or keep them with'
            " --keep-seen"
        )
    elif out:
        messages.append(
            f"validation: {out} of {len(names)} photographs left out: {model} was trained on them"
        )
    pairs = validation_pairs(train.seed, len(left), held_out.views_per_image, train.val_pairs)
    return Validation(
        [pair._replace(image=left[pair.image]) for pair in pairs], len(left), messages
    )
