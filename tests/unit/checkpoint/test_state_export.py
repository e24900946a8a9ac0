"""`rpcmp export`: a checkpoint's model as one file that plain torch loads."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from pathlib import Path
from subprocess import check_output
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rpcmp.checkpoint import files, safetensors_header, state_export
from rpcmp.checkpoint.folder import CheckpointFolder, look
from rpcmp.checkpoint.manifest import BestMark
from rpcmp.checkpoint.state_export import export
from rpcmp.cli import cli
from rpcmp.errors import CheckpointError, ConfigError
from rpcmp.rpc.tensors import same_bits
from tests.support.manifests import manifest, stage

Stages = dict[str, dict[str, Tensor]]


def model() -> nn.Module:
    """Return a model of several dtypes, with a buffer without dimensions."""
    found = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2).bfloat16())
    found[2].register_buffer("mask", torch.tensor([True, False, True]))
    found[2].register_buffer("empty", torch.empty(0, 4))
    return found


def split(whole: nn.Module) -> Stages:
    """Return the model's tensors as two stages save them, by their names in a stage's file."""
    state = {f"model.{name}": value for name, value in whole.state_dict().items()}
    return {
        "stage0": {name: value for name, value in state.items() if not name.startswith("model.2")},
        "stage1": {name: value for name, value in state.items() if name.startswith("model.2")},
    }


def save(folder: Path, stages: Stages, step: int = 120) -> Path:
    """Write a checkpoint as a run does; returns its step folder."""
    checkpoints = CheckpointFolder(folder)
    path = checkpoints.path_of(step)
    path.mkdir(parents=True)
    parts = []
    for name, tensors in stages.items():
        state = {"optimizer.0.weight.momentum_buffer": torch.ones(3, dtype=torch.float64)}
        content = safetensors.torch.save(tensors | state, {"rpcmp": "{}"})
        (path / f"{name}.safetensors").write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        written = {"sha256": sha256, "size": len(content), "host": f"host-{name}"}
        parts.append(stage(name).model_copy(update=written))
    checkpoints.commit(manifest(step, stages=parts))
    return path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether both have the same tensors, to the last bit."""
    return one.keys() == other.keys() and all(
        same_bits(value, other[name]) for name, value in one.items()
    )


def test_plain_torch_loads_what_was_exported(tmp_path: Path) -> None:
    whole = model()
    path = save(tmp_path / "ck", split(whole))
    target = tmp_path / "model.safetensors"
    result = export(tmp_path / "ck", target)
    other = model()
    other.load_state_dict(safetensors.torch.load_file(target), strict=True)
    assert same(other.state_dict(), whole.state_dict())
    assert (result.step, result.num_tensors) == (120, len(whole.state_dict()))
    assert result.num_elements == sum(value.numel() for value in whole.state_dict().values())
    assert result.size == target.stat().st_size
    assert (result.manifest.step, result.skipped) == (120, ())
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ck", "model.safetensors"]
    with safetensors.safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "120"}
    assert export(path, target) == result


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]


@given(st.data())
def test_all_types_and_shapes_are_copied(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tmp_path = tmp_path_factory.mktemp("export")
    shapes = st.lists(st.integers(0, 3), max_size=3)
    kinds = data.draw(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=8))
    tensors = {
        f"{index}": torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape)
        for index, (dtype, shape) in enumerate(kinds)
    }
    cut = data.draw(st.integers(0, len(tensors)))
    named = [(f"model.{name}", value) for name, value in tensors.items()]
    save(tmp_path / "ck", {"b": dict(named[:cut]), "a": dict(named[cut:])})
    target = tmp_path / "model.safetensors"
    export(tmp_path / "ck", target)
    assert same(safetensors.torch.load_file(target), tensors)
    assert same(safetensors.torch.load(target.read_bytes()), tensors)


def test_tensors_follow_the_stages_and_the_data_is_aligned(tmp_path: Path) -> None:
    stages = {"b": {"model.z": torch.ones(1)}, "a": {"model.a": torch.ones(3, dtype=torch.bool)}}
    stages["c"] = {"model.m": torch.ones(2)}
    save(tmp_path / "ck", stages)
    target = tmp_path / "model.safetensors"
    export(tmp_path / "ck", target)
    with target.open("rb") as file:
        found = safetensors_header.read_ranges(file, target)
    # The wider numbers first: torch cannot view a float32 behind three bools.
    assert list(found) == ["z", "m", "a"]
    assert found["z"].begin % 8 == 0
    assert found["m"].begin == found["z"].begin + 4


