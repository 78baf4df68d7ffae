"""Curves as CSV files that grow by one line a point: a point costs the same whether it is the first or the last."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import BinaryIO, Dict, List, Mapping, Optional, Sequence, Tuple

from pipeline.files import write_atomic


class CurveFile:
    """A CSV file with the column `step` and one column a figure, appended to.

    A training resumed at `last_step` keeps the points up to it; those after it, and the half line of a writer that
    was killed, are cut off before the first new point, so that the file ends as that of an uninterrupted run.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path, self.last_step = Path(path), last_step
        self._stream: Optional[BinaryIO] = None

    def append(self, step: int, point: Mapping[str, float]) -> None:
        """Add the point of `step`. Every point has the same figures. Raises OSError (a full disk)."""
        columns = ["step", *point]
        if self._stream is None:
            self._stream = self._open(columns)
        self._stream.write(_line([step, *(f"{value:.6g}" for value in point.values())]))
        self._stream.flush()

    def sync(self) -> None:
        """Bring all points to the disk, so that a checkpoint never outlives the points before it."""
        if self._stream is not None:
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file; a point after that opens it again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _open(self, columns: List[str]) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        header, length = self._kept()
        if header == columns:
            stream = open(self.path, "r+b")  # noqa: SIM115 (kept open from point to point)
            stream.seek(length)
            stream.truncate()
            return stream
        write_atomic(self.path, self._with_columns(columns, length if header else 0))
        return open(self.path, "ab")

    def _kept(self) -> Tuple[List[str], int]:
        """Columns of the file that is there, and how many of its bytes belong to points up to `last_step`."""
        if self.last_step <= 0 or not self.path.is_file():
            return [], 0
        with open(self.path, "rb") as stream:
            header = stream.readline()
            length = len(header)
            for line in stream:
                step = line.partition(b",")[0]
                if not line.endswith(b"\n") or not step.isdigit() or int(step) > self.last_step:
                    break
                length += len(line)
        return next(csv.reader([header.decode("utf-8", "replace").rstrip("\n")]), []), length

    def _with_columns(self, columns: List[str], length: int) -> bytes:
        """The kept points with other columns, empty where an older file had none of that name."""
        text = _line(columns)
        if length:
            with open(self.path, "rb") as stream:
                rows: List[Dict[str, str]] = list(csv.DictReader(io.StringIO(stream.read(length).decode())))
            text += b"".join(_line([row.get(name) or "" for name in columns]) for row in rows)
        return text


def _line(cells: Sequence[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
