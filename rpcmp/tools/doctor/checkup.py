"""Asking everybody, the way a job would: the one function behind `rpcmp doctor`.

What each host of a job will need, so what it is asked before a run. Pure.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping, Sequence

from rpcmp.config.schema import Config
from rpcmp.config.sections import StageConfig
from rpcmp.config.topology import DRIVER, Member
from rpcmp.config.types import Factory, parse_size
from rpcmp.errors import ConfigError, RpcmpError, UnreachableError, VersionError
from rpcmp.job import code
from rpcmp.job.recovery import holders
from rpcmp.job.server_calls import dialer_of, require_one_each
from rpcmp.job.server_pool import forks_for
from rpcmp.job.status import visiting
from rpcmp.net.dialer import Dialer
from rpcmp.net.link_test import LinkSpeed
from rpcmp.process.fork_client import Forks
from rpcmp.server.client import StageClient
from rpcmp.server.connection import differences, versions, way_to
from rpcmp.server.host_facts import CheckRequest, HostFacts, examine, marked
from rpcmp.tools.doctor.diagnosis import diagnose
from rpcmp.tools.doctor.findings import Finding, HostReport, Link, SeenLink, links
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1 import doctor_pb2


def of_stage(
    config: Config, index: int, marker: str, driver_metrics: Collection[str] = ()
) -> CheckRequest:
    """One stage's.

    Args:
        marker: name of the driver's file in the folder of checkpoints; empty: it is not shared.
        driver_metrics: config keys of the metrics that the driver computes instead of a stage.
    """
    sinks = {key: value for key, value in _metrics(config).items() if key not in driver_metrics}
    graph, name = config.graph(), config.stage_names[index]
    callables = _names(
        {
            **_own_or_jobs(config, index),
            **({"loss": config.loss, **sinks} if name == graph.sink else {}),
            **(_data(config, "stage") if graph.parts(name) else {}),
        }
    )
    devices = [config.stage(index).device]
    return _order(config, {**_model(config, index), **callables}, marker, devices)


def of_spare(config: Config, marker: str, driver_metrics: Collection[str] = ()) -> CheckRequest:
    """That of a server which may take any stage."""
    stages = [of_stage(config, i, marker, driver_metrics) for i in range(config.num_stages)]
    callables = {key: name for stage in stages for key, name in stage.callables.items()}
    devices = sorted({device for stage in stages for device in stage.devices})
    return _order(config, callables, marker, devices)


def of_driver(config: Config, marker: str) -> CheckRequest:
    """The driver's: it may load the data, reads the list of layers, and computes some metrics."""
    callables = _names({**_data(config, "driver"), "report": config.report})
    model = _model(config, 0) if config.model is not None else {}
    order = _order(config, {**model, **callables}, marker, ["cpu"])
    return order.model_copy(update={"metrics": _names(_metrics(config))})


def _model(config: Config, index: int) -> dict[str, str]:
    if config.model is not None:
        return {"model.layers": config.model.layers}
    module = config.stage(index).module
    return {} if module is None else {f"stages.{index}.module": module}


def _own_or_jobs(config: Config, index: int) -> dict[str, Factory | None]:
    """Optimizer and scheduler, by the key that names them."""
    stage, here = config.stage(index), f"stages.{index}."
    return {
        f"{here if isinstance(stage.optimizer, Factory) else ''}optimizer": (
            config.optimizer_of(index)
        ),
        f"{here if isinstance(stage.scheduler, Factory) else ''}scheduler": (
            config.scheduler_of(index)
        ),
    }


def _metrics(config: Config) -> dict[str, Factory]:
    return {f"metrics.{name}": metric for name, metric in config.metrics.items()}


def _data(config: Config, at: str) -> dict[str, Factory | None]:
    """The datasets, where they are loaded there."""
    data = config.data
    if data is None or data.at != at:
        return {}
    own = {"data.sampler": data.sampler, "data.collate": data.collate}
    return {"data.train": data.train, "data.test": data.test, **own}


def _names(factories: Mapping[str, Factory | None]) -> dict[str, str]:
    return {key: factory.callable for key, factory in factories.items() if factory is not None}


def _order(
    config: Config, callables: dict[str, str], marker: str, devices: list[str]
) -> CheckRequest:
    return CheckRequest(
        callables=callables,
        devices=devices,
        folder=str(config.checkpoint_folder) if config.checkpoint is not None else "",
        marker=marker,
    )


SECONDS = 0.25
"""How long each way is measured at least; it takes a few times that."""


async def check_up(config: Config, connect: Sequence[str] | None = None) -> list[Finding]:
    """Everything that can be known before a run.

    Args:
        config: the job.
        connect: addresses of running stage servers, one a worker; None uses the config's or, where
            it has none, starts servers on this machine.

    Raises:
        ConfigError: not one address a worker, or one that is not on loopback and no certificates.
        SecurityError: the driver's certificate cannot be used.
    """
    addresses = config.addresses if connect is None else connect
    require_one_each(config, addresses)
    dialer = dialer_of(config, [*addresses, *config.recovery.spares])
    async with (
        forks_for(config, connect) as forks,
        visiting(config, dialer, addresses, len(config.workers), forks) as clients,
    ):
        checkup = Checkup(config, clients, dialer, forks)
        driver, stages, spares = await checkup.look()
        ways = await checkup.try_links([driver, *stages])
        return diagnose(config, driver, stages, spares, ways, time.time())


