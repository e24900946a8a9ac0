"""What a job's code can reach on its host: whatever it runs, not keys, homes or its supervisor."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rpcmp import errors
from rpcmp.process import confinement, landlock, syscallfilter
from rpcmp.process.child import Child
from rpcmp.process.confinement import SCRATCH, Reach, hidden_by
from rpcmp.process.environment import compute_environment
from rpcmp.process.forking import Forks
from rpcmp.process.grants import Access, Grant, grants, private_files
from tests.support.lan import issue, serving
from tests.support.processes import (
    JobFolder,
    Result,
    connect,
    poll_for,
    rpcmp,
    running,
    running_servers,
)

HERE = "127.0.0.1"


# What is granted


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Folders a and b, a file in each, and a link from a to b."""
    for name in ("a/deep/file", "a/deep/key", "a/other", "b/file"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "a/link").symlink_to(tmp_path / "b")
    return tmp_path


def granted(tree: Path, *paths: str, hidden: Sequence[str] = ()) -> set[tuple[str, str]]:
    found = grants(
        [str(tree / path) for path in paths], Access.READ, [str(tree / path) for path in hidden]
    )
    return {(str(Path(grant.path).relative_to(tree)), grant.access.value) for grant in found}


def test_a_folder_with_nothing_hidden_is_granted_as_one(tree: Path) -> None:
    assert granted(tree, "a") == {("a", "read")}
    assert granted(tree, "a", hidden=["b", "aa"]) == {("a", "read")}


def test_siblings_of_what_is_hidden_are_granted_one_by_one_and_links_never(tree: Path) -> None:
    assert granted(tree, "a", hidden=["a/deep/key"]) == {
        ("a", "list"),
        ("a/deep", "list"),
        ("a/deep/file", "read"),
        ("a/other", "read"),
    }


def test_nothing_is_granted_of_what_is_hidden_by_whatever_name(tree: Path) -> None:
    assert granted(tree, "a", hidden=["a"]) == set()
    assert granted(tree, "a/deep/file", hidden=["a"]) == set()
    assert granted(tree, "a/link", hidden=["b"]) == set()
    assert granted(tree, "b", hidden=["a/link"]) == set()
    assert granted(tree, "a/missing") == set()


def test_the_links_own_target_is_granted_where_a_link_is(tree: Path) -> None:
    assert granted(tree, "a/link") == {("b", "read")}
    assert grants([str(tree / "b")], Access.WRITE, []) == [Grant(str(tree / "b"), Access.WRITE)]


def test_what_not_everybody_may_read_is_private(tree: Path) -> None:
    (tree / "a/deep/key").chmod(0o640)
    (tree / "b").chmod(0o750)
    assert sorted(private_files(str(tree))) == [str(tree / "a/deep/key"), str(tree / "b")]
    assert private_files(str(tree), depth=2) == [str(tree / "b")]


