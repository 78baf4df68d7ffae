"""Samples of CPU, memory, disk, network and GPU by MLflow's own monitors, for its System metrics page."""

from __future__ import annotations

import os
import threading
from typing import Any, Callable, Dict, List, Optional


class Sampler(threading.Thread):
    """Calls `log(metrics, step)` every `seconds` until stopped. What cannot be read is left out."""

    def __init__(
        self, log: Callable[[Dict[str, float], int], None], first_step: int = 0, seconds: Optional[float] = None
    ) -> None:
        super().__init__(name="system-metrics", daemon=True)
        self._log = log
        self._step = first_step
        self._seconds = interval() if seconds is None else seconds
        self._stopping = threading.Event()

    def run(self) -> None:
        monitors = open_monitors()
        while not self._stopping.wait(self._seconds):
            found = {f"system/{name}": value for each in monitors for name, value in sample(each).items()}
            self._log(found, self._step)
            self._step += 1

    def stop(self) -> None:
        self._stopping.set()
        self.join(2.0)


def interval() -> float:
    """Seconds between samples: MLflow's own variable, else 10."""
    try:
        return max(float(os.environ.get("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "10")), 0.1)
    except ValueError:
        return 10.0


def open_monitors() -> List[Any]:
    """MLflow's monitors of what this machine has; none without psutil."""
    try:
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    except ImportError:
        return []
    found: List[Any] = []
    for monitor in (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor):
        try:
            found.append(monitor())
        except Exception:  # no network, no GPU, no driver: each monitor raises a type of its own
            continue
    return found


def sample(monitor: Any) -> Dict[str, float]:
    """One sample of a monitor; {} where it cannot be read."""
    try:
        monitor.collect_metrics()
        found = dict(monitor.aggregate_metrics())
        monitor.clear_metrics()
        return found
    except Exception:  # a figure for the curious must not end its thread, let alone the run
        return {}
