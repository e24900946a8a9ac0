"""Time of a recovery, and cost of recovery in a run without faults.

python -m tests.benchmarks.recovery times [ROUNDS]   seconds from a fault to the next new step
python -m tests.benchmarks.recovery costs [ROUNDS]   step time without and with recovery enabled
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import psutil

from rpcmp.tools.measurement import paired_ratio
from tests.support.places import EXAMPLES
from tests.support.processes import runs

FAULTS = {
    "worker, SIGKILL": ("rpcmp.worker", signal.SIGKILL),
    "worker, SIGSTOP": ("rpcmp.worker", signal.SIGSTOP),
    "driver process, SIGKILL": ("rpcmp.driver", signal.SIGKILL),
    "driver process, SIGSTOP": ("rpcmp.driver", signal.SIGSTOP),
    "stage server, SIGKILL": ("serve", signal.SIGKILL),
    "stage server, SIGSTOP": ("serve", signal.SIGSTOP),
    "fork server, SIGKILL": ("rpcmp.process", signal.SIGKILL),
    "fork server, SIGSTOP": ("rpcmp.process", signal.SIGSTOP),
}

COSTS = {
    "nothing": ["recovery.enabled=false"],
    "mirrored every step": [],
    "checkpoint every step": ["checkpoint.every_steps=1"],
}

WARM_UP = 8
"""First steps of a run, which do not count."""


def times(rounds: int) -> None:
    """Kill a process in the middle of `digits`, and wait for the next new step."""
    print(f"{'what is lost':26}  median   worst   of {rounds}")
    for name, (which, signum) in FAULTS.items():
        found = [_recovery_seconds(which, signum, at=10 + 3 * i) for i in range(rounds)]
        print(f"{name:26} {statistics.median(found):6.2f}s {max(found):6.2f}s", flush=True)


def _recovery_seconds(which: str, signum: signal.Signals, at: int) -> float:
    triggered = 0.0
    with _drive("digits", [], steps=at + 200) as process:
        for event in _events(process):
            if event["event"] == "step" and event["step"] == at:
                victims = psutil.Process(process.pid).children(recursive=True)
                os.kill(next(v.pid for v in victims if runs(v, which)), signum)
                triggered = time.monotonic()
                recovered = False
            elif event["event"] == "recovered":
                recovered = True
            elif event["event"] == "step" and triggered and recovered:
                seconds = time.monotonic() - triggered
                process.send_signal(signal.SIGINT)
                process.wait()
                return seconds
    raise RuntimeError(f"nothing recovered from {signum.name} on {which}")


def costs(rounds: int, steps: int = 48) -> None:
    """Train `stdlib_gpt` with and without recovery, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in COSTS}
    for _ in range(rounds):
        for name, settings in COSTS.items():
            seconds[name].append(_step_seconds(settings, steps))
    names = list(COSTS)
    for name, found in seconds.items():
        print(f"{name:24} {statistics.median(found) * 1e3:7.1f} ms")
    for before, name in itertools.pairwise(names):
        against = paired_ratio(seconds[name], seconds[before])
        print(
            f"{name} / {before}: {against.median:.3f} "
            f"({against.low:.3f} to {against.high:.3f}, {against.confidence:.0%})"
        )


def _step_seconds(settings: list[str], steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        where = [f"checkpoint.dir='{folder}/saved'"] if "checkpoint" in "".join(settings) else []
        with _drive("stdlib_gpt", [*where, *settings, "evaluate_every=0"], steps) as process:
            found: list[float] = [e["step_s"] for e in _events(process) if e["event"] == "step"]
    return statistics.median(found[WARM_UP:])


def _drive(example: str, settings: list[str], steps: int) -> subprocess.Popen[str]:
    every = [*settings, "log.folder="]
    options = itertools.chain.from_iterable(("--set", setting) for setting in every)
    command = ["drive", str(EXAMPLES / f"{example}.toml"), "--json", "--steps", str(steps)]
    return subprocess.Popen(
        [sys.executable, "-m", "rpcmp", *command, *options], stdout=subprocess.PIPE, text=True
    )


def _events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    if process.stdout is None:
        raise AssertionError("the process was given a pipe")
    return map(json.loads, process.stdout)


if __name__ == "__main__":
    {"times": times, "costs": costs}[sys.argv[1]](int((sys.argv[2:] or ["5"])[0]))