class Checkup:
    """One round of visits.

    Args:
        config: the job.
        clients: connections to its servers, by worker.
        dialer: how spares are talked to.
        forks: where the process comes from that looks at this host.
    """

    def __init__(
        self, config: Config, clients: Sequence[StageClient], dialer: Dialer, forks: Forks
    ) -> None:
        self._config, self._clients = config, clients
        self._workers = dict(zip((client.name for client in clients), config.workers, strict=True))
        self._dialer, self._forks = dialer, forks
        self._code = code.collect(config.folder) if config.ship_code else []

    async def look(self) -> tuple[HostReport, list[HostReport], list[HostReport]]:
        """The driver's host, and those of the stages and of the spares."""
        config = self._config
        with contextlib.ExitStack() as placed:
            marker = ""
            if config.checkpoint is not None and config.checkpoint.shared:
                with contextlib.suppress(OSError):  # the driver's own look says why
                    marker = placed.enter_context(marked(config.checkpoint_folder))
            home = await self._look_at_home(marker)
            own = home.facts.driver_metrics if home.facts else []
            stages = await asyncio.gather(
                *(self._visit(client, marker, own) for client in self._clients)
            )
            at = config.recovery.spares
            spares = await asyncio.gather(*(self._visit_spare(one, marker, own) for one in at))
            return home, stages, spares

    async def try_links(self, everybody: Sequence[HostReport]) -> list[SeenLink]:
        """The ways between those who are there, one after the other."""
        facts = {seen.name: seen.facts for seen in everybody if seen.facts}
        workers = self._config.workers
        labels = [worker.label for worker in workers]
        machines = [facts[label].machine if label in facts else label for label in labels]
        data = self._config.data
        sends_batches = data is None or data.at == "driver"
        held_by = holders(self._config, machines)
        used = links(self._config.graph(), workers, held_by, sends_batches)
        there = [link for link in used if link.one in facts and link.other in facts]
        return [await self._try(link, facts) for link in there]

    async def _visit(
        self, client: StageClient, marker: str, driver_metrics: Sequence[str]
    ) -> HostReport:
        worker = self._workers[client.name]
        order = of_stage(self._config, worker.stage_index, marker, driver_metrics)
        return await self._ask(client, client.name, worker, order)

    async def _visit_spare(
        self, address: str, marker: str, driver_metrics: Sequence[str]
    ) -> HostReport:
        order = of_spare(self._config, marker, driver_metrics)
        async with StageClient("spare", address, self._dialer) as client:
            return await self._ask(client, f"spare {address}", None, order)

    async def _ask(
        self, client: StageClient, name: str, worker: Member | None, order: CheckRequest
    ) -> HostReport:
        index = None if worker is None else worker.stage_index
        settings = self._most() if index is None else self._config.stage(index)
        way, facts, error = None, None, None
        try:
            way = await self._reach(client, index)
            request = doctor_pb2.ExamineRequest(
                job=pb.PrepareRequest(
                    job=self._config.name,
                    versions=versions(),
                    stage_index=index or 0,
                    replica=0 if worker is None else worker.replica,
                    threads=settings.threads,
                    code=self._code,
                    data_paths=self._config.data_paths,
                ),
                order=order.model_dump_json(),
            )
            facts = HostFacts.model_validate_json(await client.examine(request))
        except RpcmpError as raised:
            error = raised
        return HostReport(name, settings, client.address, facts, way, error)

    async def _reach(self, client: StageClient, index: int | None) -> LinkSpeed:
        """The way to a server that could take part.

        Raises:
            UnreachableError, SecurityError: there is none.
            VersionError, ConfigError: it is not what it should be.
        """
        try:  # says more of what is wrong than gRPC does
            way = await way_to(self._dialer, client.name, client.address, index, seconds=0)
        except UnreachableError as error:
            with contextlib.suppress(UnreachableError):
                self._require(await client.connect(), client.address, index)
            raise error from None
        self._require(await client.connect(), client.address, index)
        return way

    @staticmethod
    def _require(server: pb.DescribeResponse, address: str, index: int | None) -> None:
        if found := differences(versions(), server.versions):
            raise VersionError(f"{address}: {'; '.join(found)}: install the same everywhere")
        if index is None and not server.spare:
            raise ConfigError(
                f"{address} serves stage {server.stage_index} and no other: start it with --spare"
            )

    def _most(self) -> StageConfig:
        """What the most demanding stages want, of a spare that may have to take any."""
        stages = [self._config.stage(index) for index in range(self._config.num_stages)]
        wanted = [stage.memory for stage in stages if stage.memory]
        return StageConfig(
            threads=max(stage.threads for stage in stages),
            memory=max(wanted, key=parse_size, default=None),
        )

    async def _look_at_home(self, marker: str) -> HostReport:
        order = of_driver(self._config, marker)
        facts, error = None, None
        try:
            facts = await examine(
                order, self._forks, self._dialer.security, self._config.folder, threads=1
            )
        except RpcmpError as raised:
            error = raised
        return HostReport(DRIVER, StageConfig(), facts=facts, error=error)

    async def _try(self, link: Link, facts: Mapping[str, HostFacts]) -> SeenLink:
        if facts[link.one].network == facts[link.other].network:
            return SeenLink(link)
        clients = {client.name: client for client in self._clients}
        seconds = SECONDS if link.has_tensors else 0
        try:
            other = clients[link.other]
            if link.one == DRIVER:
                where = (other.name, other.address, self._workers[other.name].stage_index)
                return SeenLink(link, await way_to(self._dialer, *where, seconds))
            one = clients[link.one]
            way = await one.probe(self._probe(other, seconds))
            await other.probe(self._probe(one, seconds=0))
        except RpcmpError as error:
            return SeenLink(link, error=error)
        return SeenLink(link, way)

    def _probe(self, other: StageClient, seconds: float) -> doctor_pb2.ProbeRequest:
        return doctor_pb2.ProbeRequest(
            stage_name=other.name,
            address=other.address,
            stage_index=self._workers[other.name].stage_index,
            seconds=seconds,
        )
