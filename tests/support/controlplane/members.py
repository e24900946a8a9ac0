"""A worker and a driver process without a computation: one number per layer, and all messages.

The number of a layer after step s is a function of its number before, s and the layer's name. The
loss of a step is the sum over all layers; so losses and hash depend on no balance, and a run that
has lost or repeated a step shows it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import signal
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from rpcmp.checkpoint.slots import NUM_SLOTS, Slots
from rpcmp.checkpoint.stage_state import SnapshotWriter, StageState, pack, unpack
from rpcmp.config.schema import Config
from rpcmp.driver.progress import TrainingProgress
from rpcmp.errors import (
    ConfigError,
    JobError,
    RpcmpError,
    StageConfigError,
    StageError,
    WorkerDiedError,
    to_wire,
)
from rpcmp.observability.events import Event, StartEvent, StepEvent, SummaryEvent
from rpcmp.pipelining.partition import HostProfile, LayerProfile
from rpcmp.process.activity import BEAT_SECONDS
from tests.support.controlplane.forks import FakeProcess, Message

MODULUS = 1_000_003

DRIVER = "driver"

LAYER_SECONDS = 0.01

Value = TypeVar("Value")


def next_values(values: Mapping[str, int], step: int) -> dict[str, int]:
    """Return the layers' numbers after a step."""
    return {
        layer: (31 * value + step + zlib.crc32(layer.encode())) % MODULUS
        for layer, value in values.items()
    }


def loss_of(total: int) -> float:
    return total / MODULUS


def parameters_of(values: Mapping[str, int]) -> str:
    return hashlib.sha256(json.dumps(sorted(values.items())).encode()).hexdigest()


@dataclass
class Fault:
    """A fault of a member; see `Cluster.fail_at`."""

    stage: str
    step: int
    how: str | bytes
    phase: str
    times: int
    after: int


@dataclass
class Group:
    """What all members of all groups share: the ways that RPC would be, and what is planted.

    Attributes:
        faults: those that have not happened yet.
        happened: how often each did, by its place: (stage, step, phase).
        members: workers by the address that they give in the rendezvous.
        num_layers: of the newest job.
        layer_seconds: how long a layer is said to take in a step, on a host that is not slow; 0.01
            by default.
        held: steps that wait for a condition; see `Cluster.hold`.
    """

    faults: list[Fault] = field(default_factory=list)
    happened: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    members: dict[str, FakeWorker] = field(default_factory=dict)
    num_layers: int = 0
    layer_seconds: dict[str, float] = field(default_factory=dict)
    held: dict[int, Callable[[], object]] = field(default_factory=dict)

    async def meet(self, process: FakeProcess, stage: str, step: int, phase: str) -> None:
        """Let a fault happen that is planted here."""
        for fault in self.faults:
            if (fault.stage, fault.step, fault.phase) != (stage, step, phase) or not fault.times:
                continue
            if fault.after:
                fault.after -= 1
            else:
                fault.times -= 1
                self.happened[stage, step, phase] += 1
                await _fail(process, fault)


async def _fail(process: FakeProcess, fault: Fault) -> None:
    match fault.how:
        case "exception":
            raise StageError(fault.stage, fault.phase, "planted", "", fault.step)
        case "refusal":
            raise StageConfigError(fault.stage, fault.phase, "its state fits no other cut")
        case "deadlock":
            process.beats = False
        case "hang":  # it beats, and does nothing
            pass
        case bytes(line):
            process.send_raw(line)
        case how if how.startswith("exit "):
            process.exit(int(how.removeprefix("exit ")))
        case signum:
            process.strike(signal.Signals[signum])
    await asyncio.Future()


