"""The inspection passes the messages that rpcmp sends, and nothing else that torch RPC can.

The other side is a real agent of torch RPC, which may send any message that torch knows.
"""

from __future__ import annotations

import importlib
import itertools
import pickle
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcmp.data.batch_server import BatchServer
from rpcmp.errors import SecurityError
from rpcmp.net import rpc_format, rpc_inspection, rpc_pickle
from rpcmp.net.rpc_format import FormatError
from rpcmp.net.rpc_inspection import (
    MAX_AHEAD,
    MAX_HELD,
    MAX_PAYLOAD,
    Inspection,
    Lengths,
    Pipes,
)
from rpcmp.observability.trace.spans import SPANS_PER_ANSWER, Kind, Span
from rpcmp.rpc import transport
from rpcmp.worker.optimizer import StageOptimizer
from rpcmp.worker.stage import Stage
from tests.support.examples import examples
from tests.support.pipes import Agents, Conversation

OURS = """
def same(got, sent):
    return torch.equal(got, sent) and got.dtype == sent.dtype and got.stride() == sent.stride()

some = {"a": torch.arange(10.0), "b": [torch.zeros(0), torch.tensor(3.0), torch.ones(5, 4).T]}
got = rpc.rpc_sync("inside", echo, args=(some,))
assert same(got["a"], some["a"]) and all(map(same, got["b"], some["b"]))
names = '''bfloat16 bool complex128 complex64 complex32 float64 float16 float32 float8_e4m3fn
    float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int8 int16 int32 int64 uint8 uint16
    uint32 uint64'''
for name in names.split():
    kind = torch.zeros(3, dtype=getattr(torch, name))
    assert rpc.rpc_sync("inside", echo, args=(kind,)).dtype == kind.dtype
with dist_autograd.context() as context_id:
    x, y = torch.ones(4, 3, requires_grad=True), torch.ones(2, requires_grad=True)
    a, b = rpc.rpc_sync("inside", twice, args=(x, y))
    dist_autograd.backward(context_id, [a.sum() + b.sum()])
    assert dist_autograd.get_gradients(context_id)[x].eq(2).all()
with dist_autograd.context() as context_id:
    many = [torch.ones(2, requires_grad=True) for _ in range(300)]
    total = sum(each.sum() for each in rpc.rpc_sync("inside", twice, args=many))
    dist_autograd.backward(context_id, [total])
    assert dist_autograd.get_gradients(context_id)[many[299]].eq(2).all()
with dist_autograd.context() as context_id:  # an answer without anything to differentiate
    assert rpc.rpc_sync("inside", ignored, args=(torch.ones(1, requires_grad=True),)) == "nothing"
rref = rpc.remote("inside", service)
assert rpc.rpc_sync("inside", name_of, args=(rref,)) == "Service"
del rref
try:
    rpc.rpc_sync("inside", fails)
except ValueError:
    pass
large = [torch.randn(300, 500) for _ in range(4)]
assert all(map(same, rpc.rpc_sync("inside", echo, args=(large,)), large))
rpc.rpc_sync("inside", echo, args=("x" * 300_000,))
"""
"""All kinds of messages that rpcmp sends."""

BUILTIN = (
    'torch._C._distributed_rpc._invoke_rpc_builtin(agent.get_worker_info("inside"), {}).wait()'
)

