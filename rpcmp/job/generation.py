"""One generation of a job: a group of processes from its start to its end.

    (1) the driver process plans                        driver ──planned──> generation
    (2) meanwhile every server is claimed and watched   generation ──Prepare, Watch──> servers
    (3) each worker gets its stage and joins            generation ──Start, Mirror──> servers
    (4) once all have joined, connections that have
        to cross hosts are relayed                      generation ──Link──> servers
    (5) the driver may train                            generation ──train, serve──> driver
    (6) all processes end; the servers keep the snapshots that they hold

A failure anywhere goes to `FirstFailure`. Everything that waits also waits for a failure, so the
first one ends the generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER
from rpcmp.errors import DrainingError, WorkerDiedError, from_wire
from rpcmp.job.driver_record import DriverRecord
from rpcmp.job.failure_detection import FirstFailure, Watchdog, task_group
from rpcmp.job.restore_point import ChooseRestorePoint, RestorePoint, from_config
from rpcmp.job.server_calls import shipped_code
from rpcmp.job.server_pool import ServerPool
from rpcmp.job.vitals import Vitals
from rpcmp.job.worker_group import WorkerGroup
from rpcmp.net.relay import Relay
from rpcmp.observability.events import Event, ProcessPlace, WarningEvent, parse
from rpcmp.process.activity import HeartbeatMonitor
from rpcmp.process.channel import Message
from rpcmp.process.child import Child
from rpcmp.process.fork_client import DRIVERS
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.logging.records import Entry, Line, entry_of, pass_on
from rpcmp.server.rendezvous import StoreProxy

LEAVE_SECONDS = 15.0
"""How long the group may take to end by itself before it is killed."""

LAST_WORDS_SECONDS = 1.0
"""How long to read the messages of a driver process that has ended."""

LESS_MEMORY = "use a smaller data.batch_size or fewer data.num_workers, or give it more memory"

DRIVER_MESSAGES = ("planned", "joined", "progress", "segment", "paused", "done")
"""The messages of the driver process besides the events of the run."""

EXPLAIN_SECONDS = 2.0
"""How long to wait for a server to explain a lost connection, which by itself says little."""


class GroupPlan(BaseModel):
    """What each worker gets, in the config's order; see WorkerGroup.start."""

    assignments: list[str]
    weights: list[list[str] | None]


