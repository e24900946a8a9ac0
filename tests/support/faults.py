"""Jobs with planted faults, whose results must equal those of a run without faults."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.processes import JobFolder, Result, rpcmp, running

PHASES = ("join", "forward", "backward", "optimizer", "saving")
HOWS = ("SIGKILL", "SIGSTOP", "SIGSEGV", "exception", "deadlock", "cut")

NUM_STEPS = 6
STEP = 3
"""The default step of a fault."""


@dataclass
class Faults:
    """Faults that are planted in one job.

    Args:
        job: the folder of the job's files.
    """

    job: JobFolder
    planted: list[dict[str, Any]] = field(default_factory=list)

    def fail_at(
        self, stage: int, step: int, how: str, phase: str = "forward", again: bool = False
    ) -> Faults:
        """Plant a fault in `phase` of `step` at `stage`; "build" and "join" belong to step 0.

        The same as `Cluster.fail_at` of tests.support.controlplane, in a real worker.

        Args:
            again: whether the fault is triggered every time, or only once.
        """
        assert phase in ("build", *PHASES), phase
        fault = {"stage": stage, "step": step, "phase": phase, "how": how, "again": again}
        marker = self.job.folder / f"triggered-{len(self.planted)}"
        self.planted.append({**fault, "marker": str(marker)})
        return self

    @property
    def planned(self) -> list[list[Any]]:
        """The stage, phase and step of each planted fault."""
        return [[fault[key] for key in ("stage", "phase", "step")] for fault in self.planted]

    @property
    def triggered(self) -> list[dict[str, Any]]:
        """The records of the faults that were triggered: process, phase, step."""
        markers = [Path(fault["marker"]) for fault in self.planted]
        return [json.loads(marker.read_text()) for marker in markers if marker.exists()]

    def config(
        self, text: str = "", stages: int = 3, milliseconds: float = 0.0, sections: str = ""
    ) -> Path:
        """Write the job's config; `text` is added before its sections, `sections` after them."""
        at = ", ".join(
            "{ " + ", ".join(f"{k} = {json.dumps(v)}" for k, v in fault.items()) + " }"
            for fault in self.planted
        )
        body = f"""
            steps = {NUM_STEPS}
            loss_scope = "micro-batch" # the layers count their forwards
            {text}
            [optimizer]
            callable = "faults:WatchedSGD"
            kwargs = {{ lr = 0.005, momentum = 0.9 }}
            [scheduler]
            callable = "torch.optim.lr_scheduler:StepLR"
            kwargs = {{ step_size = 1, gamma = 0.9 }}
            [model]
            layers = "faults:layers"
            balance = {[1] * stages}
            [model.kwargs]
            stages = {stages}
            milliseconds = {milliseconds}
            at = [{at}]
            {sections}
        """
        return self.job.config(_without_twins(body))


def _without_twins(body: str) -> str:
    """Keep only the last occurrence of each key before the first section."""
    lines = [line.strip() for line in body.splitlines()]
    keys = [line.partition("=")[0].strip() for line in lines]
    first_section = next(i for i, line in enumerate(lines) if line.startswith("["))
    return "\n".join(
        line
        for i, line in enumerate(lines)
        if i >= first_section or keys[i] not in keys[i + 1 : first_section] or not line
    )


def drive(config: Path, *options: str, under: tuple[str, ...] = (), timeout: float = 120) -> Result:
    """Run the job to its end, in this process.

    Args:
        under: a program and its arguments that runs the job in a process of its own.
        timeout: seconds to wait for such a process.
    """
    if not under:
        return rpcmp("drive", config, "--json", *options)
    with running("drive", config, "--json", *options, under=under) as run:
        return run.wait(timeout)


Committed = tuple[list[tuple[int, str]], str]


def committed(result: Result) -> Committed:
    """Return the results that must not depend on faults: all losses, and the final parameters."""
    assert result.code == 0, result.err
    steps = [(e["step"], e["loss"].hex()) for e in result.events if e["event"] == "step"]
    return steps, result.event("summary")["parameters_sha256"]


def committed_without_fault(folder: Path) -> Committed:
    """Return the job's commits without a fault."""
    return committed(drive(Faults(JobFolder(folder / "job")).config()))


def assert_recovered(faults: Faults, result: Result) -> None:
    """Check that one process failed in the planned phase, and one new generation was formed."""
    (planned,), (triggered,) = faults.planned, faults.triggered
    assert [triggered[key] for key in ("stage", "phase", "step")] == planned
    (fault,) = [event for event in result.events if event["event"] == "fault"]
    (recovered,) = [event for event in result.events if event["event"] == "recovered"]
    assert fault["generation"] == 1
    if triggered["how"] != "cut":  # either end may report the cut
        where = (f"stage{triggered['stage']}", platform.node())
        assert (fault["stage"], fault["host"]) == where, fault["error"]
    groups = [event for event in result.events if event["event"] == "generation"]
    assert [(group["generation"], group["step"]) for group in groups] == [
        (1, 0),
        (2, recovered["step"]),
    ][-len(groups) :]  # after a fault before the first group has started there is only one
    assert recovered["generation"] == 2
    assert fault["step"] - recovered["step"] <= 1  # at most one reported step is repeated


Cell = tuple[str, str, int]
"""The kind, phase and stage of a fault."""


def name_of(cell: Cell) -> str:
    """Return the id of a cell for the name of its test."""
    return "-".join(map(str, cell))


def assert_cell(
    job: JobFolder, fault_free: Committed, cell: Cell, under: tuple[str, ...] = ()
) -> None:
    """Check that a run recovers from such a fault by itself, and ends with the same bits."""
    how, phase, stage = cell
    faults = Faults(job).fail_at(stage, 0 if phase == "join" else STEP, how, phase)
    silent = ("--set", "recovery.heartbeat_timeout=2.0")
    result = drive(faults.config(), *silent, under=under, timeout=90)
    assert committed(result) == fault_free
    assert_recovered(faults, result)
