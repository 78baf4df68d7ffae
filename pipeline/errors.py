"""Errors for the user, and the exit codes of commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Dict, List, Optional

from superglue_sift.errors import Main, RequestError, WorkError, exit_code

EXIT_FOLDER = "SG_EXIT_FOLDER"  # set by pipeline.launch: folder of the ranks' exit codes
AGENT_PID = "SG_AGENT_PID"  # set by pipeline.launch: the process with which its ranks end
STOPPED = 143  # stopped by a signal, after a checkpoint
STOPPING = "stopping"  # file in EXIT_FOLDER: the launcher was told to stop
LOST_PEER = "lost peer"  # in place of an exit code: the rank ended because another one is gone


class LostPeer(WorkError):
    """Another rank died or hangs: torchrun starts all ranks again."""


def read_number(name: str, usual: int, least: int = 0) -> int:
    """A whole number in the environment, at least `least`. Raises RequestError."""
    text = os.environ.get(name) or str(usual)
    if not text.isdigit() or int(text) < least:
        raise RequestError(f"environment {name}={text!r}: must be a whole number from {least} on")
    return int(text)


def in_image() -> bool:
    """Whether this runs in one of the project's images, which have no make."""
    return "IMAGE_STACK" in os.environ


def spell_command(command: str, **options: str) -> str:
    """A command as the user types it: `make repro PRESET=ci`, in an image `docker run ... repro
    --preset ci`.
    """
    if in_image():
        words = ["docker run ...", command, *(f"--{key} {value}" for key, value in options.items())]
    else:
        words = ["make", command, *(f"{key.upper()}={value}" for key, value in options.items())]
    return " ".join(words)


def run(main: Main, argv: Optional[List[str]] = None) -> int:
    """Run a command's `main`. Returns its exit code.

    0: done; 1: the work failed; 2: the request was wrong; 130: Ctrl-C; 143: stopped by a signal
    after a checkpoint.
    """
    if not os.environ.get(EXIT_FOLDER):
        return exit_code(main, argv)
    folder = Path(os.environ[EXIT_FOLDER])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if (folder / STOPPING).exists() or (attempt and _is_over(folder, attempt - 1)):
        return 0  # the launcher reads how it ended
    if attempt and os.environ.get("LOCAL_RANK") == "0":
        lost = lost_ranks(folder, attempt - 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        print(f"{lost}starting again from the newest checkpoint", file=sys.stderr)
    text = "1"  # of an unexpected exception, which propagates

    def watch(arguments: Optional[List[str]]) -> int:
        nonlocal text
        try:
            return main(arguments)
        except LostPeer:
            text = LOST_PEER
            raise

    try:
        code = exit_code(watch, argv)
        text = text if text == LOST_PEER else str(code)
    except SystemExit as end:  # another rank reports the reason
        text = str(end.code if isinstance(end.code, int) else 1)
        raise
    finally:
        (folder / f"{os.environ.get('LOCAL_RANK', '0')}.{attempt}").write_text(text)
    # torchrun reports any other code than 0 as a crash; the launcher reads the file instead
    return 0 if code == STOPPED else code


def codes_of(folder: Path, attempt: int) -> Dict[int, str]:
    """What each local rank of an attempt left in EXIT_FOLDER: its exit code, or LOST_PEER; a lost
    rank leaves none.
    """
    return {int(file.stem): file.read_text() for file in folder.glob(f"*.{attempt}")}


def lost_ranks(folder: Path, attempt: int, processes: int) -> str:
    """A line that names the local ranks without an exit code and their last step; "" without
    one.
    """
    left = codes_of(folder, attempt)
    names = []
    for rank in range(processes):
        if rank not in left:
            seen = folder / f"{rank}.step"
            step = f", last seen at step {seen.read_text()}," if seen.is_file() else ""
            names.append(f"rank {rank}{step}")
    return (
        f"{' and '.join(names)} died or hung (killed, stopped, or out of memory)\n" if names else ""
    )


def _is_over(folder: Path, attempt: int) -> bool:
    """Whether a rank failed by its own error: torchrun restarts it nevertheless.

    Several nodes restart together, since the others do not know.
    """
    own = [code for code in codes_of(folder, attempt).values() if code not in ("0", LOST_PEER)]
    return bool(own) and os.environ.get("NNODES", "1") == "1"
