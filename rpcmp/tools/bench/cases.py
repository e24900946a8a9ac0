"""The cases of `rpcmp bench`: the frozen ones of cases.toml, and the user's own configs.

A case is a job without scheduler, clipping, mixed precision, evaluation and metrics: the plain step
is measured, which every contestant can do.
"""

from __future__ import annotations

import asyncio
import copy
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.config.types import Arguments, Positive, Strict
from rpcmp.errors import ConfigError
from rpcmp.pipelining.simulation import ActionTimes


class FrozenCase(Strict):
    """A table of cases.toml, which explains the keys."""

    max_stages: Positive | None = None
    microbatch_size: Positive | None = None
    halves: Arguments = Field(default_factory=dict)
    peers: list[str] | None = None
    in_flight_per_stage: Positive | None = None
    job: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: name of the frozen case, or path of the config.
        config: the job that every contestant trains.
        halves: the same job with a model that can be cut into twice as many parts.
        nominal: times of each stage's actions, if the case fixes them.
        is_frozen: whether losses must be equal; a user's model may draw random numbers.
        peers: names of the default peers; None: all of them.
    """

    name: str
    config: Config
    halves: Config
    nominal: ActionTimes | None
    is_frozen: bool
    peers: list[str] | None = None
    notes: tuple[str, ...] = ()


def load(
    name: str,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    overrides: Sequence[str] = (),
) -> Case:
    """Load the case called `name`, or the user's config at that path.

    Args:
        num_stages, num_microbatches: override the case's.
        overrides: "key=value" for its job, as with `rpcmp drive --set`.
    """
    if name in frozen():
        return _frozen_case(name, num_stages, num_microbatches, overrides)
    if Path(name).suffix == ".toml":
        return _own_case(Path(name), num_stages, num_microbatches, overrides)
    raise ConfigError(
        f"no bench case {name!r}; there are {', '.join(frozen())}, or give a config.toml"
    )


@cache
def frozen() -> dict[str, FrozenCase]:
    text = resources.files("rpcmp.tools.bench").joinpath("cases.toml").read_text(encoding="utf-8")
    return {name: FrozenCase.model_validate(table) for name, table in tomllib.loads(text).items()}


def _frozen_case(
    name: str, num_stages: int | None, num_microbatches: int | None, overrides: Sequence[str]
) -> Case:
    case = frozen()[name]
    job = {"name": name, "ship_code": False, **copy.deepcopy(case.job)}
    model = job["model"]
    stages = model["num_stages"] = num_stages or model["num_stages"]
    if case.max_stages is None:
        model.setdefault("kwargs", {})["num_stages"] = stages
    elif stages > case.max_stages:
        raise ConfigError(
            f"bench case {name!r}: {stages} stages, but its model has {case.max_stages} layers"
        )
    if num_microbatches is not None:
        job["num_microbatches"] = num_microbatches
    if case.in_flight_per_stage is not None:
        job["max_in_flight"] = case.in_flight_per_stage * stages
    if case.microbatch_size is not None:
        job["data"]["batch_size"] = case.microbatch_size * job["num_microbatches"]
    for override in overrides:
        loader.apply_override(job, override)
    source = f"bench case {name!r}"
    loader.parse_config(job, source)  # before it is reduced, which relies on it
    config = loader.parse_config(_plain_training(job), source)
    model = job["model"]  # valid, and maybe a new one
    kwargs = model.get("kwargs", {})
    job["model"] = {**model, "kwargs": {**kwargs, **case.halves}}
    halves = loader.parse_config(_plain_training(job), source)
    nominal = action_times(kwargs["times_ms"]) if "times_ms" in kwargs else None
    return Case(name, config, halves, nominal, is_frozen=True, peers=case.peers)


def action_times(times_ms: Any) -> ActionTimes:
    """Return how long a stage sleeps that is given these milliseconds; see `models.sleeping`."""
    kinds = ("forward", "input_gradient", "weight_gradient")
    given = times_ms if isinstance(times_ms, Mapping) else {}
    times = [given.get(kind) for kind in kinds]
    if not all(isinstance(each, int | float) and each >= 0 for each in times):
        raise ConfigError(f"times_ms = {times_ms}: give {', '.join(kinds)}, each at least 0")
    return ActionTimes(*(given[kind] / 1e3 for kind in kinds))


def _own_case(
    path: Path, num_stages: int | None, num_microbatches: int | None, overrides: Sequence[str]
) -> Case:
    job = loader.load_config(path, overrides)
    if job.data is None:
        raise ConfigError(f"{path} has no [data] section; a benchmark needs samples")
    if job.is_balanced_by_measurement:
        raise ConfigError(
            f'{path} has balance = "auto"; give the list that `rpcmp drive` shows, so that all '
            "contestants train the same stages"
        )
    if job.sums_gradients:
        raise ConfigError(
            f"{path} has replicas or tied parameters, which the other contestants do not know: "
            "compare it without them"
        )
    data = job.model_dump(exclude_unset=True)
    if num_microbatches is not None:
        data["num_microbatches"] = num_microbatches
    if num_stages is not None and num_stages != job.num_stages:
        if job.model is None or job.stages:
            raise ConfigError(
                f"--stages {num_stages}: {path} names its {job.num_stages} stages one by one"
            )
        data["model"] = {**data["model"], "num_stages": num_stages, "balance": None}
    parsed = loader.parse_config(_plain_training(data), str(path)).with_folder(job.folder)
    config = parsed.without_schedulers().without_mixed_precision()
    config = asyncio.run(_with_cut(config))
    if config.tied:
        raise ConfigError(
            f"{path}: the model's `module` has tied parameters, which the other contestants do not "
            "know: compare it without them"
        )
    return Case(str(path), config, config, None, is_frozen=False, notes=_features_left_out(job))


async def _with_cut(config: Config) -> Config:
    from rpcmp.job.autobalance import with_cut  # gRPC takes a while to import
    from rpcmp.job.server_pool import forks_for

    async with forks_for(config, []) as forks:
        return await with_cut(config, [], forks)


def _features_left_out(job: Config) -> tuple[str, ...]:
    notes = []
    if job.has_schedulers or job.max_grad_norm is not None:
        notes.append("without learning-rate scheduler and gradient clipping")
    if job.loss_scaling is not None or any(map(job.autocast_of, range(job.num_stages))):
        notes.append("without autocast and loss scaling")
    return tuple(notes)


def _plain_training(data: dict[str, Any]) -> dict[str, Any]:
    """Reduce the job to training, on mini-batches of one size."""
    return {
        **data,
        "max_grad_norm": None,
        "metrics": {},
        "report": None,
        "evaluate_every": 0,
        "evaluate_every_steps": None,
        "early_stopping": None,
        "checkpoint": None,
        "data": {**data["data"], "test": None, "drop_last": True},
    }
