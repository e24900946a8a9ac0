"""Start Python interpreters with the environment for computing, and handle signals that stop them.

A supervisor handles signals that stop a run or a server in good order: after its step, with its
state saved. Its children ignore them, because a terminal sends them to children too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from rpcmp.process import resources

_MALLOC = {
    # Return big blocks late and serve all threads from one arena: micro-batches allocate and free
    # the same sizes again and again, and the first touch of fresh memory is slow. The price is
    # memory: the holes that one micro-batch leaves are often a few bytes too small for the next.
    # Users that have less memory than time may set these variables themselves.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # the most that glibc accepts
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}


async def start(
    module: str, arguments: Sequence[str], environment: Mapping[str, str | None], fds: Sequence[int]
) -> asyncio.subprocess.Process:
    """Start `python -m module ARGUMENTS...` as the leader of its own session.

    Its standard output goes to our standard error: our standard output may carry data.

    Args:
        environment: beyond our own; None removes a variable.
        fds: descriptors that it inherits.
    """
    variables = {**os.environ, **environment}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        # -P: a file in the current directory must not pass for a module.
        *("-P", "-m", module, *arguments),
        env={name: value for name, value in variables.items() if value is not None},
        pass_fds=fds,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if _has_fd(sys.stderr) else None,
        start_new_session=True,  # what the user's code forks is ended together with it
    )


def kill_group(pid: int) -> None:
    """Kill the process that leads a group, and what it has forked; remove their semaphores."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    resources.remove_semaphores(pid)


def _has_fd(stream: object) -> bool:
    """Whether a standard stream is a real file; a notebook's is not."""
    try:
        return stream.fileno() >= 0  # type: ignore[attr-defined, no-any-return]
    except (OSError, AttributeError, ValueError):
        return False


def compute_environment(threads: int) -> dict[str, str]:
    """Return the variables of a process that computes with `threads` threads.

    Its supervisor sets them, because most are read before Python runs. The reference of
    `rpcmp verify` gets the same ones, so that its bits can be compared.

    MKL_CBWR makes MKL's results independent of how memory is aligned. TP_SOCKET_IFNAME keeps
    TensorPipe, which has no authentication, on the loopback interface.
    """
    return {
        **{key: os.environ.get(key, value) for key, value in _MALLOC.items()},
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "MKL_CBWR": "AUTO,STRICT",
        "TP_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        # When a group ends, TensorPipe warns of every connection that closes.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GRPC_VERBOSITY": "ERROR",
    }


def describe_exit(code: int | None) -> str:
    """Return words for an exit status, to follow the process's name: "exited with code 3".

    Args:
        code: as `subprocess` and `multiprocessing` give it: -n after signal n; None if unknown.
    """
    if code is None:
        return "has ended"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal
        return f"was ended by signal {-code}"


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
def no_lost_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt after the block at the latest if a SIGINT has come within it.

    Python raises it in whatever runs at that moment. In a finalizer or the callback of a weak
    reference, of which each import has one, it is printed and forgotten.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    received = []

    def interrupt(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if received:
        raise KeyboardInterrupt


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
