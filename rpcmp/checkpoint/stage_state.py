"""Convert a stage's training state to named tensors and a line of JSON, and back.

    model.<name>                     parameters and buffers, by their names in the unsplit model
    optimizer.<parameter>.<key>      the optimizer's state for a parameter
    aside.<key>                      its state besides the parameters'
    metadata "rpcmp"                 step, stage, options and scheduler, now and as they were
                                     built, values that are not tensors, and memory layouts

Names start with the layer's, so a stage with other cuts finds its tensors in several files. There
is no random state: every random number is derived from the seed and its use
(`rpcmp.pipelining.layers`).

A matrix that was made column by column multiplies with other bits than its row-major copy, and an
optimizer that keeps one tensor under two keys updates both at once. So the names of identical
tensors and the order of dimensions in memory are stored beside the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rpcmp.errors import CheckpointError
from rpcmp.rpc.tensors import decode_tree, encode_tree


def described(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return each distinct tensor under its first name, and the JSON that `Restored` needs.

    Tensors are identical if they have the same memory, shape, strides and dtype. Views that overlap
    otherwise become independent.
    """
    distinct: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    orders: dict[str, list[int]] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = _place(tensor)
        if key is not None and key in first:
            same[name] = first[key]
            continue
        first[key] = name
        distinct[name] = tensor
        if order := _order(tensor):
            orders[name] = order
    return distinct, {"same": same, "orders": orders}


class Restored(Mapping[str, Tensor]):
    """The tensors that `described` was given, rebuilt from contiguous ones.

    Args:
        tensors: by first name.
        about: the JSON from `described`.
    """

    def __init__(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._same: Mapping[str, str] = about.get("same", {})
        self._orders: Mapping[str, list[int]] = about.get("orders", {})
        self._found: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        name = self._same.get(name, name)
        if name not in self._found:
            self._found[name] = _laid_out(self._tensors[name], self._orders.get(name))
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._same

    def __len__(self) -> int:
        return len(self._tensors) + len(self._same)


def _place(tensor: Tensor) -> Any:
    """Return a key that identical tensors share; None for tensors without memory to share."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    return (*place, tensor.is_conj(), tensor.is_neg()) if tensor.numel() else None


def _order(tensor: Tensor) -> list[int] | None:
    """Return the dimensions in memory order, outermost first.

    None for contiguous tensors, and for those with holes or overlaps, which are not kept.
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def _laid_out(tensor: Tensor, order: list[int] | None) -> Tensor:
    if order is None:
        return tensor
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


@dataclass(frozen=True)
class StageState:
    """The state of a stage right after an optimizer step.

    Attributes:
        model: parameters and buffers, by name.
        state: the optimizer's, by parameter.
        groups: the optimizer's options; None without an optimizer.
        scheduler: its state; None without one.
        built: "groups" and "scheduler" as they were built from the config, and "asked", the
            config's own values; None without an optimizer.
        aside: the optimizer's state besides its parameters'; see worker.optimizer_state.
    """

    step: int
    stage: str
    model: dict[str, Tensor]
    state: dict[str, Any]
    groups: Any
    scheduler: Any
    built: Any = None
    aside: Any = None


def pack(state: StageState) -> tuple[dict[str, Tensor], str]:
    """Return the tensors by name, and the metadata.

    Raises:
        TypeError: the optimizer or the scheduler keeps a value that is neither a tensor nor plain.
    """
    kept: dict[str, Tensor] = {}
    about = {
        "step": state.step,
        "stage": state.stage,
        "groups": encode_tree(state.groups, kept, "optimizer"),
        "scheduler": encode_tree(state.scheduler, kept, "scheduler"),
        "built": encode_tree(state.built, kept, "built"),
        "aside": encode_tree(state.aside, kept, "aside"),
        "state": {
            name: encode_tree(value, kept, f"optimizer.{name}")
            for name, value in state.state.items()
        },
    }
    distinct, about["memory"] = described(kept)
    model = {f"model.{name}": tensor for name, tensor in state.model.items()}
    return model | distinct, json.dumps(about)


def unpack(
    paths: Sequence[str], stage: str, model: Collection[str], trained: Collection[str]
) -> StageState:
    """Return a stage's state from files that each hold a part, and may hold more.

    Args:
        model: names of its parameters and buffers.
        trained: names of the parameters of its optimizer.

    Raises:
        CheckpointError: something is missing, or the parts do not agree.
    """
    parts = [_read(path, set(model), set(trained)) for path in paths]
    merged: dict[str, Tensor] = {}
    optimizer: dict[str, Any] = {}
    for part in parts:
        merged |= part.model
        optimizer |= part.state
    if missing := sorted(set(model) - set(merged)):
        raise CheckpointError(f"stage {stage!r} misses {', '.join(missing)} in {', '.join(paths)}")
    training = [part for part in parts if part.groups is not None]
    _require_agreement(training, stage, set(trained))
    first = training[0] if training else None
    return StageState(
        step=parts[0].step,
        stage=stage,
        model=merged,
        state=optimizer,
        groups=first.groups if first else None,
        scheduler=first.scheduler if first else None,
        built=first.built if first else None,
        aside=first.aside if first else None,
    )


def _read(path: str, model: set[str], trained: set[str]) -> StageState:
    try:
        with safe_open(path, "pt") as file:
            return decoded((file.metadata() or {})["rpcmp"], _Tensors(file), model, trained)
    except Exception as error:  # the library raises its own, and KeyError is ours
        raise CheckpointError(f"{path} is no stage's state: {error}") from error


def decoded(
    text: str, tensors: Mapping[str, Tensor], model: Collection[str], trained: Collection[str]
) -> StageState:
    """Return the state that `pack` was given, for these parameters and buffers only."""
    about = json.loads(text)
    kept = Restored(tensors, about.get("memory", {}))
    return StageState(
        step=about["step"],
        stage=about["stage"],
        model={
            name: tensors[f"model.{name}"] for name in sorted(model) if f"model.{name}" in tensors
        },
        state={
            name: decode_tree(spec, kept)
            for name, spec in about["state"].items()
            if name in trained
        },
        groups=decode_tree(about["groups"], kept),
        scheduler=decode_tree(about["scheduler"], kept),
        built=decode_tree(about["built"], kept) if "built" in about else None,
        aside=decode_tree(about["aside"], kept) if "aside" in about else None,
    )


def _require_agreement(parts: Sequence[StageState], stage: str, trained: Collection[str]) -> None:
    """Check that parts fit one optimizer, which has one set of options."""
    for part in parts:
        names = (part.aside or {}).get("names")
        if names is not None and set(names) != set(trained):
            raise CheckpointError(
                f"stage {stage!r} takes layers over from {part.stage!r}, whose optimizer keeps "
                "more than a state of each parameter: it fits no other cut; keep the balance"
            )
    for part in parts[1:]:
        first = parts[0]
        if part.step != first.step or not _is_same(
            (part.groups, part.scheduler, part.aside),
            (first.groups, first.scheduler, first.aside),
        ):
            raise CheckpointError(
                f"stage {stage!r} takes layers over from {first.stage!r} and {part.stage!r}, whose "
                "optimizers or schedulers have other options; keep the cut between them"
            )


def _is_same(one: Any, other: Any) -> bool:
    mine: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    if encode_tree(one, mine) != encode_tree(other, theirs):
        return False
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


class _Tensors(Mapping[str, Tensor]):
    """The tensors of an open file, each copied: the file may be memory that changes."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = set(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor.clone()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
