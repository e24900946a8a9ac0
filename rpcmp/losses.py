"""Losses of language models for `loss`, and what a micro-batch of them weighs, for `loss_weight`.

    micro-batch 0    tokens that count: 30    mean loss 2.0    ──┐
    micro-batch 1    tokens that count: 10    mean loss 4.0    ──┴─> (30 * 2.0 + 10 * 4.0) / 40

A mean over tokens has another divisor in each micro-batch, if padding or `ignore_index` leaves
some of them out. To weigh the micro-batches by their samples would give a mean of means, here 3.0,
which depends on how the mini-batch is cut. So `loss_weight` names a function that counts, from the
targets alone, what a micro-batch's mean is over.

A config whose `loss` is one of this module need not name it. They compute what transformers'
models compute from `labels`, to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy, pad

IGNORED = -100
"""The label of a token that no loss counts; torch's and transformers' default."""


def causal_lm(
    outputs: Any, targets: Any, ignore_index: int = IGNORED, aux_weight: float | None = None
) -> Tensor:
    """Mean cross entropy of each next token, as transformers' `ForCausalLMLoss`.

    Args:
        outputs: scores of shape (samples, length, tokens), or a dict or named tuple with them as
            "logits"; they are compared as float32.
        targets: the tokens themselves, int64 of shape (samples, length), or a dict with them as
            "labels". Those equal to `ignore_index` are not learnt.
        aux_weight: of the "aux_loss" that a mixture of experts returns, which transformers adds
            with its config's `router_aux_loss_coef`; 0: it is left out; None: it raises ValueError.

    Returns:
        A float32 scalar; weighted by `next_tokens`.
    """
    aux = outputs.get("aux_loss") if isinstance(outputs, Mapping) else None
    if isinstance(aux, Tensor) and aux_weight is None:
        raise ValueError(
            "the model returns an aux_loss, which transformers adds to the loss: give causal_lm a "
            "weight for it, such as kwargs = { aux_weight = 0.001 } (router_aux_loss_coef), or 0"
        )
    following = pad(_part(targets, "labels"), (0, 1), value=ignore_index)[..., 1:]
    loss = _cross_entropy(outputs, following, ignore_index)
    return loss + aux_weight * aux if aux_weight and isinstance(aux, Tensor) else loss


def masked_lm(outputs: Any, targets: Any, ignore_index: int = IGNORED) -> Tensor:
    """Mean cross entropy of the tokens that were masked, as transformers' `ForMaskedLMLoss`.

    Also that of any model whose outputs and targets are aligned, such as a tagger's, or the decoder
    of a translator. Arguments as of `causal_lm`; weighted by `tokens`.
    """
    return _cross_entropy(outputs, _part(targets, "labels"), ignore_index)


def tokens(targets: Any, ignore_index: int = IGNORED) -> Tensor:
    """Return how many targets count, an int64 scalar: those other than `ignore_index`.

    For `masked_lm`, and for torch's CrossEntropyLoss and NLLLoss without class weights.
    """
    return (_part(targets, "labels") != ignore_index).sum()


def next_tokens(targets: Any, ignore_index: int = IGNORED) -> Tensor:
    """Return how many next tokens count, an int64 scalar: no sample's first token is one."""
    return (_part(targets, "labels")[..., 1:] != ignore_index).sum()


def _cross_entropy(outputs: Any, labels: Tensor, ignore_index: int) -> Tensor:
    scores = _part(outputs, "logits").float()
    flat = scores.reshape(-1, scores.shape[-1])
    return cross_entropy(flat, labels.reshape(-1), ignore_index=ignore_index)


def _part(value: Any, name: str) -> Tensor:
    """Return a tensor, or the one of this name in a dict or named tuple."""
    found = value
    if isinstance(value, Mapping):
        found = value.get(name)
    elif isinstance(value, tuple):
        found = getattr(value, name, None)
    if isinstance(found, Tensor):
        return found
    raise TypeError(f"a tensor, or a dict with one as {name!r}, is needed, not {type(value)}")
