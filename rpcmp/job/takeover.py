"""Taking over a job whose driver was lost, from what its stage servers hold.

    driver ──about the run; its own state after each step──> servers    see server/driver_memory
    driver is lost, with its host
    another driver, `--resume` ──Recall──> the job of that name: its id, generation and states

The stages' state is in the snapshots that servers hold for their recovery anyway. The driver's own
is some hundred bytes per step, so the next driver starts where the stages are, and not at the last
checkpoint on a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, JsonValue, ValidationError

from rpcmp.checkpoint.folder import RUN_NAME
from rpcmp.config.schema import Config
from rpcmp.config.types import Positive, Strict
from rpcmp.driver.progress import TrainingProgress
from rpcmp.errors import CheckpointError, RpcmpError
from rpcmp.job.server_calls import ANSWER_SECONDS
from rpcmp.job.server_pool import ServerPool
from rpcmp.process.channel import Message
from rpcmp.v1 import control_pb2 as pb

BEAT_SECONDS = 1.0
"""Between two messages of a driver that has nothing to record."""


class About(Strict):
    """What is the same after every step of a run.

    Attributes:
        run: its id in manifests.
        run_folder: name of the folder of its checkpoints; empty: the folder of all.
        layers: of each stage, by its name.
        shares: of the replicas of stages, by the stage's index.
        config: as manifests have it.
    """

    run: str
    run_folder: Annotated[str, Field(pattern=f"^({RUN_NAME.pattern})?$")]
    layers: dict[str, list[str]]
    shares: dict[int, list[Positive]]
    config: dict[str, JsonValue]


@dataclass(frozen=True)
class LostJob:
    """A job without a driver, as its servers hold it.

    Attributes:
        generation: its last one.
        drivers: ids of the drivers that have recorded it.
        states: the driver's own state after each step.
    """

    job_id: str
    generation: int
    drivers: list[str]
    about: About
    states: dict[int, Message]

    def saves_where(self, config: Config) -> bool:
        """Return whether its checkpoints are in the config's folder, if both have one.

        Otherwise the user wants to continue an earlier run, whose folder is named.
        """
        then = self.about.config.get("checkpoint")
        if config.checkpoint is None or not isinstance(then, dict):
            return True
        return then.get("dir") == config.checkpoint.dir

    def apply_to(self, config: Config) -> Config:
        """Return the config with what the run has measured instead of what it would measure."""
        if config.model is not None and config.model.balance == "auto":
            config = config.with_balance([len(layers) for layers in self.about.layers.values()])
        unshared = {i for i, stage in enumerate(config.stages) if stage.shares is None}
        shares = {index: self.about.shares[index] for index in unshared & {*self.about.shares}}
        return config.with_shares(shares) if config.balance_replicas else config


async def find(config: Config, pool: ServerPool) -> LostJob | None:
    """Return the job of the config's name that servers hold, the newest one; None: there is none.

    Servers that do not answer are left out: a claim will say why they do not.
    """

    async def recall(address: str) -> pb.RecallResponse:
        with contextlib.suppress(RpcmpError):
            async with pool.client(address) as client:
                await client.connect(ANSWER_SECONDS, starting=False)
                return await client.recall()
        return pb.RecallResponse()

    by_job: defaultdict[str, list[pb.RecallResponse]] = defaultdict(list)
    for answer in await asyncio.gather(*map(recall, pool.addresses)):
        if answer.job == config.name and answer.about:
            by_job[answer.job_id].append(answer)
    found = [_lost_job(answers) for answers in by_job.values()]
    jobs = [job for job in found if job.saves_where(config)]
    return max(jobs, key=lambda job: (job.generation, max(job.states)), default=None)


def _lost_job(answers: list[pb.RecallResponse]) -> LostJob:
    answers = sorted(answers, key=lambda answer: answer.generation)
    newest = answers[-1]
    try:
        return LostJob(
            newest.job_id,
            newest.generation,
            sorted({answer.driver_id for answer in answers}),
            About.model_validate_json(newest.about),
            {each.step: _state(each) for answer in answers for each in answer.states},
        )
    except (ValidationError, ValueError, RecursionError) as error:
        text = f"what a stage server holds of job {newest.job!r} cannot be read: {error}"
        raise CheckpointError(text) from error


def _state(recorded: pb.DriverState) -> Message:
    state = json.loads(recorded.state)
    if not isinstance(state, dict) or TrainingProgress.from_message(state).step != recorded.step:
        raise ValueError(f"no driver's state of step {recorded.step}")
    return state


class DriverRecord:
    """What a run's driver records at all servers, over all generations.

    Attributes:
        about: JSON of About; empty until it is known.
    """

    def __init__(self) -> None:
        self.about = ""
        self._states: dict[int, tuple[int, str]] = {}
        self._number = 0
        self._streams: set[asyncio.Event] = set()

    def add(self, state: Mapping[str, Any], from_step: int) -> None:
        """Record the state after a step, which may have changed since; forget earlier ones."""
        self._number += 1
        self._states[state["step"]] = self._number, json.dumps(state)
        for step in [step for step in self._states if step < from_step]:
            del self._states[step]
        for changed in self._streams:
            changed.set()

    async def requests(self, job_id: str, generation: int) -> AsyncIterator[pb.RecordRequest]:
        """Yield what a server of a generation has to be sent, without end."""
        changed, number, about = asyncio.Event(), 0, ""
        self._streams.add(changed)
        try:
            while True:
                changed.clear()
                request = pb.RecordRequest(
                    job_id=job_id,
                    generation=generation,
                    about=self.about if self.about != about else "",
                    from_step=min(self._states, default=0),
                    states=[
                        pb.DriverState(step=step, state=text)
                        for step, (when, text) in self._states.items()
                        if when > number
                    ],
                )
                number, about = self._number, self.about
                yield request
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_SECONDS):
                        await changed.wait()
        finally:
            self._streams.discard(changed)
