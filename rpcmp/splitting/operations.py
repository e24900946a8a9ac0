"""What a host without the user's code runs for a config: torch's operations that check arguments.

A server that was started with `--no-code` or `--allow` runs the programs of a cut module, and the
config's author may have written them by hand. So it runs what exports of models contain: nothing
that only autograd, an optimizer or a kernel calls, that opens, prints or trusts what it is given.
Arguments have the kinds of torch's own schemas, since torch takes a plain number for a dtype and
reads beyond its table. `tests/long/test_operations.py` calls each with hostile arguments.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.operator_schemas import get_signature_for_torch_op

_POINTWISE = """
    abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
    arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip complex conj
    conj_physical copysign cos cosh deg2rad digamma div divide elu eq erf erfc erfinv exp exp2
    expm1 fix float_power floor floor_divide fmax fmin fmod frac ge gelu glu greater greater_equal
    gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 imag isclose isfinite isinf
    isnan isneginf isposinf isreal le leaky_relu lerp less less_equal lgamma log log10 log1p log2
    log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
    maximum minimum mish mul multiply nan_to_num ne neg negative not_equal polar positive pow
    prelu rad2deg real reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign
    signbit silu sin sinc sinh softplus softshrink special_entr special_erfcx special_expit
    special_expm1 special_i0e special_i1 special_i1e special_log1p special_log_ndtr special_logit
    special_ndtr special_ndtri special_round special_sinc special_xlog1py special_xlogy
    special_zeta sqrt square sub subtract tan tanh threshold true_divide trunc where xlogy __and__
    __or__ __xor__ __lshift__ __rshift__
"""

_REDUCTIONS = """
    all amax amin aminmax any argmax argmin count_nonzero cummax cummin cumprod cumsum
    logcumsumexp log_softmax logsumexp max mean median min nanmean nanmedian nansum norm prod
    softmax special_log_softmax special_logsumexp special_softmax std std_mean sum sum_to_size
    trace var var_mean linalg_norm linalg_vector_norm linalg_matrix_norm linalg_vecdot
"""

_SHAPES = """
    adjoint alias atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to
    cartesian_prod cat channel_shuffle chunk clone column_stack concat concatenate constant_pad_nd
    contiguous copy detach diag diag_embed diagonal dsplit dstack expand expand_as flatten flip
    fliplr flipud hsplit hstack lift_fresh_copy matrix_H mH mT meshgrid moveaxis movedim narrow
    numpy_T pad permute pixel_shuffle pixel_unshuffle ravel reflection_pad1d reflection_pad2d
    reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d
    replication_pad3d reshape reshape_as resolve_conj resolve_neg roll rot90 row_stack select
    slice split split_with_sizes squeeze stack swapaxes swapdims t take_along_dim tensor_split
    tile transpose tril triu unbind unflatten unfold unsqueeze view view_as view_as_complex
    view_as_real vsplit vstack to type_as sym_size sym_numel sym_stride _to_copy copy_
"""

_INDEXING = """
    argsort bucketize gather index index_add index_fill index_put index_select isin kthvalue
    masked_fill masked_scatter masked_select mode nonzero one_hot scatter scatter_add
    scatter_reduce searchsorted sort take topk embedding
"""

_MATRICES = """
    addbmm addmm addmv addr baddbmm bmm cdist cosine_similarity cross dot einsum inner kron
    linalg_cross linalg_matmul linalg_multi_dot linear matmul mm mv outer pairwise_distance
    tensordot
"""

_LAYERS = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d alpha_dropout avg_pool1d avg_pool2d avg_pool3d
    batch_norm bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    dropout feature_alpha_dropout feature_dropout group_norm gru gru_cell im2col instance_norm
    layer_norm lstm lstm_cell max_pool1d max_pool2d max_pool3d rms_norm rnn_relu rnn_relu_cell
    rnn_tanh rnn_tanh_cell rrelu scaled_dot_product_attention upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d
"""

_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss
    hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss poisson_nll_loss
    smooth_l1_loss soft_margin_loss triplet_margin_loss
