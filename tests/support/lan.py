"""Hosts on their own network, made of namespaces, whose cables can be cut, slowed and delayed."""

from __future__ import annotations

import contextlib
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
from tests.support.processes import Running, Server, running, running_server

PREFIX = "10.77.0"


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
    boot = folder / f"boot_id-{name}"  # identifies the machine
    boot.write_text(f"{name}\n")
    names = folder / "hosts"
    names.write_text("".join(f"{PREFIX}.{i + 1} host-{chr(97 + i)}\n" for i in range(26)))
    binds = (
        f"mount --bind {boot} /proc/sys/kernel/random/boot_id && mount --bind {names} /etc/hosts"
    )
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


@contextlib.contextmanager
def driving(config: Path, certs: Path, *options: str, on: Host) -> Iterator[Running]:
    """Start `rpcmp drive` on a host."""
    where = ("--certs", str(certs / "driver"))
    with running("drive", config, "--json", *where, *options, under=on.inside) as run:
        yield run


def listening(host: Host) -> set[tuple[str, int]]:
    """Return the addresses of all TCP listeners on a host."""
    rows = host.run("cat", "/proc/net/tcp", "/proc/net/tcp6").stdout.splitlines()
    found = (row.split()[1].split(":") for row in rows if re.search(r":\w{4} \w+:0000 0A", row))
    return {(_dotted(address), int(port, 16)) for address, port in found}


def _dotted(word: str) -> str:
    return ".".join(str(int(word[i : i + 2], 16)) for i in (6, 4, 2, 0))
