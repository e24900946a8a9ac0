"""Finding out what a run will do: the one function behind `rpcmp explain`.

Everything comes from where a run would have it: a process beside the driver plans and loads as the
driver's process does (`rpcmp.tools.explain.model_summary`), hosts measure the layers as for
`balance = "auto"`, and are looked at as by `rpcmp doctor`. So whatever a run would refuse is
refused here, in its words.

What `rpcmp explain` found out.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER
from rpcmp.errors import ConfigError
from rpcmp.job.autobalance import stage_hosts, with_full_microbatches
from rpcmp.job.server_calls import dialer_of, require_one_each
from rpcmp.job.server_pool import forks_for
from rpcmp.job.status import visiting
from rpcmp.net.security import is_loopback
from rpcmp.pipelining import inflight
from rpcmp.pipelining.cost_model import Prediction, predict, simulate, times_of
from rpcmp.pipelining.partition import StageHost, choose_balance
from rpcmp.pipelining.simulation import ActionTimes, Simulation
from rpcmp.process.child import Child
from rpcmp.process.fork_client import Forks
from rpcmp.process.interpreter import compute_environment
from rpcmp.server.connection import machine
from rpcmp.tools.doctor.checkup import Checkup
from rpcmp.tools.explain.model_summary import ModelSummary
from rpcmp.tools.explain.picture import Listener, StageLink, Whereabouts, actions, listeners, ways
from rpcmp.tools.explain.stage import ExplainedStage, File, files, stages


@dataclass(frozen=True)
class Explanation:
    """A run that has not begun.

    Attributes:
        name: the job's.
        steps: optimizer steps; None where the datasets' sizes are not known.
        epochs: passes over the data; None where the config counts steps.
        batches: mini-batches of each dataset, "train" and "test"; empty where they are unknown.
        batch_size: samples of a mini-batch.
        num_microbatches, schedule, microbatches_per_message: see the config's keys.
        balance: layers of each stage; empty where stages are modules of their own.
        parameters: of the whole model, tied ones once.
        stages: in the config's order.
        step: one step as the schedule does it, by itself.
        prediction: from what was measured; None: nothing was, and in `step` forwards, input
            gradients and weight gradients all take the same time.
        listeners: every port.
        ways: everybody who talks to somebody.
        files: what is read and written.
        notes: what else there is to say.
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
    ways: list[StageLink]
    files: list[File]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data; times in seconds, memory in bytes."""
        known = {
            key: getattr(self, key)
            for key in (
                *("name", "steps", "epochs", "batches", "batch_size", "num_microbatches"),
                *("schedule", "microbatches_per_message", "balance", "parameters"),
            )
        }
        stages = [asdict(stage) for stage in self.stages]
        for stage, found in zip(stages, self.stages, strict=True):
            stage["memory"]["total"] = found.memory.total
            stage["layers"] = [layer.model_dump() for layer in found.layers]
        predicted = self.prediction
        names = [stage.name for stage in self.stages]
        return {
            **known,
            "stages": stages,
            "actions": actions(self.step.runs, names),
            "prediction": None if predicted is None else asdict(predicted),
            "listeners": [asdict(each) for each in self.listeners],
            "links": [asdict(each) for each in self.ways],
            "files": [asdict(each) for each in self.files],
            "notes": self.notes,
        }


UNIT = ActionTimes(1.0, 1.0, 1.0)
"""Of every stage's micro-batch, where nothing was measured."""


async def explain(
    config: Config, connect: Sequence[str] | None = None, measures: bool = True
) -> Explanation:
    """What a run of `config` will do.

    Args:
        config: the job.
        connect: addresses of running stage servers, one a worker; None uses the config's or, where
            it has none, the run will start servers on this machine.
        measures: whether layers are measured, on the hosts that the stages are on; else nobody is
            asked for anything, and servers need not run.

    Raises:
        RpcmpError: why there will be no such run.
    """
    addresses = config.addresses if connect is None else list(connect)
    require_one_each(config, addresses)
    dialer_of(config, [*addresses, *config.recovery.spares])  # for what it refuses
    inflight.limits(config)  # likewise
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
        config, inventory = self._config, await self._count()
        if measures and hosts is None and not inventory.unknown:
            hosts = await stage_hosts(config, self._connect, self._forks)
        places = await (self._look() if measures and self._addresses else self._suppose())
        balance = [len(stage.layers) for stage in inventory.stages]
        step, prediction = self._predict(hosts, balance)
        found = stages(config, inventory, hosts, self._addresses)
        self._note(inventory, found)
        data = config.data
        return Explanation(
            name=config.name,
            steps=inventory.steps,
            epochs=None if config.steps is not None else config.epochs or 1,
            batches=inventory.batches,
            batch_size=0 if data is None else data.batch_size,
            num_microbatches=config.num_microbatches,
            schedule=config.schedule,
            microbatches_per_message=config.microbatches_per_message,
            balance=balance if config.model is not None else [],
            parameters=inventory.parameters,
            stages=found,
            step=step,
            prediction=prediction,
            listeners=listeners(config, places),
            ways=ways(config, places, inventory.tied),
            files=files(config),
            notes=self._notes,
        )

    def _with_full_microbatches(self) -> Config:
        """The job with as many micro-batches as a mini-batch has samples for."""
        given, full = self._config, with_full_microbatches(self._config)
        wanted, count = given.num_microbatches, full.num_microbatches
        if count < wanted:
            text = f"a mini-batch has {count} samples: {count} micro-batches, not {wanted}"
            self._notes.append(text)
        return full

    async def _count(self) -> ModelSummary:
        """What the job is made of, by a process that does what the driver's process would."""
        child = await Child.spawn(
            "rpcmp.tools.explain.model_summary", compute_environment(1), forks=self._forks
        )
        answer = await child.ask(
            {
                "op": "count",
                "config": self._config.model_dump_json(),
                "folder": str(self._config.folder),
                "is_here": not self._addresses,
            }
        )
        return ModelSummary.model_validate(answer["inventory"])

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

    async def _look(self) -> dict[str, Whereabouts]:
        """Where everybody is, as the hosts say it."""
        config = self._config
        dialer = dialer_of(config, [*self._addresses, *config.recovery.spares])
        count = len(config.workers)
        async with visiting(config, dialer, self._addresses, count, self._forks) as clients:
            home, seen, _ = await Checkup(config, clients, dialer, self._forks).look()
        places = {}
        for one in (home, *seen):
            if one.facts is None:
                raise one.error or ConfigError(f"nobody knows anything of {one.name}")
            facts = one.facts
            places[one.name] = Whereabouts(
                one.address, facts.host, facts.machine, facts.network, facts.exposed
            )
        return places

    async def _suppose(self) -> dict[str, Whereabouts]:
        """Where everybody is, as far as this host knows: all here, or at their addresses."""
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

    def _note(self, inventory: ModelSummary, found: Sequence[ExplainedStage]) -> None:
        config = self._config
        if inventory.unknown:
            self._notes.append(f"nothing was measured: {inventory.unknown}")
        if config.balance_replicas:
            names = ", ".join(
                name
                for name, stage in zip(config.stage_names, config.stages, strict=True)
                if stage.num_replicas > 1 and stage.shares is None
            )
            if names:
                self._notes.append(f"the replicas of {names} are measured when the run begins")
        for stage in found:
            if stage.memory.optimizer is None:
                text = f"the optimizer of {stage.name} tells only by a real step what it keeps"
                self._notes.append(text)
