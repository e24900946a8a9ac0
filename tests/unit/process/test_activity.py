"""Activity, heartbeats and keep-alive, by which a supervisor observes a child."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rpcmp.process import activity as activity_module
from rpcmp.process import resources
from rpcmp.process import sockets as links_module
from rpcmp.process import stopped as stopped_module
from rpcmp.process.activity import (
    NO_MICROBATCH,
    Activity,
    Doing,
    HeartbeatMonitor,
)
from rpcmp.process.sockets import SILENT_SECONDS, Links
from rpcmp.process.stopped import kernel_state
from tests.support.eventloops import in_event_loop
from tests.support.processes import poll_for


class Clock:
    """A `time.monotonic` that the test sets, and that `sleep` advances.

    Attributes:
        now: seconds.
        beats: times at which `pulse` gets a heartbeat during a sleep.
        slept: the seconds of each sleep.
        suspend_at, suspended: when the machine is suspended during a sleep, and for how long.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.beats: list[float] = []
        self.slept: list[float] = []
        self.pulse: HeartbeatMonitor | None = None
        self.suspend_at, self.suspended = float("inf"), 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        end = self.now + seconds
        if end > self.suspend_at:
            end, self.suspend_at = end + self.suspended, float("inf")
        while self.beats and self.beats[0] <= end:
            self.now = self.beats.pop(0)
            assert self.pulse is not None
            self.pulse.beat()
        self.now = end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (activity_module, stopped_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=made.monotonic))
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=made.sleep))
    return made


# Activity


@pytest.fixture
def memory() -> Iterator[int]:
    fd = resources.shared_memory("test-activity", mmap.PAGESIZE)
    yield fd
    os.close(fd)


def test_a_new_activity_is_waiting_and_shares_nothing_without_memory() -> None:
    one, other = Activity(), Activity()
    one.start("forward", 1)
    found = other.read()
    assert (found.phase, found.step, found.seconds) == ("", 0, 0.0)


def test_activity_is_shared_through_memory_and_outlives_its_writer(
    memory: int, clock: Clock
) -> None:
    here, there = Activity(memory), Activity(memory)
    here.start("forward", 2**40, 3)
    clock.now += 2.5
    assert there.read() == here.read() == Doing("forward", 2**40, 3, 2.5)
    there.start("backward", 5)
    assert here.read() == Doing("backward", 5, NO_MICROBATCH, 0.0)
    del here, there
    clock.now += 60
    assert Activity(memory).read() == Doing("backward", 5, NO_MICROBATCH, 60.0)


@pytest.mark.parametrize("phase", ["", "x", "evaluation", "sixteen bytes ok", "\N{SNOWMAN}" * 5])
def test_phases_of_up_to_16_bytes_are_whole(memory: int, phase: str) -> None:
    activity = Activity(memory)
    activity.start("another, before!", 1, 1)
    activity.start(phase, 2, 3)
    assert Activity(memory).read()[:3] == (phase, 2, 3)


def test_a_stopped_activity_keeps_its_step(clock: Clock) -> None:
    activity = Activity()
    with activity.during("optimizer", 4):
        clock.now += 1.0
        assert activity.read() == Doing("optimizer", 4, NO_MICROBATCH, 1.0)
    clock.now += 3.0
    assert activity.read() == Doing("", 4, NO_MICROBATCH, 3.0)
    activity.start("forward", 5, 2)
    activity.stop()
    assert activity.read() == Doing("", 5, NO_MICROBATCH, 0.0)


def test_an_activity_stops_on_an_exception() -> None:
    activity = Activity()
    with pytest.raises(ValueError, match="no"), activity.during("build"):
        raise ValueError("no")
    assert activity.read().phase == ""


def test_activity_seconds_are_never_negative(clock: Clock) -> None:
    activity = Activity()
    activity.start("forward", 1)
    clock.now -= 5
    assert activity.read().seconds == 0.0


# Heartbeats


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"]) as made:
        yield made
        made.kill()


def begun(timeout: float) -> HeartbeatMonitor:
    monitor = HeartbeatMonitor(timeout)
    monitor.begin()
    return monitor


def silent(pulse: HeartbeatMonitor, clock: Clock, beats: list[float]) -> float:
    """Return when `HeartbeatMonitor.silent` returns, for heartbeats at these times."""
    clock.pulse, clock.beats = pulse, beats
    asyncio.run(pulse.silent())
    return clock.now


@pytest.mark.parametrize(
    ("beats", "lost"),
    [
        ([], 1006.0),
        ([1000.0 + 0.5 * number for number in range(1, 101)], 1056.0),
        ([1005.9, 1011.8], 1017.8),
    ],
    ids=["none", "many", "just in time"],
)
def test_a_loss_is_noticed_a_timeout_after_the_last_heartbeat(
    clock: Clock, beats: list[float], lost: float
) -> None:
    assert lost <= silent(begun(6.0), clock, beats) < lost + 1.0
    assert len(clock.slept) < 130
    assert min(clock.slept) > 0  # it never waits busily


def test_heartbeats_that_arrived_meanwhile_count(clock: Clock) -> None:
    pulse = begun(6.0)
    clock.now += 3600.0  # the machine was suspended; the heartbeat is still in the socket
    assert 4606.05 <= silent(pulse, clock, [clock.now + 0.05]) < 4607.1


