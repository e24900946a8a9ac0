"""The steps of a run, of datasets and of streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rpcmp.driver.datasets import TrainData
from rpcmp.driver.step_stream import StepStream
from rpcmp.errors import ConfigError
from rpcmp.process.activity import Activity
from tests.support.graphs import chain_of
from tests.support.streamjobs import config, stream


class Data:
    """Three mini-batches an epoch."""

    def __len__(self) -> int:
        return 3

    def epoch(self, epoch: int, first: int = 0) -> Iterator[str]:
        for batch in range(first, 3):
            yield f"{epoch}.{batch}"


def steps(
    data: Any = None, stop: threading.Event | None = None, **more: Any
) -> tuple[StepStream, list[tuple[str, int]]]:
    """Return the steps of a run, and what it does when."""
    done: list[tuple[str, int]] = []
    activity = SimpleNamespace(start=lambda phase, step: done.append((phase, step)))
    made = StepStream(
        chain_of(2, **more),
        cast(TrainData, data or Data()),
        cast(Activity, activity),
        stop or threading.Event(),
    )
    return made, done


@pytest.mark.parametrize("after", [0, 1, 3, 4, 7])
def test_steps_go_on_within_an_epoch_and_end_with_the_run(after: int) -> None:
    made, done = steps(steps=7)
    found: list[Any] = [(s.number, s.epoch, s.batch, s.ends_epoch) for s in made.after(after)]
    whole = [(1, 1, "1.0", False), (2, 1, "1.1", False), (3, 1, "1.2", True)]
    whole += [(4, 2, "2.0", False), (5, 2, "2.1", False), (6, 2, "2.2", True), (7, 3, "3.0", False)]
    assert found == whole[after:]
    assert list(dict.fromkeys(done)) == [("data", number) for number in range(after + 1, 8)]
    assert made.position_after(3) is None
    made.seek(3, "", pytest.fail)  # not a stream: nothing to do


def test_epochs_count_if_there_are_no_steps() -> None:
    made, _ = steps(epochs=2)
    assert (made.total, len(list(made.after(0)))) == (6, 6)
    assert made.ends_epoch(3)
    assert not made.ends_epoch(2)


@pytest.mark.parametrize("name", ["Plain", "Unsteady"])
def test_a_stream_is_read_again_and_can_be_stopped(name: str) -> None:
    with closing(stream(config(name))) as read:
        made, _ = steps(read, steps=20)
        next(step for step in made.after(0) if step.number == 3)
        position = made.position_after(3)
    assert position is not None
    texts: list[str] = []
    with closing(stream(config(name))) as read:
        again, _ = steps(read, stop := threading.Event(), steps=20)
        for text, known in ((position.dump(), 3), ("", 0)):  # and of another dataset
            with pytest.raises(ConfigError, match=f"has 2 steps, of which {known} are known"):
                again.seek(2, text, texts.append)
        again.seek(3, position.dump(), texts.append)
        next(again.after(3))
        read.begin()
        stop.set()
        assert list(again.after(3)) == []
    assert "its first 3 mini-batches are read again" in texts[0]
    odd = [text for text in texts if text.startswith("data.train yields other samples than before")]
    assert len(odd) == (name == "Unsteady")
