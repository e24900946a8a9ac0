"""What a run of tests costs: CPU seconds in units of `import torch`, and the dearest tests.

A unit is what `python -c "import torch"` takes in the same environment, at the same time: one is
measured after every EVERY tests, beside those that run. So a slow or busy machine, or a larger
build of torch, changes the figures of a run less than the suite does. After a short run as many are
measured at a time as there are processes of tests.

The costs of a test are those of its process and of all processes below, measured around its set-up,
call and teardown. Those of a fixture that several tests share are counted apart, and so are those
of the shared fork servers themselves. The sum has everything: collection, the workers of
pytest-xdist, and what pytest itself does. A process that has lost its parent is counted until then.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support import sharedforks

MAX_UNITS = 4.0
"""Most units that a test of `pytest` may take which DEAR does not list."""

DEAR: dict[str, str] = {
    "tests/cluster/test_moving_layers.py::test_layers_move_between_two_steps_with_the_same_bits": (
        "six layers at three real servers, moved twice: 3.9 to 4.6"
    ),
    "tests/cli/test_new.py::test_the_new_job_trains_with_the_bits_of_one_process": (
        "what every newcomer runs, as two real jobs and with `verify`: 3.0 to 4.1"
    ),
    "tests/cluster/test_modules.py"
    "::test_a_module_is_balanced_saved_resumed_under_another_balance_and_exported": (
        "four real jobs, each of which builds on the one before: 3.9 to 4.3"
    ),
}
"""Tests and shared fixtures that may take more than MAX_UNITS, by node id without parameters."""

EVERY = 400
"""Tests between two measurements of a unit."""

PROPERTY = "cpu seconds"
_TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--max-units",
        type=float,
        help=f"fail if the run costs more than so many `import torch`, or one test more than "
        f"{MAX_UNITS:.0f} which is not listed in tests/support/costs.py",
    )


def cpu_seconds(pid: int, without: frozenset[int] = frozenset()) -> float:
    """Return the CPU time of a process and all below it, with the ended ones that were waited for.

    Args:
        without: processes whose own time does not count; that of their children does.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # it has ended: its parent has its time, or will
        return 0.0
    used = sum(map(int, stat[13:15] if pid in without else stat[11:15])) / _TICKS
    for task in tasks:
        with contextlib.suppress(OSError):
            children = (task / "children").read_text().split()
            used += sum(cpu_seconds(int(child), without) for child in children)
    return used


def _now() -> float:
    return cpu_seconds(os.getpid(), frozenset(sharedforks.STARTED))


class Meter:
    """Measures the tests of one process, and reports them with the test's last report."""

    def __init__(self) -> None:
        self._begun = 0.0
        self._ended: float | None = None
        self._shared: list[tuple[str, float]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._begun, self._shared = _now(), []

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Iterator[None]:
        """Count a fixture that several tests share apart from the first of them."""
        if fixturedef.scope == "function":
            return (yield)
        begun, before = _now(), len(self._shared)
        result = yield
        inner = sum(seconds for _, seconds in self._shared[before:])
        self._shared.append(
            (f"{request.node.nodeid}::{fixturedef.argname}", _now() - begun - inner)
        )
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> None:
        """Count the end of what all tests share, such as fork servers, apart from the last test."""
        self._ended = None if nextitem is not None else _now()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown":
            shared = sum(seconds for _, seconds in self._shared)
            ended = _now() if self._ended is None else self._ended
            own = (item.nodeid, ended - self._begun - shared)
            item.user_properties.append((PROPERTY, [own, *self._shared]))


class Summary:
    """Adds up what the tests of all processes have cost, and prints it."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._each: dict[str, float] = {}
        self._lines: list[str] = []
        self._failed: list[str] = []
        self._done = 0
        self._imports: list[float] = []
        self._measuring = ThreadPoolExecutor(1, "costs")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        costs: Any = (
            dict(report.user_properties).get(PROPERTY, ()) if report.when == "teardown" else ()
        )
        if report.when == "teardown":
            self._done += 1
            if self._done % EVERY == 0:
                self._measuring.submit(lambda: self._imports.append(import_seconds()))
        for nodeid, seconds in costs:
            self._each[nodeid] = max(seconds, self._each.get(nodeid, 0.0))

    @pytest.hookimpl(trylast=True)  # when the workers have ended, and count
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._measuring.shutdown()
        used = cpu_seconds(os.getpid()) - sum(self._imports)
        at_once = session.config.option.numprocesses
        unit = median(self._imports) if len(self._imports) > 2 else unit_seconds(at_once)
        self._lines = [
            f"{used / unit:.0f} units: {used:.0f} CPU seconds, {unit:.2f} of them an `import torch`"
        ]
        dearest = sorted(self._each.items(), key=lambda each: -each[1])
        self._lines += [f"{seconds / unit:6.1f}  {nodeid}" for nodeid, seconds in dearest[:10]]
        if self._limit is None:
            return
        if used / unit > self._limit:
            self._failed.append(f"the run cost {used / unit:.0f} units, at most {self._limit:.0f}")
        self._failed += [
            f"{nodeid} cost {seconds / unit:.1f} units, at most {MAX_UNITS:.0f}; see DEAR in "
            "tests/support/costs.py"
            for nodeid, seconds in dearest
            if seconds / unit > MAX_UNITS and nodeid.partition("[")[0] not in DEAR
        ]
        if self._failed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("costs, in units of `import torch`")
        for line in self._lines:
            terminalreporter.write_line(line)
        for line in self._failed:
            terminalreporter.write_line(line, red=True)


def import_seconds() -> float:
    """Return the CPU time of one `python -c "import torch"`, beside whatever runs."""
    process = subprocess.Popen([sys.executable, "-c", "import torch"])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


def unit_seconds(at_once: int) -> float:
    """Return the mean CPU time of `python -c "import torch"`.

    Args:
        at_once: how many run at a time. Processes that share cores and caches take longer, as tests
            have; alone, an import takes three quarters of that.
    """
    command = [sys.executable, "-c", "import torch"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    imports = [subprocess.Popen(command) for _ in range(at_once)]
    assert [one.wait() for one in imports] == [0] * at_once
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used / at_once


def pytest_configure(config: pytest.Config) -> None:
    """Measure in each process that runs tests, and add up in the one that the user has started."""
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.option.numprocesses:
        config.pluginmanager.register(Meter(), "costs of tests")
    else:
        config.pluginmanager.register(Summary(config.option.max_units), "costs of the run")
