"""The speed table of this machine: `python -m pipeline.benchmark keypoints`.

Figures are only comparable within one run: the ways compared take turns over the same work.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from pipeline import errors, params
from pipeline.errors import RequestError
from pipeline.images.manifest import write_atomic
from pipeline.images.sources import open_manifest


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.benchmark", description=__doc__.split("\n")[0])
    parser.add_argument("--params", default="params.yaml", help="file with the sections that are measured")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    commands = parser.add_subparsers(dest="command", required=True)
    keypoints = commands.add_parser(
        "keypoints", help="the keypoint stage against bare OpenCV and a plain pool"
    )
    keypoints.add_argument("--images", type=Path, default=Path("data/images"), help="folder `fetch` wrote")
    keypoints.add_argument("--count", type=int, default=60, help="training images to use")
    keypoints.add_argument("--rounds", type=int, default=3, help="the best of so many is told")
    keypoints.add_argument("--workers", type=int, default=0, help="processes; 0: one per core")
    keypoints.set_defaults(run=_keypoints)
    store = commands.add_parser("store", help="random access to the keypoint store against a bare map")
    store.add_argument(
        "--keypoints", type=Path, default=Path("data/keypoints/train"), help="folder of a store"
    )
    store.set_defaults(run=_store)
    options = parser.parse_args(argv)
    rows = options.run(options)
    print("\n".join(_table(rows)))
    if options.json:
        write_atomic(options.json, json.dumps(rows, indent=1) + "\n")
    return 0


def _keypoints(options: argparse.Namespace) -> List[Dict[str, Any]]:
    from pipeline.extraction.benchmark import keypoint_rows
    from pipeline.extraction.pool import cores

    if options.count < 1 or options.rounds < 1 or options.workers < 0:
        raise RequestError("--count and --rounds must be 1 or more, --workers 0 or more")
    settings = params.load("keypoints", options.params)
    images = open_manifest(options.images)
    entries = images.entries("train")[: options.count]
    if not entries:
        raise RequestError(f"{options.images}: no training images")
    return keypoint_rows(images, entries, settings, options.workers or cores(), options.rounds)


def _store(options: argparse.Namespace) -> List[Dict[str, Any]]:
    from pipeline.features.access import store_rows

    return store_rows(options.keypoints)


def _table(rows: Sequence[Dict[str, Any]]) -> List[str]:
    """Columns as wide as their widest cell."""
    names = list(rows[0])
    cells = [names] + [[str(row[name]) for name in names] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        )
        for line in cells
    ]


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
