"""Which device of its host a worker gets whose stage has `device = "auto"`.

    the host's workers, in the config's order   auto   cuda:1   auto   auto   cpu
    of four devices                             :0     :1       :2     :3
    of two                                      :0     :1       :0     :0      shared

A pure function of what all workers of a job want on one host, so that the host itself, `doctor` and
`explain` come to the same result.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ID = re.compile(r"[\w:.-]{1,64}", re.ASCII)
"""What stands for a device in all processes of a host."""

AUTO = "auto"
"""The config's name for a device of the host's accelerator if it has one, else the CPU."""


def place(wanted: Sequence[str], own: int, count: int) -> int:
    """Return the index of the device that the worker `own` gets, which wants AUTO.

    Devices that others name are left to them, unless there is no other.

    Args:
        wanted: the devices that the workers of one host want, in the config's order.
        count: how many devices the host has; at least one.
    """
    return candidates(wanted, own, count)[0]


def candidates(wanted: Sequence[str], own: int, count: int) -> list[int]:
    """Return that device and, if another job has it, those that would do; see `place`."""
    named = {_index(name) for name in wanted if name not in (AUTO, "cpu")}
    free = [index for index in range(count) if index not in named] or list(range(count))
    first = list(wanted[:own]).count(AUTO) % len(free)
    return free[first:] + free[:first]


def on_machine(wanted: Sequence[str], machines: Sequence[str], own: int) -> tuple[list[str], int]:
    """Return what the workers on the machine of worker `own` want, and its place among them.

    Args:
        wanted, machines: the device that each worker wants, and the machine that it is on.
    """
    pairs = zip(wanted, machines, strict=True)
    here = [device for device, machine in pairs if machine == machines[own]]
    return here, list(machines[:own]).count(machines[own])


class Place(NamedTuple):
    """The device that a worker has.

    Attributes:
        worker: its label.
        machine: equal for all workers on it.
        host: the machine's name.
        wanted: the device that it wanted.
    """

    worker: str
    machine: str
    host: str
    wanted: str
    device: str


def shared(places: Iterable[Place]) -> list[str]:
    """Return, in a sentence each, which workers share a device that one of them left open."""
    users: defaultdict[tuple[str, str], list[Place]] = defaultdict(list)
    for each in places:
        if each.device not in ("", "cpu"):
            users[each.machine, each.device].append(each)
    return [
        f"{', '.join(each.worker for each in here)} share {here[0].device} of {here[0].host}, "
        'which has no device for each `device = "auto"`'
        for here in users.values()
        if len(here) > 1 and any(each.wanted == AUTO for each in here)
    ]


def _index(name: str) -> int:
    """Return the index in a device's name; torch's "cuda" is the first one."""
    index = name.partition(":")[2]
    return int(index) if index.isdecimal() else 0
