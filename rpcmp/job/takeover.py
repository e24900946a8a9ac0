"""Taking over a job whose driver was lost, from what its stage servers hold.

    driver ──about the run; its own state after each step──> servers    see server/driver_memory
    driver is lost, with its host
    another driver, `--resume` ──Recall──> the job of that name: its id, generation and states

The stages' state is in the snapshots that servers hold for their recovery anyway. The driver's own
is some hundred bytes per step, so the next driver starts where the stages are, and not at the last
checkpoint on a disk. It believes what a driver has signed; see `driver_record`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import Field, JsonValue

from rpcmp.checkpoint.folder import RUN_NAME
from rpcmp.config.files import add_file, python_files
from rpcmp.config.schema import Config
from rpcmp.config.stored import stored
from rpcmp.config.types import Address, Positive, Strict
from rpcmp.driver.progress import TrainingProgress
from rpcmp.errors import BusyError, RpcmpError
from rpcmp.job.cuts import with_stages
from rpcmp.job.driver_record import proven
from rpcmp.job.server_calls import ANSWER_SECONDS
from rpcmp.job.server_pool import ServerPlace, ServerPool
from rpcmp.observability.events import SummaryEvent
from rpcmp.process.channel import Message
from rpcmp.server.connection import software_versions
from rpcmp.server.driver_memory import SILENT_SECONDS
from rpcmp.v1 import control_pb2 as pb

MOST_AHEAD = 1000
"""Generations that a server may have seen since its driver has recorded one."""

CLOCKS_SECONDS = 60.0
"""How far the clocks of two drivers' hosts may be apart."""

MOST_CHARACTERS = 64
"""Of a driver's id."""

RETRY_SECONDS = 0.5

MORE_SECONDS = 1.0
"""How long to wait for a driver to count as gone, beyond SILENT_SECONDS."""

DRIVER_STATE = {
    "step",
    "epoch",
    "batch",
    "loss",
    "epoch_loss",
    "metrics",
    "stopping",
    "best",
    "has_ended_epoch",
    "evaluated_after",
    "scaler",
    "stream",
    "options",
}
"""The keys of a progress event that are the driver's state; see TrainingProgress."""

log = logging.getLogger(__name__)


class About(Strict):
    """The part of a record that is the same after every step of a run.

    Attributes:
        run: its id in manifests.
        run_folder: name of the folder of its checkpoints; empty: the folder of all.
        addresses: of the servers, by worker; a spare may have replaced one that the config names.
        numbers: of the stages that these servers' certificates are for, by worker.
        layers: of each stage, by its name.
        cuts: all that the run has had; see rpcmp.job.cuts.
        shares: of the replicas of stages, by the stage's index.
        config: as manifests have it.
        recorded_at: when its driver began to record this, in seconds since 1970.
        driver: the id of that driver.
    """

    run: str
    run_folder: Annotated[str, Field(pattern=f"^({RUN_NAME.pattern})?$")]
    addresses: list[Address]
    numbers: list[Annotated[int, Field(ge=0)]]
    layers: dict[str, list[str]]
    cuts: list[dict[str, list[str]]] = Field(default_factory=list)
    shares: dict[int, list[Positive]]
    config: dict[str, JsonValue]
    recorded_at: float = 0.0
    driver: str = ""

    @property
    def places(self) -> list[ServerPlace]:
        """Of the workers."""
        return list(map(ServerPlace, self.addresses, self.numbers))

    def apply_to(self, config: Config) -> Config:
        """Return the config with what the run has measured instead of what it would measure.

        That is, with the stages that it had when hosts had joined or left. If the config has other
        ones for another reason, they are measured anew.
        """
        if list(self.layers) != config.stage_names:
            if config.model is None or config.rebalance != "auto" or config.is_replicated:
                return config
            counts = {name: len(layers) for name, layers in self.layers.items()}
            return with_stages(config, counts)
        if config.model is not None and (
            config.model.balance == "auto" or config.rebalance == "auto"
        ):
            config = config.with_balance([len(layers) for layers in self.layers.values()])
        return config.with_measured_shares(self.shares) if config.balance_replicas else config


def identity_of(config: Config) -> str:
    """Return the hash of what decides a run's results, so far as it is known before the run.

    That is the config as it was given, the Python files beside it, and the versions of software.
    """
    digest = hashlib.sha256(json.dumps([stored(config), software_versions()]).encode())
    for path in sorted(python_files(config.folder, config.modules)):
        with contextlib.suppress(OSError):  # who needs the file says why
            add_file(digest, path.relative_to(config.folder).as_posix(), path)
    return digest.hexdigest()


