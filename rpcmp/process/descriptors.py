"""File descriptors: how many this process may have."""

from __future__ import annotations

import contextlib
import resource

ENOUGH = 16_384
"""More than any job needs; a limit of a billion, as some containers have, slows programs down that
close all that there could be."""


def limit() -> int:
    """Return how many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """Allow this process, and those that it starts, as many as the system grants, up to ENOUGH.

    The default, 1,024, is what select(2) can take, which nothing here uses.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # it works with fewer, too
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
