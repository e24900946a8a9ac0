"""How a job talks to its stage servers, as its config says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from rpcmp.config import Config
from rpcmp.process.channel import Message
from rpcmp.wire.dialer import Dialer
from rpcmp.wire.security import INSECURE, WARN_SECONDS, Security
from rpcmp.wire.watching import watch


def dialer_of(config: Config, addresses: Sequence[str], drives: bool = True) -> Dialer:
    """What opens connections to servers at `addresses`.

    Args:
        config: the job.
        addresses: of servers that run; none: they are started on this machine, and are ours.
        drives: whether more is wanted than to ask who they are.

    Raises:
        ConfigError: an address is not on loopback, and there are no certificates.
        SecurityError: the certificate cannot be used, or is not a driver's.
    """
    if not addresses:
        return Dialer(Security())
    security = Security(config.certs_folder, config.security.insecure)
    security.require_allowed(addresses)
    if drives:
        security.require_may_drive()
    return Dialer(security)


@contextlib.asynccontextmanager
async def warnings(
    config: Config, security: Security, report: Callable[[Message], None]
) -> AsyncIterator[None]:
    """Warn each minute that the job is insecure, if it is; otherwise watch its certificates."""

    def say(text: str) -> None:
        report({"event": "warning", "text": text})

    async def warn() -> None:
        while config.security.insecure:
            say(INSECURE)
            await asyncio.sleep(WARN_SECONDS)
        await watch(security, say)

    warning = asyncio.create_task(warn())
    try:
        yield
    finally:
        warning.cancel()
