"""Fixtures of tests with processes. Every descendant of a test has a token in its environment;
no process with it may be left when the test ends, and no fork of the shared fork servers."""

from __future__ import annotations

# Before anything imports torch: bits are compared between threads of this process that compute, and
# with those of real workers, which have the same number of threads and the same rule for MKL.
import os

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MKL_CBWR": "AUTO,STRICT"}

import logging
import multiprocessing
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from rpcmp.job import server_pool
from rpcmp.process.fork_client import Forks
from rpcmp.process.template_client import Template
from tests.support import examples, keptobjects, pool, pretend, processes
from tests.support.needs import needs, needs_root
from tests.support.places import TESTS
from tests.support.processes import Server
from tests.support.reaper import TOKEN, reaping
from tests.support.sharedforks import DRIVE, MODELS, borrowing, children_of

pytest_plugins = ["tests.support.costs"]


class _NoLateEvents(logging.Filter):
    """Leaves out that gRPC has an event for a loop that has ended: each test has its own loop."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "PollerCompletionQueue._handle_events" not in record.getMessage()


logging.getLogger("asyncio").addFilter(_NoLateEvents())

hypothesis.settings.register_profile("rpcmp", deadline=None)  # this machine may be busy
hypothesis.settings.load_profile("rpcmp")

TIERS = ("gpu", "long", "system")
"""Folders that `pytest` alone leaves out, with the markers of their tests."""

CLUSTER = "pytest.mark.cluster"
"""Mark of the tier `cluster`, which tests of any other folder may have, written in full."""

ALLOWED_SKIPS: dict[str, str] = {}
"""Tests that may be skipped, by node id, and why. Any other skip fails the run."""

_unexpected_skips: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Let all tests of a run share cached files, not the user's: cuts and kernels are costly."""
    if not hasattr(config, "workerinput"):  # a worker of xdist has its parent's
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="rpcmp-tests-")
        os.environ["XDG_STATE_HOME"] = os.environ["XDG_CACHE_HOME"]
        keptobjects.install(Path(os.environ["XDG_CACHE_HOME"]))
    if config.option.markexpr == "cluster":
        os.environ[examples.ALL] = "1"
    if config.option.markexpr == "system":
        processes.FORKS.imports += MODELS


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by the folder that they are in, if it is named after a marker; see pyproject.toml.

    A long test in tests/system has that marker alone, so that `pytest -m system` leaves it out.
    `pytest -m cluster` repeats the tests of Hypothesis with all examples.
    """
    for item in items:
        if config.option.markexpr == "cluster" and item.get_closest_marker("hypothesis"):
            item.add_marker("cluster")
        for tier in TIERS:
            if TESTS / tier in item.path.parents and item.get_closest_marker("long") is None:
                item.add_marker(tier)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import modules that a run deselects, with all their libraries; None: other plugins
    decide.
    """
    asked, name = config.option.markexpr, collection_path.name
    is_at_the_top = collection_path.parent == TESTS
    if is_at_the_top and asked in ("gpu", "system"):  # whose tests are in the folder of that name
        return name != asked or None
    if collection_path.suffix == ".py":
        return _lacks_tests(collection_path.read_text(), asked) or None
    if not is_at_the_top:
        return None
    return (name in TIERS and (asked == "cluster" or f"not {name}" in asked)) or None


