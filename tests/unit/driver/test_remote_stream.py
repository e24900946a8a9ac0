"""What a driver announces of a stream that stages read, and what it does with their answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from torch.futures import Future

from rpcmp.data.stream_shares import Position, Share
from rpcmp.driver.remote_stream import RemoteStream
from rpcmp.errors import ConfigError, JobError
from rpcmp.rpc.messages import BatchIndices
from tests.support.streamjobs import SIZE, config

AHEAD = 2


class Stages:
    """Two stages that answer each announcement at once.

    Args:
        state: of the stream; "": it has none.
        differs_at: the mini-batch of which the second stage reads another.
    """

    def __init__(self, state: str = "", differs_at: int = -1) -> None:
        self._state, self._differs_at = state, differs_at
        self.announced: list[tuple[int, str]] = []
        self.positions = [Position(0, SIZE, [None])] * 2

    def announce(self, drawn: Sequence[BatchIndices]) -> list[tuple[str, Future[Any]]]:
        ((_, dataset, epoch, index, samples, _, text),) = drawn
        assert (dataset, epoch) == ("train", 1)
        assert len(samples) in (0, SIZE)
        self.announced.append((index, text))
        answers = []
        for number, label in enumerate(("first", "last")):
            other = "other" if number and index == self._differs_at else "same"
            before = self.positions[number]._replace(read=index)
            share = Share(state=self._state, digest=f"{index} {other}", seconds=1.0)
            self.positions[number] = before.after(share)
            future: Future[Any] = Future()
            future.set_result(self.positions[number].dump())
            answers.append((label, future))
        return answers


def made(stages: Stages, steps: int = 6) -> RemoteStream:
    return RemoteStream(config(steps=steps), stages.announce, AHEAD, itertools.count(1))


def test_mini_batches_are_announced_ahead_and_their_positions_kept() -> None:
    stages = Stages()
    stream = made(stages)
    seen = []
    for number, batch in enumerate(stream.epoch(1), 1):
        seen.append((batch.batch, len(stages.announced)))
        assert stream.position_after(number).read == number
    assert seen == [(0, 3), (1, 4), (2, 5), (3, 6), (4, 6), (5, 6)]
    assert not stream._answers
    assert (len(stream), stream.fewest) == (6, SIZE)


@pytest.mark.parametrize("state", ["", "s"])
def test_stages_go_on_from_a_position(state: str) -> None:
    stages = Stages(state)
    stream = made(stages)
    found = stream.epoch(1)
    for _ in range(4):
        next(found)
    text = stream.position_after(4).dump()
    later = Stages(state)
    skipped: list[int] = []
    stream = made(later)
    stream.seek(text, lambda position: skipped.append(position.read))
    assert not later.announced
    (batch,) = itertools.islice(stream.epoch(1, 4), 1)
    assert (batch.batch, batch.num_samples) == (4, SIZE)
    del later.announced[1 + 3 * (not state) :]
    begun = [0, 1, 2, 3] if not state else [4]
    assert later.announced == [(begun[0], text), *((index, "") for index in begun[1:])]
    assert skipped == ([1, 2, 3, 4] if not state else [])
    assert [batch.batch for batch in stream.epoch(1, 5)] == [5]
    assert stream.position_after(6).read == 6
    assert not stream._answers


def test_a_stage_that_answers_with_no_position_is_named() -> None:
    stages = Stages()
    for text in ("nonsense", "[1, 8, []]", '[1, 8, [[0, 0, "", "", 1.0, ""]]]', "9" * 60_000):

        def answer(
            drawn: Sequence[BatchIndices], text: str = text
        ) -> list[tuple[str, Future[Any]]]:
            future: Future[Any] = Future()
            future.set_result(text)
            return [("first", future)]

        stages.announce = answer  # type: ignore[method-assign]
        stream = made(stages)
        next(stream.epoch(1))
        with pytest.raises(JobError, match="stage 'first' answers with no position in the stream"):
            stream.position_after(1)


def test_stages_that_read_different_samples_are_named() -> None:
    stream = made(Stages(differs_at=1))
    list(stream.epoch(1))
    stream.position_after(1)
    with pytest.raises(ConfigError, match=r"in step 2 at stage 'first' than at stage 'last'"):
        stream.position_after(2)


def test_a_stage_that_answers_with_another_step_s_position_is_named() -> None:
    stages = Stages()
    stream = made(stages)
    next(iter(stream.epoch(1)))
    label, _ = stream._answers[1][1]
    other: Future[Any] = Future()
    other.set_result(stages.positions[1]._replace(read=10**12).dump())
    stream._answers[1][1] = label, other
    with pytest.raises(JobError, match="stage 'last' answers with the position after 10000000000"):
        stream.position_after(1)
