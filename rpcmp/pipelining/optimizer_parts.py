"""Refuse an optimizer or scheduler that computes with all parameters: each stage has its own.

    one optimizer of all parameters         ──3 steps──> updates ──┐
    an optimizer for each stage's           ──3 steps──> updates ──┴─> equal?

A norm over all gradients, a learning rate that is estimated of the whole model, or one that depends
on a parameter's place in the list would be another for a part of the model; so would a rate that a
scheduler computes of momenta. Tried with parameters of the job's names and numbers of dimensions, a
few elements each.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rpcmp.config import importing
from rpcmp.config.types import Factory, OptimizerFactory
from rpcmp.errors import ConfigError, one_line
from rpcmp.pipelining import optimizers, random_streams

log = logging.getLogger(__name__)

STEPS = 3
MOST_ELEMENTS = 3
"""Of a dimension."""

ROUNDING = 1e-3
"""How far updates may be apart, in parts of the largest."""

Shapes = Mapping[str, Sequence[int]]


def require_separable(
    source: OptimizerFactory, stages: Sequence[Shapes], schedule: Factory | None = None
) -> None:
    """Check an optimizer and a scheduler, if they are not torch's own.

    Args:
        stages: the shapes of the parameters that each stage trains, by name.

    Raises:
        ConfigError: they do something else for the parameters of one stage.
    """
    own = has_own(source, schedule)
    trained = [each for each in stages if each]
    if len(trained) < 2 or not own:
        return
    everything = {name: shape for each in trained for name, shape in each.items()}
    try:
        with random_streams.kept(), torch.device("cpu"):
            together, draws = _updates(source, schedule, everything)
            if draws:
                return
            apart = {
                k: v for each in trained for k, v in _updates(source, schedule, each)[0].items()
            }
    except Exception as error:  # it needs a closure, real shapes, or packages of the stages' hosts
        log.debug("%s cannot be tried in parts: %s", " or ".join(own), one_line(error))
        return
    for name, update in together.items():
        if not update.numel():
            continue
        largest = max(float(each.abs().max()) for each in (update, apart[name]))
        if largest and float((update - apart[name]).abs().max()) > ROUNDING * largest:
            raise ConfigError(
                f"{' or '.join(own)} computes with all parameters at once (the update of {name!r} "
                "is another one with only those of its stage), and each stage has an optimizer and "
                "a scheduler of its own: clip by `max_grad_norm`, give rates by names in `groups`, "
                "or use one that looks at one parameter at a time"
            )


def has_own(source: OptimizerFactory, schedule: Factory | None) -> list[str]:
    """Return those that are not torch's own, as the config has them."""
    return [
        f"{what} = {each.callable!r}"
        for what, each in (("optimizer", source), ("scheduler", schedule))
        if each is not None and each.callable.partition(":")[0].partition(".")[0] != "torch"
    ]


def _updates(
    source: OptimizerFactory, schedule: Factory | None, shapes: Shapes
) -> tuple[dict[str, Tensor], bool]:
    """Return what a few steps have done to each parameter, and whether they drew random numbers."""
    named = {name: nn.Parameter(_drawn(name, 0, shape)) for name, shape in shapes.items()}
    optimizer = optimizers.create(source, named)
    scheduler = None if schedule is None else importing.create(schedule, "scheduler", optimizer)
    before = {name: value.detach().clone() for name, value in named.items()}
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for step in range(STEPS):
        for name, value in named.items():
            value.grad = _drawn(name, step + 1, shapes[name])
        optimizer.step()
        optimizers.step_scheduler(scheduler, 1.0 / (step + 1))
    draws = not torch.equal(state, torch.get_rng_state())
    return {name: value.detach() - before[name] for name, value in named.items()}, draws


def _drawn(name: str, step: int, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(random_streams.derive_seed("parts", name, step))
    return torch.randn([min(size, MOST_ELEMENTS) for size in shape], generator=generator)
