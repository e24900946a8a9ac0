"""Talking to a job's stage servers without a job: to measure, or to look at their hosts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from rpcmp.config import Config
from rpcmp.control.client import StageClient
from rpcmp.job.localservers import LocalServers, options_for
from rpcmp.process.forking import Forks
from rpcmp.wire.dialer import Dialer


@contextlib.asynccontextmanager
async def visiting(
    config: Config, dialer: Dialer, addresses: Sequence[str], num_local: int, forks: Forks
) -> AsyncIterator[list[StageClient]]:
    """Connections to the servers; with none running, to the first ones, started for the while.

    Args:
        config: the job.
        dialer: how they are talked to.
        addresses: of running servers, one a worker; none starts servers on this machine.
        num_local: how many of them.
        forks: where the processes of servers on this machine come from.

    Raises:
        JobError: a server does not start.
    """
    local = LocalServers(forks, options_for(config))
    async with contextlib.AsyncExitStack() as opened:
        opened.push_async_callback(local.stop)
        found = addresses or await local.start(config.workers[:num_local])
        clients = []
        for worker, at in zip(config.workers, found, strict=False):
            client = StageClient(worker.label, at, dialer, worker.stage_index)
            clients.append(await opened.enter_async_context(client))
        yield clients
