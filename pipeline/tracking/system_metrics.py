"""Samples of CPU, memory, disk, network and GPU by MLflow's monitors, for its System metrics page."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from typing import Any, Callable, Dict, List


class Sampler(threading.Thread):
    """Calls `log(metrics, step)` every `interval()` seconds until stopped, without metrics that cannot be read."""

    def __init__(self, log: Callable[[Dict[str, float], int], None], first_step: int = 0) -> None:
        super().__init__(name="system-metrics", daemon=True)
        self._log, self._step = log, first_step
        self._stopping = threading.Event()

    def run(self) -> None:
        monitors = open_monitors()
        while not self._stopping.wait(interval()):
            metrics: Dict[str, float] = {}
            for monitor in monitors:
                with contextlib.suppress(Exception):  # a metric that cannot be read must not end the thread
                    monitor.collect_metrics()
                    metrics.update({f"system/{name}": value for name, value in monitor.aggregate_metrics().items()})
                    monitor.clear_metrics()
            self._log(metrics, self._step)
            self._step += 1

    def stop(self) -> None:
        self._stopping.set()
        self.join(2.0)


def interval() -> float:
    """Seconds between samples: MLflow's environment variable, or 10."""
    try:
        return max(float(os.environ.get("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "10")), 0.1)
    except ValueError:
        return 10.0


def open_monitors() -> List[Any]:
    """MLflow's monitors for the parts of this machine."""
    monitors: List[Any] = []
    for name in ("CPU", "Disk", "Network", "GPU"):
        with contextlib.suppress(Exception):  # no psutil, GPU, driver, ...: of various types
            home = importlib.import_module(f"mlflow.system_metrics.metrics.{name.lower()}_monitor")
            monitors.append(getattr(home, f"{name}Monitor")())
    return monitors
