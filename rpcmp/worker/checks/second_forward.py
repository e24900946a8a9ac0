"""Refuse a forward whose second call shows that it keeps something of its first one.

    the first forward, of a micro-batch    fills caches; and what it takes from its samples?
    two more, one after the other          buffers, attributes, parameters: do they move each time?
    all is put back, once more             the same outputs: nothing is kept where nobody looks

Each in its first training step. Evaluations, recovery and recomputing put back what they know.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rpcmp.errors import ConfigError, one_line, some_of
from rpcmp.pipelining import pytree
from rpcmp.worker.checks.training_check import WAYS_OUT, Forward, apart, differences, tell
from rpcmp.worker.state.forward_state import ForwardState, ParameterWatch, StateCopy, is_filled_in
from rpcmp.worker.state.values import GENERATORS, content_of, is_equal, is_plain, plain_of

log = logging.getLogger(__name__)

BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers that batch normalization has; in a module that was cut, these names alone tell it."""

ROUNDING = 1e-5
"""How far outputs of the same samples may be apart on a CPU, in parts of the largest."""


def require_unmoved(
    forward: Forward, inputs: list[Any], state: ForwardState, watch: Callable[[], ParameterWatch]
) -> None:
    """Check that a second forward changes nothing that the first has not changed alike.

    Args:
        forward: of the stage, which has called it before, so that caches are filled.
        state: what it may change; it is put back.
        watch: watches the parameters from now on.

    Raises:
        ConfigError: it does, so once per micro-batch and not once per mini-batch.
    """
    before, parameters = state.copy(), watch()
    try:
        with apart():
            first = forward(inputs, False)
            once = state.copy()
            second = forward(inputs, False)
        moved = [each for each in once if each.has_new_value and _is_looked_at(each)]
    except Exception as error:
        tell(error)
        return
    finally:
        state.put_back(before)
    names = [each.place.name for each in moved]
    if changed := parameters.changed():
        names.append(changed)
    if not names:
        return
    text = (
        f"the forward changes {some_of(names)} each time, so once per micro-batch and not once per "
        f"mini-batch: {WAYS_OUT}"
    )
    # A mere count may be for a log; if anything comes of it later, this has been said.
    are_counts = not changed and all(
        isinstance(each.value, int | float | str | None) for each in moved
    )
    if are_counts and not any(differences(first, [second], [1])):
        log.warning("%s", text)
        return
    raise ConfigError(text)


def _is_looked_at(copy: StateCopy) -> bool:
    if isinstance(copy.value, GENERATORS) or not is_plain(copy.value):
        return False
    return copy.place.name.rpartition(".")[2] not in BATCH_NORM


def differs_from_call_to_call(forward: Forward, inputs: list[Any], state: ForwardState) -> bool:
    """Whether a second forward gives something else than the first one, of the same samples."""
    before = state.copy()
    try:
        with apart():
            first = forward(inputs, False)
            second = forward(inputs, False)
        return any(differences(first, [second], [1]))
    except Exception as error:
        tell(error)
        return True
    finally:
        state.put_back(before)


def require_repeatable(
    forward: Forward, candidates: Sequence[list[Any]], state: ForwardState
) -> None:
    """Check that a forward gives the same again, once what it is known to change was put back.

    Args:
        forward: of the stage, which has called it before, so that caches are filled. It must not
            change parameters: they are not put back.
        candidates: inputs; the first ones of which a forward does not fail are taken.

    Raises:
        ConfigError: it does not, on a CPU; others compute in another order each time, so of them
            it is told.
    """
    before = state.copy()
    for inputs in candidates:
        try:
            with apart():
                first = forward(inputs, False)
                state.put_back(before)
                second = forward(inputs, False)
        except Exception as error:
            log.debug("a forward of a few samples alone fails: %s", one_line(error))
            continue
        finally:
            state.put_back(before)
        if _are_same(first, second):
            return
        text = (
            "the forward gives something else the second time, of the same inputs, random numbers "
            "and state, so it keeps or draws something where rpcmp cannot see it (an iterator, a "
            "generator, a file, the system's random numbers), and an evaluation or a recovery "
            "would change what is trained: keep numbers and tensors in attributes, and draw with "
            "torch, random or numpy.random"
        )
        if all(each.device.type == "cpu" for each in pytree.tensors([first, inputs])):
            raise ConfigError(text)
        log.warning("%s", text)
        return


def _are_same(first: Any, second: Any) -> bool:
    one, other = pytree.tensors(first), pytree.tensors(second)
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    one, other = one.detach(), other.detach()
    if torch.equal(one, other) or not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    low = one.dtype in (torch.float16, torch.bfloat16)
    largest = float(one.abs().nan_to_num().max())
    gap = float((one - other).abs().nan_to_num().max())
    return gap <= (1000 if low else 1) * ROUNDING * largest


class DataDependentInit:
    """Notes what a stage's first training forward takes from its samples, as ActNorm does.

    Made before that forward. What it fills in, and a later one leaves as it is, has to be the same
    from other samples: with several micro-batches it would be of the first one alone.
    """

    def __init__(self, state: ForwardState, watch: ParameterWatch) -> None:
        self._state, self._parameters = state, watch
        self._before = state.copy()

    def require_none(self, forward: Forward, inputs: list[Any]) -> None:
        """Check it after that forward.

        Args:
            inputs: of some of its samples.

        Raises:
            ConfigError: it takes something from its samples.
        """
        now = self._state.copy()
        known = {each.place.id for each in self._before}
        filled = [each for each in self._before if each.has_new_value]
        filled += [each for each in now if each.place.id not in known]
        if not (filled := [*filter(_is_looked_at, filled)]):
            return
        changed = self._parameters.changed()
        values = {each.place.id: plain_of(each.content) for each in now}
        try:
            with apart(), self._put_back(now):
                forward(inputs, False)
                kept = [each for each in filled if is_equal(_value(each), values[each.place.id])]
            if changed:  # to fill in once more would write to a parameter, which nobody puts back
                names = [changed] if kept else []
            else:
                with apart(), self._put_back(now):
                    self._state.put_back(self._before)
                    forward(inputs, False)
                    names = [
                        each.place.name
                        for each in kept
                        if not is_filled_in(_value(each), values[each.place.id])
                    ]
        except Exception as error:
            tell(error)
            return
        if names:
            raise ConfigError(
                f"the first forward sets {some_of(names)} from its samples, so from those of a "
                f"micro-batch and not of the mini-batch: {WAYS_OUT}"
            )

    @contextlib.contextmanager
    def _put_back(self, copies: Sequence[StateCopy]) -> Iterator[None]:
        try:
            yield
        finally:
            self._state.put_back(copies)


def _value(copy: StateCopy) -> Any:
    """Return what is at a place now."""
    return plain_of(content_of(copy.now))
