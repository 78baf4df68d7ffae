"""The table: its groups of rows; runs, prints and writes them."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import platform
import re
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import torch

from benchmarks import row
from benchmarks.row import Row, Setting
from pipeline.errors import RequestError
from pipeline.files import write_atomic

WITHOUT_NETWORK = (
    "sinkhorn/", "keypoints/", "store/", "batches/", "memory/Sinkhorn", "decoders/",
    "loader/plain loader alone", "loader/synthetic loader alone",
)  # fmt: skip


def groups() -> Dict[str, Callable[[Setting], Iterator[Row]]]:
    """Groups of rows by name, in the order of the table."""
    from benchmarks import (
        evaluation_rows,
        gpu_rows,
        group_rows,
        loader_rows,
        memory_rows,
        mode_rows,
        model_rows,
        parity_rows,
        peer_rows,
        stage_rows,
        training_rows,
    )

    return {
        "sinkhorn": model_rows.transport,
        "step": model_rows.against_plain,
        "latency": model_rows.latency,
        "precision": model_rows.precisions,
        "files": stage_rows.files,
        "aligned": stage_rows.aligned,
        "filled": stage_rows.filled,
        "peer": peer_rows.peer,
        "modes": mode_rows.training,
        "decoders": mode_rows.decoders,
        "processes": group_rows.groups,
        "loader": training_rows.loader,
        "batches": loader_rows.batches,
        "memory": memory_rows.peaks,
        "parity": parity_rows.parity,
        "batched": evaluation_rows.batched,
        "evaluation": evaluation_rows.evaluation,
        "keypoints": stage_rows.keypoints,
        "store": stage_rows.store,
        "grid": model_rows.grid,
        "gpu": gpu_rows.gpu,
    }


def chosen(only: str) -> Dict[str, Callable[[Setting], Iterator[Row]]]:
    """The groups named in `only`, separated by commas; all if it is empty."""
    known = groups()
    names = [name for name in only.split(",") if name]
    for name in names:
        if name not in known:
            raise RequestError(f"--only {name}: no such group of rows; there are {', '.join(known)}")
    return {name: known[name] for name in (names or known)}


def run(
    setting: Setting, only: str, report: Callable[[str], None], kept: Callable[[str, List[Row]], object]
) -> List[Row]:
    """All rows; each is reported as soon as it is measured. A group that fails costs only its own rows.

    kept: called after each group with its name and all rows so far.
    """
    rows: List[Row] = []

    def add(name: str, made: Callable[[], Iterator[Row]]) -> None:
        for each in row.contained(name, name, made):
            rows.append(_with_dim(_of_device(each, setting.device), setting.config.dim))
            report(line(rows[-1]))

    for name, group in chosen(only).items():
        add(name, functools.partial(group, setting))
        kept(name, rows)
    return rows


def _of_device(each: Row, device: torch.device) -> Row:
    """The row without processor seconds on a GPU, where those of the host say nothing."""
    return each if device.type == "cpu" else dataclasses.replace(each, ratio_cpu=None)


def _with_dim(each: Row, dim: int) -> Row:
    """The row with D of its network: the one in its name, its group's, or the setting's."""
    if each.skipped or f"{each.group}/{each.what}".startswith(WITHOUT_NETWORK):
        return dataclasses.replace(each, dim=None)
    named = re.search(r"D = (\d+)", each.what)
    return dataclasses.replace(each, dim=int(named[1]) if named else each.dim or dim)


def line(each: Row) -> str:
    """A row of the printed table."""
    name = f"{each.group:10s} {each.what:62s}"
    if each.skipped:
        return f"{name} SKIP       {each.skipped}"
    value = "" if each.value is None else f"{each.value:10.4g} {each.unit}"
    value += f" [{each.spread.low:.4g}, {each.spread.high:.4g}]" if each.spread else ""
    value += f"  D={each.dim}" if each.dim else ""
    ratio = "" if each.ratio is None else f"  {each.ratio}"
    cpu = "" if each.ratio_cpu is None else f" (cpu {each.ratio_cpu})"
    target = f"  target {_goal(each)}: {each.met}" if each.met else ""
    target += f" (cpu {each.met_cpu})" if each.met_cpu else ""
    against = f"  against {each.against}" if each.against else ""
    return f"{name} {value}{ratio}{cpu}{target}{against}" + (f"  {each.note}" if each.note else "")


def _goal(each: Row) -> str:
    return f"{each.target:g}" if each.at_most is None else f"at most {each.at_most:g}"


def machine(setting: Setting) -> Dict[str, Any]:
    """The machine and the network of the measurements."""
    cpu = setting.device.type == "cpu"  # for a GPU the rate is assumed, not measured
    rate = {"matrix product GFLOP/s": round(setting.rate / 1e9, 1)} if cpu else {}
    return {
        "device": _processor() if cpu else torch.cuda.get_device_name(setting.device),
        "load": row.load(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "network": setting.config.to_dict(),
        **rate,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(text.split(":")[1].strip() for text in file if text.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write(rows: Sequence[Row], about: Dict[str, Any], folder: Path) -> List[Path]:
    """Write table.json and table.csv atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    flat = [each.flat() for each in rows]
    write_atomic(folder / "table.json", json.dumps({"machine": about, "rows": flat}, indent=1) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Row("", "").flat()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write_atomic(folder / "table.csv", text.getvalue())
    return [folder / "table.json", folder / "table.csv"]


def require_free(folder: Path, given: bool) -> None:
    """Raise RequestError if a given folder holds a table, which the new one would replace."""
    if given and (folder / "table.json").exists():
        raise RequestError(f"--out {folder}: holds a table; name another folder, or add --replace")


def chart(rows: Sequence[Row], folder: Path) -> Optional[Path]:
    """Draw modes.png: a bar with the speed-up for each mode and decoder that ran; None without any."""
    units = ("pairs/s", "images/s")
    found = {
        unit: [each for each in rows if each.group in ("modes", "decoders") and each.unit == unit] for unit in units
    }
    if not any(found.values()):
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.35 * sum(map(len, found.values()))), layout="constrained")
    shown = {unit: each for unit, each in found.items() if each}
    places = figure.subplots(len(shown), squeeze=False, gridspec_kw={"height_ratios": list(map(len, shown.values()))})
    for axes, (unit, ran) in zip(places[:, 0], shown.items()):
        bars = axes.barh([each.what for each in ran], [each.value for each in ran], color="#0a7d4f")
        axes.bar_label(bars, [f" {each.ratio.value:.2f}x" if each.ratio else "" for each in ran])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(unit)
    figure.savefig(folder / "modes.png", dpi=110, metadata={"Software": None})
    return folder / "modes.png"


def track(rows: Sequence[Row], about: Dict[str, Any], folder: Path, files: Sequence[Path]) -> None:
    """Log the table as a run in MLflow."""
    from pipeline import tracking

    metrics = {name: value for each in rows for name, value in _metrics(each).items()}
    with tracking.open_run(folder, {"benchmark": about}, {"kind": "benchmark"}, system_metrics=False) as run:
        run.log(metrics, 0)
        for file in files:
            run.artifact(file, "benchmark")


def _metrics(each: Row) -> Dict[str, float]:
    """The value, and the ratio with its interval, by their names in MLflow."""
    key, flat = _key(each), each.flat()
    columns = {"value": "", "ratio": " ratio", "ratio_low": " ratio low", "ratio_high": " ratio high"}
    return {key + name: flat[column] for column, name in columns.items() if flat[column] is not None}


def _key(each: Row) -> str:
    """A name with the letters that MLflow allows in a metric's name."""
    text = f"{each.group}/{each.what}"
    return "".join(c if c.isalnum() or c in "/_-. " else " " for c in text)