"""

_CREATION = """
    arange bernoulli empty_like eye fill full full_like linspace new_empty new_full new_ones
    new_zeros normal ones ones_like rand rand_like randint randint_like randn randn_like randperm
    scalar_tensor tril_indices triu_indices uniform zero zeros zeros_like empty
"""

_FREQUENCIES = """
    fft_fft fft_fft2 fft_fftn fft_fftshift fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_irfft
    fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
"""

ALLOWED = frozenset(
    " ".join(
        (
            *(_POINTWISE, _REDUCTIONS, _SHAPES, _INDEXING, _MATRICES),
            *(_LAYERS, _LOSSES, _CREATION, _FREQUENCIES),
        )
    ).split()
)
"""Names of operations; each stands for its overloads, and for its form in place."""

DTYPES = {
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
}

STRINGS = {
    "approximate": "none|tanh",
    "equation": r"[A-Za-z.,> -]{0,200}",
    "indexing": "ij|xy",
    "norm": "backward|ortho|forward",
    "mode": "constant|reflect|replicate|circular",
    "ord": "fro|nuc",
    "padding": "same|valid",
    "reduce": "sum|prod|mean|amax|amin",
    "rounding_mode": "trunc|floor",
    "side": "left|right",
}
"""Of each argument that is a string: the strings that it may be."""


RECURRENT = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Operations of recurrent layers, and how many gates they have."""

DIVISIONS = ("div", "divide", "floor_divide", "remainder", "fmod")


