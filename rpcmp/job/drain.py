"""Telling a stage server to stop."""

from __future__ import annotations

import asyncio

from rpcmp.control.client import StageClient
from rpcmp.job.fleet import describe

ASK_SECONDS = 0.2
"""Between two looks whether the server is still there."""


async def drain(address: str, wait: bool) -> str:
    """Stop the server at `address`; the name of the job that has to end first, if any.

    Args:
        wait: return when the server has ended.

    Raises:
        UnreachableError: nobody answers there.
    """
    async with StageClient("", address) as client:
        await client.connect()
        job = await client.drain()
    while wait and await describe("", address) is not None:
        await asyncio.sleep(ASK_SECONDS)
    return job