@dataclass(frozen=True)
class CompletedRun:
    """A run that came to its end not long ago, as its servers remember it."""

    job_id: str
    about: About
    summary: SummaryEvent


@dataclass(frozen=True)
class LostJob:
    """A job without a driver, as its servers hold it.

    Attributes:
        generation: its last one.
        drivers: ids of the drivers that have recorded it.
        states: the driver's own state after each step.
        number: of the newest state.
        recorded: the generation of `about`.
    """

    job_id: str
    generation: int
    drivers: list[str]
    about: About
    states: dict[int, Message]
    number: int
    recorded: int

    def saves_where(self, config: Config) -> bool:
        """Return whether its checkpoints are in the config's folder, if both have one.

        Otherwise the user wants to continue an earlier run, whose folder is named.
        """
        then = self.about.config.get("checkpoint")
        if config.checkpoint is None or not isinstance(then, dict):
            return True
        return then.get("dir") == config.checkpoint.dir


async def find(
    config: Config, pool: ServerPool, identity: str = ""
) -> LostJob | CompletedRun | None:
    """Return the newest job of the config's name that servers hold, or its run that is complete.

    A run with checkpoints goes on from the last one of them, so only others count as complete, and
    only those with the same identity. None: there is neither.
    Waits for a moment while its driver still counts as alive at some server: hosts do not notice
    at the same time that it is gone. Servers that do not answer are left out: a claim will say why.
    A job that its driver was ending when it was lost is ended at the servers that still hold it.

    Raises:
        BusyError: its driver is alive.
    """
    ends = time.monotonic() + SILENT_SECONDS + MORE_SECONDS
    while True:
        answers = dict(zip(pool.addresses, await _recall_all(pool), strict=True))
        jobs = _jobs(config, answers)
        ended = {job.job_id: word for job in jobs if (word := _ended(answers, job)) is not None}
        await _end_everywhere(pool, ended, answers)
        job = _newest(config, [job for job in jobs if job.job_id not in ended], answers)
        alive = [address for address, each in answers.items() if _has_driver(job, each)]
        if job is None:
            is_sought = identity and config.checkpoint is None
            return _completed(config, answers, identity) if is_sought else None
        if not alive:
            return job
        if time.monotonic() > ends:
            raise BusyError(
                f"{alive[0]} is busy with job {config.name!r}, whose driver is at work: end that "
                "one first"
            )
        await asyncio.sleep(RETRY_SECONDS)


async def _recall_all(pool: ServerPool) -> list[pb.RecallResponse]:
    credentials = pool.dialer.security.credentials
    verifier = None if credentials is None else credentials.verifier()

    async def recall(address: str) -> pb.RecallResponse:
        with contextlib.suppress(RpcmpError):
            async with pool.client(address) as client:
                await client.connect(ANSWER_SECONDS, starting=False)
                return proven(await client.recall(), verifier, address)
        return pb.RecallResponse()

    return await asyncio.gather(*map(recall, pool.addresses))


async def _end_everywhere(
    pool: ServerPool,
    ended: Mapping[str, pb.EndedJob],
    answers: Mapping[str, pb.RecallResponse],
) -> None:
    """End jobs at servers that hold them, by the words of their drivers that others have."""
    for address, answer in answers.items():
        if answer.job_id not in ended or answer.has_driver:
            continue
        request = pb.StopRequest(
            job_id=answer.job_id,
            generation=answer.generation,
            driver_id=answer.driver_id,
            ended_signature=ended[answer.job_id].signature,
        )
        try:
            async with pool.client(address) as client:
                await client.connect(ANSWER_SECONDS, starting=False)
                await client.stop(request)
        except RpcmpError as error:
            text = "the server at %s goes on holding job %r, which was ended: %s"
            log.warning(text, address, answer.job, error)


def _ended(answers: Mapping[str, pb.RecallResponse], job: LostJob) -> pb.EndedJob | None:
    """Return the word of a job's last driver that it has ended; that of one before is none."""
    last = job.job_id, job.about.driver
    words = (each for answer in answers.values() for each in answer.ended)
    return next((each for each in words if (each.job_id, each.driver_id) == last), None)


def _has_driver(job: LostJob | None, answer: pb.RecallResponse) -> bool:
    """Return whether a server of a job's last generation says that its driver is at work.

    One that has left the run since may say what it wants.
    """
    if job is None or answer.job_id != job.job_id or answer.about_generation != job.recorded:
        return False
    return answer.has_driver


