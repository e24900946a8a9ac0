"""One job's hold on a stage server: the worker process, its code, and what is known of it.

    CLAIMED ──start──> BUILDING ──joined──> RUNNING ──left──> ENDED
       └────────────────┴── failed, exited ────┴──────────────^

A claim belongs to one generation and one worker. It ends with the driver's Stop, or with the
driver's Watch stream: a driver that died by SIGKILL frees its servers by dying.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from rpcmp.errors import WorkerDiedError, one_line, to_wire
from rpcmp.process.channel import Message
from rpcmp.process.child import Child
from rpcmp.process.environment import compute_environment
from rpcmp.server import codefolder
from rpcmp.v1 import control_pb2 as pb

State = pb.ServerState


class Claim:
    """A job on this server.

    Args:
        request: what the driver asked for in Prepare.
    """

    def __init__(self, request: pb.PrepareRequest) -> None:
        self.job = request.job
        self.job_id = request.job_id
        self.generation = request.generation
        self.state: pb.ServerState.ValueType = State.SERVER_STATE_CLAIMED
        self.stage_name = ""
        self.step = 0
        self.num_parameters = 0
        self.error = ""
        self.exit_code = 0
        self.watched = False
        self.values: dict[str, bytes] = {}
        self.changed = asyncio.Condition()
        self._threads = request.threads
        self._folder: Path | None = None
        self._child: Child | None = None
        self._start: Message | None = None
        self._ready = False
        self._listening: asyncio.Task[None] | None = None

    @property
    def worker_pid(self) -> int:
        """Process id of the worker; 0 when there is none."""
        running = self._child is not None and self._child.exit_code is None
        return self._child.pid if self._child and running else 0

    async def open(self, code: list[pb.CodeFile]) -> None:
        """Unpack the job's code and spawn its worker.

        Raises:
            ConfigError: a file would land outside of the job's folder.
        """
        if code:
            self._folder = codefolder.unpack(code)
        environment = compute_environment(self._threads)
        self._child = await Child.spawn("rpcmp.worker", environment)
        self._listening = asyncio.create_task(self._listen(self._child))

    async def start(self, request: pb.StartRequest) -> None:
        """Tell the worker its stage and its place in the group; it may still be importing torch."""
        self.stage_name = request.stage_name
        self._start = {
            "assignment": request.assignment,
            "code_folder": str(self._folder) if self._folder else "",
            "rendezvous": request.rendezvous,
            "job_id": request.job_id,
            "generation": request.generation,
            "rank": request.rank,
            "members": list(request.members),
        }
        if self.state == State.SERVER_STATE_CLAIMED:
            await self._become(State.SERVER_STATE_BUILDING)
        self._start_if_ready()

    async def close(self) -> None:
        """End the worker and remove the job's code."""
        if self._child is not None:
            await self._child.kill()
        if self._listening is not None:
            self._listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listening
        if self._folder is not None:
            codefolder.remove(self._folder)
        await self._become(State.SERVER_STATE_ENDED)

    def snapshot(self) -> pb.WatchResponse:
        """What a watcher is told."""
        return pb.WatchResponse(
            generation=self.generation,
            state=self.state,
            error=self.error,
            exit_code=self.exit_code,
            num_parameters=self.num_parameters,
        )

    async def notify(self) -> None:
        """Wake up all who wait for a change, of the state or of the store."""
        async with self.changed:
            self.changed.notify_all()

    async def _become(self, state: pb.ServerState.ValueType) -> None:
        self.state = state
        await self.notify()

    async def _listen(self, child: Child) -> None:
        try:
            async for message in child.messages():
                await self._heard(message)
        except (ValueError, KeyError) as error:  # no message of ours: the worker's memory is broken
            self.error = to_wire(WorkerDiedError(f"the worker speaks nonsense: {one_line(error)}"))
            await child.kill()
        self.exit_code = await child.wait() or 0
        await child.kill()  # what the user's code has forked
        left = self.state == State.SERVER_STATE_ENDED
        if not left and not self.error:
            self.error = to_wire(WorkerDiedError(self._obituary(child)))
        await self._become(State.SERVER_STATE_ENDED)

    async def _heard(self, message: Message) -> None:
        match message["event"]:
            case "ready":
                self._ready = True
                self._start_if_ready()
            case "built":
                self.num_parameters = message["num_parameters"]
            case "joined":
                await self._become(State.SERVER_STATE_RUNNING)
            case "progress":
                self.step = message["step"]
            case "failed":
                self.error = message["error"]
                await self.notify()
            case "left":
                await self._become(State.SERVER_STATE_ENDED)

    def _start_if_ready(self) -> None:
        if self._ready and self._start is not None and self._child is not None:
            self._child.send(self._start)
            self._start = None

    def _obituary(self, child: Child) -> str:
        code = self.exit_code
        how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
        stage = repr(self.stage_name) if self.stage_name else "this server"
        return f"the worker of stage {stage} (pid {child.pid}) {how} at step {self.step + 1}"
