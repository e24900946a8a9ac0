"""A stage's training state as named tensors and JSON: written to a slot, read from files.

    model.<name>                     parameters and buffers, by their names in the unsplit model
    optimizer.<parameter>.<key>      the optimizer's state for a parameter
    aside.<key>                      its state besides the parameters'
    attributes.<name>                what forwards have changed in attributes of modules
    metadata "rpcmp"                 step, stage, options and scheduler, now and as they were
                                     built, values that are not tensors, memory layouts, and
                                     checksums of what is only in `init`

Names start with the layer's, so a stage with other cuts finds its tensors in several files. There
is no random state: every random number is derived from the seed and its use
(`rpcmp.pipelining.random_streams`).

The products of a column-major matrix may differ in the last bits from its row-major copy's, and an
optimizer that keeps one tensor under two keys updates both at once. So the names of identical
tensors and the order of dimensions in memory are stored beside the tensors.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rpcmp.checkpoint.safetensors_header import Header, TensorSpec, aligned
from rpcmp.checkpoint.slots import Slots, Snapshot
from rpcmp.errors import CheckpointError
from rpcmp.rpc.tensors import decode_tree, encode_tree

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

HEADER_MULTIPLE = 4096
"""Headers take multiples of this, so that a longer number in one does not move the tensors."""

ENCODED_TREES = {
    "groups": "optimizer",
    "scheduler": "scheduler",
    "built": "built",
    "aside": "aside",
    "attributes": "attributes",
}
"""Fields of a StageState that are trees, and the prefix of the names of their tensors."""


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
        base: the checksum of the frozen weights that only `init` has, by layer; None in files that
            were written before there were any.
        attributes: of modules, which their forwards have changed, by name.
    """

    step: int
    stage: str
    model: dict[str, Tensor]
    state: dict[str, Any]
    groups: Any
    scheduler: Any
    built: Any = None
    aside: Any = None
    base: dict[str, str] | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


def pack(state: StageState) -> tuple[dict[str, Tensor], str]:
    """Return the tensors by name, and the metadata; TypeError for values that are not plain."""
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, Any] = {
        "step": state.step,
        "stage": state.stage,
        "base": state.base,
        **{
            key: encode_tree(getattr(state, key), tensors, prefix)
            for key, prefix in ENCODED_TREES.items()
        },
        "state": {
            name: encode_tree(value, tensors, f"optimizer.{name}")
            for name, value in state.state.items()
        },
    }
    distinct, metadata["memory"] = _without_repeats(tensors)
    model = {f"model.{name}": tensor for name, tensor in state.model.items()}
    return model | distinct, json.dumps(metadata)


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
    base: dict[str, str] = {}
    attributes: dict[str, Any] = {}
    has_base = all(part.base is not None for part in parts)
    for part in parts:
        merged |= part.model
        optimizer |= part.state
        base |= part.base or {}
        attributes |= part.attributes
    missing = sorted(name for name in set(model) - set(merged) if not name.startswith("loss."))
    if missing:
        raise CheckpointError(f"stage {stage!r} misses {', '.join(missing)} in {', '.join(paths)}")
    training = [part for part in parts if part.groups is not None]
    _require_agreement(training, stage, set(trained))
    first = (training or parts)[0]
    return replace(
        first,
        step=parts[0].step,
        stage=stage,
        model=merged,
        state=optimizer,
        base=base if has_base else None,
        attributes=attributes,
    )


def _read(path: str, model: set[str], trained: set[str]) -> StageState:
    try:
        with safe_open(path, "pt") as file:
            return decoded((file.metadata() or {})["rpcmp"], _FileTensors(file), model, trained)
    except Exception as error:  # the library raises its own, and KeyError is ours
        raise CheckpointError(f"{path} is no stage's state: {error}") from error


def decoded(
    metadata: str, tensors: Mapping[str, Tensor], model: Collection[str], trained: Collection[str]
) -> StageState:
    """Return the state that `pack` was given, for these parameters and buffers only."""
    about = json.loads(metadata)
    rebuilt = _Rebuilt(tensors, about.get("memory", {}))
    trees: dict[str, Any] = {
        key: decode_tree(about[key], rebuilt) if key in about else None for key in ENCODED_TREES
    }
    trees["attributes"] = trees["attributes"] or {}  # files of before there were any
    return StageState(
        step=about["step"],
        stage=about["stage"],
        model={
            name: tensors[f"model.{name}"] for name in sorted(model) if f"model.{name}" in tensors
        },
        state={
            name: decode_tree(spec, rebuilt)
            for name, spec in about["state"].items()
            if name in trained
        },
        base=about.get("base"),
        **trees,
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
    tensors: dict[str, Tensor] = {}
    other_tensors: dict[str, Tensor] = {}
    if encode_tree(one, tensors) != encode_tree(other, other_tensors):
        return False
    return all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)


