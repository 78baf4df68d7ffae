"""What the pages are made of: one HTML text that needs nothing beside it, tables that scroll, plain paragraphs."""

from __future__ import annotations

from html import escape
from typing import Mapping, Sequence

STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:72rem;padding:1rem}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2rem 0 .5rem;border-bottom:1px solid var(--line)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{white-space:normal;vertical-align:bottom}tr.ours{font-weight:600;background:var(--soft)}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:Canvas}
@media(max-width:40rem){th:first-child,td:first-child{white-space:normal;min-width:6.5rem;padding-left:0}}
small{font-weight:400;opacity:.75}.better{color:#0a7d4f}.worse{color:#c4453a}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
figure{margin:0}figcaption{font-size:.9rem}svg{width:100%;height:auto}svg text{font-size:12px;fill:currentColor}
.grid{stroke:var(--line)}.diagonal{stroke:currentColor;stroke-dasharray:4 4;opacity:.5}
.legend{margin:.2rem 0;font-size:.85rem;display:flex;flex-wrap:wrap;gap:.2rem 1rem}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
img{width:100%;height:auto;border-radius:4px}.pair{margin:1rem 0}
dl{font-size:.9rem;margin:0}dt{font-weight:600}dd{margin:0 0 .3rem;overflow-wrap:anywhere}
dd dl{margin-left:1rem;display:grid;grid-template-columns:max-content 1fr;gap:0 1rem}dd dt{font-weight:400;opacity:.75}
"""


def document(title: str, body: str) -> str:
    """A whole page. body: HTML."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">\n'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def paragraphs(lines: Sequence[str]) -> str:
    """HTML paragraphs of plain text."""
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], marks: Sequence[str] = ()) -> str:
    """An HTML table in a box that scrolls sideways; cells are HTML. marks: a class for each row."""
    marks = list(marks) or [""] * len(rows)
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f'<tr class="{mark}">' + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
        for mark, row in zip(marks, rows)
    )
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>\n'


def definitions(values: Mapping[str, object]) -> str:
    """Names and values, HTML; a value that holds names and values itself stands indented below its name."""
    items = (
        f"<dt>{escape(str(name))}</dt><dd>"
        + (definitions(value) if isinstance(value, Mapping) else escape(str(value)))
        + "</dd>"
        for name, value in values.items()
    )
    return f"<dl>{''.join(items)}</dl>"
