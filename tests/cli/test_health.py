"""`rpcmp health`: its exit code and its message for a stage server."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rpcmp.net import authority, identity
from tests.support.lan import cli, issue, serving
from tests.support.pool import lend_servers
from tests.support.processes import (
    Addressed,
    JobFolder,
    Result,
    Server,
    connect,
    poll_for,
    rpcmp,
    running,
    status,
)

HERE = "127.0.0.1"

NAME = "stage-a.example.org"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a stage with a host name, and of another without."""
    return issue(tmp_path_factory.mktemp("certs"), NAME, HERE)


@pytest.fixture(scope="module")
def server(certs: Path) -> Iterator[Server]:
    with serving(0, f"{HERE}:0", certs) as started:
        yield started


@pytest.fixture(scope="module")
def other(certs: Path) -> Iterator[Server]:
    with serving(1, f"{HERE}:0", certs) as started:
        yield started


def ask(server: Addressed, folder: Path, *options: str) -> Result:
    return rpcmp("health", server.address, "--certs", folder, *options)


def test_a_server_that_serves_is_healthy() -> None:
    with lend_servers(1) as (server,):
        found = rpcmp("health", server.address)
    assert (found.code, found.out, found.err) == (0, f"{server.address} is SERVING\n", "")


def test_health_of_a_draining_server_exits_1(job: JobFolder) -> None:
    config = job.config('steps = 100000\n[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]')
    patient = ("--set", "recovery.heartbeat_timeout=600.0")
    forgetful = ("--set", "recovery.keep_after_driver=0")
    with (
        lend_servers(2) as two,
        running("drive", config, "--connect", connect(two), "--json", *patient, *forgetful) as run,
    ):
        run.wait_for_line('"event": "step"')
        worker = status(config, two)[0]["worker_pid"]
        os.kill(worker, signal.SIGSTOP)  # its step does not end, and so the server neither
        os.kill(two[0].pid, signal.SIGTERM)
        found = poll_for(
            lambda: (answer := rpcmp("health", two[0].address)).code and answer, "a drain"
        )
        assert (found.code, found.out) == (1, f"{two[0].address} is NOT_SERVING\n")
        assert rpcmp("health", two[1].address).code == 0
        run.process.kill()  # nothing is left to wait for
        two[0].end()


@pytest.mark.parametrize("options", [[], ["--certs", "driver"]])
def test_health_of_a_silent_and_of_an_absent_server_exits_75(
    certs: Path, options: list[str]
) -> None:
    options = [str(certs / option) if option == "driver" else option for option in options]
    with socket.create_server((HERE, 0)) as listener:
        address = f"{HERE}:{listener.getsockname()[1]}"
        silent = rpcmp("health", address, "--timeout", "0.5", *options)
    absent = rpcmp("health", address, *options)
    assert [(found.code, found.out) for found in (silent, absent)] == [(75, "")] * 2
    assert f"{address} does not answer within 0.5 s" in silent.err
    assert f"rpcmp: {address} cannot be reached" in absent.err
    assert "is `rpcmp serve` running there?" in absent.err


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("options", [[], ["--insecure"]])
def test_servers_that_require_tls_are_named(
    job: JobFolder, server: Server, other: Server, options: list[str]
) -> None:
    found = rpcmp("health", server.address, *options)
    assert found.code == 2
    assert f"{server.address} requires TLS: give --certs" in found.err
    drained = rpcmp("drain", server.address, *options)
    assert drained.err.startswith(
        f"rpcmp: {server.address} requires TLS: "
    )  # of no stage that it knows
    config = job.config('[model]\nlayers = "zoo:mlp"\nbalance = [4]')
    for command in ("drive", "status"):
        found = rpcmp(command, config, "--connect", server.address, *options)
        assert "requires TLS: give --certs" in found.err + found.out
    config = job.config('[model]\nlayers = "zoo:mlp"\nbalance = [1, 3]')
    found = rpcmp("drive", config, "--connect", connect([server, other]), *options)
    assert found.code == 2
    assert "requires TLS: give --certs" in found.err
    assert "Error:" not in found.err


def test_no_server_starts_with_a_certificate_that_every_peer_refuses(tmp_path: Path) -> None:
    cli(tmp_path, "init")
    for days, message, state in (
        (-5, "has expired on", "expired"),
        (5, "is valid from", "not yet"),
    ):
        begin = datetime.now(UTC) + timedelta(days=days)
        authority.issue(tmp_path, "stage0", identity.stage(0), [HERE], days=1, begin=begin)
        refused = rpcmp("serve", "--stage", "0", "--certs", tmp_path / "stage0")
        assert (refused.code, refused.out) == (2, "")
        assert message in refused.err
        shown = rpcmp("certs", "show", tmp_path / "stage0")
        assert re.search(f"^valid .* UTC, {state}$", shown.out, re.MULTILINE)


@pytest.mark.parametrize("who", ["stage0", "stage1", "driver"])
def test_all_certificates_of_the_job_may_ask(certs: Path, server: Server, who: str) -> None:
    found = ask(server, certs / who, "--server-name", NAME)
    assert (found.code, found.out) == (0, f"{server.address} is SERVING\n")


@pytest.mark.parametrize("name", [None, "host-b.example.org", ".", "a" * 64])
def test_health_checks_the_name_in_the_servers_certificate(
    certs: Path, server: Server, name: str | None
) -> None:
    found = ask(server, certs / "driver", *([] if name is None else ["--server-name", name]))
    assert found.code == 2
    assert HERE in found.err if name is None else name in found.err
    assert "Traceback" not in found.err


def test_certificates_of_different_authorities_are_refused(
    certs: Path, server: Server, tmp_path: Path
) -> None:
    cli(tmp_path, "init")
    found = ask(server, tmp_path / "driver", "--server-name", NAME)
    assert found.code == 2
    assert f"{server.address} is not trusted" in found.err
    (tmp_path / "driver" / "ca.crt").write_bytes((certs / "ca.crt").read_bytes())
    found = ask(server, tmp_path / "driver", "--server-name", NAME)
    assert found.code == 2
    assert f"{server.address} refuses us" in found.err


def test_a_server_without_certificates_is_not_asked_with_one(certs: Path) -> None:
    with lend_servers(1) as (server,):
        found = ask(server, certs / "driver")
    assert found.code == 2
    assert "does not speak TLS at all" in found.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server-name", NAME], "give --certs DIR"),
        (["192.0.2.7"], "192.0.2.7:50051 is not a loopback address"),
    ],
)
def test_without_tls_nothing_else_is_asked(arguments: list[str], message: str) -> None:
    found = rpcmp("health", *arguments)
    assert found.code == 2
    assert message in found.err


def test_a_probe_loads_neither_configs_nor_the_control_service() -> None:
    code = """
import sys
from rpcmp.cli import cli
try:
    cli.main(["health", "1"], standalone_mode=False)
except Exception as error:
    assert "cannot be reached" in str(error), error
print([name for name in ("torch", "numpy", "pydantic", "cryptography") if name in sys.modules])
"""
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, timeout=60).strip() == "[]"
