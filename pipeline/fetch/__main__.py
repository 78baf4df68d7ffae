"""Stage 1: list the photographs (`python -m pipeline.fetch`).

The stage writes `manifest.csv` and `source.json` into --out. It copies only the photographs of the
small bundled sample. All other images are read where they are: in the user's own folder, or in a
downloaded archive.
"""

from __future__ import annotations

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
SPLIT_OF_PURPOSE = {"validation": "val", "test": "test"}  # What held-out images are for
BUNDLED = "sample"  # Key and folder of the container of the bundled photographs


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
    for folder in (options.out, options.archives, options.reports):
        check_writable(folder / "manifest.csv", folder)
    # Copy the sample; all other images stay where they are, or are downloaded.
    if settings.source == "sample":
        entries = dataset.copy_sample(options.out / BUNDLED)
        roots = {BUNDLED: {"kind": "folder", "path": BUNDLED}}
    else:
        if settings.source == "folder":
            entries, containers = dataset.list_local_images(settings)
            copies = len(containers["train"].names) - sum(e.split == "train" for e in entries)
            if settings.val_path and copies and not settings.limit:
                print(f"fetch: {copies} training images left out: copies of held-out ones")
        else:
            entries, containers = coco.list_images(settings, options.archives)
        roots = {
            key: _describe_container(container, options.out)
            for key, container in containers.items()
        }
    # Say now what would otherwise stop the training or the evaluation after hours.
    paths = {key: str(options.out / root["path"]) for key, root in roots.items()}
    for line in check_held_out(ImageSet(entries, paths, settings.source), sections):
        print(f"fetch: {line}")
    dataset.write_manifest(options.out / "manifest.csv", entries)
    write_json(options.out / "source.json", {"source": settings.source, "containers": roots})
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
    """Check that there are held-out images that the initial weights were not trained on.

    Args:
        images: the images of all splits.
        sections: the sections of params.yaml.

    Returns:
        Lines to print, about images that are left out and about too few images.

    Raises:
        RequestError: If there are no initial weights at `train.init_from`, or if they were trained
            on all images that validate, or on all that test.
    """
    model = sections.train.init_from
    if model and not Path(model).is_file():
        raise RequestError(
            f"train.init_from = {model!r}: no such file; name a model, or set '' to train from"
            " scratch"
        )
    # A list that is missing is reported by the training.
    trained_photographs = provenance.read_photographs(Path(model)) if model else None
    lines: List[str] = []
    usable_entries = {}
    for purpose, split in SPLIT_OF_PURPOSE.items():
        usable_entries[purpose] = images.select_entries(split)
        if usable_entries[purpose] and trained_photographs is not None:
            usable_entries[purpose] = _leave_out_training_images(
                images, usable_entries[purpose], purpose, sections, lines
            )
    # Without test images the evaluation takes those for validation.
    purpose = "test" if usable_entries["test"] else "validation"
    count = len(usable_entries[purpose])
    if count < MIN_TEST_IMAGES:
        keys = "fetch.test_fraction"
        if not sections.fetch.val_path:
            keys = f"fetch.val_fraction or {keys}"
        lines.append(
            f"{count} {purpose} images are too few to judge by, since intervals need"
            f" {MIN_TEST_IMAGES}: give more images, or raise {keys}"
        )
    return lines


def _leave_out_training_images(
    images: ImageSet, entries: Sequence[Entry], purpose: str, sections: Params, lines: List[str]
) -> List[Entry]:
    """Return the entries that the initial weights were not trained on.

    Args:
        images: the images of all splits.
        entries: the held-out images.
        purpose: what they are for, a key of SPLIT_OF_PURPOSE.
        sections: the sections of params.yaml.
        lines: the lines to print. This function adds some.

    Raises:
        RequestError: If no entry is left.
    """
    model = Path(sections.train.init_from)
    keep = sections.run.allow_training_images
    photographs = [images.identify_photograph(entry) for entry in entries]
    indices, message = provenance.leave_out_photographs(model, photographs, keep, str(model))
    if not indices:
        raise RequestError(
            f"{model}: was trained on all of the {len(entries)} {purpose} images; hold out others"
            ' (fetch.val_path, VAL_IMAGES), train from scratch (train.init_from: ""), or keep them'
            " with run.allow_training_images: true"
        )
    if message:
        fix = "" if keep else "; run.allow_training_images: true keeps them"
        lines.append(f"{purpose} images: {message}{fix}")
    # A number in a name may be COCO's, or that of a frame of a video.
    trained_photographs = provenance.read_photographs(model) or frozenset()
    numbers = [dataset.parse_coco_number(entry.name) for entry in entries]
    ambiguous = [
        number
        for number, photograph in zip(numbers, photographs)
        if number in trained_photographs and photograph != number
    ]
    if ambiguous:
        lines.append(
            f"{purpose} images: {len(ambiguous)} of {len(entries)} are named as photographs of"
            f" COCO that {model} was trained on, and count as others; if they are COCO's, name"
            " their folder as COCO does, such as train2017"
        )
    return [entries[index] for index in indices]


def _describe_container(container: Container, out: Path) -> Dict[str, Any]:
    """Return what source.json in the folder `out` says about a container."""
    path = str(container.path)
    if not container.path.is_absolute():  # A clone can be moved
        path = name_below(container.path.resolve(), out.resolve())
    kind = "zip" if container.members else "folder"
    return {"kind": kind, "path": path}


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
