"""A cable that takes its time: it joins two network devices, and each frame passes after a while.

    python -I -S tests/support/delaying.py NEAR FAR SECONDS     creates both devices

Few kernels have netem, and no program that a distribution packages does this. It ends with its
standard input, so that nothing is left if the process that has started it is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

SET_DEVICE, TAP, PLAIN_FRAMES = 0x400454CA, 0x0002, 0x1000
LARGEST = 65536


def device(name: str) -> int:
    """Create a network device; returns the descriptor at which its frames are read and written."""
    opened = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(opened, SET_DEVICE, struct.pack("16sH22x", name.encode(), TAP | PLAIN_FRAMES))
    return opened


def receive(opened: int) -> list[bytes]:
    """Return the frames that a device has to give."""
    frames = []
    with contextlib.suppress(BlockingIOError):
        while True:
            frames.append(os.read(opened, LARGEST))
    return frames


def join(near: int, far: int, seconds: float) -> None:
    """Pass frames on, `seconds` after they came, until the standard input ends."""
    others = {near: far, far: near}
    passing: deque[tuple[float, int, bytes]] = deque()  # all take as long: the first is due first
    while True:
        wait = max(0.0, passing[0][0] - time.monotonic()) if passing else None
        readable, *_ = select.select([0, near, far], [], [], wait)
        if 0 in readable:
            return
        for one in readable:
            due = time.monotonic() + seconds
            passing.extend((due, others[one], frame) for frame in receive(one))
        while passing and passing[0][0] <= time.monotonic():
            _, there, frame = passing.popleft()
            with contextlib.suppress(BlockingIOError, OSError):  # full, or down: a frame is lost
                os.write(there, frame)


def main() -> None:
    near, far, seconds = sys.argv[1:]
    ends = device(near), device(far)
    print("ready", flush=True)
    join(*ends, float(seconds))


if __name__ == "__main__":
    main()
