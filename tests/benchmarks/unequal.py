"""Plans for four unequal hosts, next to what runs measure there and to what is found by trying.

    python -m tests.benchmarks.unequal [plans] [equal] [tries] [rebalance] [--models NAME ...]

    plans       each plan of `rpcmp plan`: predicted / measured step
    equal       an equal split in the order given / the planned config
    tries       the planned config, under the schedule options that its run finds / the best of
                `--tries` configs, in turn, `--duels` times each
    rebalance   a processor halved in mid-run, rebalance = "auto": the throughput `--seconds` later,
                in parts of that of the best cut for the new speeds, of the `--cuts` most promising

Hosts are network namespaces with links of 1 Gbit, 200 Mbit, 50 Mbit, and 50 Mbit with a round trip
of 30 ms; their processors are cgroups of 1, 0.7, 0.5 and 0.25 times `--cores` of a core. With the
default all four fit two cores. Other processes of the machine take nothing of their parts, but slow
caches and memory. An interrupt leaves nothing behind; SIGKILL does.

Every other run has fixed schedule options, so that none tries others: the plan's, which the equal
split and the cuts have as well, those of the try, or those that a run has found.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.cgroups import PERIOD
from tests.support.processes import JobFolder
from tests.support.searching import Searcher, Try, fastest_cuts, split
from tests.support.unequalhosts import (
    KINDS,
    LONGEST_RUN,
    UnequalHosts,
    events,
    settled,
    unequal_hosts,
    with_stages,
)
from tests.support.unequaljobs import MODELS, Model

PARTS = ("plans", "equal", "tries", "rebalance")

SPEEDS = [kind.processor for kind in KINDS]

SETTLES, MEASURED = 25.0, 10.0
"""Seconds of a run before a processor is halved, and those whose steps count after it."""

TUNED_STEPS = 120
"""Steps of a run that looks for its options."""

HALF = 0.5
ENDLESS = 10**6

Steps = list[dict[str, Any]]


@dataclass
class Found:
    """What was measured of a model; empty if it was not asked for.

    Attributes:
        ratios: predicted / measured steps.
        equal, tries, rebalance: as at the top.
    """

    ratios: list[float] = field(default_factory=list)
    equal: float | None = None
    tries: float | None = None
    rebalance: float | None = None

    def row(self, name: str) -> str:
        cells = [" ".join(f"{ratio:.2f}" for ratio in self.ratios)]
        others = (self.equal, self.tries, self.rebalance)
        cells += ["" if each is None else f"{each:.2f}" for each in others]
        return f"{name:12} {cells[0]:>20} {cells[1]:>16} {cells[2]:>15} {cells[3]:>16}"


HEAD = f"{'model':12} {'predicted / measured':>20} {'equal / planned':>16} " + (
    f"{'planned / best':>15} {'throughput':>16}"
)


@dataclass(frozen=True)
class Bench:
    """One model on the hosts, and the plans for it, the best first."""

    hosts: UnequalHosts
    model: Model
    config: Path
    plans: Sequence[dict[str, Any]]

    def planned(self, plan: dict[str, Any], **keys: Any) -> Path:
        """Write the config of a plan; `keys` are further ones, or others."""
        addresses = [stage["address"] for stage in plan["stages"]]
        balance = keys.pop("balance", plan["balance"])
        return with_stages(self.config, "planned", addresses, balance, {**plan["options"], **keys})

    def measured(self, plan: dict[str, Any], **keys: Any) -> float:
        return settled(self.hosts.train(self.planned(plan, **keys)))

    def found_options(self) -> dict[str, Any]:
        """Return the schedule options that a run of the planned config finds."""
        plan = self.plans[0]
        keys = dict.fromkeys(plan["options"])  # a key without a value is left to the run
        with self.hosts.driving(self.planned(plan, **keys, steps=TUNED_STEPS)) as run:
            if (result := run.wait(LONGEST_RUN)).code:
                raise RuntimeError(result.err)
            searches = events(run, "schedule")
        options = {key: searches[-1].get(key) for key in keys} if searches else keys
        print(f"  its run has found {options}", flush=True)
        return options

    def planned_under(self, options: dict[str, Any]) -> float:
        """Return the seconds of a step of the best plan under other options."""
        seconds = self.measured(self.plans[0], **options)
        print(f"  planned {self.plans[0]['balance']}: {ms(seconds)}", flush=True)
        return seconds

    def ratios(self) -> Iterator[float]:
        """Yield predicted / measured step of each plan."""
        for plan in self.plans:
            seconds = self.measured(plan)
            hosts = [self.hosts.addresses.index(stage["address"]) for stage in plan["stages"]]
            print(
                f"  hosts {hosts}, balance {plan['balance']}: "
                f"{'tried' if plan['is_rehearsed'] else 'predicted'} {ms(plan['step_s'])}, "
                f"measured {ms(seconds)}",
                flush=True,
            )
            yield plan["step_s"] / seconds

    def equal(self) -> float:
        """Return the seconds of a step of an equal split in the order given."""
        balance, options = split(self.model.count, [1.0] * len(KINDS)), self.plans[0]["options"]
        path = with_stages(self.config, "equal", self.hosts.addresses, balance, options)
        seconds = settled(self.hosts.train(path))
        print(f"  equal split {list(balance)}: {ms(seconds)}", flush=True)
        return seconds

    def tried(self, one: Try, limit_s: float = math.inf) -> float:
        """Return the seconds of a step of a config; infinite if it is clearly above the limit."""
        addresses = [self.hosts.addresses[host] for host in one.hosts]
        options = one.options(self.model.microbatches)
        path = with_stages(self.config, "tried", addresses, one.balance, options)
        seconds = settled(self.hosts.train(path, limit_s))
        print(f"  {one}: {ms(seconds)}", flush=True)
        return seconds

    def throughput(self, seconds: float, cuts: int) -> float:
        """Return the throughput after the fastest host was halved, in parts of the best cut's."""
        addresses = [stage["address"] for stage in self.plans[0]["stages"]]
        hosts = [self.hosts.addresses.index(address) for address in addresses]
        halved = max(hosts, key=SPEEDS.__getitem__)
        speeds = [SPEEDS[host] * (HALF if host == halved else 1.0) for host in hosts]
        try:
            last, steps = self.rebalanced(halved, seconds)
            now = settled([s for s in steps if s["time"] > steps[-1]["time"] - MEASURED])
            print(f"  {seconds:g} s later, {last}: {ms(now)}", flush=True)
            others = fastest_cuts(self.model.count, speeds, cuts)
            candidates = [last, *(cut for cut in others if cut != last)]
            return min(self.cut(balance, steps) for balance in candidates) / now
        finally:
            self.hosts.limit(halved)

    def rebalanced(self, halved: int, seconds: float) -> tuple[list[int], Steps]:
        """Halve a host's processor in mid-run; return the run's last balance, and its steps."""
        balance = self.plans[0]["balance"]
        path = self.planned(self.plans[0], rebalance="auto", steps=ENDLESS)
        with self.hosts.driving(path) as run:
            run.wait_for_line('"event": "step"')
            time.sleep(SETTLES)
            self.hosts.limit(halved, HALF)
            time.sleep(seconds + MEASURED)
            steps, moves = events(run, "step"), events(run, "rebalance")
        for move in moves:
            print(
                f"  step {move['step']}: {move['outcome']} to {move['balance']}: {move['reason']}"
            )
            balance = move["balance"]
        return balance, steps

    def cut(self, balance: list[int], before: Steps) -> float:
        """Return the seconds of a step under a cut; its losses must be those of steps before."""
        steps = self.hosts.train(self.planned(self.plans[0], balance=balance))
        same = all(a["loss"] == b["loss"] for a, b in zip(steps, before, strict=False))
        print(f"  {balance}: {ms(settled(steps))}{'' if same else ', OTHER BITS'}", flush=True)
        return settled(steps)

    def compare(self, parts: Sequence[str], options: argparse.Namespace) -> Found:
        """Measure these parts; see the top."""
        found = Found()
        if "plans" in parts:
            found.ratios = list(self.ratios())
        if "equal" in parts:
            pairs = [(self.equal(), self.measured(self.plans[0])) for _ in range(options.pairs)]
            found.equal = median(equal / planned for equal, planned in pairs)
        if "tries" in parts:
            rng = random.Random(options.seed)
            best = Searcher(SPEEDS, self.model.count, self.tried, rng).search(options.tries)
            # The best of many was lucky as well.
            chosen = self.found_options()
            duels = [(self.tried(best), self.planned_under(chosen)) for _ in range(options.duels)]
            bests, planned = zip(*duels, strict=True)
            found.tries = median(planned) / median(bests)
        if "rebalance" in parts and self.model.has_equal_layers:
            found.rebalance = self.throughput(options.seconds, options.cuts)
        return found


