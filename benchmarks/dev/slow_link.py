"""Step time of two processes over a slow link, with training's gradient buckets and with torch's.

    python -m benchmarks.dev.slow_link --mbit 1000 --delay-ms 10      (root; two network namespaces of this machine)

Each rank lives in a network namespace of its own. Their link is a TUN device at each end and a thread that delivers
packets at most at the rate and after the delay, as `tc netem` does where the kernel has it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from typing import Deque, Iterator, List, Optional, Sequence, Tuple

from benchmarks import timing
from benchmarks.group_rows import CLONE
from superglue_sift.network.superglue import SuperGlueConfig

SPACES, ADDRESSES = ("sg-link-0", "sg-link-1"), ("10.199.7.1", "10.199.7.2")
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x1, 0x1000, 0x40000000  # of Linux's headers
MTU = 65000
WAYS = ("small buckets in the order of the work", "buckets of 25 MiB in the order of the modules", "no exchange")


def _tun(space: str) -> int:
    """Open a TUN device `link0` inside a namespace; the process returns to its own namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as home, open(f"/var/run/netns/{space}") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {space}")
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"link0", IFF_TUN | IFF_NO_PI))
        finally:
            libc.setns(home.fileno(), CLONE_NEWNET)
    return device


class Link(threading.Thread):
    """Carries packets between two TUN devices until `over` is set."""

    def __init__(self, devices: Sequence[int], bytes_per_s: float, delay_s: float) -> None:
        super().__init__(daemon=True)
        self.devices, self.bytes_per_s, self.delay_s = devices, bytes_per_s, delay_s
        self.over = threading.Event()

    def run(self) -> None:
        waiting: Tuple[Deque, Deque] = (collections.deque(), collections.deque())  # (due, packet), for each direction
        free = [0.0, 0.0]  # when the wire is free again
        while not self.over.is_set():
            now = time.perf_counter()
            due = [queue[0][0] for queue in waiting if queue]
            ready, _, _ = select.select(self.devices, [], [], max(0.0, min([*due, now + 0.1]) - now))
            for device in ready:
                side = self.devices.index(device)
                with contextlib.suppress(BlockingIOError):
                    packet = os.read(device, MTU + 100)
                    free[side] = max(free[side], time.perf_counter()) + len(packet) / self.bytes_per_s
                    waiting[side].append((free[side] + self.delay_s, packet))
            for side, queue in enumerate(waiting):
                _deliver(queue, self.devices[1 - side])


def _deliver(queue: Deque, device: int) -> None:
    """Deliver all packets that are due."""
    while queue and queue[0][0] <= time.perf_counter():
        with contextlib.suppress(BlockingIOError):  # TCP sends lost packets again
            os.write(device, queue.popleft()[1])


@contextlib.contextmanager
def linked(mbit: float, delay_ms: float) -> Iterator[None]:
    """Connect the two namespaces SPACES, at ADDRESSES, by such a link."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    with contextlib.ExitStack() as stack:
        devices = []
        for space, address in zip(SPACES, ADDRESSES):
            ip("netns", "add", space)
            stack.callback(ip, "netns", "del", space)
            devices.append(_tun(space))
            stack.callback(os.close, devices[-1])
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "link0")
            ip("-n", space, "link", "set", "dev", "link0", "mtu", str(MTU), "up")
        link = Link(devices, mbit * 1e6 / 8, delay_ms / 1e3)
        link.start()
        stack.callback(link.join)
        stack.callback(link.over.set)
        yield


def step_seconds(args: argparse.Namespace) -> List[List[float]]:
    """Seconds of a step for each of WAYS, over the rounds."""
    config = SuperGlueConfig(dim=args.dim, layers=args.layers).to_dict()
    command = [
        sys.executable, "-m", "benchmarks.rank", "--config", json.dumps(config), "--keypoints", str(args.keypoints),
        "--pairs", str(args.pairs), "--rounds", str(args.rounds), "--beside-large-buckets",
    ]  # fmt: skip
    shared = {
        "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": "link0",
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CLONE), "SG_TIMEOUT": "600",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", space, *command],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, space in enumerate(SPACES)
    ]
    answers = [rank.communicate()[0] for rank in ranks]
    return json.loads(answers[0])


def main(argv: Optional[Sequence[str]] = None) -> int:
    prog, title = "python -m benchmarks.dev.slow_link", str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(prog=prog, description=title)
    parser.add_argument("--mbit", type=float, default=1000.0, help="rate of the link")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="each way")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--keypoints", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=2, help="of a rank")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(argv)
    with linked(args.mbit, args.delay_ms):
        taken = step_seconds(args)
    print(f"{args.mbit:g} Mbit/s, {args.delay_ms:g} ms each way, D = {args.dim}, {args.pairs} pairs of "
          f"{args.keypoints} keypoints a rank")  # fmt: skip
    for way, seconds in zip(WAYS, taken):
        middle = timing.interval(seconds)
        ends = "{:.2f}, {:.2f}".format(*middle.ends)
        speed = timing.speed_up(taken[1], seconds)  # compared with torch's own buckets, round by round
        print(f"{way:46} {middle.value:.2f} s a step [{ends}], {speed} the speed of torch's buckets")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
