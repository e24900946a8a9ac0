"""The signals that end a run or a server in good order: after its step, and with what it has saved.

A supervisor hears them and decides; its children, which a terminal may send the same, ignore them.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A Ctrl-C, a `kill`, and a terminal that is gone, such as that of a dropped ssh session."""


def ending_signals() -> list[signal.Signals]:
    """Those that this process should handle: `nohup` has it ignore SIGHUP, and so it stays.

    A shell has what it starts in the background ignore SIGINT, which only a Ctrl-C at another's
    terminal was meant by: whoever sends one to this process means it.
    """
    keeps_on = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [each for each in ENDING if each is not signal.SIGHUP or not keeps_on]


@contextlib.contextmanager
def handled_by(handler: Callable[[int], None]) -> Iterator[None]:
    """Handle the signals that end something with `handler` within the block, in an event loop."""
    loop, handled = asyncio.get_running_loop(), ending_signals()
    for signum in handled:
        loop.add_signal_handler(signum, handler, signum)
    try:
        yield
    finally:
        for signum in handled:
            loop.remove_signal_handler(signum)


def wishes(received: Sequence[int]) -> int:
    """How often somebody has wished for the end; a second time means: at once.

    A terminal that is gone says so more than once, by its shell and by the kernel, and a session's
    manager sends SIGTERM as well: all that is one wish, and nobody's hurry.
    """
    found = 0
    for index, signum in enumerate(received):
        only_hung_up = {*received[:index]} == {signal.SIGHUP}
        is_echo = signum == signal.SIGHUP or (signum == signal.SIGTERM and only_hung_up)
        found += not (index and is_echo)
    return found
