"""Build a module without its weights, which a host has no memory for, or gets from a file.

    in the constructor     each parameter goes to the meta device as it is registered, so what draws
                           its first values does nothing
    afterwards             each gets memory that nobody has written to yet, which costs none until
                           somebody does

Buffers are computed as usual: many are in no file, such as the frequencies of rotary embeddings.

A module may have parts that are in no file, such as adapters around a model that is. Then
`from_init` builds what is in the file, by the file's own names; all else gets its first values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError, FactoryError

Module = TypeVar("Module", bound=nn.Module)

_NAMES = "rpcmp_names_in_init"
"""Attribute of a tensor: its names in the module that `from_init` has built."""


@dataclass
class _Build:
    """A build without weights that is under way.

    Attributes:
        parts: whether only the parts that `from_init` builds go without.
        has_parts: whether there are any.
    """

    parts: bool = False
    has_parts: bool = False


_builds: list[_Build] = []

_init_paths: list[str] = []


def init_path() -> str:
    """Return where `init` lies on this host: for a job's own code, while it builds its modules.

    That is the path in the config, or a folder with what the driver has sent to a host without a
    copy: the weights of the layers there, and `config.json`.

    Raises:
        ConfigError: the job has no `init`, or no module is being built.
    """
    if not _init_paths or not _init_paths[-1]:
        raise ConfigError(
            "rpcmp.init_path() is for modules of a job with `init`, as it builds them"
        )
    return _init_paths[-1]


@contextlib.contextmanager
def init_at(path: str | None) -> Iterator[None]:
    """Let `init_path` return a path."""
    _init_paths.append(path or "")
    try:
        yield
    finally:
        _init_paths.pop()


def from_init(make: Callable[[], Module]) -> Module:
    """Return what `make` builds: the part of a job's `module` that `init` has the weights of.

    The names in `init` are those of this part, whatever is put around it. Where a host loads its
    weights, they get no memory here; parameters that `make` builds and that are frozen later are
    in no snapshot and in no checkpoint, because they are in `init`.

        def net():
            config = AutoConfig.from_pretrained(rpcmp.init_path())
            model = rpcmp.from_init(lambda: AutoModelForCausalLM.from_config(config))
            return peft.get_peft_model(model, peft.LoraConfig(r=8))
    """
    with contextlib.ExitStack() as registers:
        if _builds:
            _builds[-1].has_parts = True
            if _builds[-1].parts:
                registers.enter_context(_on_meta())
        module = make()
    if _builds:
        _give_memory(module)
    for name, tensor in _named_tensors(module):
        _name(tensor, [*names_in_init(tensor), name])
    return module


def _name(tensor: Tensor, names: list[str]) -> None:
    """Remember the names of a tensor, and of the copies that `copy.deepcopy` makes of it."""

    def copy(memo: dict[int, Any]) -> Tensor:
        made: Tensor = type(tensor).__deepcopy__(tensor, memo)
        _name(made, names)
        return made

    setattr(tensor, _NAMES, names)
    setattr(tensor, "__deepcopy__", copy)  # noqa: B010  # of this one, not of its class


def names_in_init(tensor: Tensor) -> list[str]:
    """Return a parameter's or buffer's names in what `from_init` has built; empty if in none."""
    names: list[str] = getattr(tensor, _NAMES, [])
    return names


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    stored = module.state_dict().keys()
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in stored:
            yield name, buffer


def build_without_weights(make: Callable[[], Module]) -> Module:
    """Return the module that `make` builds; the values of its parameters are not defined.

    Parameters that are one stay one. If it calls `from_init`, this is so for what that builds, and
    `make` is called twice.

    Raises:
        ValueError: a buffer is computed from parameters.
    """
    build = _Build()
    with _under_way(build), _on_meta():
        module = make()
    require_own_memory(module)  # before each parameter gets its own
    if build.has_parts:  # what is around them needs values, also if it came before
        with _under_way(_Build(parts=True)):
            module = make()
    else:
        _give_memory(module)
    if without := [name for name, buffer in module.named_buffers() if buffer.is_meta]:
        raise ValueError(f"the buffer {without[0]!r} is computed from parameters")
    return module


@contextlib.contextmanager
def _under_way(build: _Build) -> Iterator[None]:
    _builds.append(build)
    try:
        yield
    finally:
        _builds.pop()


def _give_memory(module: nn.Module) -> None:
    """Give the parameters that are on the meta device memory that nobody has written to."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.device.type != "meta":
                continue
            if parameter not in made:
                empty = torch.empty_like(parameter, device="cpu")
                made[parameter] = nn.Parameter(empty, parameter.requires_grad)
            setattr(part, name, made[parameter])


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when a module of this process registers it."""
    register = nn.Module.register_parameter
    moved: dict[nn.Parameter, nn.Parameter] = {}  # by the first; keeps both, so no id comes twice

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            if parameter not in moved:
                on_meta = parameter.detach().to("meta")
                moved[parameter] = nn.Parameter(on_meta, parameter.requires_grad)
            parameter = moved[parameter]
        register(module, name, parameter)

    setattr(nn.Module, "register_parameter", register_on_meta)  # noqa: B010  # its type is another
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


def require_own_memory(module: nn.Module) -> None:
    """Refuse parameters that share memory with another one, or with a buffer.

    One tensor under several names is known as such; two that are views of the same memory would
    be two on hosts apart, and wherever weights are loaded.

    Raises:
        ConfigError: there are some.
    """
    named = [
        *module.named_parameters(),
        *((name, buffer) for name, buffer in module.named_buffers() if buffer is not None),
    ]
    seen: dict[int, list[tuple[str, Tensor, Any]]] = {}
    for name, tensor in named:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # it has none, such as a sparse one
            continue
        for other, beside, _ in seen.setdefault(id(storage), []):
            has_parameter = any(isinstance(each, nn.Parameter) for each in (tensor, beside))
            if has_parameter and _overlap(tensor, beside):
                raise ConfigError(
                    f"{other!r} and {name!r} share memory without being one parameter, which no "
                    "state dict shows: assign the parameter itself (`a.weight = b.weight`), and "
                    "transpose it in the forward"
                )
        seen[id(storage)].append((name, tensor, storage))  # kept, so no id comes twice


def _overlap(one: Tensor, other: Tensor) -> bool:
    if not one.numel() or not other.numel():
        return False
    (first, first_end), (second, second_end) = (
        (each.storage_offset(), each.storage_offset() + _extent(each)) for each in (one, other)
    )
    return bool(first < second_end and second < first_end)


def _extent(tensor: Tensor) -> int:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


WRAPPERS = {
    "OptimizedModule": "set compile = true instead of torch.compile",
    "DataParallel": "give stages `replicas` instead",
    "DistributedDataParallel": "give stages `replicas` instead",
    "FullyShardedDataParallel": "give the model more stages instead",
    "AveragedModel": "return the model that is trained, and keep averages in a buffer of it",
}
"""Modules of torch around another, by class, and what to do without."""


def require_plain(module: nn.Module, what: str, cuts: bool = True) -> None:
    """Check that a module is no wrapper, whose names of parameters no plain model has.

    Args:
        cuts: whether it is to be cut, which TorchScript cannot be.

    Raises:
        FactoryError: it or a part of it is one, or is TorchScript.
    """
    for path, part in module.named_modules():
        kind, where = type(part), f" in {path!r}" if path else ""
        if cuts and isinstance(part, torch.jit.ScriptModule):
            raise FactoryError(
                f"{what} returns TorchScript{where}, which cannot be cut: return the eager module"
            )
        if kind.__module__.startswith("torch.") and kind.__name__ in WRAPPERS:
            raise FactoryError(
                f"{what} returns a {kind.__name__}{where}, which a model's state dict would show: "
                f"{WRAPPERS[kind.__name__]}, and return the module itself"
            )