class Generation:
    """The driver process and the workers of one generation.

    Args:
        number: of the generation, counted from 1.
        load_data: whether the driver process loads the datasets of `[data]`.
        settings: the schedules that the job may change to later.
        choose: chooses the state to start from.
        record: see WorkerGroup.

    Attributes:
        draining: the name of a stage whose server is being stopped; empty: none.
        restore_point: the state that it started from.
    """

    def __init__(
        self,
        config: Config,
        pool: ServerPool,
        number: int = 1,
        load_data: bool = True,
        fds: Sequence[int] = (),
        settings: Sequence[ScheduleOptions] = (),
        choose: ChooseRestorePoint = from_config,
        vitals: Vitals | None = None,
        log: Callable[[Entry], None] = pass_on,
        record: DriverRecord | None = None,
    ) -> None:
        self._config = config
        self.number = number
        self._load_data = load_data
        self._fds = fds
        self._pool = pool
        self.failure = FirstFailure()
        self._relay = Relay(
            *(pool.job_id, number, DRIVER),
            forks=pool.forks,
            dialer=pool.dialer,
            on_refused=self.failure.fail,
            on_unreachable=self.failure.fail,
        )
        self._store: StoreProxy | None = None
        self._settings = settings
        self._choose = choose
        self._log = log
        self._has_drained_logs = False
        self._events: asyncio.Queue[Event | Message] = asyncio.Queue()
        self._deferred: deque[Event | Message] = deque()  # while the group was forming
        self._is_drained = False
        self._vitals = vitals or Vitals()
        self.workers = WorkerGroup(
            *(config, pool, number, self.failure, self._receive_from_worker, self._vitals, log),
            record,
        )
        self._driver: Child | None = None
        self._listening: asyncio.Task[None] | None = None
        self._heartbeat = HeartbeatMonitor(config.recovery.heartbeat_timeout)
        self._watchdog = Watchdog(config.recovery.watchdog, self.workers.inspect)
        self.draining = ""
        self.restore_point = RestorePoint()

    async def start(self) -> None:
        plan = await self.failure.unless_failed(self._plan_and_claim())
        self.failure.supervise(self._watchdog.run())
        await self.failure.unless_failed(self._join(plan))

    async def _plan_and_claim(self) -> GroupPlan:
        code = shipped_code(self._config)
        async with task_group() as tasks:
            plan = tasks.create_task(self._plan())
            tasks.create_task(self.workers.claim(code))
        return plan.result()

    async def _plan(self) -> GroupPlan:
        """Start the driver process, and let it plan."""
        environment = compute_environment(threads=1)
        driver = await Child.spawn(
            DRIVERS,
            environment,
            self._pool.file_access,
            self._fds,
            self._pool.forks,
            self._log_driver,
        )
        self._driver = driver
        self._listening = self.failure.supervise(self._listen(driver))
        self.failure.supervise(self._kill_driver_if_lost(driver))
        self.send(
            {
                "op": "plan",
                "config": self._config.model_dump_json(),
                "folder": str(self._config.folder),
                "load_data": self._load_data,
                "settings": [setting.model_dump() for setting in self._settings],
            }
        )
        planned = await self._expect("planned")
        self._heartbeat.begin()
        try:
            plan = GroupPlan.model_validate(planned)
            if not len(plan.assignments) == len(plan.weights) == len(self._config.workers):
                raise ValueError("a plan for another number of workers")
        except ValueError as error:  # pydantic's is one; the job's code runs there
            raise _garbled(driver, error) from error
        return plan

    @property
    def driver_place(self) -> ProcessPlace:
        return {"host": platform.node(), "pid": 0 if self._driver is None else self._driver.pid}

    @property
    def driver_scratch(self) -> Path | None:
        """The temporary folder of the driver process; None: it is not confined."""
        return None if self._driver is None else self._driver.scratch

    def send(self, message: Message) -> None:
        if self._driver is not None:
            self._driver.send(message)

    async def next_event(self) -> Event | Message:
        """Return the next event of the run, or the next message about its course.

        Messages are "draining" (a server is being stopped), "joining" (a spare is to serve a
        further stage), "saved" (a server has written its part of a checkpoint), and the driver
        process's "progress", "segment", "paused" and "done".
        """
        if self._deferred:
            return self._deferred.popleft()
        if not self._events.empty():  # whatever was reported before the failure comes first
            return self._events.get_nowait()
        return await self.failure.unless_failed(self._events.get())

    def kill_driver_on_failure(self) -> None:
        """Kill the driver process on a failure, so that its caller stops waiting."""

        async def kill(driver: Child) -> None:
            await self.failure.reason()
            await driver.kill()

        if self._driver is not None:
            self.failure.supervise(kill(self._driver))

    async def wait_for_end(self) -> None:
        self.failure.ignore()
        if self._driver is not None:
            await self._driver.wait(LEAVE_SECONDS)
        await self._drain_logs()

    async def abandon(self) -> list[Event | Message]:
        """Kill the driver process and return its events that have not been read.

        The servers stay claimed, so that no other job takes them before the next generation does.
        """
        self.failure.ignore()
        if self._driver is not None:
            await self._driver.kill()
        await self._drain_logs()
        if self._listening is not None:
            await asyncio.wait([self._listening], timeout=LAST_WORDS_SECONDS)
        unread = list(self._deferred)
        self._deferred.clear()
        while not self._events.empty():
            unread.append(self._events.get_nowait())
        return unread

    async def close(self) -> list[Event | Message]:
        """End all processes, after up to LAST_WORDS_SECONDS for what the driver still reports.

        The servers end their workers when they are no longer watched.

        Returns:
            The events that have not been read; servers may have told of others since `abandon`.
        """
        unread = await self.abandon()
        await self.failure.close()
        await self._relay.close()
        if self._store is not None:
            await self._store.close()
        await self.workers.close()
        return unread

    async def _join(self, plan: GroupPlan) -> None:
        self.restore_point = await self._choose(plan.assignments, self.workers.holdings)
        network = (await self._pool.forks.network()).name
        await self.workers.start(plan.assignments, plan.weights, self.restore_point, network)
        where, stage_index = self.workers.rendezvous
        self._store = StoreProxy(
            *(where, stage_index, self._pool.dialer),
            *(self._pool.job_id, self.number, self.send),
            await self._relay.reserve(self.workers.elsewhere(network, network)),
        )
        rank = len(plan.assignments)
        await self._pool.forks.add_address(rank)
        self.send({"op": "join", **self.workers.membership(rank)})
        joined = await self._expect("joined")
        self._vitals.add_driver_address(joined["address"])
        await self.workers.wait_until_running()
        await self._link(joined["address"])

    async def _link(self, driver_address: str) -> None:
        network = await self._pool.forks.network()
        exposed = self.workers.exposed | ({DRIVER: network.reason} if network.reason else {})
        if exposed:
            where, why = ", ".join(exposed), "; ".join(sorted(set(exposed.values())))
            text = f"other users of their hosts can reach the processes of {where}: {why}"
            self._events.put_nowait(WarningEvent(text=text))
        if problems := self.workers.checkpoint_problems:
            text = f"a run that has to give up leaves nothing: {'; '.join(problems)}"
            self._events.put_nowait(WarningEvent(text=text))
        for text in self.workers.shared_devices:
            self._events.put_nowait(WarningEvent(text=text))
        unreachable = await self.workers.link(network.name, driver_address)
        await self._relay.open(driver_address, unreachable)
        for peer in unreachable:
            self._relay.park_at(peer)

    async def _listen(self, driver: Child) -> None:
        try:
            async for message in driver.messages():
                await self._receive_from_driver(driver, message)
        except (ValueError, LookupError, TypeError) as nonsense:
            raise _garbled(driver, nonsense) from nonsense
        await driver.wait()
        died = f"the driver process (pid {driver.pid}) {driver.describe_exit('', LESS_MEMORY)}"
        error = WorkerDiedError("\n".join(filter(None, [died, driver.stacks.read()])))
        error.stage = DRIVER
        raise await driver.hung_error() or error

    async def _receive_from_driver(self, driver: Child, message: Message) -> None:
        self._heartbeat.beat()
        match message["event"]:
            case "beat":
                message = self._relay.with_agents(message)
                doing, carried = driver.activity.read(), self._relay.round_trips
                self._watchdog.update_driver(doing)
                counts = (message["ways"], message["tensors"]) if "ways" in message else None
                self._vitals.update_driver(driver.pid, doing, carried, counts)
                return
            case "store" if self._store is not None:
                self._store.handle(message)
                return
            case "error":
                error = from_wire(message["error"])
                if isinstance(error, WorkerDiedError):  # its server knows better what happened
                    await self.failure.reason(EXPLAIN_SECONDS)
                raise error
            case "done":  # connections that break from here on belong to an orderly end
                self.failure.ignore()
        event = message if message["event"] in DRIVER_MESSAGES else parse(message)
        if event is None:
            raise ValueError(f"{message['event']!r} is no event of a run")
        self._events.put_nowait(event)

    def _receive_from_worker(self, message: Message) -> None:
        if message["event"] == "draining":
            self.draining = self.draining or message["stage"]
            self._is_drained = self._is_drained or not message["leaves"]
        self._events.put_nowait(message)

    async def _kill_driver_if_lost(self, driver: Child) -> None:
        seconds = await self._heartbeat.lost(driver.pid)
        raise await driver.record_hang(DRIVER, seconds)

    async def _expect(self, name: str) -> Message:
        while True:
            match await self._events.get():
                case dict() as message if message["event"] == name:
                    return message
                case other:
                    self._deferred.append(other)
            if self._is_drained:  # one that leaves may be the only one that holds its state
                raise DrainingError(f"the server of stage {self.draining!r} is being stopped")

    async def _drain_logs(self) -> None:
        if not self._has_drained_logs:
            self._has_drained_logs = True
            await self.workers.drain_logs()

    def _log_driver(self, line: Line) -> None:
        with contextlib.suppress(OSError):  # the output is closed: the next event ends the run
            self._log(entry_of(line, DRIVER, self.number))


def _garbled(driver: Child, error: Exception) -> WorkerDiedError:
    garbled = driver.garbled_message_error(error, "the driver process")
    garbled.stage = DRIVER
    return garbled
