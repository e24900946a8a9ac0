"""Models of transformers and of plain torch, small, with random weights, and data for them.

Nobody has written them for a pipeline: each is given to a job as it is (`[model] module`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo import unsplit

TOKENS, CLASSES, LENGTH, SAMPLES = 64, 5, 8, 23
"""23 samples: the last mini-batch, and its last micro-batch, are smaller."""

ATTENTION = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
CAUSAL = {**ATTENTION, "num_key_value_heads": 2, "attention_dropout": 0.1}


def hub() -> Any:
    """Import transformers, for three seconds, in the processes whose model is one of theirs."""
    import transformers

    return transformers


def llama() -> Any:
    return hub().LlamaForCausalLM(hub().LlamaConfig(**CAUSAL))


def qwen3() -> Any:
    config = hub().Qwen3Config(**CAUSAL, head_dim=8, tie_word_embeddings=True)
    return hub().Qwen3ForCausalLM(config)


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return hub().GPT2LMHeadModel(hub().GPT2Config(vocab_size=TOKENS, **sizes, **ends))


def bert() -> Any:
    config = hub().BertConfig(**ATTENTION, num_labels=CLASSES)
    return hub().BertForSequenceClassification(config)


def vit() -> Any:
    sizes = {key: value for key, value in ATTENTION.items() if key != "vocab_size"}
    config = hub().ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=CLASSES)
    return hub().ViTForImageClassification(config)


DEPTHS = {"hidden_sizes": [8, 16, 24, 32], "depths": [2, 2, 2, 2], "num_labels": CLASSES}


def resnet() -> Any:
    config = hub().ResNetConfig(embedding_size=8, **DEPTHS)
    return hub().ResNetForImageClassification(config)


def convnext() -> Any:
    config = hub().ConvNextConfig(image_size=32, drop_path_rate=0.1, **DEPTHS)
    return hub().ConvNextForImageClassification(config)


def t5() -> Any:
    config = hub().T5Config(
        vocab_size=TOKENS,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return hub().T5ForConditionalGeneration(config)


def whisper() -> Any:
    config = hub().WhisperConfig(
        vocab_size=TOKENS,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return hub().WhisperForConditionalGeneration(config)


def mamba() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 4}
    return hub().MambaForCausalLM(hub().MambaConfig(vocab_size=TOKENS, **sizes))


def mixture() -> Any:
    config = hub().Qwen2MoeConfig(
        **CAUSAL,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        experts_implementation="batched_mm",  # every expert computes for every token
    )
    return hub().Qwen2MoeForCausalLM(config)


def encoder() -> Any:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    return nn.TransformerEncoder(layer, 4)


class Architecture(NamedTuple):
    """A model.

    Attributes:
        make: returns the module.
        sample: returns the inputs and the target of a sample.
        loss: of this module, or of rpcmp.
    """

    make: Callable[[], nn.Module]
    sample: Callable[[], tuple[Any, Tensor]]
    loss: str = "rpcmp.losses:masked_lm"


def text() -> dict[str, Tensor]:
    mask = torch.ones(LENGTH, dtype=torch.int64)
    mask[LENGTH - int(torch.randint(3, (1,))) :] = 0
    return {"input_ids": torch.randint(3, TOKENS, (LENGTH,)), "attention_mask": mask}


def language() -> tuple[Any, Tensor]:
    inputs = text()
    return inputs, torch.where(inputs["attention_mask"] > 0, inputs["input_ids"], -100)


def tokens_alone() -> tuple[Any, Tensor]:
    inputs, labels = language()
    return {"input_ids": inputs["input_ids"]}, labels


def text_class() -> tuple[Any, Tensor]:
    return text(), torch.randint(CLASSES, ())


def image_class() -> tuple[Any, Tensor]:
    return {"pixel_values": torch.randn(3, 32, 32)}, torch.randint(CLASSES, ())


def translation() -> tuple[Any, Tensor]:
    labels = torch.randint(3, TOKENS, (LENGTH + 1,))
    return {**text(), "decoder_input_ids": labels.roll(1)}, labels


def speech() -> tuple[Any, Tensor]:
    labels = torch.randint(3, TOKENS, (LENGTH,))
    return {"input_features": torch.randn(8, 32), "decoder_input_ids": labels.roll(1)}, labels


OWN = "tests.zoo.architectures:error"

ARCHITECTURES = {
    "llama": Architecture(llama, language, "rpcmp.losses:causal_lm"),
    "qwen3": Architecture(qwen3, language, "rpcmp.losses:causal_lm"),
    "gpt2": Architecture(gpt2, language, "rpcmp.losses:causal_lm"),
    "bert": Architecture(bert, text_class),
    "vit": Architecture(vit, image_class),
    "resnet": Architecture(resnet, image_class),
    "convnext": Architecture(convnext, image_class),
    "t5": Architecture(t5, translation),
    "whisper": Architecture(whisper, speech),
    "mamba": Architecture(mamba, tokens_alone, "rpcmp.losses:causal_lm"),
    "mixture": Architecture(mixture, language, "rpcmp.losses:causal_lm"),
    "transformer": Architecture(
        encoder, lambda: (torch.randn(LENGTH, 32), torch.randn(LENGTH, 32)), OWN
    ),
    "unet": Architecture(
        unsplit.Skipping, lambda: (torch.randn(2, 16, 16), torch.randn(2, 16, 16)), OWN
    ),
    "language": Architecture(unsplit.Language, unsplit.sentence),
    "adapted": Architecture(unsplit.Adapted, unsplit.sentence),
    "half frozen": Architecture(unsplit.HalfFrozen, unsplit.sentence),
    "two by two": Architecture(
        unsplit.TwoByTwo, lambda: ((torch.randn(4), torch.randn(6)), torch.randn(3)), OWN
    ),
}


def module(name: str) -> nn.Module:
    return ARCHITECTURES[name].make()


def data(name: str) -> list[tuple[Any, Tensor]]:
    torch.manual_seed(1)
    return [ARCHITECTURES[name].sample() for _ in range(SAMPLES)]


def error(outputs: Any, targets: Tensor) -> Tensor:
    """Mean square of all that the module returns, apart from the target."""
    first, *others = outputs if isinstance(outputs, tuple) else (outputs,)
    loss: Tensor = (first - targets).square().mean()
    for other in others:
        loss = loss + other.square().mean()
    return loss


def job(name: str, num_stages: int, schedule: str) -> str:
    """Return a config that trains a model for three steps, the last on a smaller mini-batch."""
    scope = 'loss_scope = "micro-batch"' if name == "half frozen" else ""  # it mixes its samples
    return f"""
{scope}
steps = 3
num_microbatches = 3
schedule = "{schedule}"
loss = "{ARCHITECTURES[name].loss}"
optimizer = {{ callable = "torch.optim:AdamW", kwargs = {{ lr = 0.01 }} }}
[model]
module = "tests.zoo.architectures:module"
kwargs = {{ name = "{name}" }}
num_stages = {num_stages}
[data]
batch_size = 9
train = {{ callable = "tests.zoo.architectures:data", kwargs = {{ name = "{name}" }} }}
"""
