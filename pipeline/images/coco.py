"""COCO's archives: addresses, sizes, checksums, and which part serves which split.

The official host serves plain HTTP and its HTTPS name does not match; the same objects have a TLS address,
which is tried first. Only MD5 sums were ever published; `fetch` records the SHA-256 on arrival.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional

TLS = "https://s3.amazonaws.com/images.cocodataset.org/zips"
PLAIN = "http://images.cocodataset.org/zips"


@dataclass(frozen=True)
class Archive:
    """One zip. size: bytes."""

    file: str
    md5: str
    images: int
    size: int

    def urls(self, mirror: str = "") -> List[str]:
        """Where to get it, the best address first; a mirror replaces the official ones."""
        bases = [mirror.rstrip("/")] if mirror else [TLS, PLAIN]
        return [f"{base}/{self.file}" for base in bases]


TRAIN2014 = Archive("train2014.zip", "0da8c0bd3d6becc4dcb32757491aca88", 82_783, 13_510_573_713)
VAL2014 = Archive("val2014.zip", "a3d79f5ed8d289b7a7554ce06a5782b3", 40_504, 6_645_013_297)
TRAIN2017 = Archive("train2017.zip", "cced6f7f71b7629ddf16f17bbcfab6b2", 118_287, 19_336_861_798)
VAL2017 = Archive("val2017.zip", "442b8da7639aecaf257c1dceb8ba8c80", 5_000, 815_585_330)

HELD_OUT = 5_000  # images of val2014 that are held out (the size of val2017); the others stay unused


@dataclass(frozen=True)
class Source:
    """train: archive of the training images; held_out: of the others, None: a part of `train` is held out."""

    train: Archive
    held_out: Optional[Archive]


SOURCES: Dict[str, Source] = {
    "coco2014": Source(TRAIN2014, VAL2014),
    "coco2017": Source(TRAIN2017, VAL2017),
    "coco2017-val": Source(VAL2017, None),
}
