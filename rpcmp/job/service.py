"""The library's side of a job: a group that serves a program's calls, over many generations.

Here the caller, not the driver process, knows what comes next. So a group that is formed again gets
the calls again that it has not seen.

    kept:      1     3     5              versions that all stages have kept (`Operations.kept`)
    calls:     1  2  3  4  5  6  7        6 and 7 would be repeated; or 4 to 7, if a host is lost
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rpcmp.checkpoint.slots import HeldSnapshots, newest_common
from rpcmp.config.schema import Config
from rpcmp.driver.operations import OPERATIONS, Effect, Operations
from rpcmp.errors import ConfigError, DrainingError, JobError, RpcmpError
from rpcmp.job.cuts import restores_of
from rpcmp.job.generation import Generation
from rpcmp.job.recovery import Progress, RecoveryLoop, Workload
from rpcmp.job.restore_point import RestorePoint
from rpcmp.job.server_pool import ServerPool
from rpcmp.observability.events import Event
from rpcmp.pipelining import pytree
from rpcmp.process.channel import Message

EXPLAIN_SECONDS = 5.0
"""How long to wait for the reason why a driver process is gone."""

DriverState = dict[str, Any]
"""What the driver process has to know to go on after a call; see `Operations.state`."""


NUM_KEPT = 3
"""How many of the newest kept versions a group may have to go back to; see `checkpoint.slots`."""


@dataclass(frozen=True)
class Call:
    """One call of an operation.

    Attributes:
        version: its number among the calls that change something; 0: it changes nothing.
        name: of the operation; see rpcmp.driver.operations.
        arguments: as the operation takes them.
    """

    version: int
    name: str
    arguments: tuple[Any, ...]


class CallHistory:
    """The calls since the oldest version that a group may have to go back to.

    Args:
        is_kept: whether calls will ever be repeated.
    """

    def __init__(self, is_kept: bool = True) -> None:
        self._is_kept = is_kept
        self._version = 0
        self._calls: deque[Call] = deque()
        self._kept: deque[int] = deque([0], maxlen=NUM_KEPT)
        self._states: dict[int, DriverState] = {0: {}}
        self._has_new_call = False

    @property
    def states(self) -> dict[int, DriverState]:
        """The driver's state at each version that a group can go back to."""
        return {version: self._states[version] for version in self._kept}

    def new_call(self, name: str, arguments: tuple[Any, ...]) -> Call:
        """Return a call that is about to be made.

        Its tensors are copied if it may have to be repeated: the caller may reuse theirs.
        """
        if OPERATIONS[name].effect is Effect.READS:
            return Call(0, name, arguments)
        if self._is_kept:
            arguments = pytree.map_tensors(lambda tensor: tensor.detach().clone(), arguments)
        return Call(self._version + 1, name, arguments)

    def take_has_new_call(self) -> bool:
        """Return whether a call has completed since this was called last."""
        has_new_call, self._has_new_call = self._has_new_call, False
        return has_new_call

    def since(self, version: int) -> Iterator[Call]:
        """Return the calls that a group which starts at `version` has not seen.

        Raises:
            JobError: too much was lost to repeat them.
        """
        if version < self._kept[0]:
            raise JobError(f"the group begins at call {version}, of which too much is forgotten")
        return iter([call for call in self._calls if call.version > version])

    def record_done(self, call: Call, state: DriverState, kept: int) -> None:
        """Record that a call has been answered.

        Args:
            state: the driver's state after it, as plain values.
            kept: the newest version that all stages have kept.
        """
        is_repeated = 0 < call.version <= self._version
        self._has_new_call |= not is_repeated
        if is_repeated or call.version == 0:
            return
        self._version = call.version
        if not self._is_kept:
            return
        self._calls.append(call)
        if kept == call.version:
            self._kept.append(kept)
            self._states[kept] = state
        self._forget()

    def record_failed(self, call: Call) -> None:
        """Record that a call has failed in the user's code; a failed step leaves no gradients."""
        is_step = OPERATIONS[call.name].effect is Effect.DIFFERENTIATES
        if call.version > self._version and is_step:
            self._version = call.version
            if self._is_kept:
                self._calls.append(Call(call.version, Operations.zero_grad.__name__, ()))

    def _forget(self) -> None:
        oldest = self._kept[0]
        while self._calls and self._calls[0].version <= oldest:
            self._calls.popleft()
        self._states = {version: self._states[version] for version in self._kept}


