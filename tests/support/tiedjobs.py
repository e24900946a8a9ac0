"""A language model with one weight in two stages, for tests/group and tests/cluster."""

from __future__ import annotations

BODY = """
    steps = 6
    schedule = "zero-bubble"
    loss = "zoo:token_loss"
    num_microbatches = 3
    max_grad_norm = 0.5
    tied = [["embed.weight", "head.weight"]]
    optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.01 } }
    [model]
    layers = "zoo:language"
    balance = [1, 2, 1]
    [data]
    train = "zoo:tokens"
    batch_size = 12
"""

REPLICAS = "\n[[stages]]\nreplicas = 2\n[[stages]]\n[[stages]]\nreplicas = 2\n"