def ms(seconds: float) -> str:
    return "given up" if seconds == math.inf else f"{seconds * 1e3:,.0f} ms"


def stop(signum: int, _: object) -> None:
    """Leave, and let nothing interrupt what cleans up."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + signum)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cores", type=float, default=0.5, help="of the fastest host")
    parser.add_argument("--steps", type=int, default=20, help="of a run; the second half counts")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--tries", type=int, default=40)
    parser.add_argument("--duels", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cuts", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    if unknown := set(options.parts).difference(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}")
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
    parts = [f"{options.cores * speed:.3g}" for speed in SPEEDS]
    print(f"processors of {', '.join(parts)} cores, in periods of {PERIOD // 1000} ms")
    found = {}
    with (
        tempfile.TemporaryDirectory() as name,
        unequal_hosts(Path(name), options.cores) as hosts,
    ):
        for kind in options.models:
            model = MODELS[kind]
            config = JobFolder(Path(name) / kind).config(model.job(options.steps))
            print(kind, flush=True)
            bench = Bench(hosts, model, config, hosts.plan(config))
            found[kind] = bench.compare(options.parts, options)
    print(HEAD, *(each.row(kind) for kind, each in found.items()), sep="\n")
    if errors := [abs(ratio - 1) for each in found.values() for ratio in each.ratios]:
        print(f"error of {len(errors)} predictions: {median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
