"""Four hosts with unequal processors and links, each with a server that takes any stage."""

from __future__ import annotations

import contextlib
import json
import math
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rpcmp.config.planned_file import planned, written
from tests.support.cgroups import ControlGroup, control_group
from tests.support.lan import Hosts, hosts_of, lan
from tests.support.processes import Running


class Kind(NamedTuple):
    """A host's processor, in parts of the fastest one, and its link."""

    processor: float
    rate: str
    round_trip_s: float = 0.0


KINDS = (
    Kind(1.0, "1gbit"),
    Kind(0.7, "200mbit"),
    Kind(0.5, "50mbit"),
    Kind(0.25, "50mbit", 0.03),
)

WARM_STEPS = 2
"""First steps of a run, which touch memory and code for the first time."""

LONGEST_RUN = 600.0


@dataclass(frozen=True)
class UnequalHosts:
    """The hosts, by the numbers of their KINDS.

    Attributes:
        groups: whose processors are limited.
        cores: the part of a core that a processor of 1 has.
    """

    served: Hosts
    groups: Sequence[ControlGroup]
    cores: float

    @property
    def addresses(self) -> list[str]:
        """The addresses of their servers."""
        return [server.address for server in self.served.servers]

    def limit(self, number: int, part: float = 1.0) -> None:
        """Let a host have this part of its processor."""
        self.groups[number].limit_cores(self.cores * KINDS[number].processor * part)

    def plan(self, config: Path) -> list[dict[str, Any]]:
        """Return what `rpcmp plan` suggests for these hosts, the best first."""
        result = self.served.run(
            "plan", config, "--json", *self.served.connect, timeout=LONGEST_RUN
        )
        if result.code:
            raise RuntimeError(result.err)
        report = json.loads(result.out)
        for note in report["notes"]:
            print(f"note: {note}")
        found: list[dict[str, Any]] = report["plans"]
        return found

    def driving(self, config: Path) -> contextlib.AbstractContextManager[Running]:
        """Start a job, whose config has the addresses."""
        return self.served.running("drive", config, "--json", *self.served.certs)

    def train(self, config: Path, limit_s: float = math.inf) -> list[dict[str, Any]]:
        """Train to the end; return the steps' events, none if they clearly take above the limit."""
        ends = time.monotonic() + LONGEST_RUN
        with self.driving(config) as run:
            while not run.has_ended():
                seconds = [step["step_s"] for step in events(run, "step")][WARM_STEPS:]
                if len(seconds) >= WARM_STEPS and min(seconds) > limit_s:
                    return []
                if time.monotonic() > ends:
                    raise RuntimeError(f"{config} takes too long: {run.result()}")
                time.sleep(0.1)
            result = run.wait()
        if result.code:
            raise RuntimeError(f"{config}: {result.err}")
        return events(run, "step")


def events(run: Running, name: str) -> list[dict[str, Any]]:
    """Return the events with that name so far."""
    return [json.loads(line) for line in run.lines() if f'"event": "{name}",' in line]


def settled(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the median seconds of the second half of some steps; infinite without any."""
    seconds: list[float] = [step["step_s"] for step in steps[len(steps) // 2 :]]
    return median(seconds or [math.inf])


def with_stages(
    config: Path,
    name: str,
    addresses: Sequence[str],
    balance: Sequence[int],
    keys: Mapping[str, Any],
) -> Path:
    """Write a config beside another one, for these hosts; a key whose value is None is left out."""
    own = {key: value for key, value in keys.items() if value is not None}
    data = {**tomllib.loads(config.read_text()), **own}
    stages = [{"addresses": [address]} for address in addresses]
    path = config.with_name(f"{name}.toml")
    path.write_text(written("", planned(data, balance, stages, []), name))
    return path


@contextlib.contextmanager
def unequal_hosts(folder: Path, cores: float) -> Iterator[UnequalHosts]:
    """Make hosts with a part of a core each; all is gone at the end, whatever it ends with."""
    with lan(len(KINDS) + 1, folder) as hosts, contextlib.ExitStack() as made:
        groups = [made.enter_context(control_group("cpu")) for _ in hosts]
        driver, *others = (
            replace(host, inside=(*group.inside, *host.inside))
            for host, group in zip(hosts, groups, strict=True)
        )
        for host, kind in zip(others, KINDS, strict=True):
            if kind.round_trip_s:
                made.enter_context(host.delayed(kind.round_trip_s / 2))
            made.enter_context(host.limited(kind.rate))
        served = made.enter_context(hosts_of(driver, others, folder, is_spare=True))
        found = UnequalHosts(served, groups[1:], cores)  # the driver has no limit
        for number in range(len(KINDS)):  # once they have started, at full speed
            found.limit(number)
        yield found
