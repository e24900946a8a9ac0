"""That optimizers do without torch._dynamo, and that who compiles gets it whole.

What is deferred is a whole process's, so each of these has one of its own.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import sys, torch
from rpcmp import lazydynamo
def is_there():
    return "torch._dynamo.eval_frame" in sys.modules
def optimizer(kind=torch.optim.AdamW):
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3)
    found = kind(layer.parameters(), lr=0.1)
    def closure():
        found.zero_grad()
        loss = layer(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss
    return layer, found, closure
lazydynamo.defer()
"""


def told(code: str) -> list[str]:
    """The lines that `code` prints in a process that has deferred it."""
    command = [sys.executable, "-c", BEGIN + code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


EVERY_OPTIMIZER = """
kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)
         and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]
def bits():
    for kind in kinds:
        if kind in (torch.optim.SparseAdam, torch.optim.Muon):
            continue
        layer, found, closure = optimizer(kind)
        for _ in range(2):
            found.step(closure)
        state = found.state_dict()
        found.load_state_dict(state)
        found.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]}
                              ) if kind is not torch.optim.LBFGS else None
        yield kind.__name__, layer.weight.detach().numpy().tobytes()
"""


def test_every_optimizer_of_torch_steps_without_it_and_to_the_same_bits() -> None:
    code = """
without = dict(bits())
print(is_there())
import torch._dynamo.config
print(is_there(), len(without) > 10, dict(bits()) == without)
"""
    assert told(EVERY_OPTIMIZER + code) == ["False", "True", "True", "True"]


USES = [
    "import torch._dynamo as first; found = first.utils",
    "from torch._dynamo import utils as found",
    "import torch; found = torch._dynamo.utils",
    "import torch._dynamo.utils; import torch._dynamo.utils as found",
    "torch.compile(lambda: 1, backend='eager')(); found = torch._dynamo.utils",
]
STEP = "layer, made, step = optimizer(); made.step(step)"


@pytest.mark.parametrize(("use", "before"), [*zip(USES[:3], ["", STEP, STEP], strict=True)])
def test_whoever_asks_for_more_gets_the_real_one(use: str, before: str) -> None:
    """Each way of asking, before and after a step: tests/long/test_lazydynamo.py."""
    require_real(use, before)


def require_real(use: str, before: str) -> None:
    """Have `found` be real in a process that does one thing after the other."""
    code = f"""
{before}
print(is_there())
{use}
real = sys.modules["torch._dynamo"]
print(is_there(), torch._dynamo is real, type(real).__name__,
      found is sys.modules["torch._dynamo.utils"])
"""
    assert told(code) == ["False", "True", "True", "module", "True"]


def test_an_optimizer_that_was_made_before_is_kept_out_of_a_graph_that_is_made_later() -> None:
    """As with the real one: its zero_grad is no part of what is compiled."""
    code = """
layer, made, closure = optimizer()
made.step(closure)
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward
def both(x):
    y = x + 1
    made.zero_grad()
    return y * 2
print(torch.compile(both, backend=backend)(torch.ones(1)).item(), len(graphs))
"""
    assert told(code) == ["4.0", "2"]


def test_where_it_is_imported_already_it_stays() -> None:
    assert told("import torch._dynamo.utils; lazydynamo.defer(); print(is_there())") == ["True"]
