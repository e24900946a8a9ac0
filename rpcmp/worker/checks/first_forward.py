"""A stage's first forward of a training, in which its code shows what it does besides computing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from rpcmp.errors import ConfigError, some_of
from rpcmp.pipelining import pytree, random_streams
from rpcmp.rpc.messages import MicrobatchMeta
from rpcmp.splitting.layer import SplitLayer
from rpcmp.splitting.side_effects import (
    SideEffects,
    functions_of,
    has_backward_hooks,
    noted_hooks,
)
from rpcmp.worker.checks.injected_gradients import require_one_addition
from rpcmp.worker.checks.inner_gradients import whole_derivatives
from rpcmp.worker.checks.objective import rows
from rpcmp.worker.checks.parameter_hooks import require_linear
from rpcmp.worker.checks.second_forward import (
    Trial,
    other_samples,
    require_nothing_carried,
    require_repeatable,
    require_unmoved,
    tried,
)
from rpcmp.worker.checks.training_check import (
    Forward,
    isolated,
    quiet,
    require_independent,
    require_linear_backward,
)
from rpcmp.worker.model import StageModel
from rpcmp.worker.state.forward_state import ForwardState

SAMPLES = 4
"""That forwards are tried with, and gradients of Functions: two parts of two, as some need two."""


class FirstForward:
    """Runs and checks the first forward; the first two, if each is of a single sample.

    Args:
        partial: see `rpcmp.worker.checks.inner_gradients`.
        adds_up: whether the gradients of micro-batches are to add up to those of a mini-batch.
    """

    def __init__(self, model: StageModel, partial: Sequence[bool], adds_up: bool) -> None:
        self._model, self._partial, self._adds_up = model, partial, adds_up
        self._inputs: list[Any] = []
        self._first_inputs: list[Any] | None = None
        self._functions: list[str] = []
        self._hooks: list[str] = []
        self._is_tried = False

    def forward(self, inputs: list[Any], meta: MicrobatchMeta) -> Any:
        """Return the outputs of a micro-batch.

        Raises:
            ConfigError: the forward asks for a derivative that it would get a part of, or keeps
                what it may not.
        """
        if not self._is_tried:
            self._is_tried = True
            with _flags_kept(self._model):
                self._try(inputs, meta)
        entered = [each.grad_fn for each in pytree.tensors(inputs)]
        seen = SideEffects()
        with whole_derivatives(inputs, self._partial), noted_hooks(seen):
            outputs = self._model.forward(inputs, meta)
        self._inputs, self._hooks = inputs, seen.hooks
        self._functions = functions_of(pytree.tensors(outputs), entered).functions
        return outputs

    def _require_own_parameters(self, read: Sequence[nn.Parameter]) -> None:
        own = {id(each) for _, each in self._model.named_parameters()}
        names = {id(each): name for name, each in self._model.hidden.items()}
        if foreign := [each for each in read if id(each) not in own]:
            shown = [names.get(id(each), f"one of the shape {[*each.shape]}") for each in foreign]
            raise ConfigError(
                f"the outputs depend on parameters that no layer of this stage has, so no "
                f"optimizer trains them here ({some_of(shown)}): let a layer have them as "
                "attributes, and `tied` name them if several layers do, or freeze them"
            )

    def _try(self, inputs: list[Any], meta: MicrobatchMeta) -> None:
        """Look for what forwards keep, before there is a graph that they could spoil."""
        has_parts = self._has_parts(meta)
        if self._model.is_cut and not has_parts:
            return  # a graph has nothing that it could keep but buffers
        self._model.set_mode(training=True)  # which may merge weights
        if (state := self._model.trial_state()) is None:
            return
        forward, before = self._forward_of(meta, _apart), state.copy()
        try:
            with isolated():
                # What nobody can put back, such as a functools.cache, is filled as without a trial.
                forward(inputs, False)
        except Exception:  # the forward itself will say it
            return
        finally:
            state.put_back(before)
        candidates = [_few(inputs, meta.num_samples), (inputs, other_samples(inputs))]
        with quiet(self._model.modules()):
            trial = tried(forward, candidates, state, before)
        if trial is not None:
            self._judge(trial, has_parts)

    def _judge(self, trial: Trial, has_parts: bool) -> None:
        if (variables := self._model.variables) is not None:
            carries = bool(trial.carried)
            variables.learn(trial.of_samples, trial.matters or carries, carries)
        self._require_own_parameters(trial.parameters)
        if not self._model.is_cut:
            require_repeatable(trial)
        if has_parts:
            require_unmoved(trial)
            require_nothing_carried(trial)

    def check(self, meta: MicrobatchMeta) -> bool:
        """Check the micro-batch's forward; False: the next one is needed, too.

        Raises:
            ConfigError: what it computes is another sum for other micro-batches.
        """
        if not self._has_parts(meta):
            return True
        with _flags_kept(self._model):
            return self._check(meta)

    def _check(self, meta: MicrobatchMeta) -> bool:
        if meta.num_samples == 1 and self._first_inputs is None:
            self._first_inputs = self._inputs
            return False
        state = self._model.forward_state()
        parts, counts = self._parts(meta.num_samples, 2)
        forward = self._forward_of(meta, Tensor.clone)
        modules = [*self._model.modules()]
        require_linear(self._model.named_parameters())
        with quiet(modules):
            # In a cut batch normalization cannot be told apart, to be left out.
            if not any(isinstance(each, SplitLayer) and each.needs_two_samples for each in modules):
                require_independent(forward, parts, counts, state)
        functions = self._seen_eagerly(meta, state) if self._model.compiles else self._functions
        trained = [each for _, each in self._model.named_parameters() if each.requires_grad]
        if functions:
            some, _ = self._parts(meta.num_samples, SAMPLES)
            require_one_addition(functions, lambda x: forward(x, False), some, trained, state)
        if changing := [*functions, *self._hooks, *_with_backward_hooks(modules)]:
            with quiet(modules):
                what = f"{some_of(changing)} changes gradients"
                require_linear_backward(forward, parts, counts, trained, state, what)
        return True

    def _forward_of(self, meta: MicrobatchMeta, copied: Callable[[Tensor], Tensor]) -> Forward:
        """Return a forward of copies of its inputs, since it may write to them."""

        def forward(inputs: list[Any], draws_others: bool) -> Any:
            draws = meta._replace(number=meta.number + 1) if draws_others else meta
            return self._model.forward(pytree.map_tensors(copied, inputs), draws, eagerly=True)

        return forward

    def _has_parts(self, meta: MicrobatchMeta) -> bool:
        return self._adds_up and meta.round.num_microbatches > 1

    def _seen_eagerly(self, meta: MicrobatchMeta, state: ForwardState) -> list[str]:
        before = state.copy()
        try:
            with random_streams.kept():
                outputs = self._model.forward(self._inputs, meta, eagerly=True)
        finally:
            state.put_back(before)
        # Compiled code has none: they were traced, and are a part of one that is torch's.
        entered = [each.grad_fn for each in pytree.tensors(self._inputs)]
        return functions_of(pytree.tensors(outputs), entered).functions

    def _parts(
        self, samples: int, most: int
    ) -> tuple[tuple[list[Any], list[Any]], tuple[int, int]]:
        """Return inputs of some samples and of some more, and how many these are."""
        if self._first_inputs is not None:
            return (self._first_inputs, self._inputs), (1, 1)
        return _halves(self._inputs, samples, most)


def _halves(
    inputs: list[Any], samples: int, most: int
) -> tuple[tuple[list[Any], list[Any]], tuple[int, int]]:
    sizes = [each.shape[0] for each in pytree.tensors(inputs) if each.dim()]
    tokens = max((size for size in sizes if size % samples == 0), default=samples)
    count = min(samples, most)
    half = count // 2
    first, second = (
        rows(inputs, start, end, samples, tokens) for start, end in ((0, half), (half, count))
    )
    return (first, second), (half, count - half)


def _few(inputs: list[Any], samples: int) -> tuple[list[Any], list[Any]]:
    """Return inputs of one or two samples, and of others."""
    if samples == 1:
        return inputs, other_samples(inputs)
    return _halves(inputs, samples, SAMPLES)[0]


def _apart(tensor: Tensor) -> Tensor:
    """Return a copy that a forward may write to, and that no graph of another stage has."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _with_backward_hooks(modules: Sequence[nn.Module]) -> list[str]:
    return [f"a hook of {type(each).__name__}" for each in modules if has_backward_hooks(each)]


@contextlib.contextmanager
def _flags_kept(model: StageModel) -> Iterator[None]:
    """Undo what forwards in this block freeze, as one may that counts its calls."""
    before = [(each, each.requires_grad) for _, each in model.named_parameters()]
    try:
        yield
    finally:
        for each, flag in before:
            if each.requires_grad != flag:
                each.requires_grad_(flag)
