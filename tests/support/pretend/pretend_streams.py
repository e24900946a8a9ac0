"""Streams of the pretend accelerator: which work is ordered, and copies that are made late.

Every stream, every event and the host have a clock: up to which piece of each stream's work all is
done for them. Recording an event takes the stream's clock, waiting for it adds the event's to the
waiter's own. As on CUDA, work of two streams has no order otherwise. So a kernel raises if it reads
or writes what another stream still may write, or writes what another may still read; freed memory
serves its own stream at once, so that others must have finished, or be known to its allocator
(`Tensor.record_stream`).

A copy that the host does not wait for is made when the first one who looks has waited for it. Until
then, its target is full of NaN.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch

Stream = tuple[int, int]
"""A device, and its stream's number; 0 is the default stream."""

Clock = dict[Stream, int]


class What(IntEnum):
    """What torch tells; as in guard.cpp."""

    RECORD = 0
    BLOCK = 1
    WAIT_FOR_EVENT = 2
    WAIT_FOR_STREAM = 3
    WAIT_FOR_DEVICE = 4
    DESTROY = 5


class Work(NamedTuple):
    """A piece of a stream's work, numbered from 1."""

    stream: Stream
    number: int


class Late(NamedTuple):
    """A copy that is still to be made."""

    work: Work
    target: torch.Tensor
    source: torch.Tensor


@dataclass
class Accesses:
    """Who has used a piece of memory.

    Attributes:
        home: the stream for which it was allocated, and to which it returns.
        written: its last writer.
        read: its readers after that, by stream.
        recorded: streams that it waits for before it returns.
    """

    home: Stream
    written: Work
    read: Clock = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)


class Streams:
    """The streams of this process's devices. Thread-safe.

    Attributes:
        counts: what was done, by what it was and the name of the thread.
        clocks: of each stream.
    """

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str]]()
        self.clocks: defaultdict[Stream, Clock] = defaultdict(dict)
        self._host: Clock = {}
        self._events: dict[int, Clock] = {}
        self._late: list[Late] = []
        self._races: list[str] = []
        self._has_ended = False
        self._lock = threading.RLock()  # memory may be freed at any time

    def end(self) -> None:
        """Take no notice any more, since the interpreter takes everything down."""
        self._has_ended = True

    def count(self, what: str) -> None:
        self.counts[what, threading.current_thread().name] += 1

    def noted(self) -> dict[str, Any]:
        """Return what was counted, and which streams of its device each stream has waited for."""
        with self._lock:
            counted = {f"{what}, by {thread}": n for (what, thread), n in self.counts.items()}
            waited = {
                str(number): sorted(of for _, of in clock if of != number)
                for (_, number), clock in self.clocks.items()
            }
            return {"counts": counted, "waited": waited}

    def tell(self, what: int, event: int, device: int, number: int) -> None:
        """Record what a stream, or the host, does with events."""
        with self._lock:
            match what:
                case What.RECORD:
                    self._events[event] = dict(self.clocks[device, number])
                case What.BLOCK:
                    self.count("wait of a stream")
                    _merge(self.clocks[device, number], self._events[event])
                case What.WAIT_FOR_EVENT:
                    self.count("wait of the host for an event")
                    self._host_knows(self._events[event])
                case What.WAIT_FOR_STREAM:
                    self.wait_for(device, number)
                case What.WAIT_FOR_DEVICE:
                    self.count("wait of the host for a device")
                    for stream in [each for each in self.clocks if each[0] == device]:
                        self._host_knows(self.clocks[stream])
                case What.DESTROY:
                    self._events.pop(event, None)

    def is_over(self, event: int) -> bool:
        """Return whether the host knows that all before an event is done."""
        with self._lock:
            return all(self._host.get(of, 0) >= n for of, n in self._events[event].items())

    def follow(self, stream: Stream, other: Stream) -> None:
        """Let a stream wait for another one, without the host."""
        with self._lock:
            _merge(self.clocks[stream], self.clocks[other])

    def wait_for(self, device: int, number: int) -> None:
        """Let the host wait until a stream has done its work."""
        with self._lock:
            self.count("wait of the host for a stream")
            self._host_knows(self.clocks[device, number])

    def fresh(self, stream: Stream) -> Accesses:
        """Return the accesses of memory that the last work of a stream has made."""
        with self._lock:
            return Accesses(stream, Work(stream, self.clocks[stream].get(stream, 0)))

    def launch(
        self, stream: Stream, kernel: str, reads: Iterable[Accesses], writes: Iterable[Accesses]
    ) -> Work:
        """Add work to a stream.

        Raises:
            RuntimeError: it has no order with the work of another stream on the same memory.
        """
        with self._lock:
            clock = self.clocks[stream]
            clock[stream] = clock.get(stream, 0) + 1
            work = Work(stream, clock[stream])
            for each in reads:
                self._require(stream, each.written, f"{kernel} reads what")
                each.read[stream] = work.number
            for each in writes:
                self._require(stream, each.written, f"{kernel} writes what")
                for reader in each.read.items():
                    self._require(stream, Work(*reader), f"{kernel} writes what")
                each.written, each.read = work, {}
            self._catch_up(clock)
            if self._races:
                raise RuntimeError(self._races.pop(0))
            return work

    def copy_late(self, work: Work, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy once it is known to have happened; both are the CPU's, of one shape."""
        target, source = target.detach(), source.detach()
        if target.is_floating_point() or target.is_complex():
            target.fill_(torch.nan)
        else:
            target.fill_(torch.iinfo(target.dtype).max if target.dtype is not torch.bool else True)
        with self._lock:
            self._late.append(Late(work, target, source))

    def free(self, accesses: Accesses) -> None:
        """Let the stream for which memory was allocated use it again."""
        if self._has_ended:
            return
        with self._lock:
            for user in (accesses.written, *map(Work._make, accesses.read.items())):
                if user.stream not in accesses.recorded:
                    self._require(accesses.home, user, "memory is freed that")

    def _require(self, stream: Stream, before: Work, what: str) -> None:
        """Note a race unless a stream has waited for another's work."""
        known = max(self.clocks[stream].get(before.stream, 0), self._host.get(before.stream, 0))
        if known < before.number:
            self._races.append(
                f"a race on the pretend accelerator: on stream {stream}, {what} stream "
                f"{before.stream} still uses"
            )

    def _host_knows(self, clock: Clock) -> None:
        _merge(self._host, clock)
        self._catch_up(self._host)

    def _catch_up(self, clock: Clock) -> None:
        """Make the copies that happened before `clock`."""
        waiting, self._late = self._late, []
        for each in waiting:
            if clock.get(each.work.stream, 0) >= each.work.number:
                each.target.copy_(each.source)
            else:
                self._late.append(each)


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
