"""Stage servers and jobs of a test in its event loop; see `tests.support.controlplane`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.errors import RpcmpError
from rpcmp.job.restore_point import Start
from rpcmp.job.training_run import TrainingRun, completed, order_to_train
from rpcmp.net.security import Security
from rpcmp.observability.events import (
    Event,
    GenerationEvent,
    RebalanceEvent,
    StagesEvent,
    StepEvent,
    SummaryEvent,
    VitalsEvent,
)
from rpcmp.process.fork_client import DRIVERS, WORKERS
from rpcmp.server.admission import Admission
from rpcmp.server.client import StageClient
from rpcmp.server.stage_server import DRAIN_SECONDS, StageServer
from rpcmp.v1 import control_pb2 as pb
from tests.support.controlplane.forks import FakeForks, FakeProcess
from tests.support.controlplane.members import (
    FakeDriver,
    FakeTask,
    FakeWorker,
    Fault,
    Group,
    loss_of,
    next_values,
    parameters_of,
)
from tests.support.eventloops import in_event_loop as in_event_loop

TASKS = "rpcmp.process.task"

MOST_SHOWN = 500
"""Characters of an event that are printed if a test fails."""

Committed = tuple[list[tuple[int, float]], str]
"""What must not depend on faults: the losses by step, and the hash of the parameters."""

Call = Callable[[], Coroutine[Any, Any, Any]]
Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=Event)


def reference(steps: int = 12, layers: int = 4, after: int = 0) -> Committed:
    """Return what a job commits, whatever happens to it; only the losses after a step."""
    values, losses = dict.fromkeys([f"layer{n}" for n in range(layers)], 0), []
    for step in range(1, steps + 1):
        values = next_values(values, step)
        losses.append((step, loss_of(sum(values.values()))))
    return losses[after:], parameters_of(values)


@dataclass
class Run:
    """A job's events, and how it ended.

    Attributes:
        error: why it has failed; None: it has not.
    """

    events: list[Event] = field(default_factory=list)
    error: RpcmpError | None = None

    def of(self, kind: type[Result]) -> list[Result]:
        """Return the events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def only(self, kind: type[Result]) -> Result:
        """Return the event of a kind, of which there is one."""
        (found,) = self.of(kind)
        return found

    @property
    def step(self) -> int:
        """The last step so far."""
        return max((event.step for event in self.of(StepEvent)), default=0)

    @property
    def generation(self) -> int:
        """How many groups have been formed so far."""
        return len(self.of(GenerationEvent))

    @property
    def stages(self) -> list[list[str]]:
        """The names of the stages, each time that they have changed."""
        return [[stage["name"] for stage in e.graph["stages"]] for e in self.of(StagesEvent)]

    @property
    def moves(self) -> list[tuple[str, list[int], list[int]]]:
        """The outcome of each change of the balance, with the balance after and before it."""
        return [(e.outcome, e.balance, e.before) for e in self.of(RebalanceEvent)]

    @property
    def repeated(self) -> int:
        """The most steps that any generation did once more."""
        last = most = 0
        for event in self.events:
            if isinstance(event, GenerationEvent):
                most = max(most, last - event.step)
            elif isinstance(event, StepEvent):
                last = event.step
        return most

    @property
    def committed(self) -> Committed:
        if self.error is not None:
            raise self.error
        steps = [(event.step, event.loss) for event in self.of(StepEvent)]
        return steps, self.of(SummaryEvent)[-1].parameters_sha256


class Server:
    """A running stage server, which ends by itself once it is drained.

    Attributes:
        address: where it listens.
        ending: done when it has ended.
    """

    def __init__(self, served: StageServer, forks: FakeForks, address: str) -> None:
        self.served, self.forks, self.address = served, forks, address
        self.ending = asyncio.create_task(self._end_when_drained())

    async def _end_when_drained(self) -> None:
        await self.served.drain_requested.wait()
        await self.served.stop(DRAIN_SECONDS)

    @property
    def worker(self) -> FakeProcess:
        """The newest worker."""
        return self.forks.children_made[-1]

    @property
    def state(self) -> str:
        state = pb.ServerState.Name(self.served.describe().state)
        return state.removeprefix("SERVER_STATE_").lower()

    async def lose(self) -> None:
        """End at once, as by the loss of the host: all that it held is gone."""
        await self.served._endpoints._port.stop()
        await self.end()

    async def end(self) -> None:
        self.ending.cancel()
        await self.served.stop(0.0)

    async def close(self) -> None:
        """End, and give back the memory that goes with the process of a real server."""
        await self.end()
        store, forgetting = self.served.snapshot_store, self.served._forgetting
        if forgetting is not None:
            forgetting.cancel()
        await store.clear()
        store.slots.close()
        for fd in store.parts.fds:
            os.close(fd)


