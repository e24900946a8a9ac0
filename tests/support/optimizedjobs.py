"""A job that is to be completed with an optimizer, for tests/group and tests/cluster."""

from __future__ import annotations

JOB = """
    steps = 6
    loss = "zoo:token_loss"
    num_microbatches = 3
    max_grad_norm = 0.5
    tied = [["embed.weight", "head.weight"]]
    [model]
    layers = "zoo:language"
    balance = [1, 2, 1]
    MORTAL
    [data]
    train = "zoo:tokens"
    batch_size = 12
    [checkpoint]
    dir = "saved"
    every_steps = 2
    [optimizer]
"""

GROUPS = """
    callable = "torch.optim:AdamW"
    kwargs = { lr = 0.01 }
    groups = [
        { match = ["*.bias"], weight_decay = 0.0 },
        { match = ["embed.*", "mix.weight"], lr = 0.03 },
    ]
    [scheduler]
    callable = "torch.optim.lr_scheduler:StepLR"
    kwargs = { step_size = 2 }
"""

OPTIMIZERS = {
    "MyOpt": 'callable = "ownoptimizers:MyOpt"',
    "Noisy": 'callable = "ownoptimizers:Noisy"',
    "SOAP": 'callable = "pytorch_optimizer:SOAP"',
    "groups": GROUPS,
}
