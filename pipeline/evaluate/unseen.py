"""Leave out, or mark, held-out photographs that a compared model was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Sequence

from pipeline.errors import RequestError
from pipeline.evaluate.matchers import OURS
from pipeline.image_sets.manifest import Entry
from pipeline.provenance import trained_on

NAMES = {OURS: "ours"}


class Choice(NamedTuple):
    """entries: to evaluate on; models: to compare, by name; lines: notes on what was left out and
    why.

    mark: to add to the name of the entries; "" where no compared model was trained on any.
    """

    entries: List[Entry]
    models: Dict[str, Path]
    lines: List[str]
    mark: str = ""


def choose(entries: Sequence[Entry], models: Mapping[str, Path], keep: bool = False) -> Choice:
    """The entries that no model was trained on, since all rows of a table need the same pairs.

    models: files by name, ours first. A further model that was trained on all remaining entries is
    left out.
    keep: leave nothing out, and mark.

    Raises RequestError where ours was trained on all of them.
    """
    left = list(entries)
    compared = {}
    lines = []
    marks = []
    for name, file in models.items():
        photographs = trained_on.read(file)
        title = NAMES.get(name, name)
        if photographs is None:
            lines.append(trained_on.unknown(file))
        seen = [entry for entry in left if entry.photograph in (photographs or ())]
        if seen and keep:
            marks.append(f"{len(seen)} of them from the training of {title}")
        elif len(seen) == len(left) and name == OURS:
            raise RequestError(
                f"{file}: was trained on all of the {len(left)} held-out photographs; evaluate on"
                ' others, train from scratch (train.init_from: ""), or keep them with --keep-seen'
            )
        elif seen and len(seen) == len(left):
            lines.append(f"SKIP {name}: trained on all of the {len(left)} photographs")
            continue
        elif seen:
            left = [entry for entry in left if entry not in seen]
            lines.append(
                f"{len(seen)} of {len(entries)} photographs left out: {title} was trained on them"
            )
        compared[name] = file
    return Choice(left, compared, lines, "".join(f", {mark}" for mark in marks))
