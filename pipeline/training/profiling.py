"""A look inside some steps: torch's profiler, as a table and as a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import torch

from pipeline.runtime import distributed

SKIPPED = 3  # first steps, slower than the rest


class Profile:
    """Records `steps` steps on rank 0 after the first few; a context manager. With 0 steps it does nothing."""

    def __init__(self, steps: int, folder: Path, context: distributed.Context) -> None:
        self.folder, self.steps = folder, steps
        self._profiler: Optional[torch.profiler.profile] = None
        if steps and context.is_main:
            self._profiler = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=SKIPPED - 1, warmup=1, active=steps, repeat=1),
                on_trace_ready=self._write,
            )

    def __enter__(self) -> Profile:
        if self._profiler:
            self._profiler.__enter__()
        return self

    def __exit__(self, *trouble) -> None:
        if self._profiler:
            self._profiler.__exit__(*trouble)

    def stepped(self) -> None:
        """A step has ended."""
        if self._profiler:
            self._profiler.step()

    def _write(self, profiler) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / "trace.json"))
        order = "cuda_time_total" if torch.cuda.is_available() else "cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=30)
        (self.folder / "table.txt").write_text(table + "\n")
        print(f"profile of {self.steps} steps: {self.folder}/table.txt, trace.json")