class Service(Workload[int]):
    """Serves a pipeline's calls; the result of a generation is the call that it starts after.

    Attributes:
        config: of the job, whose balance is known.
    """

    def __init__(self, config: Config, connect: Sequence[str] | None, history: CallHistory) -> None:
        self.config = config = config.model_copy(update={"rebalance": "off"})  # nothing moves here
        self._history = history
        self._pool = ServerPool(config, connect)
        self._loop = RecoveryLoop(config.recovery, self._pool, self)
        self._number = 0
        self._connection: socket.socket | None = None
        self._recovering: asyncio.Task[Any] | None = None

    def require_serving(self) -> None:
        """Raise DrainingError if a server is being stopped."""
        generation = self._loop.generation
        if generation is not None and generation.draining:
            raise DrainingError(f"the server of stage {generation.draining!r} is being stopped")

    async def start(self, connection: socket.socket) -> None:
        """Form the first group, whose driver process reads its calls from `connection`."""
        self._connection = connection
        try:
            await self._pool.open()
            await self._loop.attempt()
        except BaseException:
            await self.close()
            raise

    async def recover(self, error: RpcmpError, connection: socket.socket) -> int:
        """Form the next group after a fault; returns the last call whose effect it has."""
        self._connection = connection
        self._recovering = asyncio.current_task()
        await self._loop.recover(error)
        return await self._loop.run()

    async def end(self) -> None:
        try:
            if self._recovering is not None and not self._recovering.done():
                self._recovering.cancel()
                await asyncio.gather(self._recovering, return_exceptions=True)
            elif self._loop.generation is not None:
                await self._loop.generation.wait_for_end()
        finally:
            await self.close()

    async def close(self) -> None:
        await self._loop.close()
        await self._pool.free(self._number)

    async def failure_reason(self) -> RpcmpError | None:
        """Return why the group is lost, if that is known."""
        generation = self._loop.generation
        return None if generation is None else await generation.failure.reason(EXPLAIN_SECONDS)

    def next_generation(self) -> Generation:
        if self._connection is None:
            raise AssertionError("a group takes its calls from a connection")
        self._number += 1
        return Generation(
            self.config,
            self._pool,
            self._number,
            load_data=False,
            fds=[self._connection.fileno()],
            choose=self._choose,
        )

    async def run(self, generation: Generation) -> int:
        await generation.start()
        step = generation.restore_point.step
        state = self._history.states.get(step, {})
        generation.send({"op": "serve", "state": state, "kept": step})
        generation.kill_driver_on_failure()
        return step

    async def settle(
        self, error: RpcmpError, generation: Generation, unread: list[Event | Message]
    ) -> Progress:
        return Progress(self._history.take_has_new_call())

    async def give_up(self, generation: Generation) -> None:
        await generation.close()

    async def _choose(
        self, assignments: list[str], holdings: dict[str, HeldSnapshots]
    ) -> RestorePoint:
        workers, states = self.config.workers, self._history.states
        common = newest_common(workers, holdings, states)
        if common is not None:
            restores = restores_of(common, workers, self._pool.addresses)
            return RestorePoint(common.step, restores)
        if 0 not in states:
            raise ConfigError("no server holds any more what the pipeline was; launch it again")
        return RestorePoint()


CLEANUP_SECONDS = 30.0
"""How long an interrupted caller waits until everything that it started has been stopped."""

Result = TypeVar("Result")


class BackgroundLoop:
    """An event loop in a thread of its own, for programs that have none.

    Child processes of the loop end with its thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rpcmp-supervisor", daemon=True
        )
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and return its result; blocks.

        A KeyboardInterrupt cancels it, and is raised when it has cleaned up.
        """
        finished = threading.Event()

        async def run() -> Result:
            try:
                return await coroutine
            finally:
                finished.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            finished.wait(CLEANUP_SECONDS)
            raise

    def close(self) -> None:
        """Cancel all coroutines, and end the thread; does nothing the second time."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(CLEANUP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*others, return_exceptions=True)
