"""A stage's state in shared memory and back, bit for bit, also for other balances."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from rpcmp.checkpoint.slots import Slots, Snapshot
from rpcmp.checkpoint.stage_state import DTYPES, SnapshotWriter, StageState, pack, unpack
from rpcmp.errors import CheckpointError
from rpcmp.pipelining import pytree


class Memory:
    def __init__(self) -> None:
        self.slots = Slots.create()
        self.writer = SnapshotWriter(self.slots)

    def write(
        self, tensors: Mapping[str, Tensor], step: int = 1, about: str = "{}", pin: bool = False
    ) -> Snapshot:
        slot = self.slots.reserve()
        assert slot is not None
        return self.writer.write(slot, step, tensors, about, pin)

    def keep(self, state: StageState) -> str:
        """Write a stage's state; returns its path."""
        tensors, about = pack(state)
        return self.slots.path(self.write(tensors, state.step, about).slot)

    def bytes(self, snapshot: Snapshot) -> bytes:
        fd = self.slots.fd(snapshot.slot)
        assert os.fstat(fd).st_size == snapshot.length
        return os.pread(fd, snapshot.length, 0)

    def tensors(self, step: int) -> dict[str, Tensor]:
        """Return a snapshot as loaded by the safetensors library."""
        found = self.slots.get(step)
        assert found is not None
        loaded: dict[str, Tensor] = safetensors.torch.load(self.bytes(found))
        return loaded


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.slots.close()


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """Return everything that defines a tensor."""
    storage = tensor.detach().clone(memory_format=torch.contiguous_format).untyped_storage()
    return tensor.dtype, tensor.shape, bytes(storage)


def bits_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


