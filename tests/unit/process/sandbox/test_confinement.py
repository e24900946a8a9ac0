"""The confinement of a process: it cannot reach keys, homes or its supervisor."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from rpcmp import errors
from rpcmp.process.child import Child
from rpcmp.process.fork_client import Forks
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.sandbox import confinement, landlock, syscall_filter
from rpcmp.process.sandbox.confinement import FileAccess, hidden_by, secrets_in
from tests.support.processes import makes_networks


def test_interpreter_paths_exclude_ancestors_of_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, modules = tmp_path / "home/ann", tmp_path / "home/ann/modules"
    modules.mkdir(parents=True)
    (tmp_path / "link").symlink_to(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    paths = ["", ".", str(home), str(home.parent), "/", str(tmp_path / "link"), str(modules)]
    monkeypatch.setattr(sys, "path", paths)
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(paths))
    found = set(confinement._interpreter_paths())
    assert str(modules) in found
    assert not found & {*paths[:-1], *map(os.path.realpath, paths[:-1])}


def test_hidden_by_covers_the_certificate_folder_and_its_authoritys(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    for folder in (certs / "stage0", certs / "driver"):
        folder.mkdir(parents=True)
        (folder / "tls.key").write_text("key")
    assert hidden_by(None) == ()
    assert hidden_by(certs / "stage0") == (str(certs / "stage0"),)
    (certs / "ca.key").write_text("key")
    assert hidden_by(certs / "stage0") == (str(certs / "stage0"), str(certs))
    # If a key is a link, as in Kubernetes, its target is hidden as well.
    (certs / "stage0/tls.key").rename(tmp_path / "elsewhere.key")
    (certs / "stage0/tls.key").symlink_to(tmp_path / "elsewhere.key")
    assert str(tmp_path / "elsewhere.key") in hidden_by(certs / "stage0")
    (tmp_path / "elsewhere.key").rename(certs / "stage0/tls.key")
    # If the job is in the authority's folder, only the keys in there are hidden.
    keys = [certs / "ca.key", certs / "driver/tls.key", certs / "stage0/tls.key"]
    found = hidden_by(certs / "stage0", needed=certs)
    assert sorted(found) == sorted(map(str, [certs / "stage0", *keys]))


PROBE = """
import ctypes, fcntl, json, mmap, multiprocessing, os, resource, signal, socket, sys, tempfile
import threading
import torch
from rpcmp.process.sandbox import namespace as network
from rpcmp.process.channel import connect_to_supervisor

libc = ctypes.CDLL(None, use_errno=True)

def attempt(function):
    try:
        return repr(function())
    except BaseException as error:
        return type(error).__name__

def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")

def memory():
    fd = os.memfd_create("mine")
    os.ftruncate(fd, 4096)
    with open(f"/proc/self/fd/{fd}", "r+b") as again:
        again.write(b"shared")
    return os.pread(fd, 6, 0)

def forked():
    queue = multiprocessing.get_context("fork").SimpleQueue()
    shared = multiprocessing.Array("i", 3)
    def fill():
        shared[1] = 7
        queue.put("done")
    process = multiprocessing.get_context("fork").Process(target=fill)
    process.start()
    said = queue.get()
    process.join()
    return said, shared[1]

def threaded():
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(200, 200).mm(
        torch.ones(200, 200)).sum().item()))
    thread.start()
    thread.join()
    return found

def scratch():
    with tempfile.NamedTemporaryFile("w+") as file:
        file.write("kept")
        file.flush()
        return os.path.dirname(file.name) == os.environ["TMPDIR"]

def any_namespace():
    return max(network.current.namespaces, default=-1)

def reading(path):
    return os.open(path, os.O_RDONLY)

def program():
    import subprocess
    return subprocess.run(["cat", given["secret"]], capture_output=True).returncode

def connected(address):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)

def status(*keys):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {key: lines[key].strip() for key in keys}

