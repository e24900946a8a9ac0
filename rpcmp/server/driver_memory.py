"""The driver of a job as its stage servers remember it, so that another one can take the job over.

    driver ──Record: its own state after each step──> the server of each worker
    the driver is lost ──> snapshots and states are held for `recovery.keep_after_driver`
    another driver, `--resume` ──Recall──> Prepare: a higher generation, "supersedes" the lost one

A driver may also be lost after the last step of its run, or a moment before it would have ended
well. So its summary is kept for as long, for another one to repeat instead of the whole training.

A job never has two drivers. Each start of a driver has an id, and a server lets only the last one
claim it again. Another one has to name that one as its predecessor, which must be gone, or silent:
a driver sends a beat each second. So a driver that was only suspended, or cut off, is refused when
it comes back, whatever its generation.
"""

from __future__ import annotations

import time
from collections import deque

from rpcmp.errors import BusyError, TakenOverError
from rpcmp.v1 import control_pb2 as pb

SILENT_SECONDS = 10.0
"""After which a driver whose connection is still open counts as gone, if another one comes."""

REMEMBERED = 100
"""Jobs that were ended, whose drivers, if they come back, must not begin them anew."""

MAX_STATES = 1024
MAX_STATE = 64 * 1024
"""Characters of one state; it has some numbers, and the last evaluation's metrics."""


class DriverMemory:
    """The driver of a server's job: who it is, and what it has recorded.

    Attributes:
        job, job_id, generation: of its last claim; empty if there was none.
        about: what it has recorded once, JSON; see rpcmp.job.takeover.
        states: its own state after each of the last steps.
        keep_seconds: how long to hold the job if it is lost.
        heard_at: when it was heard last, by the monotonic clock.
    """

    def __init__(self) -> None:
        self._ended: deque[pb.EndedJob] = deque(maxlen=REMEMBERED)
        self._completed = pb.CompletedRun()
        self._completed_until = 0.0
        self.clear()

    def clear(self) -> None:
        self.job = self.job_id = self.about = self._driver_id = ""
        self.generation = self._about_generation = 0
        self._about_signature = pb.Signature()
        self.keep_seconds = 0.0
        self.states: dict[int, pb.DriverState] = {}
        self.heard_at = 0.0
        self._held_until = 0.0

    def end(self, signature: pb.Signature) -> None:
        """Forget a job that its driver has ended, except that it has, which it has signed."""
        self._note_end(signature)
        self.clear()

    def _note_end(self, signature: pb.Signature) -> None:
        ids = {"job_id": self.job_id, "driver_id": self._driver_id}
        self._ended.append(pb.EndedJob(**ids, signature=signature))

    @property
    def holds_seconds(self) -> float:
        """How long the state of a lost driver's job is still held; 0: it is not."""
        return max(0.0, self._held_until - time.monotonic())

    def is_held(self, job_id: str, generation: int) -> bool:
        return bool(self.holds_seconds) and (job_id, generation) == (self.job_id, self.generation)

    def require_may_claim(self, request: pb.PrepareRequest, is_claimed: bool) -> None:
        """Refuse a driver whose job is another's now, and other jobs while this one is held.

        Args:
            is_claimed: whether a job runs here.
        """
        if any(each.job_id == request.job_id for each in self._ended):
            raise TakenOverError(f"job {request.job!r} was ended meanwhile, by another driver")
        if request.job_id != self.job_id:
            if self.holds_seconds and not is_claimed and not request.drops_held:
                raise BusyError(self._held())
            return
        if request.driver_id == self._driver_id:
            return
        if self._driver_id not in request.supersedes:
            raise TakenOverError(
                f"another driver has taken job {self.job!r} over, as generation {self.generation}; "
                "this one must not go on with it"
            )
        if is_claimed and not self._is_silent:
            raise BusyError(f"busy with job {self.job!r}, whose driver is at work")
        if request.generation <= self.generation:
            raise BusyError(f"generation {self.generation} of job {self.job!r} was here already")

    def claim(self, request: pb.PrepareRequest) -> None:
        """Remember who has claimed the server."""
        if request.job_id != self.job_id:
            self.clear()
        if request.job == self._completed.job:  # it has begun anew
            self._completed_until = 0.0
        self.job, self.job_id, self.generation = request.job, request.job_id, request.generation
        self._driver_id, self.keep_seconds = request.driver_id, request.keep_s
        self.heard_at, self._held_until = time.monotonic(), 0.0

    def is_of(self, driver_id: str) -> bool:
        return driver_id == self._driver_id

    def record(self, request: pb.RecordRequest) -> None:
        """Keep what the driver records, of the steps that it could still go on from.

        Nothing is held of a run that has ended, if the driver is gone before it says Stop.
        """
        self.heard_at = time.monotonic()
        if request.about:
            self.about, self._about_generation = request.about, request.generation
            self._about_signature = request.about_signature
        if request.has_ended:
            self._note_end(request.ended_signature)
            self._completed = pb.CompletedRun(
                job=self.job,
                job_id=self.job_id,
                about=self.about,
                summary=request.summary,
                identity=request.identity,
                ended_at=request.ended_at,
                signature=request.completed_signature,
            )
            self._completed_until = time.monotonic() + self.keep_seconds
            self.states, self.keep_seconds, self._held_until = {}, 0.0, 0.0
            return
        for each in request.states:
            if len(each.state) <= MAX_STATE:
                self.states[each.step] = each
        kept = sorted(step for step in self.states if step >= request.from_step)[-MAX_STATES:]
        self.states = {step: self.states[step] for step in kept}

    def hold(self) -> float:
        """Hold the job from now on, since its driver is gone; returns for how many seconds.

        0: it has recorded nothing that another driver could go on from.
        """
        seconds = self.keep_seconds if self.states else 0.0
        self._held_until = time.monotonic() + seconds if seconds else 0.0
        return seconds

    @property
    def _is_silent(self) -> bool:
        return time.monotonic() - self.heard_at >= SILENT_SECONDS

    def recall(self, is_claimed: bool) -> pb.RecallResponse:
        return pb.RecallResponse(
            job=self.job,
            job_id=self.job_id,
            generation=self.generation,
            driver_id=self._driver_id,
            about=self.about,
            about_generation=self._about_generation,
            about_signature=self._about_signature,
            states=self.states.values(),
            has_driver=is_claimed and not self._is_silent,
            ended=self._ended,
            completed=self._completed if time.monotonic() < self._completed_until else None,
        )

    def _held(self) -> str:
        return (
            f"holds job {self.job!r} up to step {max(self.states)}, whose driver was lost, for "
            f"another {self.holds_seconds:.0f} s: `rpcmp drive --resume` with its config goes on "
            "with it, and `--fresh` drops it"
        )
