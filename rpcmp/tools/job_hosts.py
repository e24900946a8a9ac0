"""Collect facts about every host of a job, for `rpcmp doctor` and `rpcmp explain`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rpcmp.config.job_sections import StageConfig
from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER, Member
from rpcmp.config.types import Factory, parse_size
from rpcmp.errors import ConfigError, RpcmpError, UnreachableError, VersionError
from rpcmp.job.server_calls import code_access, shipped_code
from rpcmp.net.peer_connection import Dialer
from rpcmp.process.fork_client import Forks
from rpcmp.server.client import StageClient
from rpcmp.server.connection import differences, versions
from rpcmp.server.host_facts import CheckRequest, HostFacts, examine, marked
from rpcmp.server.link_speed import LinkSpeed, measure_link
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1 import doctor_pb2


@dataclass(frozen=True)
class HostReport:
    """Facts about the host of a worker, a spare or the driver.

    Attributes:
        settings: the stage's; for a spare, what the most demanding stages need, else defaults.
        address: HOST:PORT of its server; empty for the driver.
        facts: None if they are unknown.
        speed: of the link from the driver; None for the driver itself, and if there is no link.
        error: the reason if facts or speed are missing.
    """

    name: str
    settings: StageConfig
    address: str = ""
    facts: HostFacts | None = None
    speed: LinkSpeed | None = None
    error: RpcmpError | None = None


class HostSurvey:
    """Collects facts about the hosts of a job, reached as the job would reach them.

    Args:
        addresses: of running servers; empty: they were started for this.
        dialer: opens connections to the spares.
        forks: forks the process that examines this host.
    """

    def __init__(
        self,
        config: Config,
        clients: Sequence[StageClient],
        addresses: Sequence[str],
        dialer: Dialer,
        forks: Forks,
    ) -> None:
        self._config, self._clients = config, clients
        self._dialer, self._forks = dialer, forks
        self._access = code_access(config, addresses)
        self._code = shipped_code(config)

    async def collect(self) -> tuple[HostReport, list[HostReport], list[HostReport]]:
        """Return the reports on the driver's host, on the workers' in order, and on the spares'."""
        config = self._config
        with contextlib.ExitStack() as stack:
            marker = ""
            if config.checkpoint is not None and config.checkpoint.shared:
                with contextlib.suppress(OSError):  # the driver's own report has the reason
                    marker = stack.enter_context(marked(config.checkpoint_folder))
            driver = await self._ask_driver(marker)
            own = driver.facts.driver_metrics if driver.facts else []
            workers = await asyncio.gather(
                *(
                    self._ask(
                        client, client.name, worker, stage_request(config, index, marker, own)
                    )
                    for client, worker in zip(self._clients, config.workers, strict=True)
                    for index in [worker.stage_index]
                )
            )
            spares = await asyncio.gather(
                *(
                    self._ask_spare(address, spare_request(config, marker, own))
                    for address in config.recovery.spares
                )
            )
            return driver, workers, spares

    async def _ask_driver(self, marker: str) -> HostReport:
        request = driver_request(self._config, marker)
        facts, error = None, None
        try:
            facts = await examine(
                request, self._forks, self._dialer.security, self._config.folder, self._access
            )
        except RpcmpError as raised:
            error = raised
        return HostReport(DRIVER, StageConfig(), facts=facts, error=error)

    async def _ask_spare(self, address: str, request: CheckRequest) -> HostReport:
        async with StageClient("spare", address, self._dialer) as client:
            return await self._ask(client, f"spare {address}", None, request)

    async def _ask(
        self, client: StageClient, name: str, worker: Member | None, request: CheckRequest
    ) -> HostReport:
        index = None if worker is None else worker.stage_index
        settings = self._largest_settings() if index is None else self._config.stage(index)
        speed, facts, error = None, None, None
        try:
            speed = await self._reach(client, index)
            examine_request = doctor_pb2.ExamineRequest(
                job=pb.PrepareRequest(
                    job=self._config.name,
                    versions=versions(),
                    stage_index=index or 0,
                    replica=0 if worker is None else worker.replica,
                    threads=settings.threads,
                    code=self._code,
                    data_paths=self._config.data_paths,
                    init=self._config.init_path,
                ),
                order=request.model_dump_json(),
            )
            facts = HostFacts.model_validate_json(await client.examine(examine_request))
        except RpcmpError as raised:
            error = raised
        return HostReport(name, settings, client.address, facts, speed, error)

    async def _reach(self, client: StageClient, index: int | None) -> LinkSpeed:
        """Return the latency of a server that can take part."""
        try:  # its errors are more precise than gRPC's
            speed = await measure_link(self._dialer, client.name, client.address, index, seconds=0)
        except UnreachableError as error:
            with contextlib.suppress(UnreachableError):
                _require_suitable(await client.connect(), client.address, index)
            raise error from None
        _require_suitable(await client.connect(), client.address, index)
        return speed

    def _largest_settings(self) -> StageConfig:
        """Return the most threads and memory of any stage, for a spare that may take each."""
        stages = [self._config.stage(index) for index in range(self._config.num_stages)]
        memory = [stage.memory for stage in stages if stage.memory]
        return StageConfig(
            threads=max(stage.threads for stage in stages),
            memory=max(memory, key=parse_size, default=None),
        )


