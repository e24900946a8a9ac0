"""What `rpcmp explain` found out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rpcmp.balance.prediction import Prediction
from rpcmp.explain.files import File
from rpcmp.explain.picture import actions
from rpcmp.explain.stage import Stage
from rpcmp.explain.ways import Listener, Way
from rpcmp.simulation import Simulation


@dataclass(frozen=True)
class Explanation:
    """A run that has not begun.

    Attributes:
        name: the job's.
        steps: optimizer steps; None where the datasets' sizes are not known.
        epochs: passes over the data; None where the config counts steps.
        batches: mini-batches of each dataset, "train" and "test"; empty where they are unknown.
        batch_size: samples of a mini-batch.
        num_microbatches, schedule, microbatches_per_message: see the config's keys.
        balance: layers of each stage; empty where stages are modules of their own.
        parameters: of the whole model, tied ones once.
        stages: in the config's order.
        step: one step as the schedule does it, by itself.
        prediction: from what was measured; None: nothing was, and in `step` forwards, input
            gradients and weight gradients all take the same time.
        listeners: every port.
        ways: everybody who talks to somebody.
        files: what is read and written.
        notes: what else there is to say.
    """

    name: str
    steps: int | None
    epochs: int | None
    batches: dict[str, int]
    batch_size: int
    num_microbatches: int
    schedule: str
    microbatches_per_message: int
    balance: list[int]
    parameters: int
    stages: list[Stage]
    step: Simulation
    prediction: Prediction | None
    listeners: list[Listener]
    ways: list[Way]
    files: list[File]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data; times in seconds, memory in bytes."""
        known = {
            key: getattr(self, key)
            for key in (
                *("name", "steps", "epochs", "batches", "batch_size", "num_microbatches"),
                *("schedule", "microbatches_per_message", "balance", "parameters"),
            )
        }
        stages = [asdict(stage) for stage in self.stages]
        for stage, found in zip(stages, self.stages, strict=True):
            stage["memory"]["total"] = found.memory.total
            stage["layers"] = [layer.model_dump() for layer in found.layers]
        predicted = self.prediction
        names = [stage.name for stage in self.stages]
        return {
            **known,
            "stages": stages,
            "actions": actions(self.step.runs, names),
            "prediction": None if predicted is None else asdict(predicted),
            "listeners": [asdict(each) for each in self.listeners],
            "links": [asdict(each) for each in self.ways],
            "files": [asdict(each) for each in self.files],
            "notes": self.notes,
        }
