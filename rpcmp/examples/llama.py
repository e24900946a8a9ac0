"""Hugging Face's Llama as it is, with random weights: nothing is downloaded.

rpcmp cuts it between its decoder layers. Parameters keep their names, so `LlamaForCausalLM` loads
what `rpcmp export` writes, and its weights can initialize a run (`init`).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rpcmp.examples import stdlib_gpt

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise ImportError(
        f"Llama comes with transformers 5 ({error}): pip install 'rpcmp[examples]'"
    ) from error


def net(**config: Any) -> nn.Module:
    """Return the model.

    Input: tokens `(N, T)` int64. Output: a dict with "logits" of the token after each,
    `(N, T, vocab_size)` float32.

    Args:
        config: arguments of `LlamaConfig`.
    """
    module: nn.Module = LlamaForCausalLM(LlamaConfig(**config))
    return module


def entropy_ratio(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    """Return the loss divided by the unigram entropy; see `rpcmp.examples.stdlib_gpt`."""
    return stdlib_gpt.entropy_ratio(outputs["logits"], targets)


def sample(predict: Callable[[Tensor], dict[str, Tensor]]) -> str:
    """Continue a prompt, and return both; `predict` is the trained model."""
    return stdlib_gpt.sample(lambda tokens: predict(tokens)["logits"])
