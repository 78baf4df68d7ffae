"""Which photographs a training has seen, with the weights it starts from, and validation on none of those."""

from __future__ import annotations

from pathlib import Path
from typing import FrozenSet, List, NamedTuple, Optional

from pipeline.errors import RequestError
from pipeline.features.store import Store, read_index
from pipeline.parameters.schema import TrainParams
from pipeline.provenance import trained_on
from pipeline.train.pairs.order import Sample, validation_pairs


class Validation(NamedTuple):
    """samples: the pairs; images: how many photographs they may come from; said: what was left out and why."""

    samples: List[Sample]
    images: int
    said: List[str]


def photographs_of(store: Store) -> Optional[List[str]]:
    """What stands for each image of a store (`Entry.photograph`); None of a store that does not say it."""
    shards = [shard for shard in read_index(store.path)["shards"] if shard["images"]]
    if not all("photographs" in shard for shard in shards):
        return None
    return [one for shard in shards for one in shard["photographs"]]


def trained_with(train: TrainParams, store: Store) -> Optional[FrozenSet[str]]:
    """The photographs of a training on `store` and of the weights it starts from; None where not all are known."""
    own = photographs_of(store)
    before = trained_on.read(Path(train.init_from)) if train.init_from else frozenset()
    return None if own is None or before is None else (before | frozenset(own)) - {""}


def validation(train: TrainParams, held_out: Store, model: Optional[Path], keep: bool = False) -> Validation:
    """`train.val_pairs` pairs of the photographs that `model` (None: nothing) was not trained on; `keep`: of all.

    Raises RequestError where it was trained on all of them.
    """
    seen, said = trained_on.read(model) if model else frozenset(), []
    if seen is None and model:
        said.append(f"validation: {trained_on.unknown(model)}")
    names = photographs_of(held_out) or [""] * len(held_out)
    left = [image for image, name in enumerate(names) if name not in (seen or ())]
    out = len(names) - len(left)
    if out and keep:
        said.append(f"validation: {out} of {len(names)} photographs are from the training of {model}")
        left = list(range(len(names)))
    elif out and not left:
        raise RequestError(
            f"{model}: was trained on all of the {out} validation photographs; validate on others (fetch.val_path), "
            'train from nothing (train.init_from: ""), or keep them with --keep-seen'
        )
    elif out:
        said.append(f"validation: {out} of {len(names)} photographs left out: {model} was trained on them")
    pairs = validation_pairs(train.seed, len(left), held_out.views_per_image, train.val_pairs)
    return Validation([one._replace(image=left[one.image]) for one in pairs], len(left), said)
