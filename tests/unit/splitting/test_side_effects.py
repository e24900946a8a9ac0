"""What a forward changes besides tensors is seen wherever it lies."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from rpcmp.splitting.side_effects import is_users, observed


class Schedule:
    """Something that can be called and counts."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self) -> None:
        self.step += 1


class Slotted:
    __slots__ = ("step",)


class Holder:
    total = 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.schedule, self.array, self.queue = Schedule(), numpy.zeros(2), deque([1], maxlen=2)
        self.slotted = Slotted()
        self.number, self.generator = float("nan"), random.SystemRandom()

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "helper_of_a_net.py").write_text(
        "import random\nstep = 0\nrng = random.Random(1)\n"
        "def count(store=[]):\n    store.append(1)\n    count.calls = len(store)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    __import__("helper_of_a_net")
    return sys.modules["helper_of_a_net"]


def put(holder: Any, name: str, value: Any) -> None:
    setattr(holder, name, value)


@pytest.mark.parametrize(
    ("change", "name", "kind"),
    [
        (lambda net, helper: net.schedule(), "schedule", "number"),
        (lambda net, helper: net.array.__iadd__(1), "array", "number"),
        (lambda net, helper: net.queue.append(2), "queue", "number"),
        (lambda net, helper: put(Holder, "total", 1), f"{__name__}.Holder", None),
        (lambda net, helper: put(helper, "step", 1), "helper_of_a_net.step", "number"),
        (lambda net, helper: helper.count(), "helper_of_a_net.count", "number"),
        (lambda net, helper: put(net.slotted, "step", 1), "slotted", "number"),
        (lambda net, helper: helper.rng.random(), "helper_of_a_net.rng", "generator"),
        (
            lambda net, helper: net.layer.weight.requires_grad_(False),
            "layer.weight.requires_grad",
            "flag",
        ),
    ],
)
def test_a_change_is_named(
    helper: ModuleType, change: Callable[[Any, Any], Any], name: str, kind: str | None
) -> None:
    net = Net()
    with observed(net) as seen:
        net(torch.ones(1, 2))
    assert seen.changed == {}  # a number that is NaN is the same
    with observed(net) as seen:
        change(net, helper)
    Holder.total = 0
    assert seen.changed == ({"Holder.total": "number"} if kind is None else {name: kind})


def test_only_files_of_no_package_are_the_users() -> None:
    assert is_users(__file__)
    assert not any(map(is_users, [None, random.__file__, torch.__file__, "_classes.py"]))
