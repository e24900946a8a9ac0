"""Fine-tune a causal language model of transformers from a local folder, with LoRA or all of it.

`python finetune.py FOLDER` writes a small Llama with random weights to try it with. A folder that
`save_pretrained` has written, or that was downloaded, works as well.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

import rpcmp
from rpcmp.examples import stdlib_gpt

try:
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise ImportError(f"{error}: pip install 'rpcmp[examples]'") from error


def net(rank: int = 0) -> nn.Module:
    """Return the model of the folder `init`, without its weights.

    Input: a dict with "input_ids" `(N, T)` int64. Output: a dict with "logits" of the token after
    each, `(N, T, vocabulary)` float32.

    Args:
        rank: of the adapters that are trained (LoRA); 0: everything is trained.
    """
    config = AutoConfig.from_pretrained(rpcmp.init_path())
    model = rpcmp.from_init(lambda: AutoModelForCausalLM.from_config(config))
    if rank:
        lora = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)
    module: nn.Module = model
    return module


def text(windows: int) -> list[dict[str, Tensor]]:
    """Return pieces of the source of Python's standard library, as input and labels at once."""
    tokens, _ = stdlib_gpt.dataset("train", windows).tensors
    return [{"input_ids": each, "labels": each} for each in tokens]


def write_small_model(folder: str, **config: Any) -> None:
    """Write a Llama with random weights as transformers does, in several files."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, **config}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=stdlib_gpt.VOCABULARY, **sizes))
    model.save_pretrained(folder, max_shard_size="2MB")


if __name__ == "__main__":
    write_small_model(sys.argv[1], num_hidden_layers=6)
