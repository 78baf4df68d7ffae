"""Print the last evaluation and where to look next, or compare experiments.

python -m pipeline.report                   # the last evaluation
python -m pipeline.report EXP1 EXP2 ...     # metrics of DVC experiments, their mean and range
python -m pipeline.report HEAD workspace    # metrics of the last commit and of this folder
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import pandas as pd
from ruamel.yaml import YAML

from pipeline import errors
from pipeline.errors import RequestError, in_image, spell_command

TEXT = "report.txt"  # name of a file of an evaluation
PAGE = "index.html"
METRICS = ("reports/train/metrics.json", "reports/evaluate/summary.json")
# What two evaluations must have in common, by the stage `evaluate` in dvc.lock
PHOTOGRAPHS = "data/images"
PROTOCOL = ("views", "evaluate")


def next_steps(folder: Path, model: Path) -> List[str]:
    """Return lines on where to look next, for files that exist."""
    steps = (
        ("pairs", folder / "pairs.csv", "every pair and matcher, one line each"),
        ("report", folder / PAGE, "all of it on one page, for a browser"),
    )
    lines = [f"  {name:<9} {path}  ({text})" for name, path, text in steps if path.exists()]
    port = "with -p 127.0.0.1:5000:5000, " if in_image() else ""
    where = f"({port}all runs, curves and models at http://127.0.0.1:5000)"
    lines.append(f"  runs      {spell_command('ui')}  {where}")
    if model.exists():
        match = spell_command("match") if in_image() else ".venv/bin/python -m pipeline.match"
        lines.append(f"  use it    {match} A.jpg B.jpg --model {model}")
    return lines


def measured_on(lock: str) -> Dict[str, Any]:
    """Return the photographs and the protocol of the evaluation in the text of a dvc.lock."""
    tree = YAML(typ="safe", pure=True).load(lock) or {}
    stage = tree.get("stages", {}).get("evaluate", {})
    found = {each["path"]: each.get("md5") for each in stage.get("deps", [])}
    params = stage.get("params", {}).get("params.yaml", {})
    values = {key: value for key, value in params.items() if key.split(".")[0] in PROTOCOL}
    return {"photographs": found.get(PHOTOGRAPHS), "protocol": values}


def what_differs(locks: Dict[str, str]) -> List[str]:
    """Return a line for each evaluation with other photographs or another protocol than the
    first."""
    first, *others = locks
    lines = []
    for name in others:
        known = measured_on(locks[first])
        own = measured_on(locks[name])
        kinds = [kind for kind in known if known[kind] != own[kind]]
        if kinds:
            words = f"{first} and {name} have other {' and another '.join(kinds)}"
            lines.append(f"{words}: their metrics cannot be compared")
    return lines


def compare(names: Sequence[str]) -> str:
    """Return the metrics of experiments or commits side by side, their mean and range.

    Lines below the table say what differs. The name `workspace` stands for this folder. Raises
    RequestError for an unknown name.
    """
    import dvc.api
    from dvc.exceptions import DvcException

    columns = {}
    locks = {}
    for name in dict.fromkeys(names):
        rev = None if name == "workspace" else name
        try:
            columns[name] = pd.Series(dvc.api.metrics_show(*METRICS, rev=rev), dtype=object)
            locks[name] = dvc.api.read("dvc.lock", rev=rev)
        except DvcException as error:
            reason = str(error).partition("\n")[0]
            raise RequestError(f"{name}: no experiment or commit with metrics: {reason}") from None
    # only numbers have a mean and a range
    table = pd.DataFrame(columns)
    values = table[table.map(lambda value: isinstance(value, (int, float))).all(axis=1)]
    values = values.astype(float)
    table = values.round(2).assign(
        mean=values.mean(axis=1).round(2), range=(values.max(axis=1) - values.min(axis=1)).round(2)
    )
    return "\n".join([table.to_string(), *what_differs(locks)])


def since_commit() -> List[str]:
    """Say what differs from the last commit, with which `dvc metrics diff` compares."""
    lock = Path("dvc.lock")
    shown = subprocess.run(["git", "show", "HEAD:./dvc.lock"], capture_output=True, text=True)
    if shown.returncode or not lock.is_file():
        return []
    here = lock.read_text(encoding="utf-8")
    return what_differs({"the last commit": shown.stdout, "this folder": here})


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.report", description=str(__doc__).splitlines()[0]
    )
    add = parser.add_argument
    names = "DVC experiments or commits to compare, or `workspace`"
    add("experiments", nargs="*", metavar="EXP", help=names)
    add("--evaluation", type=Path, default=Path("reports/evaluate"), help="its folder")
    model = Path("models/superglue.safetensors")
    add("--model", type=Path, default=model, help="exported model")
    add("--open", action="store_true", help="open the page in a browser, where there is one")
    args = parser.parse_args(argv)
    if args.experiments:
        print(compare(args.experiments))
        return 0
    # the last evaluation, and what has changed since the last commit
    html = args.evaluation / PAGE
    try:
        print((args.evaluation / TEXT).read_text(encoding="utf-8"), flush=True)
    except (OSError, UnicodeDecodeError):
        raise RequestError(
            f"{args.evaluation / TEXT}: no evaluation here yet; `make repro` makes one"
        ) from None
    print("\n".join([*since_commit(), "Where to look next"]))
    print("\n".join(next_steps(args.evaluation, args.model)))
    # a browser needs a screen
    screen = (
        sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    if args.open and not (screen and webbrowser.open(html.resolve().as_uri())):
        print(f"\nno browser here; open {html.resolve()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
