"""Seeds, and kernels that give the same bits twice."""

from __future__ import annotations

import os
import random


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (every device). `deterministic` also asks torch for reproducible kernels.

    Training draws from generators of its own (seed, epoch, index); this is for what others draw behind it.
    """
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        set_deterministic()


def set_deterministic() -> None:
    """Ask torch and cuBLAS for kernels that give the same bits twice; slower on a GPU, free on a CPU."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts, so set it early
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