def _lacks_tests(text: str, asked: str) -> bool:
    """Whether no test of a module is in the tiers `asked`, by its marks of the tier `cluster`.

    Tests of Hypothesis are in both: there with all examples.
    """
    if asked == "cluster":
        return CLUSTER not in text and "hypothesis" not in text
    return "not cluster" in asked and f"\npytestmark = {CLUSTER}\n" in text


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record skips that have no allowed reason; that of tests/gpu is a machine without devices."""
    if "gpu" in report.keywords or hasattr(report, "wasxfail"):
        return
    if report.skipped and report.nodeid not in ALLOWED_SKIPS:
        _unexpected_skips.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record modules that are skipped as a whole."""
    if report.skipped and report.nodeid not in ALLOWED_SKIPS:
        _unexpected_skips.append(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if tests were skipped: a test that never runs proves nothing."""
    if _unexpected_skips:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the skipped tests."""
    for nodeid in _unexpected_skips:
        terminalreporter.write_line(f"skipped, but not in ALLOWED_SKIPS: {nodeid}", red=True)


RUN = uuid.uuid4().hex
"""Prefix of the tokens of this process's tests."""


@pytest.fixture(autouse=True)
def token(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The token of this test's processes; fails the test if one of them is left.

    Thousands of tests only start children that they wait for. Processes that these leave behind are
    found at the end of the module.
    """
    value = f"{RUN}-{uuid.uuid4().hex}"
    monkeypatch.setenv(TOKEN, value)
    starts_more = not {"unit", "group"} & set(request.path.relative_to(TESTS).parts)

    def children() -> list[psutil.Process]:
        own = () if starts_more else children_of(os.getpid())
        stays = processes.FORKS.pids
        return [*processes.FORKS.children(), *(each for each in own if each.pid not in stays)]

    before = children()

    def left() -> list[psutil.Process]:
        multiprocessing.active_children()  # which waits for loaders that torch 2.11 has ended
        forked = [child for child in children() if child not in before]
        return [*(processes.with_token(value) if starts_more else ()), *forked]

    yield value
    processes.require_ended(left, "all processes of the test")


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Fail the last test of a module if a process is left behind."""
    yield
    processes.require_ended(lambda: processes.with_token(RUN), "all processes of a module")


@pytest.fixture(scope="session", autouse=True)
def _shared() -> Iterator[None]:
    """Let jobs of this process use the shared fork servers and the shared stage servers."""
    with reaping(RUN), pytest.MonkeyPatch.context() as patch:
        borrow = borrowing(lambda: processes.FORKS.line(DRIVE))
        patch.setattr(Forks, "__init__", borrow)
        patch.setattr(server_pool, "LocalServers", pool.PooledServers)
        start = Template.start

        async def start_if_used(template: Template) -> None:
            if not processes.FORKS.in_use:  # else servers are the pool's
                await start(template)

        patch.setattr(Template, "start", start_if_used)
        yield
    pool.POOL.close()
    processes.FORKS.close()


@pytest.fixture(scope="session")
def all_pretended() -> Iterator[pretend.Pretended]:
    """A pretend accelerator, once for all tests of this process."""
    with pretend.pretended() as found:
        yield found


@pytest.fixture(scope="module")
def pretended(all_pretended: pretend.Pretended) -> Iterator[pretend.Pretended]:
    """Let the jobs and forks of a module have a pretend accelerator; see tests/support/pretend."""
    with all_pretended.in_use():
        yield all_pretended


@pytest.fixture
def own_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every job of this test start its own fork server, as jobs do outside of tests."""
    monkeypatch.setattr(processes.FORKS, "in_use", False)


@pytest.fixture
def job(tmp_path: Path) -> processes.JobFolder:
    """A folder with the test models, for configs."""
    return processes.JobFolder(tmp_path / "job")


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Two running stage servers, on free ports."""
    with processes.running_servers(2) as started:
        yield started


@pytest.fixture
def namespace() -> Iterator[tuple[str, ...]]:
    """A command that runs another one in a network namespace with links that can be cut."""
    name = f"rpcmp-{uuid.uuid4().hex[:8]}"
    needs_root("make a network")
    for program in ("nsenter", "ss"):  # by which tests/zoo/faults.py cuts links
        needs(program)
    ip = needs("ip")
    inside = (ip, "netns", "exec", name)
    subprocess.run([ip, "netns", "add", name], check=True)
    try:
        for command in (
            [ip, "link", "set", "lo", "up"],
            [ip, "rule", "add", "pref", "10", "lookup", "local"],  # so that rules can precede it
            [ip, "rule", "del", "pref", "0"],
        ):
            subprocess.run([*inside, *command], check=True)
        yield inside
    finally:
        subprocess.run([ip, "netns", "del", name], check=True)
