"""Print the comparison of the last evaluation and where to look next."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from pathlib import Path
from typing import List, Optional

from pipeline import errors
from pipeline.errors import in_image, typed
from pipeline.files import read_json
from pipeline.report import document, page, summary, tables


def write_page(folder: Path) -> Path:
    """The page of an evaluation, rendered again where it is missing or older than report.json."""
    html = folder / page.PAGE
    if html.is_file() and html.stat().st_mtime >= (folder / document.JSON).stat().st_mtime:
        return html
    return page.write(folder, folder.parent / "train" / "curves")


def next_steps(folder: Path, model: Path) -> List[str]:
    """Lines on where to look next, for files that exist."""
    steps = (
        ("pairs", folder / "pairs.csv", "every pair and matcher, one line each"),
        (
            "pictures",
            folder / "pictures",
            "best, median and worst, and where ours gains most; wrong matches red",
        ),
        ("report", folder / "index.html", "all of it on one page, for a browser"),
    )
    lines = [f"  {name:<9} {path}  ({text})" for name, path, text in steps if path.exists()]
    port = "with -p 127.0.0.1:5000:5000, " if in_image() else ""
    lines.append(
        f"  runs      {typed('ui')}  ({port}curves, parameters, pictures and models at"
        " http://127.0.0.1:5000)"
    )
    if model.exists():
        match = typed("match") if in_image() else ".venv/bin/python -m pipeline.match"
        missing = "no description of the model; run `dvc repro export`"
        about = read_json(model.with_suffix(".json"), missing)
        name = about["model"].get("extractor", "sift")  # code, which runs only if a person names it
        allowed = "" if name == "sift" else f" --extractor {name}"
        lines.append(
            f"  use it    {match} A.jpg B.jpg --model models/superglue.safetensors{allowed}"
        )
    return lines


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.report", description=__doc__)
    add = parser.add_argument
    add("--evaluation", type=Path, default=Path("reports/evaluate"), help="folder with report.json")
    model = Path("models/superglue.safetensors")
    add("--model", type=Path, default=model, help="exported model")
    add("--open", action="store_true", help="open the page in a browser, where there is one")
    args = parser.parse_args(argv)
    content = document.load(args.evaluation)
    html = write_page(args.evaluation)
    sections = [
        "\n".join(summary.verdict(content)),
        f"Comparison on held-out pairs ({args.evaluation})",
        tables.comparison(content.table),
        tables.negative_pairs(content.table),
        "\n".join([content.title, *content.notes]),
        "\n".join(["Where to look next", *next_steps(args.evaluation, args.model)]),
    ]
    print("\n\n".join(filter(None, sections)))
    screen = (
        sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    if args.open and not (screen and webbrowser.open(html.resolve().as_uri())):
        print(f"\nno browser here; open {html.resolve()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
