"""What a second forward shows that the first one has kept; tried before a training's first step.

    a few samples                           ──> outputs, and what is not as it was
    the same samples, once more             ──> `moved`: does more change with each call?
    all is put back, the same samples       ──> `repeats`: the same outputs?
    other samples after these, and alone    ──> `carried`: the same outputs, and the same state?

All is what a forward may change: buffers, attributes, variables outside of modules, parameters. In
the end it is as before, and no graph that a backward needs was made yet.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError, some_of
from rpcmp.pipelining import pytree
from rpcmp.splitting.side_effects import parameters_of
from rpcmp.worker.checks.training_check import (
    WAYS_OUT,
    Forward,
    differences,
    isolated,
    tell_not_tried,
)
from rpcmp.worker.state.forward_state import ForwardState, StateCopy, copied
from rpcmp.worker.state.outer_variables import StatePlace
from rpcmp.worker.state.values import GENERATORS, as_numbers, is_plain

log = logging.getLogger(__name__)

BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers that batch normalization has; in a module that was cut, these names alone tell it."""

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
"""How far outputs of the same samples may be apart, in parts of the largest."""

LOW_ROUNDING = 0.01


class TrialState:
    """What a forward may change, with its parameters; copied and put back.

    Args:
        parameters: by name; copies of them are made.
    """

    def __init__(self, state: ForwardState, parameters: Mapping[str, nn.Parameter]) -> None:
        self._state = state
        self._parameters = [StatePlace(n, {n: each}, n) for n, each in parameters.items()]

    def copy(self) -> list[StateCopy]:
        return [copied(place) for place in (*self._state.places(), *self._parameters)]

    def made_since(self, before: Sequence[StateCopy]) -> list[StateCopy]:
        """Return what was not there yet, such as an attribute of a first call."""
        known = {each.place.id for each in before}
        return [copied(place) for place in self._state.places() if place.id not in known]

    def put_back(self, copies: Sequence[StateCopy]) -> None:
        self._state.put_back(copies)


class Trial(NamedTuple):
    """What some forwards of a few samples have shown.

    Attributes:
        moved: by name, what each forward changes; True: it has more than numbers and texts.
        matters: whether a second forward gives something else than the first.
        repeats: whether it gives the same once all was put back.
        of_samples: what is another thing after other samples.
        carried: of these by name what stays, if samples have other outputs for it.
        is_on_host: whether all outputs are on the CPU, which computes in one order.
        parameters: that outputs depend on each time.
    """

    moved: dict[str, bool]
    matters: bool = False
    repeats: bool = True
    of_samples: Sequence[StatePlace] = ()
    carried: Sequence[str] = ()
    is_on_host: bool = True
    parameters: Sequence[nn.Parameter] = ()


def tried(
    forward: Forward,
    candidates: Sequence[tuple[list[Any], list[Any]]],
    state: TrialState,
    before: Sequence[StateCopy],
) -> Trial | None:
    """Return what forwards show; None, and a warning, if all fail.

    Args:
        forward: has been called before, and all but what nobody can put back was put back.
        candidates: inputs of a few samples, and of others. Of the first ones a forward may fail.
        before: copies of the state, to which it is put back.
    """
    failed: Exception | None = None
    for inputs, others in candidates:
        try:
            with isolated():
                return _Trying(forward, state, before).results(inputs, others)
        except Exception as error:  # of the user's code
            failed = error
        finally:
            state.put_back(before)
    if failed is not None:
        tell_not_tried(failed)
    return None


