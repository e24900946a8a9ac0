"""How long a step of a chain of hosts takes: simulated, or as the steps of a rehearsal tell. Pure.

A chain that was rehearsed takes as long as it took. What that taught about its hosts and messages
goes into the simulation of the others: how much longer than by themselves layers take in a run,
where caches are cold and a host's relay and snapshots use its processor too; what a stage takes
besides, however few its layers; what a message costs besides the wire; and how long the samples of
a step take to load.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rpcmp.config.job_sections import StageConfig
from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.calibration import WAITING, Calibration, MeasuredSteps
from rpcmp.pipelining.chain_cuts import NANOSECONDS, Chain, ChainKey, HostCosts
from rpcmp.pipelining.partition import StageHost, bounds
from rpcmp.pipelining.plan import Connection, Pair, PlanHost
from rpcmp.pipelining.simulation import Wire

MOST_SIMULATED = 64
"""Micro-batches of a step that are simulated, if twice the number of stages is not more."""

MOST_LONGER = 4.0
"""How much longer than by themselves layers may take: what a few tiny ones need besides tells
nothing about others."""

NUM_TRIED = 50
"""Values that are tried for what a stage takes besides its layers."""

NOISE = 0.03
"""How much the stages of a run differ in any case."""

SAME_HOST = 10.0
"""How much more two stages of one host tell about it than those of two hosts do, of which one may
really be slower in a run."""


def with_hosts(
    config: Config, settings: StageConfig, addresses: Sequence[str], balance: Sequence[int]
) -> Config:
    """Return the job with a stage on each of these hosts, all with the same settings."""
    if config.model is None:
        raise ConfigError("only a job with [model] can be planned: its stages are its layers")
    model = config.model.model_copy(update={"balance": list(balance), "num_stages": None})
    stages = [settings.model_copy(update={"addresses": [address]}) for address in addresses]
    return config.model_copy(update={"model": model, "stages": stages})


@dataclass(frozen=True)
class Rehearsed:
    """A chain of which some steps were trained.

    Attributes:
        step_s: seconds per step under these options; the mean of the rehearsals.
        busy_s: of these, in which each stage computed.
        times: how often it was rehearsed.
    """

    chain: Chain
    options: ScheduleOptions
    step_s: float
    busy_s: list[float]
    times: int = 1

    def again(self, step_s: float, busy_s: Sequence[float]) -> Rehearsed:
        """Return it with one more rehearsal."""
        pairs = zip((self.step_s, *self.busy_s), (step_s, *busy_s), strict=True)
        step, *busy = (old + (new - old) / (self.times + 1) for old, new in pairs)
        return replace(self, step_s=step, busy_s=busy, times=self.times + 1)


class Sample(NamedTuple):
    """What a stage of a rehearsal took.

    Attributes:
        alone_s: seconds per step of its layers by themselves.
        busy_s: those that it computed.
    """

    host: int
    alone_s: float
    busy_s: float


class ChainEstimates:
    """The steps of any chain of some hosts.

    Args:
        config: with the number of micro-batches that a full mini-batch has.
        settings: of every stage; without addresses.
        links: from each host to each other; those that are missing take no time.

    Attributes:
        hosts: with their layers as they are known by now.
        message_s: what a message costs each stage besides the wire.
        loading_s: seconds for the samples of a step, whichever the chain.
        rehearsed: the chains of which steps were trained.
        failed: those of which steps could not be.
    """

    def __init__(
        self,
        config: Config,
        settings: StageConfig,
        hosts: Sequence[PlanHost],
        links: Mapping[Pair, Connection],
    ) -> None:
        self.config, self.settings, self._links = config, settings, links
        self._alone = self.hosts = list(hosts)
        count, recompute = config.num_microbatches, settings.recompute
        self._costs_alone = [HostCosts(host.profile, None, count, recompute) for host in hosts]
        self.message_s = self.loading_s = 0.0
        self.rehearsed: dict[ChainKey, Rehearsed] = {}
        self.failed: set[ChainKey] = set()
        self._samples: list[Sample] = []
        self._slowness = _slowness([costs.total_ns for costs in self._costs_alone])
        self._messages: list[float] = []
        self._steps: dict[tuple[ChainKey, ScheduleOptions | None], float] = {}

    def job(self, chain: Chain, options: ScheduleOptions) -> Config:
        """Return the job on these hosts."""
        addresses = [self.hosts[host].address for host in chain.hosts]
        return options.on(with_hosts(self.config, self.settings, addresses, chain.balance))

    def job_with(self, num_stages: int) -> Config:
        """Return the job with so many stages, wherever they are."""
        names = [str(number) for number in range(num_stages)]
        return with_hosts(self.config, self.settings, names, [1] * num_stages)

    def learn(self, chain: Chain, options: ScheduleOptions, measured: MeasuredSteps) -> None:
        """Learn from steps of a chain; hosts that were in none are taken to be like the others."""
        config = options.on(self.job_with(len(chain.hosts)))
        wires = self._wires(chain, config.stage_names)
        known = Calibration.fit(config, measured, wires)
        busy = [sum(measured.busy[name].values()) for name in config.stage_names]
        for host, part, there in zip(chain.hosts, bounds(chain.balance), busy, strict=True):
            alone_s = self._costs_alone[host].ns(*part) / NANOSECONDS
            self._samples.append(Sample(host, alone_s, there))
        besides_s = self._besides()
        longer = {
            each.host: min(self._ratio(each, besides_s), MOST_LONGER) for each in self._samples
        }
        others = statistics.median(longer.values())
        self.hosts = [
            replace(
                host,
                profile=host.profile.scaled(ratio := longer.get(number, others)),
                besides_s=ratio * besides_s * self._slowness[number],
            )
            for number, host in enumerate(self._alone)
        ]
        if len(chain.hosts) > 1 and measured.data_share <= WAITING:
            self._messages.append(known.message_s)
            self.message_s = statistics.median(self._messages)
        self.loading_s = max(self.loading_s, known.loading_s)
        self._steps.clear()
        found, before = Rehearsed(chain, options, measured.step_s, busy), self.of(chain)
        if before is not None and before.options == options:
            found = before.again(measured.step_s, busy)
        self.rehearsed[chain.key] = found

    def _ratio(self, sample: Sample, besides_s: float) -> float:
        """Return how much longer its layers took than alone, if it did something besides."""
        alone_s = sample.alone_s + besides_s * self._slowness[sample.host]
        return sample.busy_s / alone_s if alone_s else 1.0

    def _besides(self) -> float:
        """Return what a stage takes per step besides its layers, on a host of average speed.

        A stage with few layers that takes many times as long as alone may be on a host that is slow
        in a run, or its processor has been busy with messages, whose pauses count. So this is the
        least value with which layers take as many times as long in all stages as they do with any
        value, or nearly. It is taken to be in proportion to how slow a host's layers are alone.
        """
        samples = [each for each in self._samples if each.alone_s and each.busy_s]
        if not samples:
            return 0.0
        most = min(each.busy_s / self._slowness[each.host] for each in samples)
        tried = [number * most / NUM_TRIED for number in range(NUM_TRIED + 1)]
        unevenness = {each: self._unevenness(samples, each) for each in tried}
        enough = max(NOISE**2, min(unevenness.values()))
        return next(each for each in tried if unevenness[each] <= enough)

    def _unevenness(self, samples: Sequence[Sample], besides_s: float) -> float:
        """Return by how much layers do not take the same number of times as long as alone."""
        of_hosts = defaultdict[int, list[float]](list)
        for each in samples:
            of_hosts[each.host].append(math.log(self._ratio(each, besides_s)))
        means = [statistics.mean(ratios) for ratios in of_hosts.values()]
        within = max(statistics.pvariance(ratios) for ratios in of_hosts.values())
        has_several = any(len(ratios) > 1 for ratios in of_hosts.values())
        between = statistics.pvariance(means) / (SAME_HOST if has_several else 1.0)
        return round(within + between, 9)  # where no value matters, none is less for rounding

    def of(self, chain: Chain) -> Rehearsed | None:
        """Return what was measured of a chain, if it was rehearsed."""
        return self.rehearsed.get(chain.key)

    def step_seconds(self, chain: Chain, options: ScheduleOptions | None = None) -> float:
        """Return the seconds per step; None: under the options that the run starts with.

        Once the pipeline is full, each further micro-batch takes as long as the one before: of many
        only the first are simulated.
        """
        if (known := self.of(chain)) is not None and known.options == options:
            return max(known.step_s, *self._copying(chain), 0.0)
        key = chain.key, options
        if key not in self._steps:
            at_least = max(self.loading_s, *self._copying(chain), 0.0)
            self._steps[key] = max(self._estimated(chain, options), at_least)
        return self._steps[key]

    def bytes_before(self, layer: int) -> int:
        """Return the bytes of a micro-batch's activations in front of a layer, on the wire."""
        largest = max(host.profile.layers[layer].input_bytes for host in self.hosts)
        return largest // 2 if self.config.wire_dtype == "bfloat16" else largest

    def connection(self, one: int, other: int) -> Connection:
        pair = self.hosts[one].address, self.hosts[other].address
        return self._links.get(pair, Connection())

    def _copying(self, chain: Chain) -> Iterator[float]:
        """Yield the seconds per step in which each host sends the next one what it must.

        That is the last step's snapshot, which its neighbour holds, beside the activations. A stage
        writes no other one before it has arrived, so a step cannot be shorter.
        """
        recovery, count = self.config.recovery, len(chain.hosts)
        if not (recovery.enabled and recovery.mirror_every_steps) or count < 2:
            return
        for place, (start, end) in enumerate(bounds(chain.balance)):
            host, neighbour = chain.hosts[place], chain.hosts[(place + 1) % count]
            layers = self.hosts[host].profile.layers[start:end]
            sent = sum(layer.snapshot_bytes for layer in layers) / recovery.mirror_every_steps
            if place + 1 < count:
                sent += self.config.num_microbatches * self.bytes_before(end)
            yield sent / self.connection(host, neighbour).bytes_per_s

    def _estimated(self, chain: Chain, options: ScheduleOptions | None) -> float:
        config = self.job_with(len(chain.hosts))
        config = config if options is None else options.on(config)
        count, most = config.num_microbatches, max(MOST_SIMULATED, 2 * len(chain.hosts))
        if count <= most:
            return self._simulated(config, chain)
        fewer, more = (
            self._simulated(config.model_copy(update={"num_microbatches": number}), chain)
            for number in (most // 2, most)
        )
        return more + (count - most) * (more - fewer) / (most - most // 2)

    def _simulated(self, config: Config, chain: Chain) -> float:
        names = config.stage_names
        # Of a whole step, of which `config` may have but a part.
        count, recompute = self.config.num_microbatches, self.settings.recompute
        hosts = [
            StageHost(name, host.profile, None, count, 0, recompute, host.besides_s)
            for name, host in zip(names, (self.hosts[host] for host in chain.hosts), strict=True)
        ]
        updates = cost_model.updates_of(hosts, chain.balance)
        times, wires = cost_model.times_of(hosts, chain.balance), self._wires(chain, names)
        return cost_model.step_seconds(config, times, updates, self.message_s, wires)

    def _wires(self, chain: Chain, names: Sequence[str]) -> dict[Pair, Wire]:
        wires = {}
        for place, (_, end) in enumerate(bounds(chain.balance)[:-1]):
            for one, other in ((place, place + 1), (place + 1, place)):
                way = self.connection(chain.hosts[one], chain.hosts[other])
                seconds = self.bytes_before(end) / way.bytes_per_s
                wires[names[one], names[other]] = Wire(way.latency_s, seconds)
        return wires


def _slowness(times: Sequence[float]) -> list[float]:
    """Return how slow hosts are as against their average, by their times for the whole model."""
    average = statistics.mean(times)
    return [each / average if each else 1.0 for each in times]
