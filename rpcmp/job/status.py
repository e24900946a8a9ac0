"""Asking all stage servers of a job what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rpcmp.config import Config
from rpcmp.control.client import StageClient
from rpcmp.errors import ConfigError, UnreachableError
from rpcmp.job.dialing import dialer_of
from rpcmp.members import Member
from rpcmp.v1 import control_pb2 as pb
from rpcmp.wire.dialer import Dialer

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
        "state": pb.ServerState.Name(found.state).removeprefix("SERVER_STATE_").lower(),
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
