"""Find out what a run will do, before it does it: `rpcmp explain`.

Every answer comes from where a run would get it: a process beside the driver plans and loads as the
driver's does (`rpcmp.tools.explain.model_summary`), hosts measure the layers as for
`balance = "auto"`, and are asked for facts as by `rpcmp doctor`. So whatever a run would refuse is
refused here, with the same error.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rpcmp.checkpoint.folder import require_none_asked_for
from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER
from rpcmp.errors import ConfigError
from rpcmp.job.autobalance import stage_hosts, with_full_microbatches
from rpcmp.job.server_calls import collect_code, dialer_for, require_addresses
from rpcmp.job.server_pool import connected, forks_for
from rpcmp.net.security import is_loopback
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.cost_model import Prediction, predict, simulate, times_of
from rpcmp.pipelining.partition import StageHost, choose_balance
from rpcmp.pipelining.simulation import ActionTimes, Simulation
from rpcmp.process.fork_client import Forks
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.task import run_task
from rpcmp.server.connection import machine
from rpcmp.tools.explain.model_summary import ModelSummary
from rpcmp.tools.explain.schedule_picture import actions
from rpcmp.tools.explain.stage_estimates import ExplainedStage, explain_stages
from rpcmp.tools.job_hosts import HostSurvey
from rpcmp.tools.job_links import Listener, StageLink, Whereabouts, job_listeners, stage_links

UNIT = ActionTimes(1.0, 1.0, 1.0)
"""Times of every stage if nothing was measured."""


@dataclass(frozen=True)
class File:
    """A file or a folder.

    Attributes:
        path: absolute, on the host that uses it.
        text: which process uses it, how and when.
        is_in_the_way: whether a run would refuse to start because of it.
    """

    what: str
    path: str
    text: str
    is_in_the_way: bool = False


def job_files(config: Config) -> list[File]:
    files = [_code(config)] if config.ship_code else []
    if config.init is not None:
        files.append(File("weights", config.init, "read by each stage, on its host"))
    if (folder := config.log_folder) is not None:
        text = "a folder for this run: config, versions, metrics, events, log, last steps' trace"
        files.append(File("run folder", str(folder), text))
    if (folder := config.tensorboard_folder) is not None:
        files.append(
            File("TensorBoard", str(folder), "scalars of this run, in a folder of its own")
        )
    return [*files, _checkpoints(config)]


def _code(config: Config) -> File:
    sources = collect_code(config.folder)
    size = sum(len(file.content) for file in sources)
    count = f"{len(sources)} Python file{'s' * (len(sources) != 1)}"
    return File("code", str(config.folder), f"{count} ({size:,} bytes), sent to each stage server")


def _checkpoints(config: Config) -> File:
    folder, section = config.checkpoint_folder, config.checkpoint
    if section is None:
        keeps = config.takes_snapshots
        text = "only if the run has to give up" if keeps else "none: recovery is off"
        return File("checkpoints", str(folder), text)
    when = [
        *([f"every {section.every_steps} steps"] if section.every_steps else []),
        *([f"every {section.every_seconds:g} s"] if section.every_seconds else []),
    ] or ["every 300 s"]
    where = (
        "one folder for all hosts"
        if section.shared
        else ("each stage's file on its host, and a copy on its neighbour's; the manifest here")
    )
    best = f", and the best by {section.best}" if section.best else ""
    text = f"{' or '.join(when)} and at the end, {section.keep} kept{best}; {where}"
    try:
        require_none_asked_for(folder)
    except ConfigError as error:
        return File("checkpoints", str(folder), str(error), is_in_the_way=True)
    return File("checkpoints", str(folder), text)


@dataclass(frozen=True)
class Explanation:
    """Forecast of a run.

    Attributes:
        steps: optimizer steps; None if the datasets' sizes are unknown.
        epochs: passes over the data; None if the config counts steps.
        batches: number of mini-batches of each dataset, "train" and "test"; empty if unknown.
        num_microbatches, schedule, microbatches_per_message: see the config's keys.
        balance: layers of each stage; empty if stages are modules of their own.
        parameters: of the whole model; tied ones count once.
        step: one step by itself, simulated.
        prediction: from measurements; None if nothing was measured. Then in `step` forwards, input
            gradients and weight gradients all take the same time.
    """

    name: str
    steps: int | None
    epochs: int | None
    batches: dict[str, int]
    batch_size: int
    num_microbatches: int
    schedule: str
    microbatches_per_message: int
    balance: list[int]
    parameters: int
    stages: list[ExplainedStage]
    step: Simulation
    prediction: Prediction | None
    listeners: list[Listener]
    links: list[StageLink]
    files: list[File]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return plain data; times in seconds, memory in bytes."""
        scalars = {
            key: getattr(self, key)
            for key in (
                *("name", "steps", "epochs", "batches", "batch_size", "num_microbatches"),
                *("schedule", "microbatches_per_message", "balance", "parameters"),
            )
        }
        stages = [asdict(stage) for stage in self.stages]
        for stage, explained in zip(stages, self.stages, strict=True):
            stage["memory"]["total"] = explained.memory.total
            stage["layers"] = [layer.model_dump() for layer in explained.layers]
        names = [stage.name for stage in self.stages]
        return {
            **scalars,
            "stages": stages,
            "actions": actions(self.step.runs, names),
            "prediction": self.prediction and asdict(self.prediction),
            "listeners": [asdict(each) for each in self.listeners],
            "links": [asdict(each) for each in self.links],
            "files": [asdict(each) for each in self.files],
            "notes": self.notes,
        }


