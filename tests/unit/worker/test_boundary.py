"""The boundary between a stage's tape and the distributed graph; here both are plain autograd."""

from __future__ import annotations

import pickle
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcmp.pipelining import pytree
from rpcmp.rpc.memory_blocks import PeerMemory
from rpcmp.rpc.messages import StageOutputs
from rpcmp.rpc.shared_memory import OwnMemory, SharedTensor
from rpcmp.worker.boundary import LocalTape, connect, sum_gradients, tensors_of
from rpcmp.worker.copies import Copies
from tests.support.gradients import lists

CPU = Copies(torch.device("cpu"))


def token() -> Tensor:
    """Return a token, which makes an answer without differentiable tensors differentiable."""
    return torch.empty(0, requires_grad=True)


def run_stage(function: Callable[..., Any], received: Sequence[StageOutputs]) -> tuple[Tensor, ...]:
    """Run a whole stage; return its outputs as its readers get them."""
    tape = LocalTape(received, CPU)
    outputs = tape.leave(function(*tape.inputs))
    copies = [output.detach().clone() for output in outputs]
    constants = [
        copy for output, copy in zip(outputs, copies, strict=True) if not output.requires_grad
    ]
    return connect(
        lambda gradients: tape.backward(gradients)[0], copies, tensors_of(received), constants
    )


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shared(*tensors: Tensor) -> tuple[list[SharedTensor], StageOutputs]:
    """Return what the producer keeps, and what the reader gets, of tensors in shared memory."""
    own = OwnMemory()
    memory = PeerMemory(own.address.fd)
    placed = [own.place(tensor, requires_grad=tensor.requires_grad) for tensor in tensors]
    arrived = [pickle.loads(pickle.dumps(tensor.lend())) for tensor in placed]
    for tensor in arrived:
        tensor.attach(memory)
    return placed, StageOutputs(tuple(arrived), token()).opened()


# LocalTape: the part of the stage.


def test_gradients_of_inputs_in_shared_memory_go_there_and_torch_rpc_carries_the_token() -> None:
    x, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    placed, received = shared(x, torch.arange(2), unused)
    assert [len(tensor) for tensor in tensors_of([received])] == [0]
    other = torch.ones(2, requires_grad=True)
    tape = LocalTape([received, StageOutputs(other)], CPU)
    (value, index, _), same = tape.inputs
    tape.leave(value * index * same * 3)
    found, missing = tape.backward([torch.ones(2)])
    assert lists(found) == [None, [0, 3]]  # of the token, and of the other input
    assert missing == {}
    assert lists([placed[0].take_gradient(), placed[2].take_gradient()]) == [[0, 3], None]


def test_a_stage_computes_the_gradients_of_plain_autograd() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    received, gradient = random(4, 3).requires_grad_(), random(4, 2, seed=1)

    plain = torch.autograd.grad(module(received), [received, *module.parameters()], gradient)

    tape = LocalTape([StageOutputs(received)], CPU)
    tape.leave(module(*tape.inputs))
    found, missing = tape.backward([gradient])
    assert missing == {}
    grads = [parameter.grad for parameter in module.parameters()]
    for ours, theirs in zip([*found, *grads], plain, strict=True):
        assert ours is not None
        assert torch.equal(ours, theirs)
    assert received.grad is None


def test_a_backward_inside_of_the_forward_does_not_replace_the_stages_own() -> None:
    received = torch.ones(2, requires_grad=True)
    weight = nn.Parameter(torch.tensor([3.0]))
    tape = LocalTape([StageOutputs(received)], CPU)
    (received_in,) = tape.inputs
    (received_in * 5).pow(2).mean().backward()  # an auxiliary loss
    tape.leave(received_in * weight)
    found, missing = tape.backward([torch.ones(2)])
    assert lists(found) == [[3, 3]]
    assert missing == {}


def test_a_backward_inside_of_the_forward_gives_no_gradient_that_the_stage_has_not() -> None:
    weight = nn.Parameter(torch.tensor([3.0]))
    tape = LocalTape([StageOutputs(torch.ones(2, requires_grad=True))], CPU)
    (received_in,) = tape.inputs
    (received_in * 5).pow(2).mean().backward()
    tape.leave(received_in.detach() * weight)
    assert tape.backward([torch.ones(2)]) == ([None], {0: [0]})


def test_every_input_gets_its_gradients_in_order_and_its_token_none() -> None:
    x, y, z = (torch.ones(1, requires_grad=True) for _ in range(3))
    received = [
        StageOutputs((x, y)),
        StageOutputs(torch.ones(1)),
        StageOutputs(torch.ones(1), token()),
        StageOutputs(z),
    ]
    tape = LocalTape(received, CPU)
    (x_in, y_in), _, _, z_in = tape.inputs
    tape.leave(2 * x_in + 3 * y_in + 5 * z_in)
    found, missing = tape.backward([torch.ones(1)])
    assert lists(found) == [[2], [3], None, None, None, [5]]
    assert missing == {}


