"""Tries before the first step whether an optimizer can be restored, instead of after a fault.

    on stand-ins for the stage's parameters, with the same made-up gradients:
        20 steps ───────────────────────────────────────────────────> A
         5 steps, packed as into a file; a fresh one, unpacked, 15 ──> B     A and B: same bits?

A user's optimizer may keep state anywhere, and state that its `state_dict` leaves out would show as
different numbers after the first fault. torch's own are tested in this repository instead.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rpcmp.checkpoint.stage_state import StageState, decoded, pack, require_storable
from rpcmp.errors import FactoryError, one_line
from rpcmp.pipelining import layers
from rpcmp.rpc.tensors import same_bits
from rpcmp.worker.optimizer_state import KeptState, OptimizerState, same

_log = logging.getLogger(__name__)

STEPS = 20
"""In total; some optimizers do something different every ten steps."""

BEFORE = 5
"""Steps before it is stored."""

LARGEST = 8192
"""Maximum number of elements of a stand-in. A halved one keeps 4096, from which 8-bit optimizers
treat a parameter as a large one, and optimizers of cubic cost take only seconds."""

ALIKE = 2
"""Number of parameters per shape, dtype and group that are tried."""

Build = Callable[[Mapping[str, nn.Parameter]], tuple[Any, Any]]
"""Makes an optimizer, and its scheduler or None, of named parameters."""


class _Trial(NamedTuple):
    named: dict[str, nn.Parameter]
    optimizer: Any
    scheduler: Any
    state: OptimizerState


def require_steppable(optimizer: Any, what: str) -> None:
    """Check that a step needs nothing but gradients.

    Raises:
        FactoryError: its `step` needs a closure, which would compute the loss again, or it has
            different weights for evaluations.
    """
    if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        raise FactoryError(
            f"{what} = {type(optimizer).__name__}: it has weights for training and others for all "
            "else, and has to be told (`train()`, `eval()`), which evaluations, checkpoints and "
            "exports of a pipeline do not do; take another optimizer"
        )
    try:
        # The class's method, because a scheduler wraps the object's. Its first parameter is `self`.
        parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    except (AttributeError, TypeError, ValueError):  # not a Python function
        return
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.default is p.empty and p.kind in kinds for p in parameters):
        raise FactoryError(
            f"{what} = {type(optimizer).__name__}: its step needs a closure that computes the loss "
            "again, and a step across stages computes it once; take another optimizer"
        )


def require_restorable(
    build: Build, named: Mapping[str, nn.Parameter], group_of: Callable[[str], int], what: str
) -> None:
    """Check that storing and restoring the optimizer does not change its bits.

    Args:
        build: makes a new optimizer.
        named: the parameters that it is to train; they are not changed.
        group_of: returns the number of a parameter's group.
        what: the config key and the optimizer's class, for the error message.

    Raises:
        FactoryError: bits differ, or it cannot be tried.
    """
    try:
        kinds, whole = _whole(build, named, group_of)
        first = _new_trial(build, kinds)
        _step(first, 1, BEFORE)
        second = _new_trial(build, kinds)
        _copy(first, second)
        _step(second, BEFORE + 1, STEPS)
        different = _difference(whole, second)
    except Exception as error:
        different = one_line(error)
    if different:
        raise FactoryError(
            f"{what}: a run with it could not go on after a fault as if there had been none; tried "
            f"with made-up gradients: {different}. Keep all that a step needs in "
            "self.state[parameter], as tensors, numbers, strings, lists and dicts; or set "
            "recovery.enabled = false, without [checkpoint], to train without recovery"
        )


def _whole(
    build: Build,
    named: Mapping[str, nn.Parameter],
    group_of: Callable[[str], int],
    largest: float = LARGEST,
) -> tuple[dict[str, Tensor], _Trial]:
    """Run all steps on stand-ins; on some of full size, if smaller ones fail."""
    kinds = _kinds(named, group_of, largest)
    _log.info("rehearsing the optimizer on %d parameters", len(kinds))
    try:
        trial = _new_trial(build, kinds)
        _step(trial, 1, STEPS)
    except Exception as error:
        if all(kinds[name].shape == named[name].shape for name in kinds):
            raise
        _log.info("again, in full size: %s", one_line(error))
        return _whole(build, named, group_of, math.inf)
    return kinds, trial


def _kinds(
    named: Mapping[str, nn.Parameter], group_of: Callable[[str], int], largest: float
) -> dict[str, Tensor]:
    """Some parameters of each kind, with no more than `largest` elements."""
    kinds: dict[str, Tensor] = {}
    counts: dict[Any, int] = {}
    for name, parameter in named.items():
        shape = _smaller(parameter.shape, largest)
        kind = (shape, parameter.dtype, parameter.device, group_of(name))
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= ALIKE:
            kinds[name] = parameter.detach().new_empty(shape)
    return kinds


def _smaller(shape: Sequence[int], largest: float) -> tuple[int, ...]:
    sizes = list(shape)
    while math.prod(sizes) > largest:
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[longest] = -(-sizes[longest] // 2)
    return tuple(sizes)


def _new_trial(build: Build, kinds: Mapping[str, Tensor]) -> _Trial:
    named = {name: nn.Parameter(_made_up(like, 0, name)) for name, like in kinds.items()}
    layers.seed_all(0, "rehearsal")
    optimizer, scheduler = build(named)
    return _Trial(named, optimizer, scheduler, OptimizerState(optimizer, named, "the trial"))


def _made_up(like: Tensor, step: int, name: str) -> Tensor:
    """Numbers of the size of gradients, the same in every call."""
    generator = torch.Generator().manual_seed(layers.derive_seed("rehearsal", step, name))
    numbers = torch.randn(like.shape, generator=generator, dtype=torch.float32) / 16
    return numbers.to(like.device, like.dtype)


def _step(trial: _Trial, first: int, last: int) -> None:
    for step in range(first, last + 1):
        for name, parameter in trial.named.items():
            parameter.grad = _made_up(parameter, step, name)
        layers.seed_all(0, "optimizer", step, "rehearsal")
        trial.optimizer.step()
        if trial.scheduler is not None:
            trial.scheduler.step(*([1.0 / step] if _watches(trial.scheduler) else []))


def _watches(scheduler: Any) -> bool:
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def _copy(source: _Trial, target: _Trial) -> None:
    kept = source.state.read()
    scheduler = None if source.scheduler is None else source.scheduler.state_dict()
    model: dict[str, Tensor] = {name: p.detach() for name, p in source.named.items()}
    tensors, about = pack(
        StageState(BEFORE, "", model, kept.state, kept.groups, scheduler, aside=kept.aside)
    )
    for name, tensor in tensors.items():
        require_storable(name, tensor)
    copies = {  # without their strides, as in a file
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    found = decoded(about, copies, list(model), list(model))
    with torch.no_grad():
        for name, parameter in target.named.items():
            parameter.copy_(found.model[name])
    target.state.load(KeptState(found.state, found.groups, found.aside))
    if target.scheduler is not None:
        target.scheduler.load_state_dict(found.scheduler)


def _difference(one: _Trial, other: _Trial) -> str:
    """Describe how two trials differ; empty if they do not."""
    mine, theirs = one.state.read(), other.state.read()
    names = [name for name in one.named if not same_bits(one.named[name], other.named[name])]
    if not names and same(mine.state, theirs.state) and same(mine.groups, theirs.groups):
        return ""
    what = f"parameters such as {names[0]!r}" if names else "its state or its options"
    hidden = one.state.hidden()
    lost = f" (no checkpoint holds its attributes {', '.join(hidden)})" if hidden else ""
    return f"{what} differ {STEPS - BEFORE} steps after it was restored{lost}"
