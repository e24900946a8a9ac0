"""Imported by the fork server: all that a worker imports sooner or later.

An optimizer imports the front end of `torch.compile` when it is first used, which takes a second.
Not with torch for GPUs: whether that touches their driver, which does not survive a fork, is not
promised anywhere.
"""

import torch

import rpcmp.worker.process  # noqa: F401

if torch.version.cuda is None and torch.version.hip is None:
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