FORBIDDEN = {
    "SCRIPT_CALL": BUILTIN.format('"aten::from_file", 10.0, PATH, False, 8'),
    "SCRIPT_REMOTE_CALL": (
        'rpc.remote("inside", torch.add, args=(torch.ones(1), torch.ones(1))).to_here()'
    ),
    "SCRIPT_CALL of a tensor operator": (
        'rpc.rpc_sync("inside", torch.add, args=(torch.ones(1), 1))'
    ),
    "PYTHON_RREF_FETCH_CALL": 'rpc.remote("inside", service).to_here()',
    "RREF_BACKWARD_REQ": (
        'rref = rpc.remote("inside", service)\n'
        "with dist_autograd.context() as context_id:\n"
        "    rref.backward(context_id)"
    ),
    "RUN_WITH_PROFILING_REQ": (
        "from torch.autograd import profiler_legacy\n"
        "with profiler_legacy.profile():\n"
        '    rpc.rpc_sync("inside", echo, args=(1,))'
    ),
    "FORWARD_AUTOGRAD_REQ": (
        "with dist_autograd.context() as context_id:\n"
        "    x = torch.ones(1, requires_grad=True)\n"
        '    rpc.rpc_sync("inside", torch.add, args=(x, x))'
    ),
}
"""Code that sends messages which no member may send, by the name in the error."""


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    started = Agents(tmp_path_factory.mktemp("agents"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def recorded(agents: Agents, tmp_path_factory: pytest.TempPathFactory) -> list[Conversation]:
    """Two agents' messages of every allowed kind: the contract with torch."""
    talk = agents.talk(tmp_path_factory.mktemp("recorded"), OURS)
    assert talk.printed.splitlines()[-1:] == ["done"], talk.printed
    assert not talk.proxy.refused
    return talk.proxy.conversations


def frames(data: bytes | bytearray | memoryview) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        found.append(bytes(data[at + 8 : at + 8 + length]))
        at += 8 + length
    return found


def joined(parts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def test_torchs_own_messages_pass_unchanged(recorded: list[Conversation]) -> None:
    main, *others = recorded
    sent, passed = frames(main.from_outside), frames(main.passed)
    assert b"cma" in sent[1]
    assert passed[1] == rpc_format.BROCHURE  # a peer cannot make this process read memory
    assert passed[:1] + passed[2:] == sent[:1] + sent[2:]
    assert all(other.passed == other.from_outside for other in others)
    kinds = {int.from_bytes(part, "little") for part in sent[2:] if len(part) == 4}
    assert kinds >= {0x102, 0x105, 0x10B, 0x10F, 0x111, 0x113}
    answers = {
        int.from_bytes(part, "little") for part in frames(main.from_inside) if len(part) == 4
    }
    assert answers >= {0x203, 0x206, 0x20E, 0x210, 0x212, 0x214}


def test_responses_pass_if_they_were_requested(recorded: list[Conversation]) -> None:
    main = recorded[0]
    answer = frames(main.from_inside)[0]
    address = answer[8 : 8 + answer[7]].decode()
    inspection = Inspection(Pipes(print), "inside", "the other", address, "127.0.0.1:7")
    inspection.sent(bytes(main.from_outside))
    # The worker opens its further connections where it has opened the first one.
    passed = frames(inspection.received(bytes(main.from_inside)))
    assert passed[0] == answer[:7] + b"\x0b127.0.0.1:7" + answer[8 + answer[7] :]
    assert passed[1:] == frames(main.from_inside)[1:]
    with pytest.raises(SecurityError, match="was not asked for"):  # a second time
        inspection.received(joined(frames(main.from_inside)[-5:]))
    elsewhere = Inspection(Pipes(print), "inside", "the other", "127.77.0.9:1", "127.0.0.1:7")
    elsewhere.sent(joined(frames(main.from_outside)[:1]))
    with pytest.raises(SecurityError, match="leads somewhere else"):
        elsewhere.received(bytes(main.from_inside))


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_every_other_message_of_torch_closes_the_connection(
    kind: str, agents: Agents, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    talk = agents.talk(tmp_path, FORBIDDEN[kind].replace("PATH", repr(str(secret))))
    assert "done" not in talk.printed.splitlines()
    assert talk.proxy.refused, talk.printed
    first = str(talk.proxy.refused[0])
    assert kind.partition(" ")[0] in first
    assert "outside has sent" in first


def message(
    kind: int, payload: bytes, tensors: bytes = b"", lengths: tuple[int, ...] = ()
) -> bytes:
    """Return a message as a pipe carries it, valid or not."""
    tensors = tensors or b"\x80\x02ctorch.jit._pickle\nbuild_tensorlist\nq\x00(](etR."
    head = b"\xb9\x03\xbd\x00\xba\x04\xb9\x02\x04\xbd\x00\xb9\x02\x08\xbd\x00"
    for length in (len(payload), len(tensors)):
        head += b"\xb9\x02\x83" + struct.pack("<Q", length) + b"\xbd\x00"
    cpu = b"\xb9\x02\xbd\x03cpu\x00"
    head += b"\xba\x83" + struct.pack("<Q", len(lengths))
    for length in lengths:
        head += b"\xb9\x04\x83" + struct.pack("<Q", length) + cpu + cpu + b"\xbd\x00"
    return joined([head, struct.pack("<I", kind), bytes(8), payload, tensors])


def hello(name: str) -> bytes:
    return joined(
        [b"\xb8\x00\xb9\x01\xbd" + bytes([len(name)]) + name.encode(), rpc_format.BROCHURE]
    )


HELLO = hello("stage1:0")


def begun(pipes: Pipes | None = None, peer: str = "stage1:0") -> Inspection:
    """Return the inspection of a pipe that a peer has opened."""
    inspection = Inspection(pipes or Pipes(print), peer, "stage 1 at host-b")
    assert bytes(inspection.received(hello(peer))) == hello(peer)
    return inspection


def test_a_script_call_is_refused() -> None:
    names = sorted({schema.name for schema in torch._C._jit_get_all_schemas()})
    assert len(names) > 2000
    for name in [*random.Random(7).sample(names, 1000), "aten::from_file"]:
        text = name.encode()
        call = b"\x80\x02(X" + struct.pack("<I", len(text)) + text + b"q\x00t."
        for kind in (0x100, 0x102, 0x104, 0x105, 0x10F, 0x111, 0x115):
            reported: list[SecurityError] = []
            with pytest.raises(SecurityError, match="stage 1 at host-b has sent"):
                begun(Pipes(reported.append)).received(message(kind, call))
            assert len(reported) == 1


def test_only_known_message_types_pass() -> None:
    for kind in range(0x400):
        inspection = begun()
        with pytest.raises(SecurityError):
            inspection.received(message(kind, b"nonsense"))
    for kind, payload in ((0x203, b"\x80\x04N."), (0x20E, b""), (0x237, b"text")):
        with pytest.raises(SecurityError):  # answers, where questions are expected
            begun().received(message(kind, payload))
        assert rpc_format.require(rpc_format.RESPONSES, kind, payload, 0) in (b"", payload)
    asked = message(0x113, b"\x80\x02K\x07.")
    assert bytes(begun().received(asked)) == asked


def floats(sizes: str, strides: str, items: int, offset: int = 0, kind: str = "Float") -> bytes:
    """Return a list of one tensor; sizes and strides are bytes of a pickle."""
    return (
        b"\x80\x02ctorch.jit._pickle\nbuild_tensorlist\nq\x00(](ctorch._utils\n_rebuild_tensor_v2\n"
        b"q\x01((X\x07\x00\x00\x00storageq\x02ctorch\n" + kind.encode() + b"Storage\nq\x03"
        b"X\x01\x00\x00\x000q\x04X\x03\x00\x00\x00cpuq\x05K" + bytes([items]) + b"tQq\x06"
        b"K"
        + bytes([offset])
        + b"("
        + sizes.encode("latin")
        + b"t("
        + strides.encode("latin")
        + b"t"
        b"\x89ccollections\nOrderedDict\nq\x07)RtRq\x08etR."
    )


def test_tensors_lie_within_their_memory() -> None:
    assert rpc_pickle.count_tensors(floats("K\x03K\x08", "K\x08K\x01", 24), [96]) == 1
    assert rpc_pickle.count_tensors(floats("K\x00K\x7f", "K\x7fK\x01", 24), [96]) == 1  # empty
    assert rpc_pickle.count_tensors(floats("", "", 1), [4]) == 1
    for data, lengths in [
        (floats("K\x03K\x08", "K\x08K\x01", 24), [95]),
        (floats("K\x03K\x08", "K\x08K\x01", 24), [96, 4]),
        (floats("K\x03K\x08", "K\x08K\x01", 24), []),
        (floats("K\x04K\x08", "K\x08K\x01", 24), [96]),
        (floats("K\x03K\x08", "K\x09K\x01", 24), [96]),
        (floats("K\x03K\x08", "K\x08K\x01", 24, offset=1), [96]),
        (floats("K\x03", "K\x08K\x01", 24), [96]),
        (floats("J\xff\xff\xff\xff", "K\x01", 24), [96]),
        (floats("K\x03", "J\xff\xff\xff\xff", 24), [96]),
        (floats("K\x03", "K\x01", 24, kind="Untyped"), [96]),
        (floats("K\x03", "K\x01", 24) + b".", [96]),
        (floats("K\x03", "K\x01", 24, kind="Int").replace(b"\x89c", b"\x88c"), [96]),
        (floats("\x8a\x08\0\0\0\0\0\0\0\x40" * 2, "K\x00K\x00", 24), [96]),
        (floats("\x8a\x08\0\0\0\0\0\0\0\x40" * 2 + "K\x00", "K\x00" * 3, 24), [96]),
        (floats("K\x03", "K\x01", 24).replace(b"q\x06", b"r\xff\xff\xff\x7f"), [96]),
        (floats("K\x03", "K\x01", 24).replace(b"cpu", b"cud"), [96]),
        (floats("K\x03", "K\x01", 24).replace(b"OrderedDict", b"OrderedDicy"), [96]),
    ]:
        with pytest.raises(FormatError):
            rpc_pickle.count_tensors(data, lengths)


TENSOR_ID = b"ctorch.jit._pickle\nbuild_tensor_from_id\nq\x00"


def test_gradients_remember_without_gaps() -> None:
    first, end = b"\x80\x02(" + TENSOR_ID + b"(K\x00tRq\x01", b"K\x07K\x00\x89t."
    for payload, number in [(first + end, 1), (first + b"h\x00(K\x01tRq\x02" + end, 2)]:
        assert rpc_format.require(rpc_format.REQUESTS, 0x111, payload, number) == b""
        with pytest.raises(FormatError):  # of a tensor that there is not
            rpc_format.require(rpc_format.REQUESTS, 0x111, payload, number - 1)
    for payload in (
        first.replace(b"q\x01", b"r\x00\x00\x00\x0c") + end,
        first + b"h\x00(K\x00tRq\x03" + end,
        first + TENSOR_ID + b"(K\x00tRq\x02" + end,
        b"\x80\x02(h\x00(K\x00tRq\x01" + end,
    ):
        with pytest.raises(FormatError):
            rpc_format.require(rpc_format.REQUESTS, 0x111, payload, 1)


def called(function: object, *args: object) -> bytes:
    """Return the pickle of a call, as torch makes it."""
    from torch.distributed.rpc.internal import PythonUDF

    return pickle.dumps(PythonUDF(transport._dispatch, (function, args), {}), protocol=4)


def test_a_stage_may_call_only_its_functions() -> None:
    for function in (
        Stage.forward,
        Stage.mark_none_gradients,
        Stage.gradient_part,
        Stage.gradient_total,
        Stage.get_tensors,
    ):
        for peer in ("stage1:0", "driver"):
            rpc_pickle.require(called(function, 1, "a", [None]), peer, is_call=True)
    rpc_pickle.require(called(BatchServer.slices), "stage1:0", is_call=True)
    for other in (Stage.train, Stage.its_optimizer, StageOptimizer.load_state_dict):
        rpc_pickle.require(called(other), "driver", is_call=True)
        with pytest.raises(FormatError, match="which only the driver may make"):
            rpc_pickle.require(called(other), "stage1:0", is_call=True)
        with pytest.raises(FormatError, match="an answer that names the function"):
            rpc_pickle.require(called(other), "driver", is_call=False)
    for module, name in rpc_pickle.STAGES_CALL:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8c\x13rpcmp.rpc.transport\x8c\x0c_get_service\x93)R.",
        b"\x80\x04\x8c\x13rpcmp.rpc.transport\x8c\x0c_get_service\x93}\x8c\x01a\x8c\x01bsb.",
        b"\x80\x04\x8c\x12rpcmp.worker.stage\x8c\rStage.forward\x93)\x81.",
        b"\x80\x04\x8c\x12rpcmp.rpc.messages\x8c\x04Work\x93}\x8c\x01a\x8c\x01bsb.",
        b"\x80\x04P0\n.",
        b"\x80\x04crpcmp.rpc.messages\nMicrobatchMeta\n.",
        b"\x80\x04NQ.",
        b"\x80\x04Nr\xff\xff\xff\x7f.",
        b"\x80\x04Nq\x01.",
        b"\x80\x04I1\n.",
        b"\x80\x04X\xff\xff\xff\xff.",
        b"\x80\x04\x8d" + b"\xff" * 8 + b".",
        b"\x80\x04N.N.",
        b"\x80\x04(" + b"]" * rpc_pickle.MAX_OPERATIONS + b"l.",
        b"",
        b"\x80\x04.",
        b"\x80\x04]",
        b"\x80\x04\x82\x01.",
    ],
)
def test_nothing_is_called_or_changed_by_a_pickle_itself(data: bytes) -> None:
    with pytest.raises(FormatError):
        rpc_pickle.require(data, "driver", is_call=True)


@pytest.mark.parametrize("key", [b"]", b")" + b"\x85" * 500_000])
@pytest.mark.parametrize(
    ("begin", "end"), [(b"}", b"Ns."), (b"}(", b"Nu."), (b"\x8f(", b"\x90."), (b"(", b"\x91.")]
)
def test_nothing_is_hashed(begin: bytes, key: bytes, end: bytes) -> None:
    """A list cannot be, a tuple of this depth ends the process, and colliding keys take hours."""
    rpc_pickle.require(b"\x80\x04" + begin + key + end, "stage1:0", is_call=False)
    named = b"\x8c\x12rpcmp.worker.stage\x8c\x0bStage.train\x93"
    with pytest.raises(FormatError, match=r"names the function .*Stage\.train"):
        rpc_pickle.require(b"\x80\x04" + begin + named + end, "stage1:0", is_call=False)


@pytest.mark.parametrize("module", ["rpc.transport", "rpc.messages"])
def test_a_pickle_does_not_affect_later_pickles(module: str) -> None:
    name = b"\x8c%c%s\x8c\t_dispatch\x93" % (6 + len(module), f"rpcmp.{module}".encode())
    for attribute in (b"__new__", b"__setstate__", b"append"):
        changes = b"N}\x8c%c%sNs\x86b." % (len(attribute), attribute)
        with pytest.raises(FormatError):
            rpc_pickle.require(b"\x80\x04" + name + changes, "driver", is_call=True)
    with pytest.raises(FormatError, match="a function that is called by the pickle itself"):
        rpc_pickle.require(
            b"\x80\x04\x8c\x13rpcmp.rpc.transport\x8c\t_dispatch\x93)R.", "driver", is_call=True
        )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.text(), inner)
            | st.tuples(inner, inner)
            | st.frozensets(st.text())
        ),
    ),
    st.integers(2, 400),
)
def test_everything_that_the_pickler_writes_is_read(value: object, length: int) -> None:
    for protocol in (4, 5):
        for each in (value, ["a" * length, b"b" * length, bytearray(length), 1 << (8 * length)]):
            rpc_pickle.require(pickle.dumps(each, protocol=protocol), "driver", is_call=False)


