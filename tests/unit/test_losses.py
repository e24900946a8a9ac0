"""Losses of language models: those of transformers, and what they are means over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rpcmp.config.loader import parse_config
from rpcmp.losses import causal_lm, masked_lm, next_tokens, tokens


class Outputs(NamedTuple):
    """A model's outputs with more than scores."""

    hidden: Tensor
    logits: Tensor


def batch(ignored: int = -100) -> tuple[Tensor, Tensor]:
    """Return scores of three samples of five tokens, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(3, 5, 7, generator=generator)
    labels = torch.randint(7, (3, 5), generator=generator)
    labels[0, 2:] = labels[2, 0] = labels[2, 1] = ignored
    return scores, labels


def as_transformers(scores: Tensor, labels: Tensor, ignored: int = -100) -> Tensor:
    """Compute what `transformers.loss.loss_utils.ForCausalLMLoss` does."""
    labels = nn.functional.pad(labels, (0, 1), value=ignored)
    shifted = labels[..., 1:].contiguous().view(-1)
    flat = scores.float().view(-1, scores.shape[-1])
    return nn.functional.cross_entropy(flat, shifted, ignore_index=ignored, reduction="mean")


@pytest.mark.parametrize("ignored", [-100, 3])
def test_a_causal_loss_is_that_of_transformers_and_of_the_next_tokens(ignored: int) -> None:
    scores, labels = batch(ignored)
    found = causal_lm(scores, labels, ignore_index=ignored)
    assert found == as_transformers(scores, labels, ignored)
    count = next_tokens(labels, ignore_index=ignored)
    each = [
        nn.functional.cross_entropy(scores[sample, at], labels[sample, at + 1])
        for sample in range(3)
        for at in range(4)
        if labels[sample, at + 1] != ignored
    ]
    assert count == len(each)
    assert float(found) == pytest.approx(float(torch.stack(each).mean()), rel=1e-6)


def test_a_masked_loss_is_a_mean_over_the_masked_tokens() -> None:
    scores, labels = batch()
    counts = labels != -100
    expected = nn.functional.cross_entropy(scores[counts], labels[counts])
    assert float(masked_lm(scores, labels)) == pytest.approx(float(expected), rel=1e-6)
    assert tokens(labels) == counts.sum() == 10


@pytest.mark.parametrize("loss", [causal_lm, masked_lm])
def test_outputs_and_targets_may_be_parts_of_something(loss: Callable[..., Tensor]) -> None:
    scores, labels = batch()
    whole = loss(scores, labels)
    mapping = {"labels": labels, "input_ids": labels}
    assert loss({"logits": scores}, mapping) == whole
    assert loss(Outputs(labels, scores), mapping) == whole
    assert tokens(mapping) == tokens(labels)
    assert next_tokens(mapping) == next_tokens(labels)


@pytest.mark.parametrize("value", [{"scores": torch.ones(1)}, (torch.ones(1),), 3.0, None])
def test_what_has_no_scores_or_labels_is_an_error_that_says_so(value: Any) -> None:
    scores, labels = batch()
    with pytest.raises(TypeError, match="a tensor, or a dict with one as 'logits', is needed"):
        causal_lm(value, labels)
    with pytest.raises(TypeError, match="a tensor, or a dict with one as 'labels', is needed"):
        masked_lm(scores, value)


def test_scores_and_labels_may_have_any_strides() -> None:
    scores, labels = batch()
    turned = scores.transpose(1, 2).contiguous().transpose(1, 2)
    cut = torch.cat([labels, labels], dim=1)[:, :5]
    assert masked_lm(turned, cut) == masked_lm(scores, labels)
    assert causal_lm(turned, cut) == causal_lm(scores, labels)


def test_scores_of_less_precision_are_compared_as_float32() -> None:
    scores, labels = batch()
    found = causal_lm(scores.bfloat16(), labels)
    assert found.dtype == torch.float32
    assert found == causal_lm(scores.bfloat16().float(), labels)


@pytest.mark.parametrize(
    ("loss", "weight"), [("causal_lm", "next_tokens"), ("masked_lm", "tokens"), ("other", None)]
)
def test_a_config_need_not_say_what_our_losses_count(loss: str, weight: str | None) -> None:
    source = {"callable": f"rpcmp.losses:{loss}", "kwargs": {"ignore_index": 0}}
    config = {"model": {"layers": "m:layers"}, "loss": source}
    implied = parse_config(config).weighing
    expected = weight and (f"rpcmp.losses:{weight}", {"ignore_index": 0})
    assert (implied and (implied.callable, implied.kwargs)) == expected
    own = parse_config({**config, "loss_weight": "m:weight"}).weighing
    assert own is not None
    assert (own.callable, own.kwargs) == ("m:weight", {})


def test_an_aux_loss_is_added_with_a_weight_and_never_dropped_in_silence() -> None:
    outputs = {"logits": torch.randn(2, 3, 5), "aux_loss": torch.tensor(2.0)}
    labels = torch.randint(0, 5, (2, 3))
    plain = causal_lm({"logits": outputs["logits"]}, labels)
    with pytest.raises(ValueError, match=r"returns an aux_loss.*aux_weight"):
        causal_lm(outputs, labels)
    assert causal_lm(outputs, labels, aux_weight=0.0) == plain
    assert causal_lm(outputs, labels, aux_weight=0.5) == plain + 1.0
    loss = {"callable": "rpcmp.losses:causal_lm", "kwargs": {"aux_weight": 0.5, "ignore_index": 1}}
    config = parse_config({"model": {"layers": "m:layers"}, "loss": loss})
    assert config.weighing is not None
    assert config.weighing.kwargs == {"ignore_index": 1}
