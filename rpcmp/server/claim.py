"""One job's claim on a stage server: the worker process, its code, and its state.

    CLAIMED ──start──> BUILDING ──joined──> RUNNING ──left──> ENDED
       └────────────────┴── failed, exited ────┴──────────────^

A claim belongs to one generation and one worker. It ends with the driver's Stop, with the Prepare
of the next generation, or with the driver's Watch stream: a driver that died by SIGKILL frees its
servers by dying.

A worker that exits is noticed at once. One that is stopped, or that never releases Python's lock,
is noticed by the kernel's word or its missing heartbeat, and killed.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rpcmp.config.topology import DRIVER
from rpcmp.errors import (
    ConfigError,
    SecurityError,
    UnreachableError,
    WorkerDiedError,
    from_wire,
    to_wire,
)
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.relay import Relay, RelayPeer
from rpcmp.process import resources
from rpcmp.process.activity import NO_MICROBATCH, Doing, HeartbeatMonitor
from rpcmp.process.channel import Message
from rpcmp.process.child import Child
from rpcmp.process.fork_client import WORKERS, Forks
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.logging.records import Entry, Line, entry_of
from rpcmp.server import claim_log
from rpcmp.server.access import GroupMembers
from rpcmp.server.admission import Admission
from rpcmp.server.claim_log import LogBuffer, WorkerVitals
from rpcmp.server.connection import MAX_JOINING
from rpcmp.server.device_claims import DeviceClaim
from rpcmp.server.job_folder import JobFiles
from rpcmp.server.rendezvous import KeyValueStore, StoreProxy
from rpcmp.server.snapshot_store import SnapshotStore
from rpcmp.v1 import control_pb2 as pb

State = pb.ServerState

log = logging.getLogger(__name__)

NOTHING = Doing("", 0, NO_MICROBATCH, 0.0)

MAX_MESSAGE = 4 * 2**20
"""Bytes of a worker's longest message: an error with its traceback."""

LESS_MEMORY = (
    "give the stage fewer layers, smaller micro-batches or `recompute = true`, or its host more "
    "memory"
)

MAX_WORD = 256
"""Characters of an address and of a device's name."""

SAVED_KEPT = 4
"""Finished saves that are kept for a watcher that lags behind; at most two are under way."""


