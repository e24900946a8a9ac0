"""A job that takes calls from its user's program, over as many generations as it takes.

The counterpart of `job.run`, where the caller and not the driver process knows what comes next: it
repeats the calls that the new group has not seen.

The calls that a pipeline has made: those that a group which is formed again has to repeat.

kept:      1     3     5              what all stages have kept (`Calls.kept`)
calls:     1  2  3  4  5  6  7        6 and 7 would be repeated; or 4 to 7, where a host is gone

An event loop in a thread of its own, for programs that have none.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError, JobError, RpcmpError
from rpcmp.job.generation import Generation
from rpcmp.job.recovery import HeldSnapshots, History, decide, newest_common
from rpcmp.job.restore_planner import RestorePoint, from_memory
from rpcmp.job.server_pool import ServerPool
from rpcmp.pipelining import pytree

EXPLAIN_SECONDS = 5.0
"""A driver process that is gone says nothing; how long to wait for the reason."""


class Service:
    """The group of a pipeline, and what becomes of it.

    Args:
        config: the job.
        connect: addresses of running stage servers; see ServerPool.
    """

    def __init__(self, config: Config, connect: Sequence[str] | None) -> None:
        self._config = config
        self._fleet = ServerPool(config, connect)
        self._session: Generation | None = None
        self._generation = 1
        self._history = History()
        self._recovering: asyncio.Task[Any] | None = None

    @property
    def draining(self) -> str:
        """The name of a stage whose server is being stopped; empty: none."""
        return self._session.draining if self._session is not None else ""

    async def start(self, connection: socket.socket) -> None:
        """Form the first group.

        Args:
            connection: where the driver process gets its calls from.

        Raises:
            RpcmpError: why it cannot be formed; nothing is left running.
        """
        try:
            await self._fleet.open()
            await self._form(connection, {0: {}})
        except BaseException:
            await self.close()
            raise

    async def recover(
        self,
        error: RpcmpError,
        connection: socket.socket,
        known: dict[int, dict[str, Any]],
        is_new: bool,
    ) -> int:
        """Form the next group after `error`; the number of the last call that it knows of.

        Args:
            connection: where the driver process gets its calls from.
            known: what the driver was after each of the calls that can be gone on from.
            is_new: whether any call has ended since this was last asked.

        Raises:
            RpcmpError: there will be no other group.
        """
        if is_new:
            self._history = History(raised=self._history.raised)
        self._recovering = asyncio.current_task()
        while True:
            if self._session is not None:
                await self._session.close()
            limit = self._config.recovery.max_restarts
            decision = decide(error, self._history, limit, has_begun=True)
            self._history = decision.history
            if decision.error is not None:
                raise decision.error
            await asyncio.sleep(decision.pause)
            await self._fleet.wait_until_ready()
            self._generation += 1
            try:
                return await self._form(connection, known)
            except RpcmpError as another:
                error = another

    async def end(self) -> None:
        """Wait until the group has ended by itself, and free all servers."""
        try:
            if self._recovering is not None and not self._recovering.done():
                self._recovering.cancel()
                await asyncio.gather(self._recovering, return_exceptions=True)
            elif self._session is not None:
                await self._session.wait_for_end()
        finally:
            await self.close()

    async def close(self) -> None:
        """End whatever still runs and free all servers."""
        if self._session is not None:
            await self._session.close()
        await self._fleet.free(self._generation)

    async def reason(self) -> RpcmpError | None:
        """Why the group is gone, where somebody knows."""
        return None if self._session is None else await self._session.reason(EXPLAIN_SECONDS)

    async def _form(self, connection: socket.socket, known: dict[int, dict[str, Any]]) -> int:
        fd = connection.fileno()

        async def choose(
            assignments: list[str], holdings: dict[str, HeldSnapshots]
        ) -> RestorePoint:
            return self._choose(known, holdings)

        self._session = Generation(
            self._config,
            self._fleet,
            self._generation,
            load_data=False,
            fds=[fd],
            choose=choose,
        )
        await self._session.start()
        begin = self._session.begin.step
        self._session.send({"op": "serve", "state": known.get(begin, {}), "kept": begin})
        self._session.end_on_failure()
        return begin

    def _choose(self, known: Collection[int], holdings: dict[str, HeldSnapshots]) -> RestorePoint:
        found = newest_common(self._config.workers, holdings, known)
        if found is None and 0 not in known:
            raise ConfigError("no server holds any more what the pipeline was; launch it again")
        return RestorePoint() if found is None else from_memory(found, self._config, self._fleet)


CHANGING = {
    "train_step",
    "forward_backward",
    "load_state_dict",
    "optimizer_step",
    "zero_grad",
    "clip_grad_norm_",
    "step_scheduler",
    "load_optimizer_state_dict",
}
"""Calls after which model, gradients or optimizers are not what they were."""

DIFFERENTIATING = {"train_step", "forward_backward"}
"""Calls that clear all gradients where they fail; others then change nothing."""

KEPT = 3
"""How many of the newest kept versions a group may have to go back to; see `snapshot.slots`."""


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        version: its number among those that change something; 0: it changes nothing.
        name, arguments: as in rpcmp.driver.calls.
    """

    version: int
    name: str
    arguments: tuple[Any, ...]


