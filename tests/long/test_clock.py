"""The wall clock is set while a run trains, as by NTP or a person: no step depends on it.

libfaketime changes what the C library tells all processes of the run; steady clocks stay. A run
is slow under it, since it reads its file at each call; and `time.sleep` fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults import Committed, committed
from tests.support.hosts import LOSING, assert_went_on, committed_without_fault, slow_config
from tests.support.needs import needs
from tests.support.processes import JobFolder, running, runs, with_token

HOUR, DAY = 3600, 86_400


class Clock:
    """A wall clock that a test can set, in seconds from the real one."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        needs("faketime")
        [library] = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
        monkeypatch.setenv("LD_PRELOAD", str(library))
        monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(file))
        monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
        monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        self._file = file
        self.set(0)

    def set(self, seconds: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.replace(self._file)  # it is read all the time


@pytest.fixture
def fault_free(tmp_path: Path) -> Committed:
    return committed_without_fault(tmp_path / "fault_free")


@pytest.fixture
def clock(fault_free: Committed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the runs that follow; the run without a fault has the real one."""
    return Clock(tmp_path / "clock", monkeypatch)


@pytest.mark.usefixtures("own_forks")
@pytest.mark.parametrize("seconds", [HOUR, -HOUR, 30 * DAY])
def test_a_clock_that_is_set_restarts_nothing(
    job: JobFolder, seconds: int, clock: Clock, fault_free: Committed
) -> None:
    with running("drive", slow_config(job, 0.0), "--json", shares=False) as run:
        run.wait_for_line(LOSING)
        clock.set(seconds)
        result = run.wait()
    clock.set(0)
    times = [event["time"] for event in result.events]
    assert abs(times[-1] - times[0] - seconds) < HOUR / 2  # it was set for the run as well
    assert not [event for event in result.events if event["event"] in ("fault", "recovered")]
    assert committed(result) == fault_free


@pytest.mark.usefixtures("own_forks")
@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
def test_a_worker_is_replaced_while_the_clock_is_set(
    job: JobFolder, token: str, seconds: int, clock: Clock, fault_free: Committed
) -> None:
    with running("drive", slow_config(job, 0.0), "--json", shares=False) as run:
        run.wait_for_line(LOSING)
        clock.set(seconds)
        next(each for each in with_token(token) if runs(each, "rpcmp.worker")).kill()
        run.wait_for_line('"event": "fault"')
        clock.set(0)
        result = run.wait()
    assert_went_on(result, fault_free)
