"""Waiting for what another process or thread does."""

import time

import psutil


def wait_until(true, seconds=120):
    """Wait until `true()`. AssertionError after `seconds`: a guard, for a busy machine."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.02)


def has_ended(pid):
    """Whether the process is gone, or waits for its parent alone."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
