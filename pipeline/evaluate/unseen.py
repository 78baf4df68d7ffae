"""Leave out, or mark, held-out photographs that a compared model was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Sequence

from pipeline import trained_on
from pipeline.errors import RequestError
from pipeline.evaluate.matchers import OURS
from pipeline.fetch.dataset import Entry


class Choice(NamedTuple):
    """entries: to evaluate on; models: to compare, by name; lines: notes on what was left out and
    why.

    mark: to add to the name of the entries: the lines, where nothing was left out on request.
    """

    entries: List[Entry]
    models: Dict[str, Path]
    lines: List[str]
    mark: str = ""


def choose(entries: Sequence[Entry], models: Mapping[str, Path], keep: bool) -> Choice:
    """The entries that no model was trained on, since all rows of a table need the same pairs.

    models: files by name, ours first. A further model that was trained on all remaining entries is
    left out.
    keep: leave nothing out, and mark.

    Raises RequestError where ours was trained on all of them.
    """
    left = list(entries)
    compared = {}
    lines = []
    for name, file in models.items():
        seen = [entry.photograph for entry in left]
        title = "ours" if name == OURS else name
        places, line = trained_on.leave_out(file, seen, keep, title)
        if not places and name == OURS:
            raise RequestError(
                f"{file}: was trained on all of the {len(left)} held-out photographs; evaluate on"
                ' others, train from scratch (train.init_from: ""), or keep them with --keep-seen'
            )
        if not places:
            lines.append(f"SKIP {name}: trained on all of the {len(left)} photographs")
            continue
        lines += [line] if line else []
        left = [left[place] for place in places]
        compared[name] = file
    return Choice(left, compared, lines, "".join(f", {line}" for line in lines if keep))
