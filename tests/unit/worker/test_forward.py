"""The forwards of a stage: the answers to its readers, and the activations that it keeps."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from rpcmp.config.topology import DRIVER, Port
from rpcmp.pipelining.assignment import assign
from rpcmp.pipelining.devices import CPU
from rpcmp.pipelining.schedule import Action
from rpcmp.rpc.messages import Bundle, StageOutputs
from rpcmp.worker.backward import Backwards, Failures
from rpcmp.worker.copies import Copies
from rpcmp.worker.executor import Task
from rpcmp.worker.forward import Execution
from rpcmp.worker.model import StageModel
from tests.support import splitlayers
from tests.support.graphs import chain_of
from tests.support.rounds import compute_thread, header

FEATURES = 4
SECONDS = 30.0  # a test that hangs fails after this time


class Ordered(nn.Module):
    """A layer that also returns an integer tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": self.linear(x), "order": torch.arange(len(x))}


class Square(nn.Module):
    """A layer whose output a following linear layer keeps for its weight gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1)

    def forward(self, value: dict[str, Tensor]) -> Tensor:
        return self.linear(value["x"])  # type: ignore[no-any-return]


def chain() -> list[tuple[str, Callable[[], nn.Module]]]:
    """Return the layers of the config below, one per stage."""
    return [
        ("first", lambda: nn.Sequential(Square(), nn.Linear(FEATURES, FEATURES))),
        ("middle", lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), Square(), Ordered())),
        ("last", Last),
    ]


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install layers that split for one test."""
    splitlayers.install(monkeypatch)


class Stage:
    """A stage of `chain` in one round, without other processes."""

    def __init__(self, index: int, num_microbatches: int = 1, **keys: Any) -> None:
        model = {"layers": f"{__name__}:chain", "balance": [1, 1, 1]}
        keys |= {"loss": "torch.nn:MSELoss", "num_microbatches": num_microbatches}
        config = chain_of(3, model=model, **keys)
        assignment = assign(config)[index]
        name, graph, limits = assignment.stage_name, config.graph(), assignment.limits
        self.failures = Failures()
        self.ended = threading.Event()
        self.model = StageModel(assignment)
        self._compute = compute_thread(config.options.schedule, limits, lambda _: self.ended.set())
        self._pool = ThreadPoolExecutor(num_microbatches)
        self._execution = Execution(
            *(name, self.model, graph.inputs[name]),
            graph.ports(name) or (Port(DRIVER, 0, ()),),
            Backwards(name, self._compute, cast(Any, None), self.failures, Copies(CPU)),
            recompute=assignment.stage.recompute,
            wire_dtype={None: None, "bfloat16": torch.bfloat16}[config.wire_dtype],
        )
        self._header = header(1, num_microbatches)
        self._compute.start_round(self._header)

    def forward(self, microbatch: int, *received: Any) -> Future[list[StageOutputs]]:
        """Return the answer to the only reader."""
        bundle = Bundle(self._header, microbatch)
        (meta,) = bundle.microbatches
        answer: Future[list[StageOutputs]] = Future()

        def run(received: list[Any]) -> None:
            computed = self._execution.forward(meta, self._execution.receive(received))
            self._execution.answer(
                bundle, [computed], lambda ports: answer.set_result(*ports), answer.set_exception
            )

        task = Task([functools.partial(run, list(received))], microbatch)
        self._compute.submit(1, Action.FORWARD, microbatch, task)
        return answer

    def differentiate(self, answer: Future[list[StageOutputs]]) -> Future[None]:
        """Send back the gradient of the answer's "x", on a thread as the autograd engine does."""

        def run() -> None:
            (outputs,) = answer.result(SECONDS)
            x = outputs.value if isinstance(outputs.value, Tensor) else outputs.value["x"]
            x.backward(torch.ones_like(x))

        return self._pool.submit(run)


def test_float32_is_bfloat16_on_the_wire_and_nowhere_else() -> None:
    stage = Stage(1, wire_dtype="bfloat16")
    received = torch.randn(2, FEATURES).bfloat16().requires_grad_()
    answer = stage.forward(0, StageOutputs(received, narrowed=(0,)))
    stage.differentiate(answer).result(SECONDS)
    (outputs,) = answer.result(SECONDS)
    assert {name: value.dtype for name, value in outputs.value.items()} == {
        "x": torch.bfloat16,
        "order": torch.int64,
    }
    assert outputs.narrowed == (0,)
    assert received.grad is not None
    assert received.grad.dtype is torch.bfloat16
    parameters = [parameter for _, parameter in stage.model.named_parameters()]
    assert {p.grad.dtype for p in parameters if p.grad is not None} == {torch.float32}
    assert all(parameter.grad is not None for parameter in parameters)


def test_the_driver_gets_the_loss_in_full() -> None:
    stage = Stage(2, wire_dtype="bfloat16")
    value = {"x": torch.randn(2, FEATURES).bfloat16().requires_grad_(), "order": torch.arange(2)}
    answer = stage.forward(0, StageOutputs(value, narrowed=(0,)), StageOutputs(torch.zeros(2, 1)))
    (outputs,) = answer.result(SECONDS)
    assert (outputs.value.dtype, outputs.narrowed) == (torch.float32, ())


class Activations:
    """A record of the outputs of all Square layers, and of the largest number alive at once."""

    def __init__(self) -> None:
        self.most = 0
        self._seen: list[weakref.ref[Tensor]] = []

    def see(self, module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(module, Square):
            self._seen.append(weakref.ref(output))
            self.most = max(self.most, self.count())

    def count(self) -> int:
        return sum(ref() is not None for ref in self._seen)


@pytest.fixture
def activations() -> Iterator[Activations]:
    found = Activations()
    handle = register_module_forward_hook(found.see)
    yield found
    handle.remove()


@pytest.mark.parametrize(
    ("index", "keys", "most"),
    [
        (0, {"schedule": "1f1b"}, 3),
        (1, {"schedule": "1f1b"}, 2),
        (1, {"schedule": "1f1b", "max_in_flight": 5}, 4),
        (1, {"schedule": "zero-bubble"}, 4),
        (1, {"schedule": "zero-bubble", "max_in_flight": 2}, 2),
        (1, {"schedule": "gpipe"}, None),
        (1, {"schedule": "gpipe", "stages": [{"recompute": True}] * 3}, 1),
    ],
)
@pytest.mark.parametrize("num_microbatches", [8, 24])
def test_activations_do_not_grow_with_the_number_of_micro_batches(
    index: int,
    keys: dict[str, Any],
    most: int | None,
    num_microbatches: int,
    activations: Activations,
) -> None:
    stage = Stage(index, num_microbatches, **keys)
    answers = [
        stage.forward(number, StageOutputs(torch.randn(2, FEATURES).requires_grad_()))
        for number in range(num_microbatches)
    ]
    wait([stage.differentiate(answer) for answer in answers], SECONDS)
    assert stage.ended.wait(SECONDS)
    assert stage.failures.take(1, 1) == []
    if most is None:
        assert activations.most == num_microbatches
    else:
        assert 0 < activations.most <= most
    assert activations.count() == 0
