"""The table: which groups of rows there are, running them within their budgets, printing and writing them."""

from __future__ import annotations

import csv
import io
import json
import platform
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence

import torch

from pipeline.benchmarks import growth, planner, row
from pipeline.benchmarks.row import Row, Setting
from pipeline.errors import RequestError
from pipeline.files import write_atomic


def groups() -> Dict[str, Callable[[Setting], Iterator[Row]]]:
    """Groups of rows by name, in the order of the table."""
    from pipeline.benchmarks import (
        elastic_rows,
        evaluation_rows,
        gpu_rows,
        group_rows,
        growth_rows,
        memory_rows,
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
        "files": stage_rows.files,
        "peer": peer_rows.peer,
        "training": training_rows.modes,
        "processes": group_rows.groups,
        "elastic": elastic_rows.elastic,
        "loader": training_rows.loader,
        "memory": memory_rows.peaks,
        "parity": parity_rows.parity,
        "batched": evaluation_rows.batched,
        "evaluation": evaluation_rows.evaluation,
        "keypoints": stage_rows.keypoints,
        "store": stage_rows.store,
        "grid": model_rows.grid,
        "growth": growth_rows.growth,
        "gpu": gpu_rows.gpu,
    }


def chosen(only: str) -> Dict[str, Callable[[Setting], Iterator[Row]]]:
    """The groups named in `only`, separated by commas; all when it is empty."""
    known = groups()
    names = [name for name in only.split(",") if name]
    for name in names:
        if name not in known:
            raise RequestError(f"--only {name}: no such group of rows; there are {', '.join(known)}")
    return {name: known[name] for name in (names or known)}


def run(setting: Setting, only: str, told: Callable[[str], None]) -> List[Row]:
    """All rows; each is told as soon as it is known. A group that fails costs its own rows alone."""
    rows: List[Row] = []

    def add(found: Iterator[Row]) -> None:
        for each in found:
            rows.append(each)
            told(line(each))

    for name, group in chosen(only).items():
        try:
            add(group(setting))
        except RequestError as error:
            add(iter([Row(name, name, skipped=str(error))]))
        except (RuntimeError, OSError, ValueError) as error:
            add(iter([Row(name, name, skipped=f"failed: {str(error).splitlines()[0]}")]))
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
    add(growth.slopes(rows, setting.config))
    add(planner.plan(planner.measured(rows, setting.device.type == "cuda"), setting.config))
    return rows


def line(each: Row) -> str:
    """A row of the printed table."""
    name = f"{each.group:10s} {each.what:62s}"
    if each.skipped:
        return f"{name} SKIP       {each.skipped}"
    value = "" if each.value is None else f"{each.value:10.4g} {each.unit}"
    ratio = "" if each.ratio is None else f"  {each.ratio}"
    cpu = "" if each.ratio_cpu is None else f" (cpu {each.ratio_cpu})"
    target = "" if each.target is None else f"  target {each.target:g}: {each.met}"
    target += f" (cpu {each.met_cpu})" if each.met_cpu else ""
    against = f"  against {each.against}" if each.against else ""
    return f"{name} {value}{ratio}{cpu}{target}{against}" + (f"  {each.note}" if each.note else "")


def machine(setting: Setting) -> Dict[str, Any]:
    """What the figures hold for."""
    device = torch.cuda.get_device_name(setting.device) if setting.device.type == "cuda" else _processor()
    return {
        "device": device,
        "load": row.load(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "network": setting.config.to_dict(),
        "matrix product GFLOP/s": round(setting.rate / 1e9, 1),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(text.split(":")[1].strip() for text in file if text.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write(rows: Sequence[Row], about: Dict[str, Any], folder: Path) -> List[Path]:
    """table.json and table.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    flat = [each.flat() for each in rows]
    write_atomic(folder / "table.json", json.dumps({"machine": about, "rows": flat}, indent=1) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write_atomic(folder / "table.csv", text.getvalue())
    return [folder / "table.json", folder / "table.csv"]


def track(rows: Sequence[Row], about: Dict[str, Any], folder: Path, files: Sequence[Path]) -> None:
    """The same as a run in MLflow."""
    from pipeline.runtime import tracking

    figures = {_key(each): each.value for each in rows if each.value is not None}
    with tracking.open_run(folder, {"benchmark": about}, {"kind": "benchmark"}, system_metrics=False) as run:
        run.log(figures, 0)
        for file in files:
            run.artifact(file, "benchmark")


def _key(each: Row) -> str:
    """Letters MLflow allows in a metric's name."""
    text = f"{each.group}/{each.what}"
    return "".join(c if c.isalnum() or c in "/_-. " else " " for c in text)
