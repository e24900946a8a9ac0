"""Faults that a worker injects into itself; shipped to the stage servers beside a config.

    layers = "faults:layers"
    kwargs = { at = { stage = 1, step = 3, phase = "backward", how = "SIGKILL", marker = "..." } }

Each leaves a marker with its process and phase. A worker of a later generation that finds the
marker continues unharmed, unless the fault is to recur. Several faults may be planted.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zoo  # type: ignore[import-not-found]
from torch import Tensor, nn

from rpcmp.checkpoint import stage_state
from rpcmp.rpc import transport


class Planted:
    """The faults of one worker, which is notified of every phase.

    Args:
        faults: all that are planted in the job.
        stage: this worker's.

    Attributes:
        trains: whether a step has started; before that, optimizers are only tried out.
    """

    def __init__(self, faults: list[dict[str, Any]], stage: int) -> None:
        self._faults = [fault for fault in faults if fault["stage"] == stage]
        self._stage = stage
        self.trains = False

    def begin(self, phase: str, step: int) -> None:
        """Trigger a fault if one is planted here and has not been triggered yet."""
        for fault in self._faults:
            if (phase, step) != (fault["phase"], fault["step"]):
                continue
            is_first = _mark(Path(fault["marker"]), self._stage, phase, step, fault["how"])
            if is_first or fault["again"]:
                _strike(fault["how"])


def _mark(marker: Path, stage: int, phase: str, step: int, how: str) -> bool:
    """Write the marker; returns whether this is the first time."""
    message = {"pid": os.getpid(), "stage": stage, "phase": phase, "step": step, "how": how}
    message["time"] = time.time()
    temporary = marker.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(message))
    try:
        os.link(temporary, marker)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def _strike(how: str) -> None:
    match how:
        case "SIGKILL" | "SIGSTOP":
            os.kill(os.getpid(), getattr(signal, how))
            threading.Event().wait()  # the kernel stops the threads one after the other
        case "brittle":  # stopped, and a request for its stacks ends it
            ctypes.CDLL(None).signal(signal.SIGUSR1, 0)
            _strike("SIGSTOP")
        case "host":  # its supervisor; this process and all their memory are lost with it
            os.kill(_supervisor(), signal.SIGKILL)
            threading.Event().wait()
        case "SIGSEGV":
            ctypes.string_at(0)
        case "exception":
            raise RuntimeError("planted: größer als erlaubt")
        case "deadlock":
            ctypes.PyDLL(None).pause()  # never returns, and holds the GIL
        case "lock":  # stuck without the GIL
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "device":  # of this process: every later call on it fails
            torch.get_device_module(torch.accelerator.current_accelerator()).lose()
        case "full":  # takes more memory than a pretended device has
            torch.empty(2**29, device=torch.accelerator.current_accelerator())
        case "cut":
            cut_links()
        case _:
            raise ValueError(f"no such fault: {how}")


def _supervisor() -> int:
    """Return the process at the other end of this one's channel."""
    with socket.socket(fileno=os.dup(int(sys.argv[1]))) as channel:
        credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, _, _ = struct.unpack("3i", credentials)
    return int(pid)


def cut_links() -> None:
    """Drop all packets from and to this process's agent, in its network namespace.

    A rule by port: fresh processes have other ports, so they are not concerned.
    """
    threads = Path("/proc/self/task").iterdir()
    ours = Path("/proc/self/ns/net").readlink()
    there = next(thread / "ns/net" for thread in threads if (thread / "ns/net").readlink() != ours)
    inside = ["nsenter", f"--net={there}"]
    if "0:" in subprocess.run([*inside, "ip", "rule"], capture_output=True, text=True).stdout:
        for change in (["add", "pref", "10", "lookup", "local"], ["del", "pref", "0"]):
            subprocess.run([*inside, "ip", "rule", *change], check=True)
    listed = subprocess.run(
        [*inside, "ss", "-tanpH"], capture_output=True, text=True, check=True
    ).stdout
    own = [line.split()[3] for line in listed.splitlines() if f"pid={os.getpid()}," in line]
    for port in sorted({address.rpartition(":")[2] for address in own}):
        for side in ("sport", "dport"):
            rule = ["add", "pref", "5", "ipproto", "tcp", side, port, "blackhole"]
            subprocess.run([*inside, "ip", "rule", *rule], check=True)


def layers(
    at: list[dict[str, Any]], num_microbatches: int = 4, stages: int = 3, milliseconds: float = 0.0
) -> list[tuple[str, Callable[[], nn.Module]]]:
    """Return `zoo.mlp` with one block per stage, the last with the head, and faults in it."""

    def make(stage: int) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            inner = zoo.Block(zoo.FEATURES)
            layer = (
                nn.Sequential(inner, nn.Linear(zoo.FEATURES, 1)) if stage + 1 == stages else inner
            )
            planted = Planted(at, stage)
            if at and not torch.empty(0).is_meta:  # there only names are wanted
                planted.begin("build", 0)
                _watch_process(planted)
            return Watched(layer, planted, num_microbatches, milliseconds)

        return build

    return [(f"block{stage}", make(stage)) for stage in range(stages)]


class Watched(nn.Module):
    """A layer that counts its steps."""

    def __init__(
        self, layer: nn.Module, planted: Planted, num_microbatches: int, milliseconds: float
    ) -> None:
        super().__init__()
        self.layer = layer
        self._planted = planted
        self._num_microbatches = num_microbatches
        self._milliseconds = milliseconds
        self.forwards = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self._milliseconds:
            time.sleep(self._milliseconds / 1e3)
        if not self.training:
            return self.layer(x)  # type: ignore[no-any-return]
        self._planted.trains = True
        step = int(self.forwards) // self._num_microbatches + 1
        self.forwards.add_(1)
        self._planted.begin("forward", step)

        def watched(gradient: Tensor) -> Tensor:
            self._planted.begin("backward", step)
            return gradient

        output: Tensor = zoo.in_backward(self.layer(x), watched)
        return output


class WatchedSGD(torch.optim.SGD):
    """SGD with momentum, so that there is state to lose; reports its steps."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        if _planted and _planted[0].trains:
            _planted[0].begin("optimizer", self.param_groups[0]["steps"])
        return super().step(closure)


_planted: list[Planted] = []
"""The faults of this process, which has one stage."""


def _watch_process(planted: Planted) -> None:
    """Report when this worker joins a group and when it saves."""
    if _planted:
        return
    _planted.append(planted)
    join, write = transport.join, stage_state.SnapshotWriter.write

    def watched_join(*args: Any) -> str:
        planted.begin("join", 0)
        return join(*args)

    def watched_write(self: Any, slot: int, step: int, *args: Any, **kwargs: Any) -> Any:
        planted.begin("saving", step)
        return write(self, slot, step, *args, **kwargs)

    transport.join = watched_join  # type: ignore[assignment]
    stage_state.SnapshotWriter.write = watched_write  # type: ignore[method-assign]