def test_inputs_that_no_gradient_reaches_get_none_and_are_reported_by_input() -> None:
    used, unused, other = (torch.ones(1, requires_grad=True) for _ in range(3))
    index = torch.ones(1, dtype=torch.int64)  # needs no gradient, so it is not reported
    idle = nn.Parameter(torch.ones(1))
    tape = LocalTape(
        [StageOutputs((used, index, unused)), StageOutputs(index, token()), StageOutputs(other)],
        CPU,
    )
    (used_in, _, unused_in), _, _ = tape.inputs
    tape.leave([used_in * 2, unused_in * idle])
    found, missing = tape.backward([torch.ones(1), None])
    assert idle.grad is None
    assert lists(found) == [[2], None, None, None, None, None]
    assert missing == {0: [2], 2: [0]}


def test_a_gradient_of_zeros_is_not_none() -> None:
    tape = LocalTape([StageOutputs(torch.ones(2, requires_grad=True))], CPU)
    tape.leave(tape.inputs[0] * 0)
    found, missing = tape.backward([torch.ones(2)])
    assert lists(found) == [[0, 0]]
    assert missing == {}


def test_a_round_without_gradients_reports_all_inputs() -> None:
    idle = nn.Parameter(torch.ones(1))
    received = torch.ones(1, requires_grad=True)
    tape = LocalTape([StageOutputs(received), StageOutputs(torch.ones(1))], CPU)
    tape.leave(tape.inputs[0] * idle)
    found, missing = tape.backward([None])
    assert (found, missing) == ([None, None], {0: [0]})
    assert idle.grad is None


def test_integers_and_plain_values_pass_and_get_no_gradient() -> None:
    index, value = torch.tensor([1]), torch.ones(3, requires_grad=True)
    tape = LocalTape([StageOutputs({"index": index, "scale": 2, "value": value})], CPU)
    (received,) = tape.inputs
    assert received["scale"] == 2
    outputs = tape.leave([received["value"][received["index"]], received["index"]])
    found, _ = tape.backward([torch.ones(1), None])
    assert lists(found) == [None, [0, 1, 0]]
    assert outputs == []  # the tape keeps no outputs


def test_inputs_are_not_copied() -> None:
    received, constant = torch.ones(2, requires_grad=True), torch.ones(2)
    tape = LocalTape([StageOutputs((received, constant))], CPU)
    ((received_in, constant_in),) = tape.inputs
    assert received_in.data_ptr() == received.data_ptr()
    assert constant_in.data_ptr() == constant.data_ptr()
    assert (received_in.requires_grad, constant_in.requires_grad) == (True, False)


@pytest.mark.parametrize("others", [0, 1, 2])
def test_the_first_layer_may_work_in_place(others: int) -> None:
    received = torch.tensor([-1.0, 2.0], requires_grad=True)
    more = [torch.ones(1, requires_grad=True) for _ in range(others)]
    tape = LocalTape([StageOutputs((received, *more))], CPU)
    tape.leave(torch.relu_(tape.inputs[0][0]))
    found, _ = tape.backward([torch.ones(2)])
    assert lists(found) == [[0, 1], *[None] * others]


def test_the_gradients_that_leave_a_stage_are_contiguous() -> None:
    received = random(2, 3).T.requires_grad_()
    tape = LocalTape([StageOutputs(received)], CPU)
    tape.leave(tape.inputs[0] * 2)
    ((grad,), _) = tape.backward([random(3, 2)])
    assert grad is not None
    assert grad.is_contiguous()


@pytest.mark.parametrize(
    "end", [lambda tape: tape.backward([torch.ones(2)]), LocalTape.free], ids=["backward", "abort"]
)
def test_nothing_of_a_micro_batch_stays_alive_after_its_backward(
    end: Callable[[LocalTape], Any],
) -> None:
    kept: list[weakref.ref[Any]] = []

    def save(tensor: Tensor) -> list[Tensor]:
        saved = _Saved([tensor])
        kept.append(weakref.ref(saved))
        return saved

    tape = LocalTape([StageOutputs(torch.ones(2, requires_grad=True), None)], CPU)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda saved: saved[0]):
        tape.leave(tape.inputs[0] * tape.inputs[0])
    assert all(saved() is not None for saved in kept)
    end(tape)
    assert len(kept) == 2
    assert all(saved() is None for saved in kept)
    assert tape.inputs == []


