"""The signals that stop a run or a server in good order: after its step, with its state saved.

A supervisor handles them. Its children ignore them, because a terminal sends them to children too.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A Ctrl-C, a `kill`, and a terminal that is gone, such as that of a dropped ssh session."""


def stop_signals() -> list[signal.Signals]:
    """Return those that this process should handle: all but a SIGHUP that `nohup` has it ignore.

    SIGINT is handled even if ignored. A shell has its background processes ignore SIGINT, because a
    Ctrl-C is not meant for them; one that is sent to this process is.
    """
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signum for signum in STOP_SIGNALS if signum is not signal.SIGHUP or not ignores_hangup]


@contextlib.contextmanager
def handle_stop_signals(handler: Callable[[int], None]) -> Iterator[None]:
    """Call `handler` for each stop signal within the block, in the running event loop."""
    loop, signums = asyncio.get_running_loop(), stop_signals()
    for signum in signums:
        loop.add_signal_handler(signum, handler, signum)
    try:
        yield
    finally:
        for signum in signums:
            loop.remove_signal_handler(signum)


def count_stop_requests(received: Sequence[int]) -> int:
    """Count the requests to stop among the received signals; a second one means "at once".

    A closed terminal sends SIGHUP more than once, from its shell and from the kernel, and a session
    manager adds a SIGTERM: together they are one request.
    """
    count = 0
    for index, signum in enumerate(received):
        only_hangups = {*received[:index]} == {signal.SIGHUP}
        is_echo = signum == signal.SIGHUP or (signum == signal.SIGTERM and only_hangups)
        count += not (index and is_echo)
    return count