def any_bits(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> Tensor:
    """Draw a tensor of random bits: NaNs with payloads, infinities, subnormal numbers."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(*shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    highest = 2 if dtype is torch.bool else 256
    size = (count * dtype.itemsize,)
    drawn = torch.randint(highest, size, dtype=torch.uint8, generator=generator)
    return drawn.view(dtype).reshape(tuple(shape))


def state(
    stage: str = "stage0",
    model: Mapping[str, Tensor] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    groups: Any = None,
    scheduler: Any = None,
    step: int = 7,
) -> StageState:
    return StageState(step, stage, dict(model or {}), dict(optimizer or {}), groups, scheduler)


# The bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (0,), (2, 0, 3)], ids=str)
def test_the_bits_of_every_dtype_come_back(
    memory: Memory, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = any_bits(dtype, shape)
    path = memory.keep(state(model={"w": tensor}))
    assert bits(unpack([path], "stage0", ["w"], []).model["w"]) == bits(tensor)
    assert bits(memory.tensors(7)["model.w"]) == bits(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(10)[3:9:2],
        torch.ones(1, 3).expand(4, 3),
        torch.ones(2, requires_grad=True),
        nn.Parameter(torch.ones(2, 2)).t(),
        torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([-0.0, float("nan"), float("-inf")]),
    ],
    ids=pytree.describe,
)
def test_a_tensor_comes_back_however_it_lies_in_memory(memory: Memory, tensor: Tensor) -> None:
    path = memory.keep(state(model={"w": tensor}))
    found = unpack([path], "stage0", ["w"], []).model["w"]
    assert bits(found) == bits(tensor.resolve_conj())
    assert found.is_contiguous()
    assert not found.requires_grad


SHAPES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.builds(any_bits, st.sampled_from(list(DTYPES)), SHAPES, st.integers(0, 1000))


@settings(deadline=None, derandomize=True)
@given(st.lists(st.dictionaries(st.text(max_size=5), TENSORS, max_size=6), max_size=6))
def test_slots_return_what_was_written_after_any_sequence_of_writes(
    snapshots: list[dict[str, Tensor]],
) -> None:
    memory = Memory()
    for step, tensors in enumerate(snapshots, start=1):
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        memory.write(named, step)
        for kept in range(max(1, step - 1), step + 1):
            expected = {f"model.{name}": value for name, value in snapshots[kept - 1].items()}
            assert bits_of(memory.tensors(kept)) == bits_of(expected)
    memory.slots.close()


def test_a_snapshot_is_a_file_of_safetensors_with_its_metadata(memory: Memory) -> None:
    tensors = {"a": torch.ones(3), "b": torch.tensor([True]), "c": torch.tensor(2.0).double()}
    about = 'not even JSON: "\\ Zürich \N{SNOWMAN} \x00 }'
    snapshot = memory.write(tensors, 5, about)
    with safe_open(memory.slots.path(snapshot.slot), "pt") as file:
        assert file.metadata() == {"rpcmp": about}
        assert sorted(file.keys()) == ["a", "b", "c"]
    assert bits_of(safetensors.torch.load(memory.bytes(snapshot))) == bits_of(tensors)


def test_every_tensor_lies_aligned_and_without_holes(memory: Memory) -> None:
    tensors = {str(dtype): any_bits(dtype, (3,)) for dtype in reversed(DTYPES)}
    data = memory.bytes(memory.write(tensors))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    end = 0
    for entry in header.values():
        begin, after = entry["data_offsets"]
        assert begin == end
        assert (8 + length + begin) % ((after - begin) // 3) == 0
        end = after
    assert 8 + length + end == len(data)


def test_a_stage_without_any_tensor_has_a_snapshot_too(memory: Memory) -> None:
    path = memory.keep(state())
    found = unpack([path], "stage0", [], [])
    assert found == state()
    assert memory.tensors(7) == {}


def test_a_dtype_that_the_format_does_not_have_is_refused_by_its_name(memory: Memory) -> None:
    memory.write({"w": torch.ones(1)})
    with pytest.raises(TypeError, match=r"'z' is torch\.complex128, which safetensors does not"):
        memory.write({"w": torch.ones(1), "z": torch.ones(1, dtype=torch.complex128)}, 2)
    assert [found.step for found in memory.slots.all()] == [1]
    memory.write({"w": torch.zeros(1)}, 2)
    assert memory.tensors(2)["w"].tolist() == [0]


def test_a_snapshot_is_pinned_on_request(memory: Memory) -> None:
    assert not memory.write({}, 1).is_pinned
    assert memory.write({}, 2, pin=True).is_pinned
    assert [found.is_pinned for found in memory.slots.all()] == [False, True]


def test_a_snapshot_does_not_change_while_training_continues(memory: Memory) -> None:
    weight = torch.zeros(3)
    memory.write({"w": weight})
    weight += 1
    assert memory.tensors(1)["w"].tolist() == [0, 0, 0]


def test_restored_tensors_do_not_change_when_their_slot_is_overwritten(memory: Memory) -> None:
    found = unpack(
        [memory.keep(state(model={"w": torch.ones(2)}, optimizer={"w": {"m": torch.ones(2)}}))],
        "stage0",
        ["w"],
        ["w"],
    )
    for step in range(8, 16):
        memory.keep(state(model={"w": torch.zeros(2)}, step=step))
    assert found.model["w"].tolist() == [1, 1]
    assert found.state["w"]["m"].tolist() == [1, 1]
    found.model["w"] += 1  # and it is writable


# Layouts


def starts(memory: Memory) -> list[int]:
    found = []
    for snapshot in memory.slots.all():
        head = os.pread(memory.slots.fd(snapshot.slot), 8, 0)
        found.append(8 + int.from_bytes(head, "little"))
    return found


def test_metadata_that_grows_a_little_moves_nothing(memory: Memory) -> None:
    for step, about in ((1, "9"), (2, "10"), (3, "x" * 1000), (4, "")):
        memory.write({"w": torch.full((4,), step)}, step, about)
        with safe_open(memory.slots.path(memory.slots.all()[-1].slot), "pt") as file:
            assert file.metadata()["rpcmp"] == about
    assert starts(memory) == [4096] * 3
    for step in (2, 3, 4):
        assert memory.tensors(step)["w"].tolist() == [step] * 4


def test_metadata_that_outgrows_its_room_gets_more(memory: Memory) -> None:
    for step, length in enumerate((10, 5000, 6000, 3 * 4096, 10), start=1):
        snapshot = memory.write({"w": torch.full((4,), step)}, step, "x" * length)
        with safe_open(memory.slots.path(snapshot.slot), "pt") as file:
            assert len(file.metadata()["rpcmp"]) == length
            assert file.get_tensor("w").tolist() == [step] * 4
        if step > 1:
            assert memory.tensors(step - 1)["w"].tolist() == [step - 1] * 4
    assert starts(memory) == [8192, 16384, 16384]


def test_metadata_of_any_length_fits(memory: Memory) -> None:
    for step, length in enumerate(range(3850, 4100), start=1):
        memory.writer = SnapshotWriter(memory.slots)
        memory.write({"w": torch.ones(1)}, 2 * step)
        snapshot = memory.write({"w": torch.ones(1)}, 2 * step + 1, "x" * length)
        with safe_open(memory.slots.path(snapshot.slot), "pt") as file:
            assert file.metadata()["rpcmp"] == "x" * length
            assert file.get_tensor("w").item() == 1


def test_state_that_appears_after_the_first_step_is_in_later_snapshots(memory: Memory) -> None:
    weight = torch.ones(2, 3)
    memory.write({"w": weight}, 1)
    memory.write({"w": weight, "m": torch.ones(2, 3), "step": torch.tensor(1.0)}, 2)
    memory.write({"w": weight, "m": torch.ones(3, 2)}, 3)
    assert {name: value.shape for name, value in memory.tensors(1).items()} == {"w": (2, 3)}
    assert sorted(memory.tensors(2)) == ["m", "step", "w"]
    memory.write({"w": weight.bfloat16()}, 4)
    assert memory.tensors(2)["step"].item() == 1
    assert memory.tensors(3)["m"].shape == (3, 2)
    assert memory.tensors(4)["w"].dtype == torch.bfloat16
    assert [found.length for found in memory.slots.all()] == [
        os.fstat(memory.slots.fd(found.slot)).st_size for found in memory.slots.all()
    ]


def test_a_new_writer_continues_after_a_dead_one(memory: Memory) -> None:
    for step in (1, 2, 3):
        memory.write({"w": torch.full((2,), step)}, step)
    memory.writer = SnapshotWriter(memory.slots)
    for step in (4, 5):
        memory.write({"w": torch.full((2,), step)}, step)
        assert memory.tensors(step - 1)["w"].tolist() == [step - 1] * 2
    assert memory.tensors(5)["w"].tolist() == [5, 5]


# The state


def test_a_state_is_restored_completely(memory: Memory) -> None:
    optimizer = {
        "a.weight": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "max": None},
        "a.bias": {"count": 3, "decay": 0.1, "flag": True, "name": "x", "limit": math.inf},
        "b": {"nested": [torch.zeros(1), (torch.ones(1), None, {"deep": [torch.ones(2), 1]})]},
        "c": {},
    }
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "fused": True},
        {"lr": torch.tensor(0.2), "betas": [torch.tensor(0.9), 0.5]},
    ]
    scheduler = {"last_epoch": 3, "_last_lr": [0.1, torch.tensor(0.2)], 5: "a key that is no text"}
    written = state("stage1", {"a.weight": torch.ones(2)}, optimizer, groups, scheduler, 12)
    found = unpack([memory.keep(written)], "other", ["a.weight"], list(optimizer))
    assert (found.step, found.stage) == (12, "other")
    assert bits_of(found.model) == bits_of(written.model)
    for before, after in (
        (optimizer, found.state),
        (groups, found.groups),
        (scheduler, found.scheduler),
    ):
        assert pytree.describe(after) == pytree.describe(before)
        pairs = zip(pytree.leaves(before), pytree.leaves(after), strict=True)
        for one, other in pairs:
            assert bits(one) == bits(other) if isinstance(one, Tensor) else one == other
    assert type(found.groups[0]["betas"]) is tuple
    assert type(found.groups[1]["betas"]) is list
    assert found.state["a.bias"]["flag"] is True


def test_the_names_in_the_file_tell_what_each_tensor_is(memory: Memory) -> None:
    memory.keep(
        state(
            model={"a.weight": torch.ones(1)},
            optimizer={"a.weight": {"exp_avg": torch.ones(1)}},
            groups=[{"lr": torch.tensor(0.1)}],
            scheduler={"base_lrs": [torch.tensor(0.1)]},
        )
    )
    assert sorted(memory.tensors(7)) == [
        "model.a.weight",
        "optimizer.0.lr",
        "optimizer.a.weight.exp_avg",
        "scheduler.base_lrs.0",
    ]


def test_names_that_collide_are_told_apart(memory: Memory) -> None:
    optimizer = {"0": {"lr": torch.tensor(1)}, "a": {"b.c": torch.tensor(2)}}
    optimizer |= {"a.b": {"c": torch.tensor(3)}}
    written = state(optimizer=optimizer, groups=[{"lr": torch.tensor(4)}])
    found = unpack([memory.keep(written)], "stage0", [], ["0", "a", "a.b"])
    assert (found.state, found.groups) == (optimizer, written.groups)


def test_tensors_keep_their_layout_and_shared_tensors_stay_shared(memory: Memory) -> None:
    columns = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    shared = torch.ones(3)
    holed, expanded = torch.arange(12.0).reshape(3, 4)[:, :2], torch.ones(1).expand(2, 2)
    turned = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    optimizer: dict[str, dict[str, Tensor]] = {
        "a": {"columns": columns, "m": shared, "holed": holed, "expanded": expanded},
        "b": {"m": shared, "equal": torch.ones(3), "empty": torch.ones(0)},
        "c": {"turned": turned, "back": turned.conj()},  # the same memory
    }
    path = memory.keep(state(optimizer=optimizer))
    found = unpack([path], "stage0", [], ["a", "b", "c"]).state
    for name, kept in optimizer.items():
        assert all(torch.equal(found[name][key], value) for key, value in kept.items())
    assert found["a"]["columns"].stride() == columns.stride()
    assert found["a"]["m"] is found["b"]["m"]
    assert found["b"]["equal"] is not found["b"]["m"]
    assert found["a"]["holed"].is_contiguous()
    assert found["a"]["expanded"].is_contiguous()
    assert turned.data_ptr() == turned.conj().data_ptr()
    assert torch.equal(found["c"]["turned"], turned)
    assert torch.equal(found["c"]["back"], turned.conj())
    of_b = unpack([path], "stage0", [], ["b"]).state  # under another cut
    assert torch.equal(of_b["b"]["m"], shared)


@pytest.mark.parametrize("what", ["groups", "scheduler", "optimizer"])
def test_a_value_that_cannot_be_stored_is_refused(what: str) -> None:
    with pytest.raises(TypeError, match="function is neither a tensor nor a plain value"):
        pack(state(**{what: {"w": {"f": bits}}}))  # type: ignore[arg-type]


# Other cuts


def part(stage: str, *layers: str, options: Any = 0.1, step: int = 7) -> StageState:
    """Return a stage with some layers; `options` of its optimizer, None: no optimizer."""
    return state(
        stage,
        {f"{layer}.w": torch.full((2,), float(ord(layer))) for layer in layers},
        {f"{layer}.w": {"m": torch.full((2,), ord(layer))} for layer in layers} if options else {},
        [{"lr": options}] if options else None,
        {"last_epoch": 3, "_last_lr": [options]} if options else None,
        step,
    )


def names(*layers: str) -> list[str]:
    return [f"{layer}.w" for layer in layers]


@pytest.fixture
def files(tmp_path: Path) -> Callable[[StageState], str]:

    def write(written: StageState) -> str:
        path = tmp_path / f"{written.stage}.safetensors"
        memory = Memory()
        tensors, about = pack(written)
        path.write_bytes(memory.bytes(memory.write(tensors, written.step, about)))
        memory.slots.close()
        return str(path)

    return write


Files = Callable[[StageState], str]


@pytest.mark.parametrize("layers", ["abcd", "bc", "d", "ca"])
def test_a_stage_takes_its_layers_from_the_files_of_several(files: Files, layers: str) -> None:
    paths = [files(part("s0", "a", "b")), files(part("s1", "c", "d"))]
    found = unpack(paths, "new", names(*layers), names(*layers))
    expected = part("new", *layers)
    assert (found.step, found.stage) == (7, "new")
    assert bits_of(found.model) == bits_of(expected.model)
    assert sorted(found.state) == sorted(expected.state)
    for name, held in expected.state.items():
        assert bits_of(found.state[name]) == bits_of(held)
    assert (found.groups, found.scheduler) == (expected.groups, expected.scheduler)


def test_only_trained_parameters_have_an_optimizer_state(files: Files) -> None:
    path = files(part("s0", "a", "b"))
    found = unpack([path], "new", names("a", "b"), names("b"))
    assert sorted(found.model) == names("a", "b")
    assert sorted(found.state) == names("b")


def test_a_stage_without_an_optimizer_has_nothing_to_disagree_about(files: Files) -> None:
    paths = [files(part("s0", "a", options=None)), files(part("s1", "b"))]
    for order in (paths, paths[::-1]):
        found = unpack(order, "new", names("a", "b"), names("b"))
        assert found.groups == [{"lr": 0.1}]
        assert found.scheduler == {"last_epoch": 3, "_last_lr": [0.1]}
    alone = unpack(paths[:1], "new", names("a"), [])
    assert (alone.state, alone.groups, alone.scheduler) == ({}, None, None)


@pytest.mark.parametrize(
    "other",
    [
        part("s1", "b", options=0.2),
        part("s1", "b", step=8),
        part("s1", "b", options=torch.tensor(0.2)),
        replace(part("s1", "b"), scheduler={"last_epoch": 4, "_last_lr": [0.1]}),
    ],
    ids=["options", "step", "tensors", "scheduler"],
)
def test_parts_that_do_not_agree_are_named(files: Files, other: StageState) -> None:
    paths = [files(part("s0", "a")), files(other)]
    for order, first, second in ((paths, "s0", "s1"), (paths[::-1], "s1", "s0")):
        message = f"stage 'new' takes layers over from '{first}' and '{second}', whose optimizers"
        with pytest.raises(CheckpointError, match=message):
            unpack(order, "new", names("a", "b"), names("a", "b"))


@pytest.mark.parametrize("options", [torch.tensor(0.1), (torch.tensor([0.1, 0.2]),)], ids=str)
def test_options_that_are_tensors_agree_if_they_are_equal(files: Files, options: Any) -> None:
    paths = [files(part("s0", "a", options=options)), files(part("s1", "b", options=options))]
    found = unpack(paths, "new", names("a", "b"), names("a", "b"))
    (expected,), (value,) = pytree.leaves(options), pytree.leaves(found.groups[0]["lr"])
    assert bits(value) == bits(expected)


def test_tensors_that_are_missing_are_named(files: Files) -> None:
    path = files(part("s0", "a", "b"))
    with pytest.raises(CheckpointError) as caught:
        unpack([path], "new", names("z", "a", "c"), [])
    assert str(caught.value) == f"stage 'new' misses c.w, z.w in {path}"


OTHER = {"a.w": torch.ones(1)}

BROKEN: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda whole: None,
    "empty": lambda whole: b"",
    "text": lambda whole: b"no tensors in here, but some text",
    "cut off": lambda whole: whole[:-1],
    "cut off in its header": lambda whole: whole[:100],
    "of another program": lambda whole: safetensors.torch.save(OTHER),
    "with other metadata": lambda whole: safetensors.torch.save(OTHER, {"rpcmp": "[]"}),
    "without its metadata": lambda whole: whole.replace(b"rpcmp", b"RPCMP"),
}
"""Files that are not a stage's state, made of one that is."""


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_file_without_the_state_of_a_stage_is_named(
    files: Files, tmp_path: Path, broken: Callable[[bytes], bytes | None]
) -> None:
    content = broken(Path(files(part("s0", "a"))).read_bytes())
    path = tmp_path / "broken.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"broken\.safetensors is no stage's state: "):
        unpack([str(path)], "new", names("a"), names("a"))


# Real optimizers


class Trained:
    """A small model with optimizer and scheduler, as in a stage."""

    def __init__(self, optimizer: Callable[..., Optimizer], scheduler: Callable[..., Any] | None):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.names = [name for name, _ in self.model.named_parameters()]
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = scheduler(self.optimizer) if scheduler else None

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            loss = self.model(inputs).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(loss.item())
            elif self.scheduler is not None:
                self.scheduler.step()
        return losses

    def state(self, step: int) -> StageState:
        found = self.optimizer.state_dict()
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in found["param_groups"]
        ]
        by_name = {self.names[index]: value for index, value in found["state"].items()}
        scheduler = self.scheduler.state_dict() if self.scheduler else None
        return StageState(step, "stage0", self.model.state_dict(), by_name, groups, scheduler)

    def take_over(self, found: StageState) -> None:
        own = self.optimizer.state_dict()["param_groups"]
        self.model.load_state_dict(found.model)
        self.optimizer.load_state_dict(
            {
                "state": {self.names.index(name): value for name, value in found.state.items()},
                "param_groups": [
                    {**group, "params": mine["params"]}
                    for group, mine in zip(found.groups, own, strict=True)
                ],
            }
        )
        if self.scheduler is not None:
            self.scheduler.load_state_dict(found.scheduler)