class Claim:
    """A job on this server.

    Args:
        request: the driver's Prepare request, for `group`.
        admission: what the job may use here.
        show: see StageServer.
        files: what is kept of the job from one generation to the next.
        has_init: whether the weights to start from are on this host.

    Attributes:
        relay: carries the worker's connections to other networks.
        servers: addresses of the servers of remote members, by the address of their agents.
        lines: the worker's output.
        joining: spares that are to serve further stages.
    """

    def __init__(
        self,
        request: pb.PrepareRequest,
        group: GroupMembers,
        snapshot_store: SnapshotStore,
        forks: Forks,
        dialer: Dialer,
        admission: Admission,
        show: Callable[[Entry], None],
        files: JobFiles,
        has_init: bool,
    ) -> None:
        self.job, self.job_id = request.job, request.job_id
        self.generation = request.generation
        self.state: pb.ServerState.ValueType = State.SERVER_STATE_CLAIMED
        member = group.own(request)
        self.stage_name = member.label
        self.step = 0
        self.num_parameters = 0
        self.device = ""
        self._device_claim = DeviceClaim(request.job_id)
        self.error = ""
        self.exit_code = 0
        self.watched = False
        self.values = KeyValueStore()
        self.changed = asyncio.Condition()
        self.saved: deque[pb.Saved] = deque(maxlen=SAVED_KEPT)
        self.lines = LogBuffer()
        self._snapshot_store = snapshot_store
        self.listens = ""
        self.servers: dict[str, str] = {}
        self.worker_vitals = WorkerVitals()
        self._forks, self._dialer = forks, dialer
        self._admission, self._show = admission, show
        self.group = group
        identity = (request.job_id, request.generation, member.name)
        self.relay = Relay(*identity, forks, dialer, self._refused, self._cannot_reach)
        self.mirrored_by: int | None = None
        self.moves_layers = request.moves_layers
        self.joining: list[pb.JoinRequest] = []
        self._store: StoreProxy | None = None
        self._pulse = HeartbeatMonitor(request.heartbeat_timeout)
        self._threads = request.threads
        self.files, self.has_init = files, has_init
        self._folder: Path | None = None
        self._child: Child | None = None
        self._start: Message | None = None
        self._ready = self._started = False
        self._finds_files = True
        self._tasks: list[asyncio.Task[None]] = []
        self._listening: asyncio.Task[None] | None = None
        self._notifying: asyncio.Task[None] | None = None

    @property
    def doing(self) -> Doing:
        """The worker's current action, or its last one."""
        return self._child.activity.read() if self._child is not None else NOTHING

    @property
    def worker_pid(self) -> int:
        """Process id of the worker; 0 if it is not running."""
        return self._child.pid if self._child and self._child.exit_code is None else 0

    async def open(self, code: list[pb.CodeFile]) -> None:
        """Unpack the job's code and spawn its worker."""
        if code:
            self._folder = claim_log.unpack(code)
        store = self._snapshot_store
        store.freed = lambda: self._send({"op": "saved"})
        store.acknowledged = lambda step: self._send({"op": "mirrored", "step": step})
        await self._spawn()

    async def _spawn(self) -> None:
        checkpoints = self._snapshot_store.folder  # the server's word for it, not the job's
        file_access = self._admission.file_access
        file_access = file_access and file_access.reading(self._folder, checkpoints)
        # Nothing that a request names: a link there may be another one by now.
        file_access = file_access and file_access.reading(self.files.weights)
        file_access = file_access and file_access.writing(self.files.compiled)
        self._finds_files = file_access is None or bool(checkpoints and checkpoints.is_dir())
        self._child = await Child.spawn(
            WORKERS,
            compute_environment(self._threads),
            file_access,
            self._snapshot_store.inherited,
            self._forks,
            self._add_line,
            MAX_MESSAGE,
        )
        self._listening = asyncio.create_task(self._listen(self._child))
        self._tasks.append(asyncio.create_task(self._end_if_lost(self._child)))

    async def _spawn_again(self) -> None:
        """Replace a worker that was confined before the folder of checkpoints existed."""
        if self._child is None or self._listening is None:
            raise AssertionError("no worker was spawned")
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        await self._child.kill()
        self._ready = False
        await self._spawn()

    async def start(self, request: pb.StartRequest) -> None:
        """Send the worker its stage and its place in the group, as soon as it listens."""
        self._store = StoreProxy(
            *(request.rendezvous, request.rendezvous_stage, self._dialer),
            *(self.job_id, self.generation, self._send),
            await self.relay.reserve(request.elsewhere),
        )
        restore = request.restore if request.HasField("restore") else None
        self.step = restore.step if restore else 0
        self.mirrored_by = request.mirrored_by if request.HasField("mirrored_by") else None
        store = self._snapshot_store
        files, parts = await store.prepare(
            request.stage_name, restore, self.generation, request.cut
        )
        if files and not self._finds_files:
            await self._spawn_again()
        await self._forks.add_address(request.rank)
        self._start = {
            "op": "start",
            "restore": {"step": restore.step, "files": files, "parts": parts} if restore else None,
            "cut": request.cut,
            "is_mirrored": request.is_mirrored,
            "saves": request.saves,
            # A state restored by an earlier generation was rehearsed then.
            "rehearses": restore is None or self.generation == 1,
            "assignment": request.assignment,
            "allowed": self._admission.allowed,
            "code_folder": str(self._folder) if self._folder else "",
            "compiled": str(self.files.compiled),
            "init": str(self.files.weights) if request.reads_sent_init else "",
            "devices_here": list(request.devices_here),
            "place_here": request.place_here,
            "rank": request.rank,
            "members": list(request.members),
        }
        if self.state == State.SERVER_STATE_CLAIMED:
            await self._become(State.SERVER_STATE_BUILDING)
        self._start_if_ready()

    async def link(self, request: pb.LinkRequest) -> None:
        """Carry the worker's connections to the members that it cannot reach by itself."""
        peers = [
            RelayPeer(
                peer.name, peer.listens, peer.server, peer.stage_index if peer.server else None
            )
            for peer in request.peers
        ]
        self.servers = {peer.listens: peer.server or DRIVER for peer in peers}
        await self.relay.open(self.listens, peers)

    async def take_in(self, invited: pb.JoinRequest) -> None:
        """Let the driver know of a spare that is to serve a further stage."""
        if not self.moves_layers:
            raise ConfigError(f'job {self.job!r} does not move layers: it needs rebalance = "auto"')
        if self.group.is_replicated:
            raise ConfigError(f"job {self.job!r} has replicas, and no host can join or leave it")
        if len(self.joining) == MAX_JOINING:
            raise ConfigError(f"{MAX_JOINING} hosts are joining job {self.job!r} already")
        self.joining.append(invited)
        await self.notify()

    async def close(self) -> None:
        """Kill the worker and remove the job's code."""
        self.values.close()
        if self._child is not None:
            await self._child.kill()
        self._device_claim.release()
        tasks = [*self._tasks, *([self._listening] if self._listening is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.relay.close()
        if self._store is not None:
            await self._store.close()
        if self._folder is not None:
            resources.remove_folder(self._folder)
        await self._become(State.SERVER_STATE_ENDED)

    def snapshot(self) -> pb.WatchResponse:
        return pb.WatchResponse(
            generation=self.generation,
            state=self.state,
            error=self.error,
            exit_code=self.exit_code,
            num_parameters=self.num_parameters,
            saved=self.saved,
            listens=self.listens,
            device=self.device,
            joining=self.joining,
        )

    def vitals(self) -> pb.Vitals:
        """Return the worker's vitals; read from outside, so a busy worker does not delay them."""
        round_trips = self.relay.round_trips
        return self.worker_vitals.message(self.worker_pid, self.doing, round_trips, self.device)

    async def stacks(self) -> str:
        return await self._child.stack_dump() if self._child and self.worker_pid else ""

    def receive_pending(self) -> None:
        if self._child is not None:
            self._child.log.receive_pending()

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _become(self, state: pb.ServerState.ValueType) -> None:
        self.state = state
        await self.notify()

    async def _listen(self, child: Child) -> None:
        try:
            async for message in child.messages():
                await self._handle(message)
        except (ValueError, KeyError, TypeError) as error:
            self.error = to_wire(child.garbled_message_error(error, self._worker))
            await child.kill()
        self.exit_code = await child.wait() or 0
        await child.kill()  # what the user's code has forked
        if self.state != State.SERVER_STATE_ENDED and not self.error:
            self.error = to_wire(await child.hung_error() or self._died_error(child))
        await self._become(State.SERVER_STATE_ENDED)

    async def _handle(self, message: Message) -> None:
        self._pulse.beat()
        match message["event"]:
            case "ready":
                self._ready = True
                self._start_if_ready()
            case "devices":
                may_share = bool(message["may_share"])
                chosen = await self._device_claim.choose(message["candidates"], may_share)
                self._send({"op": "device", "device": chosen[0], "is_shared": chosen[1]})
            case "built":
                count, device = message["num_parameters"], message["device"]
                built = pb.WatchResponse(num_parameters=count, device=device)  # checks the types
                self.num_parameters, self.device = built.num_parameters, built.device[:MAX_WORD]
            case "store" if self._store is not None:
                self._store.handle(message)
            case "joined":
                self.listens = pb.WatchResponse(listens=message["address"]).listens[:MAX_WORD]
                self._snapshot_store.parts.free()  # the worker has copied what it needs
                await self._become(State.SERVER_STATE_RUNNING)
            case "beat":
                self.step = max(self.step, self.doing.step)
                self.worker_vitals.update(self.relay.with_agents(message))
            case "snapshot":
                step = pb.Saved(step=message["step"]).step
                await self._snapshot_store.add_written()
                self._snapshot_store.save_if_pinned(step, self._add_saved)
            case "failed":
                self.receive_pending()  # lines that it has logged before come first
                self.error = to_wire(from_wire(message["error"]))
                await self.notify()
            case "left":
                await self._become(State.SERVER_STATE_ENDED)

    def _start_if_ready(self) -> None:
        if self._ready and self._start is not None and self._child is not None:
            self._child.send(self._start)
            self._start, self._started = None, True
            self._pulse.begin()

    async def _end_if_lost(self, child: Child) -> None:
        """Kill a worker that is stopped or has no heartbeat, and report where it was."""
        seconds = await self._pulse.lost(child.pid)
        if (
            child is self._child
            and child.exit_code is None
            and self.state != State.SERVER_STATE_ENDED
        ):
            self.error = to_wire(await child.record_hang(self.stage_name, seconds))
            await child.kill()

    def _refused(self, error: SecurityError) -> None:
        """End the job: a peer has sent the worker a message that the protocol does not allow."""
        log.error("%s", error)
        self.error = to_wire(error)
        if self._child is not None:
            self._tasks.append(asyncio.create_task(self._child.kill()))
        self._tasks.append(asyncio.create_task(self.notify()))

    def _cannot_reach(self, error: UnreachableError) -> None:
        """Let the driver form another group, unless it does so already."""
        if not self.error and self.state != State.SERVER_STATE_ENDED:
            self.error = to_wire(error)
            self._tasks.append(asyncio.create_task(self.notify()))

    def _add_line(self, line: Line) -> None:
        self.lines.add(line)
        self._show(entry_of(line, self.stage_name, self.generation))
        if self._notifying is None or self._notifying.done():
            self._notifying = asyncio.create_task(self.notify())

    async def _add_saved(self, saved: pb.Saved) -> None:
        self.saved.append(saved)
        await self.notify()

    def _send(self, message: Message) -> None:
        """Send a message to the worker once it has been started; before, it expects none."""
        if self._child is not None and self._started:
            self._child.send(message)

    @property
    def _worker(self) -> str:
        return f"the worker of stage {self.stage_name!r}"

    def _died_error(self, child: Child) -> WorkerDiedError:
        doing = self.doing
        microbatch = "" if doing.microbatch < 0 else f" of micro-batch {doing.microbatch}"
        phase = f" in {doing.phase}{microbatch}" if doing.phase else ""
        step = f" at step {doing.step}" if doing.step else ""
        how = child.describe_exit(f"{phase}{step}", LESS_MEMORY)
        died = f"{self._worker} on {platform.node()} (pid {child.pid}) {how}"
        return WorkerDiedError("\n".join(filter(None, [died, child.stacks.read()])))
