"""Fine-tuning from a folder of transformers: the base stays in it, and adapters go to peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rpcmp.config import loader
from tests.support.cuts import cut_here
from tests.support.localgroup import require_same_bits
from tests.support.places import EXAMPLES

pytestmark = pytest.mark.cluster  # it imports transformers and peft, for 5 s

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.mark.parametrize("rank", [2, 0])
def test_a_model_is_fine_tuned_from_its_folder(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft  # here: for seconds, which only the process that runs this should spend
    from transformers import AutoModelForCausalLM

    from rpcmp.examples import finetune

    monkeypatch.syspath_prepend(EXAMPLES)
    folder = tmp_path / "model"
    finetune.write_small_model(str(folder), num_key_value_heads=2, **SIZES)
    overrides = [
        "steps=2",
        f'init="{folder}"',
        f"model.kwargs={{ rank = {rank} }}",
        "data.train.kwargs.windows=32",
        "data.batch_size=11",
    ]
    config = loader.load_config(EXAMPLES / "finetune.toml", overrides)
    state = require_same_bits(cut_here(config)).state
    model = AutoModelForCausalLM.from_pretrained(folder)
    if not rank:
        model.load_state_dict(state, strict=True)
        return
    assert {name for name in state if "lora" not in name} == set()
    lora = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    whole = peft.get_peft_model(model, lora)
    loaded = whole.load_state_dict(state, strict=False)
    assert loaded.unexpected_keys == []
    assert [name for name in loaded.missing_keys if "lora" in name] == []
    name = next(name for name in state if "lora_B" in name)
    assert torch.equal(whole.state_dict()[name], state[name])