class Member:
    """A process of a group: it beats, and asks the rendezvous."""

    def __init__(self, process: FakeProcess, group: Group) -> None:
        self.process, self.group = process, group
        self.orders: asyncio.Queue[Message] = asyncio.Queue()
        self.changed = asyncio.Condition()  # told of each message
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._ids = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    async def main(self) -> int:
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]
        try:
            await self.work()
        except RpcmpError as error:
            self.process.send({"event": self.failed, "error": to_wire(error)})
            return 1
        finally:
            for task in self._tasks:
                task.cancel()
        return 0

    failed = "error"
    """The event that tells of an error."""

    async def work(self) -> None:
        raise NotImplementedError

    def on(self, message: Message) -> None:
        """Handle a message that does not wait for its turn."""
        self.orders.put_nowait(message)

    async def join(self, name: str, address: str, members: list[str]) -> list[str]:
        """Meet the others in the rendezvous; returns their addresses."""
        await self._store("set", [f"addrs/{name}"], value=_text(address))
        answer = await self._store("get", [f"addrs/{member}" for member in members])
        self.process.send({"event": "joined", "address": address})
        return [base64.b64decode(value).decode() for value in answer["values"]]

    async def _store(self, call: str, keys: list[str], **more: str) -> Message:
        number = next(self._ids)
        arriving = self._answers[number] = asyncio.get_running_loop().create_future()
        self.process.send({"event": "store", "id": number, "call": call, "keys": keys, **more})
        answer: Message = await arriving
        if "error" in answer:
            raise JobError(str(answer["error"]))
        return answer

    async def _listen(self) -> None:
        while True:
            message = await self.process.receive()
            if message["op"] == "stored":
                self._answers.pop(message["id"]).set_result(message)
            else:
                self.on(message)
                async with self.changed:
                    self.changed.notify_all()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if self.process.beats:
                self.process.send({"event": "beat", "tensors": {}})


class FakeWorker(Member):
    """A worker: builds, joins, steps when the driver says so, and takes snapshots."""

    failed = "failed"

    async def work(self) -> None:
        self.process.send({"event": "ready"})
        start = await self.orders.get()
        self.mirrored = self.last = 0
        self._finished = asyncio.Event()
        part = json.loads(start["assignment"])
        self.stage, self.label, self.steps = part["stage"], part["label"], 0
        await self.group.meet(self.process, self.label, 0, "build")
        self.values = dict.fromkeys(part["layers"], 0)
        self.process.send({"event": "built", "num_parameters": len(self.values), "device": "cpu"})
        self._slots = Slots(self.process.fds[: 1 + NUM_SLOTS])
        self._cut = start["cut"]
        self._writer = SnapshotWriter(self._slots, self._cut)
        self._is_mirrored, self._saves = start["is_mirrored"], start["saves"]
        if (source := start["restore"]) is not None:
            self._restore(source)
        await self.group.meet(self.process, self.label, 0, "join")
        address = f"uv://127.0.0.1:{self.process.pid % 60_000}"
        self.group.members[address] = self
        name = start["members"][start["rank"]]
        await self.join(name, address, start["members"])
        await self._finished.wait()
        self.process.send({"event": "left"})

    def on(self, message: Message) -> None:
        match message["op"]:
            case "mirrored" | "saved":
                self.mirrored = max(self.mirrored, message.get("step", 0))
            case _:
                super().on(message)

    async def call(self, act: Callable[[FakeWorker], Awaitable[Value]]) -> Value:
        """Do something for the driver, as a call by RPC: it fails if this process ends."""
        acting = asyncio.ensure_future(act(self))
        await asyncio.wait([acting, self.process.ended], return_when=asyncio.FIRST_COMPLETED)
        if not acting.done():
            acting.cancel()
            raise WorkerDiedError(f"the connection to stage {self.label!r} is closed")
        return acting.result()

    async def step(self, step: int, keep: bool, save: bool) -> int:
        """Do a step; returns this stage's part of the loss."""
        self.process.activity.start("forward", step, 0)
        await self.group.meet(self.process, self.label, step, "forward")
        await asyncio.sleep(0)
        self.values = next_values(self.values, step)
        self.steps = step
        self.process.activity.stop()
        if keep or save:
            await self.snapshot(step, save)
        return sum(self.values.values())

    async def snapshot(self, step: int, save: bool) -> None:
        """Hold the present state in memory, unless it is held already; see StageSnapshots."""
        if (held := self._slots.get(step, self._cut)) is None:
            await self.group.meet(self.process, self.label, step, "saving")
            async with self.changed:
                await self.changed.wait_for(
                    lambda: not self._is_mirrored or self.mirrored >= self.last
                )
                while (slot := self._slots.reserve()) is None:
                    await self.changed.wait()
            tensors, about = pack(self._state())
            self._writer.write(slot, step, tensors, about, pin=save and self._saves)
            self.last = step
        elif save and self._saves:
            self._slots.pin(held.slot)
        self.process.send({"event": "snapshot", "step": step})

    async def finish(self) -> None:
        self._finished.set()

    @property
    def seconds(self) -> float:
        """How long a step is said to take here."""
        return self.process.forks.slowness * sum(
            self.group.layer_seconds.get(layer, LAYER_SECONDS) for layer in self.values
        )

    def _state(self) -> StageState:
        model = {f"{layer}.x": torch.tensor([value]) for layer, value in self.values.items()}
        return StageState(self.steps, self.stage, model, {}, None, None)

    def _restore(self, source: Message) -> None:
        parts = [f"/proc/self/fd/{self.process.fds[place]}" for place in source["parts"]]
        paths = source["files"] or parts
        if not paths:
            held = self._slots.get(source["step"], self._cut)
            if held is None:
                raise JobError(f"no snapshot of step {source['step']}")
            paths = [self._slots.path(held.slot)]
        state = unpack(paths, self.stage, [f"{layer}.x" for layer in self.values], [])
        self.values = {layer: int(state.model[f"{layer}.x"]) for layer in self.values}
        self.steps = source["step"]


