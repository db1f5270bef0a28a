"""Network wire that is slow, loses packets, or is cut: python -m unit_tests.helpers.slow_wire A B

What `tc netem` does, where a kernel is built without it. The interfaces are made here and may then be moved into
network namespaces. Frames go on by this process: each after the delay, or not at all. A line "DELAY_S LOSS" on standard
input sets both from then on, and the process ends with its standard input.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

SET_INTERFACE, TAP, WITHOUT_HEADER = 0x400454CA, 0x0002, 0x1000


def open_interface(name: str) -> int:
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, SET_INTERFACE, struct.pack("16sH", name.encode(), TAP | WITHOUT_HEADER))
    return handle


def carry(ends: tuple[int, int], settings: int) -> None:
    """Carry frames between both ends until `settings`, a pipe, is closed."""
    delay_s, loss = 0.0, 0.0
    chance, on_its_way, n = random.Random(0), [], 0
    while True:
        wait = max(0.0, on_its_way[0][0] - time.monotonic()) if on_its_way else None
        for end in select.select([*ends, settings], [], [], wait)[0]:
            if end == settings:
                if not (line := os.read(settings, 1000)):
                    return
                delay_s, loss = map(float, line.decode().splitlines()[-1].split())
                continue
            frame, n = os.read(end, 65536), n + 1
            if chance.random() >= loss:
                heapq.heappush(on_its_way, (time.monotonic() + delay_s, n, ends[end == ends[0]], frame))
        while on_its_way and on_its_way[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(on_its_way)
            try:
                os.write(end, frame)
            except OSError:  # the interface is down: the frame is lost
                continue


if __name__ == "__main__":
    handles = open_interface(sys.argv[1]), open_interface(sys.argv[2])
    print("ready", flush=True)
    carry(handles, sys.stdin.fileno())
