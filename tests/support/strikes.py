"""Faults that strike a run from outside, at a moment that its output names."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from tests.support.lan import Host
from tests.support.needs import needs
from tests.support.processes import runs

PROCESSES = ("worker", "driver", "forks", "template", "server", "loader", "drive")
WORDS = {
    "worker": "rpcmp.worker",
    "driver": "rpcmp.driver",
    "forks": "rpcmp.process",
    "template": "rpcmp.process.template",
    "server": "serve",
    "loader": "rpcmp.data.batches",
    "drive": "drive",
}
"""A word in the command line of each kind of process."""

BEGUN_SECONDS = 0.05
"""Of the processor; from when on an interpreter can say by itself what is wrong."""

LOADER_OF_TORCH = "spawn_main"

SIGNALS = ("KILL", "STOP", "SEGV", "ABRT", "TERM", "PAUSE", "FILES")
"""PAUSE: stopped, and continued after a while. FILES: it can open no more files for a while."""

LINKS = ("cut", "cut one way", "lossy", "slow", "resets", "names")
"""What may happen to the link of a host; "names": no host finds another one's address."""

MOMENTS = ("start", "generation", "step", "eval", "checkpoint", "fault", "recovered", "summary")

FOUND_SECONDS = 10.0
"""How long to wait for a process of the kind that is to be struck: it may be being replaced."""


@dataclass(frozen=True)
class Strike:
    """One fault.

    Attributes:
        what: a kind of process, "all" of them, or "link".
        how: a signal, or what happens to the link of a host.
        which: of several such processes or hosts.
        moment: the event after which it strikes, of "step" the one `at` that step.
        delay: seconds from there.
        lasts: seconds of a pause, or of a link's trouble.
    """

    what: str
    how: str
    which: int
    moment: str
    at: int
    delay: float
    lasts: float

    @property
    def pattern(self) -> str:
        """What the line of output looks like that it waits for; empty: the beginning."""
        if self.moment == "start":
            return ""
        step = f' "step": {self.at},' if self.moment == "step" else ""
        return f'"event": "{self.moment}",{step}'

    def __str__(self) -> str:
        when = f"step {self.at}" if self.moment == "step" else self.moment
        return f"{self.what} {self.which} {self.how} {self.delay:.2f} s after {when}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def strike_processes(strike: Strike, family: Callable[[], list[psutil.Process]]) -> bool:
    """Send the signal; return whether there was such a process.

    Args:
        family: returns the living processes of the run.
    """
    ends = time.monotonic() + FOUND_SECONDS
    while not (victims := _victims(strike, family())):
        if time.monotonic() > ends:
            return False
        time.sleep(0.02)
    if strike.how == "PAUSE":
        _signal(victims, signal.SIGSTOP)
        time.sleep(strike.lasts)
        _signal(victims, signal.SIGCONT)
    elif strike.how == "FILES":
        _let_open_no_more(victims, strike.lasts)
    else:
        _signal(victims, signal.Signals[f"SIG{strike.how}"])
    return True


def _let_open_no_more(victims: Sequence[psutil.Process], seconds: float) -> None:
    """Lower the limit of open files to what is open, for some seconds."""
    limits = {}
    for victim in victims:
        with contextlib.suppress(psutil.Error, OSError):
            limits[victim] = victim.rlimit(psutil.RLIMIT_NOFILE)
            victim.rlimit(psutil.RLIMIT_NOFILE, (victim.num_fds(), limits[victim][1]))
    time.sleep(seconds)
    for victim, limit in limits.items():
        with contextlib.suppress(psutil.Error, OSError):
            victim.rlimit(psutil.RLIMIT_NOFILE, limit)


def _victims(strike: Strike, family: Sequence[psutil.Process]) -> list[psutil.Process]:
    if strike.what == "all":
        return list(family)
    found = []
    for process in family:
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()  # once: none are left when it ends
            if not words or not _has_begun(process, words):
                continue
            line = " ".join(words)
            is_loader = strike.what == "loader" and LOADER_OF_TORCH in line
            if runs(process, WORDS[strike.what]) or is_loader:
                found.append(process)
    found.sort(key=lambda process: process.pid)
    return [found[strike.which % len(found)]] if found else []


def _has_begun(process: psutil.Process, words: Sequence[str]) -> bool:
    """Whether a process is ours by now, and no longer the shell or the linker that starts it."""
    is_forked = words[0].startswith("rpcmp")
    return is_forked or ("python" in process.exe() and process.cpu_times().user > BEGUN_SECONDS)


def _signal(victims: Sequence[psutil.Process], signum: signal.Signals) -> None:
    for victim in victims:
        with contextlib.suppress(psutil.Error):
            victim.send_signal(signum)


RULES = {
    "cut": ("drop", "drop"),
    "cut one way": ("drop", ""),
    "lossy": ("numgen random mod 100 < 5 drop", "numgen random mod 100 < 5 drop"),
}
"""What a host does with all it sends and receives; see nft(8)."""


_SLOWED, _NAMELESS = threading.Lock(), threading.Lock()
_TABLES = itertools.count()


@contextlib.contextmanager
def troubled(how: str, host: Host) -> Iterator[None]:
    """Disturb the link of a host."""
    if how == "slow":
        with _SLOWED, host.limited("1mbit"):  # a link has one limit at a time
            yield
        return
    if how == "names":
        with _NAMELESS:  # another strike would take the empty file for the one to bring back
            text = host.names.read_text()
            host.names.write_text("")
            _reset(host)
            try:
                yield
            finally:
                host.names.write_text(text)
        return
    if how == "resets":
        _reset(host)
        yield
        _reset(host)
        return
    chains = "".join(
        f'chain {hook} {{\ntype filter hook {hook} priority 0\n{way} "eth0" {rule}\n}}\n'
        for hook, way, rule in zip(
            ("output", "input"), ("oifname", "iifname"), RULES[how], strict=True
        )
        if rule
    )
    table = f"chaos{next(_TABLES)}"  # the same host may have two troubles
    _nft(host, "-f", "-", text=f"table inet {table} {{\n{chains}}}\n")
    try:
        yield
    finally:
        _nft(host, "delete", "table", "inet", table)


def _nft(host: Host, *arguments: str, text: str = "") -> None:
    command = [*host.inside, needs("nft"), *arguments]
    subprocess.run(command, input=text, text=True, check=True, capture_output=True)


def _reset(host: Host) -> None:
    """Reset all connections of a host."""
    command = [*host.inside, needs("ss"), "-K", "dst", "10.77.0.0/24"]
    subprocess.run(command, capture_output=True, check=False)
