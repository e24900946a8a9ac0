"""A stage's training state as named tensors and a line of JSON, and back.

    model.<name>                     parameters and buffers, by their names in the unsplit model
    optimizer.<parameter>.<key>      what the optimizer keeps of a parameter
    aside.<key>                      what it keeps beside the parameters
    metadata "rpcmp"                 step, stage, options and scheduler, now and as they were
                                     built, what is no tensor, and how tensors lie in memory

Names are those of layers, so a stage with other cuts finds what it needs in the files of several.
No random state: every random number is drawn from the seed and what it is for
(`rpcmp.pipelining.layers`).

What a file of named tensors does not say: which of them are one tensor, and how each lies.

A matrix that was made column by column multiplies with other bits than its row-major copy, and an
optimizer that keeps one tensor under two keys updates both at once. So the names of equal tensors
and the order of dimensions in memory are stored beside the tensors.
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
    """Return each distinct tensor under its first name, and what `Restored` needs besides, as JSON.

    Two tensors are one if they have the same memory, shape, strides and dtype. Views that overlap
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
    """The tensors that `described` was given, out of contiguous ones by their first names.

    Args:
        tensors: by name.
        about: what `described` returned besides.
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
    """What two tensors have in common that are one; None for such as have no memory to share."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    return (*place, tensor.is_conj(), tensor.is_neg()) if tensor.numel() else None


def _order(tensor: Tensor) -> list[int] | None:
    """The dimensions by how they lie in memory, outermost first; None: as a contiguous tensor's,
    or with holes or overlaps, which are not kept."""
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
    """What a stage is right after an optimizer step.

    Attributes:
        step: how many it has done.
        stage: its name.
        model: parameters and buffers, by name.
        state: of the optimizer, by parameter.
        groups: the optimizer's options; None without an optimizer.
        scheduler: its state; None without one.
        built: "groups" and "scheduler" as the config had them built, and "asked", what it said;
            None without an optimizer.
        aside: what the optimizer keeps beside its parameters; see worker.optimizerstate.
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
    """The tensors by name, and the metadata.

    Raises:
        TypeError: the optimizer or the scheduler keeps something that is no tensor and not plain.
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
    """A stage's state from files, of which each may hold a part, and more than is needed.

    Args:
        paths: of safetensors files.
        stage: whose state it will be.
        model: names of its parameters and buffers.
        trained: those that its optimizer has.

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
    """What `pack` was given: of it what these parameters, buffers and trained ones need.

    Args:
        text: the metadata.
        tensors: by name.
    """
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
    """One optimizer has one set of options: what it takes over must not differ."""
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
    """Whether two trees are equal, and their tensors."""
    mine: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    if encode_tree(one, mine) != encode_tree(other, theirs):
        return False
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


class _Tensors(Mapping[str, Tensor]):
    """The tensors of an open file, each a copy: the file may be memory that changes."""

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
