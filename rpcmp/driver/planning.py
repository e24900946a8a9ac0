"""What a job is made of before anything runs: assignments, metrics, datasets.

All that can be wrong with a config or the code that it names shows here, on the driver's host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rpcmp import factory, plan
from rpcmp.config import Config
from rpcmp.driver.datasets import Datasets
from rpcmp.driver.metrics import Metrics
from rpcmp.plan import Assignment
from rpcmp.setting import Setting


class Planned(NamedTuple):
    """A job that may begin.

    Attributes:
        assignments: of every worker, in the config's order.
        metrics: those that the driver computes.
        datasets: loaded here; None: the stages have them, or nobody needs any.
        loads_at_stages: whether the stages load what they read of the batch themselves.
    """

    assignments: list[Assignment]
    metrics: Metrics
    datasets: Datasets | None
    loads_at_stages: bool


def plan_job(config: Config, settings: Sequence[Setting] = (), load_data: bool = True) -> Planned:
    """Import, plan and load all that the driver needs.

    Args:
        config: the job, with its balance.
        settings: what it may change to on the way.
        load_data: whether it trains on the datasets of `[data]`.

    Raises:
        RpcmpError: why there can be no such job.
    """
    metrics = Metrics.load(config)
    at_stages = load_data and config.data is not None and config.data.at == "stage"
    assignments = plan.assign(config, settings, metrics.names, at_stages)
    datasets = Datasets.load(config) if load_data and not at_stages else None
    if config.report is not None:
        factory.accepting(config.report, "report", num_args=1)
    return Planned(assignments, metrics, datasets, at_stages)
