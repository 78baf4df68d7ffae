"""Print the last evaluation and where to look next, or compare experiments.

python -m pipeline.report                   # the last evaluation
python -m pipeline.report EXP1 EXP2 ...     # metrics of DVC experiments, their mean and range
python -m pipeline.report HEAD workspace    # the last commit, this folder, and the change
"""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import pandas as pd
from ruamel.yaml import YAML

from pipeline import errors
from pipeline.errors import RequestError, is_in_container_image, spell_command

EVALUATION = Path("reports/evaluate")
MODEL = Path("models/superglue.safetensors")
# Names of files of an evaluation
SUMMARY = "summary.txt"
TEXT = "report.txt"
PAGE = "index.html"
METRICS = ("reports/train/metrics.json", "reports/evaluate/summary.json")
# Two evaluations must have these in common, as the stage `evaluate` of dvc.lock says.
PHOTOGRAPHS = "data/images"
PROTOCOL = ("views", "evaluate")


def next_steps() -> List[str]:
    """Return lines that say where to look next."""
    lines = [
        "Where to look next",
        f"  tables    {EVALUATION / TEXT}  (also AUC by estimator, and refined matches)",
        f"  page      {EVALUATION / PAGE}  (all of it, with charts and pairs, for a browser)",
        f"  pairs     {EVALUATION / 'pairs.csv'}  (every pair and matcher, one line each)",
    ]
    port = "with -p 127.0.0.1:5000:5000, " if is_in_container_image() else ""
    where = f"({port}all runs, curves and models at http://127.0.0.1:5000)"
    lines.append(f"  runs      {spell_command('ui')}  {where}")
    if MODEL.exists():
        match = (
            spell_command("match")
            if is_in_container_image()
            else ".venv/bin/python -m superglue_sift"
        )
        lines.append(f"  use it    {match} A.jpg B.jpg --model {MODEL}")
    return lines


def measured_on(lock: str) -> Dict[str, Any]:
    """Return the photographs and the protocol of the evaluation in the text of a dvc.lock."""
    tree = YAML(typ="safe", pure=True).load(lock) or {}
    stage = tree.get("stages", {}).get("evaluate", {})
    # dvc.lock has the digest of the images, and the parameters with which the stage ran.
    photographs = [each.get("md5") for each in stage.get("deps", []) if each["path"] == PHOTOGRAPHS]
    params = stage.get("params", {}).get("params.yaml", {})
    protocol = {key: value for key, value in params.items() if key.split(".")[0] in PROTOCOL}
    return {"photographs": photographs, "protocol": protocol}


def what_differs(locks: Dict[str, str]) -> List[str]:
    """Return a line for each evaluation whose photographs or protocol differ from the first.

    `locks` has the text of each dvc.lock by the name of its commit.
    """
    lines = []
    first, *others = locks
    known = measured_on(locks[first])
    for name in others:
        own = measured_on(locks[name])
        kinds = " and another ".join(kind for kind in known if known[kind] != own[kind])
        if kinds:
            lines.append(f"{first} and {name} have other {kinds}: their metrics cannot be compared")
    return lines


def compare(names: Sequence[str]) -> str:
    """Return the metrics of experiments or commits side by side, and how they differ.

    Two have the change from the first to the second, with its sign. More have mean and range.
    Lines below the table say what cannot be compared. The name `workspace` stands for this folder.
    Raises RequestError for an unknown name.
    """
    import dvc.api
    from dvc.exceptions import DvcException

    columns = {}
    locks = {}
    for name in dict.fromkeys(names):
        rev = None if name == "workspace" else name
        try:
            # DVC reads both without checking out the commit.
            columns[name] = pd.Series(dvc.api.metrics_show(*METRICS, rev=rev), dtype=object)
            locks[name] = dvc.api.read("dvc.lock", rev=rev)
        except DvcException as error:
            reason = str(error).partition("\n")[0]
            raise RequestError(f"{name}: no experiment or commit with metrics: {reason}") from None
    # Only numbers have a change, a mean and a range.
    values = pd.DataFrame(columns).apply(pd.to_numeric, errors="coerce").dropna()
    table = values.round(2)
    if len(columns) == 2:
        before, after = values.columns
        change = (values[after] - values[before]).round(2) + 0.0  # no negative zero
        table["change"] = [f"{value:+.2f}" for value in change]
    elif len(columns) > 2:
        table["mean"] = values.mean(axis=1).round(2)
        table["range"] = (values.max(axis=1) - values.min(axis=1)).round(2)
    return "\n".join([table.to_string(), *what_differs(locks)])


def main(argv: Optional[List[str]] = None) -> int:
    parser = errors.make_parser("pipeline.report", __doc__)
    parser.add_argument(
        "experiments",
        nargs="*",
        metavar="EXP",
        help="DVC experiments or commits to compare, or `workspace`",
    )
    parser.add_argument(
        "--open", action="store_true", help="open the page in a browser, where there is one"
    )
    args = parser.parse_args(argv)
    if args.experiments:
        print(compare(args.experiments))
        return 0
    try:
        print((EVALUATION / SUMMARY).read_text(encoding="utf-8"), flush=True)
    except OSError:
        raise RequestError(
            f"{EVALUATION / SUMMARY}: no evaluation here yet; `make repro` makes one"
        ) from None
    print("\n".join(next_steps()))
    # A browser needs a screen.
    page = (EVALUATION / PAGE).resolve()
    screen = sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    if args.open and not (screen and webbrowser.open(page.as_uri())):
        print(f"\nno browser here; open {page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
