"""The best checkpoint of a run: marked, found again, missing. No processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rpcmp.checkpoint.folder import CheckpointFolder, remove
from rpcmp.checkpoint.manifest import BestMark, Manifest
from rpcmp.job.checkpoints import Checkpoints, mark_of
from rpcmp.job.server_pool import ServerPool
from rpcmp.observability.events import BestEvent, Event, WarningEvent
from tests.support.graphs import chain_of
from tests.support.manifests import manifest

LOSS = BestMark(metric="loss", value=0.5)


class Run:
    """A run's folder, and the reports about its best checkpoint."""

    def __init__(self, path: Path, best: str | None = "loss") -> None:
        section = {"dir": str(path)} if best is None else {"dir": str(path), "best": best}
        config = chain_of(2, data={"train": "m:train", "test": "m:test"}, checkpoint=section)
        self.events: list[Event] = []
        self.folder = CheckpointFolder(path)
        pool = cast(ServerPool, SimpleNamespace(run_folder="", job_id="r1"))
        self.checkpoints = Checkpoints(config, pool, self.events.append)

    def mark(self, step: int) -> bool:
        """Let the evaluation after a step be the best, when its checkpoint is complete."""
        self.checkpoints.saved = step
        return asyncio.run(self.checkpoints.add_progress(progress(step))) == step

    def resume(self, manifest: Manifest) -> Any:
        """Go on from a checkpoint; returns the best step that the driver knows."""
        self.checkpoints.resume_from(manifest)
        state = self.checkpoints.progress_of(manifest.step)
        assert state is not None
        return state["best"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def best_at(step: int) -> dict[str, Any]:
    return {"metric": "loss", "mode": "min", "value": 0.5, "step": step}


def progress(step: int) -> dict[str, Any]:
    """Return the driver's state after a step that is the best so far."""
    return {"step": step, "awaits_save": False, "best": best_at(step)}


def knowing(step: int, best: dict[str, Any] | None) -> Manifest:
    """Return a checkpoint whose driver knows this about the best step."""
    return manifest(step, driver={"best": best})


def test_mark_of_is_none_unless_the_step_is_the_best() -> None:
    assert mark_of({"step": 8, "best": best_at(8)}) == LOSS
    assert mark_of({"step": 9, "best": best_at(8)}) is None
    assert mark_of({"step": 9, "best": None}) is None
    assert mark_of({"step": 9}) is None


def test_mark_writes_and_reports_a_checkpoint_once(run: Run) -> None:
    run.folder.commit(manifest(8))
    assert run.mark(8)
    assert not run.mark(8)
    assert run.events == [BestEvent(step=8, metric="loss", value=0.5)]
    (found,) = run.folder.valid()
    assert (found.best, found.driver) == (LOSS, {"step": 8, "best": best_at(8)})
    assert found.stages == manifest(8).stages
    assert run.checkpoints.best() == {
        "step": 8,
        "metric": "loss",
        "value": 0.5,
        "path": str(run.folder.path_of(8)),
    }
    assert not run.mark(9)  # it failed, and is not there


def test_best_is_none_without_a_mark_or_without_the_option(run: Run) -> None:
    assert run.checkpoints.best() is None
    run.folder.commit(manifest(8))
    assert run.checkpoints.best() is None
    run.mark(8)
    assert Run(run.folder.path, best=None).checkpoints.best() is None


def test_a_resumed_run_restores_the_best_unless_its_checkpoint_is_gone(run: Run) -> None:
    best = best_at(8)
    run.folder.commit(manifest(8, best=LOSS))
    assert run.resume(knowing(9, best)) == best
    assert run.resume(knowing(9, None)) is None
    assert run.events == []
    remove(run.folder.path_of(8))
    assert run.resume(knowing(9, best)) is None
    text = "the best checkpoint, of step 8, is gone: the best begins anew"
    assert run.events == [WarningEvent(text=text)]
    other = Run(run.folder.path, best=None)
    assert other.resume(knowing(9, best)) == best
    assert other.events == []


def test_a_mark_that_cannot_be_written_gives_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    run.folder.commit(manifest(8))
    monkeypatch.setattr("rpcmp.checkpoint.folder.write_durably", fails)
    assert not run.mark(8)
    (warning,) = run.events
    assert isinstance(warning, WarningEvent)
    assert "step 8 is the best and cannot be marked so: cannot write" in warning.text
    assert run.folder.valid() == [manifest(8)]