class CallHistory:
    """The calls since the oldest version that a group may have to go back to.

    Args:
        is_kept: whether any call will ever be repeated.
    """

    def __init__(self, is_kept: bool = True) -> None:
        self._is_kept = is_kept
        self._version = 0
        self._calls: deque[Call] = deque()
        self._kept: deque[int] = deque([0], maxlen=KEPT)
        self._states: dict[int, dict[str, Any]] = {0: {}}
        self._is_new = False

    @property
    def known(self) -> dict[int, dict[str, Any]]:
        """What the driver was at each version that a group can go on from."""
        return {version: self._states[version] for version in self._kept}

    def new(self, name: str, arguments: tuple[Any, ...]) -> Call:
        """A call that is about to be made.

        Its tensors are copied where it may have to be repeated: the caller may use theirs again.
        """
        if name not in CHANGING:
            return Call(0, name, arguments)
        if self._is_kept:
            arguments = pytree.map_tensors(lambda tensor: tensor.detach().clone(), arguments)
        return Call(self._version + 1, name, arguments)

    def take_is_new(self) -> bool:
        """Whether a call has ended since this was last asked."""
        is_new, self._is_new = self._is_new, False
        return is_new

    def since(self, version: int) -> Iterator[Call]:
        """The calls that a group which begins at `version` has not seen.

        Raises:
            JobError: too much was lost to repeat them.
        """
        if version < self._kept[0]:
            raise JobError(f"the group begins at call {version}, of which too much is forgotten")
        return iter([call for call in self._calls if call.version > version])

    def note_done(self, call: Call, state: dict[str, Any], kept: int) -> None:
        """Note that a call has been answered.

        Args:
            state: what the driver is now, as plain values.
            kept: the newest version that all stages have kept.
        """
        is_repeated = 0 < call.version <= self._version
        self._is_new |= not is_repeated
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

    def note_failed(self, call: Call) -> None:
        """Note that a call has failed in the user's code; of a step no gradients are left."""
        if call.version > self._version and call.name in DIFFERENTIATING:
            self._version = call.version
            if self._is_kept:
                self._calls.append(Call(call.version, "zero_grad", ()))

    def _forget(self) -> None:
        oldest = self._kept[0]
        while self._calls and self._calls[0].version <= oldest:
            self._calls.popleft()
        self._states = {version: self._states[version] for version in self._kept}


CLEANUP_SECONDS = 30.0
"""How long an interrupted caller waits for what it started to be taken down again."""

Result = TypeVar("Result")


class BackgroundLoop:
    """Runs coroutines for a thread that waits. Children of the loop follow its thread's life."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rpcmp-supervisor", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it can run anything."""
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """What `coroutine` returns; blocks.

        A KeyboardInterrupt cancels it and is raised when it has cleaned up.
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
        """Cancel whatever still runs, and end the thread; does nothing the second time."""
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
