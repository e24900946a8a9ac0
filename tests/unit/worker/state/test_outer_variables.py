"""What a forward keeps outside of its module is found, put back, and goes on in another process."""

from __future__ import annotations

import json
import sys
import textwrap
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcmp.rpc.tensors import decode_tree, encode_tree
from rpcmp.worker.state import outer_variables
from rpcmp.worker.state.forward_state import ChangedAttributes, ForwardState
from rpcmp.worker.state.outer_variables import variables_of
from rpcmp.worker.state.variables_watch import VariablesWatch

CPU = torch.device("cpu")

FILE = """
import functools, random
import torch
from torch import nn

{above}

class Counting(nn.Module):
    {field} = {value}

    def forward(self, x):
        {forward}
        return x * n

    @property
    def again(self):
        {again}
"""

KINDS = {
    "number": ("calls = 0", "global calls; calls += 1; n = calls"),
    "text": ("text = ''", "global text; text += 'a'; n = len(text)"),
    "none": ("last = None", "global last; n = 1 if last is None else last; last = 2 * n"),
    "dict": ("KEPT = {'n': [0]}", "KEPT['n'][0] += 1; n = KEPT['n'][0]"),
    "list": ("LOG = []", "LOG.append(1); n = len(LOG)"),
    "tensor": ("TOTAL = torch.zeros(1)", "TOTAL.add_(1); n = TOTAL.clone()"),
    "generator": ("DRAW = random.Random(1)", "n = DRAW.random()"),
    "count": ("import itertools\nCALLS = itertools.count(1)", "n = next(CALLS)"),
    "callable": (
        "class Calls:\n    def __init__(self): self.n = 0\n"
        "    def __call__(self):\n        self.n += 1\n        return self.n\ncount = Calls()",
        "n = count()",
    ),
    "object": (
        "class State:\n    def __init__(self): self.n = 0\nSTATE = State()",
        "STATE.n += 1; n = STATE.n",
    ),
    "class": ("class Counts:\n    n = 0", "Counts.n += 1; n = Counts.n"),
    "own class": ("", "type(self).field += 1; n = type(self).field"),
    "property": ("calls = 0", "n = self.again"),
    "function": (
        "calls = 0\ndef count():\n    global calls\n    calls += 1\n    return calls",
        "n = count()",
    ),
    "lambda": ("LOG = []", "n = (lambda: LOG.append(1) or len(LOG))()"),
    "partial": (
        "LOG = []\ndef add(x):\n    LOG.append(x)\n    return len(LOG)\n"
        "count = functools.partial(add, 1)",
        "n = count()",
    ),
    "closure": (
        "def counter():\n    n = 0\n    def count():\n        nonlocal n\n        n += 1\n"
        "        return n\n    return count\ncount = counter()",
        "n = count()",
    ),
    "decorator": (
        "def counted(function):\n    n = 0\n    @functools.wraps(function)\n"
        "    def call():\n        nonlocal n\n        n += 1\n        return n * function()\n"
        "    return call\n@torch.no_grad()\n@counted\ndef count():\n    return 2",
        "n = count()",
    ),
    "function's attribute": (
        "def count():\n    count.calls += 1\n    return count.calls\ncount.calls = 0",
        "n = count()",
    ),
    "default": (
        "def count(store=[]):\n    store.append(1)\n    return len(store)",
        "n = count()",
    ),
    "namespace": ("import types\nSTATE = types.SimpleNamespace(n=0)", "STATE.n += 1; n = STATE.n"),
    "slots": (
        "class State:\n    __slots__ = ('n',)\n    def __init__(self): self.n = 0\nSTATE = State()",
        "STATE.n += 1; n = STATE.n",
    ),
    "method": (
        "class Meter:\n    total = 0\n    def bump(self):\n        Meter.total += 1\n"
        "        return Meter.total\nMETER = Meter()",
        "n = METER.bump()",
    ),
    "table": (
        "calls = 0\ndef count():\n    global calls\n    calls += 1\n    return calls\n"
        "TABLE = {'f': count}",
        "n = TABLE['f']()",
    ),
    "inherited": (
        "class Base:\n    seen = []\nclass Child(Base): pass",
        "Child.seen.append(1); n = len(Child.seen)",
    ),
    "module": ("import tests_of_counts", "tests_of_counts.calls += 1; n = tests_of_counts.calls"),
}


def process(kind: str) -> type[nn.Module]:
    """Return the class of a file that was imported anew, as by another process."""
    above, forward = KINDS[kind]
    again = "global calls\ncalls += 1\nreturn calls" if kind == "property" else "return 0"
    file = ModuleType("tests_of_counting")
    text = FILE.format(
        above=above,
        field="field",
        value="0",
        forward=forward,
        again=textwrap.indent(again, " " * 8).strip(),
    )
    exec(text, vars(file))
    found: type[nn.Module] = file.Counting
    return found


