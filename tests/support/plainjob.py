"""The plain model of tests.zoo.plain, cut by hand, for tests/group and tests/cluster."""

from __future__ import annotations

STAGES = """
    steps = 3
    loss = "zoo:token_loss"
    tied = [["embed.weight", "head.weight"]]
    [optimizer]
    callable = "torch.optim:AdamW"
    kwargs = { lr = 0.01 }
    groups = [{ match = ["embed.*", "encoder.1.*", "*.bias"], weight_decay = 0.0 }]
    [data]
    train = "zoo:tokens"
    batch_size = 12
    [checkpoint]
    dir = "saved"
    every_steps = 3
    [[stages]]
    name = "words"
    module = "plain:Words"
    prefix = ""
    [[stages]]
    name = "middle"
    module = "plain:encoder"
    prefix = "encoder"
    [[stages]]
    name = "output"
    module = "plain:Head"
    inputs = ["words", "middle"]
    prefix = ""
"""