@pytest.mark.parametrize(
    "scheduler",
    [
        None,
        partial(StepLR, step_size=2, gamma=0.5),
        partial(MultiStepLR, milestones=[2, 5, 5, 6], gamma=0.5),
        partial(OneCycleLR, max_lr=0.1, total_steps=12),
        partial(ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.5),
        partial(LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch)),
    ],
    ids=["none", "StepLR", "MultiStepLR", "OneCycleLR", "ReduceLROnPlateau", "LambdaLR"],
)
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(SGD, lr=0.1, momentum=0.9),
        partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
        partial(Adam, lr=0.01, amsgrad=True),
        partial(AdamW, lr=0.01, fused=True),
        lambda parameters: AdamW(parameters, lr=torch.tensor(0.01), fused=True),
    ],
    ids=["SGD", "SGD nesterov", "Adam", "AdamW fused", "AdamW tensor lr"],
)
def test_training_resumes_from_a_snapshot_with_the_same_bits(
    memory: Memory, optimizer: Callable[..., Optimizer], scheduler: Callable[..., Any] | None
) -> None:
    check_that_training_goes_on(memory, optimizer, scheduler, 4)


@pytest.mark.parametrize("before", [0, 1])
def test_training_resumes_from_before_and_after_the_first_step(memory: Memory, before: int) -> None:
    scheduler = partial(OneCycleLR, max_lr=0.1, total_steps=12)
    check_that_training_goes_on(memory, partial(Adam, lr=0.01), scheduler, before)


