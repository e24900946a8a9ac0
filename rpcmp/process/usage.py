"""What a process takes up, as its kernel says; it need not answer for that."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_USER, _SYSTEM = 11, 12
"""Places in /proc/PID/stat, counted after the name, which may hold anything."""


def resident_bytes(pid: int) -> int:
    """Memory of a process; 0 where that is not to be had."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def cpu_seconds(pid: int) -> float:
    """Time that all threads of a process have computed; 0 where that is not to be had."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS
    except (OSError, ValueError, IndexError):
        return 0.0