class Cluster:
    """Servers of some stages, and jobs on them. Use it as an async context manager.

    Args:
        folder: of the jobs; checkpoints are written there.
        stages: servers to start.
        certs: has certificates of the stages, a spare and the driver; None: there is no TLS.
    """

    def __init__(self, folder: Path, stages: int = 2, certs: Path | None = None) -> None:
        self.folder, self._num_stages, self._certs = folder, stages, certs
        self.group = Group()
        self.servers: list[Server] = []
        self._calls: dict[int, list[Call]] = {}
        self._waiting: list[tuple[type[Any], int, Callable[[Any], Coroutine[Any, Any, Any]]]] = []
        self._called: list[asyncio.Task[Any]] = []
        self._driver_forks: list[FakeForks] = []
        self._started: list[Server] = []
        self.run = Run()

    async def __aenter__(self) -> Cluster:
        for stage in range(self._num_stages):
            self.servers.append(await self.serve(stage))
        return self

    async def __aexit__(self, *raised: object) -> None:
        if raised[0] is not None:  # pytest shows what a failed test has printed
            for event in self.run.events:
                if not isinstance(event, StepEvent | VitalsEvent):
                    print(json.dumps(event.to_json())[:MOST_SHOWN])
        for task in self._called:
            task.cancel()
        await asyncio.gather(*self._called, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self._started))
        await asyncio.gather(*(forks.close() for forks in self._driver_forks))

    def fail_at(
        self,
        stage: int | str,
        step: int,
        how: str | bytes,
        phase: str = "forward",
        times: int = 1,
        after: int = 0,
    ) -> Cluster:
        """Plant a fault at a stage, at "driver", or at a "task" that measures.

        Args:
            how: a signal's name, "exception" (the user's code raises), "deadlock" (no heartbeat any
                more), "hang" (heartbeats, and no progress), "exit 7"; or lines that it sends.
            phase: "build" and "join" belong to step 0; the driver's are "plan" and "step".
            times: how often it happens.
            after: how often it does not happen before.
        """
        name = f"stage{stage}" if isinstance(stage, int) else stage
        phase = "step" if name == "driver" and phase == "forward" else phase
        self.group.faults.append(Fault(name, step, how, phase, times, after))
        return self

    def lose_at(self, index: int, step: int) -> None:
        """Lose a server as soon as its worker is in this step; another starts there later."""

        async def lose() -> None:
            await self.until(lambda: self.group.happened[f"stage{index}", step, "forward"])
            await self.servers[index].lose()
            await self.replace(index)

        self._called.append(asyncio.create_task(lose()))

    def move_after(self, step: int, balance: list[int]) -> None:
        """Have the run move layers after a step, and go on no further before that."""
        formed = 0

        async def move() -> None:
            nonlocal formed
            formed = self.run.generation
            self.training_run.rebalance(balance, "asked for")

        self.at(step, move)
        self.hold(step + 1, lambda: self.run.generation > formed > 0)

    def at(self, step: int, call: Call) -> None:
        """Call something beside the run, after a step; it need not end before the next one."""
        self._calls.setdefault(step, []).append(call)

    def when(
        self, kind: type[Kind], number: int, call: Callable[[Kind], Coroutine[Any, Any, Any]]
    ) -> None:
        """Call something beside the run, at the event of that kind and number, from 1."""
        self._waiting.append((kind, number, call))

    async def serve(
        self, stage: int | None, address: str = "127.0.0.1:0", certificate: str | None = None
    ) -> Server:
        """Start a server of a stage, or a spare if that is None.

        Args:
            certificate: its name; empty: none; None: that of its stage, if there are any.
        """
        forks, security = self._forks(), Security()
        if certificate is None:
            certificate = "spare" if stage is None else f"stage{stage}"
        if self._certs is not None and certificate:
            security = Security(self._certs / certificate)
        served = StageServer(Admission(stage, checkpoints=self.folder), forks, security)
        host, _, port = address.rpartition(":")
        bound = await served.start(host, int(port))
        server = Server(served, forks, f"{host}:{bound}")
        self._started.append(server)
        return server

    def hold(self, step: int, until: Callable[[], object]) -> None:
        """Let the run do this step only once a condition is true, or once it is to pause."""
        self.group.held[step] = until

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.005)

    async def replace(self, index: int) -> None:
        """Start a server anew at the address of one that has ended."""
        lost = self.servers[index]
        stage = lost.served.admission.stage_index
        self.servers[index] = await self.serve(stage, lost.address)

    def config(self, *settings: str, steps: int = 12, balance: Sequence[int] = ()) -> Config:
        """Return the config of a job.

        Args:
            settings: "KEY=VALUE", as `rpcmp drive --set` takes them.
            balance: layers per stage; two each by default.
        """
        balance = balance or [2] * self._num_stages
        self.group.num_layers = sum(balance)
        data = tomllib.loads(
            f'name = "job"\nsteps = {steps}\nloss = "torch.nn:MSELoss"\n'
            f'[model]\nlayers = "zoo:mlp"\nbalance = {[*balance]}\n'
            '[data]\ntrain = "zoo:regression"\nbatch_size = 10\n[security]\nconfine = false\n'
        )
        if self._certs is not None:
            settings = (f"security.certs={self._certs / 'driver'}", *settings)
        for setting in settings:
            loader.apply_override(data, setting)
        return loader.parse_config(data).with_folder(self.folder)

    async def drive(
        self,
        config: Config,
        start: Start = "fresh",
        connect: Sequence[str] | None = None,
        lost_at: int = 0,
        holders: Sequence[Server] | None = None,
        trace: Path | None = None,
    ) -> Run:
        """Train to the end, and return what became of it.

        Args:
            connect: addresses of the servers; the first of the cluster's by default.
            lost_at: the step after which the driver is lost with its host; 0: it is not.
            holders: servers that then hold the job; all of the cluster's by default.
            trace: the file of a trace that is asked for.
        """
        run = self.run = Run()
        if lost_at:
            self.at(lost_at, self.lose_driver)
            self.hold(lost_at + 1, lambda: False)
        async with self.training(config, run, start, connect, trace) as (training, task):
            try:
                await completed(training, task)
            except RpcmpError as error:
                training.explain(error)
                run.error = error
            except asyncio.CancelledError:
                if not training._is_taken_over:
                    raise
        if lost_at:
            del self.group.held[lost_at + 1]
            held_by = self.servers if holders is None else holders
            await self.until(lambda: all(server.state == "holding" for server in held_by))
        return run

    async def interrupt(self, signum: signal.Signals) -> None:
        """Let the run have received a signal."""
        self.training_run.interrupt(signum, self._task)

    async def lose_driver(self) -> None:
        """End the driver of the newest run without a word to its servers."""
        self.training_run._is_taken_over = True  # or it would free them
        self._task.cancel()

    @contextlib.asynccontextmanager
    async def training(
        self,
        config: Config,
        run: Run,
        start: Start,
        connect: Sequence[str] | None = None,
        trace: Path | None = None,
    ) -> AsyncIterator[tuple[TrainingRun, asyncio.Task[SummaryEvent]]]:
        """Yield a run that trains; it is closed at the end, as by `rpcmp drive`."""
        addresses = [server.address for server in self.servers[: len(config.workers)]]
        addresses = addresses if connect is None else list(connect)

        def report(event: Event) -> None:
            run.events.append(event)
            calls = self._calls.pop(event.step, []) if isinstance(event, StepEvent) else []
            for kind, number, call in self._waiting:
                if isinstance(event, kind) and len(run.of(kind)) == number:
                    calls.append(functools.partial(call, event))
            self._called += [asyncio.create_task(call()) for call in calls]

        forks = self._forks()
        self._driver_forks.append(forks)
        training = self.training_run = TrainingRun(config, addresses, report, start, forks)
        task = self._task = asyncio.create_task(training.train(order_to_train(trace=trace)))
        try:
            yield training, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await training.close()

    def client(self, server: Server) -> StageClient:
        return StageClient("", server.address, server.served.dialer)

    def _forks(self) -> FakeForks:
        def main(
            kind: type[FakeWorker | FakeDriver | FakeTask],
        ) -> Callable[[FakeProcess], Awaitable[int]]:
            return lambda process: kind(process, self.group).main()

        mains: Mapping[str, Callable[[FakeProcess], Awaitable[int]]] = {
            WORKERS: main(FakeWorker),
            DRIVERS: main(FakeDriver),
            TASKS: main(FakeTask),
        }
        return FakeForks(mains)
