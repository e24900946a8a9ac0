"""Telling a stage server to stop."""

from __future__ import annotations

import asyncio

from rpcmp.control.client import StageClient
from rpcmp.job.fleet import answer_of
from rpcmp.wire.dialer import Dialer
from rpcmp.wire.security import Security

ASK_SECONDS = 0.2
"""Between two looks whether the server is still there."""


async def drain(address: str, wait: bool, security: Security) -> str:
    """Stop the server at `address`; the name of the job that has to end first, if any.

    Args:
        wait: return when the server has ended.
        security: how to talk to it.

    Raises:
        UnreachableError: nobody answers there.
        ConfigError: it is not on loopback, and there are no certificates.
    """
    security.require_allowed([address])
    dialer = Dialer(security)
    async with StageClient("", address, dialer) as client:
        await client.connect(starting=False)
        job = await client.drain()
    while wait and await answer_of(StageClient("", address, dialer)) is not None:
        await asyncio.sleep(ASK_SECONDS)
    return job
