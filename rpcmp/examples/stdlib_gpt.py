"""A small GPT that learns to write Python from the source of Python's own standard library.

The text is on every machine that has Python, so nothing is downloaded. A token is a character, or
four spaces, so no tokenizer is needed. The blocks are all alike, and have nearly all of the 3.2
million parameters and of the computing time, so the model divides evenly over 2 or 4 stages.
"""

import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

CONTEXT = 64  # tokens in a window, which is all that the model sees
INDENT = "    "  # one token, a tab, since most of a window would be blank otherwise
ALPHABET = "\n\t" + "".join(map(chr, range(ord(" "), ord("~") + 1)))  # a token is an index in it
VOCABULARY = len(ALPHABET)
MAX_CHARACTERS = 4_000_000  # of the text
TRAINING_SHARE = 0.9  # of the text, from its start; the rest is the test split
PROMPT = 'def read(self, size=-1):\n    """Read at most size bytes and return them."""\n    if '


# The model: vectors travel from layer to layer as (N, T, width) float32, N windows of T tokens.


def layers(
    blocks: int = 4, width: int = 256, heads: int = 4, dropout: float = 0.1
) -> list[tuple[str, Callable[[], nn.Module]]]:
    """Return the model's layers in order, each a name and a factory: embedding, block0, ..., head.

    Input: tokens `(N, T)` int64, T at most `CONTEXT`. Output: for each place the logits of the
    token after it, `(N, T, VOCABULARY)` float32.
    """
    return [
        ("embedding", lambda: Embedding(width, dropout)),
        *((f"block{index}", lambda: Block(width, heads, dropout)) for index in range(blocks)),
        ("head", lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))),
    ]


class Embedding(nn.Module):
    """From tokens `(N, T)` int64 to vectors: embeddings plus positional encodings."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(waves(CONTEXT, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.positions[: tokens.shape[1]]
        vectors: Tensor = self.dropout(self.characters(tokens) + places)
        return vectors


def waves(length: int, width: int) -> Tensor:
    """Return sines and cosines of `length` positions, `(length, width)` float32, fast to slow.

    Positions are learned, but a start from waves rather than noise makes "one place back" the same
    rotation everywhere, and attention finds it much sooner.
    """
    speeds = length ** -torch.linspace(0, 1, width // 2)
    angles = torch.arange(length).unsqueeze(1) * speeds
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Block(nn.Module):
    """From vectors to vectors: attention over all of them, then an MLP on each."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.LayerNorm(width),
            SelfAttention(width, heads, dropout),
            nn.Dropout(dropout),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        gathered: Tensor = vectors + self.attention(vectors)
        finished: Tensor = gathered + self.mlp(gathered)
        return finished


class SelfAttention(nn.Module):
    """Causal self-attention with several heads, from vectors to vectors."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.project = nn.Linear(width, 3 * width)
        self.combine = nn.Linear(width, width)

    def forward(self, vectors: Tensor) -> Tensor:
        by_head = self.project(vectors).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = by_head.unbind(2)  # each (N, heads, T, width / heads)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        combined: Tensor = self.combine(mixed.transpose(1, 2).flatten(2))
        return combined


# The text.


def dataset(split: str, windows: int) -> TensorDataset:
    """Return `windows` windows, evenly spread over one split of the text, "train" or "test".

    Each item is the tokens of a window, and as the target the token after each; both are
    `(CONTEXT,)` int64.
    """
    tokens = library_tokens()
    boundary = int(TRAINING_SHARE * len(tokens))
    parts = {"train": tokens[:boundary], "test": tokens[boundary:]}
    if split not in parts:
        raise ValueError(f"no split {split!r}: choose one of {', '.join(parts)}")
    part = parts[split]
    starts = torch.linspace(0, len(part) - CONTEXT - 1, windows, dtype=torch.float64).long()
    stretches = part[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)]
    return TensorDataset(stretches[:, :-1], stretches[:, 1:])


@cache
def library_tokens() -> Tensor:
    """Return the text `(L,)` int64: the library's public top-level modules, from A to Z."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(folder.glob("[a-z]*.py"))
    if not modules:
        raise FileNotFoundError(f"this Python has no source of its standard library in {folder}")
    text = "".join(module.read_text(encoding="utf-8", errors="replace") for module in modules)
    return encode(text[:MAX_CHARACTERS])


def encode(text: str) -> Tensor:
    """Return tokens `(L,)` int64; unknown characters become question marks."""
    tokens = {character: token for token, character in enumerate(ALPHABET)}
    characters = text.replace(INDENT, "\t")
    return torch.tensor([tokens.get(character, tokens["?"]) for character in characters])


def decode(tokens: Tensor) -> str:
    """Return the text of tokens `(L,)` int64."""
    return "".join(ALPHABET[token] for token in tokens.tolist()).replace("\t", INDENT)


# The loss, a metric, and a sample of text.


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats.

    `outputs` are logits `(N, T, VOCABULARY)` float32, `targets` tokens `(N, T)` int64.
    """
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def entropy_ratio(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss divided by the unigram entropy; same arguments as `loss`.

    A model that knows only how often each token occurs has 1.0.
    """
    return loss(outputs, targets) / unigram_entropy()


@cache
def unigram_entropy() -> float:
    """Return the entropy in nats of single tokens in the whole text."""
    tokens = library_tokens()
    shares = tokens.bincount().double() / len(tokens)
    return float(torch.special.entr(shares).sum())


def sample(
    predict: Callable[[Tensor], Tensor],
    prompt: str = PROMPT,
    length: int = 120,
    temperature: float = 0.7,
    seed: int = 0,
) -> str:
    """Continue the prompt by `length` tokens, and return both.

    `predict` is the trained model, from tokens `(1, CONTEXT)` int64 to logits
    `(1, CONTEXT, VOCABULARY)`. It is called once per token.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = encode(prompt)
    for _ in range(length):
        seen = tokens[-CONTEXT:]
        window = functional.pad(seen, (0, CONTEXT - len(seen)))  # causal: padding is unseen
        logits = predict(window.unsqueeze(0))[0, len(seen) - 1]
        chances = (logits / temperature).softmax(dim=-1)
        tokens = torch.cat([tokens, chances.multinomial(1, generator=generator)])
    return decode(tokens)
