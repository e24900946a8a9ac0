"""Hosts made of namespaces: with mounts of their own, or on their own network, whose cables can be
cut, slowed and delayed; and stage servers on them."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rpcmp.cli.certs import certs
from tests.support import delaying
from tests.support.needs import needs, needs_root
from tests.support.processes import (
    DEADLINE,
    Result,
    Running,
    Server,
    connect,
    running,
    running_server,
)

PREFIX = "10.77.0"

PORT = 50051
"""Of stage 0's server; stage 1's is the next one, as two stages may be on one host."""

BOOT_ID = "/proc/sys/kernel/random/boot_id"
"""The file by which a machine is identified."""


def mounted(*mounts: str) -> tuple[str, ...]:
    """Return a command that runs another one as on a machine with these mounts of its own.

    Args:
        mounts: arguments of mount(8).
    """
    needs_root("mount")
    script = " && ".join(f"{needs('mount')} {mount}" for mount in mounts)
    return (needs("unshare"), "--mount", "sh", "-c", f'{script} && exec "$@"', "sh")


def without_networks() -> tuple[str, ...]:
    """Return a command that runs another one where no network namespace can be made."""
    script = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    return (needs("unshare"), "--user", "--map-root-user", "sh", "-c", script, "sh")


@dataclass(frozen=True)
class Host:
    """A host of the network.

    Attributes:
        address: its IP address.
        switch: the namespace at the other end of its cable.
        cable: the device at that end.
        name: its name on the other hosts.
        inside: a command that runs another command on the host, as on a machine of its own.
        names: the file by which all hosts find each other's addresses.
    """

    address: str
    switch: str
    cable: str
    name: str
    inside: tuple[str, ...]
    names: Path

    def unplug(self) -> None:
        """Cut the cable."""
        _ip("-n", self.switch, "link", "set", self.cable, "down")

    def plug(self) -> None:
        """Reconnect the cable."""
        _ip("-n", self.switch, "link", "set", self.cable, "up")

    @contextlib.contextmanager
    def limited(self, rate: str) -> Iterator[None]:
        """Limit the bandwidth to `rate` ("1gbit") in each direction."""
        bucket = ["root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms"]
        ends = [
            ([*self.inside, needs("tc"), "qdisc"], "eth0"),
            ([needs("tc"), "-n", self.switch, "qdisc"], self.cable),
        ]
        for command, device in ends:
            subprocess.run([*command, "replace", "dev", device, *bucket], check=True)
        try:
            yield
        finally:
            for command, device in ends:
                subprocess.run([*command, "del", "dev", device, "root"], check=True)

    @contextlib.contextmanager
    def delayed(self, seconds: float) -> Iterator[None]:
        """Let all that passes the cable take so much longer, in each direction."""
        near, far, bridge = (f"{name}-{self.cable}" for name in ("near", "far", "br"))
        program = [sys.executable, "-I", "-S", delaying.__file__, near, far, str(seconds)]
        inside = [needs("ip"), "netns", "exec", self.switch, *program]
        pipe = subprocess.PIPE
        with subprocess.Popen(inside, stdin=pipe, stdout=pipe, start_new_session=True) as joining:
            assert joining.stdin
            assert joining.stdout
            with joining.stdin:
                if not joining.stdout.readline():
                    raise AssertionError("no device with a delay can be made")
                _ip("-n", self.switch, "link", "add", bridge, "type", "bridge")
                _ip("-n", self.switch, "link", "set", bridge, "up")
                for device, master in ((near, "br0"), (far, bridge), (self.cable, bridge)):
                    _ip("-n", self.switch, "link", "set", device, "master", master, "up")
                try:
                    yield
                finally:
                    _ip("-n", self.switch, "link", "set", self.cable, "master", "br0")
                    _ip("-n", self.switch, "link", "del", bridge)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the host."""
        return subprocess.run(
            [*self.inside, *command], capture_output=True, text=True, timeout=60, check=False
        )


@contextlib.contextmanager
def lan(count: int, folder: Path) -> Iterator[list[Host]]:
    """Create hosts that are connected to one switch.

    Args:
        folder: folder for the files by which each host identifies itself.
    """
    needs_root("make a network")
    needs("mount")
    tag = uuid.uuid4().hex[:8]
    switch = f"rpcmp-{tag}-switch"
    names = [f"rpcmp-{tag}-{index}" for index in range(count)]
    with contextlib.ExitStack() as made:
        for name in (switch, *names):
            _ip("netns", "add", name)
            made.callback(_ip, "netns", "del", name)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        yield [_plug_in(switch, name, index, folder) for index, name in enumerate(names)]


