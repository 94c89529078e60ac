"""A language model that is built of a config, as those of nanoGPT and Hugging Face are."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Config:
    """The sizes of a ``Decoder``."""

    vocab_size: int = 23
    hidden_size: int = 8
    intermediate_size: int = 16
    num_attention_heads: int = 2
    num_hidden_layers: int = 2
    max_position_embeddings: int = 16
    layer_types: list[str] = field(default_factory=lambda: ["near", "far"])


class Attention(nn.Module):
    """Causal attention, which remembers keys and values by the number of its layer.

    As wide as ``config`` says its heads are, or else as the stream; ``near`` sees one token back.
    """

    def __init__(self, config: Config, layer_idx: int):
        super().__init__()
        self.layer_idx, self.num_heads = layer_idx, config.num_attention_heads
        width = config.hidden_size // config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", width)
        inner, self.window = self.num_heads * self.head_dim, config.layer_types[layer_idx] == "near"
        self.q, self.k, self.v = (nn.Linear(config.hidden_size, inner) for _ in range(3))
        self.o = nn.Linear(inner, config.hidden_size)

    def forward(self, x: Tensor, cache: list[Any]) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if cache[self.layer_idx] is not None:
            past = cache[self.layer_idx]
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        cache[self.layer_idx] = k, v
        distance = torch.arange(k.shape[2])[-q.shape[2] :, None] - torch.arange(k.shape[2])
        mask = (distance >= 0) & (distance < (2 if self.window else k.shape[2]))
        return self.o(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__()
        self.attention = Attention(config, layer_idx)
        self.norms = nn.ModuleList(nn.RMSNorm(config.hidden_size) for _ in range(2))
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, cache: list[Any]) -> Tensor:
        x = x + self.attention(self.norms[0](x), cache)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """As many of its layers as ``config`` says; ``cache`` holds what came before the tokens."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, tokens: Tensor, cache: list[Any] | None = None) -> Tensor:
        if cache is None:
            cache = [None] * self.config.num_hidden_layers
        x = self.embedding(tokens)
        for layer in self.layers[: self.config.num_hidden_layers]:
            x = layer(x, cache)
        return self.head(self.norm(x))