def require_bounded(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Check a call of an operation, whose arguments are as in a program.

    Args:
        name: "aten.linear.default".

    Raises:
        ValueError: the operation is not allowed, or an argument is not of its kind.
    """
    kinds = kinds_of(name)
    if kinds is None:
        raise ValueError("it is not among the operations that check their arguments")
    given = dict(zip(kinds, args, strict=False)) | kwargs
    if len(args) + len(kwargs) != len(given) or given.keys() - kinds.keys():
        raise ValueError("it has no such arguments")
    for key, value in given.items():
        if not _fits(kinds[key], value, key):
            raise ValueError(f"its argument {key!r} has to be {kinds[key]}")


@functools.lru_cache(maxsize=4096)
def kinds_of(name: str) -> dict[str, str] | None:
    """Return the kind of each argument, by its name, as torch's schemas write it; None: refused."""
    namespace, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    is_allowed = base in ALLOWED or (base.endswith("_") and base[:-1] in ALLOWED)
    operation = getattr(getattr(torch.ops.aten, base, None), overload, None)
    if base in RECURRENT and overload != "input":  # of packed sequences
        return None
    if overload.startswith("prim_") or not is_allowed or f"{namespace}.{rest}" != str(operation):
        return None
    assert operation is not None
    schema = schema_of(operation)
    kinds = {each.name: str(each.real_type) for each in schema.arguments}
    returns = {str(each.real_type) for each in schema.returns}
    sized = {"int"} if base.startswith("sym_") else {"Tensor", "List[Tensor]"}
    is_plain = bool(returns) and returns <= sized and not any(a.is_out for a in schema.arguments)
    return kinds if is_plain and all(itertools.starmap(_is_known, kinds.items())) else None


def schema_of(operation: Callable[..., Any]) -> Any:
    """Return torch's schema of an overload of an operation."""
    _, schemas = get_signature_for_torch_op(operation, return_schemas=True)
    return (schemas or [])[0]


def _is_known(key: str, kind: str) -> bool:
    return _KIND.fullmatch(kind) is not None and ("str" not in kind or key in STRINGS)


_KIND = re.compile(
    r"((Optional|List)\[)*"
    r"(Tensor|int|float|number|bool|ScalarType|Layout|MemoryFormat|Device|Generator|str)\]*"
)


def _fits(kind: str, value: Any, key: str) -> bool:
    if kind.startswith("Optional["):
        return value is None or _fits(kind[len("Optional[") : -1], value, key)
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        if isinstance(value, list):
            return all(_fits(inner, each, key) for each in value)
        return inner == "int" and type(value) is int  # one size for all dimensions
    ((what, of),) = value.items() if isinstance(value, dict) else [("", None)]
    match kind:
        case "str":
            return isinstance(value, str) and re.fullmatch(STRINGS.get(key, ""), value) is not None
        case "ScalarType":
            return what == "dtype" and of in DTYPES
        case "Layout":
            return what == "layout" and of == "strided"
        case "MemoryFormat":
            return what == "format"
        case "Device":
            return what == "device"
        case "Generator":
            return False
        case "int" | "bool":
            return what == "of" or isinstance(value, int)
    return what in ("of", "float") or isinstance(value, int | float)  # torch makes tensors of them


def _require_weights(
    gates: int,
    inputs: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    directions: int,
) -> None:
    """Check the shapes of a recurrent layer's tensors, which its kernel does not.

    Args:
        inputs: (steps, samples, features), or the samples first.
        states: (layers * directions, samples, hidden or projected).
        weights: for each layer and direction as in `torch.nn.LSTM`.

    Raises:
        ValueError: they do not fit.
    """
    everything = [inputs, *states, *weights]
    output, hidden = states[0].shape[-1], states[-1].shape[-1]
    own = [gates * hidden] * (2 if has_biases else 0)
    per_direction = 2 + len(own) + (output != hidden)
    expected: list[list[int]] = []
    if len(weights) == layers * directions * per_direction:
        for layer in range(layers):
            size = directions * output if layer else inputs.shape[-1]
            shapes = [[gates * hidden, size], [gates * hidden, output], *([each] for each in own)]
            expected += directions * [*shapes, *([[output, hidden]] if output != hidden else [])]
    fits = (
        len({(each.dtype, each.device, each.layout) for each in everything}) == 1
        and inputs.is_floating_point()
        and inputs.dim() == 3
        and inputs.numel() > 0
        and all(each.dim() == 3 and each.shape[0] == layers * directions for each in states)
        and bool(expected)
        and [[*each.shape] for each in weights] == expected
    )
    if not fits:
        raise ValueError("the tensors of a recurrent layer do not fit each other")


def checked(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation with a check of what its kernel does not look at, if there is any."""
    base = name.split(".")[1]
    if base in RECURRENT:
        call = functools.partial(_recurrent, operation, RECURRENT[base])
    elif base.removesuffix("_") in DIVISIONS:
        call = functools.partial(_divided, operation)
    else:
        return operation

    def check(*args: Any, **options: Any) -> Any:
        return call(*args, **options)

    check.__name__ = check.__qualname__ = f"checked_{base}"  # torch writes it into source
    return check


def _recurrent(
    operation: Callable[..., Any],
    gates: int,
    inputs: Tensor,
    states: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    each = states if isinstance(states, tuple | list) else [states]
    samples = inputs.shape[0 if batch_first else 1]
    if len(each) != (2 if gates == RECURRENT["lstm"] else 1) or any(
        state.dim() != 3 or state.shape[1] != samples for state in each
    ):
        raise ValueError("the states of a recurrent layer are of other samples")
    _require_weights(gates, inputs, each, weights, has_biases, layers, 1 + bool(bidirectional))
    return operation(
        *(inputs, states, weights, has_biases, layers, dropout, train, bidirectional, batch_first)
    )


def _divided(operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Divide, but not the lowest integer by -1, which ends a process on x86."""
    named = dict(zip(("self", "other"), args, strict=False)) | options
    dtype = torch.result_type(named["self"], named["other"])
    if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        lowest = torch.iinfo(dtype).min
        if _has(named["other"], dtype, -1) and _has(named["self"], dtype, lowest):
            raise ValueError("the lowest integer is divided by -1")
    return operation(*args, **options)


def _has(value: Any, dtype: torch.dtype, wanted: int) -> bool:
    """Whether a number is among a value's, as the kernel sees it: of its dtype."""
    return bool((torch.as_tensor(value).to(dtype) == wanted).any())
