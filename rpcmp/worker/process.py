"""A worker's life: build the stage, join the group, serve the stage, leave.

    supervisor ──start──> worker                 worker ──ready, built, joined──> supervisor
               ──device──>                              ──devices──> that would do
               ──stored──>                              ──store──> of the rendezvous
               ──mirrored, saved──>                     ──beat──> every half second
                                                        ──snapshot──> after a step

A worker joins one group, once: torch RPC cannot form a second group in a process, so every
generation has new workers.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from pathlib import Path

from rpcmp.checkpoint.slots import NUM_SLOTS, Slots
from rpcmp.config import importing
from rpcmp.config.device_places import AUTO
from rpcmp.config.importing import explain_error
from rpcmp.data.loader_pool import LoaderPool
from rpcmp.data.stage_loader import StageDataLoader
from rpcmp.errors import (
    CheckpointError,
    ConfigError,
    DeviceLostError,
    JobError,
    RpcmpError,
    StageConfigError,
    StageError,
    WorkerDiedError,
    one_line,
    to_wire,
)
from rpcmp.pipelining import devices
from rpcmp.pipelining.assignment import Assignment
from rpcmp.process import compiler
from rpcmp.process.activity import start_heartbeat
from rpcmp.process.channel import ChildContext, Message, connect_to_supervisor
from rpcmp.rpc import transport, unpickler
from rpcmp.rpc.channel_store import ChannelStore
from rpcmp.rpc.transport import Transport
from rpcmp.worker import weight_grad
from rpcmp.worker.snapshots import StageSnapshots, restore
from rpcmp.worker.stage import RemoteStage, Stage

log = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0
"""How long a worker waits for the others at the end of the group."""


def main() -> None:
    """Run one worker, and end the process."""
    bond = connect_to_supervisor()
    channel = bond.channel
    channel.send({"event": "ready"})
    start = channel.receive()
    if start is not None:
        try:
            WorkerProcess(bond, start).run()
        except Exception as error:
            known = error if isinstance(error, RpcmpError) else JobError(explain_error(error))
            bond.log.flush()
            channel.send({"event": "failed", "error": to_wire(known)})
    os._exit(1)


class WorkerProcess:
    """One worker of one generation."""

    def __init__(self, bond: ChildContext, start: Message) -> None:
        self._channel = bond.channel
        self._activity = bond.activity
        self._log = bond.log
        self._memory = bond.memory
        self._fds = bond.fds
        self._slots = Slots(bond.fds[: 1 + NUM_SLOTS])  # the memory of the stage's snapshots
        self._start = start
        self._snapshots: StageSnapshots | None = None
        self._stage: Stage | None = None
        self._store = ChannelStore(self._channel.send)

    def run(self) -> None:
        """Serve from the build to the end of the group, and end the process."""
        assignment = Assignment.model_validate_json(self._start["assignment"])
        if init := self._start["init"]:  # the driver has sent its part of it
            config = assignment.config.model_copy(update={"init": init})
            assignment = assignment.model_copy(update={"config": config})
        importing.set_allow_list(self._start["allowed"])
        files: list[str] = []
        if folder := self._start["code_folder"]:
            sys.path.insert(0, folder)
            files = [path.stem for path in Path(folder).iterdir()]
        unpickler.allow(importing.filter_allowed(assignment.config.modules), files)
        loaders = _loaders(assignment)  # before there are threads, and before a device is used
        if here := self._start["devices_here"]:
            device = self._settle(here, self._start["place_here"])
            assignment = assignment.model_copy(update={"device": device})
        transport.reserve_threads(assignment.in_flight)
        compiles = assignment.config.compiles(assignment.stage_index)
        if assignment.may_split and not compiles:
            weight_grad.install()
        threading.Thread(target=self._listen, daemon=True).start()
        start_heartbeat(self._channel.send, self._vitals)
        with self._activity.during("build"):
            stage = self._stage = self._build(assignment, loaders)
            if (source := self._start["restore"]) is not None:
                parts = [f"/proc/self/fd/{self._fds[place]}" for place in source["parts"]]
                self._restore(stage, source["step"], source["files"] or parts)
        with self._activity.during("join"):
            place = self._start["members"], self._start["rank"]
            direct = stage.model.device if assignment.config.transfer.direct else None
            address = transport.join(*place, self._store, stage, self._memory.find, direct)
        self._channel.send({"event": "joined", "address": address})
        stage.finished.wait()
        self._log.flush()
        if loaders is not None:
            loaders.close()
        transport.leave(LEAVE_SECONDS)
        self._log.flush()  # lines of other threads in the meantime
        self._channel.send({"event": "left"})
        os._exit(0)  # no destructors: RPC threads may still be about

    def _settle(self, wanted: list[str], own: int) -> str:
        """Return this worker's device, once its server knows that no other job has it."""
        order = devices.candidates(wanted, own)
        if order[0].startswith("cpu"):
            return order[0]
        order = [name if ":" in name else f"{name}:0" for name in order]
        may_share = wanted[own] != AUTO or wanted.count(AUTO) > len(order)
        ids = {devices.unique_id(name): name for name in order}
        if len(ids) < len(order):  # parts of a device, which has but one
            ids = {name: name for name in order}
        self._channel.send({"event": "devices", "candidates": [*ids], "may_share": may_share})
        while (answer := self._channel.receive()) is not None:
            if answer["op"] == "device":
                device = ids[answer["device"]]
                if answer["is_shared"]:
                    log.warning("another job has %s of this host as well", device)
                return device
        os._exit(1)

    def _vitals(self) -> Message:
        own = {} if self._stage is None else self._stage.vitals()
        return {"tensors": transport.answered.read(), **own}

    def _restore(self, stage: Stage, step: int, files: list[str]) -> None:
        """Restore the state after `step`, from files or else from a snapshot in memory."""
        if not files:
            snapshot = self._slots.get(step, self._start["cut"])
            if snapshot is None:
                raise CheckpointError(f"there is no snapshot of step {step} to resume from")
            files = [self._slots.path(snapshot.slot)]
        restore(files, stage.model, stage.optimizer)

    def _build(self, assignment: Assignment, loaders: LoaderPool | None) -> Stage:
        try:
            loader = None if loaders is None else StageDataLoader(loaders)
            group = Transport()
            peer = functools.partial(RemoteStage, group)
            rehearses = self._start["rehearses"]
            if assignment.config.compiles(assignment.stage_index):
                compiler.prepare(self._start["compiled"])
            stage = Stage(assignment, group, peer, self._activity, loader, rehearses)
            if loader is not None:
                loader.wait()
            if assignment.config.takes_snapshots:
                self._snapshots = stage.snapshots = StageSnapshots(
                    self._slots,
                    stage.model,
                    stage.optimizer,
                    self._activity,
                    self._start["is_mirrored"],
                    self._start["saves"],
                    self._channel.send,
                    self._start["cut"],
                )
        except WorkerDiedError:  # a process that loads samples: the next one may live
            raise
        except Exception as error:
            text = str(error) if isinstance(error, RpcmpError) else explain_error(error)
            first, _, rest = text.partition("\n")
            cause = first if isinstance(error, RpcmpError) else one_line(error)
            cause += devices.memory_advice(error)
            kind = StageConfigError if isinstance(error, ConfigError) else StageError
            kind = DeviceLostError if devices.is_lost(error) else kind
            raise kind(assignment.member.label, "build", cause, rest) from error
        sizes = [parameter.numel() for _, parameter in stage.model.named_parameters()]
        device = str(stage.model.device)
        self._channel.send({"event": "built", "num_parameters": sum(sizes), "device": device})
        return stage

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            match message["op"]:
                case "stored":
                    self._store.set_answer(message)
                case "mirrored" if self._snapshots is not None:
                    self._snapshots.mark_mirrored(message["step"])
                case "saved" if self._snapshots is not None:
                    self._snapshots.mark_saved()
        os._exit(1)


def _loaders(assignment: Assignment) -> LoaderPool | None:
    config, stage = assignment.config, assignment.stage_name
    loads = assignment.loads_data and config.graph().parts(stage)
    return LoaderPool(config, stage) if loads else None
