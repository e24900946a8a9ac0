"""Segments: a job on real processes whose schedule changes between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rpcmp.config import loader
from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.job.segments import Segments
from tests.support.alone import committed_alone
from tests.support.processes import JobFolder
from tests.support.settings import setting


def train(config: Config, order: Sequence[tuple[ScheduleOptions, int]]) -> list[float]:
    """Return the losses of a few steps per setting."""

    async def run() -> list[float]:
        segments = Segments(config, settings=[setting for setting, _ in order])
        losses: list[float] = []
        try:
            await segments.start()
            for setting, steps in order:
                segments.change_to(setting)
                done = await segments.run(steps)
                assert min(done.busy_seconds.values()) > 0
                assert set(done.busy_seconds) == set(config.stage_names)
                losses += done.losses
        finally:
            await segments.close()
        return losses

    return asyncio.run(run())


def test_each_segment_runs_under_its_own_setting(job: JobFolder) -> None:
    scope = 'loss_scope = "micro-batch"'
    text = f'loss = "zoo:output_mean"\n{scope}\n[model]\nlayers = "zoo:counting"\nnum_stages = 2'
    config = loader.load_config(job.config(text))
    order = [("1f1b", 5), ("gpipe", 5), ("gpipe", 2), ("zero-bubble", 10), ("gpipe", 10)]
    losses = train(config, [(setting(number, schedule), 1) for schedule, number in order])
    assert losses == pytest.approx([1.0, 3.0, 1.5, 1.0, 5.5])


def test_changing_the_schedule_changes_no_bit(job: JobFolder) -> None:
    path = job.config('[model]\nlayers = "zoo:mlp"\nnum_stages = 3')
    order = [(setting(4, "zero-bubble", 6), 2), (setting(4, "1f1b"), 2), (setting(4, "gpipe"), 1)]
    losses = train(loader.load_config(path), order)
    assert [loss.hex() for loss in losses] == [
        loss for _, loss in committed_alone(path, "steps=5")[0]
    ]
