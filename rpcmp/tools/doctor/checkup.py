"""Check everything that can be known before a run: `rpcmp doctor`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER
from rpcmp.errors import RpcmpError
from rpcmp.job.restore_point import mirrors_of
from rpcmp.job.server_calls import dialer_for, require_addresses
from rpcmp.job.server_pool import connected, forks_for
from rpcmp.net.dialer import Dialer
from rpcmp.server.client import StageClient
from rpcmp.server.connection import way_to
from rpcmp.server.host_facts import HostFacts
from rpcmp.tools.doctor.diagnosis import CheckedLink, Finding, diagnose
from rpcmp.tools.job_hosts import HostReport, HostSurvey
from rpcmp.tools.job_links import Link, job_links
from rpcmp.v1 import doctor_pb2

SECONDS = 0.25
"""Least time for which a link is measured in each direction; a check takes a few times that."""


async def check_up(config: Config, connect: Sequence[str] | None = None) -> list[Finding]:
    """Check all hosts of a job and the links between them.

    Args:
        connect: addresses of running stage servers, one per worker; None uses the config's or, if
            it has none, starts servers on this machine.

    Raises:
        SecurityError: the driver's certificate cannot be used.
    """
    addresses = config.addresses if connect is None else connect
    require_addresses(config, addresses)
    dialer = dialer_for(config, [*addresses, *config.recovery.spares])
    async with (
        forks_for(config, connect) as forks,
        connected(config, dialer, addresses, len(config.workers), forks) as clients,
    ):
        driver, workers, spares = await HostSurvey(config, clients, dialer, forks).collect()
        checked = await LinkCheck(config, clients, dialer).run([driver, *workers])
        return diagnose(config, driver, workers, spares, checked, time.time())


class LinkCheck:
    """Checks the links that a job uses.

    Args:
        clients: connections to the job's servers, one per worker.
        dialer: opens the driver's connections.
    """

    def __init__(self, config: Config, clients: Sequence[StageClient], dialer: Dialer) -> None:
        self._config, self._dialer = config, dialer
        self._clients = {client.name: client for client in clients}
        names = (client.name for client in clients)
        self._workers = dict(zip(names, config.workers, strict=True))

    async def run(self, reports: Sequence[HostReport]) -> list[CheckedLink]:
        """Check the links between hosts that have answered, one after the other."""
        facts = {report.name: report.facts for report in reports if report.facts}
        labels = [worker.label for worker in self._config.workers]
        machines = [facts[label].machine if label in facts else label for label in labels]
        links = job_links(self._config, mirrors_of(self._config, machines))
        return [
            await self._check(link, facts)
            for link in links
            if link.one in facts and link.other in facts
        ]

    async def _check(self, link: Link, facts: Mapping[str, HostFacts]) -> CheckedLink:
        if facts[link.one].network == facts[link.other].network:
            return CheckedLink(link)
        seconds = SECONDS if link.has_tensors else 0
        try:
            other = self._clients[link.other]
            if link.one == DRIVER:
                index = self._workers[other.name].stage_index
                speed = await way_to(self._dialer, other.name, other.address, index, seconds)
                return CheckedLink(link, speed)
            one = self._clients[link.one]
            speed = await one.probe(self._probe(other, seconds))
            await other.probe(self._probe(one, seconds=0))
        except RpcmpError as error:
            return CheckedLink(link, error=error)
        return CheckedLink(link, speed)

    def _probe(self, other: StageClient, seconds: float) -> doctor_pb2.ProbeRequest:
        return doctor_pb2.ProbeRequest(
            stage_name=other.name,
            address=other.address,
            stage_index=self._workers[other.name].stage_index,
            seconds=seconds,
        )
