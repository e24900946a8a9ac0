"""What a host without the user's code runs: operations that check their arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcmp.splitting import operations
from rpcmp.splitting.operations import require_bounded

X: dict[str, Any] = {"of": "x"}


@pytest.mark.parametrize(
    ("calls", "args", "kwargs"),
    [
        ("aten.linear.default", [X, X, X], {}),
        ("aten.linear.default", [X, X, None], {}),
        ("aten.add_.Tensor", [X, 1], {"alpha": 2.5}),
        ("aten.add.Tensor", [X, {"float": "nan"}], {}),
        ("aten.to.dtype", [X, {"dtype": "bfloat16"}, False, True, {"format": "channels_last"}], {}),
        ("aten.full.default", [[X, 2], 0.0], {"dtype": None, "layout": {"layout": "strided"}}),
        ("aten.zeros.default", [[2]], {"device": {"device": ""}, "pin_memory": False}),
        ("aten.max_pool2d.default", [X, 3, [2, X]], {}),
        ("aten.gelu.default", [X], {"approximate": "tanh"}),
        ("aten.div.Tensor_mode", [X, 2], {"rounding_mode": None}),
        ("aten.einsum.default", ["bhi, bij -> bhj", [X, X]], {}),
        ("aten.index.Tensor", [X, [None, X]], {}),
        ("aten.sym_size.int", [X, 0], {}),
        ("aten.lstm.input", [X, [X, X], [X], True, 1, 0.0, True, False, False], {}),
    ],
)
def test_what_models_call_is_allowed(calls: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    require_bounded(calls, args, kwargs)


@pytest.mark.parametrize(
    "calls",
    [
        *("aten._assert_async.msg", "aten._assert_async.default", "aten._print.default"),
        *("aten.max_pool2d_with_indices_backward.default", "aten.segment_reduce.default"),
        *("aten.add.out", "aten.to.prim_Device", "aten.lstm.data", "aten.from_file.default"),
        *("aten.sort.int", "aten.add.t", "aten.all.int", "aten.resize_.default", "aten.add"),
        *("prims.add.default", "aten.add.Tensor.x", "aten.sigmoid_backward.default", ""),
        *("aten.bernoulli.p.x", "aten.__class__.default", "aten.unsafe_chunk.default"),
    ],
)
def test_nothing_else_is(calls: str) -> None:
    with pytest.raises(ValueError, match="not among the operations that check their arguments"):
        require_bounded(calls, [X, X], {})


@pytest.mark.parametrize(
    ("calls", "args", "kwargs", "text"),
    [
        ("aten.to.dtype", [X, 99], {}, "its argument 'dtype' has to be ScalarType"),
        ("aten.to.dtype", [X, X], {}, "'dtype'"),
        ("aten.to.dtype", [X, {"dtype": "quint8"}], {}, "'dtype'"),
        ("aten.contiguous.default", [X], {"memory_format": 7}, "'memory_format'"),
        ("aten.zeros.default", [[2]], {"layout": {"layout": "sparse_csr"}}, "'layout'"),
        ("aten.zeros.default", [[2]], {"device": "cuda"}, "'device'"),
        ("aten.gelu.default", [X], {"approximate": "tanh\n"}, "'approximate'"),
        ("aten.gelu.default", [X], {"approximate": X}, "'approximate'"),
        ("aten.einsum.default", ['ij"); system("x', [X]], {}, "'equation'"),
        ("aten.dropout.default", [X, 0.5, "yes"], {}, "'train'"),
        ("aten.view.default", [X, "8"], {}, "'size'"),
        ("aten.view.default", [X, [2, [3]]], {}, "'size'"),
        ("aten.relu.default", [[X]], {}, "'self'"),
        ("aten.relu.default", ["x"], {}, "'self'"),
        ("aten.rand.generator", [[2]], {"generator": X}, "'generator'"),
        ("aten.relu.default", [X, X], {}, "it has no such arguments"),
        ("aten.relu.default", [X], {"self": X}, "it has no such arguments"),
        ("aten.relu.default", [X], {"out": X}, "it has no such arguments"),
    ],
)
def test_an_argument_is_of_its_kind(
    calls: str, args: list[Any], kwargs: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        require_bounded(calls, args, kwargs)


def checked(name: str) -> Any:
    _, base, overload = name.split(".")
    return operations.checked(name, getattr(getattr(torch.ops.aten, base), overload))


RECURRENT = [
    nn.LSTM(3, 4, 2, bidirectional=True),
    nn.LSTM(3, 4, 2, proj_size=2, bias=False),
    nn.GRU(3, 4, batch_first=True),
    nn.RNN(3, 4, 2, nonlinearity="relu"),
]


@pytest.mark.parametrize("module", RECURRENT, ids=lambda each: each.mode)
def test_a_recurrent_layer_computes_what_torchs_does(module: nn.RNNBase) -> None:
    name = f"aten.{module.mode.lower()}.input"
    inputs = torch.randn(2, 5, 3)
    samples = inputs.shape[0 if module.batch_first else 1]
    rows = module.num_layers * (2 if module.bidirectional else 1)
    state = torch.zeros(rows, samples, module.proj_size or module.hidden_size)
    states: Any = [state, torch.zeros(rows, samples, 4)] if module.mode == "LSTM" else state
    weights = [*module.parameters()]
    options = (module.bias, module.num_layers, 0.0, True, module.bidirectional, module.batch_first)
    found = checked(name)(inputs, states, weights, *options)
    expected, *_ = module(inputs)
    assert torch.equal(found[0], expected)
    for broken in (
        (inputs[..., :2], states, weights),
        (inputs, states, weights[:-1]),
        (inputs, states, [*weights[:-1], weights[-1][:1]]),
        (inputs, states, [each.double() for each in weights]),
        (inputs[:0], states, weights),
        (inputs[0], states, weights),
        (inputs, state[0], weights),
        (inputs, [*states, state] if module.mode == "LSTM" else state[:, :1], weights),
    ):
        with pytest.raises(ValueError, match="of a recurrent layer"):
            checked(name)(*broken, *options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_lowest_integer_is_not_divided_by_minus_one(dtype: torch.dtype) -> None:
    lowest = torch.full([2], torch.iinfo(dtype).min, dtype=dtype)
    divisor: Tensor | int
    for divisor in (-1, torch.tensor([3, -1], dtype=dtype)):
        with pytest.raises(ValueError, match="lowest integer is divided by -1"):
            checked("aten.floor_divide.default")(lowest, divisor)
    remainder = checked("aten.remainder.Tensor")
    assert remainder(lowest + 1, torch.tensor(-1, dtype=dtype)).tolist() == [0, 0]
    assert checked("aten.div.Tensor")(lowest.double(), -1.0).tolist() == (-lowest.double()).tolist()
    assert checked("aten.relu.default") is torch.ops.aten.relu.default


def test_a_division_is_looked_at_as_its_kernel_does() -> None:
    lowest = torch.full([1], torch.iinfo(torch.int32).min, dtype=torch.int32)
    with pytest.raises(ValueError, match="lowest integer is divided by -1"):
        checked("aten.floor_divide.Scalar")(lowest, 2**32 - 1)  # which wraps round
    with pytest.raises(ValueError, match="lowest integer is divided by -1"):
        checked("aten.div.Scalar_mode")(lowest, rounding_mode="trunc", other=-1)
