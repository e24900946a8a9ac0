"""Random faults at random moments, until one of them is not survived.

python -m tests.benchmarks.chaos --seed N --minutes M
python -m tests.benchmarks.chaos --replay '{...}'    what a line of the output has done, once more

Each trial is a job (a chain, a graph, replicas, shared weights, mixed precision; with checkpoints
or without) at a place (this machine, stage servers, hosts with certificates), whose processes and
links are struck one to three times. It has to end by itself with the bits of a run without faults.
Stage servers and `rpcmp drive` are started again when they have ended, as systemd does. A trial
fails if bits differ, a run does not end, an exit code or message is none that was promised, or a
process, a file or a descriptor is left behind.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from tests.support import processes
from tests.support.chaosjobs import JOBS, WORKERS, workers_of
from tests.support.chaosplaces import PLACES, place_of
from tests.support.faults import Committed
from tests.support.reaper import TOKEN, reaping
from tests.support.strikes import HOWS, LINKS, MOMENTS, PROCESSES, Strike
from tests.support.trials import Trial, TrialError, expected_of, run_trial


def draw_trial(draw: random.Random, place: str, steps: dict[str, int]) -> Trial:
    """Draw a trial; a third of them have two or three faults."""
    job = draw.choice([job for job in JOBS if place != "hosts" or job not in WORKERS])
    saves = draw.random() < 0.5
    count = draw.choice([1, 1, 1, 1, 2, 2, 3])
    found = [_draw_strike(draw, place, steps[job], saves)]
    while len(found) < count:
        more = _draw_strike(draw, place, steps[job], saves)
        together = draw.random()
        if together < 0.4:  # at once
            more = replace(more, moment=found[0].moment, at=found[0].at)
        elif together < 0.7:  # while the run recovers
            moment = draw.choice(["fault", "recovered"])
            more = replace(more, moment=moment, delay=3 * draw.random() ** 2)
        found.append(more)
    return Trial(job, place, saves, tuple(found))


def _draw_strike(draw: random.Random, place: str, steps: int, saves: bool) -> Strike:
    link = place == "hosts" and draw.random() < 0.4
    what = "link" if link else draw.choice([*PROCESSES, "all"])
    how = draw.choice(LINKS if link else HOWS)
    waited_for = ("drive",) if place == "here" else ("drive", "server")
    if what == "all" or (what in waited_for and how == "SIGSTOP"):
        how = "pause"  # nobody would continue it
    moments = [each for each in MOMENTS if each not in ("fault", "recovered")]
    if not saves:
        moments.remove("checkpoint")
    return Strike(
        what=what,
        how=how,
        which=draw.randrange(4),
        moment=draw.choice(["step", *moments]),
        at=draw.randrange(1, steps),
        delay=draw.random() ** 2,
        lasts=draw.choice([1.0, 4.0, 9.0]),
    )


@dataclass
class Tally:
    """What has been done so far."""

    trials: int = 0
    strikes: int = 0
    several: int = 0
    failures: list[str] = field(default_factory=list)

    def do(self, trials: Sequence[Trial], expected: Mapping[str, Committed], folder: Path) -> None:
        """Run trials of jobs with the same workers at one place, whose servers stay."""
        where = Path(tempfile.mkdtemp(dir=folder))
        with place_of(trials[0].place, workers_of(trials[0].job), where) as place:
            for trial in trials:
                self.trials += 1
                print(f"\n{self.trials}: {trial.as_json()}", flush=True)
                job = where / f"job{self.trials}"
                try:
                    done = run_trial(trial, place, expected[trial.job], job)
                except TrialError as error:
                    self.failures.append(trial.as_json())
                    report = folder / f"failed-{self.trials}.txt"
                    notes = "\n".join(error.__notes__)
                    report.write_text(f"{trial.as_json()}\n{error}\n{notes}")
                    print(f"FAILED: {error}\nits output is in {report}", flush=True)
                    return  # what is left of it would disturb the next one
                shutil.rmtree(job)
                self.strikes += len(done.struck)
                self.several += len(done.struck) if len(done.struck) > 1 else 0
                for strike in done.struck:
                    print(f"   {strike}")
                print(
                    f"   exit {' '.join(map(str, done.codes))}  {done.seconds:.1f} s  "
                    f"{self.strikes} strikes, {self.several} of several",
                    flush=True,
                )


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Mark all processes, so that none outlives this one; jobs get fork servers of their own."""
    os.environ[TOKEN] = value = uuid.uuid4().hex
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="rpcmp-chaos-")
    processes.FORKS.in_use = False
    with reaping(value):
        yield


@click.command()
@click.option("--seed", type=int)
@click.option("--minutes", default=10.0)
@click.option("--place", "places", type=click.Choice(PLACES), multiple=True)
@click.option("--replay", help="a line of the output")
def main(seed: int | None, minutes: float, places: tuple[str, ...], replay: str | None) -> None:
    """Strike runs at random; see the module."""
    seed = random.getrandbits(32) if seed is None else seed
    print(f"seed {seed}")
    draw, tally, ends = random.Random(seed), Tally(), time.monotonic() + 60 * minutes
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    with marked():
        if replay:
            trial = Trial.from_json(replay)
            tally.do([trial], {trial.job: expected_of(trial.job, folder)}, folder)
        else:
            expected = {job: expected_of(job, folder) for job in JOBS}
            steps = {job: len(expected[job][0]) for job in JOBS}
            while time.monotonic() < ends:
                place = draw.choice(places or PLACES)
                trials = [draw_trial(draw, place, steps) for _ in range(3)]
                workers = workers_of(trials[0].job)
                tally.do([t for t in trials if workers_of(t.job) == workers], expected, folder)
    print(
        f"\n{tally.trials} runs, {tally.strikes} strikes, {tally.several} of them two or three "
        f"at a time: {len(tally.failures)} failures"
    )
    for failure in tally.failures:
        print(f"--replay '{failure}'")
    raise SystemExit(bool(tally.failures))


if __name__ == "__main__":
    main()