def main():
    global given
    bond = connect_to_supervisor()
    given = bond.channel.receive()
    other = given["other"]
    supervisor = f"/proc/{other}"
    denied = {
        "a file": lambda: open(given["secret"]).read(),
        "a file, by a program": program,
        "a file beneath one that is granted": lambda: open(given["hidden"]).read(),
        "a key beside modules": lambda: open(given["key"]).read(),
        "hashes of passwords": lambda: open("/etc/shadow").read(),
        "a home": lambda: os.listdir("/root"),
        "temporary files": lambda: os.listdir("/tmp"),
        "a new file": lambda: open(given["secret"] + ".new", "w"),
        "a file that may be read": lambda: open(given["open"], "a"),
        "a folder that may be read": lambda: os.mkdir(given["open"] + ".folder"),
        "removed": lambda: os.remove(given["open"]),
        "mode": lambda: os.chmod(given["secret"], 0o777),
        "owner": lambda: os.chown(given["secret"], 1, 1),
        "truncated": lambda: os.truncate(given["secret"], 0),
        "an attribute": lambda: os.setxattr(given["secret"], "user.rpcmp", b"1"),
        "environment": lambda: open(f"{supervisor}/environ").read(),
        "memory": lambda: open(f"{supervisor}/mem", "rb"),
        "descriptors": lambda: open(f"{supervisor}/fd/0"),
        "what they lead to": lambda: os.readlink(f"{supervisor}/fd/0"),
        "root": lambda: os.listdir(f"{supervisor}/root/"),
        "killed": lambda: os.kill(other, signal.SIGTERM),
        "a signal by its group": lambda: os.killpg(os.getpgid(other), 0),
        "limited": lambda: resource.prlimit(other, resource.RLIMIT_NOFILE, (0, 0)),
        "traced": lambda: call(101, 16, other, 0, 0),
        "a Unix socket": lambda: connected(given["socket"]),
        "an abstract socket": lambda: connected("\\0" + given["abstract"]),
        "datagrams": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
        "a packet socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
        "mounted": lambda: call(165, b"none", b"/mnt", b"tmpfs", 0, 0),
        "a user namespace": lambda: call(272, 0x10000000),
        "back into the network": lambda: call(308, any_namespace(), 1 << 30),
        "io_uring": lambda: call(425, 8, bytes(120)),
        "keys": lambda: call(250, 0, -3, 0),
        "bpf": lambda: call(321, 0, bytes(64), 64),
        "configured": lambda: open("/proc/sys/kernel/hostname", "w"),
        "the mode of an open file": lambda: os.fchmod(reading(given["open"]), 0o4777),
        "the owner of an open file": lambda: os.fchown(reading(given["open"]), 1, 1),
        "an attribute of an open file": lambda: os.setxattr(
            reading(given["open"]), "user.rpcmp", b"1"),
        "times": lambda: os.utime(given["secret"], (1, 1)),
        "a session": lambda: os.setsid(),
        "another group": lambda: os.setpgid(0, os.getpgid(os.getppid())),
        "a group's priority": lambda: os.setpriority(os.PRIO_PGRP, os.getpgid(other), 19),
        "a process's priority": lambda: os.setpriority(os.PRIO_PROCESS, other, 19),
        "processors": lambda: os.sched_setaffinity(other, {0}),
        "scheduling": lambda: os.sched_setscheduler(other, os.SCHED_IDLE, os.sched_param(0)),
        "a lease": lambda: fcntl.fcntl(reading(given["open"]), fcntl.F_SETLEASE, fcntl.F_RDLCK),
        "notifications of a folder": lambda: fcntl.fcntl(
            reading(os.path.dirname(given["open"])), fcntl.F_NOTIFY, fcntl.DN_MODIFY),
        "attributes of an open file": lambda: fcntl.ioctl(
            reading(given["open"]), 0x40086602, bytes(8)),
        "notifications": lambda: call(294, 0),
        "shared memory of System V": lambda: call(29, 0, 4096, 0o1600),
        "what the supervisor reads, cut off": lambda: [
            os.ftruncate(int(fd), 0) for fd in os.listdir("/proc/self/fd")
            if "memfd:rpcmp-activity" in os.readlink(f"/proc/self/fd/{fd}")],
    }
    allowed = {
        "a file": lambda: open(given["open"]).read(),
        "a listing": lambda: "hidden" in os.listdir(os.path.dirname(given["open"])),
        "memory": memory,
        "a forked process": forked,
        "a thread": threaded,
        "scratch": scratch,
        "a socket pair": lambda: len(socket.socketpair()),
        "a name": lambda: bool(socket.getaddrinfo("localhost", 80)),
        "a listener": lambda: network.current.run(lambda: bool(socket.create_server(
            ("127.0.0.1", 0)).getsockname()[1])),
        "a module": lambda: __import__("wave").__name__,
        "a program": lambda: os.waitstatus_to_exitcode(os.system("true")),
        "own priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, 5),
        "own processors": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
        "own limits": lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0,
        "devices": lambda: [open("/dev/null", "w").write("x"), open("/dev/zero", "rb").read(3)],
    }
    bond.channel.send({
        "event": "probed",
        "denied": {name: attempt(function) for name, function in denied.items()},
        "allowed": {name: attempt(function) for name, function in allowed.items()},
        "networks": [os.readlink("/proc/thread-self/ns/net"),
                     network.current.run(lambda: os.readlink("/proc/thread-self/ns/net"))],
        "inside": network.current.run(lambda: status("CapEff", "Seccomp", "NoNewPrivs")),
        "status": status("CapPrm", "CapEff", "CapInh", "CapBnd", "CapAmb", "Seccomp", "NoNewPrivs"),
    })
    os._exit(0)
