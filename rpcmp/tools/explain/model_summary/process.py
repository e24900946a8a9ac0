"""The part of an explanation that needs torch and the user's code; the process ends with it.

supervisor ──count──> planned as for a run, every stage's modules counted ──counted──> supervisor
"""

from __future__ import annotations

import sys
from pathlib import Path

from rpcmp.config.schema import Config
from rpcmp.driver.datasets import Datasets, total_steps
from rpcmp.driver.process import Planned, plan_job
from rpcmp.errors import RpcmpError, one_line
from rpcmp.pipelining import devices, inflight
from rpcmp.process import task
from rpcmp.process.channel import Channel, Message
from rpcmp.tools.explain.model_summary.count import ModelSummary, count


def run(channel: Channel) -> None:
    """Do what the supervisor asks for; the process ends here."""
    task.run_task(channel, _count)


def _count(message: Message) -> Message:
    folder = Path(message["folder"])
    sys.path.insert(0, str(folder))
    config = Config.model_validate_json(message["config"]).with_folder(folder)
    return {"event": "counted", "inventory": take(config, message["is_here"]).model_dump()}


def take(config: Config, is_here: bool = True) -> ModelSummary:
    """What the job is made of.

    Args:
        config: the job, with its balance.
        is_here: whether all of it runs on this machine.

    Raises:
        RpcmpError: why there can be no such job, as a run would say it.
    """
    inflight.limits(config)
    planned = plan_job(config)
    firsts = [part for part in planned.assignments if part.replica == 0]
    datasets, unknown = _datasets(config, planned, is_here)
    steps, batches = config.steps, {}
    if datasets is not None:
        steps = total_steps(config, len(datasets.train))
        both = {"train": datasets.train, "test": datasets.test}
        batches = {name: len(one) for name, one in both.items() if one is not None}
        datasets.close()
    stages = [count(part) for part in firsts]
    return ModelSummary(
        stages=stages,
        parameters=sum(stage.parameters - stage.foreign_parameters for stage in stages),
        tied=[list(dict.fromkeys(place.stage for place in p)) for p in firsts[0].tied],
        batches=batches,
        steps=steps,
        unknown=unknown,
        available_bytes=devices.available_bytes(devices.resolve_device("cpu")),
    )


def _datasets(config: Config, planned: Planned, is_here: bool) -> tuple[Datasets | None, str]:
    """Those of the driver; where the stages load them, the same ones, as far as they are here."""
    if not planned.loads_at_stages:
        return planned.datasets, ""
    try:
        return Datasets.load(config), ""
    except RpcmpError as error:
        if is_here:
            raise
        return None, f"the datasets are the stages': {one_line(error)}"