async def explain(
    config: Config, connect: Sequence[str] | None = None, measures: bool = True
) -> Explanation:
    """Find out what a run of `config` will do.

    Args:
        connect: addresses of running stage servers, one per worker; None uses the config's. If it
            has none, the run will start servers on this machine.
        measures: whether to measure layers on the stages' hosts. If not, no host is asked for
            anything, and servers need not run.
    """
    addresses = config.addresses if connect is None else list(connect)
    require_addresses(config, addresses)
    # These are called for what they refuse.
    dialer_for(config, [*addresses, *config.recovery.spares])
    cost_model.limits(config)
    if config.is_balanced_by_measurement and not measures:
        raise ConfigError('balance = "auto" is measured: explain it without --no-measure')
    async with forks_for(config, connect) as forks:
        return await _Gatherer(config, addresses, connect, forks).gather(measures)


class _Gatherer:
    def __init__(
        self,
        config: Config,
        addresses: Sequence[str],
        connect: Sequence[str] | None,
        forks: Forks,
    ) -> None:
        self._config = config
        self._addresses, self._connect = addresses, connect
        self._forks = forks
        self._notes = list(config.warnings)

    async def gather(self, measures: bool) -> Explanation:
        hosts: list[StageHost] | None = None
        self._config = self._with_full_microbatches()
        if self._config.is_balanced_by_measurement:
            hosts = await stage_hosts(self._config, self._connect, self._forks)
            self._config = self._config.with_balance(choose_balance(hosts))
        config, summary = self._config, await self._summarize_model()
        if measures and hosts is None and not summary.unknown:
            hosts = await stage_hosts(config, self._connect, self._forks)
        asks_hosts = measures and self._addresses
        places = await (self._ask_hosts() if asks_hosts else self._assume_places())
        balance = [len(stage.layers) for stage in summary.stages]
        step, prediction = self._predict(hosts, balance)
        stages = explain_stages(config, summary, hosts, self._addresses)
        self._add_notes(summary, stages)
        data = config.data
        return Explanation(
            name=config.name,
            steps=summary.steps,
            epochs=None if config.steps is not None else config.epochs or 1,
            batches=summary.batches,
            batch_size=0 if data is None else data.batch_size,
            num_microbatches=config.num_microbatches,
            schedule=config.schedule,
            microbatches_per_message=config.microbatches_per_message,
            balance=balance if config.model is not None else [],
            parameters=summary.parameters,
            stages=stages,
            step=step,
            prediction=prediction,
            listeners=job_listeners(config, places),
            links=stage_links(config, places, summary.tied),
            files=job_files(config),
            notes=self._notes,
        )

    def _with_full_microbatches(self) -> Config:
        """Return the job with no more micro-batches than a mini-batch has samples."""
        config = with_full_microbatches(self._config)
        configured, count = self._config.num_microbatches, config.num_microbatches
        if count < configured:
            text = f"a mini-batch has {count} samples: {count} micro-batches, not {configured}"
            self._notes.append(text)
        return config

    async def _summarize_model(self) -> ModelSummary:
        answer = await run_task(
            {
                "op": "count",
                "config": self._config.model_dump_json(),
                "folder": str(self._config.folder),
                "is_here": not self._addresses,
            },
            compute_environment(threads=1),
            self._forks,
        )
        return ModelSummary.model_validate(answer["summary"])

    def _predict(
        self, hosts: Sequence[StageHost] | None, balance: list[int]
    ) -> tuple[Simulation, Prediction | None]:
        if hosts is None:
            times = dict.fromkeys(self._config.stage_names, UNIT)
            return simulate(self._config, times), None
        parts = balance if self._config.model is not None else [1] * len(balance)
        return (
            simulate(self._config, times_of(hosts, parts)),
            predict(self._config, hosts, parts),
        )

    async def _ask_hosts(self) -> dict[str, Whereabouts]:
        config = self._config
        dialer = dialer_for(config, [*self._addresses, *config.recovery.spares])
        count = len(config.workers)
        async with connected(config, dialer, self._addresses, count, self._forks) as clients:
            driver, workers, _ = await HostSurvey(config, clients, dialer, self._forks).collect()
        places = {}
        for report in (driver, *workers):
            if (facts := report.facts) is None:
                raise report.error or ConfigError(f"nothing is known of {report.name}")
            places[report.name] = Whereabouts(
                report.address, facts.host, facts.machine, facts.network, facts.exposed
            )
        return places

    async def _assume_places(self) -> dict[str, Whereabouts]:
        """Return where each member is, as far as this host knows: here, or at its address."""
        here = platform.node()
        network = await self._forks.network()
        places = {DRIVER: Whereabouts("", here, machine(), network.name, network.reason)}
        for index, worker in enumerate(self._config.workers):
            if not self._addresses:
                places[worker.label] = places[DRIVER]
                continue
            address = self._addresses[index]
            host = address.rpartition(":")[0]
            is_here = is_loopback(host.strip("[]"))
            places[worker.label] = Whereabouts(
                address,
                here if is_here else host,
                machine() if is_here else host,
                f"of {worker.label}",
                None,
            )
        return places

    def _add_notes(self, summary: ModelSummary, stages: Sequence[ExplainedStage]) -> None:
        config = self._config
        if summary.unknown:
            self._notes.append(f"nothing was measured: {summary.unknown}")
        if config.balance_replicas:
            names = ", ".join(
                name
                for name, stage in zip(config.stage_names, config.stages, strict=True)
                if stage.num_replicas > 1 and stage.shares is None
            )
            if names:
                self._notes.append(f"the replicas of {names} are measured when the run begins")
        for stage in stages:
            if stage.memory.optimizer is None:
                text = f"the optimizer of {stage.name} tells only by a real step what it keeps"
                self._notes.append(text)