def _require_suitable(server: pb.DescribeResponse, address: str, index: int | None) -> None:
    if different := differences(versions(), server.versions):
        raise VersionError(f"{address}: {'; '.join(different)}: install the same everywhere")
    if index is None and not server.spare:
        raise ConfigError(
            f"{address} serves stage {server.stage_index} and no other: start it with --spare"
        )


def stage_request(
    config: Config, index: int, marker: str, driver_metrics: Collection[str] = ()
) -> CheckRequest:
    """Return the request to the host of a stage.

    Args:
        marker: name of the driver's file in the checkpoint folder; empty if it is not shared.
        driver_metrics: config keys of the metrics that the driver computes instead of a stage.
    """
    graph, name = config.graph(), config.stage_names[index]
    metrics = {key: m for key, m in _metrics(config).items() if key not in driver_metrics}
    is_sink = name == graph.sink
    callables = _names(
        _model(config, index),
        _optimizer_and_scheduler(config, index),
        {"loss": config.loss, **metrics} if is_sink else {},
        _data(config, "stage", counts=is_sink) if graph.parts(name) else {},
    )
    request = _request(config, callables, marker, [config.stage(index).device])
    return request.model_copy(update={"builds": _model(config, index)})


def spare_request(
    config: Config, marker: str, driver_metrics: Collection[str] = ()
) -> CheckRequest:
    """Return the request to a spare server, which may take any stage."""
    stages = [stage_request(config, i, marker, driver_metrics) for i in range(config.num_stages)]
    callables = _names(*(stage.callables for stage in stages))
    devices = sorted({device for stage in stages for device in stage.devices})
    request = _request(config, callables, marker, devices)
    builds = {key: factory for stage in stages for key, factory in stage.builds.items()}
    return request.model_copy(update={"builds": builds})


def driver_request(config: Config, marker: str) -> CheckRequest:
    """Return the request to the driver: it lists layers, and may load data and compute metrics."""
    callables = _names(
        _model(config, 0) if config.model is not None else {},
        _data(config, "driver", counts=True),
        {"report": config.report},
    )
    request = _request(config, callables, marker, ["cpu"])
    return request.model_copy(update={"metrics": _names(_metrics(config))})


Callables = Mapping[str, Factory | str | None]
"""Callables of a job, or their names, by config key; None if the key is not set."""


def _names(*groups: Callables) -> dict[str, str]:
    return {
        key: each if isinstance(each, str) else each.callable
        for group in groups
        for key, each in group.items()
        if each is not None
    }


def _model(config: Config, index: int) -> dict[str, Factory]:
    if config.model is not None:
        key = "model.layers" if config.model.module is None else "model.module"
        return {key: Factory(callable=config.model.source, kwargs=config.model.kwargs)}
    stage = config.stage(index)
    assert stage.module is not None
    factory = Factory(callable=stage.module, kwargs=stage.kwargs)
    return {f"stages.{index}.module": factory}


def _optimizer_and_scheduler(config: Config, index: int) -> Callables:
    """Return both by the config key that names them: the stage's own, or the job's."""
    stage, prefix = config.stage(index), f"stages.{index}."
    return {
        f"{prefix if isinstance(stage.optimizer, Factory) else ''}optimizer": (
            config.optimizer_of(index)
        ),
        f"{prefix if isinstance(stage.scheduler, Factory) else ''}scheduler": (
            config.scheduler_of(index)
        ),
    }


def _metrics(config: Config) -> dict[str, Factory]:
    return {f"metrics.{name}": metric for name, metric in config.metrics.items()}


def _data(config: Config, at: str, counts: bool) -> Callables:
    """Return what loads samples at this place, and what weighs them, if it `counts` targets."""
    data = config.data
    if data is None or data.at != at:
        return {}
    sources = {f"data.{key}": getattr(data, key) for key in ("train", "test", "sampler", "collate")}
    return {**sources, "loss_weight": config.weighing if counts else None}


def _request(
    config: Config, callables: dict[str, str], marker: str, devices: list[str]
) -> CheckRequest:
    return CheckRequest(
        callables=callables,
        devices=devices,
        folder=str(config.checkpoint_folder) if config.checkpoint is not None else "",
        relative_folder=config.relative_checkpoint_folder,
        marker=marker,
        init=config.init_path,
    )
