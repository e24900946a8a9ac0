"""The metrics of a run, made from its events."""

from __future__ import annotations

import time

from rpcmp.config.topology import DRIVER
from rpcmp.observability import events
from rpcmp.observability.prometheus import Family, Store

KINDS = {"F": "forward", "B": "backward", "W": "weight", "O": "optimizer"}

STAGE, LINK = ("stage",), ("source", "target")

FAMILIES = [
    Family(
        "rpcmp_run",
        "info",
        "What runs",
        ("name", "job_id", "rpcmp", "torch", "python", "driver"),
    ),
    Family("rpcmp_step", "gauge", "The last optimizer step that was done"),
    Family("rpcmp_planned_steps", "gauge", "Optimizer steps that the run will have done"),
    Family("rpcmp_epoch", "gauge", "The epoch of the last step, counted from 1"),
    Family("rpcmp_loss", "gauge", "The last step's mean loss"),
    Family("rpcmp_evaluation", "gauge", "The last evaluation", ("metric",)),
    Family("rpcmp_learning_rate", "gauge", "Of each stage's first parameter group", STAGE),
    Family(
        "rpcmp_group_learning_rate",
        "gauge",
        "Of each parameter group, where there are several",
        ("stage", "group"),
    ),
    Family("rpcmp_loss_scale", "gauge", "What the last step's loss was multiplied by"),
    Family("rpcmp_skipped_steps", "gauge", "Steps skipped for gradients that were not finite"),
    Family("rpcmp_samples", "counter", "Samples trained with"),
    Family("rpcmp_samples_per_second", "gauge", "In the last step"),
    Family("rpcmp_step_seconds", "gauge", "Duration of the last step"),
    Family("rpcmp_steps", "counter", "Optimizer steps done since the driver was started"),
    Family("rpcmp_data_seconds", "counter", "Time that it took to get the data of steps"),
    Family(
        "rpcmp_busy_seconds",
        "counter",
        "Time that each stage has computed: forward, backward, weight (gradients), optimizer",
        ("stage", "kind"),
    ),
    Family(
        "rpcmp_idle_seconds",
        "counter",
        "Time of steps in which each stage did not compute, by reason: bubble, network, overhead, "
        "in the proportions of the last step that was looked at",
        ("stage", "kind"),
    ),
    Family(
        "rpcmp_idle_share",
        "gauge",
        "Of the last step that was looked at, by reason: bubble, network, overhead",
        ("stage", "kind"),
    ),
    Family(
        "rpcmp_link_bytes",
        "counter",
        "Sent from one member to another: over TCP, or the tensors alone where these are more",
        LINK,
    ),
    Family(
        "rpcmp_link_round_trip_seconds", "gauge", "From one member's host to another and back", LINK
    ),
    Family(
        "rpcmp_in_flight_microbatches",
        "gauge",
        "Micro-batches whose activations a stage keeps for their backward",
        STAGE,
    ),
    Family("rpcmp_memory_bytes", "gauge", "Resident memory of the process", STAGE),
    Family(
        "rpcmp_device_memory_bytes",
        "gauge",
        "What torch has allocated on a stage's device, if that is an accelerator",
        ("stage", "device"),
    ),
    Family("rpcmp_cpu_seconds", "counter", "CPU time of the process and those before it", STAGE),
    Family(
        "rpcmp_worker_state", "gauge", "1 for the state that a process is in", ("stage", "state")
    ),
    Family("rpcmp_restarts", "counter", "How often each process was started again", STAGE),
    Family("rpcmp_faults", "counter", "Faults, by the stage that was lost", STAGE),
    Family("rpcmp_generation", "gauge", "Counts the groups of processes that have been formed"),
    Family("rpcmp_checkpoint_step", "gauge", "The step of the last checkpoint"),
    Family("rpcmp_checkpoint_age_seconds", "gauge", "Since the last checkpoint was complete"),
    Family("rpcmp_checkpoint_duration_seconds", "gauge", "How long the last checkpoint took"),
    Family("rpcmp_checkpoint_size_bytes", "gauge", "Of the last checkpoint's files"),
    Family("rpcmp_checkpoints", "counter", "Checkpoints that have been written"),
]
"""All metrics of a run. `stage` is the label of a worker, or "driver"."""


