"""Control groups whose processes may use a part of a core, or so much memory."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.needs import needs_root
from tests.support.processes import poll_for

PERIOD, SHORTEST = 10_000, 1_000
"""Microseconds. Within each period a group runs at full speed until it has used its part, which the
kernel wants to be at least SHORTEST. With its own period of 100 ms that is a host that stops and
goes; with this one it is rather a slow host."""

SHARES = {"cpu.shares": 262_144, "cpu.weight": 10_000}
"""The most there is, in version 1 and 2: other processes of the machine take nothing of a part."""


@dataclass(frozen=True)
class ControlGroup:
    """A limit for all processes of a group, in version 1 or 2 of them.

    Attributes:
        folder: the cgroup.
    """

    folder: Path

    @property
    def inside(self) -> tuple[str, ...]:
        """A command that runs another command within the limit."""
        procs = self.folder / "cgroup.procs"
        return ("/bin/sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh")

    def limit_cores(self, cores: float) -> None:
        """Limit the group to a part of a core, from now on."""
        period = max(PERIOD, math.ceil(SHORTEST / cores))
        part = round(cores * period)
        if (both := self.folder / "cpu.max").exists():
            both.write_text(f"{part} {period}")
            return
        (self.folder / "cpu.cfs_period_us").write_text(str(period))
        (self.folder / "cpu.cfs_quota_us").write_text(str(part))

    def limit_memory(self, more: int) -> None:
        """Let the group have so many bytes more than it has now."""
        second = (self.folder / "memory.max").exists()
        used, most = ("current", "max") if second else ("usage_in_bytes", "limit_in_bytes")
        now = int((self.folder / f"memory.{used}").read_text())
        (self.folder / f"memory.{most}").write_text(str(now + more))

    def has_ended(self) -> bool:
        """Kill the group's processes; return whether none is left."""
        left = (self.folder / "cgroup.procs").read_text().split()
        for pid in map(int, left):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left


@contextlib.contextmanager
def control_group(controller: str) -> Iterator[ControlGroup]:
    """Make a group without a limit as yet of "cpu" or "memory"; its processes end with it."""
    needs_root("make a control group")
    made = ControlGroup(_root(controller) / f"rpcmp-{uuid.uuid4().hex[:8]}")
    made.folder.mkdir()
    try:
        for name, most in SHARES.items():
            if (shares := made.folder / name).exists():
                shares.write_text(str(most))
        yield made
    finally:
        poll_for(made.has_ended, f"the processes of {made.folder} to end")
        made.folder.rmdir()


def _root(controller: str) -> Path:
    """Return the root of the groups that can be limited, of cgroups version 1 or 2."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        root = Path(folder)
        if kind == "cgroup" and controller in options.split(","):
            return root
        if kind == "cgroup2" and controller in (root / "cgroup.controllers").read_text().split():
            (root / "cgroup.subtree_control").write_text(f"+{controller}")
            return root
    raise AssertionError(f"no cgroup here can limit {controller}")
