"""Forecast a run, for `rpcmp explain`.

Every figure comes from its source in a run: a process plans and loads data as a driver's process
does (`rpcmp.tools.explain.model_summary`), and hosts measure the layers as for `balance = "auto"`
and report facts as for `rpcmp doctor`. So whatever a run would refuse ends with the same error.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from rpcmp.checkpoint.folder import require_none_asked_for
from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER
from rpcmp.errors import ConfigError
from rpcmp.job.autobalance import (
    rehearsed,
    stage_hosts,
    with_cut,
    with_measured_balance,
)
from rpcmp.job.server_calls import code_access, dialer_for, server_addresses, shipped_code
from rpcmp.job.server_pool import connected, forks_for
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import is_loopback
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.calibration import Forecast
from rpcmp.pipelining.cost_model import Prediction, simulate, times_of
from rpcmp.pipelining.setting_grid import options_to_try
from rpcmp.pipelining.simulation import ActionTimes, SimulatedRun
from rpcmp.process.fork_client import Forks, NetworkOf
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.task import run_task
from rpcmp.server.connection import machine
from rpcmp.tools.explain.model_summary import ExplainedStage, ModelSummary, explain_stages
from rpcmp.tools.explain.schedule_picture import actions
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
        is_in_the_way: whether a run refuses to start because of it.
    """

    what: str
    path: str
    text: str
    is_in_the_way: bool = False


def job_files(config: Config) -> list[File]:
    files = [_code(config)] if config.ship_code else []
    if config.init is not None:
        files.append(
            File("weights", config.init, "read by each stage on its host, or sent by the driver")
        )
    if (folder := config.log_folder) is not None:
        text = "a folder for this run: config, versions, metrics, events, log, last steps' trace"
        files.append(File("run folder", str(folder), text))
    if (folder := config.tensorboard_folder) is not None:
        files.append(
            File("TensorBoard", str(folder), "scalars of this run, in a folder of its own")
        )
    return [*files, _checkpoints(config)]


def _code(config: Config) -> File:
    sources = shipped_code(config)
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
class Cut:
    """A place where a `module` can be cut.

    Attributes:
        after, before: names of the layers around it.
        is_used: whether a stage ends there.
        values: what passes, such as "float32[*, *, 32]".
        sample_bytes: of all values, per sample.
    """

    after: str
    before: str
    is_used: bool
    values: list[str]
    sample_bytes: int


@dataclass(frozen=True)
class Explanation:
    """Forecast of a run.

    Attributes:
        steps: optimizer steps; None if the datasets' sizes are unknown.
        epochs: passes over the data; None if the config counts steps.
        batches: number of mini-batches of each dataset, "train" and "test"; empty if unknown.
        balance: layers of each stage; empty if stages are modules of their own.
        parameters: of the whole model; tied ones count once.
        runs: the actions of each stage in one step by itself, simulated.
        prediction: from measurements; None if nothing was measured. Then in `runs` forwards, input
            gradients and weight gradients all take the same time.
        tries: keys of which the run tries other values in its first steps.
        cuts: where a `module` can be cut, see `Cut`; empty if it is given as layers or stages.
    """

    name: str
    steps: int | None
    epochs: int | None
    batches: dict[str, int]
    batch_size: int
    num_microbatches: int
    schedule: str
    microbatches_per_message: int
    tries: list[str]
    balance: list[int]
    parameters: int
    stages: list[ExplainedStage]
    runs: dict[str, list[SimulatedRun]]
    prediction: Prediction | None
    listeners: list[Listener]
    links: list[StageLink]
    files: list[File]
    notes: list[str]
    cuts: list[Cut]

    def as_json(self) -> dict[str, Any]:
        """Return plain data; times in seconds, memory in bytes."""
        plain = asdict(self)
        for stage, explained in zip(plain["stages"], self.stages, strict=True):
            stage["memory"]["total"] = explained.memory.total
        del plain["runs"]
        return {**plain, "actions": actions(self.runs, [stage.name for stage in self.stages])}


