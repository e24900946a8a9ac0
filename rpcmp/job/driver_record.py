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
    from rpcmp.net.signatures import Verifier

INVITED_SECONDS = 600
"""How long an invitation holds."""

BEAT_SECONDS = 1.0
"""Between two messages of a driver that has nothing to record."""

log = logging.getLogger(__name__)


def held_seconds(config: Config, record: DriverRecord | None) -> float:
    """Return for how long servers hold the newest steps if the driver is lost; 0: not at all."""
    return 0.0 if record is None else config.recovery.keep_after_driver


def signed(security: Security, *statement: str | int) -> pb.Signature | None:
    """Return our signature of a statement; None without certificates."""
    if security.credentials is None:
        return None
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

    def is_signed(signature: pb.Signature, what: str, *statement: str | int) -> bool:
        try:
            verifier.require_signed((what, *statement), _signature(signature))
        except SecurityError as error:
            refused[what] = str(error)
            return False
        return True

    kept = pb.RecallResponse()
    kept.CopyFrom(answer)
    if answer.about and not is_signed(answer.about_signature, *about_of(answer)):
        kept.about = ""
    del kept.states[:], kept.ended[:]
    # No server keeps more, and each takes a moment in which nothing else happens here.
    states, ended = answer.states[:MAX_STATES], answer.ended[:REMEMBERED]
    kept.states.extend(s for s in states if is_signed(s.signature, *state_of(answer, s)))
    kept.ended.extend(e for e in ended if is_signed(e.signature, *end_of(e.job_id, e.driver_id)))
    run = answer.completed
    if answer.HasField("completed") and not is_signed(run.signature, *completed_of(run)):
        kept.ClearField("completed")
    for what, why in refused.items():
        text = "what the server at %s holds of a job is not used (%s): %s"
        log.warning(text, address, what, why)
    return kept


def _signature(signature: pb.Signature) -> Any:
    from rpcmp.net.signatures import Signature  # imports cryptography

    return Signature(signature.certificate, signature.value)


def about_of(answer: pb.RecallResponse) -> tuple[str, str, str, int, str]:
    return "about", answer.job, answer.job_id, answer.about_generation, answer.about


def state_of(of: pb.RecallResponse, state: pb.DriverState) -> tuple[str, str, int, int, str]:
    return "state", of.job_id, state.number, state.step, state.state


def end_of(job_id: str, driver_id: str) -> tuple[str, str, str]:
    """Return what a driver signs of a run that it ends; another one may have taken that over."""
    return "ended", job_id, driver_id


def ended(security: Security, job_id: str, driver_id: str) -> pb.EndedJob:
    signature = signed(security, *end_of(job_id, driver_id))
    return pb.EndedJob(job_id=job_id, driver_id=driver_id, signature=signature)


def completed_of(run: pb.CompletedRun) -> tuple[str, str, str, str, str, str, str]:
    when = run.ended_at.hex()
    return "completed", run.job, run.job_id, run.about, run.summary, run.identity, when


def invitation(security: Security, job_id: str, address: str, at: int) -> pb.JoinRequest:
    """Return what `rpcmp join` signs: the spare at an address may serve a stage of a run."""
    signature = signed(security, "join", job_id, address, at)
    return pb.JoinRequest(address=address, at=at, signature=signature)


def why_not_invited(job_id: str, joining: pb.JoinRequest, security: Security) -> str:
    """Return why a spare may not join a run, of which a server has told; empty if it may."""
    if security.credentials is None:
        return ""
    statement = "join", job_id, joining.address, joining.at
    try:
        security.credentials.verifier().require_signed(statement, _signature(joining.signature))
    except SecurityError as error:
        return str(error)
    if abs(time.time() - joining.at) > INVITED_SECONDS:
        return "its invitation is of another time: ask again, or set the clocks of both hosts"
    return ""


class DriverRecord:
    """The record that a run's driver keeps at all servers, over all generations.

    Args:
        job: its name.
        driver_id: of this start of the driver.
        number: of the last state that a driver before has recorded of the run.

    Attributes:
        about: JSON of About; empty until it is known.
    """

    def __init__(self, job: str, security: Security, driver_id: str = "", number: int = 0) -> None:
        self.about = ""
        self._job, self._security, self._driver_id = job, security, driver_id
        self._states: dict[int, tuple[int, str]] = {}
        self._signatures: dict[int, pb.Signature | None] = {}
        self._number = number
        self._streams: set[asyncio.Event] = set()
        self._summary = self._identity = ""
        self._ended_at = 0.0

    def add(self, state: Mapping[str, Any], from_step: int) -> None:
        """Record the state after a step, which may have changed since; forget earlier ones."""
        self._number += 1
        self._states[state["step"]] = self._number, json.dumps(state)
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

    async def requests(self, job_id: str, generation: int) -> AsyncIterator[pb.RecordRequest]:
        """Yield what a server of a generation has to be sent, until the run has ended."""
        changed, number, sent = asyncio.Event(), 0, ("", b"")
        self._streams.add(changed)
        try:
            while True:
                changed.clear()
                request = pb.RecordRequest(
                    job_id=job_id,
                    generation=generation,
                    from_step=min(self._states, default=0),
                    states=self._states_after(number, job_id),
                )
                if (self.about, now := self._certificate()) != sent:  # that may be a renewed one
                    request.MergeFrom(self._about(job_id, generation))
                    sent = self.about, now
                if self._summary:
                    request.MergeFrom(self._end(job_id))
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

    def _about(self, job_id: str, generation: int) -> pb.RecordRequest:
        if not self.about:
            return pb.RecordRequest()
        statement = "about", self._job, job_id, generation, self.about
        return pb.RecordRequest(
            about=self.about, about_signature=signed(self._security, *statement)
        )

    def _states_after(self, number: int, job_id: str) -> list[pb.DriverState]:
        made = []
        for step, (when, text) in self._states.items():
            if when <= number:
                continue
            if when not in self._signatures:  # one for all servers
                statement = "state", job_id, when, step, text
                self._signatures[when] = signed(self._security, *statement)
            signature = self._signatures[when]
            made.append(pb.DriverState(step=step, state=text, number=when, signature=signature))
        known = {when for when, _ in self._states.values()}
        self._signatures = {when: s for when, s in self._signatures.items() if when in known}
        return made

    def _end(self, job_id: str) -> pb.RecordRequest:
        run = pb.CompletedRun(
            job=self._job,
            job_id=job_id,
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
            ended_signature=signed(self._security, *end_of(job_id, self._driver_id)),
            completed_signature=signed(self._security, *completed_of(run)),
        )