def _newest(
    config: Config, jobs: Sequence[LostJob], answers: Mapping[str, pb.RecallResponse]
) -> LostJob | None:
    jobs = [job for job in jobs if job.saves_where(config)]

    def holders(job: LostJob) -> list[str]:
        return [address for address, each in answers.items() if each.job_id == job.job_id]

    # The word of one server counts less than that of two: it may have kept an older run's record.
    newest = max(
        jobs,
        key=lambda job: (
            len(holders(job)),
            job.about.recorded_at,
            job.generation,
            max(job.states),
        ),
        default=None,
    )
    for job in jobs:
        if job is not newest:
            text = "another run of job %r is held by %s, and left alone"
            log.warning(text, config.name, ", ".join(holders(job)))
    return newest


def _jobs(config: Config, answers: Mapping[str, pb.RecallResponse]) -> list[LostJob]:
    """Return the jobs of the config's name that servers hold."""
    by_job: defaultdict[str, dict[str, pb.RecallResponse]] = defaultdict(dict)
    for address, answer in answers.items():
        if answer.job == config.name:
            by_job[answer.job_id][address] = answer
    found = (_lost_job(each) for each in by_job.values())
    return [job for job in found if job is not None]


def _completed(
    config: Config, answers: Mapping[str, pb.RecallResponse], identity: str
) -> CompletedRun | None:
    """Return the newest run that servers remember, if it is what was asked for."""
    found: dict[float, CompletedRun] = {}
    for address, answer in answers.items():
        run = answer.completed
        if run.job != config.name or run.identity != identity:
            continue
        if time.time() - run.ended_at > config.recovery.keep_after_driver + CLOCKS_SECONDS:
            continue  # servers forget it by then; this one does not
        try:
            about = About.model_validate_json(run.about)
            if len(about.places) != len(about.apply_to(config).workers):
                raise ValueError("addresses of another number of workers")
            summary = SummaryEvent.from_json(_object(run.summary), complete=True)
        except (ValueError, RecursionError) as error:
            _warn_unreadable(address, run.job, error)
            continue
        found[run.ended_at] = CompletedRun(run.job_id, about, summary)
    return found[max(found)] if found else None


def _lost_job(answers: Mapping[str, pb.RecallResponse]) -> LostJob | None:
    """Return a job as its servers hold it; None if none of them has all that it takes."""
    abouts: list[tuple[int, int, About]] = []
    recorded: dict[int, pb.DriverState] = {}
    states: dict[int, Message] = {}
    for address, answer in sorted(answers.items(), key=lambda item: item[1].generation):
        try:
            if answer.about:
                about = About.model_validate_json(answer.about)
                abouts.append((answer.about_generation, len(about.cuts), about))
            for each in answer.states:
                state = _state(each)
                if each.step not in recorded or each.number >= recorded[each.step].number:
                    recorded[each.step], states[each.step] = each, state
        except (ValueError, RecursionError) as error:  # pydantic's error is a ValueError
            _warn_unreadable(address, answer.job, error)
    if not abouts or not states:
        return None
    # One that a server got before a move knows fewer cuts than what another server got after it.
    recorded_in, _, about = max(abouts, key=lambda each: each[:2])
    # Claims are not signed: one may have come after the last record, but not any number of them.
    claimed = [each.generation for each in answers.values()]
    generation = max(n for n in (recorded_in, *claimed) if n <= recorded_in + MOST_AHEAD)
    known = {each.driver_id for each in answers.values()}
    drivers = sorted(each for each in known if len(each) <= MOST_CHARACTERS)
    job_id = next(iter(answers.values())).job_id
    number = max(each.number for each in recorded.values())
    return LostJob(job_id, generation, drivers, about, states, number, recorded_in)


def _warn_unreadable(address: str, job: str, error: Exception) -> None:
    text = "what the server at %s holds of job %r cannot be read, and is not used: %s"
    log.warning(text, address, job, error)


def _object(text: str) -> Message:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("a record that is no object")
    return value


def _state(recorded: pb.DriverState) -> Message:
    progress = TrainingProgress.from_message(_object(recorded.state))
    if progress.step != recorded.step:
        raise ValueError(f"a driver's state of step {progress.step}, not {recorded.step}")
    return asdict(progress)


def driver_state(progress: Message) -> Message:
    """Return what belongs to the driver's state after a step, and nothing else."""
    return {key: value for key, value in progress.items() if key in DRIVER_STATE}
