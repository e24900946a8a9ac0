"""Values that a forward keeps: compared, copied, put back, and as a snapshot holds them."""

from __future__ import annotations

import ast
import enum
import itertools
import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy.random
import torch
from torch import Tensor, nn

from rpcmp.pipelining import pytree

GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)

ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, itertools.count, enum.Enum)
LARGE, LARGE_TENSOR = 10_000, 2**24

SEVERAL = (list, tuple, dict, set, frozenset, deque)


def is_plain(value: Any, depth: int = 4) -> bool:
    if isinstance(value, (*ATOMS, *GENERATORS, Tensor, numpy.ndarray, numpy.generic)):
        return not isinstance(value, nn.Parameter | random.SystemRandom)  # that has no state
    if not isinstance(value, SEVERAL) or not depth:
        return False
    inner = value.values() if isinstance(value, dict) else value
    return all(is_plain(each, depth - 1) for each in inner)


def is_large(value: Any) -> bool:
    """Whether a table has more values than it is worth to copy; no forward fills so many."""
    if isinstance(value, Tensor):
        return value.numel() > LARGE_TENSOR
    waiting, count = [value], 0
    while waiting and count <= LARGE:
        each = waiting.pop()
        if isinstance(each, SEVERAL):
            count += len(each)
            waiting += itertools.islice(each.values() if isinstance(each, dict) else each, LARGE)
    return count > LARGE


def _arguments_of(count: itertools.count[Any]) -> tuple[Any, ...]:
    """Return where it is, and its step: its text is that of a call."""
    return tuple(ast.literal_eval(f"[{repr(count)[6:-1]}]"))


def content_of(value: Any) -> Any:
    """Return a copy of what a value holds, from which `refilled` makes it again."""
    if isinstance(value, GENERATORS):
        return content_of(_state_of(value))
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, numpy.ndarray):
        return value.copy()
    if isinstance(value, itertools.count):
        return _arguments_of(value)
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, dict):
        return {key: (each, content_of(each)) for key, each in value.items()}
    if isinstance(value, SEVERAL):
        return [(each, content_of(each)) for each in value]
    return value


def plain_of(content: Any) -> Any:
    """Return a content without the objects that it was of."""
    if isinstance(content, dict):
        return {key: plain_of(inner) for key, (_, inner) in content.items()}
    if isinstance(content, list):
        return [plain_of(inner) for _, inner in content]
    return content


def is_equal(one: Any, other: Any) -> bool:
    """Whether two contents are equal, bit by bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return are_equal_tensors(one, other)
    if isinstance(one, numpy.ndarray):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return [*one] == [*other] and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if not isinstance(one, (*ATOMS, tuple)):
        return one is other
    return bool(one == other) or bool(one != one and other != other)  # NaN


def are_equal_tensors(one: Tensor, other: Tensor) -> bool:
    try:
        if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
            return False
        if one.is_meta:  # as modules that are only sized have
            return other.is_meta
        if one.is_quantized:  # its bits cannot be viewed as others
            return torch.equal(one.dequantize(), other.dequantize())
        if one.layout is not torch.strided:
            return torch.equal(one.to_dense(), other.to_dense())
        found = (each.detach().resolve_conj().resolve_neg() for each in (one, other))
        bits = (each.contiguous().reshape(-1).view(torch.uint8) for each in found)
        return torch.equal(*bits)
    except (RuntimeError, NotImplementedError):  # jagged, for one: it counts as changed
        return False


def as_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor that can be computed with: dense, dequantized, of real numbers.

    Raises:
        RuntimeError: there is none.
    """
    if tensor.is_quantized:
        return tensor.dequantize()
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def refilled(value: Any, content: Any) -> Any:
    """Return an object with its former content."""
    if isinstance(value, GENERATORS):
        _set_state(value, _generator_state(value, content))
    elif isinstance(value, Tensor):
        if not are_equal_tensors(value, content):  # one that is expanded cannot be written to
            _refill(value, content)
    elif isinstance(value, numpy.ndarray):
        if not is_equal(value, content):
            value[...] = content
    elif isinstance(value, bytearray):
        value[:] = content
    elif isinstance(value, itertools.count):
        return itertools.count(*content)
    elif isinstance(value, dict):
        items = {key: refilled(*pair) for key, pair in content.items()}
        value.clear()
        value.update(items)
    elif isinstance(value, tuple):
        for pair in content:
            refilled(*pair)
    elif isinstance(value, set):
        value.clear()
        value.update(each for each, _ in content)
    elif isinstance(value, list | deque):
        several = [refilled(*pair) for pair in content]
        value.clear()
        value.extend(several)
    return value


