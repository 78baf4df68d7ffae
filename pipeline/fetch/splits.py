"""Splits of the images: training, validation, test; checks of the user's own images before anything
is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Mapping, Sequence, Tuple

from pipeline.errors import RequestError
from pipeline.fetch.containers import Container, open_container
from pipeline.image_sets.manifest import hash_fraction
from pipeline.image_sets.sources import ImageSet
from pipeline.params import FetchParams
from pipeline.views.homography import SECTION_OF, Size
from superglue_sift.features.images import BadImage, decode_gray

SEED = 0  # of the hash of names
Splits = Dict[str, List[str]]  # names by split
NO_CONTENTS: Mapping[str, str] = {}


def own(settings: FetchParams) -> Tuple[Splits, Dict[str, Container]]:
    """The splits of the user's own images and their containers: one set with a part held out, or
    two sets.

    Raises RequestError if a path is wrong, or no image is left to train or to validate.
    """
    choice = (settings.root, tuple(filter(None, settings.categories.split(","))), settings.min_side)
    held = {"train": open_container(settings.path, *choice)}
    contents = held["train"].contents
    if settings.val_path:
        held["val"] = open_container(settings.val_path, *choice)
        if Path(settings.path).resolve() == Path(settings.val_path).resolve():
            raise RequestError("fetch.val_path: is the same as fetch.path; leave it empty instead")
        others = held["val"].contents
        copies = set(others.values())
        train = [name for name in held["train"].names if contents[name] not in copies]
        if not train:
            raise RequestError(
                f"{settings.path}: holds only copies of images in {settings.val_path}; give others"
            )
        splits = split(train, held["val"].names, settings, others)
    else:
        splits = hold_out(held["train"].names, settings, contents)
    _require_some(splits, held)
    return splits, held


def hold_out(
    names: Sequence[str], settings: FetchParams, contents: Mapping[str, str] = NO_CONTENTS
) -> Splits:
    """Hold out a part of one set of images by the hash of their names, copies (by `contents`)
    together.
    """
    different = _different(names, contents)
    # in a small set chance would hold out too few: the fraction itself, and enough to say anything
    at_least = max(2, min(8, different // 3), min(round(settings.val_fraction * different), 32))
    parts = divide(names, settings.val_fraction, SEED, at_least, contents=contents)
    return split(*parts, settings, contents)


def split(
    train: Sequence[str],
    held_out: Sequence[str],
    settings: FetchParams,
    contents: Mapping[str, str] = NO_CONTENTS,
) -> Splits:
    """Limit both sets, and split the held-out images into val and test."""
    train = _limit(train, settings)
    held_out = _limit(held_out, settings)
    tested = round(settings.test_fraction * _different(held_out, contents))
    least_test = max(1, min(tested, 16))
    least_val = max(1, min(_different(held_out, contents) - tested, 16))
    # another seed than that of the hold-out: the same hash would put every small value into test
    val, test = divide(held_out, settings.test_fraction, SEED + 1, least_test, least_val, contents)
    return {"train": train, "val": val, "test": test}


def divide(
    names: Sequence[str],
    fraction: float,
    seed: int,
    at_least: int = 1,
    keep: int = 1,
    contents: Mapping[str, str] = NO_CONTENTS,
) -> Tuple[List[str], List[str]]:
    """(kept, held out), each sorted. The hash of a name decides, so other images do not move it.

    With a fraction between 0 and 1, keeps at least `keep` images, and holds out at least `at_least`
    if possible.
    contents: what tells images apart. Copies go where the first of them goes, and count as one
    image.
    """
    first: Dict[str, str] = {}  # name of the first image with this content
    for name in sorted(names):
        first.setdefault(contents.get(name, name), name)
    ranked = sorted(first.values(), key=lambda name: (hash_fraction(seed, name), name))
    count = sum(hash_fraction(seed, name) < fraction for name in ranked)
    if 0.0 < fraction < 1.0:
        count = max(min(max(count, at_least), len(ranked) - keep), 0)
    chosen = set(ranked[:count])
    held_out = {name for name in names if first[contents.get(name, name)] in chosen}
    return sorted(set(names) - held_out), sorted(held_out)


def _different(names: Sequence[str], contents: Mapping[str, str]) -> int:
    """Number of images, copies counted once."""
    return len({contents.get(name, name) for name in names})


def container_of(split: str, held: Mapping[str, Container]) -> str:
    """The container of a split: val and test are in "val", if there is one."""
    return "val" if split != "train" and "val" in held else next(iter(held))


def require_usable(
    splits: Splits, held: Mapping[str, Container], smallest: Mapping[str, Size]
) -> None:
    """Raises RequestError if no image of a split can be read and is as large as `smallest[split]`
    (pixels).
    """
    for split, size in smallest.items():
        names = splits[split]
        key = container_of(split, held)
        if names and not any(_is_usable(held[key], name, size) for name in names):
            section = SECTION_OF[split]
            raise RequestError(
                f"{held[key].path}: none of its {len(names)} {split} images can be read and has the"
                f" {size[0]}x{size[1]} pixels that a view needs; give larger images, or lower"
                f" {section}.width and {section}.height"
            )


def _is_usable(container: Container, name: str, size: Size) -> bool:
    """Whether an image can be read and has at least this size."""
    try:
        data = ImageSet((), {"": str(container.path)}).read(*container.entries([name]))
        height, width = decode_gray(data).shape
    except BadImage:
        return False
    return width >= size[0] and height >= size[1]


def _require_some(splits: Splits, held: Mapping[str, Container]) -> None:
    """Raises RequestError without train or val images; without test images the evaluation takes
    those of val.
    """
    empty = [split for split in ("train", "val") if not splits[split]]
    if not empty:
        return
    container = held[container_of(empty[0], held)]
    count = len(set(container.contents.values()))
    raise RequestError(
        f"{container.path}: {count} different image{'s' * (count > 1)}, and none for"
        f" {' and '.join(empty)}; at least two are needed, one to train and one to validate: give"
        " more images, or change fetch.val_fraction and fetch.test_fraction"
    )


def _limit(names: Sequence[str], settings: FetchParams) -> List[str]:
    """At most `fetch.limit` names, by the smallest hashes: a larger limit keeps the choice of a
    smaller one.
    """
    ranked = sorted(names, key=lambda name: hash_fraction(SEED + 2, name))
    return sorted(ranked[: settings.limit or None])