def test_a_path_of_modules_is_readable_unless_the_home_lies_in_it(
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
    found = set(confinement._of_interpreter())
    assert str(modules) in found
    assert not found & {*paths[:-1], *map(os.path.realpath, paths[:-1])}


def test_a_certificates_folder_is_hidden_and_an_authoritys(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    for folder in (certs / "stage0", certs / "driver"):
        folder.mkdir(parents=True)
        (folder / "tls.key").write_text("key")
    assert hidden_by(None) == ()
    assert hidden_by(certs / "stage0") == (str(certs / "stage0"),)
    (certs / "ca.key").write_text("key")
    assert hidden_by(certs / "stage0") == (str(certs / "stage0"), str(certs))
    # A key that is a link, as in Kubernetes: what it leads to is hidden as well.
    (certs / "stage0/tls.key").rename(tmp_path / "elsewhere.key")
    (certs / "stage0/tls.key").symlink_to(tmp_path / "elsewhere.key")
    assert str(tmp_path / "elsewhere.key") in hidden_by(certs / "stage0")
    (tmp_path / "elsewhere.key").rename(certs / "stage0/tls.key")
    # The job lies in the authority's folder: only its keys are hidden.
    keys = [certs / "ca.key", certs / "driver/tls.key", certs / "stage0/tls.key"]
    found = hidden_by(certs / "stage0", needed=certs)
    assert sorted(found) == sorted(map(str, [certs / "stage0", *keys]))


# What is filtered


def verdict(machine: syscallfilter.Machine, call: str | int, *given: int, audit: int = 0) -> int:
    """The errno that the filter answers a call with; 0: it is allowed. An interpreter of BPF."""
    number = machine.numbers[call] if isinstance(call, str) else call
    memory = {0: number, 4: audit or machine.audit}
    memory |= {16 + 8 * index: argument for index, argument in enumerate(given)}
    program, at, value = syscallfilter.program(machine), 0, 0
    while True:
        operation, if_true, if_false, operand = program[at]
        at += 1
        match operation:
            case 0x20:
                value = memory[operand]
            case 0x54:
                value &= operand
            case 0x06:
                return operand & 0xFFFF if operand < 0x7FFF0000 else 0
            case 0x15:
                at += if_true if value == operand else if_false
            case 0x35:
                at += if_true if value >= operand else if_false
            case 0x45:
                at += if_true if value & operand else if_false


@pytest.mark.parametrize("machine", syscallfilter.MACHINES.values(), ids=syscallfilter.MACHINES)
def test_the_filter_refuses_what_it_should_on_every_machine(
    machine: syscallfilter.Machine,
) -> None:
    for name in set(syscallfilter.REFUSED) & set(machine.numbers):
        assert verdict(machine, name, 0) == errno.EPERM
    for name in syscallfilter.MISSING:
        assert verdict(machine, name, 0) == errno.ENOSYS
    stream, packets, datagrams = socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
        assert verdict(machine, "socket", family, stream) == 0
    for kind in (stream, datagrams, socket.SOCK_RAW, stream | socket.SOCK_CLOEXEC):
        assert verdict(machine, "socket", socket.AF_UNIX, kind) == errno.EPERM
    assert verdict(machine, "socket", 38, packets) == errno.EPERM  # AF_ALG
    for kind in (stream, packets | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK):
        assert verdict(machine, "socketpair", socket.AF_UNIX, kind) == 0
    for kind in (datagrams, socket.SOCK_RAW):  # the latter is another name of the former
        assert verdict(machine, "socketpair", socket.AF_UNIX, kind) == errno.EPERM
    assert verdict(machine, "clone", 0x3D0F00) == 0  # a thread
    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, "clone", namespace | signal.SIGCHLD) == errno.EPERM
    assert verdict(machine, "ioctl", 0, 0x5401) == 0
    assert {verdict(machine, "ioctl", 0, command) for command in (0x5412, 0x541C)} == {errno.EPERM}
    for call in ("setpriority", "ioprio_set"):
        assert [verdict(machine, call, which) for which in range(3)].count(errno.EPERM) == 2
    assert verdict(machine, "setpriority", os.PRIO_PROCESS) == 0
    assert verdict(machine, "prlimit64", 0) == 0
    assert verdict(machine, "prlimit64", 4711) == errno.EPERM
    assert verdict(machine, 63, 0) == 0
    assert verdict(machine, 0x40000000, 0) == errno.EPERM  # x32
    assert verdict(machine, 63, audit=0x40000003) == errno.EPERM  # 32 bits


# A process


PROBE = """
import ctypes, json, mmap, multiprocessing, os, resource, signal, socket, sys, tempfile, threading
import torch
from rpcmp.process import network
from rpcmp.process.channel import begin_child

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

if __name__ == "__main__":
    bond = begin_child()
    given = bond.channel.receive()
    other = given["other"]
    supervisor = f"/proc/{other}"
    denied = {
        "a file": lambda: open(given["secret"]).read(),
        "a file, by a program": program,
        "a file beneath one that is granted": lambda: open(given["hidden"]).read(),
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
        "back into the network": lambda: call(308, network.current.namespaces[0], 0x40000000),
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


def test_a_confined_process_reaches_what_it_needs_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(code), prepend=os.pathsep)
    secret, inside, hidden = tmp_path / "secret", tmp_path / "given/file", tmp_path / "given/hidden"
    inside.parent.mkdir()
    for path in (secret, inside, hidden):
        path.write_text("content")
    reach = Reach(readable=(str(inside.parent),), hidden=(str(hidden),))
    abstract = f"rpcmp-test-{os.getpid()}"

    async def probed() -> tuple[dict[str, Any], Path]:
        async with Forks(["torch"]) as forks:
            environment = compute_environment(threads=1)
            child = await Child.spawn("probe", environment, forks=forks, reach=reach)
            assert child.scratch is not None
            assert child.scratch.is_dir()
            child.send(
                {
                    "secret": str(secret),
                    "hidden": str(hidden),
                    "open": str(inside),
                    "other": os.getpid(),
                    "socket": str(tmp_path / "socket"),
                    "abstract": abstract,
                }
            )
            said = await anext(child.messages())
            await child.kill()
            return said, child.scratch

    with socket.socket(socket.AF_UNIX) as by_path, socket.socket(socket.AF_UNIX) as by_name:
        by_path.bind(str(tmp_path / "socket"))
        by_name.bind(f"\0{abstract}")
        for listener in (by_path, by_name):
            listener.listen()
        said, scratch = asyncio.run(probed())
    by_program = said["denied"].pop("a file, by a program")
    assert by_program == "1"
    missing = said["denied"].pop("io_uring")
    assert missing == "OSError"  # ENOSYS
    assert said["denied"] == dict.fromkeys(said["denied"], "PermissionError")
    assert said["allowed"] == {
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
        "own limits": "True",
        "devices": "[1, b'\\x00\\x00\\x00']",
    }
    assert said["networks"][0] == os.readlink("/proc/self/ns/net") != said["networks"][1]
    restricted = {"Seccomp": "2", "NoNewPrivs": "1"}
    none = dict.fromkeys(("CapPrm", "CapEff", "CapInh", "CapBnd", "CapAmb"), NONE)
    assert said["status"] == {**none, **restricted}
    assert said["inside"] == {"CapEff": NONE, **restricted}
    assert secret.read_text() == inside.read_text() == "content"
    assert not scratch.exists()


ORDINARY = """
import ctypes, encodings.idna, json, os, signal, socket, sys
from rpcmp.process import network
from rpcmp.process.confinement import Reach, enter

own, scratch = sys.argv[1:]
os.setgroups([]), os.setgid(65534), os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1)  # its files in /proc are its own again, as after an exec
network.current = network.open_private()
with open(own, "w") as file:
    file.write("own")
