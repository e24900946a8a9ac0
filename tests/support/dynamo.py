"""Code for processes that report whether torch._dynamo is the real module."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

BEGIN = """
import inspect, json, os, sys, torch
from rpcmp.pipelining import lazy_dynamo
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
"""

DEFER = "lazy_dynamo.defer_dynamo()\n"


def output_of(code: str, *arguments: str) -> list[Any]:
    """Run code in a process; return its output, parsed as one JSON value per line."""
    command = [sys.executable, "-c", BEGIN + code, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


IMPORTS = [
    "import torch._dynamo as first; found = first.utils",
    "from torch._dynamo import utils as found",
    "import torch; found = torch._dynamo.utils",
    "import torch._dynamo.utils; import torch._dynamo.utils as found",
]

USES = [*IMPORTS, "torch.compile(lambda: 1, backend='eager')(); found = torch._dynamo.utils"]

STEP = "layer, made, step = optimizer(); made.step(step)"

BEFORE = ["", STEP]

ASK = """
{before}
print(json.dumps(is_there()))
{use}
real = sys.modules["torch._dynamo"]
print(json.dumps([is_there(), torch._dynamo is real, type(real).__name__,
                  found is sys.modules["torch._dynamo.utils"]]))
"""

REAL = [False, [True, True, "module", True]]
"""The output of ASK if the module is the real one."""


def require_real(use: str, before: str) -> None:
    """Fail unless `use` gets the real module in a process that ran `before`."""
    assert output_of(DEFER + ASK.format(before=before, use=use)) == REAL
