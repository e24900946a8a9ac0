"""A claim's output lines, the vitals of its worker, and the folder of the job's Python files."""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath

from rpcmp.errors import ConfigError
from rpcmp.process import resources
from rpcmp.process.activity import Doing, cpu_seconds, resident_bytes
from rpcmp.process.channel import Message
from rpcmp.process.logging.records import Line
from rpcmp.v1 import control_pb2 as pb

KEPT = 256
"""Lines that are kept for a watcher that lags behind. A gap in the numbers shows lost ones."""

AT_ONCE = 2**18
"""Characters per message to a watcher; a longer line is sent alone."""


class LogBuffer:
    """Lines of one generation, numbered from 1, so that a watcher gets each once.

    Attributes:
        newest: the number of the last line; 0 if there is none.
    """

    def __init__(self) -> None:
        self.newest = 0
        self._lines: deque[pb.LogLine] = deque(maxlen=KEPT)

    def add(self, line: Line) -> None:
        self._lines.append(pb.LogLine(number=self.newest + 1, **asdict(line)))
        self.newest += 1

    def after(self, number: int) -> list[pb.LogLine]:
        """Return the first lines after `number`, up to one message's worth."""
        lines: list[pb.LogLine] = []
        size = 0
        for line in self._lines:
            if line.number > number:
                size += len(line.text)
                if lines and size > AT_ONCE:
                    break
                lines.append(line)
        return lines


class WorkerVitals:
    """Vitals of one worker: from its heartbeats, and from its kernel.

    Attributes:
        busy_seconds: that it has computed, by kind of action ("F", "B", "W", "O").
    """

    def __init__(self) -> None:
        self.busy_seconds: dict[str, float] = {}
        self._in_flight = self._device_memory = 0
        self._ways: list[pb.Way] = []
        self._tensors: list[pb.Way] = []
        self._counted = time.monotonic()

    def update(self, beat: Message) -> None:
        """Update from a heartbeat.

        Raises:
            TypeError, ValueError, LookupError: the message is malformed.
        """
        counts = {key: beat.get(key, 0) for key in ("in_flight", "device_memory")}
        checked = pb.Vitals(**counts)
        self._in_flight, self._device_memory = checked.in_flight, checked.device_memory
        busy = beat.get("busy", {})
        self.busy_seconds = {kind: float(busy[kind]) for kind in "FBWO" if kind in busy}
        if "ways" not in beat:
            return
        self._counted = time.monotonic()
        self._ways, self._tensors = (
            [
                pb.Way(peer=peer, sent=sent, received=received, round_trip_s=seconds)
                for peer, sent, received, seconds in beat[counted]
            ]
            for counted in ("ways", "tensors")
        )

    def message(
        self, pid: int, doing: Doing, round_trips: Mapping[str, float], device: str
    ) -> pb.Vitals:
        """Return the vitals at this moment.

        Args:
            pid: the worker's process; 0 if it is not running.
            round_trips: seconds to peers whose connections a relay carries.
            device: the stage's; empty before it is built.
        """
        return pb.Vitals(
            host=platform.node(),
            pid=pid,
            doing=pb.Doing(**doing._asdict()),
            memory=resident_bytes(pid),
            cpu_seconds=cpu_seconds(pid),
            in_flight=self._in_flight if pid else 0,
            device=device,
            device_memory=self._device_memory if pid else 0,
            counted_s_ago=time.monotonic() - self._counted,
            ways=[
                pb.Way(
                    peer=way.peer,
                    sent=way.sent,
                    received=way.received,
                    round_trip_s=round_trips.get(way.peer, way.round_trip_s),
                )
                for way in self._ways
            ],
            tensors=self._tensors,
        )


PREFIX = "rpcmp-code-"


def unpack(files: Iterable[pb.CodeFile]) -> Path:
    """Write `files` to a fresh folder, to be removed with `resources.remove_folder`."""
    folder = resources.create_folder(PREFIX)
    try:
        for file in files:
            target = folder.joinpath(*_safe_parts(file.path))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.content)
    except BaseException:
        resources.remove_folder(folder)
        raise
    return folder


def _safe_parts(path: str) -> tuple[str, ...]:
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts or not relative.parts or "\0" in path:
        raise ConfigError(f"refusing to unpack code to {path!r}")
    return relative.parts
