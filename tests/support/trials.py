"""Runs that are struck from outside, which have to end with the bits of a run without faults."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pytest

from tests.support import strikes
from tests.support.chaosjobs import write
from tests.support.chaosplaces import RESTART_SECONDS, Place, place_of
from tests.support.faults import Committed, committed
from tests.support.processes import Result, Running, poll_for, running, runs, with_token
from tests.support.strikes import Strike

DEADLINE = 150.0
"""Seconds that a run with faults may take; without any it takes five to ten."""

MAX_STARTS = 6
"""How often `drive` is started again."""

LEFT_SECONDS = 20.0
"""After which everything of a run must be gone."""

MORE_DESCRIPTORS = 40
"""Descriptors that an idle server may have more than after its first run."""


class TrialError(AssertionError):
    """A trial that has shown a mistake."""


@dataclass(frozen=True)
class Trial:
    """A run and its faults.

    Attributes:
        saves: whether it writes checkpoints.
    """

    job: str
    place: str
    saves: bool
    strikes: tuple[Strike, ...]

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Trial:
        data = json.loads(text)
        return cls(**{**data, "strikes": tuple(Strike(**each) for each in data["strikes"])})


@dataclass(frozen=True)
class Outcome:
    """What a trial has come to.

    Attributes:
        codes: the exit code of each start of `drive`.
        struck: the strikes that have found what they were for.
    """

    codes: list[int]
    struck: list[Strike]
    seconds: float


def expected_of(job: str, folder: Path) -> Committed:
    """Return the steps and parameters of a run without faults."""
    config = write(job, folder / f"{job}-undisturbed", saves=False)
    with running("drive", config, "--json", "--set", "log.folder=", shares=False) as run:
        return committed(run.wait(DEADLINE))


def run_trial(trial: Trial, place: Place, expected: Committed, folder: Path) -> Outcome:
    """Run a trial in a new folder, and check its end; raises TrialError."""
    began, before = time.monotonic(), leftovers(any_process=True)
    attempts = Attempts(trial, place, write(trial.job, folder, trial.saves))
    try:
        results = attempts.run()
        check_bits(results, expected)
        if place.servers and len(trial.strikes) == 1:
            check_taken_over(results)
        check_left(place, before)
    except TrialError as error:
        error.add_note("\n".join(map(_course_of, attempts.results())))
        raise
    codes = [result.code for result in results]
    return Outcome(codes, attempts.struck, time.monotonic() - began)


def run_trial_here(trial: Trial, expected: Committed, folder: Path, *options: str) -> Outcome:
    """Run a trial on this machine, with temporary files of its own; raises TrialError.

    Args:
        options: more of `drive`, with which `expected` was run.
    """
    with (
        place_of("here", [], folder) as place,
        tempfile.TemporaryDirectory() as short,  # sockets lie in it
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", short)
        place.options += options
        return run_trial(trial, place, expected, folder / "job")


class Attempts:
    """A run, however often `drive` has to be started for it."""

    def __init__(self, trial: Trial, place: Place, config: Path) -> None:
        self._trial, self._place, self._config = trial, place, config
        self._runs: list[Running] = []
        self.struck: list[Strike] = []
        self._ends = time.monotonic() + DEADLINE
        self._done = threading.Event()
        self.errors: list[BaseException] = []

    def run(self) -> list[Result]:
        """Return the result of every start of `drive`."""
        threads = [
            threading.Thread(target=self._strike, args=[strike], daemon=True)
            for strike in self._trial.strikes
        ]
        results: list[Result] = []
        try:
            while True:
                results.append(self._start(threads, resumes=bool(results)))
                if self._is_over(results):
                    return results
                time.sleep(RESTART_SECONDS)
        finally:
            self._done.set()
            for thread in threads:
                thread.join(30)
            if self.errors:
                raise self.errors[0]

    def _start(self, threads: Sequence[threading.Thread], resumes: bool) -> Result:
        options = [*self._place.options, "--set", "log.folder="]
        options += ["--resume"] if resumes else []
        with running(
            "drive", self._config, "--json", *options, under=self._place.under(), shares=False
        ) as run:
            self._runs.append(run)
            for thread in threads if not resumes else ():
                thread.start()
            while not run.has_ended():
                if time.monotonic() > self._ends:
                    raise TrialError(f"the run does not end\n{_tail(run)}\n{_states(self._place)}")
                time.sleep(0.02)
            return run.wait(1)

    def _is_over(self, results: list[Result]) -> bool:
        """Return whether the run has come to its end; raise if its end is not one of ours."""
        last = results[-1]
        if last.code == 0:
            return True
        struck = {strike.how for strike in self.struck if strike.what == "drive"}
        codes = {-signal.Signals[how] for how in struck if how in signal.Signals.__members__}
        if "SIGTERM" in struck:
            codes.add(128 + signal.SIGTERM)
        files = any(strike.how == "files" for strike in self.struck)
        if files and "oo many open files" in last.err:  # as promised; a user then goes on
            return False
        began = '"event": "generation"' in last.out
        if last.code not in codes and not (last.code == 75 and not began and self.struck):
            raise TrialError(f"exit code {last.code}\n{last.err}\n{_states(self._place)}")
        if len(results) > MAX_STARTS:
            raise TrialError(f"started {len(results)} times\n{last.err}")
        return False

    def lines(self) -> list[str]:
        return [line for run in list(self._runs) for line in run.lines()]

    def results(self) -> list[Result]:
        return [run.result() for run in self._runs]

    def _strike(self, strike: Strike) -> None:
        try:
            if not self._wait(strike.pattern) or self._done.wait(strike.delay):
                return
            if strike.what == "link":
                host = self._place.hosts[strike.which % len(self._place.hosts)]
                self.struck.append(strike)
                with strikes.troubled(strike.how, host):
                    self._done.wait(strike.lasts)
                return
            self.struck.append(strike)  # first: what it does may be seen before it returns
            if not strikes.strike_processes(strike, lambda: with_token(self._place.token)):
                self.struck.remove(strike)
        except BaseException as error:
            self.errors.append(error)

    def _wait(self, pattern: str) -> bool:
        """Wait for a line of output; return whether there is one."""
        while pattern and not any(pattern in line for line in self.lines()):
            if self._done.wait(0.005):
                return False
        return True


def _course_of(result: Result) -> str:
    """Return what a start of `drive` has said, in order, without most of its steps."""
    events = [event for event in result.events if event["event"] not in ("vitals", "run")]
    last_steps = [event for event in events if event["event"] == "step"][-2:]
    kept = [each for each in events if each["event"] != "step" or each in last_steps]
    return "\n".join([f"exit {result.code}", *map(json.dumps, kept), result.err])


def _tail(run: Running) -> str:
    return "".join([*run.out[-3:], *run.err[-20:]])


def _states(place: Place) -> str:
    """Return the living processes and their states, and what the servers have said."""
    lines = []
    for process in with_token(place.token):
        with contextlib.suppress(psutil.Error):
            lines.append(f"  {process.pid} {process.status()} {' '.join(process.cmdline())[:90]}")
    for server in place.servers:
        lines += [f"  {server.address}: {line.rstrip()}" for line in server.output[-6:]]
    return "\n".join(lines)


def check_bits(results: Sequence[Result], expected: tuple[list[tuple[int, str]], str]) -> None:
    """Check every step of every start, and the final parameters."""
    steps, parameters = dict(expected[0]), expected[1]
    for result in results:
        for event in result.events:
            if event["event"] == "step" and steps[event["step"]] != event["loss"].hex():
                raise TrialError(f"step {event['step']} has another loss")
    ends = [event for result in results for event in result.events if event["event"] == "summary"]
    whole = [event["parameters_sha256"] for event in ends if not event["is_cut_short"]]
    if set(whole) != {parameters}:
        raise TrialError(f"other parameters: {ends}")


def check_taken_over(results: Sequence[Result]) -> None:
    """Check that a driver that was started again has lost one step at most."""
    for before, after in itertools.pairwise(results):
        steps = [event["step"] for event in before.events if event["event"] == "step"]
        resumed = [event["step"] for event in after.events if event["event"] == "resumed"]
        if steps and resumed and resumed[0] < steps[-1] - 1:
            raise TrialError(
                f"step {steps[-1]} was done, and the next driver began at {resumed[0]}"
            )


def leftovers(any_process: bool = False) -> set[str]:
    """Return temporary files, and memory that is named after processes that have ended.

    Args:
        any_process: also after others: a number of one that has ended may be another's for a while.
    """
    temporary = {str(path) for path in Path(os.environ["TMPDIR"]).iterdir()}
    named = [re.match(r"(?:sem\.rpcmp-\d+-|torch_)(\d+)", e) for e in os.listdir("/dev/shm")]
    return temporary | {
        each.string
        for each in named
        if each and (any_process or not Path(f"/proc/{each[1]}").exists())
    }


def check_left(place: Place, before: set[str]) -> None:
    """Check that no process and no file is left, and no server grows."""
    alive = {server.pid for server in place.servers}

    def left() -> list[str]:
        found = []
        for each in with_token(place.token):
            with contextlib.suppress(psutil.Error):  # it ends just now
                if each.pid not in alive and not _belongs_to(alive, each):
                    found.append(f"{each.pid} {' '.join(each.cmdline())[:80]}")
        return found if place.servers else [*found, *sorted(leftovers() - before)]

    try:
        poll_for(lambda: not left(), "everything to go", LEFT_SECONDS)
    except AssertionError as error:
        raise TrialError(f"left behind: {left()}") from error
    for server in place.servers:
        with contextlib.suppress(psutil.Error):
            now = psutil.Process(server.pid).num_fds()
            first = server.idle.setdefault(server.pid, now)
            if now > first + MORE_DESCRIPTORS:
                raise TrialError(f"a server has {now} descriptors, {first} before")


def _belongs_to(servers: set[int], process: psutil.Process) -> bool:
    """Return whether it is the fork server of an idle stage server."""
    if runs(process, "rpcmp.worker"):
        return False
    return any(parent.pid in servers for parent in process.parents())
