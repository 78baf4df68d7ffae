"""Print the content of a keypoint store (`python -m pipeline.features.inspect data/keypoints/train`)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import List, Optional, Sequence

import numpy as np

from pipeline import errors
from pipeline.errors import RequestError
from pipeline.features.store import Store, read_index
from superglue_sift.geometry import corners, transform

_HISTOGRAM_BINS = 8


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.features.inspect", description=str(__doc__).split("\n")[0]
    )
    parser.add_argument("store", type=Path, help="folder with store.json, such as data/keypoints/train")
    parser.add_argument("--verify", action="store_true", help="check the SHA-256 of every shard")
    parser.add_argument("--image", default="", help="name (or number) of an image to describe")
    options = parser.parse_args(argv)
    store = Store(options.store, verify="all" if options.verify else "sample")
    print("\n".join(describe(store)))
    if options.verify:
        print("every shard has the SHA-256 it was written with")
    if options.image:
        print("\n".join(describe_image(store, _find(store, options.image))))
    return 0


def describe(store: Store) -> List[str]:
    """Content and size of the store, and the distribution of keypoints over views, as lines."""
    content = read_index(store.path)
    size = sum(shard["bytes"] for shard in content["shards"])
    bad = sum(len(shard.get("bad", ())) for shard in content["shards"])
    lines = [
        f"{store.path}: {content['format']} version {content['version']}, digest {store.digest}",
        f"{len(store)} images ({bad} bad ones left out), {store.views_per_image} views of "
        f"{store.view_size[0]}x{store.view_size[1]} px each, {store.counts.sum()} keypoints",
        f"{len(content['shards'])} shards, {size / 1e6:.1f} MB, {size / max(store.counts.size, 1):.0f} bytes per view",
    ]
    if store.counts.size:
        percentiles = np.percentile(store.counts, [0, 5, 50, 95, 100])
        lines.append(
            "keypoints per view: least {:.0f}, 5 % {:.0f}, median {:.0f}, 95 % {:.0f}, most {:.0f}".format(*percentiles)
        )
        heights, edges = np.histogram(store.counts, bins=_HISTOGRAM_BINS)
        for height, low, high in zip(heights, edges, edges[1:]):
            bar = "#" * round(50 * height / heights.max())
            lines.append(f"  {int(low):5d} to {int(high):5d} {bar:50s} {height}")
    return lines


def describe_image(store: Store, image: int) -> List[str]:
    """One line per view of an image: number of keypoints, and the corners of the view in the image."""
    width, height = store.sizes[image]
    lines = [f"image {image}: {store.images[image]}, {width}x{height} px"]
    for index in range(store.views_per_image):
        view = store.view(image, index)
        cut_from = transform(corners(store.view_size), np.linalg.inv(view.H_image_to_view))
        places = " ".join(f"({x:.1f}, {y:.1f})" for x, y in cut_from)
        lines.append(f"  view {index}: {len(view.records):4d} keypoints, cut from {places}")
    return lines


def _find(store: Store, image: str) -> int:
    if image in store.images:
        return store.images.index(image)
    if image.isdigit() and int(image) < len(store):
        return int(image)
    near = next((name for name in store.images if image in name), None)
    hint = f"; did you mean {near}?" if near else f"; it has {len(store)} images"
    raise RequestError(f"--image {image}: not in {store.path}{hint}")


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
