"""The files in deploy/ are valid by the strictest check available."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.needs import needs
from tests.support.places import DEPLOY
from tests.support.processes import running

UNITS = ("rpcmp@.service", "rpcmp-drive@.service")

WORST_EXPOSURE = 40
"""Tenths of systemd's points; 100 is no protection at all."""


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A unit, with a program that exists on this machine."""
    path = tmp_path / str(request.param).replace("@", "@1")
    text = (
        (DEPLOY / request.param)
        .read_text()
        .replace("/opt/rpcmp/bin/rpcmp", f"{Path(sys.executable).parent}/rpcmp")
    )
    path.write_text(text)
    return path


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [needs("systemd-analyze"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_unit_is_valid_and_little_exposed(unit: Path) -> None:
    found = analyze("verify", "--man=no", "--recursive-errors=no", unit)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")
    found = analyze("security", "--offline=true", f"--threshold={WORST_EXPOSURE}", unit)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_command_of_the_unit_exists_in_rpcmp(unit: Path) -> None:
    line = re.search(r"(?m)^ExecStart=(.*)$", unit.read_text().replace("\\\n", ""))
    assert line is not None
    program, command, *options = line[1].split()
    known = subprocess.check_output([program, command, "--help"], text=True, timeout=60)
    assert {option for option in options if option.startswith("--")} <= set(known.split())


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket on which systemd listens to its services."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        yield listening


def test_the_server_notifies_systemd_of_ready_alive_and_stopping(systemd: socket.socket) -> None:
    with running("serve", "--stage", "0", "--listen", "127.0.0.1:0") as run:
        assert systemd.recv(100) == b"READY=1"
        assert systemd.recv(100) == systemd.recv(100) == b"WATCHDOG=1"
        os.kill(run.pid, signal.SIGTERM)
        while (reply := systemd.recv(100)) == b"WATCHDOG=1":
            pass
        assert reply == b"STOPPING=1"
        assert run.wait().code == 0


def test_a_server_that_the_watchdog_aborts_says_where_it_was(systemd: socket.socket) -> None:
    with running("serve", "--stage", "0", "--listen", "127.0.0.1:0") as run:
        while systemd.recv(100) != b"WATCHDOG=1":
            pass
        os.kill(run.pid, signal.SIGABRT)
        ended = run.wait()
    assert ended.code == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in ended.err
    assert "lifecycle.py" in ended.err or "base_events.py" in ended.err
