"""Tries before the first step whether an optimizer can be restored, instead of after a fault.

    on stand-ins for the stage's parameters, with the same made-up gradients:
        20 steps ───────────────────────────────────────────────────> A
         5 steps, packed as into a file; a fresh one, unpacked, 15 ──> B     A and B: same bits?

A user's optimizer may keep state anywhere, and state that its `state_dict` leaves out would show as
different numbers after the first fault. torch's own are tested in this repository instead. What
no file can hold and the trial did not need is watched while the run goes on.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rpcmp.checkpoint.stage_state import StageState, decoded, pack, require_storable
from rpcmp.errors import ConfigError, FactoryError, one_line
from rpcmp.pipelining import optimizers, random_streams
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


class _Attempt(NamedTuple):
    named: dict[str, nn.Parameter]
    optimizer: Any
    scheduler: Any
    state: OptimizerState


def require_watching_the_loss(scheduler: Any, name: str) -> None:
    """Check that a scheduler that watches something watches the training loss, which gets smaller.

    Raises:
        ConfigError: it waits for what gets larger, or is one within another, to which no loss goes.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        if scheduler.mode == "max":
            raise ConfigError(
                f"scheduler = {name!r} with mode = 'max' waits for something that grows, and what "
                "it watches is the mean training loss: leave out `mode`"
            )
        return
    inner = [*vars(scheduler).values()] if hasattr(scheduler, "__dict__") else []
    inner += [each for value in inner if isinstance(value, list | tuple) for each in value]
    if any(isinstance(each, ReduceLROnPlateau) for each in inner):
        raise ConfigError(
            f"scheduler = {name!r} has a ReduceLROnPlateau inside, which would be stepped without "
            "the loss that it watches: name ReduceLROnPlateau itself, or a scheduler that watches "
            "nothing"
        )


def require_steppable(optimizer: Any, what: str) -> None:
    """Check that a step needs nothing but gradients."""
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
        named: the parameters that it is to train; they are not changed.
        group_of: returns the number of a parameter's group.
        what: the config key and the optimizer's class, for the error message.
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
) -> tuple[dict[str, Tensor], _Attempt]:
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


def _new_trial(build: Build, kinds: Mapping[str, Tensor]) -> _Attempt:
    named = {name: nn.Parameter(_made_up(like, 0, name)) for name, like in kinds.items()}
    random_streams.seed_all(0, "rehearsal")
    optimizer, scheduler = build(named)
    return _Attempt(named, optimizer, scheduler, OptimizerState(optimizer, named, "the trial"))


def _made_up(like: Tensor, step: int, name: str) -> Tensor:
    """Numbers of the size of gradients, the same in every call."""
    generator = torch.Generator().manual_seed(random_streams.derive_seed("rehearsal", step, name))
    numbers = torch.randn(like.shape, generator=generator, dtype=torch.float32) / 16
    return numbers.to(like.device, like.dtype)


def _step(trial: _Attempt, first: int, last: int) -> None:
    for step in range(first, last + 1):
        for name, parameter in trial.named.items():
            parameter.grad = _made_up(parameter, step, name)
        random_streams.seed_all(0, "optimizer", step, "rehearsal")
        trial.optimizer.step()
        optimizers.step_scheduler(trial.scheduler, 1.0 / step)


def _copy(source: _Attempt, target: _Attempt) -> None:
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
    restored = decoded(about, copies, list(model), list(model))
    with torch.no_grad():
        for name, parameter in target.named.items():
            parameter.copy_(restored.model[name])
    target.state.load(KeptState(restored.state, restored.groups, restored.aside))
    if target.scheduler is not None:
        target.scheduler.load_state_dict(restored.scheduler)


def _difference(one: _Attempt, other: _Attempt) -> str:
    """Describe how two trials differ; empty if they do not."""
    state, other_state = one.state.read(), other.state.read()
    names = [name for name in one.named if not same_bits(one.named[name], other.named[name])]
    if (
        not names
        and same(state.state, other_state.state)
        and same(state.groups, other_state.groups)
    ):
        return ""
    different = f"parameters such as {names[0]!r}" if names else "its state or its options"
    hidden = one.state.hidden()
    lost = f" (no checkpoint holds its attributes {', '.join(hidden)})" if hidden else ""
    return f"{different} differ {STEPS - BEFORE} steps after it was restored{lost}"


MAX_PICKLE_BYTES = 2**20
"""Larger attributes are not watched, because this is done after every step."""


class HiddenState:
    """Watches attributes of an optimizer that no file can hold: neither tensors nor plain values.

    Most do not matter, such as a helper without a memory of its own. A pickle tells whether one has
    changed, with a tensor as its identity and the number of its changes in place, and a parameter
    as its identity.
    """

    def __init__(self, state: OptimizerState) -> None:
        self._state = state
        self._parameters = {id(parameter) for parameter in state.parameters.values()}
        self._reported: set[str] = set()
        self._marks = self._marked()

    def warn_of_changes(self) -> None:
        """Warn, once each, about attributes that have changed or are new.

        The steps of the rehearsal did not need them, but later ones may.
        """
        for name, mark in self._marked().items():
            if mark != self._marks.get(name):
                self._reported.add(name)
                _log.warning(
                    "%s: %s has changed its attribute %r, which no checkpoint holds: if steps "
                    "depend on it, a run that goes on after a fault has other bits; keep what they "
                    "need in self.state[parameter]",
                    self._state.where,
                    self._state.kind,
                    name,
                )

    def _marked(self) -> dict[str, bytes | None]:
        """Return a hash of each value that changes with it; None if it cannot be watched."""
        hidden = self._state.hidden().items()
        return {name: self._mark(value) for name, value in hidden if name not in self._reported}

    def _mark(self, value: Any) -> bytes | None:
        hashed = _Hashed()
        try:
            _Marker(hashed, self._parameters).dump(value)
        except Exception:  # of a lock, a local class, too many bytes, anything of the user's
            return None
        return hashed.digest


class _Marker(pickle.Pickler):
    def __init__(self, file: _Hashed, parameters: Collection[int]) -> None:
        super().__init__(file)
        self._parameters = parameters

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        return (id(obj), None if id(obj) in self._parameters else obj._version)


class _Hashed:
    """A file that keeps only the hash of its content."""

    def __init__(self) -> None:
        self._hash, self._size = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        size = memoryview(data).nbytes
        self._size += size
        if self._size > MAX_PICKLE_BYTES:
            raise ValueError("too large")
        self._hash.update(data)
        return size

    @property
    def digest(self) -> bytes:
        return self._hash.digest()
