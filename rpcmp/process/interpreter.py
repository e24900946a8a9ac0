"""Interpreters that a supervisor starts, and how a process and all that it has forked is ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence


async def start(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
) -> asyncio.subprocess.Process:
    """Start `python -m module ARGUMENTS...`, at the head of a session of its own.

    Its standard output goes to our standard error: ours may be somebody's data.

    Args:
        environment: set in addition to our own.
        fds: file descriptors to inherit.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        # -P: a file in the current directory must not pass for a module.
        *("-P", "-m", module, *arguments),
        env={**os.environ, **environment},
        pass_fds=fds,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if _has_fd(sys.stderr) else None,
        start_new_session=True,  # what the user's code forks is ended together with it
    )


def kill_group(pid: int) -> None:
    """End the process that heads a group, and what it has forked; gone already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _has_fd(stream: object) -> bool:
    """Whether a standard stream is a real file; a notebook's is not."""
    try:
        return stream.fileno() >= 0  # type: ignore[attr-defined, no-any-return]
    except (OSError, AttributeError, ValueError):
        return False