def test_a_tensor_longer_than_a_block_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_header, "BLOCK", 10)
    tensors = {"w": torch.randn(50), "b": torch.randn(3)}
    save(tmp_path / "ck", {"s": {f"model.{name}": value for name, value in tensors.items()}})
    export(tmp_path / "ck", tmp_path / "out")
    assert same(safetensors.torch.load_file(tmp_path / "out"), tensors)


def test_a_model_without_tensors_is_a_valid_file(tmp_path: Path) -> None:
    save(tmp_path / "ck", {"s": {}})
    assert export(tmp_path / "ck", tmp_path / "out").num_tensors == 0
    assert safetensors.torch.load_file(tmp_path / "out") == {}


# What is damaged


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Step folders of three checkpoints, the newest first."""
    stages = split(model())
    return [save(tmp_path / "ck", stages, step) for step in (30, 20, 10)]


def test_the_newest_whole_checkpoint_is_taken(three: list[Path], tmp_path: Path) -> None:
    flip(three[0] / "stage1.safetensors")
    manifest = three[1] / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    result = export(tmp_path / "ck", tmp_path / "out")
    assert result.step == 10
    assert [str(three[0]) in result.skipped[0], str(three[1]) in result.skipped[1]] == [True, True]
    assert "stage 'stage1' is damaged" in result.skipped[0]
    assert "cut off" in result.skipped[1]


def test_a_file_that_cannot_be_read_is_passed_over(
    three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbidden = three[0] / "stage1.safetensors"

    def check(path: Path, sha256: str, size: int) -> str:
        if path == forbidden:  # root may read every file
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, sha256, size)

    real = files.check
    monkeypatch.setattr(state_export, "check", check)
    result = export(tmp_path / "ck", tmp_path / "out")
    assert result.skipped == (f"{forbidden} of stage 'stage1' cannot be read: Permission denied",)
    with pytest.raises(CheckpointError, match="stage 'stage1' cannot be read: Permission denied"):
        export(three[0], tmp_path / "out")


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_file_is_detected(three: list[Path], tmp_path: Path, size: int) -> None:
    file = three[0] / "stage0.safetensors"
    os.truncate(file, size % file.stat().st_size)
    with pytest.raises(CheckpointError, match=r"stage0\.safetensors of stage 'stage0' is damaged"):
        export(three[0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_step_folder_must_be_good(three: list[Path], tmp_path: Path) -> None:
    flip(three[0] / "manifest.json")
    (three[1] / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="damaged"):
        export(three[0], tmp_path / "out")
    with pytest.raises(CheckpointError, match="was never completed"):
        export(three[1], tmp_path / "out")
    assert export(three[2], tmp_path / "out").step == 10


def test_a_copied_step_folder_may_have_another_name(three: list[Path], tmp_path: Path) -> None:
    three[1].rename(tmp_path / "best")
    assert export(tmp_path / "best", tmp_path / "out").step == 20


def test_a_file_of_another_host_must_be_copied_first(three: list[Path], tmp_path: Path) -> None:
    for path in three:
        (path / "stage1.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        export(tmp_path / "ck", tmp_path / "out")
    first, *lines = str(caught.value).splitlines()
    assert first == f"no checkpoint in {tmp_path / 'ck'} can be exported:"
    assert lines == [
        f"  {path / 'stage1.safetensors'} is missing: stage 'stage1' wrote it on host host-stage1; "
        "copy it here first"
        for path in three
    ]


def test_a_name_that_two_stages_have_is_refused(tmp_path: Path) -> None:
    tensors = {"model.w": torch.ones(2)}
    save(tmp_path / "ck", {"a": tensors, "b": tensors})
    with pytest.raises(CheckpointError, match="stages 'a' and 'b' both have 'w'"):
        export(tmp_path / "ck", tmp_path / "out")


def test_folders_without_a_checkpoint_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no folder .*/nowhere"):
        export(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export(tmp_path, tmp_path / "out")


def test_targets_that_cannot_be_written_are_refused_before_anything_is_read(
    three: list[Path], tmp_path: Path
) -> None:
    for path in three:
        flip(path / "stage0.safetensors")
    for target, message in [
        (tmp_path / "nowhere" / "out", "there is no folder .*/nowhere"),
        (tmp_path / "ck", "it is a folder"),
        (three[0] / "stage1.safetensors", "is a checkpoint; leave it whole"),
    ]:
        with pytest.raises(ConfigError, match=message):
            export(tmp_path / "ck", target)


def test_a_full_disk_leaves_the_old_file(
    three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "out").write_bytes(b"as it was")
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(ConfigError, match=r"cannot write .*/out: No space left on device"):
        export(three[0], tmp_path / "out")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ck", "out"]
    assert (tmp_path / "out").read_bytes() == b"as it was"


# The format


def encoded(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end], **changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its header has 0 bytes, of a file of 0"),
        (encoded(b"{}", length=3), "its header has 3 bytes, of a file of 10"),
        (encoded(b"{}", length=2**63), f"its header has {2**63} bytes, of a file of 10"),
        (encoded(b"{]"), "Expecting"),
        (encoded(b"\xff\xff"), "codec can't decode"),
        (encoded(b"[" * 100_000), "recursion"),
        (encoded([]), "its header is not a JSON object"),
        (encoded(b'{"a": 1, "a": 2}'), "it has 'a' twice"),
        (encoded({"a": 1}), "valid dictionary"),
        (encoded({"a": entry(0, 2, extra=1)}, b"ab"), "Extra inputs"),
        (encoded({"a": entry(0, 2, data_offsets=[0])}, b"ab"), "at least 2 items"),
        (encoded({"a": entry(2, 0)}, b"ab"), "greater than or equal"),
        (encoded({"a": entry(2, 0, shape=[2])}, b"ab"), "ends before it begins"),
        (encoded({"a": entry(0, 3)}, b"ab"), "do not fill it"),
        (encoded({"a": entry(0, 1)}, b"ab"), "do not fill it"),
        (encoded({"a": entry(0, 1), "b": entry(0, 2)}, b"ab"), "do not fill it"),
        (encoded({"a": entry(0, 1), "b": entry(2, 3)}, b"abc"), "do not fill it"),
        (encoded({}, b"a"), "do not fill it"),
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with (
        path.open("rb") as file,
        pytest.raises(CheckpointError, match=f"file is not a safetensors file: .*({message})"),
    ):
        safetensors_header.read_ranges(file, path)


def test_a_file_that_shrinks_while_it_is_copied_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(encoded({"a": entry(0, 100_000)}, bytes(100_000)))
    with path.open("rb") as file:
        found = safetensors_header.read_ranges(file, path)
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CheckpointError, match="was cut off while it was read"):
            list(safetensors_header.blocks(file, found["a"], path))


# The command


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, arguments)])


def test_the_command_names_the_file_that_it_wrote(three: list[Path], tmp_path: Path) -> None:
    flip(three[0] / "stage0.safetensors")
    target = tmp_path / "model.safetensors"
    result = command(tmp_path / "ck", target)
    assert result.exit_code == 0
    size = f"{target.stat().st_size} B" if target.stat().st_size < 1024 else "1.0 KiB"
    count = len(model().state_dict())
    assert result.stdout == f"step 20: {count} tensors, {size} written to {target}\n"
    file = three[0] / "stage0.safetensors"
    assert result.stderr == f"skipped: {file} of stage 'stage0' is damaged\n"


def test_the_command_fails_if_nothing_can_be_exported(tmp_path: Path) -> None:
    error = command(tmp_path, tmp_path / "out").exception
    assert isinstance(error, CheckpointError)
    assert error.exit_code == 2


def test_export_takes_the_marked_best_or_fails(three: list[Path], tmp_path: Path) -> None:
    middle, target = three[1], tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"is marked as the best: set `best` in \[checkpoint"):
        export(middle.parent, target, best=True)
    found = look(middle)
    assert found is not None
    assert found.manifest is not None
    mark = BestMark(metric="accuracy", value=0.75)
    marked = found.manifest.model_copy(update={"best": mark})
    CheckpointFolder(middle.parent).commit(marked)
    taken = command("--best", middle.parent, target)
    assert taken.exit_code == 0, taken.output
    assert taken.output.startswith(f"step {marked.step}, accuracy 0.7500: ")
    flip(middle / "stage0.safetensors")
    with pytest.raises(CheckpointError, match="is damaged"):
        export(middle.parent, target, best=True)
    flip(three[0] / "manifest.json")
    with pytest.raises(CheckpointError, match="may have been the best: remove it"):
        export(middle.parent, target, best=True)


def test_the_command_needs_no_torch(three: list[Path], tmp_path: Path) -> None:
    code = f"""
import sys
from rpcmp.cli import cli
cli(["export", {str(three[0])!r}, {str(tmp_path / "out")!r}], standalone_mode=False)
print([name for name in ("torch", "numpy", "grpc", "pickle") if name in sys.modules])
"""
    output = check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert output.splitlines()[-1] == "[]"
