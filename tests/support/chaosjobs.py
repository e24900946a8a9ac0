"""Jobs of the chaos benchmark: one of each kind, small and slow enough to be hit in mid-step."""

from __future__ import annotations

from pathlib import Path

from tests.support import tiedjobs
from tests.support.processes import JobFolder

CHAIN = """
steps = 60
evaluate_every = 3
[model]
layers = "zoo:jittery"
kwargs = { milliseconds = 6.0 }
balance = [2, 2, 1]
[data]
train = "zoo:regression"
test = "zoo:regression"
batch_size = 10
"""

GRAPH = """
steps = 60
num_microbatches = 3
evaluate_every = 10
[metrics]
error = "zoo:error"
worst = "noisy:Worst"
[[stages]]
name = "first"
module = "noisy:Mortal"
kwargs = { marker = "" }
inputs = ["input.0", "input.1.noise"]
[[stages]]
name = "middle"
module = "zoo:Encoder"
[[stages]]
name = "last"
module = "noisy:Head"
inputs = ["middle", "input"]
[data]
train = { callable = "noisy:Noisy", kwargs = { witness = "/dev/null" } }
test = { callable = "noisy:Noisy", kwargs = { witness = "/dev/null", samples = 13 } }
batch_size = 7
at = "stage"
num_workers = 1
"""

REPLICAS = """
steps = 120
num_microbatches = 5
max_grad_norm = 0.5
optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.01 } }
scheduler = { callable = "torch.optim.lr_scheduler:StepLR", kwargs = { step_size = 9 } }
[model]
layers = "zoo:mlp"
balance = [2, 2]
[data]
train = "zoo:regression"
batch_size = 25
num_workers = 1
[[stages]]
replicas = 2
shares = [3, 1]
[[stages]]
"""

TIED = tiedjobs.BODY.replace("steps = 6", "steps = 120") + 'test = "zoo:tokens"\n'

MIXED = """
steps = 60
num_microbatches = 2
autocast = "float16"
loss_scaling = { initial = 35000.0, growth_interval = 5 }
optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 0.01, momentum = 0.9 } }
[model]
layers = "zoo:mlp"
balance = [2, 1, 1]
[data]
train = "zoo:regression"
batch_size = 10
"""

JOBS = {"chain": CHAIN, "graph": GRAPH, "replicas": REPLICAS, "tied": TIED, "mixed": MIXED}

CHECKPOINTS = '[checkpoint]\ndir = "saved"\nevery_steps = 5\n'

WORKERS = {"replicas": [(0, 0), (0, 1), (1, 0)]}
"""Stage and replica of each worker, for jobs that are no three stages."""


def workers_of(job: str) -> list[tuple[int, int]]:
    return WORKERS.get(job, [(0, 0), (1, 0), (2, 0)])


def write(job: str, folder: Path, saves: bool) -> Path:
    """Write a job and its models to a new folder; return the path of its config."""
    return JobFolder(folder).config(JOBS[job] + (CHECKPOINTS if saves else ""))
