"""A backward in two parts: the input gradient now, the weight gradients later.

    forward           y = linear(x, w, b)             while `WeightGradients.watch` is entered
    backward          g_x = g @ w                     goes on through the graph at once
                      w, b get None                   and (g, x) wait in `WeightGradients`
    later             w.grad += g.T @ x, b.grad += g.sum(0)

Linear layers and convolutions have nearly all of a model's weights, and torch calls each of them by
a function of `torch.nn.functional`. `install` replaces these functions. The new ones only differ on
a thread that runs a stage's forward. All other operations, and all that cannot be split, compute
weight gradients in the backward as usual, so the bits always equal a plain backward's.

Not split are parameters that a micro-batch uses more than once (autograd sums their gradients
before it adds them to `.grad`: another order of sums) or that have user hooks, checkpointed layers,
autocast, double backwards, and operations that do not call these functions (a fused LSTM, custom
functions, normalizations).

`torch.distributed.pipelining._backward` (arXiv:2401.10241) walks the graph of every micro-batch in
Python. This costs some 10 microseconds per layer.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.graph import Node


class AccumulateGradHook:
    """Calls a function at each addition to a parameter's gradient, by autograd or by this module.

    Other hooks keep a parameter from being split. This one does not: it is told when a backward
    defers the gradient, and called when that has been added.
    """

    def __init__(self, parameter: Tensor, on_added: Callable[[], None]) -> None:
        self._on_added = on_added
        self._deferred = 0
        parameter.register_post_accumulate_grad_hook(self)

    def __call__(self, _: Tensor) -> None:
        if self._deferred:  # autograd calls its hooks for a gradient of None as well
            self._deferred -= 1
        else:
            self._on_added()

    def defer(self) -> None:
        """Ignore the next call: the running backward gives None, and its gradient comes later."""
        self._deferred += 1

    def reset(self) -> None:
        """Forget backwards that have failed halfway."""
        self._deferred = 0


Operation = Callable[..., Tensor]

CONVOLUTIONS = (
    *("conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)


class _Watched(threading.local):
    gradients: WeightGradients | None = None


_watched = _Watched()


class WeightGradients:
    """The deferred weight gradients of one micro-batch."""

    def __init__(self, splittable: frozenset[Tensor]) -> None:
        self._splittable = splittable
        self._uses: Counter[Tensor] = Counter()
        self._waiting: list[Callable[[], None]] = []
        self._deferring = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Split forwards on this thread within the block."""
        before, _watched.gradients = _watched.gradients, self
        try:
            yield
        finally:
            _watched.gradients = before

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Defer the weight gradients of backwards within the block to `accumulate`.

        Only the stage's own backward runs in it, and not those inside of the user's forward.
        """
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def accumulate(self) -> None:
        waiting, self._waiting = self._waiting, []
        with torch.no_grad():
            for add in waiting:
                add()

    def count_use(self, parameters: Iterable[Tensor]) -> bool:
        """Count an operation's use of `parameters`; return whether it may be split.

        Hooks of the user's forbid that: autograd calls them for a gradient of None as well.
        """
        self._uses.update(parameters)
        return all(
            parameter in self._splittable
            and not parameter._backward_hooks
            and all(isinstance(hook, AccumulateGradHook) for hook in _hooks(parameter))
            for parameter in parameters
        )

    def postpone(self, parameters: Sequence[Tensor], add: Callable[[], None]) -> bool:
        """Defer `add`, if it is the only addition to its parameters in this micro-batch."""
        if not self._deferring or any(self._uses[parameter] > 1 for parameter in parameters):
            return False
        hooks = [hook for parameter in parameters for hook in _hooks(parameter)]
        if not all(isinstance(hook, AccumulateGradHook) for hook in hooks):  # of a later forward
            return False
        for hook in hooks:
            hook.defer()
        self._waiting.append(add)
        return True


class Splitter:
    """Makes the WeightGradients of a stage's micro-batches.

    The first micro-batch is not split: its graph shows which parameters can be.
    """

    def __init__(self) -> None:
        self._splittable: frozenset[Tensor] | None = None

    def next_microbatch(self, splits: bool = True) -> WeightGradients:
        """Return the next micro-batch's; nothing is deferred unless the stage `splits`."""
        return WeightGradients((splits and self._splittable) or frozenset())

    def calibrate(self, outputs: Iterable[Tensor]) -> None:
        """Find splittable parameters in the graph of the first micro-batch's outputs."""
        if self._splittable is None:
            self._splittable = used_once(outputs)