ours, theirs = os.pipe()
if not (pid := os.fork()):
    enter(Reach(), scratch)
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
    """In a user namespace of its own, where it has had all capabilities."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        scratch = Path(folder) / "scratch"
        scratch.mkdir()
        scratch.chmod(0o777)
        os.chmod(folder, 0o777)
        command = [sys.executable, "-c", ORDINARY, f"{folder}/own", str(scratch)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == {
        **dict.fromkeys(
            ("own file", "environment", "signal", "services", "mode"), "PermissionError"
        ),
        "scratch": 1,
        "network": True,
        "capabilities": [NONE],
        "user": 65534,
    }


def test_what_is_denied_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    error = PermissionError(errno.EACCES, "Permission denied", "/data")
    assert errors.one_line(error) == "PermissionError: [Errno 13] Permission denied: '/data'"
    monkeypatch.setattr(errors, "denied_hint", confinement.HINT)
    assert "`serve --no-confine`" in errors.one_line(error)
    assert "confine" not in errors.one_line(ValueError("no"))


def test_a_kernel_that_lacks_something_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert confinement.lacks() == ""
    monkeypatch.setattr(landlock, "abi", lambda: 2)
    assert confinement.told() == "Landlock ABI 2, seccomp"
    assert "signal other processes" in confinement.lacks()
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    monkeypatch.setattr(syscallfilter, "is_available", lambda: False)
    assert confinement.told() == "no Landlock, no seccomp"
    assert "open all files of its user" in confinement.lacks()
    assert "Unix sockets" in confinement.lacks()


# Jobs


SPY = """
import os
import torch, zoo
from torch import nn
from torch.utils.data import TensorDataset

def spy(who, paths):
    for path in paths:
        try:
            open(path).close()
            answer = "open"
        except OSError as error:
            answer = type(error).__name__
        print(f"SPY {who} {path} {answer}", flush=True)

class Spy(nn.Module):
    def __init__(self, paths):
        super().__init__()
        spy("stage", paths)

    def forward(self, x):
        return x

def layers(paths):
    return [*zoo.mlp(), ("spy", lambda: Spy(paths))]

def error(outputs, targets, paths):
    return (outputs - targets).abs().mean()

def data(paths=(), file=None):
    spy("data", paths)
    if file is not None:
        open(file).read()
    return zoo.regression()
