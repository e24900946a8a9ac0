"""Asking all stage servers of a job what they do.

Telling a stage server to stop.

Talking to a job's stage servers without a job: to measure, or to look at their hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.errors import ConfigError, UnreachableError
from rpcmp.job.server_calls import dialer_of
from rpcmp.job.server_pool import LocalServers, answer_of, options_for
from rpcmp.net.dialer import Dialer
from rpcmp.net.security import Security
from rpcmp.observability.events import state_name
from rpcmp.process.fork_client import Forks
from rpcmp.server.client import StageClient
from rpcmp.v1 import control_pb2 as pb

ANSWER_SECONDS = 2.0
"""How long a server may take to answer; somebody waits for the table."""


async def ask_all(config: Config, addresses: Sequence[str]) -> list[dict[str, Any]]:
    """One record a worker, in the config's order; unreachable ones say so.

    Raises:
        ConfigError: not one address a worker, or one that is not on loopback and no certificates.
    """
    dialer = dialer_of(config, addresses, drives=False)
    if len(addresses) != len(config.workers):
        raise ConfigError(f"{len(config.workers)} workers need as many addresses")
    return await asyncio.gather(
        *(
            _ask(worker, address, dialer)
            for worker, address in zip(config.workers, addresses, strict=True)
        )
    )


async def _ask(worker: Member, address: str, dialer: Dialer) -> dict[str, Any]:
    client = StageClient(worker.label, address, dialer, worker.stage_index)
    try:
        found = await client.connect(ANSWER_SECONDS, starting=False)
        health = await client.health()
    except UnreachableError:
        found = pb.DescribeResponse()
        health = "UNREACHABLE"
    finally:
        await client.close()
    return {
        "index": worker.stage_index,
        "replica": worker.replica,
        "name": worker.label,
        "address": address,
        "health": health,
        "state": state_name(pb.ServerState.Name(found.state)),
        "job": found.job,
        "generation": found.generation,
        "step": found.step,
        "parameters": found.num_parameters,
        "memory": found.worker_memory,
        "rpcmp": found.versions.rpcmp,
        "torch": found.versions.torch,
        "python": found.versions.python,
        "supervisor_pid": found.supervisor_pid,
        "worker_pid": found.worker_pid,
    }


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