class RunMetrics:
    """An observer that keeps the metrics of a run in `store`."""

    name = "metrics"

    def __init__(self) -> None:
        self.store = Store(FAMILIES)
        self._shares: dict[str, dict[str, float]] = {}
        self._idle_seconds: dict[str, float] = {}

    def handle(self, event: events.Event) -> None:
        store = self.store
        store.set("rpcmp_generation", event.generation)
        match event:
            case events.RunEvent():
                versions = (event.versions[name] for name in ("rpcmp", "torch", "python"))
                store.set("rpcmp_run", 1, event.name, event.job_id, *versions, event.driver)
            case events.StartEvent():
                store.set("rpcmp_planned_steps", event.steps)
            case events.StepEvent():
                self._step(event)
            case events.EvalEvent():
                for name, value in event.values.items():
                    store.set("rpcmp_evaluation", value, name)
            case events.TimelineEvent():
                for stage in event.stages:
                    label = stage["label"]
                    self._shares[label] = stage["lost"]
                    for kind, share in stage["lost"].items():
                        store.set("rpcmp_idle_share", share, label, kind)
                    self._count_idle(label)
            case events.VitalsEvent():
                self._vitals(event)
            case events.FaultEvent():
                store.add("rpcmp_faults", 1, event.stage)
            case events.CheckpointEvent():
                self._checkpoint(event)

    def close(self) -> None:
        """Keep the last values, which are served until the process ends."""

    def _step(self, event: events.StepEvent) -> None:
        store, seconds = self.store, event.step_s
        store.set("rpcmp_step", event.step)
        store.set("rpcmp_epoch", event.epoch)
        store.set("rpcmp_loss", event.loss)
        store.set("rpcmp_loss_scale", event.loss_scale)
        store.set("rpcmp_skipped_steps", event.skipped_steps)
        store.set("rpcmp_samples_per_second", event.samples_per_s)
        store.set("rpcmp_step_seconds", seconds)
        store.add("rpcmp_samples", round(event.samples_per_s * seconds))
        store.add("rpcmp_steps", 1)
        store.add("rpcmp_data_seconds", event.data_share * seconds)
        for stage, rate in event.learning_rates.items():
            store.set("rpcmp_learning_rate", rate, stage)
        for stage, rates in (event.group_learning_rates or {}).items():
            for group, rate in enumerate(rates):
                store.set("rpcmp_group_learning_rate", rate, stage, str(group))
        for stage, busy in event.busy_seconds.items():
            for kind, kind_seconds in busy.items():
                store.add("rpcmp_busy_seconds", kind_seconds, stage, KINDS[kind])
            idle = max(0.0, seconds - sum(busy.values()))
            self._idle_seconds[stage] = self._idle_seconds.get(stage, 0.0) + idle
            self._count_idle(stage)

    def _count_idle(self, stage: str) -> None:
        """Divide the idle time among its reasons, as soon as a timeline has given their shares."""
        shares = self._shares.get(stage)
        if shares is None:
            return
        total = sum(shares.values())
        idle = self._idle_seconds.pop(stage, 0.0)
        for kind, share in shares.items():
            part = share / total if total else 1 / len(shares)
            self.store.add("rpcmp_idle_seconds", idle * part, stage, kind)

    def _vitals(self, event: events.VitalsEvent) -> None:
        store = self.store
        processes = {**event.workers, **({DRIVER: event.driver} if event.driver else {})}
        for stage, process in processes.items():
            store.set("rpcmp_memory_bytes", process["memory"], stage)
            store.set("rpcmp_in_flight_microbatches", process["in_flight"], stage)
            store.set("rpcmp_restarts", process["restarts"], stage)
            for state in events.WORKER_STATES:
                store.set("rpcmp_worker_state", state == process["state"], stage, state)
            if process["pid"]:
                store.count("rpcmp_cpu_seconds", process["pid"], process["cpu_seconds"], stage)
        store.clear("rpcmp_device_memory_bytes")  # a worker that is back may have another device
        for stage, worker in event.workers.items():
            if (device := worker.get("device", "")) not in ("", "cpu"):
                store.set("rpcmp_device_memory_bytes", worker["device_memory"], stage, device)
        for link in event.links:
            pair = link["from"], link["to"]
            store.count("rpcmp_link_bytes", event.generation, link["bytes"], *pair)
            if link["rtt_s"]:
                store.set("rpcmp_link_round_trip_seconds", link["rtt_s"], *pair)

    def _checkpoint(self, event: events.CheckpointEvent) -> None:
        saved_at = time.time() if event.time is None else event.time
        self.store.set("rpcmp_checkpoint_step", event.step)
        self.store.set("rpcmp_checkpoint_age_seconds", lambda: max(0.0, time.time() - saved_at))
        self.store.set("rpcmp_checkpoint_duration_seconds", event.seconds)
        self.store.set("rpcmp_checkpoint_size_bytes", event.bytes)
        self.store.add("rpcmp_checkpoints", 1)
