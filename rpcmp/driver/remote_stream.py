"""A stream that the stages read, each its own copy of it; the driver says how far.

    driver                                                  each stage that reads the batch
    mini-batch 7, samples ──────────────announce──────────> reads it in the background
           <── position after it, with a digest of it ──
    step 7 ends: the digests are equal, the position is kept with the run's progress

Hosts whose streams differ would train on inputs of one sample and targets of another, without a
word, so the digests are compared before a step counts as done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.futures import Future

from rpcmp.config.schema import Config
from rpcmp.data.stream_shares import Position
from rpcmp.data.streams import require_stream_settings
from rpcmp.errors import ConfigError
from rpcmp.rpc.messages import BatchIndices
from rpcmp.rpc.transport import results

Announce = Callable[[Sequence[BatchIndices]], list[tuple[str, Future[Any]]]]

AGAIN_AT_ONCE = 8
"""Mini-batches that are announced at once while a stream is read again."""


class RemoteStream:
    """The mini-batches of a stream, equal to those of `rpcmp.data.streams.StreamBatches`.

    Args:
        announce: see `StageGroup.prefetch`.
        num_ahead: mini-batches that are announced before they are needed.
        numbers: yields the number of each mini-batch that is announced, of all datasets.

    Raises:
        ConfigError: the config has settings that need a length or indices.
    """

    def __init__(
        self, config: Config, announce: Announce, num_ahead: int, numbers: Iterator[int]
    ) -> None:
        require_stream_settings(config)
        section = config.require_data("training")
        self._steps, self._batch_size = config.steps or 0, section.batch_size
        self._num_shares = section.num_loaders
        self._announce, self._num_ahead, self._numbers = announce, num_ahead, numbers
        self._next = 0  # index of the mini-batch that is announced next
        self._announced: deque[BatchIndices] = deque()
        self._answers: dict[int, list[tuple[str, Future[Any]]]] = {}

    def __len__(self) -> int:
        return self._steps

    @property
    def fewest(self) -> int:
        return self._batch_size

    def close(self) -> None:
        pass  # the stages read

    def seek(self, text: str, skipped: Callable[[int], None]) -> Position:
        """Let the stages go on from a position of an earlier generation or run.

        Args:
            skipped: called with the index of each mini-batch that is read again.
        """
        start = Position.parse(text, self._batch_size, self._num_shares)
        # Alone: messages overtake each other, and this one has to be the first.
        if not start.is_read_again:
            self._next = start.read
            results(self._send(text))
        while self._next < start.read:
            at_once = 1 if self._next == 0 else min(AGAIN_AT_ONCE, start.read - self._next)
            sent = [self._send(text if self._next == 0 else "") for _ in range(at_once)]
            for answers in sent:
                results(answers)
                self._announced.popleft()
            skipped(self._next)
        return start

    def epoch(self, epoch: int, first: int = 0) -> Iterator[BatchIndices]:
        """Yield the mini-batches from the one with index `first`; there is but one epoch."""
        while self._announced and self._announced[0].batch < first:
            self._announced.popleft()
        for index in range(first, self._steps):
            while self._next < min(index + 1 + self._num_ahead, self._steps):
                self._send("")
            yield self._announced.popleft()

    def position_after(self, number: int) -> Position:
        """Return the position after the first `number` mini-batches.

        Raises:
            ConfigError: the last one of them was not the same at all stages that read it.
        """
        for old in [index for index in self._answers if index < number]:
            del self._answers[old]
        answers = self._answers.pop(number)
        positions = [
            Position.parse(text, self._batch_size, self._num_shares) for text in results(answers)
        ]
        labels = [label for label, _ in answers]
        for label, position in zip(labels, positions, strict=True):
            if position.last.digest != positions[0].last.digest:
                raise ConfigError(
                    f"data.train yields other samples in step {number} at stage {labels[0]!r} than "
                    f"at stage {label!r}: it has to be the same stream on all hosts, with the same "
                    "files in the same order, and draw from torch's, Python's or numpy's default "
                    'generator; or set data.at = "driver"'
                )
        return positions[0]

    def _send(self, position: str) -> list[tuple[str, Future[Any]]]:
        """Announce the next mini-batch; return each stage's label, and a future of its position."""
        index = self._next
        # A stage reads the samples in order: only their number counts.
        samples = list(range(self._batch_size))
        drawn = BatchIndices(next(self._numbers), "train", 1, index, samples, stream=position)
        answers = self._announce([drawn])
        self._next += 1
        self._announced.append(drawn)
        self._answers[self._next] = answers
        return answers
