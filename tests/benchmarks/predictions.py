"""Predicted next to measured steps, of cases of `rpcmp bench` and examples that run as they are.

    python -m tests.benchmarks.predictions [--pairs N] [--steps N] [CASE or EXAMPLE[:STAGES] ...]

Each pair is a prediction, as of `rpcmp explain`, and a run under the options that it was made for.
A second prediction is for another balance, by moving one layer: the steps that it is corrected by
had the first one. Prints the ratios predicted / measured, and of their errors median and worst.
"""

from __future__ import annotations

import argparse
import asyncio
from statistics import median

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.job.autobalance import rehearsed, stage_hosts, with_cut
from rpcmp.job.server_pool import forks_for
from rpcmp.job.training_run import drive
from rpcmp.observability.events import Event, StepEvent
from rpcmp.pipelining.calibration import Forecast
from rpcmp.pipelining.partition import choose_balance
from rpcmp.tools.bench import cases
from tests.support.places import EXAMPLES

CASES = ("sleep:4", "overhead:2", "overhead:4", "transformer:2", "activations:2", "activations:4")

PREPARED = {"finetune"}
"""Examples that read weights which are to be made first."""


def case_of(name: str) -> Config:
    """Return the job of a case, which may have a number of stages: "sleep:4"."""
    case, _, stages = name.partition(":")
    return cases.load(case, int(stages) if stages else None).config


def load(name: str) -> Config:
    """Return the job under the options that it starts with."""
    path = EXAMPLES / f"{name.partition(':')[0]}.toml"
    config = loader.load_config(path) if path.exists() else case_of(name)
    return config.options.on(config)


async def forecast(config: Config) -> tuple[Config, Forecast]:
    async with forks_for(config, None) as forks:
        config = (await with_cut(config, None, forks)).with_full_microbatches()
        hosts = await stage_hosts(config, None, forks)
        if config.model is None:
            balance = [1] * config.num_stages
        else:
            balance = choose_balance(hosts)
            config = config.with_balance(balance)
        return config, await rehearsed(config, Forecast(hosts, balance), None, forks)


def run(config: Config, steps: int) -> float:
    """Return the median seconds of the second half of a run's steps."""
    times: list[float] = []

    def report(event: Event) -> None:
        if isinstance(event, StepEvent):
            times.append(event.step_s)

    log = config.log.model_copy(update={"folder": ""})
    update = {"steps": steps, "epochs": None, "ui": None, "log": log}
    asyncio.run(drive(config.model_copy(update=update), report, evaluate=False))
    return median(times[len(times) // 2 :])


def moved(balance: list[int]) -> list[int] | None:
    """Return another balance: a layer of the stage with most goes to a neighbour."""
    most = max(range(len(balance)), key=balance.__getitem__)
    if balance[most] == 1 or len(balance) == 1:
        return None
    other = list(balance)
    other[most] -= 1
    other[most - 1 if most else 1] += 1
    return other


def measure(name: str, steps: int) -> tuple[float, float | None]:
    """Return predicted / measured of the chosen balance, and of another one if there is one."""
    config, found = asyncio.run(forecast(load(name)))
    predicted = found.predict(config).step_s
    first = predicted / run(config, steps)
    print(f"{name}: {found.balance} predicted {predicted * 1e3:.1f} ms, ratio {first:.2f}", end="")
    other = moved(found.balance) if config.model is not None else None
    if other is None or found.calibration is None:
        print(flush=True)
        return first, None
    config = config.with_balance(other)
    calibration = found.calibration.moved(found.hosts, found.balance, other)
    second = Forecast(found.hosts, other, calibration).predict(config).step_s / run(config, steps)
    print(f"; {other} {second:.2f}", flush=True)
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser()
    examples = {path.stem for path in EXAMPLES.glob("*.toml")} - PREPARED
    parser.add_argument("names", nargs="*", default=[*CASES, *sorted(examples)])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    ratios: dict[str, list[tuple[float, float | None]]] = {name: [] for name in arguments.names}
    for _ in range(arguments.pairs):
        for name in arguments.names:
            ratios[name].append(measure(name, arguments.steps))
    for index, what in enumerate(("the measured balance", "a balance with a layer moved")):
        errors = {}
        for name, found in ratios.items():
            if values := [each[index] for each in found if each[index] is not None]:
                errors[name] = abs(median(value for value in values if value is not None) - 1)
        if errors:
            worst = max(errors, key=errors.__getitem__)
            print(
                f"{what}: error {median(errors.values()):.1%}, worst {errors[worst]:.1%} of {worst}"
            )


if __name__ == "__main__":
    main()
