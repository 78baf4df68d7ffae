"""The speed table of this machine, each row within a budget of time and memory: `python -m pipeline.benchmark`.

Compare numbers within one run only: there, the compared variants alternate on the same work. A subcommand measures one
stage in more detail.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from pipeline import errors
from pipeline.errors import RequestError
from pipeline.files import write_atomic
from pipeline.image_sets.sources import open_manifest
from pipeline.parameters import params

OUT = Path("reports/benchmark")


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.benchmark", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--params", type=Path, default=Path("params.yaml"), help="file with the sections that are measured")
    add("--json", type=Path, help="also write the rows of a subcommand to this file")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dim", type=int, default=128, help="D, width of the network")
    add("--iterations", type=int, default=100, help="T, Sinkhorn iterations")
    add("--seconds", type=float, default=5.0, help="time for a row; rows that need more are skipped")
    add("--rounds", type=int, default=7, help="maximum number of rounds of a comparison")
    add("--only", default="", help="groups of rows, separated by commas; --out then holds only these")
    add("--fetched", type=Path, default=Path("data/images"), help="folder of photographs that `fetch` wrote")
    add("--model", type=Path, help="trained weights for the rows of evaluation; default: untrained")
    add("--out", type=Path, help=f"folder of table.json, .csv and modes.png; default: {OUT}, which is replaced")
    add("--replace", action="store_true", help="replace the table in the folder that --out names")
    add("--no-tracking", action="store_true", help="keep the table out of MLflow")
    commands = parser.add_subparsers(dest="command")
    parser.set_defaults(run=None)
    keypoints = commands.add_parser("keypoints", help="the keypoint stage against bare OpenCV and a plain pool")
    keypoints.add_argument("--images", type=Path, default=Path("data/images"), help="folder `fetch` wrote")
    keypoints.add_argument("--count", type=int, default=60, help="training images to use")
    keypoints.add_argument("--size", default="", help="of the views, such as 640x480; default: that of --params")
    keypoints.add_argument("--rounds", type=int, default=3, help="times that every way is measured")
    keypoints.add_argument("--workers", type=int, default=0, help="processes; 0: one per core")
    keypoints.set_defaults(run=_keypoints)
    store = commands.add_parser("store", help="random access to the keypoint store against a bare map")
    store.add_argument("--keypoints", type=Path, help="folder of a store; default: made up, 512 keypoints a view")
    store.set_defaults(run=_store)
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    options = parse(argv)
    if options.run is None:
        return _whole_table(options)
    rows = options.run(options)
    print("\n".join(_table(rows)))
    if options.json:
        write_atomic(options.json, json.dumps(rows, indent=1) + "\n")
    return 0


def _whole_table(options: argparse.Namespace) -> int:
    from benchmarks import row, table
    from superglue_sift.network.superglue import SuperGlueConfig
    from superglue_sift.weights import choose_device

    if options.seconds <= 0 or options.rounds < 2:
        raise RequestError("--seconds must be above 0, --rounds 2 or more")
    if options.dim % 4 or options.dim < 8 or options.iterations < 1:
        raise RequestError("--dim must be a multiple of 4 from 8 on, --iterations 1 or more")
    table.chosen(options.only)
    table.require_free(options.out or OUT, options.out is not None and not options.replace)
    options.out = options.out or OUT
    config = SuperGlueConfig(dim=options.dim, sinkhorn_iterations=options.iterations)
    setting = row.setting_for(
        choose_device(options.device),
        config,
        rounds=options.rounds,
        seconds=options.seconds,
        images=options.fetched,
        params=options.params,
        weights=options.model,
    )
    about = table.machine(setting)
    print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    done = about["groups"] = {}  # with their seconds
    started = time.monotonic()

    def kept(group: str, rows: List[Any]) -> None:
        done[group] = round(time.monotonic() - started - sum(done.values()), 1)
        table.write(rows, about, options.out)

    rows = table.run(setting, options.only, lambda text: print(text, flush=True), kept)
    about["load at the end"] = row.load()
    files = table.write(rows, about, options.out)
    drawn = table.chart(rows, options.out)
    files += [drawn] if drawn else []
    if not options.no_tracking:
        table.track(rows, about, options.out, files)
    print(f"{files[0]}, {files[1]}; {about['load at the end']}")
    return 0


def _keypoints(options: argparse.Namespace) -> List[Dict[str, Any]]:
    from benchmarks.keypoint_rows import keypoint_rows
    from pipeline.keypoints.pool import cores

    if options.count < 1 or options.rounds < 1 or options.workers < 0:
        raise RequestError("--count and --rounds must be 1 or more, --workers 0 or more")
    settings = _sized(params.load_all(options.params), options.size)
    images = open_manifest(options.images)
    entries = images.entries("train")[: options.count]
    if not entries:
        raise RequestError(f"{options.images}: no training images")
    return keypoint_rows(images, entries, settings, options.workers or cores(), options.rounds)


def _sized(sections: Dict[str, Any], size: str) -> Any:
    """The section `keypoints` with views of another size."""
    if not size:
        return sections["keypoints"]
    width, _, height = size.partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise RequestError(f"--size {size}: must be WIDTHxHEIGHT in pixels, such as 640x480")
    changed = {**sections["keypoints"].model_dump(), "width": int(width), "height": int(height)}
    return params.parse({"keypoints": changed}, "--size")["keypoints"]


def _store(options: argparse.Namespace) -> List[Dict[str, Any]]:
    from benchmarks.store_rows import store_rows

    return store_rows(options.keypoints)


def _table(rows: Sequence[Dict[str, Any]]) -> List[str]:
    """Columns as wide as their widest cell; a ratio and its interval are one."""
    shown = [_shown(row) for row in rows]
    names = list(shown[0])
    cells = [names] + [[row[name] for name in names] for row in shown]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        )
        for line in cells
    ]


def _shown(row: Dict[str, Any]) -> Dict[str, str]:
    """The cells of a row: `x`, `x_low` and `x_high` become `x [low, high]`."""
    shown = {}
    for name, value in row.items():
        if f"{name}_low" in row and value != "":
            value = f"{value:.2f} [{row[name + '_low']:.2f}, {row[name + '_high']:.2f}]"
        if not name.endswith(("_low", "_high")):
            shown[name] = str(value)
    return shown


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
