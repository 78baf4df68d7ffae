"""Install the wheels of a lock that come from a list of files, and record what they were.

    python docker/wheels.py docker/locks/torch-cu111.lock https://.../torch_stable.html wheels.txt

Each wheel is downloaded and compared with the lock: its SHA-256 with `--hash`, its size with the
comment before the name, such as `# 2137.7 MB`. One line for each wheel, in the output and in the
last file, says what was found. A wheel of another hash or size is not installed: exit code 2. A
lock without hashes is compared with nothing, and says so.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Set

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
BAD_REQUEST = 2


class Wanted(NamedTuple):
    """A line of the lock: `name==version`, its hashes, the size in MB as pip prints it where it is
    known.
    """

    line: str
    hashes: Set[str]
    size: Optional[str]


def wanted(lock: str) -> Dict[str, Wanted]:
    """{name: what the text of a lock says of it}."""
    found = {}
    size = r"(?:^# (?P<size>[0-9.]+ MB)\n)?"
    line = r"^(?P<line>(?P<name>[\w-]+)==[^\s\\]+)"
    rest = r"(?P<rest>(?:.*\\\n)*.*)"
    for match in re.finditer(size + line + rest, lock, re.MULTILINE):
        hashes = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", match["rest"]))
        found[match["name"].lower()] = Wanted(match["line"], hashes, match["size"])
    return found


def described(wheel: Path, wish: Wanted) -> str:
    """One line on a file. Raises ValueError with that line when it is not what the lock means."""
    digest = hashlib.sha256()
    with open(wheel, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    size = f"{wheel.stat().st_size / 1e6:.1f} MB"
    seen = f"{wheel.name}: {size}, sha256 {digest.hexdigest()}"
    if not wish.hashes:
        return f"{seen}: not compared, the lock has no hash"
    if digest.hexdigest() not in wish.hashes:
        raise ValueError(f"{seen}: the lock has {' '.join(sorted(wish.hashes))}")
    if wish.size not in (None, size):
        raise ValueError(f"{seen}: the lock has {wish.size}")
    return f"{seen}: as in the lock"


def download(lock: Dict[str, Wanted], links: str, folder: Path) -> List[Path]:
    """The wheels, in the order of the lock. pip compares no hash here: `described` does, and says
    which it found.
    """
    for wish in lock.values():
        where = ["--find-links", links] if links else []
        subprocess.run(
            [*PIP, "download", "--no-deps", "--dest", str(folder), *where, wish.line], check=True
        )
    return [next(folder.glob(f"{name}-*")) for name in lock]


def main(words: List[str]) -> int:
    """Download, compare, record, install; the exit code."""
    path, links, record = words
    lock = wanted(Path(path).read_text())
    with tempfile.TemporaryDirectory() as folder:
        try:
            files = download(lock, links, Path(folder))
            lines = [described(file, wish) for file, wish in zip(files, lock.values())]
        except subprocess.CalledProcessError:
            print(f"error: a wheel of {path} could not be had, see above", file=sys.stderr)
            return BAD_REQUEST
        except ValueError as error:
            print(f"error: {error}\n{path} says where its hashes come from", file=sys.stderr)
            return BAD_REQUEST
        print("\n".join(lines), flush=True)
        Path(record).write_text("\n".join(lines) + "\n")
        return subprocess.run(
            [*PIP, "install", "--no-deps", *map(str, files)], check=False
        ).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
