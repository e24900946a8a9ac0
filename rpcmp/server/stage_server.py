"""A stage server: serves one job at a time and keeps its snapshots. Its services: `services`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from rpcmp.checkpoint.files import Inside, require_place
from rpcmp.config.device_places import AUTO
from rpcmp.errors import (
    BusyError,
    DrainingError,
    TakenOverError,
    from_wire,
    one_line,
)
from rpcmp.net import tunnel
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import Security
from rpcmp.process import resources
from rpcmp.process.activity import resident_bytes
from rpcmp.process.compiler import COMPILED
from rpcmp.process.fork_client import WORKERS, Forks
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.logging.collector import RecordSource
from rpcmp.process.logging.records import Entry, pass_on
from rpcmp.process.sandbox.confinement import SCRATCH, FileAccess
from rpcmp.process.task import run_task
from rpcmp.server import claim_log, job_folder, services
from rpcmp.server.access import GroupMembers
from rpcmp.server.admission import Admission
from rpcmp.server.claim import Claim, State
from rpcmp.server.connection import machine
from rpcmp.server.driver_memory import DriverMemory
from rpcmp.server.job_folder import JobFolder
from rpcmp.server.services import NOT_SERVING, Endpoints
from rpcmp.server.snapshot_store import SnapshotStore
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1 import doctor_pb2

UNWATCHED_SECONDS = 5.0
"""Lifetime of a claim that no driver watches."""

KEEP_SECONDS = 3600.0
"""Least time for which snapshots are kept for a driver that was lost, or waits for another host,
unless another job claims the server."""

VITALS_SECONDS = 1.0
"""Interval of vitals in a Watch stream."""

DRAIN_SECONDS = 30.0
"""Time limit for a job to end after its current step when the server drains."""

DRAIN_LOOK_SECONDS = 1.0
"""Between two looks at whether the driver was heard meanwhile."""

NAME_CHARACTERS = 100
"""Of a job's name in the server's log; a driver may choose it freely."""

log = logging.getLogger(__name__)


def sweep_leftovers() -> None:
    """Remove the temporary folders of servers that were killed, and of their workers."""
    of_servers = (services.PREFIX, tunnel.PREFIX, claim_log.PREFIX, job_folder.PREFIX, COMPILED)
    for prefix in (*of_servers, SCRATCH, resources.MULTIPROCESSING):
        resources.sweep(prefix)


class StageServer:
    """One stage's server, from `start` to `stop`.

    Args:
        admission: which jobs it takes, and what they may use here.
        forks: starts workers; closed with the server.
        security: which connections are accepted; None: this user's processes on this machine.
        show: called with each line of a worker's output.
        works_for: process id of the driver that has started the server for its job; 0: any driver.
        device: what `device = "auto"` is here; empty: left to the job.

    Attributes:
        draining: whether it takes no new job.
        leaves: whether it does not come back after that.
        claim: the current job's; None if idle.
        driver: the current job's, or that of the last one.
        drain_requested: set as soon as it has to stop.
        metrics_port: where its metrics are served; 0: nowhere.
    """

    def __init__(
        self,
        admission: Admission,
        forks: Forks | None = None,
        security: Security | None = None,
        show: Callable[[Entry], None] = pass_on,
        works_for: int = 0,
        device: str = "",
    ) -> None:
        self.works_for, self.device = works_for, device
        self.admission = admission
        self.draining = self.leaves = False
        self.metrics_port = 0
        self.claim: Claim | None = None
        self.security = security or Security()
        self.dialer = Dialer(self.security)
        self.snapshot_store = SnapshotStore(self.dialer)
        self._job_folder = JobFolder()
        self.driver = DriverMemory()
        self._show = show
        self.forks = forks or Forks([WORKERS])
        self._forgetting: asyncio.TimerHandle | None = None
        self._changing = asyncio.Lock()  # held while a claim begins or ends
        self._examined = ""
        self.drain_requested = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._forgotten = asyncio.Event()  # unlike `_idle`, not between two groups of a job
        self._forgotten.set()
        self._endpoints = Endpoints(self)

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port, which is a free one for port 0."""
        sweep_leftovers()
        return await self._endpoints.open(host, port)

    async def drain(self, leaves: bool = False) -> None:
        """Take no new job, and let the current one end after its current step."""
        self.draining, self.leaves = True, self.leaves or leaves
        self.drain_requested.set()
        await self._endpoints.set_health(NOT_SERVING)
        if self.claim is not None:
            await self.claim.notify()

    async def stop(self, seconds: float) -> None:
        """Wait up to `seconds` for the job to end, then end it, and stop listening.

        A server that leaves a job waits until the job needs it no longer: as long at most, counted
        from when its driver was last heard, since a step may take longer.
        """
        since = time.monotonic()
        while not (is_over := self._forgotten if self.leaves else self._idle).is_set():
            if self.leaves and seconds:
                since = max(since, self.driver.heard_at)
            if (left := since + seconds - time.monotonic()) <= 0:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), min(left, DRAIN_LOOK_SECONDS))
        await self.release(self.claim)
        await asyncio.to_thread(self._job_folder.clear)
        await self._endpoints.close()
        await self.forks.close()

    async def profile(self, request: pb.ProfileRequest) -> str:
        """Measure a job's layers in a child process; return the profile as JSON.

        The child is killed if the caller cancels the call.
        """
        async with self._reserved(request.job) as (folder, file_access):
            answer = await run_task(
                {
                    "op": "profile",
                    "order": request.order,
                    "code_folder": str(folder or ""),
                    "allowed": self.admission.allowed,
                    "sample": base64.b64encode(request.sample).decode(),
                },
                compute_environment(request.job.threads),
                self.forks,
                file_access,
            )
        return json.dumps(answer["profile"])

    async def examine(self, request: doctor_pb2.ExamineRequest) -> str:
        """Collect facts about this host for a stage of a job; JSON of HostFacts."""
        from rpcmp.server.host_facts import CheckRequest, examine  # pydantic

        order = CheckRequest.model_validate_json(request.order)
        settled = [self.device or name if name == AUTO else name for name in order.devices]
        order = order.model_copy(update={"devices": settled})
        async with self._reserved(request.job) as (folder, file_access):
            facts = await examine(
                order,
                self.forks,
                self.security,
                folder,
                file_access,
                request.job.threads,
                self.admission.allowed,
                self.admission.checkpoints,
            )
        return facts.model_copy(update={"metrics_port": self.metrics_port}).model_dump_json()

    @contextlib.asynccontextmanager
    async def _reserved(
        self, job: pb.PrepareRequest
    ) -> AsyncIterator[tuple[Path | None, FileAccess | None]]:
        """Take no other job while one is being measured or examined.

        Yields the folder of the job's Python files, if it has any, and what its code may open.
        """
        async with self._changing:
            self._admit(job, await asyncio.to_thread(os.path.exists, job.init))
            if self.claim is not None:  # not even for its own job's next generation
                raise BusyError(f"busy with job {self.claim.job!r}")
            self._examined = job.job
            self._idle.clear()
        folder = None
        try:
            folder = claim_log.unpack(job.code) if job.code else None
            file_access = self.admission.file_access
            yield folder, file_access and file_access.reading(folder)
        finally:
            if folder is not None:
                resources.remove_folder(folder)
            self._examined = ""
            if self.claim is None:
                self._idle.set()

    async def prepare(self, request: pb.PrepareRequest, driver: str) -> Claim:
        """Claim this server for a job, or for its next generation.

        Args:
            driver: role and address of the caller, for the log.
        """
        async with self._changing:
            self.driver.require_may_claim(request, self.claim is not None)
            has_init = await asyncio.to_thread(os.path.exists, request.init)
            self._admit(request, has_init)
            group = GroupMembers.of(request)
            folder = self.admission.checkpoint_folder(request)
            is_first = request.generation == 1
            if isinstance(folder, Inside) and not request.may_keep_nothing and is_first:
                await asyncio.to_thread(require_place, folder)
            await self._release(self.claim)
            if self._forgetting is not None:
                self._forgetting.cancel()
            self.driver.claim(request)
            await self.snapshot_store.open(request.job_id, folder, request.checkpoint_run)
            await self.snapshot_store.pause()
            claim = self.claim = Claim(
                request,
                group,
                self.snapshot_store,
                self.forks,
                self.dialer,
                self.admission,
                self._show,
                await asyncio.to_thread(self._job_folder.open, request.job_id),
                has_init,
            )
            self._idle.clear()
            self._forgotten.clear()
            try:
                await claim.open(list(request.code))
            except BaseException:
                await self._close(claim)
                raise
        self._log(claim, f"claims this server, from {driver}")
        asyncio.get_running_loop().call_later(UNWATCHED_SECONDS, self._release_unwatched, claim)
        return claim

    async def release(self, claim: Claim | None) -> None:
        """End a claim, if it is still the current one."""
        async with self._changing:
            await self._release(claim)

    async def _release(self, claim: Claim | None, is_stopped: bool = False) -> None:
        if claim is not None and claim is self.claim:
            if claim.error:
                self._log(claim, f"is lost: {one_line(from_wire(claim.error))}")
            elif is_stopped or claim.state == State.SERVER_STATE_ENDED:
                self._log(claim, "releases this server")
            else:
                held = f"; held for {seconds:.0f} s" if (seconds := self.driver.hold()) else ""
                self._log(claim, f"is lost: its driver has interrupted it, or is gone{held}")
            await self._close(claim)

    async def _close(self, claim: Claim) -> None:
        self.claim = None
        await asyncio.shield(claim.close())  # a caller may be cancelled
        seconds = max(self.driver.hold(), KEEP_SECONDS)
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = asyncio.get_running_loop().call_later(seconds, self._start_forgetting)
        self._idle.set()

    async def end(self, request: pb.StopRequest) -> None:
        """End a job for good, or this server's part in it, and drop its snapshots."""
        job_id, generation = request.job_id, request.generation
        async with self._changing:
            if self.driver.job_id == job_id and not self.driver.is_of(request.driver_id):
                raise TakenOverError(f"job {self.driver.job!r} is another driver's now")
            if self.claim is not None or self.snapshot_store.job_id != job_id:
                await self._release(self.claimed_by(job_id, generation), is_stopped=True)
            if request.dismisses:
                self.driver.clear()
            else:
                self.driver.end(request.ended_signature)
            await self._clear()

    def record(self, request: pb.RecordRequest) -> None:
        """Keep what the driver of the current claim records."""
        # The last words of a driver that is gone may be read after its connection has ended.
        job_id, generation = request.job_id, request.generation
        is_late = request.has_ended and self.driver.is_held(job_id, generation)
        if not is_late:
            self.claimed_by(job_id, generation)
        self.driver.record(request)
        if is_late:
            self._start_forgetting()

    def claimed_by(self, job_id: str, generation: int) -> Claim:
        """Return the current claim."""
        claim = self.claim
        if claim is None or (claim.job_id, claim.generation) != (job_id, generation):
            raise BusyError(f"this server does not belong to generation {generation} of the job")
        return claim

    async def watch(self, claim: Claim) -> AsyncIterator[pb.WatchResponse]:
        """Yield each change of the claim, with the worker's vitals; then the claim ends."""
        if claim.watched:
            raise BusyError("the job is watched already")
        claim.watched = True
        try:
            last, due, last_line = None, float("-inf"), 0
            clock = asyncio.get_running_loop().time
            while self.claim is claim:
                now = claim.snapshot()
                now.draining, now.leaves = self.draining, self.leaves
                lines = claim.lines.after(last_line)
                if lines and lines[-1].number < claim.lines.newest:
                    now.error = ""  # a watcher stops at an error, and there are more lines
                is_due = clock() >= due
                if now != last or lines or is_due:
                    last = pb.WatchResponse()
                    last.CopyFrom(now)
                    if is_due:
                        due = clock() + VITALS_SECONDS
                        now.vitals.CopyFrom(claim.vitals())
                    now.logs.extend(lines)
                    last_line = lines[-1].number if lines else last_line
                    yield now
                    continue  # something may have changed while the stream was busy
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due), claim.changed:
                        await claim.changed.wait()
        finally:
            await asyncio.shield(self.release(claim))

    @property
    def log_source(self) -> RecordSource:
        """The source of this server's own log records."""
        stage_index = self.admission.stage_index
        who = "spare" if stage_index is None else f"stage {stage_index}"
        claim = self.claim
        if claim is None:
            return RecordSource(who)
        return RecordSource(claim.stage_name or who, claim.generation, claim.step)

    def describe(self) -> pb.DescribeResponse:
        answer = pb.DescribeResponse(
            stage_index=self.admission.stage_index or 0,
            spare=self.admission.stage_index is None,
            replica=self.admission.replica,
            state=State.SERVER_STATE_IDLE,
            draining=self.draining,
            leaves=self.leaves,
            versions=self.admission.versions,
            supervisor_pid=os.getpid(),
            machine=machine(),
            holdings_of=self.snapshot_store.job_id,
            holdings=self.snapshot_store.holdings(),
            device=self.device,
        )
        if self.claim is None and (seconds := self.driver.holds_seconds):
            answer.state, answer.holds_s = State.SERVER_STATE_HOLDING, seconds
            answer.job, answer.generation = self.driver.job, self.driver.generation
            answer.step = max(self.driver.states)
        if self._examined:
            answer.state, answer.job = State.SERVER_STATE_PROFILING, self._examined
        if self.claim is not None:
            claim = self.claim
            answer.state = claim.state
            answer.job, answer.generation = claim.job, claim.generation
            answer.stage_name, answer.step = claim.stage_name, claim.step
            answer.num_parameters = claim.num_parameters
            answer.worker_pid = claim.worker_pid
            answer.worker_memory = resident_bytes(claim.worker_pid)
        return answer

    def _admit(self, request: pb.PrepareRequest, has_init: bool) -> None:
        """Refuse a job that must not run here, or not now.

        Raises:
            DrainingError: the server is being stopped, and another one may take its place.
            ConfigError, VersionError: see `Admission.require`.
            BusyError: it has another job, or measures for one. The next generation of its own job
                may claim it.
        """
        if self.draining:
            raise DrainingError("the server is being stopped")
        self.admission.require(request, has_init)
        if (claim := self.claim) is not None:
            is_next = request.job_id == claim.job_id and request.generation > claim.generation
            if not is_next:
                raise BusyError(f"busy with job {claim.job!r}")
        if self._examined:
            raise BusyError(f"busy measuring for job {self._examined!r}")

    def _log(self, claim: Claim, event: str) -> None:
        """Log what a job does. A driver that has started this server for its job need not read it.

        A driver that claims the server again and again cannot fill the log, which limits its rate.
        """
        if not self.works_for:
            log.info("job %r %s", claim.job[:NAME_CHARACTERS], event)

    def _start_forgetting(self) -> None:
        self._releasing = asyncio.ensure_future(self._forget())

    async def _forget(self) -> None:
        """Drop the snapshots of a driver that has not come back."""
        async with self._changing:  # another job may claim the server while a lot is removed
            if self.claim is not None or self.driver.holds_seconds:
                return
            if self.driver.states:
                log.info("job %r is held no longer: no driver has come for it", self.driver.job)
            self.driver.clear()
            await self._clear()

    async def _clear(self) -> None:
        """Drop what is kept of a job from one generation to the next."""
        self._forgotten.set()
        await asyncio.to_thread(self._job_folder.clear)
        await self.snapshot_store.clear()

    def _release_unwatched(self, claim: Claim) -> None:
        if not claim.watched:
            self._releasing = asyncio.ensure_future(self.release(claim))
