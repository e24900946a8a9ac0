"""Processes that the template forks: they equal those that an interpreter would be started for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rpcmp.process import template
from rpcmp.process.template_client import Template
from tests.support.eventloops import in_event_loop
from tests.support.templates import forked, write_modules

STATUS = ("PPid", "SigBlk", "SigIgn", "SigCgt", "Umask", "Threads", "NoNewPrivs")


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_modules(tmp_path, monkeypatch)


def facts(report: dict[str, Any]) -> dict[str, Any]:
    """Return what must not depend on how a process was started."""
    pid = report["pid"]
    lines = (line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        **{key: value for key, value in lines if key in STATUS},
        "leads its session": os.getsid(pid) == pid,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        **{key: value for key, value in report.items() if key not in ("pid", "preloaded_in")},
    }


def test_a_forked_process_equals_a_started_one() -> None:
    async def run() -> dict[str, Any]:
        by = Template("command", ["preloaded"])
        ours, theirs = socket.socketpair()
        with ours, theirs:
            child, report = await forked(by, {"--line": theirs.fileno()}, "wait")
            found = facts(report)
            assert report["preloaded_in"] not in (child.pid, os.getpid())
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == -signal.SIGTERM
            await by.close()
            return found

    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-P", "-c", "import command; command.main()"]
        options = ["wait", "--line", str(theirs.fileno())]
        with subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env=dict(os.environ),  # without what C libraries have added
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            started = facts(json.loads(process.stdout.readline()))
            process.kill()
    assert asyncio.run(run()) == started


@in_event_loop
async def test_a_fork_has_threads_and_randomness_of_its_own() -> None:
    """libc knows the number of its first thread, to which another thread sends a signal."""

    by = Template("command", ["preloaded"])
    found = [await forked(by, {}, "threads") for _ in range(2)]
    assert [await child.wait() for child, _ in found] == [7, 7]
    await by.close()
    reports = [report for _, report in found]
    for report in reports:
        assert report["signalled"]
        assert report["main thread"] == report["pid"]
    assert reports[0]["random"] != reports[1]["random"]


def test_a_system_that_cannot_fork_siblings_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MACHINES", {})
    with pytest.raises(OSError, match="not implemented"):
        template.fork_sibling()


def test_a_process_with_other_threads_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "_thread_id_address", lambda: 1)
    monkeypatch.setattr(template, "_LIBC", None)  # it would fork the tests
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    with pytest.raises(OSError, match="other threads"):
        template.fork_sibling()
    end.set()
    thread.join()
