"""Print the last evaluation and where to look next."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from pathlib import Path
from typing import List, Optional

from pipeline import errors
from pipeline.errors import RequestError, in_image, spell_command
from pipeline.report.document import PAGE, TEXT


def next_steps(folder: Path, model: Path) -> List[str]:
    """Lines on where to look next, for files that exist."""
    steps = (
        ("pairs", folder / "pairs.csv", "every pair and matcher, one line each"),
        ("pictures", folder / "pictures", "best, median and worst pairs; wrong matches red"),
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


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.report", description=__doc__)
    add = parser.add_argument
    add("--evaluation", type=Path, default=Path("reports/evaluate"), help="its folder")
    model = Path("models/superglue.safetensors")
    add("--model", type=Path, default=model, help="exported model")
    add("--open", action="store_true", help="open the page in a browser, where there is one")
    args = parser.parse_args(argv)
    html = args.evaluation / PAGE
    try:
        print((args.evaluation / TEXT).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise RequestError(
            f"{args.evaluation / TEXT}: no evaluation here yet; `make repro` makes one"
        ) from None
    print("\n".join(["Where to look next", *next_steps(args.evaluation, args.model)]))
    screen = (
        sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    if args.open and not (screen and webbrowser.open(html.resolve().as_uri())):
        print(f"\nno browser here; open {html.resolve()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