class _Trying:
    def __init__(self, forward: Forward, state: TrialState, before: Sequence[StateCopy]) -> None:
        self._forward, self._state, self._before = forward, state, before
        self._read: list[dict[int, nn.Parameter]] = []

    def results(self, inputs: list[Any], others: list[Any]) -> Trial:
        first = self._anew(inputs)
        if any(map(_has_nan, first)):
            raise ValueError("some of its outputs are no numbers")  # a deviation of one sample
        filled = self._filled()
        second = self._outputs(inputs)
        moved = [each for each in filled if each.has_new_value]
        still = [each for each in filled if not each.has_new_value]
        again = self._anew(inputs), self._anew(inputs)  # also what has two values in turn
        of_samples, carried = self._taken(still, first, inputs, others)
        one, other, *_ = self._read
        return Trial(
            {each.place.name: not _has_numbers_only(each.value) for each in moved},
            any(differences(first, [second], [1])),
            all(_are_same(first, each) for each in again),
            of_samples,
            carried,
            all(each.device.type == "cpu" for each in first),
            [one[key] for key in one.keys() & other.keys()],
        )

    def _taken(
        self,
        filled: Sequence[StateCopy],
        first: list[Tensor],
        inputs: list[Any],
        others: list[Any],
    ) -> tuple[list[StatePlace], list[str]]:
        """Return what is another thing after other samples, and what of it they have carried on."""
        after = self._outputs(others)
        kept = {each.place.id for each in filled if not each.has_new_value}
        alone = self._anew(others)
        taken = [each.place for each in filled if each.has_new_value]
        carried = [place.name for place in taken if place.id in kept]
        if not carried or _are_same(after, alone):
            return taken, []
        # Of a table that is drawn once, and noise that is drawn after it, nothing can be told.
        draws = not _are_same(self._anew(inputs, draws_others=True), first)
        return taken, [] if draws else carried

    def _anew(self, inputs: list[Any], draws_others: bool = False) -> list[Tensor]:
        self._state.put_back(self._before)
        return self._outputs(inputs, draws_others)

    def _outputs(self, inputs: list[Any], draws_others: bool = False) -> list[Tensor]:
        outputs = pytree.tensors(self._forward(inputs, draws_others))
        self._read.append({id(each): each for each in parameters_of(outputs)})
        return [each.detach() for each in outputs]

    def _filled(self) -> list[StateCopy]:
        """Return copies of what is not as it was before."""
        changed = [copied(each.place) for each in self._before if each.has_new_value]
        return [*filter(_is_looked_at, (*changed, *self._state.made_since(self._before)))]


NUMBERS = (int, float, str, type(None))


def _has_numbers_only(value: Any) -> bool:
    """Whether it may be a log: a count, or a list of losses."""
    if isinstance(value, list | tuple | deque | dict):
        return all(map(_has_numbers_only, value.values() if isinstance(value, dict) else value))
    return isinstance(value, NUMBERS)


def _is_looked_at(copy: StateCopy) -> bool:
    is_state = isinstance(copy.value, Tensor) or is_plain(copy.value)
    if isinstance(copy.value, GENERATORS) or not is_state:
        return False
    return copy.place.name.rpartition(".")[2] not in BATCH_NORM


def require_unmoved(trial: Trial) -> None:
    """Check that a second forward changes nothing that the first has not changed alike.

    Numbers on which no output depends may be a log: a warning, and if anything comes of them later,
    that was said.

    Raises:
        ConfigError: it does, so once per micro-batch and not once per mini-batch.
    """
    if not trial.moved:
        return
    text = (
        f"the forward changes {some_of([*trial.moved])} each time, so once per micro-batch and not "
        f"once per mini-batch: {WAYS_OUT}"
    )
    if any(trial.moved.values()) or trial.matters:
        raise ConfigError(text)
    log.warning("%s", text)


def require_repeatable(trial: Trial) -> None:
    """Check that a forward gives the same again, once what it is known to change was put back.

    Raises:
        ConfigError: it does not, on a CPU; others compute in another order each time, so of them
            it is told.
    """
    if trial.repeats:
        return
    text = (
        "the forward gives something else the second time, of the same inputs, random numbers and "
        "state, so it keeps or draws something where rpcmp cannot see it (an iterator, a "
        "generator, a file, the system's random numbers), and an evaluation or a recovery would "
        "change what is trained: keep numbers and tensors in attributes, and draw with torch, "
        "random or numpy.random"
    )
    if trial.is_on_host:
        raise ConfigError(text)
    log.warning("%s", text)


def require_nothing_carried(trial: Trial) -> None:
    """Check that no forward fills in what it takes from its samples, as ActNorm does.

    Raises:
        ConfigError: it does, so the first micro-batch would say it, and not the mini-batch.
    """
    if trial.carried:
        raise ConfigError(
            f"the first forward sets {some_of(trial.carried)} from its samples, so from those "
            f"of a micro-batch and not of the mini-batch: {WAYS_OUT}"
        )


def other_samples(inputs: list[Any]) -> list[Any]:
    """Return inputs of the same kind, where there is but one sample."""
    return [pytree.map_tensors(_other, each) for each in inputs]


def _other(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * 1.5
    return tensor.flip(-1) if tensor.dim() else tensor  # tokens


def _has_nan(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_meta
    return is_dense and tensor.is_floating_point() and bool(tensor.isnan().any())


def _are_same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(_is_same, first, second))


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.is_nested or one.is_meta:
        return True  # nothing is said of it
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    try:
        one, other = as_numbers(one), as_numbers(other)
        if not one.is_floating_point():
            return torch.equal(one, other)
        is_finite = one.isfinite()
        if not torch.equal(is_finite, other.isfinite()):
            return False
        apart = (one - other)[is_finite].abs()
        allowed = ROUNDING.get(one.dtype, LOW_ROUNDING) * one[is_finite].abs()
        return not apart.numel() or bool(apart.max() <= allowed.max())
    except (RuntimeError, NotImplementedError):  # of a dtype or layout that has no arithmetic
        return True