def _plug_in(switch: str, name: str, index: int, folder: Path) -> Host:
    cable, address = f"port{index}", f"{PREFIX}.{index + 1}"
    ends = ["type", "veth", "peer", "name", cable, "netns", switch]
    _ip("-n", name, "link", "add", "eth0", *ends)
    _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", name, "link", "set", device, "up")
    _ip("-n", switch, "link", "set", cable, "master", "br0", "up")
    boot = folder / f"boot_id-{name}"
    boot.write_text(f"{name}\n")
    names = folder / "hosts"
    names.write_text("".join(f"{PREFIX}.{i + 1} host-{chr(97 + i)}\n" for i in range(26)))
    binds = f"mount --bind {boot} {BOOT_ID} && mount --bind {names} /etc/hosts"
    inside = (needs("ip"), "netns", "exec", name, "sh", "-c", f'{binds} && exec "$@"', "sh")
    return Host(address, switch, cable, f"host-{chr(97 + index)}", inside, names)


def _ip(*arguments: str) -> None:
    subprocess.run([needs("ip"), *arguments], check=True)


def issue(folder: Path, *hosts: str) -> Path:
    """Issue certificates for a stage on each host and for a driver; return their folder."""
    cli(folder, "init", *(part for host in hosts for part in ("--host", host)))
    return folder


def issue_to_driver(folder: Path, host: str) -> Path:
    """Issue certificates for a stage and for a driver that listens; return the driver's folder."""
    issue(folder, host)
    cli(folder, "issue", "--driver", "--name", "driver-here", "--host", host)
    return folder / "driver-here"


def cli(folder: Path, command: str, *options: str) -> None:
    """Run `rpcmp certs COMMAND` in this process."""
    certs.main([command, str(folder), *options], standalone_mode=False)


@contextlib.contextmanager
def serving(
    stage: int, host: str, certs: Path, under: tuple[str, ...] = (), options: Sequence[str] = ()
) -> Iterator[Server]:
    """Start a stage server that accepts only peers with certificates.

    Args:
        under: a program and its arguments that runs the server, with a fork server of its own; by
            default its workers come from a shared fork server.
    """
    command = ["--stage", str(stage), "--listen", host, *options]
    command += ["--certs", str(certs / f"stage{stage}")]
    if not under:
        with running_server(*command, owner=f"stage {stage}") as server:
            yield server
        return
    with running("serve", *command, under=under) as run:
        yield Server(run, run.wait_for_line(r"SERVING on (\S+)")[1])


@dataclass(frozen=True)
class Hosts:
    """A driver's host, and a stage server with certificates on each of some hosts.

    Attributes:
        certs: options by which a command presents the driver's certificate.
    """

    driver: Host
    hosts: Sequence[Host]
    servers: Sequence[Server]
    certs: tuple[str, ...]

    @property
    def connect(self) -> tuple[str, ...]:
        """Options by which a command reaches the servers as well."""
        return (*self.certs, "--connect", connect(self.servers))

    @contextlib.contextmanager
    def running(self, *command: str | Path) -> Iterator[Running]:
        """Start a command of rpcmp at the driver."""
        with running(*command, under=self.driver.inside) as run:
            yield run

    def run(self, *command: str | Path, timeout: float = DEADLINE) -> Result:
        """Run a command of rpcmp at the driver to its end."""
        with self.running(*command) as run:
            return run.wait(timeout)


@contextlib.contextmanager
def hosts_of(
    driver: Host, hosts: Sequence[Host], folder: Path, is_spare: bool = False
) -> Iterator[Hosts]:
    """Start a stage server on each host.

    Args:
        hosts: in the order of the stages; several may be on one.
        folder: folder for the certificates.
        is_spare: whether the servers take any stage.
    """
    certs = folder / "certs"
    with contextlib.ExitStack() as started:
        with contextlib.redirect_stdout(io.StringIO()):
            issue(certs, *(host.address for host in hosts))
            for host in hosts if is_spare else ():
                cli(certs, "issue", "--spare", "--name", host.name, "--host", host.address)
        servers = []
        for stage, host in enumerate(hosts):
            own = ("--spare",) if is_spare else ("--stage", str(stage))
            where = ("--listen", f"{host.address}:{PORT + stage}")
            name = certs / (host.name if is_spare else f"stage{stage}")
            command = ("serve", *own, *where, "--certs", name)
            run = started.enter_context(running(*command, under=host.inside))
            servers.append(Server(run, run.wait_for_line(r"SERVING on (\S+)")[1]))
        yield Hosts(driver, hosts, servers, ("--certs", str(certs / "driver")))


def listening(host: Host) -> set[tuple[str, int]]:
    """Return the addresses of all TCP listeners on a host."""
    rows = host.run("cat", "/proc/net/tcp", "/proc/net/tcp6").stdout.splitlines()
    found = (row.split()[1].split(":") for row in rows if re.search(r":\w{4} \w+:0000 0A", row))
    return {(_dotted(address), int(port, 16)) for address, port in found}


def _dotted(word: str) -> str:
    return ".".join(str(int(word[i : i + 2], 16)) for i in (6, 4, 2, 0))
