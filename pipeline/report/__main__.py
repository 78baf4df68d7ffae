"""Print the comparison of the last evaluation and where to look next."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from pathlib import Path
from typing import List, Optional

from pipeline import errors
from pipeline.errors import RequestError, in_image, typed
from pipeline.files import read_json
from pipeline.report import document, page, summary, tables


def fresh_page(folder: Path) -> Optional[Path]:
    """The page of an evaluation, rendered again where it is older than report.json; None without
    either.
    """
    html = folder / page.PAGE
    content = folder / document.JSON
    if content.is_file() and not (
        html.is_file() and html.stat().st_mtime >= content.stat().st_mtime
    ):
        return page.write(folder, folder.parent / "train" / "curves")
    return html if html.is_file() else None


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
        about = read_json(
            model.with_suffix(".json"), "no description of the model; run `dvc repro export`"
        )
        name = about["model"].get("extractor", "sift")  # code, which runs only if a person names it
        allowed = "" if name == "sift" else f" --extractor {name}"
        lines.append(
            f"  use it    {match} A.jpg B.jpg --model models/superglue.safetensors{allowed}"
        )
    return lines


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.report", description=__doc__)
    parser.add_argument(
        "--evaluation", type=Path, default=Path("reports/evaluate"), help="folder with metrics.json"
    )
    parser.add_argument(
        "--model", type=Path, default=Path("models/superglue.safetensors"), help="exported model"
    )
    parser.add_argument(
        "--open", action="store_true", help="open the page in a browser, where there is one"
    )
    args = parser.parse_args(argv)
    path = args.evaluation / "metrics.json"
    run = f"no evaluation here yet; run `{typed('repro')}` or `python -m pipeline.evaluate`"
    metrics = read_json(path, run)
    if not tables.matchers_in(metrics):
        raise RequestError(
            f"{path}: contains no matcher's metrics; run `python -m pipeline.evaluate` again"
        )
    content = (
        document.load(args.evaluation) if (args.evaluation / document.JSON).is_file() else None
    )
    if content is not None and content.differences:
        print("\n".join([*summary.verdict(content), ""]))
    print(f"Comparison on held-out pairs ({path})\n")
    print("\n".join([tables.comparison(metrics), *tables.negative_pairs(metrics)]))
    if content is not None:
        print("\n".join(["", content.title, *content.notes]))
    html = fresh_page(args.evaluation)
    print("\nWhere to look next")
    print("\n".join(next_steps(args.evaluation, args.model)))
    screen = (
        sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    if args.open and html is not None and not (screen and webbrowser.open(html.resolve().as_uri())):
        print(f"\nno browser here; open {html.resolve()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