def _without_repeats(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return each distinct tensor under its first name, and the JSON that `_Rebuilt` needs.

    Tensors are identical if they have the same memory, shape, strides and dtype. Views that overlap
    otherwise become independent.
    """
    distinct: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    orders: dict[str, list[int]] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = _identity(tensor)
        if key is not None and key in first:
            same[name] = first[key]
            continue
        first[key] = name
        distinct[name] = tensor
        if order := _memory_order(tensor):
            orders[name] = order
    return distinct, {"same": same, "orders": orders}


class _Rebuilt(dict[str, Tensor]):
    """The tensors by name, each shared or reordered again when it is first needed."""

    def __init__(self, tensors: Mapping[str, Tensor], layouts: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._same: Mapping[str, str] = layouts.get("same", {})
        self._orders: Mapping[str, list[int]] = layouts.get("orders", {})

    def __missing__(self, name: str) -> Tensor:
        if name in self._same:
            tensor = self[self._same[name]]
        else:
            tensor = _in_order(self._tensors[name], self._orders.get(name))
        self[name] = tensor
        return tensor


class _FileTensors(Mapping[str, Tensor]):
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


def _identity(tensor: Tensor) -> Any:
    """Return a key that identical tensors share; None for tensors without memory to share."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    return (*key, tensor.is_conj(), tensor.is_neg()) if tensor.numel() else None


def _memory_order(tensor: Tensor) -> list[int] | None:
    """Return the dimensions in memory order, outermost first; None for contiguous tensors."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    # Holes and overlaps are not kept.
    return order if tensor.permute(order).is_contiguous() else None


def _in_order(tensor: Tensor, order: list[int] | None) -> Tensor:
    if order is None:
        return tensor
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


Shapes = tuple[tuple[str, torch.dtype, torch.Size], ...]


class SnapshotWriter:
    """Writes named tensors into slots, as the bytes of a safetensors file.

    The library's own `save` builds these bytes in three copies. Here the header is made once and
    the tensors are copied straight to their places, since a training step waits for it.
    """

    def __init__(self, slots: Slots, cut: int = 0) -> None:
        self._slots, self._cut = slots, cut
        self._layout = _SlotLayout(())
        self._mapped: dict[int, tuple[mmap.mmap, dict[str, Tensor]]] = {}

    def write(
        self, slot: int, step: int, tensors: Mapping[str, Tensor], metadata: str, pin: bool
    ) -> Snapshot:
        """Write a snapshot; returns when all is copied.

        Args:
            slot: from `Slots.begin`.
            step: the optimizer step after which the stage has this state.
            tensors: on any device, of layout strided.
            metadata: of the file, under "rpcmp".
            pin: keep it until it is saved; see Slots.

        Raises:
            TypeError: a dtype that the format does not have.
            OSError: there is no memory left.
        """
        shapes = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        layout = self._layout if self._layout.shapes == shapes else _SlotLayout(shapes)
        header = layout.header.encode({"rpcmp": metadata}, layout.start, HEADER_MULTIPLE)
        if len(header) > layout.start:  # new, or the metadata has outgrown its room
            layout = _SlotLayout(shapes, len(header))
        if layout is not self._layout:
            self._layout = layout
            self._mapped.clear()
        memory, places = self._map(slot)
        memory[: layout.start] = header
        with torch.no_grad():
            for name, place in places.items():
                place.copy_(tensors[name])
        return self._slots.commit(slot, step, layout.length, pin, self._cut)

    def _map(self, slot: int) -> tuple[mmap.mmap, dict[str, Tensor]]:
        if slot not in self._mapped:
            os.ftruncate(self._slots.fd(slot), self._layout.length)
            memory = mmap.mmap(self._slots.fd(slot), self._layout.length)
            self._mapped[slot] = memory, self._layout.tensors_in(memory)
        return self._mapped[slot]


class _SlotLayout:
    """The place of each tensor in a slot, whose first `start` bytes are the header."""

    def __init__(self, shapes: Shapes, start: int = 0) -> None:
        self.shapes = shapes
        self.start = start
        self._dtypes = {name: dtype for name, dtype, _ in shapes}
        self._specs = aligned(
            {
                name: TensorSpec(
                    _dtype(name, dtype), tuple(shape), math.prod(shape) * dtype.itemsize
                )
                for name, dtype, shape in shapes
            }
        )
        self.header = Header(self._specs)

    @property
    def length(self) -> int:
        return self.start + self.header.data_size

    def tensors_in(self, memory: mmap.mmap) -> dict[str, Tensor]:
        return {
            name: torch.frombuffer(
                memory, dtype=self._dtypes[name], count=spec.num_elements, offset=self.start + begin
            ).reshape(spec.shape)
            if spec.size
            else torch.empty(spec.shape, dtype=self._dtypes[name])
            for (name, spec), (begin, _) in zip(
                self._specs.items(), self.header.offsets, strict=True
            )
        }


def require_storable(name: str, tensor: Tensor) -> None:
    """Raise TypeError if a file cannot hold a tensor of this dtype or layout."""
    _dtype(name, tensor.dtype)
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name!r} is {tensor.layout}, which safetensors does not have")


def _dtype(name: str, dtype: torch.dtype) -> str:
    try:
        return DTYPES[dtype]
    except KeyError as error:
        raise TypeError(f"{name!r} is {dtype}, which safetensors does not have") from error