"""


def spying(job: JobFolder, paths: Sequence[Path], more: str = "", data: str = "") -> Path:
    """A job whose code tries to open files at a stage and where it loads data."""
    (job.folder / "spying.py").write_text(SPY)
    names = json.dumps([str(path) for path in paths])
    return job.config(
        f"""
        steps = 8
        {more}
        [model]
        layers = "spying:layers"
        kwargs = {{ paths = {names} }}
        balance = [2, 3]
        [data]
        train = {{ callable = "spying:data", kwargs = {{ paths = {names} }} }}
        batch_size = 10
        {data}
        """
    )


def seen(result: Result, who: str) -> dict[str, str]:
    """What code has found at each path."""
    lines = [event["text"] for event in result.events if event["event"] == "log"]
    words = [line.split() for line in lines if line.startswith(f"SPY {who} ")]
    return {path: answer for _, _, path, answer in words}


def sha256(result: Result) -> str:
    assert result.code == 0, result.err
    found: str = result.event("summary")["parameters_sha256"]
    return found


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files of what the test starts; with a short name, for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def leftover(temporary: Path) -> list[Path]:
    """Temporary folders of confined processes."""
    return list(temporary.glob(f"{SCRATCH}*"))


def test_code_of_a_job_between_hosts_opens_no_key_and_no_home_and_trains_the_same(
    job: JobFolder, tmp_path: Path, temporary: Path
) -> None:
    certs = issue(job.folder / "certs", HERE, HERE)  # beside the config, as the README has it
    home = tmp_path / "home"
    home.write_text("private")
    keys = [certs / "ca.key", *(certs / f"{who}/tls.key" for who in ("stage0", "stage1", "driver"))]
    config = spying(job, [*keys, home], data="num_workers = 2")
    trace = tmp_path / "trace.json.gz"
    with serving(0, f"{HERE}:0", certs) as first, serving(1, f"{HERE}:0", certs) as second:
        at = ("--connect", connect([first, second]), "--certs", certs / "driver")
        confined = rpcmp("drive", config, "--json", *at, "--trace", trace)
    denied = {str(path): "PermissionError" for path in (*keys, home)}
    assert seen(confined, "stage") == seen(confined, "data") == denied
    assert trace.stat().st_size
    assert not leftover(temporary)
    free = rpcmp("drive", config, "--json")
    assert set(seen(free, "stage").values()) == {"open"}
    assert sha256(confined) == sha256(free)


def test_a_server_that_is_to_confine_nothing_does_not(job: JobFolder, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("private")
    config = spying(job, [home])
    with running_servers(2, "--no-confine") as servers:
        at = ("--connect", connect(servers), "--set", "security.confine=false")
        result = rpcmp("drive", config, "--json", *at)
    assert seen(result, "stage") == seen(result, "data") == {str(home): "open"}


def test_a_job_on_one_machine_is_confined_where_it_asks_for_it(
    job: JobFolder, tmp_path: Path, temporary: Path
) -> None:
    home, given = tmp_path / "home", tmp_path / "given"
    for path in (home, given):
        path.write_text("private")
    config = spying(job, [home, given], data='num_workers = 2\npaths = ["../given"]')
    confined = rpcmp("drive", config, "--json", "--set", "security.confine=true")
    expected = {str(home): "PermissionError", str(given): "open"}
    assert seen(confined, "stage") == seen(confined, "data") == expected
    assert not leftover(temporary)
    assert sha256(confined) == sha256(rpcmp("drive", config, "--json"))


def test_data_that_a_server_does_not_grant_is_refused_before_anything_starts(
    job: JobFolder, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    (data / "set").mkdir(parents=True)
    file = data / "set/file"
    file.write_text("samples")
    config = spying(job, [file], data=f'at = "stage"\npaths = ["{data}/set"]')
    with running_servers(2) as servers:
        result = rpcmp("drive", config, "--json", "--connect", connect(servers))
    assert result.code == 2
    assert f"does not let jobs read {data}/set" in result.err
    assert f"--data {data}/set" in result.err
    assert "'stage" in result.err
    assert not [event for event in result.events if event["event"] == "generation"]
    with running_servers(2, "--data", str(data)) as servers:
        result = rpcmp("drive", config, "--json", "--connect", connect(servers))
    assert seen(result, "stage") == seen(result, "data") == {str(file): "open"}
    assert result.code == 0


def test_code_that_needs_what_was_not_declared_fails_with_the_remedy(
    job: JobFolder, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("samples")
    config = spying(job, [])
    train = f'data.train={{ callable = "spying:data", kwargs = {{ file = "{file}" }} }}'
    with running_servers(2) as servers:
        at = ("--connect", connect(servers), "--set", train)
        for place in ("driver", "stage"):
            result = rpcmp("drive", config, "--json", *at, "--set", f'data.at="{place}"')
            assert result.code != 0
            assert "PermissionError" in result.err
            assert "`[data] paths`" in result.err
            assert "`--data DIR`" in result.err


def test_a_confined_worker_that_is_killed_is_replaced_by_one_with_its_bits(
    job: JobFolder, temporary: Path
) -> None:
    config = spying(job, []).read_text().replace("steps = 8", "steps = 60")
    path = job.folder / "long.toml"
    path.write_text(config)
    with running_servers(2) as servers:
        with running("drive", path, "--json", "--connect", connect(servers)) as run:
            started = json.loads(run.wait_for_line('"event": "generation"').string)
            run.wait_for_line('"step": 2,')
            os.kill(started["workers"]["stage0"]["pid"], signal.SIGKILL)
            result = run.wait()
        poll_for(lambda: not leftover(temporary), "temporary folders to go")
    assert [event["stage"] for event in result.events if event["event"] == "fault"] == ["stage0"]
    assert sha256(result) == sha256(rpcmp("drive", path, "--json"))


def test_a_confined_worker_goes_on_from_a_checkpoint(job: JobFolder) -> None:
    config = spying(job, [], data='[checkpoint]\ndir = "saved"\nevery_steps = 2')
    with running_servers(2) as servers:
        at = ("--connect", connect(servers))
        assert rpcmp("drive", config, "--json", *at, "--set", "steps=4").code == 0
        resumed = rpcmp("drive", config, "--json", *at, "--resume")
    assert resumed.event("resumed")["step"] == 4
    whole = rpcmp("drive", config, "--json", "--set", 'checkpoint.dir="other"')
    assert sha256(resumed) == sha256(whole)


def test_a_host_without_the_checkpoints_gets_them_and_its_confined_worker_reads_them(
    job: JobFolder, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    config = spying(job, [], data=f'[checkpoint]\ndir = "{disk}/saved"\nevery_steps = 2')
    with running_servers(2) as servers:
        at = ("--connect", connect(servers))
        assert rpcmp("drive", config, "--json", *at, "--set", "steps=4").code == 0
    empty = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {disk} && exec "$@"', "sh")
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


def test_doctor_says_what_confines_a_jobs_code(job: JobFolder) -> None:
    config = spying(job, [])
    with running_servers(2) as servers:
        result = rpcmp("doctor", config, "--json", "--connect", connect(servers))
    found = [line for line in result.out.splitlines() if "confinement" in line]
    assert "Landlock ABI" in "".join(found)
    assert "seccomp" in "".join(found)


WRITING = """
import os, subprocess, zoo
from torch import nn

