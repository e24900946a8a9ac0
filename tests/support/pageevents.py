"""Events of a made-up run for the page: four stages, one of them replicated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rpcmp.observability.events import RunEvent
from rpcmp.observability.run_folder import RunInfo
from rpcmp.observability.run_report import Record
from tests.support.runevents import typed

Event = dict[str, Any]

BEGAN = 1_800_000_000.0
STEP_S = 0.25
STAGES = {
    "fine": ["input"],
    "coarse": ["fine.down"],
    "lift": ["coarse.down", "coarse.skip"],
    "finish": ["lift", "fine.skip", "target"],
}
REPLICATED = "lift"


def labels() -> list[str]:
    """Return the labels of all workers."""
    return ["fine", "coarse", "lift:0", "lift:1", "finish"]


def run(num_steps: int, lost_after: int | None = None, name: str = "unet") -> Iterator[Event]:
    """Yield the events of a run.

    After step `lost_after` the worker "coarse" is lost and comes back.
    """
    now, generation = BEGAN, 1
    begin = {"steps": None, "epochs": 3, "schedule": "zero-bubble", "data": {"batch_size": 32}}
    yield _run(name, begin) | {"time": now, "generation": 1}
    yield {"event": "start", "steps": num_steps, "time": now, "generation": 1}
    yield _generation(1, 0) | {"time": now + 0.5}
    for step in range(1, num_steps + 1):
        now += STEP_S
        stamp = {"time": now, "generation": generation}
        yield _step(step) | stamp
        if step % 4 == 0:
            yield vitals(step, generation=generation) | stamp
        if step % 8 == 0:
            yield timeline(step) | stamp
        if step % 50 == 0:
            yield _evaluation(step) | stamp
            yield _checkpoint(step) | stamp
        if step == lost_after:
            yield fault(step) | stamp
            now += 3
            generation += 1
            yield _generation(generation, step) | {"time": now}
            yield {"event": "recovered", "step": step, "seconds": 3.0} | {
                "time": now,
                "generation": generation,
            }
    stamp = {"time": now, "generation": generation}
    metrics = {"loss": 0.1, "accuracy": 0.97}
    yield {"event": "summary", "steps": num_steps, "loss": 0.1, "metrics": metrics} | {
        "parameters_sha256": "ab" * 32,
        **stamp,
    }
    yield {"event": "end", "outcome": "done", "error": ""} | stamp


def record(name: str, events: Iterable[Event]) -> Record:
    """Return the record of a run folder with these events."""
    found = tuple(typed(event) for event in events)
    info = RunInfo(name=name, started=BEGAN, outcome="done")
    config = next(event.config for event in found if isinstance(event, RunEvent))
    return Record(Path(name), info, config, found)


def fault(step: int, stage: str = "coarse") -> Event:
    """Return the event of a lost `stage`."""
    text = f"the worker of stage {stage!r} was killed by signal 9"
    return {"event": "fault", "step": step, "stage": stage, "error": text, "generation": 1}


def vitals(step: int, generation: int = 1, **states: str) -> Event:
    """Return the vitals of all workers; `states` has the states of workers that do not run."""
    workers = {
        label: {
            "state": states.get(label.replace(":", "_"), "running"),
            "phase": "forward",
            "memory": (300 + 40 * index) * 2**20,
            "in_flight": 4 - index,
            "host": f"host-{'abcde'[index]}",
            "pid": 4000 + index,
            "restarts": generation - 1 if label == "coarse" else 0,
        }
        for index, label in enumerate(labels())
    }
    return {
        "event": "vitals",
        "step": step,
        "generation": generation,
        "workers": workers,
        "driver": {"state": "running", "host": "laptop", "pid": 7, "memory": 400 * 2**20},
        "links": list(_links()),
    }


def timeline(step: int) -> Event:
    """Return a pipeline of four micro-batches, with 10 ms per action of each worker."""
    stages = []
    for row, label in enumerate(labels()):
        spans: list[list[Any]] = []
        for microbatch in range(4):
            spans.append(["F", microbatch, *_times(row + microbatch)])
        for microbatch in range(4):
            spans.append(["B", microbatch, *_times(12 - row + 2 * microbatch)])
            spans.append(["W", microbatch, *_times(13 - row + 2 * microbatch)])
        spans.append(["O", -1, *_times(24)])
        idle = [["bubble", 100.0, 100.0 + 0.01 * row]] if row else []
        idle.append(["network", 100.21 - 0.01 * row, 100.225 - 0.01 * row])
        idle.append(["overhead", 100.225 - 0.01 * row, 100.24])
        stages.append(
            {
                "label": label,
                "host": "here",
                "spans": spans,
                "idle": idle,
                "busy": {"F": 0.16, "B": 0.16, "W": 0.16, "O": 0.04},
                "lost": {"bubble": 0.3 + 0.02 * row, "network": 0.12, "overhead": 0.06},
            }
        )
    return {
        "event": "timeline",
        "step": step,
        "seconds": 0.25,
        "stages": stages,
        "bottleneck": "bottleneck: coarse computes 130.0 ms of each step's 250.0 ms; largest loss "
        "on the critical path: "
        "bubble at coarse, 30% of a step. More micro-batches, or a schedule with fewer bubbles, "
        "fill it.",
    }


def _times(slot: int) -> tuple[float, float]:
    return 100.0 + 0.01 * slot, 100.0095 + 0.01 * slot


def _run(name: str, config: Event) -> Event:
    workers = [
        {
            "label": label,
            "stage": label.partition(":")[0],
            "stage_index": list(STAGES).index(label.partition(":")[0]),
            "replica": int(label.partition(":")[2] or 0),
            "address": f"127.0.0.1:{50051 + index}",
        }
        for index, label in enumerate(labels())
    ]
    stages = [
        {
            "name": stage,
            "index": index,
            "inputs": inputs,
            "replicas": 2 if stage == REPLICATED else 1,
            "device": "cpu",
        }
        for index, (stage, inputs) in enumerate(STAGES.items())
    ]
    return {
        "event": "run",
        "name": name,
        "config": config,
        "versions": {"rpcmp": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
        "driver": "laptop",
        "pid": 1,
        "job_id": "j",
        "graph": {"stages": stages},
        "workers": workers,
    }


def _generation(generation: int, step: int) -> Event:
    where = {label: {"host": "here", "pid": 5000 + generation} for label in labels()}
    return {"event": "generation", "generation": generation, "step": step, "workers": where}


def _step(step: int) -> Event:
    return {
        "event": "step",
        "step": step,
        "epoch": 1 + step // 500,
        "loss": 2.4 * math.exp(-step / 150) + 0.1 + 0.05 * math.sin(step * 1.7),
        "samples_per_s": 1200 + 90 * math.sin(step / 3),
        "step_s": STEP_S,
        "data_share": 0.03,
        "busy": {label: 0.5 + 0.08 * index for index, label in enumerate(labels())},
        "learning_rate": 0.003,
    }


def _evaluation(step: int) -> Event:
    loss = 2.3 * math.exp(-step / 140) + 0.12
    return {"event": "eval", "step": step, "epoch": 1, "loss": loss, "accuracy": 1 - loss / 3}


def _checkpoint(step: int) -> Event:
    path = f"checkpoints/step-{step}"
    return {"event": "checkpoint", "step": step, "path": path, "seconds": 0.4, "bytes": 9 * 2**20}


def _links() -> Iterator[Event]:
    pairs = [("driver", "fine"), ("driver", "finish"), ("fine", "coarse"), ("fine", "finish")]
    pairs += [(a, b) for b in ("lift:0", "lift:1") for a in ("coarse",)]
    pairs += [(a, "finish") for a in ("lift:0", "lift:1")]
    for source, target in pairs:
        rate = 12e6 if source != "driver" else 0.6e6
        for ends in ((source, target), (target, source)):
            yield dict(zip(("from", "to"), ends, strict=True)) | {
                "bytes": 10**9,
                "bytes_per_s": rate,
                "rtt_s": 0.0004,
            }
