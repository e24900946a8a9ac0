"""Tensors that stay on devices between stages, with the bits of one process on the CPU.

The accelerator is a pretended one, `pretend:0` to `pretend:3`: see tests/support/pretend.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pretend import on, pretending, proved
from tests.support.processes import JobFolder, Result, rpcmp, running

WIDTH = 2**12
"""Numbers of a sample's activation: those of a micro-batch of 4 are worth sharing."""

WIDE = f"""
import json, torch
from torch import nn
from torch.utils.data import TensorDataset

class Notes(nn.Module):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def forward(self, x):
        if self.path and x.device.type == "pretend":
            noted = torch.get_device_module(x.device).streams.noted()["counts"]
            with open(f"{{self.path}}-{{x.device}}", "a") as file:
                file.write(json.dumps(noted) + "\\n")
        return x

def layers(path=""):
    return [
        ("first", lambda: nn.Linear(4, {WIDTH})),
        ("norm", lambda: nn.Tanh()),
        ("notes", lambda: Notes(path)),
        ("second", lambda: nn.Linear({WIDTH}, 8)),
        ("wide", lambda: nn.Linear(8, {WIDTH})),
        ("inplace", lambda: nn.ReLU(inplace=True)),
        ("notes_too", lambda: Notes(path)),
        ("last", lambda: nn.Linear({WIDTH}, 1)),
    ]

def samples():
    torch.manual_seed(0)
    return TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
"""

DIRECT = """
loss = "torch.nn:MSELoss"
num_microbatches = 4
optimizer = "torch.optim:AdamW"
[transfer]
direct = true
"""

JOB = """
[model]
layers = "wide:layers"
kwargs = {{ path = "{path}" }}
balance = [2, 2, 2, 2]
[data]
batch_size = 16
train = {{ callable = "wide:samples" }}
"""


@pytest.fixture(scope="module", autouse=True)
def _devices() -> Iterator[None]:
    with pretending():
        yield


def configured(job: JobFolder, *devices: str, more: str = "", path: str = "") -> Path:
    (job.folder / "wide.py").write_text(WIDE, encoding="utf-8")
    return job.config(f"{more}{DIRECT}{JOB.format(path=path)}{on(*devices)}")


@pytest.mark.parametrize(
    ("devices", "schedule"),
    [
        (("pretend:0", "pretend:1", "pretend:2", "pretend:3"), "1f1b"),
        (("pretend:0", "pretend:0", "pretend:1", "pretend:1"), "zero-bubble"),
        (("pretend:0", "cpu", "pretend:1", "pretend:2"), "gpipe"),
    ],
    ids=["one each", "two each", "one on the CPU"],
)
def test_the_bits_are_those_of_one_process(
    job: JobFolder, devices: tuple[str, ...], schedule: str
) -> None:
    proved(configured(job, *devices, more=f'schedule = "{schedule}"\n'))


def test_recomputed_and_in_several_messages(job: JobFolder) -> None:
    stages = "\n".join(
        f'[[stages]]\ndevice = "pretend:{number}"\nrecompute = true' for number in (0, 1, 1, 2)
    )
    more = "microbatches_per_message = 2\n"
    (job.folder / "wide.py").write_text(WIDE, encoding="utf-8")
    proved(job.config(f"{more}{DIRECT}{JOB.format(path='')}{stages}"))


def late(path: Path) -> dict[str, int]:
    """Return the copies of a device at its last forward: to and from the host, and without it."""
    counts = json.loads(path.read_text().splitlines()[-1])
    kinds = {"copy that comes late": 0, "copy that comes late within the devices": 0}
    for what, number in counts.items():
        if (kind := what.partition(", by ")[0]) in kinds:
            kinds[kind] += number
    with_host, without = kinds.values()
    return {"with the host": with_host, "without": without}


def test_wide_tensors_do_not_pass_through_the_host(job: JobFolder) -> None:
    path = str(job.folder / "noted")
    devices = ("pretend:0", "pretend:1", "pretend:2", "pretend:3")
    config = configured(job, *devices, more="steps = 4\n", path=path)
    found = {}
    for direct in ("true", "false"):
        result = rpcmp("drive", config, "--json", "--set", f"transfer.direct={direct}")
        assert result.code == 0, result.err
        found[direct] = late(Path(f"{path}-pretend:1"))
        Path(f"{path}-pretend:1").unlink()
    assert found["false"]["without"] == 0
    assert found["true"]["without"] > 0
    assert found["true"]["with the host"] < found["false"]["with the host"]


def losses(result: Result) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in result.events if event["event"] == "step"}


def test_a_killed_worker_is_replaced_and_its_memory_tried_again(job: JobFolder) -> None:
    config = configured(job, "auto", "auto", "auto", "auto", more="steps = 60\n")
    whole = rpcmp("drive", config, "--json")
    assert whole.code == 0, whole.err
    with running("drive", config, "--json") as run:
        run.wait_for_line('"step": 3,')
        pid = run.result().event("generation")["workers"]["stage1"]["pid"]
        os.kill(pid, signal.SIGKILL)
        result = run.wait()
    assert result.code == 0, result.err
    assert len([each for each in result.events if each["event"] == "generation"]) == 2
    assert losses(result) == losses(whole)


def test_devices_that_cannot_be_opened_use_the_host_and_say_so(job: JobFolder) -> None:
    config = configured(job, "pretend:0", "pretend:1", "pretend:2", "pretend:3", more="steps = 2\n")
    with pretending(PRETEND_CLOSED="1"):
        result = rpcmp("drive", config, "--json")
    assert result.code == 0, result.err
    texts = [event["text"] for event in result.events if event["event"] == "log"]
    about = [text for text in texts if "[transfer] direct: tensors of" in text]
    assert len(about) == 3  # each of the readers, of which there is one a stage but the first
    assert all("memory of the host: RuntimeError: this device is closed" in each for each in about)
    plain = rpcmp("drive", config, "--json", "--set", "transfer.direct=false")
    assert losses(result) == losses(plain)
