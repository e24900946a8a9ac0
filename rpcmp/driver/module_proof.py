"""Prove a cut on the driver's host: all of the module at once, or its parts where it is too large.

memory, and operations         what is compared
enough                         the module with its layers, on the first samples
too few for whole sequences    the same, on their first tokens
too few                        each part with itself: `rpcmp.driver.proof_in_parts`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.config.schema import Config
from rpcmp.driver.proof_in_parts import give_values, prove_in_parts, shapes
from rpcmp.pipelining import devices, pytree
from rpcmp.pipelining.split_layers import build_module, build_skeleton
from rpcmp.splitting.building import require_own_memory
from rpcmp.splitting.exporting import flatten
from rpcmp.splitting.guards import holds
from rpcmp.splitting.proof import prove
from rpcmp.splitting.recording import PartCall, Recording, Shape, shape_of
from rpcmp.splitting.side_by_side import autocast_to, called_with
from rpcmp.splitting.split import InputPlan, Split
from rpcmp.worker.checks.objective import rows
from rpcmp.worker.checks.parameter_hooks import require_linear, require_own
from rpcmp.worker.checks.second_forward import (
    TrialState,
    other_samples,
    require_nothing_carried,
    require_unmoved,
    tried,
)
from rpcmp.worker.checks.training_check import quiet, require_independent
from rpcmp.worker.model import AUTOCAST_DTYPES
from rpcmp.worker.state.forward_state import ForwardState, not_renormalized

COPIES_IN_A_PROOF = 7
"""Of all parameters: their values, those of before and after, the gradients of both, and more."""

MOST_OPERATIONS = 1e12
"""Of one comparison of a proof, which has five: some ten seconds of a processor."""

TOKENS = 24
"""Of a sequence, where all of them would take too many operations."""


def prove_cut(
    config: Config,
    module: nn.Module,
    split: Split,
    recording: Recording,
    samples: Sequence[Any],
    seconds: float,
) -> list[str] | None:
    """Compare the layers of a cut with the module.

    Args:
        module: without values of its parameters.
        recording: of its export.
        samples: what it is called with, two of them or more, a few samples each.
        seconds: after which no part is compared that is like one before.

    Returns:
        None; of a module that is too large to be compared as a whole, the parts that could not be
        compared either.

    Raises:
        ConfigError: they differ, or may later, and why.
    """
    autocast = AUTOCAST_DTYPES.get(config.autocast or "")
    short = [first_tokens(each, split, TOKENS) for each in samples]
    for few in (samples, short):
        if has_memory_for(module) and is_quick(module, map(shape_of, pytree.tensors(few[0]))):
            proven = with_values(config)
            require_own_memory(proven)
            prove(proven, split, few, autocast, config.has_equal_parts)
            require_own(dict(proven.named_parameters()))
            if config.has_equal_parts:
                require_linear(proven.named_parameters())
                _require_in_training(proven, few[0], autocast)
            return None

    def fits(part: nn.Module, call: PartCall) -> bool:
        return has_memory_for(part) and is_quick(part, shapes(call))

    lengths = _length(samples[0]), _length(short[0])
    return prove_in_parts(module, recording, lengths, fits, autocast, seconds)


def _require_in_training(module: nn.Module, batch: Any, autocast: torch.dtype | None) -> None:
    """Check that micro-batches in training are as good as a mini-batch; see `training_check`."""
    samples = pytree.tensors(batch)[0].shape[0]

    def forward(inputs: list[Any], draws_others: bool) -> Any:
        torch.manual_seed(int(draws_others))
        with autocast_to(autocast):
            (own,) = pytree.map_tensors(Tensor.clone, inputs)
            return flatten(called_with(module, own))[1]

    parts = [rows([batch], number, number + 1, samples, samples) for number in range(2)]
    state = ForwardState([("", module)])
    parameters = not_renormalized(module.named_parameters(), module.modules())
    whole = TrialState(state, parameters)
    module.train()
    with quiet(module.modules()):
        candidates = [(parts[0], parts[1]), ([batch], other_samples([batch]))]
        if (trial := tried(forward, candidates, whole, whole.copy())) is not None:
            require_unmoved(trial)
            require_nothing_carried(trial)
        require_independent(forward, parts, (1, 1), state)


def has_memory_for(module: nn.Module) -> bool:
    """Whether this host has the memory to compare a module; True if that is not known."""
    size = sum(each.numel() * each.element_size() for each in module.parameters())
    free = devices.available_bytes(devices.CPU)
    return free is None or size * COPIES_IN_A_PROOF <= free


def is_quick(module: nn.Module, inputs: Iterable[Shape]) -> bool:
    """Whether a proof takes no more than MOST_OPERATIONS.

    Each parameter counts once per token, or per pixel: six times in training and as much more.
    """
    count = sum(each.numel() for each in module.parameters())
    positions = max(map(_positions, inputs), default=1)
    return count <= 10**8 or 12.0 * count * positions <= MOST_OPERATIONS


def _positions(shape: Shape) -> int:
    has_features = shape.dtype.is_floating_point and len(shape.sizes) > 1
    return math.prod(shape.sizes[:-1] if has_features else shape.sizes)


def _length(inputs: Any) -> int:
    """Return the length of sequences of tokens; 1 of anything else."""
    first = pytree.tensors(inputs)[0]
    return 1 if first.is_floating_point() or first.dim() < 2 else first.shape[1]


def first_tokens(inputs: Any, split: Split, length: int) -> Any:
    """Return inputs with shorter sequences; as they are, if the cut is not for other lengths."""
    if (now := _length(inputs)) <= length:
        return inputs
    plans = iter(split.inputs)

    def shorter(tensor: Tensor, plan: InputPlan) -> Tensor:
        for dim, size in enumerate(tensor.shape):
            if dim and size == now and plan.sizes[dim] is None:
                tensor = tensor.narrow(dim, 0, length)
        return tensor

    short = pytree.map_tensors(lambda tensor: shorter(tensor, next(plans)), inputs)
    sizes = [each.shape for each in pytree.tensors(short)]
    return short if all(holds(guard, sizes) for guard in split.guards) else inputs


def with_values(config: Config) -> nn.Module:
    """Return the config's module with values to compute with.

    They are its constructor's where that draws them; zeros get others, or gradients behind them
    would be zero as well.
    """
    generator = torch.Generator().manual_seed(config.seed)
    if config.init is not None:
        proven = build_skeleton(config)
        give_values(proven, generator)
        return proven
    proven = build_module(config)
    with torch.no_grad():
        for parameter in proven.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.uniform_(-0.1, 0.1, generator=generator)
    return proven
