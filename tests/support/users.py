"""Act as other users of this machine. Requires root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tests.support.needs import needs_root

MALLORY, TRENT = 61001, 61002


@contextlib.contextmanager
def acting_as(user: int) -> Iterator[None]:
    """Create sockets as another user within the block."""
    needs_root("act as another user")
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
