"""A page above the pages of several evaluations: the comparison of each, with a link to the rest of it."""

from __future__ import annotations

from html import escape
from typing import Mapping

from pipeline.report import page
from pipeline.report.document import document, paragraphs


def render(title: str, contents: Mapping[str, page.Content]) -> str:
    """HTML text. contents: by the name of the folder that holds the page of each."""
    sections = [
        f'<section><h2><a href="{escape(name)}/index.html">{escape(name)}</a></h2>\n'
        f"{paragraphs([content.title, *content.notes])}{page.comparison(content)}</section>"
        for name, content in contents.items()
    ]
    return document(title, "\n".join(sections))
