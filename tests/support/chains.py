"""Jobs that are hard to cut without changing a bit, for tests/group and tests/cluster."""

from __future__ import annotations

SEQUENCE = """
schedule = "zero-bubble"
loss = "zoo:token_loss"
num_microbatches = 3
[model]
layers = "zoo:sequence"
balance = [2, 2, 2]
[data]
train = "zoo:tokens"
batch_size = 11
"""

PADDED = """
loss = "tokenized:token_loss"
loss_weight = "rpcmp.losses:tokens"
num_microbatches = 3
optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 1.0 } }
[model]
layers = "tokenized:tagger"
balance = [1, 2]
[data]
train = "tokenized:padded"
test = { callable = "tokenized:padded", kwargs = { samples = 23 } }
batch_size = 10
shuffle = false
[[stages]]
[[stages]]
"""
"""Micro-batches whose losses count different numbers of tokens, one of them none."""

CHAINS = {
    "residual blocks with dropout and batch normalization, one computed again, clipped": """
        num_microbatches = 3
        max_grad_norm = 0.5
        scheduler_interval = "step"
        optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.01 } }
        scheduler = { callable = "torch.optim.lr_scheduler:StepLR", kwargs = { step_size = 2 } }
        [model]
        layers = "zoo:mlp"
        balance = [1, 1, 2]
        [[stages]]
        [[stages]]
        recompute = true
        [[stages]]
    """,
    "layers in place and transposed, cut everywhere, 32 in flight": """
        schedule = "gpipe"
        num_microbatches = 32
        [model]
        layers = "zoo:in_place"
        balance = [1, 1, 1, 1]
        [data]
        train = "zoo:regression"
        batch_size = 33
    """,
    "tuples, dicts, integers and an unused output; a stage frozen, two with rules of their own": """
        loss_scope = "micro-batch"
        scheduler_interval = "step"
        optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 0.1, momentum = 0.9 } }
        scheduler = { callable = "torch.optim.lr_scheduler:StepLR", kwargs = { step_size = 2 } }
        [model]
        layers = "zoo:trees"
        balance = [1, 1, 1]
        [[stages]]
        optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.01 } }
        scheduler = "torch.optim.lr_scheduler:LinearLR"
        [[stages]]
        frozen = true
        [[stages]]
        optimizer = { lr = 0.01 }
        scheduler = { gamma = 0.5 }
    """,
    "a CNN with batch normalization, a weight that is used twice": """
        schedule = "zero-bubble"
        max_in_flight = 6
        num_microbatches = 5
        [model]
        layers = "zoo:cnn"
        balance = [1, 2, 3]
        [data]
        train = "zoo:regression"
        batch_size = 23
    """,
    "modes, Python's own generator, an epoch-wise scheduler that watches the loss, two threads": """
        scheduler = "torch.optim.lr_scheduler:ReduceLROnPlateau"
        [model]
        layers = "zoo:half_evaluating"
        num_stages = 2
        [[stages]]
        threads = 2
        [[stages]]
        threads = 2
        [data]
        train = "zoo:regression"
        batch_size = 25
    """,
    "an LSTM and a transformer over integers, a layer in place between them": SEQUENCE,
    "the same, all computed again": SEQUENCE.replace(
        "[data]", "[[stages]]\nrecompute = true\n" * 3 + "[data]"
    ),
}

GRAPH = """
    num_microbatches = 6
    loss = { callable = "torch.nn:MSELoss", kwargs = { reduction = "sum" } }
    optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 0.001, weight_decay = 0.1 } }
    [[stages]]
    name = "join"
    module = "zoo:Join"
    kwargs = { inputs = 4 }
    inputs = ["left", "root.left", "right", "input"]
    [[stages]]
    name = "root"
    module = "zoo:TwoHeads"
    inputs = ["input"]
    [[stages]]
    name = "left"
    module = "zoo:Encoder"
    kwargs = { scale = 2.0, inputs = 2 }
    inputs = ["root.left", "root.right"]
    [[stages]]
    name = "right"
    module = "zoo:Encoder"
    inputs = ["root.right"]
"""
