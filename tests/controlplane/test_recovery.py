"""Recovery from any lost process: the run ends with the bits of a run without faults.

tests/cluster/test_recovery.py and tests/long/test_recovery_matrix.py have the same with real ones.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from rpcmp.checkpoint.folder import newest_in
from rpcmp.errors import (
    RecoveryTimeoutError,
    StageError,
    WorkerDiedError,
    WorkerHungError,
    exit_code,
)
from rpcmp.observability.events import (
    CheckpointEvent,
    FaultEvent,
    GenerationEvent,
    RecoveredEvent,
)
from tests.support.controlplane.cluster import Cluster, in_event_loop, reference

STEP = 6

GARBLED = b'{"event": '

SILENT = "recovery.heartbeat_timeout=2.0"

CELLS = [
    *[("SIGKILL", n % 2, phase) for n, phase in enumerate(("build", "join", "forward", "saving"))],
    ("SIGKILL", "driver", "plan"),
    ("SIGKILL", "driver", "step"),
    *[
        (how, who, phase)
        for how, phases in {
            "exit 7": ("build", "saving"),
            "exception": ("join", "forward"),
            GARBLED: ("build", "forward"),
            "SIGSTOP": ("join", "saving"),
            "deadlock": ("build", "forward"),
        }.items()
        for who, phase in zip((0, 1, "driver"), (*phases, "step"), strict=True)
    ],
]


@pytest.mark.parametrize(("how", "who", "phase"), CELLS)
@in_event_loop
async def test_the_run_recovers_from_a_fault_with_the_same_bits(
    tmp_path: Path, how: str | bytes, who: int | str, phase: str
) -> None:
    async with Cluster(tmp_path) as cluster:
        step = 0 if phase in ("build", "join", "plan") else STEP
        cluster.fail_at(who, step, how, phase)
        run = await cluster.drive(cluster.config(*[SILENT] * (how in ("SIGSTOP", "deadlock"))))
        assert run.committed == reference()
        fault, recovered = run.only(FaultEvent), run.only(RecoveredEvent)
        name = who if isinstance(who, str) else f"stage{who}"
        assert (fault.stage, fault.host) == (name, platform.node()), fault.error
        groups = [(event.generation, event.step) for event in run.of(GenerationEvent)]
        assert groups == [(1, 0), (2, recovered.step)][-len(groups) :]
        assert fault.step - recovered.step <= 1


@in_event_loop
async def test_a_factory_that_raises_ends_the_run(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        cluster.fail_at(1, 0, "exception", "build")
        run = await cluster.drive(cluster.config())
        assert isinstance(run.error, StageError)
        assert (run.error.stage, run.error.phase) == ("stage1", "build")
        assert [server.state for server in cluster.servers] == ["idle", "idle"]


@pytest.mark.parametrize(
    ("how", "says"),
    [("SIGKILL", "signal 9"), ("exit 7", "code 7"), ("SIGSTOP", "State: T (stopped)")],
)
@in_event_loop
async def test_a_lost_worker_is_named(tmp_path: Path, how: str, says: str) -> None:
    async with Cluster(tmp_path) as cluster:
        cluster.fail_at(0, STEP, how)
        run = await cluster.drive(cluster.config(SILENT, "recovery.enabled=false"))
        assert isinstance(run.error, WorkerDiedError | WorkerHungError)
        where = "stage 'stage0' on" if how == "SIGSTOP" else "the worker of stage 'stage0' on"
        for part in (where, f"in forward of micro-batch 0 at step {STEP}", says):
            assert part in str(run.error)
        assert [server.state for server in cluster.servers] == ["idle", "idle"]


@in_event_loop
async def test_a_hang_is_named(tmp_path: Path) -> None:
    """All processes beat, and none makes any progress."""
    async with Cluster(tmp_path, stages=3) as cluster:
        cluster.fail_at(1, STEP, "hang")
        run = await cluster.drive(cluster.config("recovery.watchdog=0.3"))
        assert run.committed == reference(layers=6)
        error = run.only(FaultEvent).error
        assert "stage 'stage1' on" in error
        assert f"in forward of micro-batch 0 at step {STEP}" in error


@in_event_loop
async def test_a_repeating_fault_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        cluster.fail_at(1, STEP, "exception", times=2)
        run = await cluster.drive(cluster.config())
        assert isinstance(run.error, StageError)
        assert "planted" in str(run.error)
        assert len(run.of(RecoveredEvent)) == 1
        assert run.only(CheckpointEvent).step == STEP - 1
        left = newest_in(tmp_path / "rpcmp-job")
        assert left is not None
        assert left.last_step == STEP - 1


@in_event_loop
async def test_restarts_without_progress_end_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        cluster.fail_at(0, STEP, "SIGKILL", times=2)
        run = await cluster.drive(cluster.config("recovery.max_restarts=1"))
        assert isinstance(run.error, RecoveryTimeoutError)
        assert exit_code(run.error) == 75
        assert "gave up after 1 restarts without a new step" in str(run.error)
        assert "the worker of stage 'stage0'" in str(run.error)
        assert run.only(CheckpointEvent).step == STEP - 1


NONSENSE = {
    "deep": b"[" * 60_000,
    "no event": b"{}",
    "no object": b"[]",
    "an event that is none": b'{"event": []}',
    "types": b'{"event": "built", "num_parameters": "many", "device": []}',
    "no character": b'{"event": "built", "num_parameters": 1, "device": "\\ud800"}',
    "a step": b'{"event": "snapshot", "step": -1}',
    "ways": b'{"event": "beat", "ways": 1, "tensors": []}',
    "a question": b'{"event": "store", "id": "x"}',
    "questions": b'{"event": "store", "id": 1, "call": "get", "keys": ["no/such/key"]}\n' * 200,
}
"""Malformed messages that a broken or malicious child may send to its supervisor."""

WORKERS_ALONE = ("types", "no character", "a step")

NO_MESSAGES = ("deep", "no object")
"""Malformed lines; the same code reads the lines of all children."""


@pytest.mark.parametrize(
    ("who", "which"),
    [(0, which) for which in NONSENSE]
    + [("driver", which) for which in NONSENSE if which not in (*WORKERS_ALONE, *NO_MESSAGES)],
)
@in_event_loop
async def test_a_malformed_message_of_a_child_ends_the_job_and_names_the_child(
    tmp_path: Path, who: int | str, which: str
) -> None:
    async with Cluster(tmp_path, stages=1) as cluster:
        cluster.fail_at(who, 2, NONSENSE[which])
        run = await cluster.drive(cluster.config("recovery.max_restarts=0"))
        assert run.error is not None
        assert exit_code(run.error) not in (0, 1)
        name = "the driver process" if who == "driver" else "the worker of stage 'stage0'"
        assert f"{name} on" in str(run.error)
        assert "sent an invalid message" in str(run.error)
