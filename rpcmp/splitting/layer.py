"""A layer of a module that was cut: the programs of both modes, and the tensors that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.config import importing
from rpcmp.config.types import COPY
from rpcmp.errors import ConfigError
from rpcmp.splitting.exporting import Structure, arguments, as_returned, restore
from rpcmp.splitting.guards import holds, in_words
from rpcmp.splitting.program import Program, compiled, name_of_kind, require_bounded
from rpcmp.splitting.split import CONSTANTS, InputPlan, Split

BATCH_NORM, IN_TRAINING = "aten.batch_norm.default", 5
"""torch's batch normalization, and which of its arguments says that it uses its samples."""


Run = Callable[..., tuple[Any, ...]]


class SplitLayer(nn.Module):
    """A layer of `split`; parameters and buffers have their names in the unsplit module.

    The first layer takes what the module takes, as one value: a tensor, a tuple of arguments or a
    dict of keyword arguments. The last returns what the module returns, with dicts and tuples in
    place of classes. In between, a layer takes and returns a tuple.

    Args:
        index: its position.
        tensors: of the module, by name; those of this layer are taken, and those that a layer
            before it stores are copied.
    """

    def __init__(self, split: Split, index: int, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        plan = split.layers[index]
        if importing.is_restricted():
            require_bounded(plan.training)
            require_bounded(plan.evaluation)
        # Names that no submodule of the user's has.
        self._split_programs = {True: plan.training, False: plan.evaluation}
        self._split_inputs = split.inputs if index == 0 else None
        self._split_structures: dict[bool, Structure] = {}
        if index == len(split.layers) - 1:
            self._split_structures = dict(zip((True, False), split.structures, strict=True))
        self._split_compiled: dict[tuple[bool, torch.device], Run] = {}
        self._split_compile: Callable[[Run], Run] = lambda run: run
        self._split_guards = split.guards
        self._split_known: set[tuple[torch.Size, ...]] = set()
        copied = {name for names in split.tied for name in names[1:]}
        stored = {
            name for program in self._split_programs.values() for name in program.tensors.values()
        }
        for name in plan.tensors:
            original = tensors[name.partition(COPY)[0]]
            _add(self, name, _own(original, name in copied), name not in plan.passing)
        for name in sorted(stored - {*plan.tensors}):
            constant = split.constants[name.removeprefix(f"{CONSTANTS}.")].tensor()
            _add(self, name, constant, is_stored=False)

    def forward(self, value: Any) -> Any:
        values = value if self._split_inputs is None else self._split_arguments(value)
        outputs = self._split_run(values)(*values)
        if not self._split_structures:
            return outputs
        return restore(self._split_structures[self.training], outputs)

    def as_returned(self, value: Any) -> Any:
        """Return what the last layer returns with the names that the module gives its parts."""
        return as_returned(self._split_structures[self.training], value)

    def compile_programs(self, compile_: Callable[[Run], Run]) -> None:
        """Compile the programs of both modes, by a function such as `torch.compile`.

        Raises:
            ConfigError: this host runs nothing but operations that check their arguments.
        """
        if importing.is_restricted():
            raise ConfigError(
                "a server that was started with --no-code or --allow compiles no layers of a cut "
                "module, since generated code does not check what torch's kernels do: set compile "
                "= false for its stage, or start the server without them"
            )
        self._split_compile = compile_

    @property
    def needs_two_samples(self) -> bool:
        """Whether it normalizes by the statistics of its samples, in its present mode."""
        return _normalizes(self._split_programs[self.training])

    def _split_arguments(self, value: Any) -> list[Tensor]:
        """Return the module's inputs in order; see `_checked`."""
        inputs = self._split_inputs or []
        values = _checked(inputs, value)
        shapes = tuple(each.shape for each in values)
        if shapes not in self._split_known:
            for guard in self._split_guards:
                if not holds(guard, shapes):
                    words = in_words(guard, [plan.name for plan in inputs])
                    raise ValueError(
                        f"the module was cut for inputs with {words}, not for "
                        f"{', '.join(map(str, map(list, shapes)))}"
                    )
            self._split_known.add(shapes)
        return values

    def _split_run(self, values: Iterable[Any]) -> Run:
        """Return the mode's program for the device that the values are on."""
        device = next((each.device for each in values if isinstance(each, Tensor)), None)
        if device is None:
            device = next(self.parameters()).device
        key = self.training, device
        if key not in self._split_compiled:
            run = compiled(self._split_programs[self.training], device, self)
            self._split_compiled[key] = self._split_compile(run)
        return self._split_compiled[key]


def _normalizes(program: Program) -> bool:
    return any(
        (node.calls == BATCH_NORM and node.args[IN_TRAINING] is True)
        or (node.body is not None and _normalizes(node.body))
        for node in program.nodes
    )


def _own(tensor: Tensor, is_copied: bool) -> Tensor:
    if not is_copied:
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    return tensor.clone()


def _add(module: nn.Module, path: str, tensor: Tensor, is_stored: bool) -> None:
    """Register a parameter or buffer under a dotted name; creates the modules above it."""
    *above, name = path.split(".")
    for part in above:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor, persistent=is_stored)


def _checked(plans: list[InputPlan], value: Any) -> list[Tensor]:
    """Return the module's inputs in order, after checking that the graph was made for such.

    Further parts of a dict are left out.

    Raises:
        ValueError: names, dtypes or sizes differ.
    """
    expected = [plan.name for plan in plans]
    if isinstance(value, Mapping):
        value = {name: value[name] for name in expected if name in value}
    names, leaves = arguments(value)
    given = dict(zip(names, leaves, strict=True))
    if set(given) != set(expected):
        raise ValueError(f"the module was cut for the inputs {expected}, not {names}")
    for plan in plans:
        found = given[plan.name]
        dtype = name_of_kind(found.dtype)
        fits = len(plan.sizes) == found.dim() and all(
            size in (None, real) for size, real in zip(plan.sizes, found.shape, strict=True)
        )
        if dtype != plan.dtype or not fits:
            sizes = ", ".join("any" if size is None else f"{size}" for size in plan.sizes)
            raise ValueError(
                f"the module was cut for {plan.name!r} of {plan.dtype}[{sizes}], not "
                f"{dtype}{list(found.shape)}"
            )
    return [given[name] for name in expected]
