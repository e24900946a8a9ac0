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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.futures import Future

from rpcmp.config.schema import Config
from rpcmp.data.stream_shares import Position
from rpcmp.data.streams import require_stream_settings
from rpcmp.errors import ConfigError, JobError
from rpcmp.rpc.messages import BatchIndices
from rpcmp.rpc.transport import results

Answers = list[tuple[str, Future[Any]]]
"""Labels of stages, and futures of what they answer."""

Announce = Callable[[Sequence[BatchIndices]], Answers]

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
        self._start = ""
        self._skipped: Callable[[Position], None] = lambda position: None
        self._announced: deque[BatchIndices] = deque()
        self._answers: dict[int, Answers] = {}

    def __len__(self) -> int:
        return self._steps

    @property
    def fewest(self) -> int:
        return self._batch_size

    def close(self) -> None:
        pass  # the stages read

    def parse(self, text: str) -> Position:
        """Return the position in this stream that `text` has."""
        return Position.parse(text, self._batch_size, self._num_shares)

    def seek(self, text: str, skipped: Callable[[Position], None]) -> None:
        """Let the stages go on from a position of an earlier generation or run.

        Args:
            skipped: called with the position after each mini-batch that is read again.
        """
        self._start, self._skipped = text, skipped

    def epoch(self, epoch: int, first: int = 0) -> Iterator[BatchIndices]:
        """Yield the mini-batches from the one with index `first`; there is but one epoch."""
        if self._start:
            text, self._start = self._start, ""
            self._go_on(text)
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
        return self._common(self._answers.pop(number), number)

    def _common(self, answers: Answers, number: int) -> Position:
        """Return the position that all stages answer after the first `number` mini-batches."""
        positions = {label: self._parsed(label, text) for label, text in by_label(answers).items()}
        for label, position in positions.items():
            if position.read != number:
                raise JobError(f"stage {label!r} answers with the position after {position.read}")
        digests = {label: position.last.digest for label, position in positions.items()}
        require_same(digests, f"data.train yields other samples in step {number}")
        return next(iter(positions.values()))

    def _parsed(self, label: str, text: str) -> Position:
        try:
            return self.parse(text)
        except ConfigError as error:
            raise JobError(f"stage {label!r} answers with {error}") from error

    def _go_on(self, text: str) -> None:
        """Let the stages go on from a position, which is done before anything else is announced."""
        start = self.parse(text)
        if not start.is_read_again:
            self._next = start.read
            results(self._send(text))
        while self._next < start.read:
            at_once = min(AGAIN_AT_ONCE, start.read - self._next)
            sent = [self._send(text if self._next == 0 else "", again=True) for _ in range(at_once)]
            for number, answers in enumerate(sent, self._next - at_once + 1):
                self._skipped(self._common(answers, number))

    def _send(self, position: str, again: bool = False) -> Answers:
        """Announce the next mini-batch; return each stage's label, and a future of its position.

        Args:
            again: whether it is only read again.
        """
        # A stage reads the samples in order: only their number counts.
        samples = [] if again else list(range(self._batch_size))
        drawn = BatchIndices(next(self._numbers), "train", 1, self._next, samples, stream=position)
        answers = self._announce([drawn])
        self._next += 1
        if not again:
            self._announced.append(drawn)
            self._answers[self._next] = answers
        return answers


def require_same(digests: Mapping[str, str], what: str) -> None:
    """Check that all stages have read the same mini-batch, by its digest at each.

    Raises:
        ConfigError: says `what` happened, and where.
    """
    (first, expected), *others = digests.items()
    for label, digest in others:
        if digest != expected:
            raise ConfigError(
                f"{what} at stage {first!r} than at stage {label!r}: it has to be the same stream "
                "on all hosts, with the same files in the same order, and draw from torch's, "
                "Python's or numpy's default generator; or set data.at = \"driver\""
            )


def by_label(answers: Answers) -> dict[str, str]:
    """Wait for what the stages answer."""
    return dict(zip((label for label, _ in answers), results(answers), strict=True))
