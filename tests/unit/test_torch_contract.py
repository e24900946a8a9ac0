"""What rpcmp relies on in torch and torch does not promise; one test for each point.

When a new torch fails one of these, rpcmp/rpc/transport.py or rpcmp/worker/weight_grad.py has to
change. A process joins one group at most, so a child process joins a group whose other members are
names and addresses only, calls itself, and prints what it found.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import threading
from typing import Any

import psutil
import pytest
import torch
from torch._C._distributed_rpc import TensorPipeAgent, _is_current_rpc_agent_set
from torch.distributed import rpc
from torch.futures import Future
from torch.utils.checkpoint import checkpoint

from rpcmp.process.channel import Message
from rpcmp.rpc import transport, unpickler
from rpcmp.rpc.channel_store import ChannelStore
from tests.support.places import ROOT

TEXT = "Zürich →"
ALONE = "alone"
MEMBERS = [ALONE, "second", "third"]

Findings = dict[str, Any]


# In the child: what it finds.


class Supervisor:
    """Answers a store in which the other members are, and records each question and its keys."""

    def __init__(self) -> None:
        self.store = ChannelStore(self._answer)
        self.asked: list[tuple[str, list[str]]] = []
        self._values = {"left": b"2"}
        for rank, name in enumerate(MEMBERS[1:], start=1):
            self._values |= {f"names/{rank}": name.encode(), f"addrs/{name}": b"uv://127.0.0.1:1"}

    def _answer(self, asked: Message) -> None:
        call, keys = asked["call"], asked["keys"]
        self.asked.append((call, keys))
        held, value = self._values.get(keys[0], b""), base64.b64decode(asked.get("value", ""))
        if call == "add":
            self._values[keys[0]] = str(int(held) + asked["amount"]).encode()
        elif call == "set" or (call == "compare_set" and _text(held) == asked["expected"]):
            self._values[keys[0]] = value
        values = [_text(self._values[key]) for key in keys]
        self.store.set_answer({"id": asked["id"], "values": values})


class TwoOutputs(torch.autograd.Function):
    """Two outputs, one of which the caller uses; records the arriving gradients."""

    seen: list[Any] = []  # noqa: RUF012
    fails = False

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return torch.ones(2), torch.ones(3)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> None:
        if TwoOutputs.fails:
            raise ValueError(TEXT)
        TwoOutputs.seen = [None if grad is None else grad.tolist() for grad in gradients]


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def answer_later() -> Future[Any]:
    """Return the outputs from a thread without an autograd context."""
    future: Future[Any] = Future()

    def fulfil() -> None:
        with torch.enable_grad():
            anchor = torch.empty(0, requires_grad=True)
            future.set_result(TwoOutputs.apply(anchor))

    threading.Thread(target=fulfil).start()
    return future


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def answer_with_exception() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(ValueError(TEXT))
    return future


def raise_in_handler() -> None:
    raise ValueError(TEXT)


def find() -> Findings:
    """Return all findings of a group of one."""
    supervisor = Supervisor()
    transport.reserve_threads(in_flight=3)
    found: Findings = {"unknown_transport": _error(lambda: _agent_with_transport("nonsense"))}
    transport.join(MEMBERS, 0, supervisor.store, {"served": True})
    found["joining"] = supervisor.asked.copy()
    found["listening"] = [
        (connection.laddr.ip, connection.status)
        for connection in psutil.Process().net_connections(kind="inet")
    ]
    found["evil"] = _error(lambda: rpc.rpc_async(ALONE, os.getpid).wait())
    unpickler._PLAIN[__name__] = set(globals())  # from here on, functions of this file
    found["interop_threads"] = torch.get_num_interop_threads()
    found["debug_info"] = sorted(rpc._get_debug_info())
    found["agent_is_current"] = _is_current_rpc_agent_set()
    found["set_exception"] = repr(rpc.rpc_async(ALONE, answer_with_exception).wait())
    found["raised"] = _error(lambda: rpc.rpc_async(ALONE, raise_in_handler).wait())
    _differentiate()
    found["gradients"] = TwoOutputs.seen
    TwoOutputs.fails = True
    found["raised_in_backward"] = _error(_differentiate)
    found["left_behind"] = transport.Transport().live_state()
    service_rref = transport.Transport().remote_service(ALONE)
    found["reference"] = [service_rref.owner().name, service_rref.local_value()]
    del service_rref
    supervisor.asked.clear()
    transport.leave(timeout=10.0)
    found["leaving"] = supervisor.asked
    return found


def _agent_with_transport(name: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(_transports=[name], _channels=["basic"])
    TensorPipeAgent(Supervisor().store, ALONE, 0, 1, options, {}, [])


def _differentiate() -> None:
    with transport.Transport().autograd_context() as context_id:
        used, _ = rpc.rpc_async(ALONE, answer_later).wait()
        transport.Transport().backward(context_id, [used.sum()])


def _error(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


# In the test process: what is expected.


@pytest.fixture(scope="module")
def found() -> Findings:
    """What the child has found."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_torch_contract"],
        cwd=ROOT,
        env={**os.environ, "TP_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    findings: Findings = json.loads(child.stdout.splitlines()[-1])
    return findings


def test_the_agent_is_built_from_these_arguments() -> None:
    signature = (TensorPipeAgent.__init__.__doc__ or "").partition(") ->")[0]
    assert re.findall(r"(\w+): ", signature) == [
        "self",
        "store",
        "name",
        "rank",
        "world_size",
        "rpc_backend_options",
        "reverse_device_maps",
        "devices",
    ]


def test_an_agent_asks_a_store_in_python_five_questions_however_large_its_group(
    found: Findings,
) -> None:
    """It gets names and addresses one by one; if it gets others, the group asks members^2 times."""
    own, *of_the_agent = found["joining"]
    assert own == ["set", [f"memory of {ALONE}"]]
    assert of_the_agent == [
        ["compare_set", ["rpcIsStaticGroup"]],
        ["set", ["names/0"]],
        ["get", ["names/0", "names/1", "names/2"]],
        ["set", [f"addrs/{ALONE}"]],
        ["get", [f"addrs/{name}" for name in MEMBERS]],
    ]


def test_a_group_ends_without_torch(found: Findings) -> None:
    """Its members meet at the store, and end by `os._exit`."""
    last = "all have left"
    assert found["leaving"] == [["add", ["left"]], ["set", [last]], ["get", [last]]]


def test_an_agent_has_one_socket_and_it_listens_on_loopback(found: Findings) -> None:
    assert found["listening"] == [["127.0.0.1", "LISTEN"]]


def test_messages_name_only_what_is_allowed(found: Findings) -> None:
    """They are unpickled by what stands in torch's `internal._unpickler` when they arrive."""
    assert "a message names posix.getpid, which nobody may send" in found["evil"]


def test_the_transport_can_be_chosen(found: Findings) -> None:
    assert found["unknown_transport"] == "RuntimeError: Unknown transport: nonsense"


def test_torch_accepts_an_rpc_timeout_of_zero() -> None:
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=0, _transports=["uv"])
    assert options.rpc_timeout == 0