def _refill(tensor: Tensor, content: Tensor) -> None:
    if tensor.shape == content.shape and tensor.layout is content.layout is torch.strided:
        tensor.data.copy_(content)  # a graph that has saved it is as it was, not invalid
    else:
        tensor.data = content.clone()


def _generator_state(generator: Any, content: Any) -> Any:
    """Return a state as the generator gives it: `content_of` has taken it apart."""
    if isinstance(generator, random.Random):
        version, numbers, gauss = plain_of(content)
        return version, tuple(numbers), gauss
    if isinstance(generator, numpy.random.RandomState):
        return tuple(plain_of(content))
    return plain_of(content)


def stored(value: Any) -> Any:
    """Return a value as a tree of tensors, numbers and texts, which a snapshot can hold.

    Raises:
        TypeError: it is something else.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case numpy.generic():
            return value.item()
        case Tensor() if value.layout is torch.strided and not value.is_quantized:
            return value.detach()
        case Tensor():
            raise TypeError(f"a tensor of the layout {value.layout}")
        case numpy.ndarray():
            return torch.from_numpy(value.copy())
        case itertools.count():
            return [*_arguments_of(value)]
        case dict() if not {*map(type, value)} <= {str, int}:
            raise TypeError("a dict whose keys are no texts or integers")
        case dict():
            return {key: stored(each) for key, each in value.items()}
        case tuple():
            return tuple(map(stored, value))
        case list() | deque() | set() | frozenset():
            return [*map(stored, value)]
    if isinstance(value, GENERATORS):
        return stored(_state_of(value))
    raise TypeError(type(value).__name__)


def given_back(there: Any, value: Any) -> Any:
    """Return what `stored` has returned, in what lies there as far as that is of a kind."""
    match there:
        case numpy.random.RandomState():
            there.set_state(pytree.map_tensors(Tensor.numpy, value))
        case _ if isinstance(there, GENERATORS):
            _set_state(there, value)
        case numpy.ndarray():
            return value.cpu().numpy()
        case itertools.count():
            return itertools.count(*value)
        case list() | deque() if isinstance(value, list):
            several = _all_given_back(there, value)
            there.clear()
            there.extend(several)
        case tuple() if isinstance(value, tuple):
            return tuple.__new__(type(there), _all_given_back(there, value))
        case dict() if isinstance(value, dict):
            items = {key: given_back(there.get(key), each) for key, each in value.items()}
            there.clear()
            there.update(items)
        case set() if isinstance(value, list):
            there.clear()
            there.update(value)
        case _:
            return value
    return there


def _all_given_back(there: Iterable[Any], values: Sequence[Any]) -> list[Any]:
    pairs = itertools.zip_longest([*there][: len(values)], values)
    return list(itertools.starmap(given_back, pairs))


def _state_of(generator: Any) -> Any:
    match generator:
        case numpy.random.Generator():
            return generator.bit_generator.state
        case random.Random():
            return generator.getstate()
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    match generator:
        case random.Random():
            generator.setstate(state)
        case numpy.random.Generator():
            generator.bit_generator.state = state
        case torch.Generator():
            generator.set_state(state.cpu())
        case _:
            generator.set_state(state)
