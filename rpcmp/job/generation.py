"""One group from birth to end: one generation of a job.

    (1) the driver process plans                           driver ──planned──> session
    (2) meanwhile every server is claimed and watched      session ──Prepare, Watch──> servers
    (3) each worker gets its stage and joins               session ──Start, Mirror──> servers
    (4) all have joined: connections that have to cross
        hosts are carried from now on                      session ──Link──> servers
    (5) the driver may train                               session ──train, serve──> driver
    (6) the end, good or bad: all processes are gone, what the servers hold is kept

Whatever goes wrong anywhere fails `failure`, and everybody who waits for anything waits for that
too, so the first error ends the generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from rpcmp.config.schema import Config, ScheduleOptions
from rpcmp.config.topology import DRIVER
from rpcmp.errors import DrainingError, RpcmpError, WorkerDiedError, from_wire
from rpcmp.job import code
from rpcmp.job.first_failure import FirstFailure, Watchdog, both
from rpcmp.job.outputs import OutputFiles
from rpcmp.job.restore_planner import Choose, RestorePoint, afresh
from rpcmp.job.server_pool import ServerPool
from rpcmp.job.telemetry import Vitals
from rpcmp.job.worker_group import Identity, WorkerGroup
from rpcmp.net.relay import Relay
from rpcmp.observability.events.definitions import WarningEvent, parse
from rpcmp.observability.events.event import Event, ProcessPlace, WorkerPlace
from rpcmp.process import interpreter
from rpcmp.process.channel import Message
from rpcmp.process.child import Child
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.liveness import HeartbeatMonitor
from rpcmp.process.logging.records import Entry, Line, entry_of, pass_on
from rpcmp.server.rendezvous import StoreProxy

LEAVE_SECONDS = 15.0
"""How long the group may take to end by itself before it is ended."""

LAST_WORDS_SECONDS = 1.0
"""How long it may take to read what a driver process has said before it ended."""

DRIVER_MESSAGES = ("planned", "joined", "progress", "segment", "done")
"""What the driver process sends to this one besides the events of the run."""

EXPLAIN_SECONDS = 2.0
"""A lost connection says little; how long to wait for the server to say why."""


class Generation:
    """A job's group.

    Args:
        config: the job.
        fleet: its servers, opened.
        generation: of the group.
        load_data: whether the driver process loads the datasets of `[data]`.
        fds: given to the driver process.
        settings: what the job may change to on the way.
        choose: where to begin.
        vitals: told how its processes are.
        log: told of each line that a worker or the driver process says.

    Attributes:
        generation: as given.
        draining: the name of a stage whose server is being stopped; empty: none.
        begin: where it began.
    """

    def __init__(
        self,
        config: Config,
        fleet: ServerPool,
        generation: int = 1,
        load_data: bool = True,
        fds: Sequence[int] = (),
        settings: Sequence[ScheduleOptions] = (),
        choose: Choose = afresh,
        vitals: Vitals | None = None,
        log: Callable[[Entry], None] = pass_on,
    ) -> None:
        self._config = config
        self.generation = generation
        self._load_data = load_data
        self._fds = fds
        self._reach = fleet.reach
        self._outputs = OutputFiles(None)
        self._forks = fleet.forks
        self._dialer = fleet.dialer
        self._identity = Identity(fleet.job_id, generation)
        self._failure = FirstFailure()
        refused = self._failure.fail
        identity = (fleet.job_id, generation, DRIVER)
        self._relay = Relay(*identity, fleet.forks, fleet.dialer, refused)
        self._store: StoreProxy | None = None
        self._settings = settings
        self._choose = choose
        self._log = log
        self._is_heard_out = False
        self._events: asyncio.Queue[Event | Message] = asyncio.Queue()
        self._vitals = vitals or Vitals()
        self._stages = WorkerGroup(
            config,
            self._identity,
            fleet.addresses,
            fleet.run_folder,
            fleet.dialer,
            self._failure,
            self._note,
            self._vitals,
            log,
        )
        self._driver: Child | None = None
        self._listening: asyncio.Task[None] | None = None
        self._pulse = HeartbeatMonitor(config.recovery.heartbeat_timeout)
        self._watchdog = Watchdog(config.recovery.watchdog, self._stages)
        self.draining = ""
        self.begin = RestorePoint()

    async def start(self) -> None:
        """Bring the group to life; returns when the driver may train.

        Raises:
            RpcmpError: why it cannot; call `close` all the same.
        """
        files = code.collect(self._config.folder) if self._config.ship_code else []
        both_ready = both(self._plan(), self._stages.claim(files))
        assignments, _ = await self._failure.unless_failed(both_ready)
        self._failure.follow(self._watchdog.run())
        await self._failure.unless_failed(self._join(assignments))

    async def _plan(self) -> list[str]:
        """The driver process's plan: the assignment of every stage."""
        environment = compute_environment(threads=1)
        driver = await Child.spawn(
            "rpcmp.driver", environment, self._fds, self._forks, self._said, self._reach
        )
        self._driver, self._outputs = driver, OutputFiles(driver.scratch)
        self._listening = self._failure.follow(self._listen(driver))
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
        self._failure.follow(self._end_driver_if_silent(driver))
        assignments: list[str] = planned["assignments"]
        return assignments

    @property
    def worker_places(self) -> dict[str, WorkerPlace]:
        """Where every worker is, by its label, once its servers are claimed."""
        return self._stages.places

    @property
    def driver_place(self) -> ProcessPlace:
        """Where the driver process is."""
        return {"host": platform.node(), "pid": 0 if self._driver is None else self._driver.pid}

    def send(self, message: Message) -> None:
        """Send a message to the driver process."""
        if self._driver is not None:
            self._driver.send(message)

    def train(self, order: Message) -> None:
        """Have the driver process train; `deliver` what it writes when it has done."""
        self.send(self._outputs.redirect(order))

    async def deliver(self) -> None:
        """Put the files that the driver process has written where they go.

        Raises:
            ConfigError: one cannot be written there.
        """
        await asyncio.to_thread(self._outputs.deliver)

    async def next_event(self) -> Event | Message:
        """Return the next event of the run, or the next message about its course.

        Messages are "draining" (a server is being stopped), "saved" (one has written its part of a
        checkpoint), and the driver process's "progress", "segment" and "done".

        Raises:
            RpcmpError: the job has failed.
        """
        if not self._events.empty():  # whatever was reported before the failure comes first
            return self._events.get_nowait()
        return await self._failure.unless_failed(self._events.get())

    def end_on_failure(self) -> None:
        """End the driver process as soon as the job has failed, so that nobody waits for it."""
        if self._driver is not None:
            self._failure.when_failed(self._driver.kill)

    async def reason(self, timeout: float) -> RpcmpError | None:
        """Why the job has failed; waits up to `timeout` seconds for somebody to know."""
        return await self._failure.reason(timeout)

    async def wait_for_end(self) -> None:
        """Wait until the group has ended by itself."""
        self._failure.ignore()
        if self._driver is not None:
            await self._driver.wait(LEAVE_SECONDS)
        await self._hear_out()

    async def remove(self, folder: Path) -> None:
        """Remove a checkpoint from the disks of other machines than this one.

        Raises:
            CheckpointError: one cannot.
        """
        await self._stages.remove(folder)

    async def abandon(self) -> list[Event | Message]:
        """End the driver process; what it had to say and nobody has heard yet.

        The servers stay claimed, so that nobody else takes them before the next generation does.
        """
        self._failure.ignore()
        if self._driver is not None:
            await self._driver.kill()
        await self._hear_out()
        if self._listening is not None:
            await asyncio.wait([self._listening], timeout=LAST_WORDS_SECONDS)
        unheard = []
        while not self._events.empty():
            unheard.append(self._events.get_nowait())
        return unheard

    def let_go(self) -> None:
        """Free the servers that are being stopped: nobody asks them for anything any more."""
        self._stages.end()

    async def close(self) -> None:
        """End whatever still runs; the servers end their workers when nobody watches."""
        self._failure.ignore()
        if self._driver is not None:
            await self._driver.kill()
        await self._hear_out()
        await self._failure.close()
        await self._relay.close()
        if self._store is not None:
            await self._store.close()
        await self._stages.close()

    async def _join(self, assignments: list[str]) -> None:
        self.begin = await self._choose(assignments, self._stages.holdings)
        await self._stages.start(assignments, self.begin.restores, self.begin.step)
        self._store = StoreProxy.at(
            self._stages.rendezvous, self._dialer, **vars(self._identity), send=self.send
        )
        await self._forks.add_address(len(assignments))
        self.send({"op": "join", **self._stages.place(rank=len(assignments))})
        joined = await self._expect("joined")
        self._vitals.joined(joined["address"])
        await self._stages.wait_until_running()
        await self._link(joined["address"])

    async def _link(self, listens: str) -> None:
        """Carry connections between members that do not reach each other by themselves."""
        network = await self._forks.network()
        exposed = {**self._stages.exposed, **({"driver": network.reason} if network.reason else {})}
        if exposed:
            where, why = ", ".join(exposed), "; ".join(sorted(set(exposed.values())))
            text = f"other users of their hosts can reach the processes of {where}: {why}"
            self._events.put_nowait(WarningEvent(text=text))
        if problems := self._stages.keep_nothing:
            text = f"a run that has to give up leaves nothing: {'; '.join(problems)}"
            self._events.put_nowait(WarningEvent(text=text))
        away = await self._stages.link(network.name, listens)
        await self._relay.open(listens, away)
        for peer in away:
            self._relay.wait_for(peer)

    async def _listen(self, driver: Child) -> None:
        try:
            async for message in driver.messages():
                await self._heard(driver, message)
        except (ValueError, LookupError, TypeError) as nonsense:
            raise driver.garbled_message_error(nonsense, "the driver process") from nonsense
        code = await driver.wait()
        died = f"the driver process (pid {driver.pid}) {interpreter.describe_exit(code)}"
        error = WorkerDiedError("\n".join(filter(None, [died, driver.stacks.read()])))
        error.stage = DRIVER
        raise await driver.hung_error() or error

    async def _heard(self, driver: Child, message: Message) -> None:
        self._pulse.beat()
        match message["event"]:
            case "beat":
                self._heard_beat(driver, message)
                return
            case "store" if self._store is not None:
                self._store.handle(message)
                return
            case "error":
                error = from_wire(message["error"])
                if isinstance(error, WorkerDiedError):  # its server knows better what happened
                    await asyncio.sleep(EXPLAIN_SECONDS)
                raise error
            case "done":  # what breaks now is the group's orderly end
                self._failure.ignore()
        is_own = message["event"] in DRIVER_MESSAGES
        event = message if is_own else parse(message)
        if event is None:
            raise ValueError(f"{message['event']!r} is no event of a run")
        self._events.put_nowait(event)

    def _heard_beat(self, driver: Child, beat: Message) -> None:
        doing, carried = driver.activity.read(), self._relay.round_trips
        self._watchdog.note(doing)
        self._vitals.hear_driver(driver.pid, doing, beat["ways"], carried, beat["tensors"])

    async def _end_driver_if_silent(self, driver: Child) -> None:
        self._pulse.beat()
        seconds = await self._pulse.lost()
        raise await driver.record_hang(DRIVER, seconds)

    async def _expect(self, name: str) -> Message:
        while True:
            match await self._events.get():
                case dict() as message if message["event"] == name:
                    return message
            if self.draining:
                raise DrainingError(f"the server of stage {self.draining!r} is being stopped")

    async def _hear_out(self) -> None:
        """Have all told that the workers have said; once, at the group's end."""
        if not self._is_heard_out:
            self._is_heard_out = True
            await self._stages.hear_out()

    def _said(self, line: Line) -> None:
        with contextlib.suppress(OSError):  # nobody reads the output: the next event ends the run
            self._log(entry_of(line, DRIVER, self.generation))

    def _note(self, message: Message) -> None:
        if message["event"] == "draining":
            if self.draining:
                return
            self.draining = message["stage"]
        self._events.put_nowait(message)