"""

NONE = "0" * 16


def test_a_confined_process_reaches_only_necessary_resources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "probe.py").write_text(PROBE)
    (code / "tls.key").write_text("key")
    monkeypatch.setenv("PYTHONPATH", str(code), prepend=os.pathsep)
    secret, inside, hidden = tmp_path / "secret", tmp_path / "given/file", tmp_path / "given/hidden"
    inside.parent.mkdir()
    for path in (secret, inside, hidden):
        path.write_text("content")
    file_access = FileAccess(readable=(str(inside.parent),), hidden=(str(hidden),))
    abstract = f"rpcmp-test-{os.getpid()}"

    async def probed() -> tuple[dict[str, Any], Path]:
        async with Forks(["torch"]) as forks:
            environment = compute_environment(threads=1)
            child = await Child.spawn("probe", environment, file_access, forks=forks)
            assert child.scratch is not None
            assert child.scratch.is_dir()
            child.send(
                {
                    "secret": str(secret),
                    "hidden": str(hidden),
                    "key": str(code / "tls.key"),
                    "open": str(inside),
                    "other": os.getpid(),
                    "socket": str(tmp_path / "socket"),
                    "abstract": abstract,
                }
            )
            reply = await anext(child.messages())
            await child.kill()
            return reply, child.scratch

    with socket.socket(socket.AF_UNIX) as by_path, socket.socket(socket.AF_UNIX) as by_name:
        by_path.bind(str(tmp_path / "socket"))
        by_name.bind(f"\0{abstract}")
        for listener in (by_path, by_name):
            listener.listen()
        reply, scratch = asyncio.run(probed())
    by_program = reply["denied"].pop("a file, by a program")
    assert by_program == "1"
    missing = reply["denied"].pop("io_uring")
    assert missing == "OSError"  # ENOSYS
    assert reply["denied"] == dict.fromkeys(reply["denied"], "PermissionError")
    assert reply["allowed"] == {
        "a file": "'content'",
        "a listing": "True",
        "memory": "b'shared'",
        "a forked process": "('done', 7)",
        "a thread": "[8000000.0]",
        "scratch": "True",
        "a socket pair": "2",
        "a name": "True",
        "a listener": "True",
        "a module": "'wave'",
        "a program": "0",
        "own priority": "None",
        "own processors": "None",
        "own limits": "True",
        "devices": "[1, b'\\x00\\x00\\x00']",
    }
    assert reply["networks"][0] == os.readlink("/proc/self/ns/net")
    assert (reply["networks"][0] != reply["networks"][1]) is makes_networks()
    restricted = {"Seccomp": "2", "NoNewPrivs": "1"}
    none = dict.fromkeys(("CapPrm", "CapEff", "CapInh", "CapBnd", "CapAmb"), NONE)
    if not makes_networks():  # only root can lower the bounding set; it has no effect here
        none["CapBnd"] = reply["status"]["CapBnd"]
    assert reply["status"] == {**none, **restricted}
    assert reply["inside"] == {"CapEff": NONE, **restricted}
    assert secret.read_text() == inside.read_text() == "content"
    assert not scratch.exists()


def test_a_denied_file_error_contains_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    error = PermissionError(errno.EACCES, "Permission denied", "/data")
    assert errors.one_line(error) == "PermissionError: [Errno 13] Permission denied: '/data'"
    monkeypatch.setattr(errors, "denied_hint", confinement.HINT)
    assert "`serve --no-confine`" in errors.one_line(error)
    assert "confine" not in errors.one_line(ValueError("no"))


def test_missing_protection_names_what_the_kernel_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert confinement.missing_protection() == ""
    monkeypatch.setattr(landlock, "abi", lambda: 2)
    assert confinement.kernel_support() == "Landlock ABI 2, seccomp"
    assert "signal other processes" in confinement.missing_protection()
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    monkeypatch.setattr(syscall_filter, "is_available", lambda: False)
    assert confinement.kernel_support() == "no Landlock, no seccomp"
    assert "open all files of its user" in confinement.missing_protection()
    assert "Unix sockets" in confinement.missing_protection()


def test_a_key_among_many_files_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "DATA_ENTRIES", 1)
    keys = [tmp_path / f"{number}.key" for number in range(9)]
    for path in keys:
        path.touch()
    assert sorted(secrets_in(tmp_path)) == [*map(str, keys)]


def test_keys_and_credentials_in_a_granted_folder_are_found(tmp_path: Path) -> None:
    own = ["stage1/tls.key", ".env", ".env.local", "a/b/id_ed25519", ".ssh", "data.key/x", ".netrc"]
    own += ["TLS.PEM", "id_ed25519_sk", ".bash_history", "service-account-7.json", "prod.env"]
    others = [
        "cacert.pem",
        "job.toml",
        "mine.py",
        "env",
        "keys.txt",
        "a/b/c/deep.key",
        "monkey",
        "id_rsa.pub",
    ]
    for name in own + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    found = {str(Path(path).relative_to(tmp_path)) for path in secrets_in(tmp_path)}
    assert found == {name.removesuffix("/x") for name in own}
    assert [*secrets_in(tmp_path / "not here")] == []
