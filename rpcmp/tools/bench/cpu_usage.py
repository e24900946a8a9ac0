"""CPU time of the processes of a benchmark, and how much of the machine everything else has taken.

A process counts with all that it has started. The kernel's clock of a process counts nanoseconds;
only children that have ended, which it adds up in their parent, count in ticks of 10 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")

DISTURBING_SHARE = 0.05
"""Part of the machine; if others have taken more, times are not to be believed."""

LEAST_CAPACITY = 1.0
"""CPU seconds; the machine's own counters have too few ticks to judge less."""

_LIBC = ctypes.CDLL(None)


class Kin(NamedTuple):
    """What /proc/PID/stat has of a process.

    Attributes:
        ended_seconds: CPU time of its children that have ended, and of theirs.
    """

    parent: int
    ended_seconds: float


def parse_kin(stat: str) -> Kin:
    """Parse /proc/PID/stat, where the process's name may contain anything."""
    fields = stat.rpartition(")")[2].split()
    return Kin(int(fields[1]), (int(fields[13]) + int(fields[14])) * TICK_SECONDS)


def family(kin: Mapping[int, Kin], roots: Iterable[int], without: Iterable[int] = ()) -> set[int]:
    """Return the processes `roots` and all that they have started.

    Args:
        kin: all processes.
        without: processes that do not belong to it, nor what they have started.
    """
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, each in kin.items():
        children[each.parent].append(pid)
    found, pending = set[int](), list(roots)
    passed = set(without).difference(pending)
    while pending:
        pid = pending.pop()
        if pid in kin and pid not in passed:
            passed.add(pid)
            found.add(pid)
            pending += children[pid]
    return found


class CpuMeter:
    """Reads the CPU time of processes. What the readings take in this process does not count."""

    def __init__(self) -> None:
        self._cost = 0.0

    def read(self, roots: Iterable[int], without: Iterable[int] = ()) -> float:
        """Return the seconds so far of a `family`, with those of what has ended in it."""
        began = time.thread_time()
        kin = _all_kin()
        found = family(kin, roots, without)
        self._cost += time.thread_time() - began
        total = sum(_clock(pid) + kin[pid].ended_seconds for pid in found)
        return total - self._cost if os.getpid() in found else total


def _all_kin() -> dict[int, Kin]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended
                text = Path(f"/proc/{name}/stat").read_text(errors="replace")
                found[int(name)] = parse_kin(text)
    return found


def _clock(pid: int) -> float:
    """Return the CPU time of a process; 0 if it has just ended."""
    clock = ctypes.c_int()
    if _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)):
        return 0.0
    with contextlib.suppress(OSError):
        return time.clock_gettime(clock.value)
    return 0.0


@dataclass(frozen=True)
class MachineTimes:
    """CPU seconds of this machine so far, of the CPUs that this process may use.

    Attributes:
        total: all of it, idle or not.
        busy: of processes; interrupts are nobody's, and loopback's are mostly our own.
        stolen: by the host of a virtual machine.
        ours: of the benchmark's processes.
    """

    total: float
    busy: float
    stolen: float
    ours: float

    @classmethod
    def parse(cls, stat: str, cpus: Iterable[int], ours: float) -> MachineTimes:
        """Parse /proc/stat, see proc_stat(5)."""
        names = {f"cpu{number}" for number in cpus}
        rows = [row.split() for row in stat.splitlines()]
        ticks = [[int(each) for each in row[1:9]] for row in rows if row and row[0] in names]
        seconds = [sum(column) * TICK_SECONDS for column in zip(*ticks, strict=True)]
        user, nice, system, *_, stolen = seconds
        return cls(sum(seconds), user + nice + system, stolen, ours)

    @classmethod
    def read(cls, meter: CpuMeter) -> MachineTimes:
        """Read it; the benchmark is this process and what it has started."""
        ours = meter.read([os.getpid()])
        return cls.parse(Path("/proc/stat").read_text(), os.sched_getaffinity(0), ours)


def disturbance(before: MachineTimes, after: MachineTimes) -> str:
    """Return a note if others have taken a noticeable part of the machine in between, or ""."""
    total, stolen = after.total - before.total, after.stolen - before.stolen
    others = max(0.0, after.busy - before.busy - (after.ours - before.ours))
    if total < LEAST_CAPACITY or others + stolen <= DISTURBING_SHARE * total:
        return ""
    return (
        f"the machine was not quiet: other processes took {others / total:.0%} of its CPU time, "
        f"its host {stolen / total:.0%}; the times are to be believed less than the CPU times"
    )