@pytest.fixture(autouse=True)
def other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be another file with a counter."""
    for name in ("tests_of_counting", "tests_of_counts"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules[name], "__file__", __file__, raising=False)
    monkeypatch.setattr(sys.modules["tests_of_counts"], "calls", 0, raising=False)


def called(module: nn.Module, times: int) -> list[Tensor]:
    return [module(torch.ones(2)) for _ in range(times)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_put_back_goes_on_as_if_nothing_had_been_between(kind: str) -> None:
    module = process(kind)()
    state = ForwardState([("layer.", module)])
    before = state.copy()
    first = called(module, 2)
    assert not torch.equal(*first)
    state.put_back(before)
    again = called(module, 2)
    assert all(map(torch.equal, first, again))
    state.learn(before)
    assert len(state.copy()) == 1
    known = state.copy()
    after = called(module, 2)
    state.put_back(known)
    assert all(map(torch.equal, called(module, 2), after))


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_goes_on_from_a_snapshot(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = process(kind)()
    attributes = ChangedAttributes([("layer.", module)], CPU)
    assert attributes.read() == {}
    called(module, 2)
    tensors: dict[str, Tensor] = {}
    tree = json.loads(json.dumps(encode_tree(attributes.read(), tensors)))
    kept = {name: value.clone() for name, value in tensors.items()}
    expected = called(module, 2)
    monkeypatch.setattr(sys.modules["tests_of_counts"], "calls", 0)
    new = process(kind)()
    ChangedAttributes([("layer.", new)], CPU).restore(decode_tree(tree, kept))
    assert all(map(torch.equal, called(new, 2), expected))


def test_a_hook_that_counts_is_followed() -> None:
    counts = [0]

    def count(*_: Any) -> None:
        counts[0] += 1

    module = nn.Linear(2, 2)
    module.register_forward_hook(count)
    state = ForwardState([("", module)])
    before = state.copy()
    called(module, 1)
    assert counts == [1]
    state.put_back(before)
    assert counts == [0]


def counting_calls() -> nn.Module:
    """Return a layer with a counter of its own, in a closure."""
    calls = 0
    module = nn.Identity()

    def forward(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x / calls

    module.forward = forward  # type: ignore[assignment,method-assign]
    return module


def test_a_closure_of_each_layer_is_the_layers_own() -> None:
    """Two of them are two counters, in one process as in several."""
    layers = [("first.", counting_calls()), ("second.", counting_calls())]
    state = ForwardState(layers)
    before = state.copy()
    for _, layer in layers:
        called(layer, 2)
    names = [each.place.name for each in before if each.has_changed]
    assert names == ["first.forward.calls", "second.forward.calls"]
    state.put_back(before)
    assert [called(layer, 2)[1][0].item() for _, layer in layers] == [0.5, 0.5]
    watch = VariablesWatch(layers)
    assert watch.after_step() == {}


def test_two_files_that_import_each_other_are_followed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = sys.modules["tests_of_counting"], sys.modules["tests_of_counts"]
    text = (
        "def forward(x):\n    tests_of_counts.tests_of_counting.tests_of_counts.calls += 1\n"
        "    return x * tests_of_counts.calls"
    )
    vars(one).update(tests_of_counts=two)
    vars(two).update(tests_of_counting=one)
    exec(text, vars(one))
    module = nn.Identity()
    module.forward = vars(one)["forward"]  # type: ignore[method-assign]
    state = ForwardState([("", module)])
    before = state.copy()
    called(module, 1)
    assert [each.place.name for each in before if each.has_changed] == ["tests_of_counts:calls"]


def test_packages_of_others_are_not_followed() -> None:
    own = [("linear.", nn.Linear(2, 2)), ("lstm.", nn.LSTM(2, 2)), ("relu", torch.relu)]
    assert variables_of(own) == []


def test_what_is_too_much_to_be_followed_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outer_variables, "MOST", 0)
    outer_variables._tell_rest.cache_clear()
    variables_of([("layer.", process("number")())])
    assert "code that layer. calls has more than 0 functions" in caplog.text


class Shy:
    """Cannot be looked at."""

    def __getattr__(self, name: str) -> Any:
        raise TypeError(name)

    def __call__(self) -> int:
        return 1


class Ashamed(Shy):
    __dict__ = property(lambda self: 1 / 0)
    __class__ = property(lambda self: 1 / 0)


LARGE = {n: (n, 2 * n) for n in range(20_000)}


def test_what_cannot_be_looked_at_and_large_tables_are_constants() -> None:
    shy, ashamed = Shy(), Ashamed()

    def forward(x: Tensor) -> Tensor:
        return x * shy() * len([ashamed]) * len(LARGE)

    module = nn.Identity()
    vars(module).update(forward=forward, shy=shy, ashamed=ashamed)
    copies = ForwardState([("", module)]).copy()
    assert not any("LARGE" in each.place.name for each in copies)
    assert not any(each.has_changed for each in copies)
