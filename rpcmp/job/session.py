"""One group from birth to end: stage servers claimed, workers and driver process joined.

    (1) the driver process imports torch and plans         driver ──planned──> session
    (2) meanwhile every server is claimed and watched      session ──Prepare, Watch──> servers
    (3) each worker gets its stage and joins               session ──Start──> servers
    (4) all have joined: the driver may train              session ──train, serve──> driver
    (5) the end, good or bad: every server is freed        session ──Stop──> servers

Whatever goes wrong anywhere fails `failure`, and everybody who waits for anything waits for that
too, so the first error ends the job.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from rpcmp.config import Config
from rpcmp.errors import DrainingError, RpcmpError, WorkerDiedError, from_wire
from rpcmp.job import code
from rpcmp.job.failure import FirstFailure, both
from rpcmp.job.stages import Identity, Stages
from rpcmp.process.channel import Message
from rpcmp.process.child import Child
from rpcmp.process.environment import compute_environment
from rpcmp.setting import Setting

LEAVE_SECONDS = 15.0
"""How long the group may take to end by itself before it is ended."""

EXPLAIN_SECONDS = 2.0
"""A lost connection says little; how long to wait for the server to say why."""


class Session:
    """A job's group.

    Args:
        config: the job.
        connect: addresses of running stage servers; None uses the config's or, where it has
            none, starts servers on this machine.
        load_data: whether the driver process loads the datasets of `[data]`.
        arguments, pass_fds: given to the driver process.
        settings: what the job may change to on the way.

    Attributes:
        draining: the name of a stage whose server is being stopped; empty: none.

    Raises:
        ConfigError: the addresses do not fit the config.
    """

    def __init__(
        self,
        config: Config,
        connect: Sequence[str] | None = None,
        load_data: bool = True,
        arguments: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        settings: Sequence[Setting] = (),
    ) -> None:
        self._config = config
        self._load_data = load_data
        self._arguments, self._pass_fds = arguments, pass_fds
        self._settings = settings
        self._events: asyncio.Queue[Message] = asyncio.Queue()
        self._failure = FirstFailure()
        self._stages = Stages(
            config,
            Identity(job_id=uuid.uuid4().hex, generation=1),
            config.addresses if connect is None else connect,
            self._failure,
            self._note_draining,
        )
        self._driver: Child | None = None
        self.draining = ""

    async def start(self) -> None:
        """Bring the group to life; returns when the driver may train.

        Raises:
            RpcmpError: why it cannot; call `close` all the same.
        """
        files = code.collect(self._config.folder) if self._config.ship_code else []
        self._driver = await Child.spawn(
            "rpcmp.driver", compute_environment(threads=1), self._arguments, self._pass_fds
        )
        self._failure.follow(self._listen(self._driver))
        self.send(
            {
                "op": "plan",
                "config": self._config.model_dump_json(),
                "folder": str(self._config.folder),
                "load_data": self._load_data,
                "settings": [setting.model_dump() for setting in self._settings],
            }
        )
        both_ready = both(self._expect("planned"), self._stages.claim(files))
        planned, _ = await self._failure.unless_failed(both_ready)
        await self._failure.unless_failed(self._join(planned["assignments"]))

    def send(self, message: Message) -> None:
        """Send a message to the driver process."""
        if self._driver is not None:
            self._driver.send(message)

    async def next_event(self) -> Message:
        """What the driver process reports next; "draining" where a server is being stopped.

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

    async def close(self) -> None:
        """End whatever still runs and free every server."""
        self._failure.ignore()
        if self._driver is not None:
            await self._driver.kill()
        await self._failure.close()
        await self._stages.free()

    async def _join(self, assignments: list[str]) -> None:
        await self._stages.start(assignments)
        self.send({"op": "join", **self._stages.place(rank=len(assignments))})
        await self._expect("joined")
        await self._stages.wait_until_running()

    async def _listen(self, driver: Child) -> None:
        async for message in driver.messages():
            if message["event"] == "error":
                error = from_wire(message["error"])
                if isinstance(error, WorkerDiedError):  # its server knows better what happened
                    await asyncio.sleep(EXPLAIN_SECONDS)
                raise error
            if message["event"] == "done":  # what breaks now is the group's orderly end
                self._failure.ignore()
            self._events.put_nowait(message)
        code = await driver.wait()
        raise WorkerDiedError(f"the driver process (pid {driver.pid}) ended with code {code}")

    async def _expect(self, event: str) -> Message:
        while (message := await self._events.get())["event"] != event:
            if self.draining:
                raise DrainingError(f"the server of stage {self.draining!r} is being stopped")
        return message

    def _note_draining(self, stage: str) -> None:
        self.draining = stage
        self._events.put_nowait({"event": "draining", "stage": stage})
