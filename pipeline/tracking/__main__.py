"""Send what a tracking server has missed: `python -m pipeline.tracking resend`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import List, Optional

from pipeline import errors
from pipeline.tracking import EventLog, now_ms, tracking_uri
from pipeline.tracking.run import Run


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.tracking", description=__doc__)
    parser.add_argument("command", choices=["resend"])
    parser.add_argument(
        "--reports", type=Path, default=Path("reports"), help="folder with the logs"
    )
    parser.add_argument("--wait", type=float, default=3600, help="seconds for each run")
    parser.add_argument("--to", metavar="URI", help="another server than that of each run")
    args = parser.parse_args(argv)
    if not args.reports.is_dir():
        raise errors.RequestError(f"{args.reports}: no such folder; --reports names another")
    logs = [log for log in map(EventLog, sorted(args.reports.rglob("log*.jsonl"))) if log.header()]
    results = [resend(log, args.wait, args.to) for log in logs]
    print(f"{sum(results)} of {len(logs)} runs in {args.reports} are complete")
    return 0 if all(results) else 1


def resend(log: EventLog, wait: float, to: Optional[str] = None) -> bool:
    """Send what is missing of one run. True if the server has all of it then."""
    uri = to or tracking_uri(log.header().get("tracking_uri", ""))
    if log.is_in_use():
        print(f"{log.path}: a process is writing it, and sends it itself")
        return True
    events = [event for event, _ in log.read()]
    if "params" in events[0] and not _has_ended(events):
        log.append({"end": "KILLED", "time": now_ms()})  # its process is gone
    return Run(log, uri, False).close(wait=wait)


def _has_ended(events: List[dict]) -> bool:
    """Whether the state of the run was set after it was opened or resumed for the last time."""
    marks = ["end" in event for event in events if "end" in event or "resumed" in event]
    return bool(marks) and marks[-1]


if __name__ == "__main__":
    raise SystemExit(errors.run(main))
