"""One group from birth to end: stage servers claimed, workers and driver process joined.

    (1) the driver process imports torch and plans         driver ──planned──> session
    (2) meanwhile every server is claimed and watched      session ──Prepare, Watch──> servers
    (3) each worker gets its stage and joins               session ──Start──> servers
    (4) all have joined: the driver may train              session ──go──> driver
    (5) the end, good or bad: every server is freed        session ──Stop──> servers

Whatever goes wrong anywhere fails `failure`, and everybody who waits for anything waits for that
too, so the first error ends the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

from rpcmp import addresses as address_rules
from rpcmp.config import Config
from rpcmp.control.client import StageClient
from rpcmp.control.options import versions
from rpcmp.errors import (
    ConfigError,
    DrainingError,
    JobError,
    RpcmpError,
    UnreachableError,
    WorkerDiedError,
    from_wire,
    one_line,
)
from rpcmp.job import code
from rpcmp.job.localservers import LocalServers
from rpcmp.members import members
from rpcmp.process.channel import Message
from rpcmp.process.child import Child
from rpcmp.process.environment import compute_environment
from rpcmp.v1 import control_pb2 as pb

LEAVE_SECONDS = 15.0
"""How long the group may take to end by itself before it is ended."""

EXPLAIN_SECONDS = 2.0
"""A lost connection says little; how long to wait for the server to say why."""

Result = TypeVar("Result")


class Session:
    """A job's group.

    Args:
        config: the job.
        connect: addresses of running stage servers; None uses the config's or, where it has
            none, starts servers on this machine.
        load_data: whether the driver process loads the datasets of `[data]`.
        arguments, pass_fds: given to the driver process.

    Attributes:
        events: what the driver process reports once it may train.
    """

    def __init__(
        self,
        config: Config,
        connect: Sequence[str] | None = None,
        load_data: bool = True,
        arguments: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.config = config
        self.job_id = uuid.uuid4().hex
        self.generation = 1
        self.events: asyncio.Queue[Message] = asyncio.Queue()
        self._addresses = list(connect if connect is not None else config.addresses)
        self._load_data = load_data
        self._arguments, self._pass_fds = arguments, pass_fds
        self._local = LocalServers()
        self._clients: list[StageClient] = []
        self._claimed: list[StageClient] = []
        self._driver: Child | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure.add_done_callback(_retrieve)
        self._running: set[str] = set()
        self._all_running = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False

    async def start(self) -> None:
        """Bring the group to life; returns when the driver may train.

        Raises:
            RpcmpError: why it cannot; call `close` all the same.
        """
        self._check_addresses()
        files = code.collect(self.config.folder) if self.config.ship_code else []
        environment = compute_environment(threads=1)
        self._driver = await Child.spawn(
            "rpcmp.driver", environment, self._arguments, self._pass_fds
        )
        self._follow(self._listen(self._driver))
        self._driver.send(
            {
                "op": "plan",
                "config": self.config.model_dump_json(),
                "folder": str(self.config.folder),
                "load_data": self._load_data,
            }
        )
        planned, _ = await self._or_failure(
            _both(self._expect("planned"), self._claim_servers(files))
        )
        await self._or_failure(self._join(planned["assignments"]))

    def send(self, message: Message) -> None:
        """Send a message to the driver process."""
        if self._driver is not None:
            self._driver.send(message)

    async def next_event(self) -> Message:
        """What the driver process reports next.

        Raises:
            RpcmpError: the job has failed.
        """
        return await self._or_failure(self.events.get())

    def end_on_failure(self) -> None:
        """End the driver process as soon as the job has failed, so that nobody waits for it."""
        driver = self._driver
        if driver is not None:
            self._failure.add_done_callback(lambda _: self._follow(driver.kill()))

    async def failure(self, timeout: float) -> RpcmpError | None:
        """Why the job has failed; waits up to `timeout` seconds for somebody to know."""
        await asyncio.wait([self._failure], timeout=timeout)
        error = self._failure.exception() if self._failure.done() else None
        return error if isinstance(error, RpcmpError) else None

    async def wait_for_end(self) -> None:
        """Wait until the group has ended by itself."""
        self._ending = True
        if self._driver is not None:
            await self._driver.wait(LEAVE_SECONDS)

    async def close(self) -> None:
        """End whatever still runs and free every server; never raises."""
        self._ending = True
        if self._driver is not None:
            await self._driver.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stop = pb.StopRequest(job_id=self.job_id, generation=self.generation)
        await asyncio.gather(*(_try_stop(client, stop) for client in self._claimed))
        await asyncio.gather(*(client.close() for client in self._clients))
        await self._local.stop()

    # The group's birth.

    def _check_addresses(self) -> None:
        address_rules.require_loopback(self._addresses)
        if self._addresses and len(self._addresses) != self.config.num_stages:
            raise ConfigError(
                f"{self.config.num_stages} stages need as many addresses, not "
                f"{len(self._addresses)}: {', '.join(self._addresses)}"
            )

    async def _claim_servers(self, files: list[pb.CodeFile]) -> None:
        if not self._addresses:
            self._addresses = await self._local.start(self.config.num_stages)
        pairs = zip(self.config.stage_names, self._addresses, strict=True)
        self._clients = [StageClient(name, address) for name, address in pairs]
        await _all(client.connect() for client in self._clients)
        await _all(self._claim(index, files) for index in range(len(self._clients)))

    async def _claim(self, index: int, files: list[pb.CodeFile]) -> None:
        client = self._clients[index]
        await client.prepare(
            pb.PrepareRequest(
                job=self.config.name,
                job_id=self.job_id,
                generation=self.generation,
                versions=versions(),
                stage_index=index,
                threads=self.config.stage(index).threads,
                code=files,
            )
        )
        self._claimed.append(client)
        self._follow(self._watch(client))

    async def _join(self, assignments: list[str]) -> None:
        place: dict[str, Any] = {
            "job_id": self.job_id,
            "generation": self.generation,
            "rendezvous": self._addresses[0],
            "members": members(self.config.stage_names),
        }
        await _all(
            client.start(
                pb.StartRequest(**place, stage_name=client.name, assignment=assignment, rank=rank)
            )
            for rank, (client, assignment) in enumerate(
                zip(self._clients, assignments, strict=True)
            )
        )
        self.send({"op": "join", **place, "rank": len(self._clients)})
        await self._expect("joined")
        await self._all_running.wait()

    # What happens meanwhile.

    async def _listen(self, driver: Child) -> None:
        async for message in driver.messages():
            if message["event"] == "error":
                error = from_wire(message["error"])
                if isinstance(error, WorkerDiedError):  # the server knows better what happened
                    await asyncio.sleep(EXPLAIN_SECONDS)
                self._fail(error)
            self.events.put_nowait(message)
        code = await driver.wait()
        if not self._ending:
            self._fail(WorkerDiedError(f"the driver process (pid {driver.pid}) ended: {code}"))

    async def _watch(self, client: StageClient) -> None:
        request = pb.WatchRequest(job_id=self.job_id, generation=self.generation)
        try:
            async for change in client.watch(request):
                if change.error:
                    self._fail(from_wire(change.error))
                if change.draining:
                    self.events.put_nowait({"event": "draining", "stage": client.name})
                if change.state == pb.SERVER_STATE_RUNNING:
                    self._running.add(client.name)
                    if len(self._running) == len(self._clients):
                        self._all_running.set()
        except UnreachableError as error:
            self._fail(error)
            return
        self._fail(DrainingError(f"stage {client.name!r} at {client.address} ended the job"))

    def _fail(self, error: RpcmpError) -> None:
        if not self._ending and not self._failure.done():
            self._failure.set_exception(error)

    def _follow(self, coroutine: Coroutine[Any, Any, None]) -> None:
        async def follow() -> None:
            try:
                await coroutine
            except Exception as error:  # ours: nobody awaits a follower, so tell those who wait
                self._fail(JobError(f"supervising the job failed: {one_line(error)}"))
                raise

        self._tasks.append(asyncio.create_task(follow()))

    async def _expect(self, event: str) -> Message:
        while (message := await self.events.get())["event"] != event:
            pass
        return message

    async def _or_failure(self, awaitable: Awaitable[Result]) -> Result:
        """What `awaitable` gives, unless the job fails first."""
        task = asyncio.ensure_future(awaitable)
        try:
            futures: list[asyncio.Future[Any]] = [task, self._failure]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            return await task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, RpcmpError):
                await task


async def _all(awaitables: Any) -> None:
    """Run all together; let all end, then raise the first error."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if len(errors) > 1 and all(isinstance(error, UnreachableError) for error in errors):
        raise UnreachableError("; ".join(map(str, errors)))
    for error in errors:
        raise error


async def _both(first: Awaitable[Any], second: Awaitable[Any]) -> tuple[Any, Any]:
    """Run both together; the first error cancels the other."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        one, two = await asyncio.gather(*tasks)
        return one, two
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _try_stop(client: StageClient, request: pb.StopRequest) -> None:
    with contextlib.suppress(RpcmpError):  # the server is gone, or freed itself already
        await client.stop(request)


def _retrieve(failure: asyncio.Future[None]) -> None:
    """Mark the exception as seen; somebody may not be waiting when it comes."""
    if not failure.cancelled():
        failure.exception()