def test_time_of_a_suspension_does_not_count(clock: Clock) -> None:
    clock.suspend_at, clock.suspended = 1003.0, 3600.0
    assert 4606.0 <= silent(begun(6.0), clock, []) < 4607.0


@in_event_loop
async def test_no_timeout_means_never_lost() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await HeartbeatMonitor(0).lost(os.getpid())


@in_event_loop
async def test_heartbeats_are_not_missed_before_they_begin(
    process: subprocess.Popen[bytes],
) -> None:
    """Such as while a worker waits for its stage; but it must not be stopped."""
    monitor = HeartbeatMonitor(0.01)
    monitor.beat()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await monitor.lost(process.pid)
    process.send_signal(signal.SIGSTOP)
    assert await HeartbeatMonitor(0.4).lost(process.pid) == 0.1


def test_a_silent_process_is_lost() -> None:
    assert asyncio.run(begun(1e-9).lost(os.getpid())) >= 1e-9


def test_a_stopped_process_is_lost_before_its_heartbeats_are_missed(
    process: subprocess.Popen[bytes],
) -> None:
    assert "stopped" not in kernel_state(process.pid)
    process.send_signal(signal.SIGSTOP)
    poll_for(lambda: kernel_state(process.pid) == "State: T (stopped)", "it to be stopped")
    assert asyncio.run(HeartbeatMonitor(timeout=8.0).lost(process.pid)) < 8.0


# Links

Pair = tuple[socket.socket, socket.socket]

OPTIONS = (
    socket.TCP_KEEPIDLE,
    socket.TCP_KEEPINTVL,
    socket.TCP_KEEPCNT,
    socket.TCP_USER_TIMEOUT,
)


def connected() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    return client, accepted


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = connected()
    yield made
    for each in made:
        each.close()


def is_watched(connection: socket.socket) -> bool:
    """Return whether the kernel probes the other end of the connection."""
    alive = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    timeout = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert bool(alive) == bool(timeout)
    return bool(alive)


def test_watch_enables_keep_alive_on_every_connection(pair: Pair) -> None:
    assert not any(map(is_watched, pair))
    Links().watch()
    for end in pair:
        assert is_watched(end)
        idle, interval, count, timeout = (
            end.getsockopt(socket.IPPROTO_TCP, option) for option in OPTIONS
        )
        assert idle + interval * count == SILENT_SECONDS
        assert timeout == SILENT_SECONDS * 1000


def test_watch_leaves_connections_working(pair: Pair) -> None:
    blocking = [end.gettimeout() for end in pair]
    before = len(os.listdir("/proc/self/fd"))
    links = Links()
    socket.setdefaulttimeout(30)  # which is not for connections that are only looked at
    try:
        for _ in range(3):
            links.watch()
    finally:
        socket.setdefaulttimeout(None)
    assert len(os.listdir("/proc/self/fd")) == before
    assert [end.gettimeout() for end in pair] == blocking == [None, None]
    assert all(os.get_blocking(end.fileno()) for end in pair)
    pair[0].sendall(b"text")
    assert pair[1].recv(4) == b"text"


def test_watch_finds_later_connections_and_leaves_known_ones_alone(pair: Pair) -> None:
    links = Links()
    links.watch()
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    later = connected()
    assert not any(map(is_watched, later))
    links.watch()
    assert all(map(is_watched, later))
    assert pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
    for end in later:
        end.close()


def test_watch_survives_other_kinds_of_sockets(pair: Pair) -> None:
    ours, theirs = socket.socketpair()
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    fresh = socket.socket()
    listening = socket.create_server(("127.0.0.1", 0))
    with ours, theirs, udp, fresh, listening:
        Links().watch()
        ours.sendall(b"text")
        assert theirs.recv(4) == b"text"
    assert all(map(is_watched, pair))


def test_watch_survives_closed_connections() -> None:
    links = Links()
    links.watch()
    first = connected()
    links.watch()
    first[0].close()
    links.watch()
    first[1].close()
    links.watch()
    second = connected()
    links.watch()
    assert all(map(is_watched, second))
    for end in second:
        end.close()


def test_watch_finds_a_new_connection_at_a_reused_descriptor(pair: Pair) -> None:
    links = Links()
    links.watch()
    number = pair[0].fileno()
    later = connected()
    os.dup2(later[0].fileno(), number)
    later[0].close()
    assert not is_watched(pair[0])
    links.watch()
    assert is_watched(pair[0])
    assert is_watched(later[1])
    later[1].close()


def test_watch_survives_a_connection_that_closes_meanwhile(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = connected()
    present = [("socket:[1]", end.fileno()) for end in (*first, *pair)]
    for end in first:
        end.close()
    monkeypatch.setattr(links_module, "_sockets", lambda: present)
    Links().watch()
    assert all(map(is_watched, pair))


def test_watch_survives_a_descriptor_that_becomes_a_file(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "_sockets", lambda: [(1, memory)])
    before = os.listdir("/proc/self/fd")
    Links().watch()
    assert os.listdir("/proc/self/fd") == before
