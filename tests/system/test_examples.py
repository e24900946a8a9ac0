"""The examples of the package learn, and give the bits of one process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rpcmp.config import addresses, loader
from rpcmp.examples import stdlib_gpt
from tests.support.docs import PAGES, README
from tests.support.places import EXAMPLES
from tests.support.processes import Result, rpcmp

SCHEDULES = ("gpipe", "1f1b", "zero-bubble")


def verify(example: str, steps: int, *overrides: str) -> str:
    """Return the hash of a verified run."""
    options = [part for override in overrides for part in ("--set", override)]
    config = EXAMPLES / f"{example}.toml"
    result = rpcmp("verify", config, "--steps", str(steps), *options)
    assert result.code == 0, result.err
    return result.out.split()[-1]


def drive(example: str, *overrides: str) -> Result:
    """Run an example to its end, by default as on its page."""
    options = [part for override in overrides for part in ("--set", override)]
    result = rpcmp("drive", EXAMPLES / f"{example}.toml", "--json", *options)
    assert result.code == 0, result.err
    return result


def test_each_example_is_a_model_a_config_and_a_row_in_both_tables() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.toml")}
    assert names == {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == set(re.findall(r"\n\| \[`(\w+)\.toml`\]\(rpcmp/examples/\1\.toml\)", README))
    page = PAGES["rpcmp/examples/README.md"]
    assert names == set(re.findall(r"\n\| \[`(\w+)\.toml`\]\(\1\.toml\)", page))
    for name in names:
        text = (EXAMPLES / f"{name}.toml").read_text()
        assert f"\n#     rpcmp drive rpcmp/examples/{name}.toml" in text


def test_addresses_in_comments_are_the_default_addresses() -> None:
    found = {}
    for path in EXAMPLES.glob("*.toml"):
        comments = "\n".join(re.findall(r"#.*", path.read_text()))
        for stage, listed in enumerate(re.findall(r"addresses = \[(.*?)\]", comments)):
            ports = [int(port) for port in re.findall(r":(\d+)", listed)]
            expected = [addresses.default_port(stage, replica) for replica in range(len(ports))]
            found[path.stem, stage] = ports
            assert ports == expected, path.name
    assert len(found) == 5


@pytest.mark.parametrize(
    ("example", "overrides"),
    [
        ("two_parts", []),
        ("hybrid_devices", []),
        ("unet", ["data.train.kwargs.scenes=64", "num_microbatches=3"]),
        pytest.param("llama", [], marks=pytest.mark.long),
        pytest.param("residual_ddp", ["num_microbatches=7"], marks=pytest.mark.long),
        pytest.param("encoder_decoder", [], marks=pytest.mark.long),
        pytest.param("branches", ["num_microbatches=7"], marks=pytest.mark.long),
        pytest.param("resnet50", ["data.batch_size=16"], marks=pytest.mark.long),
        pytest.param("two_towers", ["data.batch_size=50"], marks=pytest.mark.long),
        pytest.param("stdlib_gpt", ["num_microbatches=3"], marks=pytest.mark.long),
    ],
)
def test_an_example_gives_the_bits_of_one_process(example: str, overrides: list[str]) -> None:
    verify(example, 2, *overrides)


def hugging_faces(state: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return the model of `transformers` for the example's config, with these weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = loader.load_config(EXAMPLES / "llama.toml").model
    assert config is not None
    model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **config.kwargs))
    model.load_state_dict(state, strict=True)
    model.eval()
    found: torch.nn.Module = model
    return found


@pytest.mark.long
def test_llama_weights_travel_to_hugging_face_and_back(tmp_path: Path) -> None:
    """The export is a state dict that loads and gives the same loss; a run can start from one."""
    file, saved = tmp_path / "model.safetensors", tmp_path / "saved"
    overrides = (
        f"checkpoint.dir={json.dumps(str(saved))}",
        "data.test.kwargs.windows=8",
        "data.train.kwargs.windows=32",
    )
    run = drive("llama", *overrides)
    exported = rpcmp("export", saved, file)
    assert exported.code == 0, exported.err
    model = hugging_faces(load_file(file))
    tokens, targets = stdlib_gpt.dataset("test", 8).tensors
    with torch.no_grad():
        loss = stdlib_gpt.loss(model(tokens).logits, targets)
    assert run.event("summary")["metrics"]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    save_file(dict(model.state_dict()), file)
    verify("llama", 2, f"init={json.dumps(str(file))}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "metric", "least"),
    [
        ("digits", "accuracy", 0.98),
        ("two_towers", "accuracy", 0.97),
        ("two_parts", "accuracy", 0.95),
        ("encoder_decoder", "accuracy", 0.65),
        ("hybrid_devices", "accuracy", 0.95),
        ("branches", "accuracy", 0.97),
        ("residual_ddp", "accuracy", 0.97),
        ("resnet50", "accuracy", 0.95),
        ("unet", "ink_accuracy", 0.85),
    ],
)
def test_an_example_learns(example: str, metric: str, least: float) -> None:
    result = drive(example)
    assert result.losses[-1] < result.losses[0] / 2
    assert result.event("summary")["metrics"][metric] >= least


@pytest.mark.long
@pytest.mark.timeout(900)  # minutes of training, longer beside other tests
@pytest.mark.parametrize(("example", "most"), [("stdlib_gpt", 0.7), ("llama", 0.75)])
def test_a_language_model_learns(example: str, most: float) -> None:
    result = drive(example)
    assert result.losses[-1] < 0.6 * result.losses[0]
    assert result.event("summary")["metrics"]["entropy_ratio"] <= most
    assert "def " in result.event("report")["text"]


@pytest.mark.long
@pytest.mark.parametrize("example", ["digits", "stdlib_gpt"])
def test_one_hash_for_all_stage_counts_and_schedules(example: str) -> None:
    hashes = {
        verify(example, 3, f"schedule={schedule}", f"model.num_stages={count}")
        for schedule in SCHEDULES
        for count in (2, 3, 4)
    }
    assert len(hashes) == 1


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("example", ["digits", "stdlib_gpt", "two_towers"])
def test_micro_batches_that_do_not_divide_the_batch(example: str, schedule: str) -> None:
    verify(example, 3, f"schedule={schedule}", "num_microbatches=7")


@pytest.mark.long
@pytest.mark.parametrize("example", ["digits", "two_towers"])
def test_32_micro_batches_in_flight(example: str) -> None:
    verify(example, 3, "schedule=gpipe", "num_microbatches=32", "data.batch_size=100")