async def explain(
    config: Config, connect: Sequence[str] | None = None, measures: bool = True
) -> Explanation:
    """Forecast a run of `config`.

    Args:
        connect: addresses of running stage servers, one per worker; None uses the config's. If it
            has none, the run will start servers on this machine.
        measures: whether to measure layers on the stages' hosts. If not, no host is asked for
            anything, and servers need not run.
    """
    # These refuse impossible jobs.
    addresses = server_addresses(config, connect)
    dialer = dialer_for(config, [*addresses, *config.recovery.spares])
    cost_model.limits(config)
    if config.is_balanced_by_measurement and not measures:
        raise ConfigError('balance = "auto" is measured: explain it without --no-measure')
    async with forks_for(config, connect) as forks:
        configured, config = config.num_microbatches, config.with_full_microbatches()
        notes, forecast = list(config.warnings), None
        if (count := config.num_microbatches) < configured:
            notes.append(
                f"a mini-batch has {count} samples: {count} micro-batches, not {configured}"
            )
        config = await with_cut(config, connect, forks)
        if config.is_balanced_by_measurement:
            config, forecast = await with_measured_balance(config, connect, forks, rehearses=True)
        summary = await _summarize_model(config, addresses, forks)
        balance = [len(stage.layers) for stage in summary.stages]
        if measures and forecast is None and not summary.unknown:
            parts = balance if config.model is not None else [1] * len(balance)
            forecast = Forecast(await stage_hosts(config, connect, forks), parts)
            forecast = await rehearsed(config, forecast, connect, forks)
        if measures and addresses:
            places = await _ask_hosts(config, addresses, dialer, forks)
        else:
            places = _assume_places(config, addresses, await forks.network())
    runs, prediction = _predict(config, forecast)
    if forecast is not None and forecast.note:
        notes.append(forecast.note)
    hosts = None if forecast is None else forecast.hosts
    stages = explain_stages(config, summary, hosts, addresses)
    return Explanation(
        name=config.name,
        steps=summary.steps,
        epochs=None if config.steps is not None else config.epochs or 1,
        batches=summary.batches,
        batch_size=0 if config.data is None else config.data.batch_size,
        num_microbatches=config.num_microbatches,
        schedule=config.options.schedule,
        microbatches_per_message=config.options.microbatches_per_message,
        tries=_tried(config),
        balance=balance if config.model is not None else [],
        parameters=summary.parameters,
        stages=stages,
        runs=runs,
        prediction=prediction,
        listeners=job_listeners(config, places),
        links=stage_links(config, places, summary.tied),
        files=job_files(config),
        notes=[*notes, *_unknowns(config, summary, stages)],
        cuts=_cuts(config, balance),
    )


def _cuts(config: Config, balance: Sequence[int]) -> list[Cut]:
    if config.cut is None:
        return []
    ends = set(accumulate(balance))
    names = config.cut.layers
    return [
        Cut(before, after, number in ends, passing.values, passing.sample_bytes)
        for number, (before, after, passing) in enumerate(
            zip(names, names[1:], config.cut.passing, strict=False), start=1
        )
    ]


async def _summarize_model(config: Config, addresses: Sequence[str], forks: Forks) -> ModelSummary:
    order = {
        "op": "count",
        "config": config.model_dump_json(),
        "folder": str(config.folder),
        "is_here": not addresses,
    }
    access = code_access(config, addresses)
    answer = await run_task(order, compute_environment(threads=1), forks, access)
    return ModelSummary.model_validate_json(answer["summary"])


async def _ask_hosts(
    config: Config, addresses: Sequence[str], dialer: Dialer, forks: Forks
) -> dict[str, Whereabouts]:
    async with connected(config, dialer, addresses, len(config.workers), forks) as clients:
        driver, workers, _ = await HostSurvey(config, clients, addresses, dialer, forks).collect()
    places = {}
    for report in (driver, *workers):
        if (facts := report.facts) is None:
            raise report.error or ConfigError(f"nothing is known of {report.name}")
        places[report.name] = Whereabouts(
            report.address, facts.host, facts.machine, facts.network, facts.exposed
        )
    return places


def _assume_places(
    config: Config, addresses: Sequence[str], network: NetworkOf
) -> dict[str, Whereabouts]:
    """Return the place of each member as far as this host knows: this host, or its address."""
    here = Whereabouts("", platform.node(), machine(), network.name, network.reason)
    places = {DRIVER: here} | {worker.label: here for worker in config.workers}
    for worker, address in zip(config.workers, addresses, strict=False):
        host = address.rpartition(":")[0]
        is_here = is_loopback(host.strip("[]"))
        places[worker.label] = Whereabouts(
            address,
            here.host if is_here else host,
            here.machine if is_here else host,
            f"of {worker.label}",
            None,
        )
    return places


def _predict(
    config: Config, forecast: Forecast | None
) -> tuple[dict[str, list[SimulatedRun]], Prediction | None]:
    if forecast is None:
        return simulate(config, dict.fromkeys(config.stage_names, UNIT)).runs, None
    known = forecast.calibration
    if known is None:
        runs = simulate(config, times_of(forecast.hosts, forecast.balance)).runs
    else:
        runs = simulate(config, known.times, known.message_s, shared=known.shared).runs
    return runs, forecast.predict(config)


def _unknowns(
    config: Config, summary: ModelSummary, stages: Sequence[ExplainedStage]
) -> Iterator[str]:
    if summary.unknown:
        yield f"nothing was measured: {summary.unknown}"
    if config.balance_replicas:
        shared = [stage.name for stage in stages if stage.replicas > 1 and not stage.shares]
        if shared:
            yield f"the replicas of {', '.join(shared)} are measured when the run begins"
    for stage in stages:
        if stage.memory.optimizer is None:
            yield f"the optimizer of {stage.name} tells only by a real step what it keeps"


def _tried(config: Config) -> list[str]:
    options = options_to_try(config)
    keys = type(options[0]).model_fields
    return [key for key in keys if len({getattr(one, key) for one in options}) > 1]
