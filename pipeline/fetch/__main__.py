"""Stage 1: list the photographs (`python -m pipeline.fetch`).

The stage writes `manifest.csv` and `source.json` into --out. It copies only the photographs of the
small bundled sample. All other images are read where they are: in the user's own folder, or in a
downloaded archive.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Optional, Sequence

from pipeline import errors, params, provenance, workers
from pipeline.errors import RequestError
from pipeline.fetch import coco, dataset
from pipeline.fetch.dataset import Container, ImageSet
from pipeline.params import Params
from superglue_sift.files import check_writable, name_below, write_json

# With fewer test images, the evaluation gives no interval (`evaluate.metrics.MIN_SCENES`).
MIN_TEST_IMAGES = 6
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
            used = sum(entry.split == "train" for entry in entries)
            copies = len(containers["train"].names) - used
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
    check_held_out(ImageSet(entries, paths, settings.source), sections)
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


def check_held_out(images: ImageSet, sections: Params) -> None:
    """Check that there are held-out images that the initial weights were not trained on.

    Print how many are left out, and whether too few are left.

    Args:
        images: the images of all splits.
        sections: the sections of params.yaml.

    Raises:
        RequestError: If there are no initial weights at `train.init_from`, or if they were trained
            on all images that validate, or on all that test.
    """
    model = Path(sections.train.init_from)
    if sections.train.init_from and not model.is_file():
        raise RequestError(f"train.init_from = {model}: no such file; '' trains from scratch")
    # A list that is missing is reported by the training.
    trained_on = provenance.read_photographs(model) if sections.train.init_from else None
    keep = sections.run.allow_training_images
    counts = {}
    for purpose, split in (("validation", "val"), ("test", "test")):
        entries = images.select_entries(split)
        counts[purpose] = len(entries)
        if not entries or trained_on is None:
            continue
        photographs = [images.identify_photograph(entry) for entry in entries]
        indices, message = provenance.leave_out_photographs(
            model, photographs, keep, str(model), purpose=purpose
        )
        counts[purpose] = len(indices)
        if message:
            fix = "" if keep else "; run.allow_training_images: true keeps them"
            print(f"fetch: {purpose} images: {message}{fix}")
        # A number in a name may be COCO's, or that of a frame of a video.
        numbers = [dataset.parse_coco_number(entry.name) for entry in entries]
        ambiguous = [n for n, p in zip(numbers, photographs) if n in trained_on and n != p]
        if ambiguous:
            print(
                f"fetch: {purpose} images: {len(ambiguous)} of {len(entries)} are named as"
                f" photographs of COCO that {model} was trained on, and count as others; if they"
                " are COCO's, name their folder as COCO does, such as train2017"
            )
    # Without test images the evaluation takes those for validation.
    purpose = "test" if counts["test"] else "validation"
    if counts[purpose] < MIN_TEST_IMAGES:
        print(
            f"fetch: {counts[purpose]} {purpose} images are too few to judge by, since intervals"
            f" need {MIN_TEST_IMAGES}: give more images, or hold out a larger part"
            " (fetch.val_fraction)"
        )


def _describe_container(container: Container, out: Path) -> Dict[str, str]:
    """Return what source.json in the folder `out` says about a container."""
    path = str(container.path)
    if not container.path.is_absolute():  # A clone can be moved
        path = name_below(container.path.resolve(), out.resolve())
    kind = "zip" if container.members else "folder"
    return {"kind": kind, "path": path}


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
