"""One job's hold on a stage server: the worker process, its code, and what is known of it.

    CLAIMED ──start──> BUILDING ──joined──> RUNNING ──left──> ENDED
       └────────────────┴── failed, exited ────┴──────────────^

A claim belongs to one generation and one worker. It ends with the driver's Stop, with the Prepare
of the next generation, or with the driver's Watch stream: a driver that died by SIGKILL frees its
servers by dying.

A worker that ends is noticed at once; one that is stopped, or that never lets go of Python's lock,
by its heartbeat, and is ended then.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from rpcmp.config.topology import DRIVER
from rpcmp.errors import SecurityError, WorkerDiedError, from_wire, to_wire
from rpcmp.net.dialer import Dialer
from rpcmp.net.identity import Role
from rpcmp.net.relay import Relay, RelayPeer
from rpcmp.process import interpreter, tempdirs
from rpcmp.process.activity import NO_MICROBATCH, Doing
from rpcmp.process.channel import Message
from rpcmp.process.child import Child
from rpcmp.process.confinement import Reach
from rpcmp.process.fork_client import Forks, NetworkOf
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.liveness import HeartbeatMonitor
from rpcmp.process.logging.records import Entry, Line, entry_of, pass_on
from rpcmp.server import claim_log
from rpcmp.server.access import GroupMembers
from rpcmp.server.claim_log import LogBuffer, WorkerVitals
from rpcmp.server.rendezvous import KeyValueStore, StoreProxy
from rpcmp.server.snapshot_store import SnapshotStore
from rpcmp.v1 import control_pb2 as pb

State = pb.ServerState

log = logging.getLogger(__name__)

NOTHING = Doing("", 0, NO_MICROBATCH, 0.0)

MAX_MESSAGE = 4 * 2**20
"""Bytes of a worker's longest message: an error, with where it was raised."""

MAX_WORD = 256
"""Characters of an address and of a device's name."""

SAVED_KEPT = 4
"""How many saves a watcher that is behind can still hear of; two are under way at most."""