def test_the_inter_op_pool_has_the_size_that_was_asked_for(found: Findings) -> None:
    assert found["interop_threads"] == 3 + 2


def test_an_agent_that_was_built_directly_becomes_current(found: Findings) -> None:
    assert found["agent_is_current"]


def test_the_counts_of_the_agent_that_rpcmp_reads_exist(found: Findings) -> None:
    assert set(found["left_behind"]) <= set(found["debug_info"])


def test_contexts_and_references_are_gone_after_a_step(found: Findings) -> None:
    assert set(found["left_behind"].values()) == {0}


def test_an_exception_in_a_future_reaches_the_caller_as_a_value(found: Findings) -> None:
    assert found["set_exception"] == f"ValueError('{TEXT}')"


def test_an_exception_in_a_handler_reaches_the_caller_garbled(found: Findings) -> None:
    assert found["raised"].startswith("ValueError: ")
    assert TEXT not in found["raised"].partition("Traceback")[0]


def test_an_exception_in_a_backward_loses_its_type(found: Findings) -> None:
    assert found["raised_in_backward"] == f"RuntimeError: Error on Node 0: {TEXT}"


def test_a_response_belongs_to_its_requests_context_whichever_thread_gives_it(
    found: Findings,
) -> None:
    assert found["gradients"][0] == [1, 1]


