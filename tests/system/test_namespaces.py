"""The effects of namespaces: other users, other process ids, other disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rpcmp.process.resources import sweep
from rpcmp.server import claim_log
from tests.support.codefolders import LEAVES
from tests.support.lan import issue, mounted, serving
from tests.support.needs import needs, needs_root
from tests.support.processes import JobFolder, connect, rpcmp, running, running_servers
from tests.support.spying import sha256, spying
from tests.support.tunnels import require_alone

HERE = "127.0.0.1"
NONE = "0" * 16


def apart(*options: str) -> tuple[str, ...]:
    """Return a command that runs a program as in a container, with process ids of its own.

    Args:
        options: more of unshare's.
    """
    return (needs("unshare"), "--user", "--map-root-user", "--pid", "--fork", *options)


ORDINARY = """
import ctypes, encodings.idna, json, os, signal, socket, sys
from rpcmp.process.sandbox import namespace as network
from rpcmp.process.sandbox.confinement import FileAccess, enter

own, scratch = sys.argv[1:]
os.setgroups([]), os.setgid(65534), os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1)  # its files in /proc are its own again, as after an exec
network.current = network.open_private()
with open(own, "w") as file:
    file.write("own")
ours, theirs = os.pipe()
if not (pid := os.fork()):
    enter(FileAccess(), scratch)
    found = {}
    for name, function in {
        "own file": lambda: open(own).read(),
        "environment": lambda: open(f"/proc/{os.getppid()}/environ").read(),
        "signal": lambda: os.kill(os.getppid(), 0),
        "services": lambda: socket.socket(socket.AF_UNIX),
        "mode": lambda: os.chmod(own, 0o777),
        "scratch": lambda: open(scratch + "/new", "w").write("x"),
        "network": lambda: network.current.run(lambda: os.readlink("/proc/thread-self/ns/net"))
                           != os.readlink("/proc/thread-self/ns/net"),
        "capabilities": lambda: [l.split()[1] for l in open("/proc/self/status") if "CapEff" in l],
        "user": os.getuid,
    }.items():
        try:
            found[name] = function()
        except OSError as error:
            found[name] = type(error).__name__
    os.write(theirs, json.dumps(found).encode())
    os._exit(0)
os.close(theirs)
print(os.read(ours, 65536).decode(), file=sys.stdout)
print(network.current.reason, file=sys.stderr)
os.waitpid(pid, 0)
"""


def test_an_ordinary_users_process_is_confined_as_well(tmp_path: Path) -> None:
    """In a user namespace, where it had all capabilities."""
    needs_root("become another user")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        scratch = Path(folder) / "scratch"
        scratch.mkdir()
        scratch.chmod(0o777)
        os.chmod(folder, 0o777)
        command = [sys.executable, "-c", ORDINARY, f"{folder}/own", str(scratch)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        **dict.fromkeys(
            ("own file", "environment", "signal", "services", "mode"), "PermissionError"
        ),
        "scratch": 1,
        "network": True,
        "capabilities": [NONE],
        "user": 65534,
    }


def test_a_host_without_the_checkpoints_gets_them_and_its_confined_worker_reads_them(
    job: JobFolder, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    config = spying(job, [], data=f'[checkpoint]\ndir = "{disk}/saved"\nevery_steps = 2')
    with running_servers(2) as servers:
        at = ("--connect", connect(servers))
        assert rpcmp("drive", config, "--json", *at, "--set", "steps=4").code == 0
    empty = mounted(f"-t tmpfs none {disk}")
    with (
        running_servers(1) as (first,),
        running("serve", "--stage", "1", "--listen", f"{HERE}:0", under=empty) as second,
    ):
        address = second.wait_for_line(r"SERVING on (\S+)")[1]
        at = ("--connect", f"{first.address},{address}")
        resumed = rpcmp("drive", config, "--json", *at, "--resume")
    assert sha256(resumed) == sha256(
        rpcmp("drive", config, "--json", "--set", 'checkpoint.dir="other"')
    )
    assert resumed.event("resumed")["step"] == 4


def test_stages_that_cannot_read_each_others_memory_use_their_sockets(
    job: JobFolder, tmp_path: Path
) -> None:
    """Like two containers on one host, whose stages would otherwise copy from memory to memory."""
    config = job.config('[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]')
    certs = issue(tmp_path / "certs", HERE, HERE)
    with (
        serving(0, f"{HERE}:0", certs) as first,
        serving(1, f"{HERE}:0", certs, apart("--kill-child")) as second,
    ):
        where = ("--connect", connect([first, second]), "--certs", certs / "driver")
        result = rpcmp("verify", config, *where, "--steps", "2")
        second.run.process.kill()
    assert result.code == 0, result.err
    assert "identical" in result.out


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_files_in_use_by_another_server_stay(temporary: Path) -> None:
    """Even if it is in a container, with a process id that is unknown here."""
    command = [*apart("--kill-child"), sys.executable, "-c", f"{LEAVES}sys.stdin.read()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        used = Path(server.stdout.readline().strip())
        sweep(claim_log.PREFIX)
        assert (used / "model.py").exists()
        server.communicate("")
    sweep(claim_log.PREFIX)
    assert not used.exists()


def test_a_process_in_a_container_cannot_use_our_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require_alone(tmp_path, caplog, apart())