class Claim:
    """A job on this server.

    Args:
        request: what the driver asked for in Prepare.
        group: of the request.
        vault: where the worker's snapshots lie.
        forks: where the worker comes from.
        dialer: how this server talks to others.
        allowed: see StageServer.
        show: told of each line that the worker says.
        reach: what the worker may open beyond the job's files; None: it is not confined.

    Attributes:
        group: as given.
        relay: carries the worker's connections to other networks.
        servers: of the members on other hosts, by where their agents listen.
        lines: what the worker says.
    """

    def __init__(
        self,
        request: pb.PrepareRequest,
        group: GroupMembers,
        vault: SnapshotStore,
        forks: Forks,
        dialer: Dialer,
        allowed: Sequence[str] | None = None,
        show: Callable[[Entry], None] = pass_on,
        reach: Reach | None = None,
    ) -> None:
        self.job = request.job
        self.job_id = request.job_id
        self.generation = request.generation
        self.state: pb.ServerState.ValueType = State.SERVER_STATE_CLAIMED
        self.stage_name = ""
        self.step = 0
        self.num_parameters = 0
        self.device = ""
        self.error = ""
        self.exit_code = 0
        self.watched = False
        self.values = KeyValueStore()
        self.changed = asyncio.Condition()
        self.saved: deque[pb.Saved] = deque(maxlen=SAVED_KEPT)
        self.lines = LogBuffer()
        self._vault = vault
        self.listens = ""
        self.servers: dict[str, str] = {}
        self._vitals = WorkerVitals()
        self._forks = forks
        self._dialer = dialer
        self._allowed = allowed
        self._show = show
        self._reach = reach
        self.group = group
        name = group.member(request.stage_index, request.replica)
        identity = (request.job_id, request.generation, name)
        self.relay = Relay(*identity, forks, dialer, self._refused)
        self._mirrored_by: int | None = None
        self._store: StoreProxy | None = None
        self._pulse = HeartbeatMonitor(request.heartbeat_timeout)
        self._threads = request.threads
        self._folder: Path | None = None
        self._child: Child | None = None
        self._start: Message | None = None
        self._ready = self._started = False
        self._finds_files = True
        self._tasks: list[asyncio.Task[None]] = []
        self._listening: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None

    @property
    def doing(self) -> Doing:
        """What the worker does, or did when it ended."""
        return self._child.activity.read() if self._child is not None else NOTHING

    @property
    def busy_seconds(self) -> dict[str, float]:
        """That the worker has computed, by kind of action ("F", "B", "W", "O")."""
        return self._vitals.busy_seconds

    @property
    def worker_pid(self) -> int:
        """Process id of the worker; 0 when there is none."""
        running = self._child is not None and self._child.exit_code is None
        return self._child.pid if self._child and running else 0

    def is_followed_by(self, request: pb.PrepareRequest) -> bool:
        """Whether `request` is of the same job's next generation."""
        return request.job_id == self.job_id and request.generation > self.generation

    async def open(self, code: list[pb.CodeFile]) -> None:
        """Unpack the job's code and spawn its worker.

        Raises:
            ConfigError: a file would land outside of the job's folder.
        """
        if code:
            self._folder = claim_log.unpack(code)
        self._vault.freed = lambda: self._tell({"op": "saved"})
        await self._spawn()
        self._tasks.append(asyncio.create_task(self._tell_mirrored()))

    async def _spawn(self) -> None:
        environment = compute_environment(self._threads)
        checkpoints = self._vault.folder  # the server's word for it, not the job's
        reach = self._reach and self._reach.reading(self._folder, checkpoints)
        self._finds_files = reach is None or bool(checkpoints and checkpoints.is_dir())
        self._child = await Child.spawn(
            "rpcmp.worker",
            environment,
            self._vault.slots.fds,
            self._forks,
            self._said,
            reach,
            MAX_MESSAGE,
        )
        self._listening = asyncio.create_task(self._listen(self._child))

    async def _spawn_again(self) -> None:
        """Replace a worker that cannot open a checkpoint, since its folder came after it."""
        if self._child is None or self._listening is None:
            raise AssertionError("no worker was spawned")
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        await self._child.kill()
        self._ready = False
        await self._spawn()

    async def start(self, request: pb.StartRequest) -> None:
        """Tell the worker its stage and its place in the group, as soon as it listens.

        Raises:
            CheckpointError, UnavailableError: what it has to begin with is not to be had.
        """
        self.stage_name = request.label
        self._store = StoreProxy.at(
            request.rendezvous, self._dialer, self.job_id, self.generation, self._tell
        )
        restore = request.restore if request.HasField("restore") else None
        self.step = restore.step if restore else 0
        self._mirrored_by = request.mirrored_by if request.HasField("mirrored_by") else None
        files = await self._vault.prepare(request.stage_name, restore, self.generation)
        if files and not self._finds_files:
            await self._spawn_again()
        await self._forks.add_address(request.rank)
        self._start = {
            "op": "start",
            "restore": {"step": restore.step, "files": files} if restore else None,
            "is_mirrored": request.is_mirrored,
            "saves": request.saves,
            # What has been restored in this run before was rehearsed then.
            "rehearses": restore is None or self.generation == 1,
            "assignment": request.assignment,
            "allowed": self._allowed,
            "code_folder": str(self._folder) if self._folder else "",
            "rank": request.rank,
            "members": list(request.members),
        }
        if self.state == State.SERVER_STATE_CLAIMED:
            await self._become(State.SERVER_STATE_BUILDING)
        self._start_if_ready()

    async def link(self, request: pb.LinkRequest) -> None:
        """Carry the worker's connections to those whom it cannot reach by itself."""
        peers = [
            RelayPeer(
                peer.name, peer.listens, peer.server, peer.stage_index if peer.server else None
            )
            for peer in request.peers
        ]
        self.servers = {peer.listens: peer.server or DRIVER for peer in peers}
        await self.relay.open(self.listens, peers)

    def require_may_fetch(self, role: Role | None, request: pb.FetchRequest) -> None:
        """Refuse what a certificate does not give a right to.

        Args:
            role: of the caller; None: there are no certificates.
            request: for a snapshot or a checkpoint's file.

        Raises:
            SecurityError: the caller may not have it.
        """
        if request.path:
            self.group.require_member(role, "read its checkpoints")
        elif request.newer:
            what = f"mirror stage {request.stage_name!r}"
            self.group.require_stage(role, self._mirrored_by, what)
        else:
            index = self.group.index(request.stage_name)
            self.group.require_stage(role, index, f"read snapshots of {request.stage_name!r}")

    async def network(self) -> NetworkOf:
        """Where the worker's agent will listen."""
        return await self._forks.network()

    async def close(self) -> None:
        """End the worker and remove the job's code."""
        self.values.close()
        if self._child is not None:
            await self._child.kill()
        tasks = [*self._tasks, *([self._listening] if self._listening is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.relay.close()
        if self._store is not None:
            await self._store.close()
        if self._folder is not None:
            tempdirs.remove(self._folder)
        await self._become(State.SERVER_STATE_ENDED)

    def snapshot(self) -> pb.WatchResponse:
        """What a watcher is told."""
        return pb.WatchResponse(
            generation=self.generation,
            state=self.state,
            error=self.error,
            exit_code=self.exit_code,
            num_parameters=self.num_parameters,
            saved=self.saved,
            listens=self.listens,
            device=self.device,
        )

    def vitals(self) -> pb.Vitals:
        """How the worker is at this moment; read from outside, whatever it does."""
        return self._vitals.message(self.worker_pid, self.doing, self.relay.round_trips)

    async def stacks(self) -> str:
        """Where in the code the worker is; empty where there is none."""
        return await self._child.where() if self._child is not None and self.worker_pid else ""

    def hear_all(self) -> None:
        """Hear now what the worker has said by now."""
        if self._child is not None:
            self._child.log.hear_all()

    async def notify(self) -> None:
        """Wake up all who wait for a change."""
        async with self.changed:
            self.changed.notify_all()

    async def _become(self, state: pb.ServerState.ValueType) -> None:
        self.state = state
        await self.notify()

    async def _listen(self, child: Child) -> None:
        try:
            async for message in child.messages():
                await self._heard(message)
        except (ValueError, KeyError, TypeError) as error:
            self.error = to_wire(child.talks_nonsense(error, self._worker))
            await child.kill()
        self.exit_code = await child.wait() or 0
        await child.kill()  # what the user's code has forked
        left = self.state == State.SERVER_STATE_ENDED
        if not left and not self.error:
            died = WorkerDiedError(self._obituary(child))
            self.error = to_wire(await child.was_hung() or died)
        await self._become(State.SERVER_STATE_ENDED)

    async def _heard(self, message: Message) -> None:
        self._pulse.beat()
        match message["event"]:
            case "ready":
                self._ready = True
                self._start_if_ready()
            case "built":
                count, device = message["num_parameters"], message["device"]
                found = pb.WatchResponse(num_parameters=count, device=device)  # of these types?
                self.num_parameters, self.device = found.num_parameters, found.device[:MAX_WORD]
            case "store" if self._store is not None:
                self._store.heard(message)
            case "joined":
                self.listens = pb.WatchResponse(listens=message["address"]).listens[:MAX_WORD]
                await self._become(State.SERVER_STATE_RUNNING)
            case "beat":
                self.step = max(self.step, self.doing.step)
                self._vitals.hear(message)
            case "snapshot":
                await self._snapshot_taken(pb.Saved(step=message["step"]).step)
            case "failed":
                self.hear_all()  # what it has said before comes first
                self.error = to_wire(from_wire(message["error"]))
                await self.notify()
            case "left":
                await self._become(State.SERVER_STATE_ENDED)

    def _start_if_ready(self) -> None:
        if self._ready and self._start is not None and self._child is not None:
            self._child.send(self._start)
            self._start, self._started = None, True
            self._tasks.append(asyncio.create_task(self._end_if_silent(self._child)))

    async def _end_if_silent(self, child: Child) -> None:
        """End a worker that gives no sign of life, and say where it was."""
        self._pulse.beat()
        seconds = await self._pulse.lost()
        if child.exit_code is None and self.state != State.SERVER_STATE_ENDED:
            self.error = to_wire(await child.hung(self.stage_name, seconds))
            await child.kill()

    def _refused(self, error: SecurityError) -> None:
        """End the job: a peer has sent the worker what it must not."""
        log.error("%s", error)
        self.error = to_wire(error)
        if self._child is not None:
            self._tasks.append(asyncio.create_task(self._child.kill()))
        self._tasks.append(asyncio.create_task(self.notify()))

    async def _snapshot_taken(self, step: int) -> None:
        """Somebody may wait for it; and it may have to go to the disk."""
        await self._vault.notify()
        self._vault.save_if_pinned(step, self._saved)

    def _said(self, line: Line) -> None:
        self.lines.add(line)
        self._show(entry_of(line, self.stage_name, self.generation))
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self.notify())

    async def _saved(self, saved: pb.Saved) -> None:
        self.saved.append(saved)
        await self.notify()

    async def _tell_mirrored(self) -> None:
        """Tell the worker what a neighbour holds."""
        async for step in self._vault.acknowledgements():
            self._tell({"op": "mirrored", "step": step})

    def _tell(self, message: Message) -> None:
        """Tell the worker something; one that has not been started has nothing to wait for."""
        if self._child is not None and self._started:
            self._child.send(message)

    @property
    def _worker(self) -> str:
        """What errors call the worker."""
        return f"the worker of {f'stage {self.stage_name!r}' if self.stage_name else 'this server'}"

    def _obituary(self, child: Child) -> str:
        place = f"on {platform.node()} (pid {child.pid})"
        doing = self.doing
        of = "" if doing.microbatch < 0 else f" of micro-batch {doing.microbatch}"
        what = f" in {doing.phase}{of}" if doing.phase else ""
        step = f" at step {doing.step}" if doing.step else ""
        died = f"{self._worker} {place} {interpreter.told(self.exit_code)}{what}{step}"
        return "\n".join(filter(None, [died, child.stacks.read()]))
