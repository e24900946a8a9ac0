"""Four hosts with unequal processors and links, each with a server that takes any stage."""

from __future__ import annotations

import contextlib
import io
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
from tests.support.lan import Host, cli, driving, issue, lan
from tests.support.processes import Running, running
from tests.support.quotas import Quota, quota


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
        cores: the part of a core that a processor of 1 has.
        addresses: of their servers.
    """

    driver: Host
    quotas: Sequence[Quota]
    addresses: Sequence[str]
    certs: Path
    cores: float

    def limit(self, number: int, part: float = 1.0) -> None:
        """Let a host have this part of its processor."""
        self.quotas[number].limit(self.cores * KINDS[number].processor * part)

    def plan(self, config: Path) -> list[dict[str, Any]]:
        """Return what `rpcmp plan` suggests for these hosts, the best first."""
        where = ("--certs", self.certs / "driver", "--connect", ",".join(self.addresses))
        with running("plan", config, "--json", *where, under=self.driver.inside) as run:
            result = run.wait(LONGEST_RUN)
        if result.code:
            raise RuntimeError(result.err)
        report = json.loads(result.out)
        for note in report["notes"]:
            print(f"note: {note}")
        found: list[dict[str, Any]] = report["plans"]
        return found

    @contextlib.contextmanager
    def driving(self, config: Path) -> Iterator[Running]:
        with driving(config, self.certs, on=self.driver) as run:
            yield run

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
    with lan(len(KINDS) + 1, folder) as (driver, *hosts), contextlib.ExitStack() as made:
        with contextlib.redirect_stdout(io.StringIO()):
            certs = issue(folder / "certs", hosts[0].address)
            for host in hosts:
                cli(certs, "issue", "--spare", "--name", host.name, "--host", host.address)
        quotas, addresses = [], []
        for host, kind in zip(hosts, KINDS, strict=True):
            if kind.round_trip_s:
                made.enter_context(host.delayed(kind.round_trip_s / 2))
            made.enter_context(host.limited(kind.rate))
            quotas.append(made.enter_context(quota()))
            where = ("--listen", f"{host.address}:50051", "--certs", certs / host.name)
            under = (*quotas[-1].inside, *host.inside)
            run = made.enter_context(running("serve", "--spare", *where, under=under))
            addresses.append(run.wait_for_line(r"SERVING on (\S+)")[1])
        within = made.enter_context(quota())  # without a limit
        driver = replace(driver, inside=(*within.inside, *driver.inside))
        found = UnequalHosts(driver, quotas, addresses, certs, cores)
        for number in range(len(KINDS)):  # once they have started, at full speed
            found.limit(number)
        yield found