def used_once(outputs: Iterable[Tensor]) -> frozenset[Tensor]:
    """Return the parameters that the graph of `outputs` uses exactly once."""
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    users: dict[Node, list[Node]] = {node: [] for node in nodes}
    while nodes:
        user = nodes.pop()
        for node, _ in user.next_functions:
            if node is None:
                continue
            if node not in users:
                users[node] = []
                nodes.append(node)
            users[node].append(user)

    def uses(node: Node) -> int:
        """Count uses; uses of a transposed parameter count as its own."""
        return sum(1 if len(user.next_functions) > 1 else uses(user) for user in users[node])

    # Only AccumulateGrad has a variable.
    return frozenset(
        node.variable for node in users if hasattr(node, "variable") and uses(node) == 1
    )


def splittable(operation: Operation) -> Operation:
    """Make an operation whose weight gradients may be computed later than its input gradient.

    For expensive functions of the user's own; linear layers and convolutions are splittable
    already. It is called as `operation(input, *args, **kwargs)`, and all further tensors are
    parameters. Its backward must skip gradients that are not needed, as torch's own do, or else
    nothing is gained. Outside of a stage that splits its backwards nothing changes.
    """

    @functools.wraps(operation)
    def split(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # A compiled backward computes all gradients at once.
        gradients = None if torch.compiler.is_compiling() else _watched.gradients
        if gradients is None:
            return operation(input, *args, **kwargs)
        parameters = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not _can_split(gradients, input, parameters):
            return operation(input, *args, **kwargs)

        def again(input: Tensor, *parameters: Tensor) -> Tensor:
            left = iter(parameters)
            placed = [next(left) if isinstance(v, Tensor) else v for v in args]
            named = {k: next(left) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
            return operation(input, *placed, **named)

        return _apply(_Taped, again, gradients, input, *parameters)

    return split


_installed: list[Operation] = []


def install() -> None:
    """Replace functions of `torch.nn.functional`, before any user code is imported.

    To `torch.jit.script` the new ones are the operators that the old ones were: what it compiles
    does not call Python, and computes its weight gradients in the backward.
    """
    builtins = torch.jit._builtins._get_builtin_table()
    for name in ("linear", *CONVOLUTIONS):
        before = getattr(F, name)
        after = _overridable(_split_linear(before) if name == "linear" else splittable(before))
        builtins[id(after)] = builtins[id(before)]
        _installed.append(after)  # no other function may ever get its id
        setattr(F, name, after)


def _overridable(operation: Operation) -> Operation:
    """Let tensors that override torch's functions see the function that has its name now."""

    @functools.wraps(operation)
    def call(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = (input, *args, *kwargs.values())
        if torch.overrides.has_torch_function(given):
            return torch.overrides.handle_torch_function(call, given, input, *args, **kwargs)
        return operation(input, *args, **kwargs)

    return call


def _split_linear(operation: Operation) -> Operation:
    in_general = splittable(operation)

    @functools.wraps(operation)
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        gradients = None if torch.compiler.is_compiling() else _watched.gradients
        if gradients is None:
            return operation(input, weight, bias)
        if not _is_one_product(input, weight):
            return in_general(input, weight, bias)
        if not _can_split(gradients, input, [weight] if bias is None else [weight, bias]):
            return operation(input, weight, bias)
        return _apply(_Linear, operation, gradients, input, weight, bias)

    return linear


def _can_split(gradients: WeightGradients, input: Tensor, parameters: Sequence[Tensor]) -> bool:
    trained = _trained(*parameters)
    may_wait = gradients.count_use(trained)  # without a tape, too: it may be recomputed with one
    return bool(trained) and may_wait and torch.is_grad_enabled() and not _is_special(input)


def _is_special(input: Tensor) -> bool:
    """Whether autocast or hooks on saved tensors (checkpointing, offloading) are active.

    A checkpoint must save the same tensors in its recomputation, which does not split.
    """
    return saves_otherwise() or torch.is_autocast_enabled(input.device.type)


def saves_otherwise() -> bool:
    """Whether hooks on saved tensors are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _trained(*tensors: Tensor | None) -> list[Tensor]:
    return [value for value in tensors if value is not None and value.requires_grad]


def _is_one_product(input: Tensor, weight: Tensor) -> bool:
    """Whether torch computes this linear as one matrix product, with known gradients."""
    is_matrix = input.dim() in (2, 3) and input.is_contiguous() and weight.is_contiguous()
    return is_matrix and weight.shape[1] > 1  # a column is contiguous both ways


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    apply: Callable[..., Tensor] = function.apply
    return apply(*args)


Gradients = tuple[Tensor | None, ...]


class _Linear(torch.autograd.Function):
    """`linear` of contiguous matrices, by the formulas of torch's own backward."""

    @staticmethod
    def forward(
        ctx: Any,
        operation: Operation,
        gradients: WeightGradients,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.operation, ctx.gradients = operation, gradients
        ctx.save_for_backward(input, weight, bias)
        return operation(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        (grad,) = grads
        input, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _twice_differentiable(ctx.operation, grad, input, weight, bias)
        rows, inputs = grad.reshape(-1, weight.shape[0]), input.reshape(-1, weight.shape[1])
        grad_input = None
        if input.requires_grad:
            grad_input = rows.mm(weight).reshape(input.shape)

        def products() -> Gradients:
            grad_weight = rows.t().mm(inputs) if weight.requires_grad else None
            grad_bias = rows.sum(0) if bias is not None and bias.requires_grad else None
            return grad_weight, grad_bias

        def add() -> None:
            for parameter, product in zip((weight, bias), products(), strict=True):
                if product is not None:
                    _add_to_grad(parameter, product)

        if ctx.gradients.postpone(_trained(weight, bias), add):
            return (None, None, grad_input, None, None)
        return (None, None, grad_input, *products())


class _Taped(torch.autograd.Function):
    """Any operation: its own small tape is differentiated twice, for the input and for the rest."""

    @staticmethod
    def forward(
        ctx: Any,
        operation: Operation,
        gradients: WeightGradients,
        input: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        leaf = input.detach().requires_grad_(input.requires_grad)
        with torch.enable_grad():
            output = operation(leaf, *parameters)
        ctx.operation, ctx.gradients, ctx.tape = operation, gradients, (leaf, output)
        ctx.save_for_backward(input, *parameters)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        (grad,) = grads
        input, *parameters = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _twice_differentiable(ctx.operation, grad, input, *parameters)
        leaf, output = ctx.tape
        trained = _trained(*parameters)

        def add() -> None:
            torch.autograd.backward([output], [grad], inputs=trained)

        if ctx.gradients.postpone(trained, add):
            return (None, None, *_differentiate(output, grad, leaf), *(None for _ in parameters))
        return (None, None, *_differentiate(output, grad, leaf, *parameters))


def _twice_differentiable(
    operation: Operation, grad: Tensor, input: Tensor, *parameters: Tensor | None
) -> Gradients:
    """Return gradients with a graph of their own, for `create_graph=True`."""
    output = operation(input, *parameters)
    return (None, None, *_differentiate(output, grad, input, *parameters, create_graph=True))


def _differentiate(
    output: Tensor, grad: Tensor, *inputs: Tensor | None, create_graph: bool = False
) -> Gradients:
    """Return the gradients of `inputs`, and None for inputs that need none."""
    wanted = _trained(*inputs)
    if not wanted:
        return (None,) * len(inputs)
    gradients = iter(
        torch.autograd.grad([output], wanted, [grad], retain_graph=True, create_graph=create_graph)
    )
    return tuple(next(gradients) if _trained(value) else None for value in inputs)


def _add_to_grad(parameter: Tensor, grad: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)
    for hook in _hooks(parameter):
        hook(parameter)


def _hooks(parameter: Tensor) -> list[Any]:
    return list((parameter._post_accumulate_grad_hooks or {}).values())