def test_dicts_in_several_frames_are_read() -> None:
    value = [({"a": n, "b": {n}}, "x" * 1000, frozenset([n]), b"y" * 70_000) for n in range(200)]
    for protocol in (4, 5):
        rpc_pickle.require(pickle.dumps(value, protocol=protocol), "driver", is_call=False)


def test_the_spans_of_a_whole_trace_pass_in_one_message() -> None:
    spans = [
        Span(Kind.FORWARD, n, n, 10**12 + n, 10**13 + n, 10**14 + n)
        for n in range(SPANS_PER_ANSWER)
    ]
    rpc_pickle.require(pickle.dumps(spans, protocol=4), "stage1:0", is_call=False)


def test_unfinished_messages_of_a_peer_are_bounded() -> None:
    pipes = Pipes(print)
    inspections = [begun(pipes) for _ in range(3)]
    unfinished = message(0x102, b"\1\x80" + bytes(MAX_PAYLOAD - 3) + b".")[: MAX_PAYLOAD // 2]
    inspections[0].received(unfinished)
    inspections[1].received(unfinished)
    inspections[0].close()
    inspections[2].received(unfinished)
    begun(pipes).received(unfinished)
    with pytest.raises(SecurityError, match="of unfinished messages"):
        begun(pipes).received(unfinished)


def established(pipes: Pipes, peer: str, number: int) -> Inspection:
    """Return a peer's pipe whose channel our worker has given a number."""
    inspection = begun(pipes, peer)
    answer = (
        b"\xb9\x07\xbd\x02uv\xbd\x0f127.77.0.3:3309\xbb\x01\x01"
        + bytes([number + 1])
        + b"\xbd\x04uv:*\xbb\x01\xbd\x05basic\xbc\x08"
        + struct.pack("<Q", number)
        + b"\xbb\x01\xbd\x05basic\xbb\x01\xb9\x02\xbd\x03cpu\x00\xbd\x03any"
        b"\xbb\x01\xba\x02\xb9\x02\xbd\x03cpu\x00\xb9\x02\xbd\x03cpu\x00\xbd\x05basic"
    )
    assert not inspection.sent(joined([answer]))
    return inspection


def requested(pipes: Pipes, peer: str, number: int) -> Inspection:
    """Return the inspection of a further connection of a pipe."""
    inspection = Inspection(pipes, peer, "stage 1 at host-b")
    hello = joined([b"\xb8\x01\xb9\x01" + bytes([number])])
    assert bytes(inspection.received(hello)) == hello
    return inspection


IDS = (
    b"\x80\x02(M\x02\x01K\x00K\x00K\x00ctorch.jit._pickle\nrestore_type_tag\nq\x00}(uX"
    b"\x0e\x00\x00\x00Dict[str, str]q\x01\x86Rq\x02t."
)
CALL = message(
    0x10F,
    b"\1\x80\x04N." + IDS + struct.pack(">q", len(IDS)),
    floats("K\x03K\x08", "K\x08K\x01", 24),
    (96,),
)


def test_a_tensor_must_have_its_announced_length() -> None:
    for length, passes in ((96, True), (97, False), (95, False), (2**63, False), (0, False)):
        pipes = Pipes(print)
        pipe = established(pipes, "stage1:0", 4)
        assert bytes(pipe.received(CALL)) == CALL
        channel = requested(pipes, "stage1:0", 4)
        data = struct.pack("<Q", length) + bytes(96)
        if passes:
            assert bytes(channel.received(data)) == data
            channel.received(struct.pack("<Q", 96))  # one more, which was not announced
            assert channel.is_held
        else:
            with pytest.raises(SecurityError, match="bytes for a tensor of 96"):
                channel.received(data)


def test_a_tensor_waits_for_its_message() -> None:
    pipes = Pipes(print)
    pipe = established(pipes, "stage1:0", 4)
    channel = requested(pipes, "stage1:0", 4)
    data = struct.pack("<Q", 96) + bytes(range(96))
    assert not channel.received(data)
    assert channel.is_held
    came: list[bytes] = []
    channel.resume = lambda: came.append(bytes(channel.received(b"")))
    pipe.received(CALL)
    assert came == [data]
    assert not channel.is_held


def test_a_pipe_serves_only_its_peer() -> None:
    pipes = Pipes(print)
    established(pipes, "stage1:0", 4)
    for peer, number in (("stage2:0", 4), ("stage1:0", 6)):
        with pytest.raises(SecurityError, match="a pipe that it does not have"):
            requested(pipes, peer, number)
    reply = requested(pipes, "stage1:0", 5)
    with pytest.raises(SecurityError, match="data on a connection that carries none"):
        reply.received(b"\0")


def test_a_connection_of_a_pipe_that_has_ended_reaches_nobody() -> None:
    """As when a worker is killed while it connects: no reason to call its host a stranger."""
    refused: list[SecurityError] = []
    pipes = Pipes(refused.append)
    established(pipes, "stage1:0", 4).close()
    for number in (4, 5):
        late = Inspection(pipes, "stage1:0", "stage 1 at host-b")
        assert not late.received(joined([b"\xb8\x01\xb9\x01" + bytes([number])]))
        assert not late.received(bytes(MAX_HELD // 2))
        assert not late.received(bytes(MAX_HELD))
        assert not late.is_held
    assert not refused
    established(pipes, "stage1:0", 4)
    channel = requested(pipes, "stage1:0", 4)
    channel.received(struct.pack("<Q", 96))
    assert channel.is_held
    with pytest.raises(SecurityError, match="a pipe that it does not have"):
        requested(pipes, "stage1:0", 6)


@pytest.mark.parametrize(
    "data",
    [
        hello("inside"),
        joined([b"\xb8\x00\xb9\x01\xbd\x09stage1:0", rpc_format.BROCHURE]),
        joined([b"\xb8\x02\xb9\x01\x00"]),
        joined([b"\xb8\x00\xb9\x01\xbd\x08stage1:0", b"\xb9\x02\xbb\x01\xbd\x03shm\xbd\x01x"]),
        struct.pack("<Q", 2**40),
        HELLO + struct.pack("<Q", 2**30),
        HELLO + joined([b"\xb9\x03"]),
        HELLO + message(0x102, b"\1\x80\x04N.", lengths=(2**27 + 1,)),
        HELLO + joined([frames(message(0x102, bytes(8)))[0], bytes(5)]),
        HELLO + message(0x102, b"\1\x80\x04N.").replace(b"build_tensorlist", b"build_intlist__a"),
        HELLO + message(0x102, b"\1\x80\x04N.", lengths=(4,)).replace(b"cpu", b"gpu"),
    ],
)
def test_a_frame_has_its_announced_length(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_inspection, "free_memory", lambda: 2**27)
    inspection = Inspection(Pipes(print), "stage1:0", "stage 1 at host-b")
    with pytest.raises(SecurityError):
        inspection.received(data)


def test_a_message_larger_than_memory_is_refused_by_its_descriptor() -> None:
    head = frames(message(0x102, b""))[0].replace(
        b"\xb9\x02\x83" + bytes(8), b"\xb9\x02\x83" + struct.pack("<Q", MAX_PAYLOAD + 1)
    )
    with pytest.raises(SecurityError, match="larger than the memory that is left"):
        begun().received(joined([head]))


def test_tensors_that_were_announced_and_have_not_come_count_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each message would fit by itself."""
    lengths = Lengths()
    assert lengths.announce((2**26, 0, 2**20))
    assert lengths.size == 2**26 + 2**20
    assert (lengths.next(), lengths.size) == (2**26, 2**20)
    assert (lengths.next(), lengths.next(), lengths.size) == (2**20, None, 0)
    lengths.announce((2**26 + 1,))
    monkeypatch.setattr(rpc_inspection, "free_memory", lambda: 2**27)
    monkeypatch.setattr(rpc_inspection, "Lengths", lambda: lengths)
    large = frames(message(0x102, b"\1\x80\x04N.", lengths=(2**26 + 1,)))[0]
    with pytest.raises(SecurityError, match="larger than the memory that is left"):
        begun().received(joined([large]))


def in_pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    for begin, end in itertools.pairwise(places):
        yield data[begin:end]


@given(cuts=st.lists(st.integers(0, 2**20), max_size=30))
@settings(max_examples=50)
def test_inspection_does_not_depend_on_how_a_stream_is_cut(
    recorded: list[Conversation], cuts: list[int]
) -> None:
    main = recorded[0]
    inspection = Inspection(Pipes(print), "driver", "the driver")
    passed = b"".join(
        bytes(inspection.received(p)) for p in in_pieces(bytes(main.from_outside), cuts)
    )
    assert passed == main.passed


@given(
    changes=st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 2**20), max_size=5),
)
@examples(400, derandomize=False)
def test_a_mutated_message_never_passes_as_another(
    recorded: list[Conversation], changes: list[tuple[int, int]], cuts: list[int]
) -> None:
    data = bytearray(recorded[0].from_outside)
    for place, change in changes:
        data[place % len(data)] ^= change
    inspection = Inspection(Pipes(print), "driver", "the driver")
    passed = bytearray()
    try:
        for piece in in_pieces(bytes(data), cuts):
            passed += inspection.received(piece)
    except SecurityError:
        pass
    messages = frames(passed)[2:]
    assert len(messages) % 5 == 0  # a message passes as a whole
    for descriptor, kind, _, payload, tensors in zip(*[iter(messages)] * 5, strict=True):
        assert int.from_bytes(kind, "little") in rpc_format.REQUESTS
        assert len(payload) < len(data)
        assert descriptor.startswith(b"\xb9\x03")
        assert tensors.endswith(b"etR.")


def test_announced_tensors_are_limited() -> None:
    lengths = Lengths()
    assert lengths.announce((8,) * MAX_AHEAD + (0,))  # an empty one has no frame
    assert not lengths.announce((8,))
    assert lengths.next() == 8
    assert not lengths.announce((8,))
    assert lengths.next() == lengths.next() == 8
    assert lengths.announce((8,))
