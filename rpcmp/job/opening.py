"""What is told of a run before anything else: what it is, of which parts, and where they are."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from rpcmp.checkpoint.redaction import redacted
from rpcmp.config import Config
from rpcmp.control.options import versions
from rpcmp.process.channel import Message


def opening(config: Config, job_id: str, addresses: Sequence[str]) -> Message:
    """The event `run`.

    Args:
        config: the job; its balance may still be "auto".
        job_id: unique for each run.
        addresses: of the stage servers, by worker; empty: they are to be started here, and the
            event `generation` says where they are then.
    """
    software = versions()
    places = list(addresses) or [""] * len(config.workers)
    return {
        "event": "run",
        "name": config.name,
        "config": redacted(config.model_dump(mode="json")),
        "versions": {
            "rpcmp": software.rpcmp,
            "torch": software.torch,
            "python": software.python,
        },
        "driver": platform.node(),
        "pid": os.getpid(),
        "job_id": job_id,
        "graph": {"stages": _stages(config)},
        "workers": [
            {
                "label": worker.label,
                "stage": worker.stage,
                "stage_index": worker.stage_index,
                "replica": worker.replica,
                "address": address,
            }
            for worker, address in zip(config.workers, places, strict=True)
        ],
    }


def _stages(config: Config) -> list[Message]:
    """The stages in the graph's order, which is that of the rows of a pipeline diagram."""
    graph, names = config.graph(), config.stage_names
    return [
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
