"""What a run tells of a step: by the driver when it has ended, by the stages a step later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rpcmp.driver.scaler import ScalerState
from rpcmp.driver.steps import Step
from rpcmp.members import Member
from rpcmp.process.channel import Message
from rpcmp.work import StepReport


def of_driver(step: Step, loss: float, seconds: float) -> Message:
    """All but what the stages have to say of it.

    Args:
        step: which.
        loss: the mini-batch's.
        seconds: since the end of the step before.
    """
    return {
        "event": "step",
        "step": step.number,
        "epoch": step.epoch,
        "loss": loss,
        "samples_per_s": step.batch.num_samples / seconds,
        "step_s": seconds,
        "data_share": step.data_seconds / seconds,
        "busy": {},
        "busy_seconds": {},
        "learning_rate": None,
        "learning_rates": {},
    }


def of_scaling(before: ScalerState, after: ScalerState) -> Message:
    """The part about a loss that was scaled.

    Args:
        before, after: the scaler's state, before and after the step.
    """
    return {
        "loss_scale": before.scale,
        "is_skipped": after.skipped > before.skipped,
        "skipped_steps": after.skipped,
    }


def of_stages(
    event: Message, workers: Sequence[Member], stages: Mapping[str, StepReport]
) -> Message:
    """`event` with what the stages say.

    Args:
        event: from `of_driver`.
        workers: in the order in which they are named.
        stages: what they have reported, by the workers' labels; not by all of them.
    """
    told = {worker.label: stages[worker.label] for worker in workers if worker.label in stages}
    rates = {label: of.learning_rate for label, of in told.items()}
    groups = {label: of.learning_rates for label, of in told.items() if len(of.learning_rates) > 1}
    return {
        **event,
        **({"group_learning_rates": groups} if groups else {}),
        "busy_seconds": {label: dict(of.busy_seconds) for label, of in told.items()},
        "busy": {
            label: sum(of.busy_seconds.values()) / event["step_s"] for label, of in told.items()
        },
        "learning_rates": rates,
        "learning_rate": next((rate for rate in rates.values() if rate is not None), None),
    }
