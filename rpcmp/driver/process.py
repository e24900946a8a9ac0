"""The driver process: plan, join the group, then train or serve calls.

supervisor ──plan──> driver ──planned──> ...  ──join──> driver ──joined──> ...
           ──stored──> driver ──store──> ...: requests of the agent to the rendezvous
           ──train──> driver ──start, progress, step, eval, report, summary, done──> ...
           ──saved──> driver: a checkpoint is on the disks
           ──pause──> driver ──paused──> ...: another group goes on after the running step
           ──segments──> driver: a few steps for each "segment", until "finish"; with
                         another setting after a "reschedule"
           ──serve──> driver: calls come by another socket (rpcmp.launch) until it closes

Planning finds all errors in a config, and in the code that it names, on the driver's host.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rpcmp.config import importing
from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.data.batch_server import BatchServer
from rpcmp.data.loss_weights import LossWeights
from rpcmp.driver.datasets import Datasets
from rpcmp.driver.evaluation import Metrics
from rpcmp.driver.operations import Operations, serve
from rpcmp.driver.progress import TrainingProgress
from rpcmp.driver.stage_group import StageGroup, unexpected
from rpcmp.driver.tracing import StepSampler, Tracer
from rpcmp.driver.training import Training
from rpcmp.errors import JobError, RpcmpError, to_wire
from rpcmp.observability.events import Event, StartEvent, SummaryEvent
from rpcmp.pipelining import assignment, cost_model
from rpcmp.pipelining.assignment import Assignment
from rpcmp.pipelining.setting_grid import options_to_try
from rpcmp.process.activity import start_heartbeat
from rpcmp.process.channel import ChildContext, Message, connect_to_supervisor
from rpcmp.rpc import transport, unpickler
from rpcmp.rpc.channel_store import ChannelStore
from rpcmp.rpc.tensors import save_tensors
from rpcmp.rpc.transport import Transport
from rpcmp.worker.stage import Stage


class PlannedJob(NamedTuple):
    """A job that is ready to start.

    Attributes:
        assignments: one per worker, in the config's order.
        metrics: the metrics that the driver computes.
        datasets: None if the stages load them, or if the job needs none.
        loads_at_stages: whether the stages load their inputs from the datasets themselves.
        settings: schedule options that the job may change to, besides the config's.
    """

    assignments: list[Assignment]
    metrics: Metrics
    datasets: Datasets | None
    loads_at_stages: bool
    settings: Sequence[ScheduleOptions]


def plan_job(
    config: Config, settings: Sequence[ScheduleOptions] = (), load_data: bool = True
) -> PlannedJob:
    """Import, plan and load everything that the driver needs, so that what is wrong shows now.

    Args:
        config: the job, with its balance.
        settings: schedule options to which the job may change later.
        load_data: whether it trains on the datasets of `[data]`.
    """
    metrics = Metrics.load(config)
    at_stages = load_data and config.data is not None and config.data.at == "stage"
    assignments = assignment.assign(config, settings, metrics.names, at_stages)
    datasets = Datasets.load(config) if load_data and not at_stages else None
    if not at_stages:
        LossWeights(config)
    if config.report is not None:
        importing.resolve_factory(config.report, "report", num_args=1)
    return PlannedJob(assignments, metrics, datasets, at_stages, settings)


LEAVE_SECONDS = 10.0
"""Seconds that the driver waits for the workers when the group ends."""


def main() -> None:
    """Run one generation of a job; the process ends here."""
    bond = connect_to_supervisor()
    driver = DriverProcess(bond)
    try:
        driver.run()
    except Exception as error:
        known = error if isinstance(error, RpcmpError) else unexpected(error)
        bond.log.flush()
        bond.channel.send({"event": "error", "error": to_wire(known)})
        os._exit(1)
    bond.log.flush()
    os._exit(0)  # no destructors: RPC threads may still run


class DriverProcess:
    """The driver's side of one generation of one job."""

    def __init__(self, bond: ChildContext) -> None:
        self._channel = bond.channel
        self._activity = bond.activity
        self._memory = bond.memory
        self._fds = bond.fds
        self._messages: queue.Queue[Message] = queue.Queue()
        self._stop = threading.Event()
        self._training: Training | None = None
        self._saves_at_end = self._pauses = False
        self._ends = threading.Event()
        self._store = ChannelStore(self._channel.send)
        threading.Thread(target=self._listen, daemon=True).start()

    def run(self) -> None:
        with self._activity.during("plan"):
            config, planned = self._plan(self._messages.get())
        start_heartbeat(self._channel.send, lambda: {"tensors": transport.answered.read()})
        order, source = self._messages.get(), BatchServer()
        with self._activity.during("join"):
            place = order["members"], order["rank"]
            address = transport.join(*place, self._store, source, self._memory.find)
        self._channel.send({"event": "joined", "address": address})
        work = self._messages.get()
        with self._activity.during("join"):  # it may wait for what the network has lost
            group = StageGroup(config, source, Transport())
            if planned.loads_at_stages:
                planned = planned._replace(datasets=Datasets.at_stages(config, group))
        match work["op"]:
            case "serve":
                state, kept = work["state"], work["kept"]
                operations = Operations(config, group, state, kept, planned.metrics)
                serve(operations, self._fds[0], self._activity)
            case "train":
                self._train(config, planned, group, work)
            case "segments":
                self._train_segments(config, planned, group)
        if planned.datasets is not None:
            planned.datasets.close()
        group.close()
        transport.leave(LEAVE_SECONDS)

    def _plan(self, message: Message) -> tuple[Config, PlannedJob]:
        folder = Path(message["folder"])
        sys.path.insert(0, str(folder))
        config = Config.model_validate_json(message["config"]).with_folder(folder)
        unpickler.allow(config.modules, (path.stem for path in folder.iterdir()))
        settings = [ScheduleOptions(**setting) for setting in message["settings"]]
        if not settings and message["load_data"]:
            settings = options_to_try(config)[1:]
        configs = [config, *(setting.on(config) for setting in settings)]
        transport.reserve_threads(max(map(cost_model.in_flight, configs)))
        planned = plan_job(config, settings, message["load_data"])
        assignments = [part.model_dump_json() for part in planned.assignments]
        weights = [part.weights for part in planned.assignments]
        self._channel.send({"event": "planned", "assignments": assignments, "weights": weights})
        return config, planned

    def _train(
        self, config: Config, planned: PlannedJob, group: StageGroup, order: Message
    ) -> None:
        tracer = Tracer(config, group) if order["trace"] else None
        seconds = order["timeline"]
        sampler = StepSampler(config, group, self._report, seconds) if seconds else None
        tracers = [each for each in (tracer, sampler) if each is not None]
        progress = TrainingProgress.from_order(order)
        if progress.scaler is not None:
            group.optimizer.load_scaler(progress.scaler)
        training = self._training = self._make_training(
            *(config, planned, group, tracers, progress, planned.settings),
            order["restarts"],
        )
        self._report(StartEvent(steps=training.total_steps))
        training.run(evaluate=order["evaluate"])
        is_cut_short = self._stop.is_set()  # what comes later finds a run that is complete
        if self._pauses and not self._ends.is_set():
            training.keep()
            training.saves.wait()
            self._activity.stop()
            self._channel.send({"event": "paused"})
            self._ends.wait()  # this process is killed, unless the run is to end just now
        if self._saves_at_end or config.checkpoint is not None:
            training.save()
        if sampler is not None:
            sampler.close()
            if order["last_steps"]:
                sampler.write(Path(order["last_steps"]))
        if tracer is not None:
            tracer.write(Path(order["trace"]))
        self._activity.stop()
        training.saves.wait()
        memory = group.workers.everywhere(Stage.memory)  # before anything is copied for a file
        if order["save_state"]:
            save_tensors(group.workers.merge(Stage.state_dict), Path(order["save_state"]))
        scaler = training.progress.scaler
        self._report(
            SummaryEvent(
                steps=training.progress.step,
                is_cut_short=is_cut_short,
                loss=training.progress.loss,
                metrics=training.progress.metrics,
                loss_scale=None if scaler is None else scaler.scale,
                skipped_steps=None if scaler is None else scaler.skipped,
                parameters_sha256=group.parameters_sha256(),
                hosts=group.workers.everywhere(Stage.host),
                memory=memory,
            )
        )
        self._channel.send({"event": "done"})

    def _train_segments(self, config: Config, planned: PlannedJob, group: StageGroup) -> None:
        """Train a few steps for each "segment" message, and block in between."""
        training = self._make_training(config, planned, group)
        shared_cores = group.workers.shared_cores()
        while True:
            self._activity.stop()
            order = self._messages.get()
            match order["op"]:
                case "finish":
                    break
                case "reschedule":
                    group.reschedule(ScheduleOptions(**order["setting"]).on(config))
                case "segment":
                    totals = training.segment(order["steps"], order["loads_ahead"])
                    done = {"event": "segment", **totals._asdict(), "shared_cores": shared_cores}
                    self._channel.send(done)
                case unknown:
                    raise JobError(f"the driver process does not know the order {unknown!r}")
        self._channel.send({"event": "done"})

    def _make_training(
        self,
        config: Config,
        planned: PlannedJob,
        group: StageGroup,
        tracers: Sequence[Tracer | StepSampler] = (),
        progress: TrainingProgress | None = None,
        options: Sequence[ScheduleOptions] = (),
        restarts: int = 0,
    ) -> Training:
        if planned.datasets is None:
            raise JobError("the driver process was told to train without having loaded its data")
        return Training(
            config,
            planned.datasets,
            group,
            self._report,
            self._channel.send,
            self._stop,
            progress,
            self._activity,
            tracers,
            planned.metrics,
            options,
            restarts,
        )

    def _report(self, event: Event) -> None:
        self._channel.send(event.to_json())

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            match message["op"]:
                case "stored":
                    self._store.set_answer(message)
                case "finish_step":
                    self._saves_at_end |= message["save"]
                    self._ends.set()
                    self._stop.set()
                case "pause":
                    self._pauses = True
                    self._stop.set()
                case "saved":
                    if self._training is not None:
                        self._training.saves.finish(message["step"], message["failed"])
                case _:
                    self._messages.put(message)
        os._exit(128 + signal.SIGHUP)
