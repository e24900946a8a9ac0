"""Stopped processes: how they are noticed, that ours are killed, and how often is looked."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rpcmp.process import stopped as stopped_module
from rpcmp.process.stopped import (
    LOADERS_SECONDS,
    POLL_SECONDS,
    kernel_state,
    kill_if_stopped,
    kill_stopped_loaders,
    loaders_of,
    stopped,
)
from tests.support.eventloops import in_event_loop
from tests.support.pretendedtime import in_pretended_time
from tests.support.processes import poll_for


class Machine:
    """Processes that are stopped at times, on a machine that may be suspended.

    Attributes:
        stops: begins and ends of the times in which a process is stopped, by its pid.
        looked: when which process was looked at.
        suspend_at, suspended: when the machine is suspended, and for how long.
    """

    def __init__(self) -> None:
        self.stops: dict[int, list[tuple[float, float]]] = {}
        self.looked: list[tuple[float, int]] = []
        self.suspend_at, self.suspended = float("inf"), 0.0

    def now(self) -> float:
        time = asyncio.get_running_loop().time()
        return time if time < self.suspend_at else time + self.suspended

    def state(self, pid: int) -> str:
        self.looked.append((self.now(), pid))
        is_stopped = any(begin <= self.now() < end for begin, end in self.stops.get(pid, []))
        return "State: T (stopped)" if is_stopped else "State: R (running)"

    def stopped_at(self, *waits: tuple[int, float]) -> list[float]:
        """Return when `stopped` returns, for each process and its timeout."""

        async def ends(pid: int, timeout: float) -> float:
            await stopped(pid, timeout)
            return self.now()

        async def all_ends() -> list[float]:
            return await asyncio.gather(*(ends(*wait) for wait in waits))

        return in_pretended_time(all_ends())[0]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(stopped_module, "kernel_state", made.state)
    monkeypatch.setattr(stopped_module, "time", SimpleNamespace(monotonic=made.now))
    return made


NEVER = float("inf")


def test_a_process_may_be_stopped_for_a_moment(machine: Machine) -> None:
    machine.stops[1] = [(2.1, 3.4), (4.1, 5.4), (10.1, NEVER)]
    (end,) = machine.stopped_at((1, 1.5))
    assert 11.6 <= end <= 12.1


def test_a_process_may_be_stopped_while_its_supervisor_is(machine: Machine) -> None:
    """All of a machine is suspended, or all processes of a run are stopped, and go on in turn."""
    machine.suspend_at, machine.suspended = 1.1, 3600.0
    machine.stops[1] = [(1.1, 3602.1), (4000.1, NEVER)]
    (end,) = machine.stopped_at((1, 1.5))
    assert 4001.6 <= end <= 4002.1


def test_all_waits_of_a_loop_share_one_look(machine: Machine) -> None:
    machine.stops = {1: [(2.1, NEVER)], 2: [(4.1, NEVER)], 3: [(0.1, NEVER)]}
    first, second, third, also_third = machine.stopped_at((1, 1.0), (2, 1.0), (3, 1.0), (3, 5.0))
    assert 3.1 <= first <= 3.6
    assert 5.1 <= second <= 5.6
    assert 1.1 <= third <= 1.6
    assert 5.1 <= also_third <= 5.6
    times = sorted({when for when, _ in machine.looked})
    assert {later - sooner for sooner, later in itertools.pairwise(times)} == {POLL_SECONDS}
    assert machine.looked.count((2.5, 1)) == 1
    assert (6.0, 1) not in machine.looked  # nobody waits for it any more


def test_a_wait_that_is_given_up_is_looked_at_no_more(machine: Machine) -> None:
    async def run() -> None:
        for _ in range(2):  # looks begin again
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.2):
                    await stopped(1)
            await asyncio.sleep(5.0)

    in_pretended_time(run())
    assert [when for when, _ in machine.looked] == [0.5, 1.0, 6.7, 7.2]


def test_the_state_of_a_process_is_the_kernels() -> None:
    assert re.fullmatch(r"State: [RS] \(\w+\)", kernel_state(os.getpid()))
    assert kernel_state(2**30) == ""


@in_event_loop
async def test_a_stopped_process_of_ours_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    ours = await asyncio.create_subprocess_exec("sleep", "100")
    ours.send_signal(signal.SIGSTOP)
    await asyncio.wait_for(kill_if_stopped(ours, "the sleeper"), 60)
    assert await ours.wait() == -signal.SIGKILL
    assert "the sleeper (pid " in caplog.text
    assert "was stopped" in caplog.text


PARENT = """
import subprocess, sys
asleep = [sys.executable, "-c", "import time; time.sleep(100)"]
children = [subprocess.Popen([*asleep, word]) for word in ("multiprocessing", "another")]
print(*(child.pid for child in children), flush=True)
children[0].wait()
assert children[1].poll() is None
children[1].kill()
"""


@in_event_loop
async def test_a_stopped_process_that_loads_samples_is_killed_and_no_other_child() -> None:

    command = [sys.executable, "-c", PARENT]
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    loader, other = map(int, (await parent.stdout.readline()).split())
    assert loaders_of(parent.pid) == {loader}
    for child in (loader, other):
        os.kill(child, signal.SIGSTOP)
    poll_for(lambda: kernel_state(other).startswith("State: T"), "the other to be stopped")
    watching = asyncio.create_task(kill_stopped_loaders(parent.pid))
    assert await asyncio.wait_for(parent.wait(), 60) == 0  # the loader alone was killed
    watching.cancel()


def test_without_processes_that_load_samples_only_their_parent_is_looked_at(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every server does it all the time, and few jobs have such processes."""
    times = []

    def none(pid: int) -> set[int]:
        times.append(machine.now())
        return set()

    monkeypatch.setattr(stopped_module, "loaders_of", none)

    async def run() -> None:
        async with asyncio.timeout(10.5 * LOADERS_SECONDS):
            await kill_stopped_loaders(1)

    with pytest.raises(TimeoutError):
        in_pretended_time(run())
    assert len(times) == 10
    assert machine.looked == []


def test_another_process_with_the_number_of_one_that_loaded_samples_is_not_killed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "100"]) as other:
        machine.stops[other.pid] = [(3.1, NEVER)]

        def until_then(pid: int) -> set[int]:
            return {other.pid} if machine.now() < 4.2 else set()

        monkeypatch.setattr(stopped_module, "loaders_of", until_then)

        async def run() -> None:
            async with asyncio.timeout(20):
                await kill_stopped_loaders(1)

        with pytest.raises(TimeoutError):
            in_pretended_time(run())
        assert other.poll() is None
        assert 5.0 <= max(when for when, _ in machine.looked) < 6.5  # no longer watched
        other.kill()