class _Saved(list[Tensor]):
    """A list of saved tensors that weak references may refer to."""


# Boundary: the node in the distributed graph.


def test_outputs_of_several_kinds_are_connected_in_order() -> None:
    def split(x: Tensor) -> dict[str, Any]:
        return {"half": (x / 2, x.argmax()), "mask": x > 0, "double": x * 2}

    received = torch.tensor([1.0, -3.0], requires_grad=True)
    outputs = run_stage(split, [StageOutputs(received)])
    assert [pytree.describe(output) for output in outputs] == [
        "float32[2]",
        "int64[]",
        "bool[2]",
        "float32[2]",
    ]
    assert [output.requires_grad for output in outputs] == [True, False, False, True]
    (outputs[0].sum() + 10 * outputs[3].sum()).backward()
    assert received.grad is not None
    assert received.grad.tolist() == [20.5, 20.5]


def test_an_unused_output_has_no_gradient_instead_of_zeros() -> None:
    seen: list[Sequence[Tensor | None]] = []

    def run_backward(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        seen.append(gradients)
        return [None]

    received = torch.ones(1, requires_grad=True)
    outputs = [torch.ones(1), torch.ones(1)]
    used, _ = connect(run_backward, outputs, [received])
    used.backward()
    ((gradient, nothing),) = seen
    assert gradient is not None
    assert gradient.tolist() == [1]
    assert nothing is None
    assert received.grad is None


def test_a_token_leads_to_a_stage_whose_answer_has_no_gradient() -> None:
    weight = nn.Parameter(torch.ones(1))
    seen: list[Sequence[Tensor | None]] = []

    def run_backward(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        seen.append(gradients)
        return []

    mask = torch.tensor([True])
    value, link = connect(run_backward, [mask, torch.empty(0)], [], constants=[mask])
    assert (value.requires_grad, link.requires_grad) == (False, True)
    (output,) = run_stage(lambda mask: mask * weight, [StageOutputs(value, link)])
    output.backward()
    assert weight.grad is not None
    assert lists(seen[0]) == [None, None]  # no gradient, but the stage's backward ran


def test_a_stage_is_connected_even_if_gradients_are_disabled() -> None:
    with torch.no_grad():  # RPC threads have their own mode
        (output,) = connect(lambda gradients: [], [torch.ones(1)], [])
    assert output.requires_grad


# The order of sums.


def test_gradients_are_summed_latest_reader_first() -> None:
    early, middle, late = torch.tensor(1e8), torch.tensor(-1e8), torch.tensor(1.0)
    assert sum_gradients([early, middle, late]) == (late + middle) + early
    assert sum_gradients([late, middle, early]) == 1
    assert sum_gradients([early, middle, late]) == 0


def test_plain_autograd_sums_in_the_same_order() -> None:
    value = torch.zeros(50, requires_grad=True)
    factors = [random(50, seed=seed) * 10**seed for seed in range(5)]
    torch.stack([value.clone() * factor for factor in factors]).sum().backward()
    summed = sum_gradients(factors)
    assert value.grad is not None
    assert summed is not None
    assert torch.equal(value.grad, summed)
    assert not torch.equal(value.grad, torch.stack(factors).sum(dim=0))  # the order matters


def test_none_gradients_are_not_summed() -> None:
    one = torch.ones(1)
    assert sum_gradients([None, None]) is None
    assert sum_gradients([]) is None
    assert sum_gradients([None, one, None]) is one
    assert sum_gradients([one, None, one]) == 2
    assert one == 1


def test_a_backward_equals_torchs_backward_without_importing_sympy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One output occurs twice, and the gradients differ by several orders of magnitude."""

    def leaves() -> list[Tensor]:
        return [torch.linspace(1, 2, 7, requires_grad=True) for _ in range(2)]

    def outputs(a: Tensor, b: Tensor) -> list[Tensor]:
        c = a * b
        return [c, c.exp(), c, a.sin()]

    gradients = [torch.linspace(0.1, 0.3, 7) * 10**n for n in (0, 3, -3, 1)]
    ours, theirs = leaves(), leaves()
    torch.autograd.backward(outputs(*theirs), gradients)
    with monkeypatch.context() as patch:
        for name in ("sympy", "torch.fx.experimental.symbolic_shapes"):
            patch.setitem(sys.modules, name, None)  # importing it fails
        with pytest.raises(ImportError):
            torch.autograd.backward(outputs(*leaves()), gradients)
        tape = LocalTape([StageOutputs(0)], Copies(torch.device("cpu")))
        tape.leave(outputs(*ours))
        tape.backward(gradients)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)
