"""One ordinary module per environment, trained in a Python loop: slow, but obviously correct.

Tests compare the tensor program with this oracle, which shares none of its layers, backends and
optimizers. It only reads names from its data structures, to copy initial parameters from a stack.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.mlp import MlpHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import BLUEPRINTS, Style
from esper.tolaria.stores import Stack


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm; the number of groups doubles up to 32 while each keeps at least 16 channels."""
    groups = 1
    while groups < 32 and channels % (2 * groups) == 0 and channels // (2 * groups) >= 16:
        groups *= 2
    return nn.GroupNorm(groups, channels)


def conv(inputs: int, outputs: int, kernel: int, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)


class Norm(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.norm = group_norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale) * (self.norm(x) - x)


class Attention(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.squeeze = nn.Linear(channels, max(1, channels // 4), bias=False)
        self.excite = nn.Linear(max(1, channels // 4), channels)

    def forward(self, x: Tensor) -> Tensor:
        squeezed = F.relu(self.squeeze(x.mean((2, 3))))
        return x * self.excite(squeezed)[:, :, None, None]


class SingleConv(nn.Module):
    def __init__(self, channels: int, kernel: int):
        super().__init__()
        self.norm, self.conv = group_norm(channels), conv(channels, channels, kernel)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(self.norm(x)))


class ConvHeavy(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.widen = conv(channels, 4 * channels, 3)
        self.norm = group_norm(4 * channels)
        self.narrow = conv(4 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.relu(self.norm(self.widen(x))))


class Depthwise(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.depthwise = conv(channels, channels, 3, groups=channels)
        self.norm = group_norm(channels)
        self.pointwise = conv(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(F.relu(self.norm(self.depthwise(x))))


class Bottleneck(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        width = max(8, channels // 4)
        self.norm = group_norm(channels)
        self.down = conv(channels, width, 1)
        self.conv = conv(width, width, 3)
        self.up = conv(width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.relu(self.conv(F.relu(self.down(self.norm(x))))))


class Perceptron(nn.Module):
    def __init__(self, channels: int, factor: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.widen = nn.Linear(channels, factor * channels)
        self.narrow = nn.Linear(factor * channels, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        f = self.narrow(F.relu(self.widen(self.norm(x.flatten(1)))))
        return f[:, :, None, None]


class NewChannels(nn.Module):
    """Channels for a convolution, on their way to what the next layer computes."""

    def __init__(self, host: CnnHost, block: int, factor: int):
        super().__init__()
        inputs, units, outputs = (host.image[2], *host.channels, host.classes)[block : block + 3]
        last, added = block + 1 == len(host.channels), factor * units
        self.pools, self.last = block < host.pools, last
        self.widen = conv(inputs, added, host.kernel)
        self.norm = group_norm(added)
        self.narrow = conv(added, outputs, 1 if last else host.kernel)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu(self.norm(self.widen(x)))
        if self.pools:
            wide = F.max_pool2d(wide, 2)
        if self.last:
            wide = wide.mean((2, 3), keepdim=True)
        return self.narrow(wide)


class NewUnits(nn.Module):
    """Units for consecutive linear maps, on their way to what the next one computes."""

    def __init__(self, host: MlpHost, block: int, factor: int, maps: int = 1):
        super().__init__()
        pixels = host.image[0] * host.image[1] * host.image[2]
        inputs, *widths = (pixels, *host.widths, host.classes)[block:]
        self.maps = ["", *map(str, range(1, maps))]
        for name, width in zip(self.maps, widths, strict=False):
            self.add_module(f"widen{name}", nn.Linear(inputs, factor * width, bias=False))
            self.add_module(f"norm{name}", group_norm(factor * width))
            inputs = factor * width
        self.narrow = nn.Linear(inputs, widths[maps], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for name in self.maps:
            x = F.relu(getattr(self, f"norm{name}")(getattr(self, f"widen{name}")(x)))
        return self.narrow(x)[:, :, None, None]


NEW_CHANNELS = {"conv_small": 1, "conv_heavy": 3}
NEW_UNITS = {"mlp_small": 1, "mlp": 3}


def new_units(host: Host, slot: str, blueprint: str) -> nn.Module:
    """The branch of a seed in a slot that spans a layer, or all of them."""
    if slot == "wide_all":
        return NewUnits(host, 0, 2 * NEW_UNITS[blueprint] + 1, len(host.widths))
    block = int(slot.removeprefix("wide"))
    if isinstance(host, MlpHost):
        return NewUnits(host, block, NEW_UNITS[blueprint])
    return NewChannels(host, block, NEW_CHANNELS[blueprint])


class Gate(nn.Module):
    """A gate in (0, 1) for each image."""

    def __init__(self, channels: int):
        super().__init__()
        width = max(8, channels // 4)
        self.hidden, self.out = nn.Linear(channels, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.out(F.relu(self.hidden(x.mean((2, 3))))))
        return gate[:, :, None, None]


def positions(x: Tensor) -> Tensor:
    """``[B, C, 1, T]`` as ``[B, T, C]``."""
    return x[:, :, 0].transpose(1, 2)


def pixels(x: Tensor) -> Tensor:
    """The inverse of ``positions``."""
    return x.transpose(1, 2)[:, :, None]


class SequenceNorm(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale) * (pixels(self.norm(positions(x))) - x)


class LowRank(nn.Module):
    def __init__(self, channels: int, rank: int):
        super().__init__()
        self.down = nn.Linear(channels, rank, bias=False)
        self.up = nn.Linear(rank, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return pixels(self.up(self.down(positions(x))))


class SelfAttention(nn.Module):
    """Causal attention, one position at a time: scores, softmax over the past, weighted sum."""

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.joint = nn.Linear(channels, 3 * channels, bias=False)
        self.out = nn.Linear(channels, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        queries, keys, values = (p.chunk(self.heads, 2) for p in self.joint(x).chunk(3, 2))
        for query, key, value in zip(queries, keys, values, strict=True):
            rows = []
            for t in range(x.shape[1]):
                past = slice(0, t + 1)
                score = (key[:, past] * query[:, t : t + 1]).sum(2) / query.shape[2] ** 0.5
                rows.append((score.softmax(1)[:, :, None] * value[:, past]).sum(1))
            parts.append(torch.stack(rows, 1))
        return self.out(torch.cat(parts, 2))


class SequenceAttention(SelfAttention):
    def __init__(self, channels: int):
        heads = 4 if channels % 4 == 0 else 2 if channels % 2 == 0 else 1
        super().__init__(channels, heads)
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return pixels(super().forward(self.norm(positions(x))))


class SequencePerceptron(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return pixels(self.narrow(F.relu(self.widen(self.norm(positions(x))))))


class SequenceGate(Gate):
    """A gate in (0, 1) for each position."""

    def forward(self, x: Tensor) -> Tensor:
        return pixels(torch.sigmoid(self.out(F.relu(self.hidden(positions(x))))))


CONV_BRANCHES: dict[str, Callable[[int], nn.Module]] = {
    "norm": Norm,
    "attention": Attention,
    "conv_small": partial(SingleConv, kernel=1),
    "conv_light": partial(SingleConv, kernel=3),
    "conv_heavy": ConvHeavy,
    "depthwise": Depthwise,
    "bottleneck": Bottleneck,
}

MLP_BRANCHES: dict[str, Callable[[int], nn.Module]] = {
    "mlp_small": partial(Perceptron, factor=2),
    "mlp": partial(Perceptron, factor=4),
}

SEQUENCE_BRANCHES: dict[str, Callable[[int], nn.Module]] = {
    "norm": SequenceNorm,
    "attention": SequenceAttention,
    "lora": partial(LowRank, rank=8),
    "lora_large": partial(LowRank, rank=32),
    "mlp_small": partial(SequencePerceptron, factor=2),
    "mlp": partial(SequencePerceptron, factor=4),
}

FAMILIES = {"conv": CONV_BRANCHES, "mlp": MLP_BRANCHES, "sequence": SEQUENCE_BRANCHES}


class NaiveSeed(nn.Module):
    """A branch, its gate if the style has one, and its combination with the activation."""

    def __init__(
        self, host: Host, blueprint: str, style: Style, slot: SlotSpec, alpha: float, frozen: bool
    ):
        super().__init__()
        if slot.name.startswith("wide"):
            self.branch = new_units(host, slot.name, blueprint)
        else:
            self.branch = FAMILIES[slot.family][blueprint](slot.channels)
        gate = SequenceGate if slot.family == "sequence" else Gate
        self.gate = gate(slot.channels) if style is Style.GATED_GATE else None
        self.blueprint, self.style, self.alpha, self.frozen = blueprint, style, alpha, frozen

    def contribution(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        """The term added to ``x`` at alpha 1, of a branch that reads ``source`` or else ``x``."""
        f = self.branch(x if source is None else source)
        if self.style is Style.LINEAR_MULTIPLY:
            return x * torch.tanh(f)
        return f if self.gate is None else self.gate(x) * f

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        if self.alpha == 0.0:
            # Straight-through: the value is x, the branch gets the gradient of an addition.
            branch = self.contribution(x.detach(), None if source is None else source.detach())
            return x + (branch - branch.detach())
        return x + self.alpha * self.contribution(x, source)

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the layouts of the store."""
        names = dict(self.branch.named_parameters())
        if self.gate is not None:
            names |= {f"gate.{name}": p for name, p in self.gate.named_parameters()}
        return names

    def load(self, slot: SlotSpec, row: Tensor) -> None:
        """Load the parameters from one row of the slot's store."""
        kind = BLUEPRINTS.index(self.blueprint)
        views = slot.layouts[kind].views(row[None])
        views |= slot.gate_layout.views(row[None, slot.gate_offset :])
        _copy(self.named(), views, 0)


class NaiveHost(nn.Module):
    """Base class of all host modules: ``norm0``, ``norm1``, ... and a linear head."""

    spec: Host
    blocks: int

    def statistics(self) -> dict[str, Tensor]:
        """BatchNorm's running statistics by their names in the buffer layout."""
        found = {}
        for block in range(self.blocks):
            norm = getattr(self, f"norm{block}")
            found[f"norm{block}.mean"] = norm.running_mean
            found[f"norm{block}.variance"] = norm.running_var
        return found

    def load(self, stack: Stack, row: int) -> None:
        """Load parameters and statistics from one row of the store."""
        _copy(dict(self.named_parameters()), self.spec.layout.views(stack.host), row)
        _copy(self.statistics(), self.spec.buffers.views(stack.buffers), row)


class NaiveCnn(NaiveHost):
    """Blocks of convolution, BatchNorm, ReLU and optional pool; mean over pixels; linear head."""

    def __init__(self, spec: CnnHost):
        super().__init__()
        self.spec, self.blocks, self.pools = spec, len(spec.channels), spec.pools
        inputs = spec.image[2]
        for block, channels in enumerate(spec.channels):
            self.add_module(f"conv{block}", conv(inputs, channels, spec.kernel))
            self.add_module(f"norm{block}", nn.BatchNorm2d(channels))
            inputs = channels
        self.head = nn.Linear(inputs, spec.classes)

    def forward(self, x: Tensor, seeds: dict[str, NaiveSeed]) -> Tensor:
        sources = {}
        for block in range(self.blocks):
            sources[block] = x
            x = getattr(self, f"conv{block}")(x)
            if f"wide{block - 1}" in seeds:
                x = seeds[f"wide{block - 1}"](x, sources[block - 1])
            x = F.relu(getattr(self, f"norm{block}")(x))
            if f"r0c{block}" in seeds:
                x = seeds[f"r0c{block}"](x)
            if block < self.pools:
                x = F.max_pool2d(x, 2)
                if f"r1c{block}" in seeds:
                    x = seeds[f"r1c{block}"](x)
        return _with_last_units(self.head(x.mean((2, 3))), sources, seeds)


class NaiveMlp(NaiveHost):
    """Blocks of linear, BatchNorm, ReLU; linear head. Seeds get features as channels of a pixel."""

    def __init__(self, spec: MlpHost):
        super().__init__()
        self.spec, self.blocks = spec, len(spec.widths)
        height, width, channels = spec.image
        inputs = height * width * channels
        for block, features in enumerate(spec.widths):
            self.add_module(f"linear{block}", nn.Linear(inputs, features, bias=False))
            self.add_module(f"norm{block}", nn.BatchNorm1d(features))
            inputs = features
        self.head = nn.Linear(inputs, spec.classes)

    def forward(self, x: Tensor, seeds: dict[str, NaiveSeed]) -> Tensor:
        x = x.permute(0, 2, 3, 1).flatten(1)
        sources = {}
        for block in range(self.blocks):
            sources[block] = x
            x = getattr(self, f"linear{block}")(x)
            if f"wide{block - 1}" in seeds:
                seed = seeds[f"wide{block - 1}"]
                x = seed(x[:, :, None, None], sources[block - 1])[:, :, 0, 0]
            x = F.relu(getattr(self, f"norm{block}")(x))
            if f"r0c{block}" in seeds:
                x = seeds[f"r0c{block}"](x[:, :, None, None])[:, :, 0, 0]
        return _with_last_units(self.head(x), sources, seeds)


def _with_last_units(
    logits: Tensor, sources: dict[int, Tensor], seeds: dict[str, NaiveSeed]
) -> Tensor:
    for name, block in ((f"wide{max(sources)}", max(sources)), ("wide_all", 0)):
        if name in seeds:
            logits = seeds[name](logits[:, :, None, None], sources[block])[:, :, 0, 0]
    return logits


class NaiveGpt(NaiveHost):
    """Bytes ``[B, 1, 1, T]`` to logits ``[B * T, classes]``: embedding, layers, shared head."""

    def __init__(self, spec: TransformerHost):
        super().__init__()
        self.spec, self.blocks, self.layers = spec, 0, spec.layers
        self.byte = nn.Embedding(spec.classes, spec.width)
        self.position = nn.Embedding(spec.context, spec.width)
        for layer in range(1, spec.layers + 1):
            if spec.heads:
                attention = SelfAttention(spec.width, spec.heads)
                attention.norm = nn.LayerNorm(spec.width)
                self.add_module(f"attention{layer}", attention)
            perceptron = nn.Module()
            perceptron.norm = nn.LayerNorm(spec.width)
            perceptron.widen = nn.Linear(spec.width, 4 * spec.width, bias=False)
            perceptron.narrow = nn.Linear(4 * spec.width, spec.width, bias=False)
            self.add_module(f"perceptron{layer}", perceptron)
        self.head = nn.Module()
        self.head.norm = nn.LayerNorm(spec.width)

    def forward(self, x: Tensor, seeds: dict[str, NaiveSeed]) -> Tensor:
        x = self.byte(x[:, 0, 0].long()) + self.position.weight
        for layer in range(self.layers):
            if self.spec.heads:
                attention = getattr(self, f"attention{layer + 1}")
                x = x + attention(attention.norm(x))
            perceptron = getattr(self, f"perceptron{layer + 1}")
            x = x + perceptron.narrow(F.gelu(perceptron.widen(perceptron.norm(x))))
            if f"r0c{layer}" in seeds:
                x = positions(seeds[f"r0c{layer}"](pixels(x)))
        return (self.head.norm(x) @ self.byte.weight.T).flatten(0, 1)


def naive_host(spec: Host) -> NaiveHost:
    """The module of one host."""
    if isinstance(spec, TransformerHost):
        return NaiveGpt(spec)
    return NaiveMlp(spec) if isinstance(spec, MlpHost) else NaiveCnn(spec)


@dataclass
class NaiveEnvironment:
    """One host, its seeds by slot name, and one optimizer for each."""

    host: NaiveHost
    seeds: dict[str, NaiveSeed]
    host_rate: float
    seed_rates: dict[str, float]
    weight_decay: float
    max_norm: float
    momentum: float | None = None
    losses: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)

    # Made where one trains: most environments only score.
    @cached_property
    def host_optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer(self.host, self.host_rate, self.weight_decay)

    @cached_property
    def seed_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        rates = self.seed_rates
        return {n: self._optimizer(seed, rates[n], 0.0) for n, seed in self.seeds.items()}

    def _optimizer(
        self, module: nn.Module, rate: float, weight_decay: float
    ) -> torch.optim.Optimizer:
        if self.momentum is not None:
            return torch.optim.SGD(
                module.parameters(), lr=rate, momentum=self.momentum, weight_decay=weight_decay
            )
        return torch.optim.AdamW(
            module.parameters(), lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay
        )

    def train(self, images: Tensor, labels: Tensor) -> None:
        """Train on one minibatch: images ``[B, C, H, W]``, labels ``[B]`` or ``[B, T]``."""
        labels = labels.flatten()
        self.host.train()
        self.host.zero_grad()
        for seed in self.seeds.values():
            seed.zero_grad()
        logits = self.host(images, self.seeds)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        self.losses.append(loss.item())
        self.hits.append((logits.argmax(1) == labels).double().mean().item())

        self.host_norm = clip_grad_norm_(self.host.parameters(), self.max_norm).item()
        self.host_optimizer.step()
        self.tensor_norms = {
            name: {n: p.grad.norm().item() for n, p in seed.named().items()}
            for name, seed in self.seeds.items()
        }
        self.seed_norms = {}
        for name, seed in self.seeds.items():
            self.seed_norms[name] = clip_grad_norm_(seed.parameters(), self.max_norm).item()
            if not seed.frozen:
                self.seed_optimizers[name].step()

    @torch.no_grad()
    def score(
        self, images: Tensor, labels: Tensor, without: tuple[str, ...] = ()
    ) -> tuple[float, float, float]:
        """Loss, accuracy and expected accuracy, without the seeds in some slots."""
        self.host.eval()
        labels = labels.flatten()
        kept = {name: seed for name, seed in self.seeds.items() if name not in without}
        logits = self.host(images, kept)
        probability = logits.softmax(1).gather(1, labels[:, None])[:, 0]
        return (
            F.cross_entropy(logits, labels).item(),
            (logits.argmax(1) == labels).double().mean().item(),
            probability.mean().item(),
        )


@torch.no_grad()
def _copy(into: dict[str, Tensor], views: dict[str, Tensor], row: int) -> None:
    for name, parameter in into.items():
        parameter.copy_(views[name][row])
