"""All stage servers of a job: found or started, claimed, watched, freed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rpcmp import addresses as address_rules
from rpcmp.config import Config
from rpcmp.control.client import StageClient
from rpcmp.control.options import versions
from rpcmp.errors import ConfigError, DrainingError, RpcmpError, UnreachableError, from_wire
from rpcmp.job.failure import FirstFailure
from rpcmp.job.localservers import LocalServers
from rpcmp.members import members
from rpcmp.v1 import control_pb2 as pb

Result = TypeVar("Result")


@dataclass(frozen=True)
class Identity:
    """What every message about a job carries.

    Attributes:
        job_id: unique for each run.
        generation: counts the groups of a run, from 1.
    """

    job_id: str
    generation: int


class Stages:
    """The stage servers of one generation of one job.

    Args:
        config: the job.
        identity: which generation of which run.
        addresses: of running servers, one a stage; none starts servers on this machine.
        failure: told what goes wrong at a stage.
        on_draining: told the name of a stage whose server is being stopped.

    Raises:
        ConfigError: not one address a stage, or one that is not on loopback.
    """

    def __init__(
        self,
        config: Config,
        identity: Identity,
        addresses: Sequence[str],
        failure: FirstFailure,
        on_draining: Callable[[str], None],
    ) -> None:
        require_one_each(config, addresses)
        self._config = config
        self._identity: dict[str, Any] = vars(identity)
        self._addresses = list(addresses)
        self._failure = failure
        self._on_draining = on_draining
        self._local = LocalServers()
        self._clients: list[StageClient] = []
        self._running: set[str] = set()
        self._all_running = asyncio.Event()

    async def claim(self, code: list[pb.CodeFile]) -> None:
        """Claim every server, which spawns the workers, and watch them from now on.

        Raises:
            UnavailableError, VersionError, ConfigError: a server cannot be had.
        """
        if not self._addresses:
            self._addresses = await self._local.start(self._config.num_stages)
        pairs = zip(self._config.stage_names, self._addresses, strict=True)
        self._clients = [StageClient(name, address) for name, address in pairs]
        await all_of(client.connect() for client in self._clients)
        await all_of(self._claim(index, code) for index in range(len(self._clients)))

    def place(self, rank: int) -> dict[str, Any]:
        """Where in the group the process with `rank` is, and how it finds the others."""
        return {
            **self._identity,
            "rendezvous": self._addresses[0],
            "members": members(self._config.stage_names),
            "rank": rank,
        }

    async def start(self, assignments: Sequence[str]) -> None:
        """Give every worker its stage; they build it and join the group."""
        await all_of(
            client.start(
                pb.StartRequest(
                    **self.place(rank), stage_name=client.name, assignment=assignments[rank]
                )
            )
            for rank, client in enumerate(self._clients)
        )

    async def wait_until_running(self) -> None:
        """Return when every worker has joined the group."""
        await self._all_running.wait()

    async def free(self) -> None:
        """End all workers and free all servers; stop those that were started here."""
        stop = pb.StopRequest(**self._identity)
        await asyncio.gather(*(_try_stop(client, stop) for client in self._clients))
        await asyncio.gather(*(client.close() for client in self._clients))
        await self._local.stop()

    async def _claim(self, index: int, code: list[pb.CodeFile]) -> None:
        client = self._clients[index]
        await client.prepare(
            pb.PrepareRequest(
                **self._identity,
                job=self._config.name,
                versions=versions(),
                stage_index=index,
                threads=self._config.stage(index).threads,
                code=code,
            )
        )
        self._failure.follow(self._watch(client))

    async def _watch(self, client: StageClient) -> None:
        async for change in client.watch(pb.WatchRequest(**self._identity)):
            if change.error:
                raise from_wire(change.error)
            if change.draining:
                self._on_draining(client.name)
            if change.state == pb.SERVER_STATE_RUNNING:
                self._running.add(client.name)
            if len(self._running) == len(self._clients):
                self._all_running.set()
        raise DrainingError(f"stage {client.name!r} at {client.address} ended the job")


def require_one_each(config: Config, addresses: Sequence[str]) -> None:
    """Check the addresses of running servers, where there are any.

    Raises:
        ConfigError: not one address a stage, or one that is not on loopback.
    """
    address_rules.require_loopback(addresses)
    if addresses and len(addresses) != config.num_stages:
        raise ConfigError(
            f"{config.num_stages} stages need as many addresses, not {len(addresses)}: "
            f"{', '.join(addresses)}"
        )


async def all_of(awaitables: Iterable[Awaitable[Result]]) -> list[Result]:
    """Run all together; let all end, then raise the first error, or all unreachable ones."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors and all(isinstance(error, UnreachableError) for error in errors):
        raise UnreachableError("; ".join(map(str, errors)))
    for error in errors:
        raise error
    return cast(list[Result], results)


async def _try_stop(client: StageClient, request: pb.StopRequest) -> None:
    with contextlib.suppress(RpcmpError):  # the server is gone, free already, or another job's
        await client.stop(request)
