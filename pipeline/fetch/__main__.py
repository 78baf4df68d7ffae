"""Stage 1: list the photographs (`python -m pipeline.fetch`).

Writes `manifest.csv` and `source.json` into --out. The user's own folder stays where it is. A
downloaded archive is read in place. Only the small bundled sample is copied.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from pipeline import errors, params, provenance, workers
from pipeline.errors import RequestError
from pipeline.fetch import coco, dataset
from pipeline.fetch.dataset import Container, Entry, ImageSet
from pipeline.params import Params
from superglue_sift.files import check_writable, name_below, write_json

# With fewer test images, the evaluation gives no interval (`evaluate.metrics.MIN_SCENES`).
MIN_TEST_IMAGES = 6
SPLIT_OF_PURPOSE = {"validation": "val", "test": "test"}  # what images are for, and their split
BUNDLED = "sample"  # key and folder of the container of the bundled photographs


def main(argv: Optional[Sequence[str]] = None) -> int:
    workers.end_with_dvc()
    parser = errors.make_parser("pipeline.fetch", __doc__)
    add = parser.add_argument
    add("--params", type=Path, default=Path("params.yaml"), help="parameters")
    add("--out", type=Path, default=Path("data/images"), help="folder of the manifest")
    add("--archives", type=Path, default=Path("data/archives"), help="folder of downloads")
    add("--reports", type=Path, default=Path("reports/fetch"), help="folder of metrics.json")
    options = parser.parse_args(argv)
    sections = params.load(options.params)
    settings = sections.fetch
    # The user's own images are checked before anything is written.
    own = None
    if settings.source == "folder":
        own = dataset.open_and_split_local(settings)
        splits, held = own
        copies = len(held["train"].names) - len(splits["train"])
        if settings.val_path and copies and not settings.limit:
            print(f"fetch: {copies} training images left out: copies of held-out ones")
    for folder in (options.out, options.archives, options.reports):
        check_writable(folder / "manifest.csv", folder)
    # Copy the sample; all other images stay where they are, or are downloaded.
    shutil.rmtree(options.out / BUNDLED, ignore_errors=True)
    if settings.source == "sample":
        entries = dataset.copy_sample(options.out / BUNDLED)
        containers = {BUNDLED: {"kind": "folder", "path": BUNDLED}}
    else:
        splits, held = own or coco.download_and_split(settings, options.archives)
        entries = []
        for split, names in splits.items():
            # Val and test have one container, which may be that of train.
            key = "val" if split != "train" and "val" in held else "train"
            entries += held[key].read_entries(names, split, key)
        containers = {
            key: _describe_container(container, options.out) for key, container in held.items()
        }
    # Say now what would stop the training or the evaluation after hours.
    roots = {key: str(options.out / value["path"]) for key, value in containers.items()}
    for line in check_held_out(ImageSet(entries, roots, settings.source), sections):
        print(f"fetch: {line}")
    dataset.write_manifest(options.out / "manifest.csv", entries)
    write_json(options.out / "source.json", {"source": settings.source, "containers": containers})
    # Write the metrics for DVC.
    counts = {
        f"{split}_images": sum(entry.split == split for entry in entries)
        for split in dataset.SPLITS
    }
    counts["bytes"] = sum(entry.size for entry in entries)
    write_json(options.reports / "metrics.json", counts)
    print(
        f"fetch: {counts['train_images']} training, {counts['val_images']} validation and"
        f" {counts['test_images']} test images ({counts['bytes'] / 1e6:.1f} MB) in"
        f" {options.out}/manifest.csv"
    )
    return 0


def check_held_out(images: ImageSet, sections: Params) -> List[str]:
    """Return lines about held-out images that the initial weights know, and about too few images.

    Raises:
        RequestError: there are no initial weights at `train.init_from`, or they were trained on all
            images that validate, or on all that test.
    """
    model = sections.train.init_from
    if model and not Path(model).is_file():
        raise RequestError(
            f"train.init_from = {model!r}: no such file; name a model, or set '' to train from"
            " scratch"
        )
    # A list that is missing is reported by the training.
    known = provenance.read_photographs(Path(model)) if model else None
    lines: List[str] = []
    left = {}
    for title, split in SPLIT_OF_PURPOSE.items():
        left[title] = images.select_entries(split)
        if left[title] and known is not None:
            left[title] = _leave_out_training_images(images, left[title], title, sections, lines)
    # Without test images the evaluation takes those for validation.
    title = "test" if left["test"] else "validation"
    count = len(left[title])
    if count < MIN_TEST_IMAGES:
        keys = "fetch.test_fraction"
        if not sections.fetch.val_path:
            keys = f"fetch.val_fraction or {keys}"
        lines.append(
            f"{count} {title} images are too few to judge by, since intervals need"
            f" {MIN_TEST_IMAGES}: give more images, or raise {keys}"
        )
    return lines


def _leave_out_training_images(
    images: ImageSet, entries: Sequence[Entry], title: str, sections: Params, lines: List[str]
) -> List[Entry]:
    """Return the entries that the initial weights were not trained on. Add what to say to `lines`.

    `title` says what the images are for. Raises RequestError if no entry is left.
    """
    model = Path(sections.train.init_from)
    keep = sections.run.allow_training_images
    photographs = [images.identify_photograph(entry) for entry in entries]
    left, line = provenance.leave_out_photographs(model, photographs, keep, str(model))
    if not left:
        raise RequestError(
            f"{model}: was trained on all of the {len(entries)} {title} images; hold out others"
            ' (fetch.val_path, VAL_IMAGES), train from scratch (train.init_from: ""), or keep them'
            " with run.allow_training_images: true"
        )
    if line:
        fix = "" if keep else "; run.allow_training_images: true keeps them"
        lines.append(f"{title} images: {line}{fix}")
    # A number in a name may be COCO's, or that of a frame of a video.
    known = provenance.read_photographs(model) or frozenset()
    numbers = [dataset.parse_coco_number(entry.name) for entry in entries]
    alike = [name for name, own in zip(numbers, photographs) if name in known and own != name]
    if alike:
        lines.append(
            f"{title} images: {len(alike)} of {len(entries)} are named as photographs of COCO that"
            f" {model} was trained on, and count as others; if they are COCO's, name their folder"
            " as COCO does, such as train2017"
        )
    return [entries[index] for index in left]


def _describe_container(container: Container, out: Path) -> Dict[str, Any]:
    """Return what source.json, in the folder `out`, says about a container."""
    path = str(container.path)
    if not container.path.is_absolute():  # a clone can be moved
        path = name_below(container.path.resolve(), out.resolve())
    kind = "zip" if container.members else "folder"
    return {**container.facts, "kind": kind, "path": path}


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
