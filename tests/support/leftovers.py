"""Jobs that fail midway and leave a checkpoint for the next run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from rpcmp.checkpoint.folder import CheckpointFolder, runs_in
from tests.support.faults import drive
from tests.support.processes import JobFolder, Result

BODY = """
steps = 6
num_microbatches = 2
[optimizer]
callable = "torch.optim:AdamW"
kwargs = { lr = 0.02 }
[model]
layers = "zoo:mlp"
balance = [2, 2]
[data]
train = { callable = "zoo:Unreadable", kwargs = { at = 37 } }
batch_size = 10
shuffle = false
"""
MENDED = ("--set", "data.train.kwargs.at=-1")


def left_in(folder: Path) -> list[int]:
    """Return the last step of each run that left checkpoints, the newest run first."""
    return [run.last_step for run in runs_in(folder)]


class Failed:
    """A failed job that left a checkpoint.

    Attributes:
        folder: folder of the checkpoint.
        step: step of the checkpoint; it varies, because samples are loaded ahead.
    """

    def __init__(self, job: JobFolder, section: str = "") -> None:
        self.config = job.config(BODY + section)
        self.folder = job.folder / ("kept" if section else "rpcmp-job")
        result = drive(self.config)
        assert result.code == 1
        assert "sample 37 is no picture" in result.err
        (self.step,) = left_in(self.folder)
        assert 1 <= self.step <= 3

    def age(self, **by: float) -> None:
        """Backdate the checkpoint."""
        (run,) = runs_in(self.folder)
        assert run.newest is not None
        written = (datetime.now(UTC) - timedelta(**by)).isoformat(timespec="seconds")
        aged = run.newest.model_copy(update={"written": written})
        CheckpointFolder(run.folder.path).commit(aged)


def warned(result: Result) -> str:
    return "\n".join(event["text"] for event in result.events if event["event"] == "warning")