class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        kinds = [os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in (0, 1, 2)]
        print("KINDS", *kinds, flush=True)
        os.write(1, b"by descriptor \\x1b]0;title\\x07\\n")
        subprocess.run(["echo", "by a program"])
        os.write(2, b"the last")
        for number in range(10_000):
            os.write(2, b"again %d\\n" % number)

    def forward(self, x):
        return x

def layers():
    return [*zoo.mlp(), ("writing", Writing)]
"""


def test_a_confined_child_writes_to_no_terminal(job: JobFolder) -> None:
    (job.folder / "writing.py").write_text(WRITING)
    config = job.config(
        """
        steps = 2
        [model]
        layers = "writing:layers"
        balance = [2, 3]
        """
    )
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "rpcmp", "drive", str(config)]
    command += ["--set", "security.confine=true"]
    shown = b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        try:
            while part := _read(ours):
                shown += part
        finally:
            process.kill()
            os.close(ours)
    text = shown.decode()
    assert process.returncode == 0, text
    assert "KINDS /dev/null pipe pipe" in text
    for said in ("by descriptor", "by a program", "the last"):
        assert said in text
    assert "\x1b]0;title" not in text
    assert text.count("again") < 100  # counted, and not shown


def _read(terminal: int) -> bytes:
    """What a terminal shows next; nothing once nobody has it any more."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""
