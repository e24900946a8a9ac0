"""A wrapper of `rpcmp` that prints the number and names of its event loop's tasks on SIGUSR2.

Usage: `python -m tests.support.fuzz.watched PYTHON -m rpcmp ARGUMENTS...`
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import signal
import sys
from collections import Counter

from rpcmp.cli import main

BEGINNING = "tasks: "


def tell(signum: int, frame: object) -> None:
    """Print the tasks, between two callbacks of the loop or while it waits."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    gc.collect()  # removes cycles
    ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the kernel
    tasks = asyncio.all_tasks(loop)
    what = Counter(getattr(task.get_coro(), "__qualname__", "") for task in tasks)
    print(f"{BEGINNING}{len(tasks)} {dict(what)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, tell)
    sys.argv = ["rpcmp", *sys.argv[4:]]
    main()
