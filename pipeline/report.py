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
from pipeline.evaluate import PAGE, SUMMARY, TEXT

EVALUATION = Path("reports/evaluate")
MODEL = Path("models/superglue.safetensors")
METRICS = ("reports/train/metrics.json", "reports/evaluate/summary.json")
# Two evaluations must have these in common, as the stage `evaluate` of dvc.lock says.
PHOTOGRAPHS = "data/images"
PROTOCOL = ("views", "evaluate")


def list_next_steps() -> List[str]:
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
        program = ".venv/bin/superglue-match"
        match = spell_command("match") if is_in_container_image() else program
        lines.append(f"  use it    {match} A.jpg B.jpg --model {MODEL}")
    return lines


def read_evaluation_inputs(lock: str) -> Dict[str, Any]:
    """Return the digest of the photographs and the protocol of an evaluation.

    `lock` is the text of the dvc.lock that belongs to the evaluation.
    """
    tree = YAML(typ="safe", pure=True).load(lock) or {}
    stage = tree.get("stages", {}).get("evaluate", {})
    # dvc.lock has the digest of the images, and the parameters with which the stage ran.
    dependencies = stage.get("deps", [])
    photographs = [
        dependency.get("md5") for dependency in dependencies if dependency["path"] == PHOTOGRAPHS
    ]
    params = stage.get("params", {}).get("params.yaml", {})
    protocol = {key: value for key, value in params.items() if key.split(".")[0] in PROTOCOL}
    return {"photographs": photographs, "protocol": protocol}


def list_differences(locks: Dict[str, str]) -> List[str]:
    """Return a line for each evaluation whose photographs or protocol differ from the first.

    `locks` has the text of each dvc.lock by the name of its commit.
    """
    lines = []
    first, *later_names = locks
    first_inputs = read_evaluation_inputs(locks[first])
    for name in later_names:
        inputs = read_evaluation_inputs(locks[name])
        kinds = " and another ".join(
            kind for kind in first_inputs if first_inputs[kind] != inputs[kind]
        )
        if kinds:
            lines.append(f"{first} and {name} have other {kinds}: their metrics cannot be compared")
    return lines


def compare_experiments(names: Sequence[str]) -> str:
    """Return a table of the metrics of experiments or commits, and how they differ.

    The table of two has a column for the change from the first to the second, with its sign. That
    of more has columns for mean and range. Lines below the table say what cannot be compared.

    Args:
        names: DVC experiments or commits. The name `workspace` stands for this folder.

    Raises:
        RequestError: If a name is unknown or has no metrics.
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
        change = (values[after] - values[before]).round(2) + 0.0  # No negative zero
        table["change"] = [f"{value:+.2f}" for value in change]
    elif len(columns) > 2:
        table["mean"] = values.mean(axis=1).round(2)
        table["range"] = (values.max(axis=1) - values.min(axis=1)).round(2)
    return "\n".join([table.to_string(), *list_differences(locks)])


def main(argv: Optional[List[str]] = None) -> int:
    """Print the last evaluation, or the comparison of experiments. Return the exit code."""
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
        print(compare_experiments(args.experiments))
        return 0
    try:
        print((EVALUATION / SUMMARY).read_text(encoding="utf-8"), flush=True)
    except OSError:
        raise RequestError(
            f"{EVALUATION / SUMMARY}: no evaluation here yet; `make repro` makes one"
        ) from None
    print("\n".join(list_next_steps()))
    # A browser needs a screen.
    page = (EVALUATION / PAGE).resolve()
    has_screen = sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    if args.open and not (has_screen and webbrowser.open(page.as_uri())):
        print(f"\nno browser here; open {page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
