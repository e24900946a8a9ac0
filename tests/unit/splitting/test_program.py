"""Programs as plain data, which name operations of torch and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from rpcmp.config import importing
from rpcmp.errors import ConfigError
from rpcmp.splitting.program import Node, Program, compiled, encode, require_bounded

CPU = torch.device("cpu")


def run(nodes: list[Node], *values: Any, owner: nn.Module | None = None) -> Any:
    inputs = [f"x{index}" for index in range(len(values))]
    tensors = {"w": "inner.weight"} if owner is not None else {}
    program = Program(inputs=inputs, nodes=nodes, outputs=[{"of": nodes[-1].name}], tensors=tensors)
    again = Program.model_validate_json(program.model_dump_json())
    return compiled(again, CPU, owner or nn.Module())(*values)[0]


def test_operations_read_values_tensors_and_numbers() -> None:
    owner = nn.Sequential()
    owner.add_module("inner", nn.Linear(2, 3, bias=False))
    x = torch.ones(4, 2)
    nodes = [
        Node(name="a", calls="aten.linear.default", args=[{"of": "x0"}, {"of": "w"}]),
        Node(name="n", calls="aten.sym_size.int", args=[{"of": "a"}, 0]),
        Node(name="m", calls="operator.mul", args=[{"of": "n"}, 2]),
        Node(name="b", calls="aten.add.Tensor", args=[{"of": "a"}, {"of": "m"}]),
    ]
    assert torch.equal(run(nodes, x, owner=owner), owner(x) + 8)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 2.5, -math.inf, "mean", torch.int64, torch.strided),
        *(torch.channels_last, torch.device("cpu"), slice(1, None, 2), [1, [2.0, None]]),
    ],
)
def test_every_kind_of_argument_survives_json(value: Any) -> None:
    node = Node(name="a", calls="operator.getitem", args=[{"of": "x0"}, 0])
    assert run([node], [value]) == value
    passed: list[Any] = []

    class Reader:
        def __getitem__(self, key: Any) -> None:
            passed.append(key)

    run([node.model_copy(update={"args": [{"of": "x0"}, encode(value)]})], Reader())
    assert passed == [value]


def test_regions_hold_for_what_lies_in_them() -> None:
    body = Program(
        inputs=["y"],
        nodes=[Node(name="z", calls="aten.mul.Tensor", args=[{"of": "y"}, 2.0])],
        outputs=[{"of": "z"}],
    )
    x = torch.ones(2, requires_grad=True)
    nodes = [
        Node(name="r", calls="no_grad", args=[{"of": "x0"}], body=body),
        Node(name="o", calls="operator.getitem", args=[{"of": "r"}, 0]),
    ]
    assert not run(nodes, x).requires_grad
    nodes[0] = nodes[0].model_copy(update={"calls": "enable_grad"})
    with torch.no_grad():
        assert run(nodes, x).requires_grad


@pytest.mark.parametrize(
    "calls",
    [
        *("os.system", "load_library", "aten.linear", "aten.nothing.default", "operator.call"),
        *("aten.from_file.default", "profiler._record_function_enter_new.default", "__class__"),
        *("aten.from_file.out", "aten.save.default", "aten.set_grad_enabled.default"),
        *("aten._reshape_alias.default", "aten._unsafe_view.default", "aten.set_.source_Tensor"),
        *("aten.add.Tensor._overloadpacket.Tensor", "aten.add.__class__", "no_grad"),
    ],
)
def test_nothing_but_torchs_operations_can_be_called(calls: str) -> None:
    with pytest.raises(ConfigError, match=f"no program may call '{calls}'"):
        run([Node(name="a", calls=calls, args=[])])


@pytest.mark.parametrize(
    "value", [{"dtype": "load"}, {"format": "nn"}, {"code": "1"}, {"dtype": "nothing"}]
)
def test_nothing_but_values_can_be_named(value: Any) -> None:
    with pytest.raises(ConfigError, match="is no value of a program"):
        run([Node(name="a", calls="operator.neg", args=[value])])


@pytest.mark.parametrize(
    ("calls", "args", "text"),
    [
        ("operator.mul", ["a", 3], "mul of what is no number"),
        ("operator.mod", ["%9999999d", 3], "mod of what is no number"),
        ("operator.pow", [10, 10**9], "a power of 1000000000"),
    ],
)
def test_sizes_are_reckoned_with_numbers(calls: str, args: list[Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        run([Node(name="a", calls=calls, args=args)])
    with pytest.raises(ValueError, match="mul gives more than any size"):
        run([Node(name="a", calls="operator.mul", args=[2**62, 4])])
    assert run([Node(name="a", calls="operator.pow", args=[2, 5])]) == 32


@pytest.mark.parametrize(
    "value", [{"of": "nothing"}, {}, {"of": "x0", "float": "1"}, {"dtype": 3}, {"float": "x"}]
)
def test_a_program_that_is_not_whole_is_an_error(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"a program that is not whole|no value of a program"):
        run([Node(name="a", calls="operator.neg", args=[value])])


@pytest.mark.parametrize("name", ["x=print(1)", "a b", "lambda", "", "é", "a.b"])
def test_a_name_is_a_word(name: str) -> None:
    for program in (
        {"inputs": [name], "nodes": [], "outputs": []},
        {"inputs": [], "nodes": [], "outputs": [], "tensors": {name: "w"}},
        {"inputs": [], "nodes": [{"name": name, "calls": "operator.neg"}], "outputs": []},
        {
            "inputs": [],
            "nodes": [{"name": "a", "calls": "operator.neg", "kwargs": {name: 1}}],
            "outputs": [],
        },
    ):
        with pytest.raises(ValidationError, match="is no name"):
            Program.model_validate(program)


@pytest.mark.parametrize("path", ["__init__.__globals__", "training", "inner.forward", "inner.x"])
def test_nothing_but_tensors_of_the_layer_can_be_read(path: str) -> None:
    owner = nn.Sequential()
    owner.add_module("inner", nn.Linear(2, 3))
    program = Program(inputs=[], nodes=[], outputs=[{"of": "w"}], tensors={"w": path})
    with pytest.raises(ConfigError, match=r"a layer has no tensor|is not whole"):
        compiled(program, CPU, owner)


def test_an_argument_without_a_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="an operation's argument is object"):
        encode(object())


INNER = Program(inputs=["y"], nodes=[], outputs=[{"of": "y"}])


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"calls": "aten._assert_async.msg", "args": [{"of": "x0"}, "1"]}, "not among"),
        ({"calls": "operator.getitem", "args": [{"of": "x0"}, {"slice": [0, 1]}]}, "by its number"),
        ({"calls": "no_grad", "args": [3], "body": INNER}, "values that were computed"),
        (
            {"calls": "autocast", "kwargs": {"device_type": "x"}, "body": INNER},
            "its option 'device_type' is not known",
        ),
        ({"calls": "autocast", "kwargs": {"more": 1}, "body": INNER}, "its option 'more'"),
        (
            {"calls": "autocast", "kwargs": {"dtype": {"dtype": "quint8"}}, "body": INNER},
            "its option 'dtype'",
        ),
        ({"calls": "aten.linear.default", "args": [], "body": INNER}, "it has a body"),
        ({"calls": "operator.getitem", "args": []}, "by its number"),
        (
            {
                "calls": "no_grad",
                "body": INNER.model_copy(
                    update={"nodes": [Node(name="b", calls="aten.set_.source_Tensor")]}
                ),
            },
            "calls 'aten.set_.source_Tensor'",
        ),
    ],
)
def test_a_host_without_code_runs_nothing_that_trusts_its_arguments(
    node: dict[str, Any], text: str
) -> None:
    program = Program(inputs=["x0"], nodes=[Node(name="a", where="net.py:3", **node)], outputs=[])
    with pytest.raises(ConfigError, match=rf"{text}.*give `layers` of torch.nn's modules"):
        require_bounded(program)


def test_a_host_without_code_runs_what_models_are_made_of() -> None:
    options = {"device_type": "cuda", "dtype": {"dtype": "bfloat16"}, "enabled": True}
    body = INNER.model_copy(
        update={"nodes": [Node(name="r", calls="aten.relu.default", args=[{"of": "y"}])]}
    )
    nodes = [
        Node(name="a", calls="autocast", args=[{"of": "x0"}], kwargs=options, body=body),
        Node(name="b", calls="operator.getitem", args=[{"of": "a"}, 0]),
        Node(name="c", calls="torch.sym_max", args=[{"of": "n"}, 2]),
    ]
    require_bounded(Program(inputs=["x0", "n"], nodes=nodes, outputs=[]))


def test_a_host_without_code_checks_what_kernels_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_lists", [importing.AllowList([])])
    lowest = torch.full([1], torch.iinfo(torch.int64).min)
    nodes = [
        Node(name="a", calls="aten.div.Tensor", args=[{"of": "x0"}, 2]),
        Node(name="b", calls="aten.floor_divide.default", args=[{"of": "x0"}, -1]),
    ]
    assert run(nodes[:1], lowest).item() == lowest.item() / 2
    with pytest.raises(ValueError, match="the lowest integer is divided by -1"):
        run(nodes, lowest)


@pytest.mark.parametrize("output", ["text", {"dtype": "quint8"}, [{"of": "x0"}], None])
def test_a_host_without_code_passes_on_tensors_and_numbers(output: Any) -> None:
    with pytest.raises(ConfigError, match="neither a tensor nor a number"):
        require_bounded(Program(inputs=["x0"], nodes=[], outputs=[output]))
