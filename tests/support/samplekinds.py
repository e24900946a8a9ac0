"""Jobs whose samples are more than pairs; the test adds the keys of `[data]`."""

from __future__ import annotations


def of_mapped(loss: str, reads: str) -> str:
    """Return a job whose samples are mappings; its first stage reads a part of a mapping."""
    return f"""
loss = "{loss}"
[[stages]]
module = "torch.nn:Linear"
kwargs = {{ in_features = 8, out_features = 8 }}
inputs = ["{reads}"]
[[stages]]
module = "torch.nn:Linear"
kwargs = {{ in_features = 8, out_features = 1 }}
[data]
train = "samples:Mapped"
test = "samples:Mapped"
"""


PADDED = """
loss = "zoo:token_loss"
[model]
layers = "samples:reading"
balance = [2, 1]
[data]
train = "samples:Texts"
collate = { callable = "samples:padded", kwargs = { value = 0 } }
sampler = { callable = "samples:ByLength", kwargs = { group = 15 } }
"""

MADE = {
    "dicts": of_mapped("samples:mapped_loss", "input.x"),
    "padded": PADDED,
    "mappings": of_mapped("tokenized:loss", "input.more.x") + 'collate = "tokenized:collate"',
    "weighted": """
[model]
layers = "zoo:mlp"
balance = [2, 2]
[data]
train = "zoo:regression"
sampler = "samples:weighted"
""",
    "itself": """
[[stages]]
module = "torch.nn:Linear"
kwargs = { in_features = 8, out_features = 16 }
[[stages]]
module = "torch.nn:Linear"
kwargs = { in_features = 16, out_features = 8 }
[data]
train = { callable = "torch:ones", kwargs = { size = [20, 8] } }
""",
}
