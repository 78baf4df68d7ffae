"""Samples of CPU, memory, disk, network and GPU under MLflow's own names, for its System metrics page."""

from __future__ import annotations

import os
import threading
from typing import Any, Callable, Dict, List, Optional

MEGABYTE = 1e6


class Sampler(threading.Thread):
    """Calls `log(metrics, step)` every `seconds` until stopped. What cannot be read is left out."""

    def __init__(
        self,
        log: Callable[[Dict[str, float], int], None],
        first_step: int = 0,
        seconds: Optional[float] = None,
    ) -> None:
        super().__init__(name="system-metrics", daemon=True)
        self._log = log
        self._step = first_step
        self._seconds = interval() if seconds is None else seconds
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            import psutil
        except ImportError:
            return
        gpus = open_gpus()
        psutil.cpu_percent()  # the first call only starts the measurement
        before = psutil.net_io_counters()
        while not self._stopping.wait(self._seconds):
            try:
                self._log({f"system/{k}": v for k, v in sample(psutil, before, gpus).items()}, self._step)
            except Exception:  # a figure for the curious must not end its thread, let alone the run
                continue
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


def sample(psutil: Any, before: Any, gpus: List[Any]) -> Dict[str, float]:
    """One sample; network figures count from `before`."""
    memory = psutil.virtual_memory()
    disk = psutil.disk_usage(os.getcwd())
    found = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / MEGABYTE,
        "system_memory_usage_percentage": memory.percent,
        "disk_usage_percentage": disk.percent,
        "disk_usage_megabytes": disk.used / MEGABYTE,
        "disk_available_megabytes": disk.free / MEGABYTE,
    }
    network = psutil.net_io_counters()
    if network is not None and before is not None:
        found["network_receive_megabytes"] = (network.bytes_recv - before.bytes_recv) / MEGABYTE
        found["network_transmit_megabytes"] = (network.bytes_sent - before.bytes_sent) / MEGABYTE
    for index, handle in enumerate(gpus):
        found.update({f"gpu_{index}_{name}": value for name, value in read_gpu(handle).items()})
    return found


def open_gpus() -> List[Any]:
    """NVML handles of the machine's GPUs, none without the driver or nvidia-ml-py."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # NVML raises its own type, which cannot be named where the package is missing
        return []


def read_gpu(handle: Any) -> Dict[str, float]:
    """Utilisation, memory and power of one GPU."""
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    found = {
        "utilization_percentage": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_usage_megabytes": memory.used / MEGABYTE,
        "memory_usage_percentage": round(100 * memory.used / memory.total, 1),
    }
    try:
        found["power_usage_watts"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    except pynvml.NVMLError:
        pass
    return found
