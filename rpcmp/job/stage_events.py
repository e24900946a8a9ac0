"""The events that tell a run's stages and workers: at first, and once hosts have joined or left."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from rpcmp.config.schema import Config
from rpcmp.config.stored import redacted
from rpcmp.job.server_pool import ServerPlace
from rpcmp.observability.events import RunEvent, StagesEvent
from rpcmp.observability.events.run_events import GraphInfo, WorkerInfo
from rpcmp.server.connection import software_versions


def run_event(config: Config, job_id: str, places: Sequence[ServerPlace]) -> RunEvent:
    """Return the event `run`: the job, its stages, its workers and their addresses.

    A run that starts its servers itself has no `places` yet: see the event `generation`.
    """
    return RunEvent(
        name=config.name,
        config=redacted(config.model_dump(mode="json")),
        versions=software_versions(),
        driver=platform.node(),
        pid=os.getpid(),
        job_id=job_id,
        graph=_graph(config),
        workers=_workers(config, places),
    )


def stages_event(config: Config, places: Sequence[ServerPlace], step: int) -> StagesEvent:
    """Return the event `stages`: what the run has from now on."""
    return StagesEvent(step=step, graph=_graph(config), workers=_workers(config, places))


def _graph(config: Config) -> GraphInfo:
    graph, names = config.graph(), config.stage_names
    return {
        "stages": [  # in the graph's order, as the rows of a pipeline diagram
            {
                "name": name,
                "index": names.index(name),
                "inputs": [str(reference) for reference in graph.inputs[name]],
                "replicas": config.stage(names.index(name)).num_replicas,
                "device": config.stage(names.index(name)).device,
                "schedule_row": row,
            }
            for row, name in enumerate(graph.stages)
        ]
    }


def _workers(config: Config, places: Sequence[ServerPlace]) -> list[WorkerInfo]:
    known = list(places) or [ServerPlace("", worker.stage_index) for worker in config.workers]
    return [
        {
            "label": worker.label,
            "stage": worker.stage,
            "stage_index": place.stage_index,
            "replica": worker.replica,
            "address": place.address,
        }
        for worker, place in zip(config.workers, known, strict=True)
    ]
