"""Image files in folders, and the pixels of many of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Iterable, Iterator, List, Optional, Tuple, Union

import numpy as np

from pipeline.errors import RequestError
from pipeline.images.manifest import Entry
from superglue_sift.images import EXTENSIONS, BadImage, decode_gray

if TYPE_CHECKING:
    from pipeline.images.sources import ImageSet

Outcome = Tuple[Entry, Union[np.ndarray, BadImage]]


def gpu() -> Optional[int]:
    """This rank's GPU, None without one."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return int(os.environ.get("LOCAL_RANK", "0")) % count if count else None


def decoded(images: ImageSet, entries: Iterable[Entry]) -> Iterator[Outcome]:
    """Each entry with its gray pixels (H, W) uint8, or with why it cannot serve; in their order, each once."""
    for entry in entries:
        try:
            yield entry, decode_gray(images.read(entry), entry.name)
        except BadImage as bad:
            yield entry, bad


def list_images(folder: Union[str, Path]) -> List[Path]:
    """Image files under `folder`, nested folders included, sorted; by extension, letter case ignored.

    Hidden files and folders are left out. A dangling link is listed: reading it tells what is wrong.
    Raises RequestError when the folder is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RequestError(f"{folder}: no such folder; give the folder that holds the images")
    found: List[Path] = []
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in EXTENSIONS and not hidden and not path.is_dir():
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())