def check_that_training_goes_on(
    memory: Memory,
    optimizer: Callable[..., Optimizer],
    scheduler: Callable[..., Any] | None,
    before: int,
) -> None:
    """Train with and without a snapshot after `before` steps, and compare."""
    there = Trained(optimizer, scheduler)
    there.train(1, before)
    path = memory.keep(there.state(before))
    expected = there.train(before + 1, before + 5)
    here = Trained(optimizer, scheduler)
    here.train(100, 101)  # it is anything but fresh
    here.take_over(unpack([path], "stage0", list(here.model.state_dict()), here.names))
    assert here.train(before + 1, before + 5) == expected
    assert bits_of(here.model.state_dict()) == bits_of(there.model.state_dict())
    left, right = pack(here.state(9)), pack(there.state(9))
    assert bits_of(left[0]) == bits_of(right[0])
    assert json.loads(left[1]) == json.loads(right[1])


def test_checksums_of_what_only_init_has_are_those_of_all_files(memory: Memory) -> None:
    def kept(step: int, base: dict[str, str] | None) -> str:
        return memory.keep(replace(state(step=step, model={f"w{step}": torch.ones(1)}), base=base))

    paths = [kept(1, {"a": "1"}), kept(2, {"b": "2"})]
    assert unpack(paths, "stage0", ["w1", "w2"], []).base == {"a": "1", "b": "2"}
    assert unpack([kept(1, {})], "stage0", ["w1"], []).base == {}
    assert unpack([kept(1, None)], "stage0", ["w1"], []).base is None
