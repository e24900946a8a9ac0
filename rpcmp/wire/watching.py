"""Certificates while a process runs: connections of revoked peers, and the expiry of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from rpcmp.errors import SecurityError
from rpcmp.wire.security import Security

POLL_SECONDS = 2.0
"""Between two looks at the files; a revocation reaches open connections within so long."""

EXPIRES_DAYS = 7
"""Certificates that are valid for less are warned of."""

WARN_EACH_SECONDS = 24 * 3600.0

log = logging.getLogger(__name__)


async def watch(security: Security, warn: Callable[[str], None]) -> None:
    """End connections whose peers are revoked, and warn once a day before the certificate expires.

    Returns at once if there are no certificates, and runs until it is cancelled otherwise.

    Args:
        security: of the process.
        warn: shows a text to the user.
    """
    credentials = security.credentials
    if credentials is None:
        return
    checked = credentials.revocations
    warned = -WARN_EACH_SECONDS
    while True:
        credentials.refresh()
        if credentials.revocations is not checked:
            checked = credentials.revocations
            for role in security.end_revoked():
                warn(f"a connection with {role} is ended: its certificate is revoked")
        if time.monotonic() - warned >= WARN_EACH_SECONDS:
            warned = time.monotonic()
            if text := expiry_warning(security, datetime.now(UTC)):
                warn(text)
        await asyncio.sleep(POLL_SECONDS)


def expiry_warning(security: Security, now: datetime) -> str:
    """Return what to say of a certificate that expires soon; empty: it does not."""
    from rpcmp.wire.certificate import Certificate  # only who has one needs its libraries

    assert security.credentials is not None
    try:
        found = Certificate.load(security.credentials.folder)
    except SecurityError:  # being written; the last one that could be read holds
        return ""
    days = (found.not_after - now).total_seconds() / 86400
    if days >= EXPIRES_DAYS:
        return ""
    when = "has expired"
    if days > 0:
        when = f"expires on {found.not_after:%Y-%m-%d}, in {days:.0f} days"
    return (
        f"{found.path} {when}: renew it where its authority is, by `rpcmp certs renew DIR` for "
        "one of rpcmp's, and copy it here; it is taken up without a restart"
    )
