"""Positions in a stream: what is kept of them, and what is told about them."""

from __future__ import annotations

import itertools
from contextlib import closing
from typing import Any

import pytest

from rpcmp.data.stream_shares import MAX_POSITION, Position, Share
from rpcmp.errors import ConfigError
from tests.support.streamjobs import config, stream


def test_a_position_is_the_same_after_its_text() -> None:
    position = Position(0, 8, [None, None]).after(Share(state="a", seconds=2.0))
    again = Position.parse(position.dump(), 8, 2)
    assert again == position
    assert again.last.state == "a"
    assert not again.is_read_again
    later = again.after(Share(seconds=3.0))
    assert (later.read, later.seconds, later.is_read_again) == (2, 3.0, True)
    assert Position.parse("", 8, 2) == Position(0, 8, [None, None])


def test_a_position_fits_into_the_driver_s_record() -> None:
    with closing(stream(config("Long"))) as batches:
        next(batches.epoch(1))
        position = batches.position_after(1)
    assert position is not None
    assert not position.last.state
    assert "is more than" in position.last.note
    assert len(position.dump()) < MAX_POSITION


def test_a_stream_that_is_divided_otherwise_is_refused() -> None:
    with closing(stream(config(num_workers=0))) as batches:
        next(batches.epoch(1))
        position = batches.position_after(1)
    assert position is not None
    with pytest.raises(ConfigError, match="read by 1 processes up to step 1, and would be by 3"):
        stream(config(num_workers=3)).seek(position.dump(), print)
    other = config(batch_size=4)
    with pytest.raises(ConfigError, match=r"mini-batches of 8 .* leave data.batch_size = 8"):
        stream(other).seek(position.dump(), print)


def test_a_stream_that_is_another_when_it_is_read_again_is_told() -> None:
    job = config("Unsteady", steps=4)
    with closing(stream(job)) as batches:
        list(itertools.islice(batches.epoch(1), 2))
        position = batches.position_after(2)
    assert position is not None
    assert not position.last.note
    again = stream(job)
    notes: list[str] = []
    again.seek(position.dump(), lambda position: notes.append(position.last.note))
    list(again.epoch(1, 2))
    assert [bool(note) for note in notes] == [False, True]
    assert notes[1].startswith("data.train yields other samples than before")


def test_a_state_that_cannot_be_kept_is_told() -> None:
    with closing(stream(config("Unkept"))) as batches:
        next(batches.epoch(1))
        position = batches.position_after(1)
    assert position is not None
    assert "its state_dict cannot be kept: set is neither" in position.last.note


def test_passes_follow_on_each_other_within_a_mini_batch() -> None:
    read: list[Any] = []
    with closing(stream(config("Kept", steps=13))) as batches:
        for index, _ in enumerate(batches.epoch(1), 1):
            position = batches.position_after(index)
            assert position is not None
            read.append(position.last.passes)
    assert read == [*[0] * 6, *[1] * 6, 2]  # 50 samples a pass, of which 48 make six mini-batches


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (Share(stride=10**15), "a stride of 1000000000000000"),
        (Share(stride=3), "a stride of 3"),
        (Share(passes=2**60), "less than or equal to"),
    ],
)
def test_a_position_that_no_reader_can_have_is_refused(share: Share, text: str) -> None:
    position = Position(0, 8, [None, None]).after(share)
    with pytest.raises(ConfigError, match=f"no position in the stream data.train: .*{text}"):
        Position.parse(position.dump(), 8, 2)