class FakeDriver(Member):
    """A driver process: plans, joins, and has the workers step until the run is complete."""

    def __init__(self, process: FakeProcess, group: Group) -> None:
        super().__init__(process, group)
        self._saving: set[int] = set()
        self._newest = 0  # the last checkpoint that was started
        self._stops = self._pauses = self._saves_at_end = False

    def on(self, message: Message) -> None:
        match message["op"]:
            case "finish_step":
                self._stops, self._saves_at_end = True, self._saves_at_end or message["save"]
            case "pause":
                self._pauses = True
            case "saved":
                self._saving.discard(message["step"])
            case _:
                super().on(message)

    async def work(self) -> None:
        plan = await self.orders.get()
        self.config = Config.model_validate_json(plan["config"])
        self.config = self.config.with_folder(Path(plan["folder"]))
        await self.group.meet(self.process, DRIVER, 0, "plan")
        if sum(self._balance) != self.group.num_layers:
            raise ConfigError(f"the model has {self.group.num_layers} layers")
        parts = [self._part(worker.stage, worker.label) for worker in self.config.workers]
        self.process.send(
            {"event": "planned", "assignments": parts, "weights": [None] * len(parts)}
        )
        order = await self.orders.get()
        members = order["members"]
        addresses = await self.join(
            members[order["rank"]], f"uv://127.0.0.1:{self.process.pid % 60_000}", members
        )
        self.workers = [
            self.group.members[address] for address in addresses if address in self.group.members
        ]
        await self._train(await self.orders.get())
        await asyncio.gather(*(worker.finish() for worker in self.workers))

    @property
    def _balance(self) -> list[int]:
        assert self.config.model is not None
        assert isinstance(self.config.model.balance, list)
        return self.config.model.balance

    def _part(self, stage: str, label: str) -> str:
        index, balance = self.config.stage_names.index(stage), self._balance
        first = sum(balance[:index])
        layers = [f"layer{n}" for n in range(first, first + balance[index])]
        return json.dumps({"stage": stage, "label": label, "layers": layers})

    async def _everywhere(self, act: Callable[[FakeWorker], Awaitable[Value]]) -> list[Value]:
        return await asyncio.gather(*(worker.call(act) for worker in self.workers))

    async def _train(self, order: Message) -> None:
        progress = TrainingProgress.from_order(order)
        total, self._told = self.config.steps or 0, None
        self._newest = progress.step if progress.is_saved else 0
        saved = self.config.checkpoint
        self._report(StartEvent(steps=total))
        while progress.step < total and not (self._stops or self._pauses):
            step = progress.step + 1
            await self._wait_if_held(step)
            if self._stops or self._pauses:
                break
            await self.group.meet(self.process, DRIVER, step, "step")
            due = saved is not None and (step == total or step % (saved.every_steps or total) == 0)
            if due:
                self._start_saving(step)
            every = self.config.snapshot_every_steps
            keep = every > 0 and step % every == 0
            self.process.activity.start("step", step)
            parts = await self._everywhere(
                lambda worker, s=step, k=keep, d=due: worker.step(s, k, d)  # type: ignore[misc]
            )
            progress = progress.after(step, 1, loss_of(sum(parts)))
            self._progress(progress)
            self._told = self._event(progress)
            self._report(self._told)
            await asyncio.sleep(0)
        if self._pauses and not self._stops:
            await self._hold(progress, save=False)
            await self._all_saved()
            self.process.send({"event": "paused"})
            async with self.changed:
                await self.changed.wait_for(lambda: self._stops)
        if progress.step and (self._saves_at_end or saved is not None):
            await self._hold(progress, save=True)
        await self._all_saved()
        values = {k: v for worker in self.workers for k, v in worker.values.items()}
        self._report(
            SummaryEvent(
                steps=progress.step,
                is_cut_short=self._stops,
                loss=progress.loss,
                metrics={},
                parameters_sha256=parameters_of(values),
                hosts={worker.label: {} for worker in self.workers},
                memory={},
            )
        )
        self.process.send({"event": "done"})

    async def _wait_if_held(self, step: int) -> None:
        is_free = self.group.held.get(step, lambda: True)
        while not (is_free() or self._stops or self._pauses):
            await asyncio.sleep(0.005)

    async def _hold(self, progress: TrainingProgress, save: bool) -> None:
        """Have all stages hold the present step, or save it, unless that has been done."""
        is_saved = progress.step in self._saving or progress.step == self._newest
        if progress.step == 0 or not self.config.takes_snapshots or is_saved:
            return
        if save:
            self._start_saving(progress.step)
        self._progress(progress)
        await self._everywhere(lambda worker: worker.snapshot(progress.step, save))

    def _start_saving(self, step: int) -> None:
        self._saving.add(step)
        self._newest = step

    async def _all_saved(self) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: not self._saving)

    def _progress(self, progress: TrainingProgress) -> None:
        told = None if self._told is None else self._told.to_json()
        awaits = progress.step in self._saving or progress.step == self._newest
        self.process.send(
            {"event": "progress", **asdict(progress), "told": told, "awaits_save": awaits}
        )

    def _event(self, progress: TrainingProgress) -> StepEvent:
        seconds = {worker.label: worker.seconds for worker in self.workers}
        return StepEvent(
            step=progress.step,
            epoch=1,
            loss=progress.loss,
            samples_per_s=1.0,
            step_s=max(seconds.values()),
            data_share=0.0,
            busy=dict.fromkeys(seconds, 1.0),
            busy_seconds={label: {"F": found} for label, found in seconds.items()},
            learning_rate=None,
            learning_rates=dict.fromkeys(seconds),
        )

    def _report(self, event: Event) -> None:
        self.process.send(event.to_json())


class FakeTask(Member):
    """A process that measures the layers of a job: as long as a step is said to take."""

    async def work(self) -> None:
        message = await self.orders.get()
        match message["op"]:
            case "sample":
                count = self.group.num_layers
                self.process.send({"event": "sampled", "num_layers": count, "sample": ""})
            case "profile":
                await self.group.meet(self.process, "task", 0, "profile")
                profile = HostProfile(
                    layers=[self._profile(n) for n in range(self.group.num_layers)],
                    base_bytes=0,
                    available_bytes=None,
                )
                self.process.send({"event": "profiled", "profile": profile.model_dump()})

    def _profile(self, number: int) -> LayerProfile:
        seconds = self.group.layer_seconds.get(f"layer{number}", LAYER_SECONDS)
        whole = LayerProfile(
            forward_s=seconds / 8,  # of one of four micro-batches
            backward_s=seconds / 8,
            weight_s=0.0,
            update_s=0.0,
            state_bytes=8,
            activation_bytes=8,
            input_bytes=8,
        )
        return whole.scaled(self.process.forks.slowness)


def _text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()
