"""Grow a language model in a loop of your own: `python examples/own_transformer.py`."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import esper

CONTEXT = 32


class Model(nn.Module):
    """Characters in, logits of the next character out; embedding and head share their weights."""

    def __init__(self, vocabulary, width=32, depth=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embedding(tokens) + self.position[:length]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return {"logits": self.head(self.norm(x))}


def text():
    """A page of this repository as indices of characters: training, validation, how many kinds."""
    words = (Path(__file__).parents[1] / "docs" / "lifecycle.md").read_text()
    known = sorted(set(words))
    found = torch.tensor([known.index(letter) for letter in words])
    cut = int(0.9 * len(found))
    return found[:cut], found[cut:], len(known)


def windows(characters, starts):
    picked = torch.stack([characters[i : i + CONTEXT + 1] for i in starts])
    return picked[:, :-1], picked[:, 1:]


def loss_of(model, tokens, following):
    logits = model(tokens)["logits"]
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def main(epochs=30, batches=20):
    torch.manual_seed(0)
    train, held_back, vocabulary = text()
    model = Model(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    validation = windows(held_back, range(0, len(held_back) - CONTEXT - 1, CONTEXT))

    def validate():
        return float(loss_of(model, *validation))

    growth = esper.Growth(
        model,
        optimizer,
        policy="rule",
        epochs=epochs,
        validate=validate,
        higher_is_better=False,
        example=validation[0][:8],
    )
    for _ in range(epochs):
        model.train()
        for _ in range(batches):
            starts = torch.randint(len(train) - CONTEXT - 1, (16,)).tolist()
            optimizer.zero_grad()
            loss = loss_of(model, *windows(train, starts))
            loss.backward()
            growth.clip(1.0)
            optimizer.step()
        growth.step(train_loss=loss.item())
    print(growth.seeds)
    return growth


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
