"""One thing that was looked at, and whether it is as it should be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How it is."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """One check of one process.

    Attributes:
        where: the stage, the driver, or "a - b" for the way between two.
        check: what was looked at, one word.
        status: how it is.
        text: what was found, and what to do about it.
        is_temporary: whether it may be better without anybody doing anything.
    """

    where: str
    check: str
    status: Status
    text: str
    is_temporary: bool = False


def exit_code(findings: Iterable[Finding]) -> int:
    """0: a run may begin; 75: a server is away or busy, and nothing else is wrong; 1: it is."""
    failed = [finding for finding in findings if finding.status is Status.FAILED]
    if not failed:
        return 0
    return 75 if all(finding.is_temporary for finding in failed) else 1
