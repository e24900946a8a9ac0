"""What a run's driver has its stage servers keep for the driver that comes after it, signed.

    driver ──about the run; its own state after each step──> servers ──Recall──> the next driver

A server hands on what it was given and is believed nothing else: see `rpcmp.net.signatures`. The
next driver takes a record only with a driver's signature on it, so no server can make it go on with
another run, at other addresses, or drop one that others hold. Without certificates nothing is
signed: there all servers are the user's own, or `insecure` was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from rpcmp.config.schema import Config
from rpcmp.errors import SecurityError
from rpcmp.net.security import Security
from rpcmp.observability.events import SummaryEvent
from rpcmp.observability.events.event import dumps
from rpcmp.server.driver_memory import MAX_STATES, REMEMBERED
from rpcmp.v1 import control_pb2 as pb

if TYPE_CHECKING:
    from rpcmp.net.signatures import Signature, Statement, Verifier

INVITED_SECONDS = 600
"""How long an invitation holds."""

BEAT_SECONDS = 1.0
"""Between two messages of a driver that has nothing to record."""

log = logging.getLogger(__name__)


def held_seconds(config: Config, record: DriverRecord | None) -> float:
    """Return for how long servers hold the newest steps if the driver is lost; 0: not at all."""
    return 0.0 if record is None else config.recovery.keep_after_driver


def signed(security: Security, statement: Statement) -> pb.Signature:
    """Return our signature of a statement; an empty one without certificates."""
    if security.credentials is None:
        return pb.Signature()
    return pb.Signature(**security.credentials.signer().sign(statement)._asdict())


def proven(answer: pb.RecallResponse, verifier: Verifier | None, address: str) -> pb.RecallResponse:
    """Return what a driver has signed of a server's answer; the rest is logged, and left out.

    Args:
        verifier: None without certificates: everything counts then.
        address: of the server.
    """
    if verifier is None:
        return answer
    refused: dict[str, str] = {}

    def is_signed(signature: pb.Signature, statement: Statement) -> bool:
        try:
            verifier.require_signed(statement, _signature(signature))
        except SecurityError as error:
            refused[str(statement[0])] = str(error)
            return False
        return True

    kept = pb.RecallResponse()
    kept.CopyFrom(answer)
    about = about_of(answer.job, answer.job_id, answer.about_generation, answer.about)
    if answer.about and not is_signed(answer.about_signature, about):
        kept.about = ""
    del kept.states[:], kept.ended[:]
    # No server keeps more, and each takes a moment in which nothing else happens here.
    states, ended = answer.states[:MAX_STATES], answer.ended[:REMEMBERED]
    kept.states.extend(s for s in states if is_signed(s.signature, state_of(answer.job_id, s)))
    kept.ended.extend(e for e in ended if is_signed(e.signature, end_of(e.job_id, e.driver_id)))
    run = answer.completed
    if answer.HasField("completed") and not is_signed(run.signature, completed_of(run)):
        kept.ClearField("completed")
    for what, why in refused.items():
        text = "what the server at %s holds of a job is not used (%s): %s"
        log.warning(text, address, what, why)
    return kept


def _signature(signature: pb.Signature) -> Signature:
    from rpcmp.net.signatures import Signature  # imports cryptography

    return Signature(signature.certificate, signature.value)


def about_of(job: str, job_id: str, generation: int, about: str) -> Statement:
    return "about", job, job_id, generation, about


def state_of(job_id: str, state: pb.DriverState) -> Statement:
    return "state", job_id, state.number, state.step, state.state


def invitation_of(job_id: str, joining: pb.JoinRequest) -> Statement:
    """Return what `rpcmp join` signs: the spare at an address may serve a stage of a run."""
    return "join", job_id, joining.address, joining.at


def end_of(job_id: str, driver_id: str) -> Statement:
    """Return what a driver signs of a run that it ends; another one may have taken that over."""
    return "ended", job_id, driver_id


def completed_of(run: pb.CompletedRun) -> Statement:
    when = run.ended_at.hex()
    return "completed", run.job, run.job_id, run.about, run.summary, run.identity, when


def invitation(security: Security, job_id: str, address: str, at: int) -> pb.JoinRequest:
    made = pb.JoinRequest(address=address, at=at)
    made.signature.MergeFrom(signed(security, invitation_of(job_id, made)))
    return made


def why_not_invited(job_id: str, joining: pb.JoinRequest, security: Security) -> str:
    """Return why a spare may not join a run, of which a server has told; empty if it may."""
    if security.credentials is None:
        return ""
    statement, verifier = invitation_of(job_id, joining), security.credentials.verifier()
    try:
        verifier.require_signed(statement, _signature(joining.signature))
    except SecurityError as error:
        return str(error)
    if abs(time.time() - joining.at) > INVITED_SECONDS:
        return "its invitation is of another time: ask again, or set the clocks of both hosts"
    return ""


class DriverRecord:
    """The record that a run's driver keeps at all servers, over all generations.

    Args:
        job, job_id: the run's.
        driver_id: of this start of the driver.
        number: of the last state that a driver before has recorded of the run.

    Attributes:
        about: JSON of About; empty until it is known.
    """

    def __init__(
        self, job: str, job_id: str, driver_id: str, security: Security, number: int = 0
    ) -> None:
        self.about = ""
        self._job, self._job_id, self._driver_id = job, job_id, driver_id
        self._security = security
        self._states: dict[int, pb.DriverState] = {}
        self._number = number
        self._streams: set[asyncio.Event] = set()
        self._summary = self._identity = ""
        self._ended_at = 0.0

    def add(self, state: Mapping[str, Any], from_step: int) -> None:
        """Record the state after a step, which may have changed since; forget earlier ones."""
        self._number += 1
        recorded = pb.DriverState(step=state["step"], state=json.dumps(state), number=self._number)
        recorded.signature.MergeFrom(signed(self._security, state_of(self._job_id, recorded)))
        self._states[recorded.step] = recorded
        for step in [step for step in self._states if step < from_step]:
            del self._states[step]
        self._wake_streams()

    async def end(self, summary: SummaryEvent, identity: str) -> None:
        """Record that the run is complete, and return when that is on its way to all servers.

        A server whose Stop does not arrive, since it is stopped itself or this process is killed
        now, would hold a job for nobody.
        """
        self._summary, self._identity = dumps(summary.to_json()), identity
        self._ended_at = time.time()
        self._wake_streams()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEAT_SECONDS):
                while self._streams:
                    await asyncio.sleep(0.005)

    def _wake_streams(self) -> None:
        for changed in self._streams:
            changed.set()

    async def requests(self, generation: int) -> AsyncIterator[pb.RecordRequest]:
        """Yield what a server of a generation has to be sent, until the run has ended."""
        changed, number, sent = asyncio.Event(), 0, ("", b"")
        self._streams.add(changed)
        try:
            while True:
                changed.clear()
                request = pb.RecordRequest(
                    job_id=self._job_id,
                    generation=generation,
                    from_step=min(self._states, default=0),
                    states=[each for each in self._states.values() if each.number > number],
                )
                if (self.about, now := self._certificate()) != sent:  # that may be a renewed one
                    request.MergeFrom(self._about(generation))
                    sent = self.about, now
                if self._summary:
                    request.MergeFrom(self._end())
                number = self._number
                yield request
                if request.has_ended:  # and gRPC has taken it: it asks for the next one
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_SECONDS):
                        await changed.wait()
        finally:
            self._streams.discard(changed)

    def _certificate(self) -> bytes:
        credentials = self._security.credentials
        return b"" if credentials is None else credentials.signer().certificate

    def _about(self, generation: int) -> pb.RecordRequest:
        if not self.about:
            return pb.RecordRequest()
        statement = about_of(self._job, self._job_id, generation, self.about)
        return pb.RecordRequest(about=self.about, about_signature=signed(self._security, statement))

    def _end(self) -> pb.RecordRequest:
        run = pb.CompletedRun(
            job=self._job,
            job_id=self._job_id,
            about=self.about,
            summary=self._summary,
            identity=self._identity,
            ended_at=self._ended_at,
        )
        return pb.RecordRequest(
            has_ended=True,
            summary=self._summary,
            identity=self._identity,
            ended_at=self._ended_at,
            ended_signature=signed(self._security, end_of(self._job_id, self._driver_id)),
            completed_signature=signed(self._security, completed_of(run)),
        )
