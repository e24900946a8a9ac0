"""The template's client: its processes outlive it, and it is started again if it is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rpcmp.errors import WorkerDiedError
from rpcmp.process.template_client import Template
from tests.support.eventloops import in_event_loop
from tests.support.processes import no_more_files, poll_for
from tests.support.templates import forked, write_modules


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_modules(tmp_path, monkeypatch)


def new() -> Template:
    return Template("command", ["preloaded"])


@in_event_loop
async def test_one_template_forks_all_that_are_asked_for_at_once() -> None:

    by = new()
    found = await asyncio.gather(*(forked(by, {}, "wait") for _ in range(8)))
    assert len({child.pid for child, _ in found}) == 8
    assert [report["pid"] for _, report in found] == [child.pid for child, _ in found]
    assert len({report["preloaded_in"] for _, report in found}) == 1
    await by.close()
    for child, _ in found:  # they live on
        assert child.returncode is None
        child.send_signal(signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
@in_event_loop
async def test_processes_outlive_their_template_and_another_one_forks_more(
    signum: signal.Signals,
) -> None:

    by = new()
    child, report = await forked(by, {}, "wait")
    os.kill(report["preloaded_in"], signum)
    with pytest.raises(WorkerDiedError, match="that forks stage servers has died"):
        await forked(by, {}, "wait")
    other, other_report = await forked(by, {}, "wait")
    assert other_report["preloaded_in"] != report["preloaded_in"]
    assert not psutil.pid_exists(report["preloaded_in"])
    assert (child.returncode, other.returncode) == (None, None)
    for each in (child, other):
        each.send_signal(signal.SIGKILL)
        await each.wait()
    await by.close()


@in_event_loop
async def test_a_template_that_cannot_import_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "preloaded.py").write_text("raise RuntimeError('planted')\n")

    by = new()
    with pytest.raises(WorkerDiedError, match="has died"):
        await forked(by, {})
    await by.close()


@in_event_loop
async def test_a_template_that_may_open_no_more_files_says_so() -> None:

    by = new()
    child, report = await forked(by, {}, "wait")
    with (
        no_more_files(psutil.Process(report["preloaded_in"])),
        pytest.raises(WorkerDiedError, match=r"cannot fork: .*Too many open files"),
    ):
        await forked(by, {})
    other, other_report = await forked(by, {}, "wait")
    assert other_report["preloaded_in"] == report["preloaded_in"]
    for each in (child, other):
        each.send_signal(signal.SIGKILL)
        await each.wait()
    await by.close()


@in_event_loop
async def test_a_template_that_would_fork_in_vain_is_ended(tmp_path: Path) -> None:
    (tmp_path / "preloaded.py").write_text("import time\nwhile True:\n    time.sleep(1)\n")

    by = new()
    asking = asyncio.create_task(forked(by, {}))
    before = {*psutil.Process().children()}
    while not (started := {*psutil.Process().children()} - before):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await by.close()
    assert not any(each.is_running() for each in started)


PARENT = """
import asyncio, os, signal
from rpcmp.process.template_client import Template
from tests.support.templates import forked

async def main():
    by = Template("command", ["preloaded"])
    _, report = await forked(by, {}, "wait", "with", str(os.getpid()))
    print(report["pid"], report["preloaded_in"], flush=True)
    signal.pause()

asyncio.run(main())
"""


def test_nothing_outlives_a_parent_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child, template = map(int, parent.stdout.readline().split())
        parent.kill()
    left = (child, template)
    poll_for(lambda: not any(map(psutil.pid_exists, left)), "both to end")
