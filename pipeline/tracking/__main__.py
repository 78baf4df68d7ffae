"""Send what a tracking server has missed: `python -m pipeline.tracking resend`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import List, Optional

from pipeline import errors
from pipeline.tracking.log import EventLog, now_ms
from pipeline.tracking.run import Run, tracking_uri


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.tracking", description=__doc__)
    add = parser.add_argument
    add("command", choices=["resend"])
    add("--reports", type=Path, default=Path("reports"), help="folder with the logs")
    add("--wait", type=float, default=3600, help="seconds for each run")
    add("--to", metavar="URI", help="another server than that of each run")
    args = parser.parse_args(argv)
    if not args.reports.is_dir():
        raise errors.RequestError(f"{args.reports}: no such folder; --reports names another")
    logs = [log for log in map(EventLog, sorted(args.reports.rglob("log*.jsonl"))) if log.header()]
    results = [resend(log, args.wait, args.to) for log in logs]
    print(f"{sum(results)} of {len(logs)} runs in {args.reports} are complete")
    return 0 if all(results) else 1


def resend(log: EventLog, wait: float, to: Optional[str] = None) -> bool:
    """Send what is missing of one run. True if the server has all of it then."""
    if log.is_in_use():
        print(f"{log.path}: a process is writing it, and sends it itself")
        return True
    # Whether its state was set after it was opened or resumed for the last time
    marks = ["end" in event for event, _ in log.read() if {"end", "resumed", "run"} & event.keys()]
    if not marks[-1]:
        log.append({"end": "KILLED", "time": now_ms()})  # its process is gone
    return Run(log, to or tracking_uri(log.header()["tracking_uri"]), False).close(wait=wait)


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
