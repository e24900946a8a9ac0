"""Names that a message of torch RPC may and may not contain."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch

from rpcmp.data.batch_server import BatchServer
from rpcmp.driver import rounds
from rpcmp.errors import SecurityError
from rpcmp.rpc import transport, unpickler
from rpcmp.rpc.messages import AfterRound, Bundle, Mode, RoundHeader
from rpcmp.worker.optimizer import StageOptimizer
from rpcmp.worker.stage import Stage


class Batch(NamedTuple):
    image: int
    label: int


class NoTuple:
    pass


def load(value: Any) -> Any:
    return unpickler.Unpickler(io.BytesIO(pickle.dumps(value))).load()


def naming(module: str, name: str) -> bytes:
    """Return a pickle that only names something."""
    return (
        b"\x80\x04"
        + b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
        + b"\x93."
    )


@pytest.mark.parametrize(
    "value",
    [
        Bundle(RoundHeader(1, 1, Mode.TRAIN, 32, 4, 1, False, 0, AfterRound.STEP), 0),
        transport.Raised("x"),
        {"a": [1, 2.5, (None, "text")], "b": OrderedDict(c=1)},
        torch.float32,
        torch.Size([2, 3]),
    ],
)
def test_messages_of_the_protocol_are_unpickled(value: Any) -> None:
    assert load(value) == value


def test_enum_members_named_by_getattr_are_unpickled() -> None:
    """Python 3.11.0 to 3.11.3 pickle them so."""
    assert load(Evil(getattr, Mode, "TRAIN")) is Mode.TRAIN
    with pytest.raises(SecurityError, match="'mro'"):
        load(Evil(getattr, Mode, "mro"))


def test_remote_methods_are_unpickled_but_cannot_be_called() -> None:
    method = load(Stage.train)
    assert method.function is Stage.train
    with pytest.raises(TypeError, match="not callable"):
        load(Evil(Stage.train, None))


class Evil:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


@pytest.mark.parametrize(
    "value",
    [
        Evil(os.system, "true"),
        Evil(subprocess.check_output, ["true"]),
        Evil(eval, "1"),
        Evil(getattr, "text", "upper"),
        Evil(torch.load, "file"),
        Stage,
        StageOptimizer,
        Stage.__init__,
        Stage._snapshot,
        Evil(rounds._root_cause, [], None),
        NoTuple(),
    ],
)
def test_all_other_names_are_refused(value: Any) -> None:
    with pytest.raises(SecurityError, match="which nobody may send"):
        load(value)


@pytest.mark.parametrize(
    ("kind", "called"),
    [
        (
            Stage,
            {
                # by other stages
                *("forward", "mark_none_gradients"),
                *("gradient_part", "gradient_total", "get_tensors"),
                # by the driver: rounds and data
                *("train", "stand_by", "abort", "settle", "sum_gradients", "sync_initial_state"),
                *("reschedule", "keep", "save", "dataset_info", "epoch_order", "prefetch"),
                # by the driver: state and figures
                *("signature", "smallest_microbatch", "digests", "parameter_digests"),
                *("state_dict", "state_names", "load_state_dict", "live_state", "memory", "host"),
                *("record_spans", "read_spans", "clock", "its_optimizer", "finish", "free_memory"),
                "cores",
            },
        ),
        (
            StageOptimizer,
            {
                *("step", "finish", "unscale", "set_scale", "zero_grad", "norms", "scale"),
                *("step_scheduler", "state_dict", "load_state_dict"),
            },
        ),
        (BatchServer, {"slices"}),
    ],
)
def test_a_message_may_name_the_methods_that_others_call_and_no_further(
    kind: type, called: set[str]
) -> None:
    """What a stage does by itself, such as stepping after a round, must not be among them."""
    nameable = {
        name
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType) and _may_be_named(kind, name)
    }
    assert nameable == called


def _may_be_named(kind: type, name: str) -> bool:
    try:
        unpickler.Unpickler(io.BytesIO(naming(kind.__module__, f"{kind.__name__}.{name}"))).load()
    except SecurityError:
        return False
    return True


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("rpcmp.rpc.transport", "os.system"),
        ("rpcmp.rpc.transport", "os"),
        ("rpcmp.worker.stage", "Stage.__init__.__globals__"),
        ("rpcmp.process.interpreter", "kill_group"),
        ("rpcmp.config.importing", "resolve"),
        ("builtins", "exec"),
        ("torch.distributed.rpc.internal", "_InternalRPCPickler._script_module_receiver"),
    ],
)
def test_names_imported_by_allowed_modules_are_refused(module: str, name: str) -> None:
    with pytest.raises((SecurityError, AttributeError)):
        unpickler.Unpickler(io.BytesIO(naming(module, name))).load()


def test_named_tuples_of_the_jobs_modules_are_unpickled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unpickler, "_named", set())
    with pytest.raises(SecurityError):
        load(Batch(1, 2))
    unpickler.allow([__name__])
    assert load(Batch(1, 2)) == Batch(1, 2)
    with pytest.raises(SecurityError):
        load(NoTuple())
    for imported in ("Bundle", "load"):  # of another module; no class
        with pytest.raises(SecurityError):
            unpickler.Unpickler(io.BytesIO(naming(__name__, imported))).load()


def test_a_message_cannot_import_a_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "unguarded.py").write_text("raise AssertionError('was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(unpickler, "_named", {"unguarded"})
    with pytest.raises(SecurityError):
        unpickler.Unpickler(io.BytesIO(naming("unguarded", "Batch"))).load()


def test_a_pickle_that_changes_allowed_classes_is_refused(tmp_path: Path) -> None:
    """The pickle makes one of our classes call the function that a string names."""
    marker = tmp_path / "was-here"

    def text(value: str) -> bytes:
        data = value.encode()
        return pickle.BINUNICODE + struct.pack("<I", len(data)) + data

    def found(module: str, name: str) -> bytes:
        return text(module) + text(name) + pickle.STACK_GLOBAL

    def changed(kind: bytes, name: str, value: bytes) -> bytes:
        names = pickle.EMPTY_DICT + pickle.MARK + text(name) + value + pickle.SETITEMS
        return kind + pickle.NONE + names + pickle.TUPLE2 + pickle.BUILD + pickle.POP

    raised = found("rpcmp.rpc.transport", "Raised")
    evil = changed(raised, "callable", text("pathlib:Path.touch"))
    evil += changed(
        found("rpcmp.data.batch_server", "BatchServer"), "named_parameters", text(str(marker))
    )
    evil += found("rpcmp.worker.optimizer", "StageOptimizer") + pickle.EMPTY_TUPLE + pickle.REDUCE
    with pytest.raises(SecurityError, match=r"rpcmp\.data\.batch_server\.BatchServer"):
        unpickler.Unpickler(io.BytesIO(evil + pickle.STOP)).load()
    assert not marker.exists()
    del transport.Raised.callable  # type: ignore[attr-defined]


def test_a_reference_to_another_type_is_refused() -> None:
    from torch.distributed.rpc.internal import _InternalRPCPickler

    receive = unpickler._receiver(_InternalRPCPickler, "_py_rref_receiver")
    for fork in ((0, 1, 0, 2, 1, 0, "__torch__.Evil"), (0, 1), [0, "PyObject"], None):
        with pytest.raises(SecurityError, match="which nobody may send"):
            receive(fork)


@pytest.mark.parametrize("state", [b"]Na", b"N}\x8c\x08functionNs\x86", b"}\x8c\x08functionNs"])
def test_a_message_cannot_change_the_method_that_it_calls(state: bytes) -> None:
    named = b"\x8c\x12rpcmp.worker.stage\x8c\rStage.forward\x93"
    method = unpickler.Unpickler(io.BytesIO(b"\x80\x04" + named + b".")).load()
    with pytest.raises(SecurityError, match=r"changes the method Stage\.forward"):
        unpickler.Unpickler(io.BytesIO(b"\x80\x04" + named + state + b"b.")).load()
    assert method.function is Stage.forward
