"""Faults that strike a run from outside, at a moment that its output names."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil

from tests.support.lan import PREFIX, Host
from tests.support.needs import needs
from tests.support.processes import no_more_files, runs

PROCESSES = {
    "worker": "rpcmp.worker",
    "driver": "rpcmp.driver",
    "forks": "rpcmp.process",
    "template": "rpcmp.process.template",
    "server": "serve",
    "loader": "rpcmp.data.batches",
    "drive": "drive",
}
"""Kinds of processes, each with a word in its command line."""

BEGUN_SECONDS = 0.05
"""Of the processor; from when on an interpreter can say by itself what is wrong."""

LOADER_OF_TORCH = "spawn_main"

HOWS = ("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGABRT", "SIGTERM", "pause", "files")
"""Signals, as in tests.support.faults, and what lasts for a while: "pause" is stopped and then
continued, "files" can open no more of them."""

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
        how: one of HOWS, or of LINKS.
        which: of several such processes or hosts.
        moment: the event after which it strikes, of "step" the one `at` that step.
        delay: seconds from there.
        lasts: seconds of a pause, or of a link's trouble.
    """

    what: str
    how: str
    which: int = 0
    moment: str = "step"
    at: int = 0
    delay: float = 0.0
    lasts: float = 0.0

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
    if strike.how == "pause":
        _signal(victims, signal.SIGSTOP)
        time.sleep(strike.lasts)
        _signal(victims, signal.SIGCONT)
    elif strike.how == "files":
        (victim,) = victims
        with contextlib.suppress(OSError), no_more_files(victim):  # it may have ended
            time.sleep(strike.lasts)
    else:
        _signal(victims, signal.Signals[strike.how])
    return True


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
            if runs(process, PROCESSES[strike.what]) or is_loader:
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
    command = [*host.inside, needs("ss"), "-K", "dst", f"{PREFIX}.0/24"]
    subprocess.run(command, capture_output=True, check=False)
