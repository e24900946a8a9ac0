"""Jobs for `tests.support.unequalhosts`, with steps of a part of a second there."""

from __future__ import annotations

from dataclasses import dataclass

JOB = """
steps = {steps}
loss = "{loss}"
num_microbatches = {microbatches}
optimizer = {{ callable = "torch.optim:SGD", kwargs = {{ lr = 0.001 }} }}
[model]
layers = "{layers}"
num_stages = 2
kwargs = {{ {sizes} }}
[data]
train = {{ callable = "{data}", kwargs = {{ {samples} }} }}
batch_size = {batch}
[log]
folder = ""
"""


@dataclass(frozen=True)
class Model:
    """A model and its data, as in JOB.

    Attributes:
        count: the number of its layers.
        has_equal_layers: whether the best cuts follow from the hosts' speeds.
    """

    count: int
    layers: str
    sizes: str
    data: str
    samples: str
    batch: int
    microbatches: int
    loss: str = "torch.nn:MSELoss"
    has_equal_layers: bool = True

    def job(self, steps: int) -> str:
        return JOB.format(steps=steps, **vars(self))


MODELS = {
    "transformer": Model(
        12,
        "rpcmp.tools.bench.models:transformer",
        "num_layers = 12, features = 192, heads = 4, hidden = 768",
        "rpcmp.tools.bench.models:sequences",
        "num_samples = 1024, length = 32, features = 192",
        batch=32,
        microbatches=8,
    ),
    "activations": Model(
        13,
        "kinds:convolutions",
        "channels = [16, 32, 64, 128], per_size = 3",
        "kinds:pictures",
        "samples = 1024",
        batch=128,
        microbatches=8,
        loss="torch.nn:CrossEntropyLoss",
        has_equal_layers=False,
    ),
    "small": Model(
        64,
        "kinds:small",
        "count = 64, features = 64",
        "rpcmp.tools.bench.models:vectors",
        "num_samples = 4096, features = 64",
        batch=512,
        microbatches=16,
    ),
}
"""One computes a lot, one has large activations at its beginning, one many small layers."""