def test_a_missing_gradient_arrives_as_zeros(found: Findings) -> None:
    assert found["gradients"][1] == [0, 0, 0]  # hence `Stage.mark_none_gradients`


def test_a_reference_names_its_owner_and_gives_its_object_there(found: Findings) -> None:
    assert found["reference"] == [ALONE, {"served": True}]


def test_an_error_in_a_callback_stays_in_its_unawaited_future() -> None:
    future = Future[int]()
    after = future.then(lambda done: 1 // done.value())
    future.set_result(0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        after.wait()


# What rpcmp/worker/weight_grad.py relies on.


class Untold(torch.autograd.Function):
    """Uses a parameter without reporting its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return value * parameter

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def use(parameter: torch.Tensor) -> torch.Tensor:
    """Return a loss in which `parameter` gets a gradient of None."""
    output: torch.Tensor = Untold.apply(torch.ones(2, requires_grad=True), parameter)
    return output.sum()


def test_only_the_nodes_that_add_to_a_gradient_have_a_variable() -> None:
    layer = torch.nn.Linear(2, 2)
    node = layer(torch.ones(1, 2)).grad_fn
    (bias, _), (value, _), (transposed, _) = node.next_functions
    ((weight, _),) = transposed.next_functions
    assert value is None
    assert (bias.variable is layer.bias, weight.variable is layer.weight) == (True, True)
    assert not hasattr(node, "variable")
    assert not hasattr(transposed, "variable")


@pytest.mark.parametrize("before", [None, torch.ones(2)])
def test_a_gradient_of_none_leaves_a_parameter_as_it_was(before: torch.Tensor | None) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = before
    use(parameter).backward()
    assert parameter.grad is before
    assert before is None or before.tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_shows_its_hooks_and_they_are_called_for_none_as_well(kind: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not parameter._backward_hooks
    assert not parameter._post_accumulate_grad_hooks
    called: list[Any] = []
    handle = getattr(parameter, kind)(called.append)
    assert parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    use(parameter).backward()
    assert len(called) == 1
    handle.remove()
    assert not parameter._backward_hooks
    assert not parameter._post_accumulate_grad_hooks


def test_a_module_shows_its_hooks_and_its_buffers_and_a_tensor_its_version() -> None:
    """rpcmp.splitting.side_effects and rpcmp.worker.state.forward_state look at them."""
    module = torch.nn.BatchNorm1d(2)
    assert not module._backward_hooks
    assert not module._backward_pre_hooks
    assert {*module._buffers} == {"running_mean", "running_var", "num_batches_tracked"}
    assert module._parameters["weight"] is module.weight
    module.register_full_backward_hook(lambda *args: None)
    module.register_full_backward_pre_hook(lambda *args: None)
    assert len(module._backward_hooks) == len(module._backward_pre_hooks) == 1
    before = module.weight._version
    with torch.no_grad():
        module.weight.mul_(2)
    assert module.weight._version > before


def test_the_graph_has_a_function_by_its_name_however_it_was_called() -> None:
    """rpcmp.splitting.side_effects looks for those of the user's."""

    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    apply = Doubling.apply
    node = apply(torch.ones(1, requires_grad=True)).grad_fn
    assert isinstance(node, torch.autograd.function.BackwardCFunction)
    assert type(node).__name__ == "DoublingBackward"
    assert Doubling in torch.autograd.Function.__subclasses__()


def test_hooks_on_saved_tensors_can_be_seen() -> None:
    top = torch._C._autograd._top_saved_tensors_default_hooks
    assert top(False) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert top(False) is not None
    assert top(False) is None
    seen: list[Any] = []

    def layer(value: torch.Tensor) -> torch.Tensor:
        seen.append(top(False))
        return value * 2

    checkpoint(layer, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert seen[0] is not None


if __name__ == "__main__":
    print(json.dumps(find()), flush=True)
    os._exit(0)  # no destructors: RPC threads may still be about
