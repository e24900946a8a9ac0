"""The best checkpoint of a run: marked, found again, missing. No processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rpcmp.checkpoint.folder import CheckpointFolder, remove
from rpcmp.checkpoint.manifest import BestMark, Manifest
from rpcmp.config.loader import parse_config
from rpcmp.job.best_checkpoint import BestCheckpoint, mark_of
from rpcmp.observability.events import BestEvent, Event, WarningEvent
from tests.support.manifests import manifest

LOSS = BestMark(metric="loss", value=0.5)


class Run:
    """A run's folder, and what was reported of its best checkpoint."""

    def __init__(self, path: Path, best: str | None = "loss") -> None:
        section = {"dir": "saved"} if best is None else {"dir": "saved", "best": best}
        config = parse_config(
            {
                "loss": "m:loss",
                "model": {"layers": "m:layers"},
                "data": {"train": "m:train", "test": "m:test"},
                "checkpoint": section,
            }
        )
        self.events: list[Event] = []
        self.folder = CheckpointFolder(path)
        self.best = BestCheckpoint(config, self.folder, self.events.append)

    def mark(self, step: int, mark: BestMark = LOSS) -> bool:
        return asyncio.run(self.best.mark(step, mark, {"step": step}))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def knowing(step: int, best: dict[str, Any] | None) -> Manifest:
    """A checkpoint whose driver knows this of the best."""
    return manifest(step, driver={"best": best})


def test_mark_of_is_none_unless_the_step_is_the_best() -> None:
    best = {"metric": "loss", "mode": "min", "value": 0.5, "step": 8}
    assert mark_of({"step": 8, "best": best}) == LOSS
    assert mark_of({"step": 9, "best": best}) is None
    assert mark_of({"step": 9, "best": None}) is None
    assert mark_of({"step": 9}) is None


def test_mark_writes_and_reports_a_checkpoint_once(run: Run) -> None:
    run.folder.commit(manifest(8))
    assert run.mark(8)
    assert not run.mark(8)
    assert run.events == [BestEvent(step=8, metric="loss", value=0.5)]
    (found,) = run.folder.valid()
    assert (found.best, found.driver) == (LOSS, {"step": 8})
    assert found.stages == manifest(8).stages
    assert run.best.kept() == {
        "step": 8,
        "metric": "loss",
        "value": 0.5,
        "path": str(run.folder.path_of(8)),
    }
    assert not run.mark(9)  # it failed, and is not there


def test_kept_is_none_without_a_mark_or_without_the_option(run: Run) -> None:
    assert run.best.kept() is None
    run.folder.commit(manifest(8))
    assert run.best.kept() is None
    run.mark(8)
    assert Run(run.folder.path, best=None).best.kept() is None


def test_a_resumed_run_restores_the_best_unless_its_checkpoint_is_gone(run: Run) -> None:
    best = {"metric": "loss", "mode": "min", "value": 0.5, "step": 8}
    run.folder.commit(manifest(8, best=LOSS))
    assert run.best.restored_from(knowing(9, best)) == {"best": best}
    assert run.best.restored_from(knowing(9, None)) == {}
    assert run.events == []
    remove(run.folder.path_of(8))
    assert run.best.restored_from(knowing(9, best)) == {"best": None}
    text = "the best checkpoint, of step 8, is gone: the best begins anew"
    assert run.events == [WarningEvent(text=text)]
    assert Run(run.folder.path, best=None).best.restored_from(knowing(9, best)) == {}


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
