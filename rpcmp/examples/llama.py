"""Hugging Face's Llama, cut between its decoder layers, with random weights: nothing is downloaded.

The layers come from `transformers`. The first layer computes the rotary embeddings and the mask
once, and all layers pass them on in a dict. Layers have the names of `LlamaForCausalLM`, which can
load the state dict that `rpcmp export` writes, and whose weights can initialize a run (`init`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import (
        LlamaDecoderLayer,
        LlamaRMSNorm,
        LlamaRotaryEmbedding,
    )
except ImportError as error:
    raise ImportError(
        f"Llama comes with transformers 5 ({error}): pip install 'rpcmp[examples]'"
    ) from error

State = dict[str, Tensor]
"""What layers pass on, all float32: "hidden" `(N, T, width)`, "cos" and "sin" `(1, T, width of a
head)`, and "mask" `(1, 1, T, T)`, which is added to attention's scores."""


def layers(**config: Any) -> list[tuple[str, Callable[[], nn.Module]]]:
    """Return the model's layers in order, each a name and a factory.

    Input: tokens `(N, T)` int64. Output: logits of the token after each,
    `(N, T, vocab_size)` float32.

    Args:
        config: arguments of `LlamaConfig`.
    """
    settings = LlamaConfig(attn_implementation="sdpa", tie_word_embeddings=False, **config)
    return [
        ("model.embed_tokens", lambda: initialized(Embedding(settings), settings)),
        *(
            (f"model.layers.{index}", decoder_layer(settings, index))
            for index in range(settings.num_hidden_layers)
        ),
        ("model.norm", lambda: Norm(settings.hidden_size, eps=settings.rms_norm_eps)),
        ("lm_head", lambda: initialized(head(settings), settings)),
    ]


class Embedding(nn.Embedding):
    """From tokens to the state that all decoder layers update."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.rotary = LlamaRotaryEmbedding(config)  # has no parameters

    def forward(self, tokens: Tensor) -> State:  # type: ignore[override]
        hidden = super().forward(tokens)
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device).unsqueeze(0)
        cos, sin = self.rotary(hidden, positions)
        future = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        mask = torch.zeros(1, 1, length, length, device=tokens.device)
        return {
            "hidden": hidden,
            "cos": cos,
            "sin": sin,
            "mask": mask.masked_fill(future, torch.finfo(hidden.dtype).min),
        }


class DecoderLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """One decoder layer, from state to state."""

    def forward(self, state: State) -> State:
        hidden = super().forward(
            state["hidden"],
            attention_mask=state["mask"],
            position_embeddings=(state["cos"], state["sin"]),
        )
        return {**state, "hidden": hidden}


class Norm(LlamaRMSNorm):  # type: ignore[misc]
    """The last normalization: from the state to vectors `(N, T, width)`."""

    def forward(self, state: State) -> Tensor:
        vectors: Tensor = super().forward(state["hidden"])
        return vectors


def decoder_layer(config: LlamaConfig, index: int) -> Callable[[], nn.Module]:
    """Return the factory of one decoder layer."""
    return lambda: initialized(DecoderLayer(config, index), config)


def head(config: LlamaConfig) -> nn.Linear:
    """Return the layer from vectors to logits."""
    return nn.Linear(config.hidden_size, config.vocab_size, bias=False)


def initialized(module: nn.Module, config: LlamaConfig) -> nn.Module:
    """Give `module` the initial weights of Llama."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=config.initializer_range)
    return module
