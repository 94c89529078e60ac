"""Modules with layers that share channels in every way that can be widened."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from own_modules import Gpt, ResidualNet, images, tokens


class GatedNet(nn.Module):
    """A depthwise convolution, a gate by squeeze and excitation (Hu et al., 2018) and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(1, 6, 1)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.squeeze, self.excite = nn.Linear(6, 2), nn.Linear(2, 6)
        self.project, self.head = nn.Conv2d(6, 5, 1), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6)[:, None, None])
        self.shift = nn.Parameter(torch.randn(1, 5, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.depthwise(self.expand(x)))) * self.scale
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3))))))
        return self.head((self.project(x * gate[:, :, None, None]) + self.shift).mean(dim=(-1, -2)))


class Tagger(nn.Module):
    """An LSTM with a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(9, 8), nn.LSTM(8, 6, batch_first=True)
        self.hidden, self.head = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.lstm(self.embedding(x))[0])))


class TiedReader(nn.Module):
    """An LSTM between an embedding and a head that share their table."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(9, 5), nn.LSTM(5, 5, batch_first=True)
        self.head = nn.Linear(5, 9)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(x))[0])


class Reader(nn.Module):
    """Two layers of gated units, whose last state decides."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 5, 2, bias=False), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.transpose(0, 1))[1][-1])


class Answers(nn.Module):
    """Packed words, read in both directions; a decoder that begins where another reader ends, and
    attends to its states word by word (Bahdanau et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.join = nn.Embedding(9, 4, padding_idx=0), nn.Linear(6, 5)
        self.both = nn.LSTM(4, 3, batch_first=True, bidirectional=True)
        self.encoder, self.decoder = nn.GRU(5, 5, batch_first=True), nn.GRU(8, 5, batch_first=True)
        self.key, self.query, self.score = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 1)
        self.start, self.head = nn.Embedding(2, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths, outputs = (x > 0).sum(1).clamp(min=1), list[Tensor]()
        packed = pack_padded_sequence(self.words(x), lengths, True, False)
        keys, state = self.encoder(
            torch.tanh(self.join(pad_packed_sequence(self.both(packed)[0], True)[0]))
        )
        for step in range(2):
            scores = self.score(torch.tanh(self.key(keys) + self.query(state.transpose(0, 1))))
            context = (scores.softmax(1) * keys).sum(1, keepdim=True)
            start = self.start(torch.full_like(x[:, :1], step))
            output, state = self.decoder(torch.cat([start, context], -1), state)
            outputs.append(self.head(output))
        return torch.cat(outputs, 1)


class Cells(nn.Module):
    """Cells that are called at each step; the second begins with what the first has written."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.LSTMCell(4, 3), nn.GRUCell(5, 3)
        self.between, self.head = nn.Linear(3, 5), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, output = None, None
        for step in x.unbind(1):
            state = self.inner(step, state)
            output = state[0] if output is None else output
            output = self.outer(torch.relu(self.between(state[0])), output)
        return self.head(output)


class BothWays(nn.Module):
    """Two layers of both directions, the states at the end and the maxima side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)
        self.norm, self.head = nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs, (states, _) = self.lstm(x)
        return self.head(self.norm(torch.cat([states[-2], states[-1], outputs.amax(1)], 1)))


class Mirror(nn.Module):
    """Adds to a stream what a layer makes of it and of its opposite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(8)
        self.inner, self.head = nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.head((y + self.inner(self.norm(torch.cat([y, -y], 1)).relu())).tanh())


class NormedSides(nn.Module):
    """Layers of both directions, normed together, and their flattened states again."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.norm = nn.GRU(4, 3, bidirectional=True), nn.LayerNorm(6)
        self.outer, self.head = nn.BatchNorm1d(36), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = self.norm(self.gru(x.transpose(0, 1))[0])
        return self.head(self.outer(states.transpose(0, 1).flatten(1)))


class Fields(nn.Module):
    """Words side by side as features, and what several slots see of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(9, 4), nn.Linear(28, 5)
        self.slots, self.value, self.head = nn.Linear(4, 3), nn.Linear(4, 6), nn.Linear(23, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        seen = self.slots(y).softmax(1).transpose(1, 2) @ torch.relu(self.value(y))
        return self.head(torch.cat([torch.relu(self.inner(y.flatten(1))), seen.flatten(1)], 1))


class Branches(nn.Module):
    """Two branches and the image itself side by side, with a norm and a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(1, 3, 1)
        self.norm, self.depthwise = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.join, self.head = nn.Conv2d(8, 5, 1), nn.Linear(5 + 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.left(x).relu(), x, self.right(x)], dim=1)
        y = self.join(self.depthwise(self.norm(both).relu()))
        return self.head(torch.cat((y, both), 1).amax((2, 3)))


class Dense(nn.Module):
    """Layers that each read what all before them wrote (Huang et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6 + 4 * i, 4) for i in range(3))
        self.head = nn.Linear(18, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([layer(x).relu(), x], -1)
        return self.head(x)


class Level(nn.Module):
    """A learned scale of each channel."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.level


class Resample(nn.Module):
    """A convolution that checks how many channels it is given and returns, each as many."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = self.out_channels = channels
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == self.channels
        x = self.conv(x)
        assert x.shape[1] == self.out_channels
        return x


class Attention(nn.Module):
    """Queries, keys and values from one layer each, cut into heads by a number of its own."""

    def __init__(
        self, width: int = 8, heads: int = 2, linear: Callable[..., nn.Module] = nn.Linear
    ) -> None:
        super().__init__()
        self.h, self.d_k = heads, width // heads
        self.linears = nn.ModuleList(linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(len(x), -1, self.h, self.d_k).transpose(1, 2)
            for layer in self.linears[:3]
        )
        weights = (q @ k.transpose(-2, -1) / self.d_k**0.5).softmax(-1)
        return self.linears[3]((weights @ v).transpose(1, 2).reshape(len(x), -1, self.h * self.d_k))


class InputWidth(Attention):
    """Heads whose width is that of the input by their number, as in many a tutorial."""

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            layer(x).view(batch, time, self.h, width // self.h).transpose(1, 2)
            for layer in self.linears[:3]
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.linears[3](y.transpose(1, 2).reshape(batch, time, width))


class Distances(nn.Module):
    """Layers that compute a number for each head of the distance between two positions."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        # As wide as the heads together, which their number must not follow.
        self.heads, self.seq_len = heads, 12
        self.first, self.last = nn.Linear(2, 5), nn.Linear(5, heads)

    def forward(self) -> Tensor:
        steps = torch.arange(7.0)
        distances = (steps[:, None] - steps) / self.seq_len
        distances = torch.stack([distances, distances.abs()], -1)
        return self.last(self.first(distances).relu()).view(7, 7, self.heads).permute(2, 0, 1)


class DistanceAttention(InputWidth):
    """Heads as wide as the input that know distances."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = Distances(2)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            layer(x).view(batch, time, self.h, width // self.h).transpose(1, 2)
            for layer in self.linears[:3]
        )
        weights = (q @ k.mT + self.distances()).softmax(-1)
        return self.linears[3]((weights @ v).transpose(1, 2).reshape(batch, time, width))


class Pointwise(nn.Module):
    """A linear layer of each time, written as a convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.map = nn.Conv1d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x.transpose(1, 2)).transpose(1, 2)


class FusedAttention(nn.Module):
    """All three from one layer, with the width of all heads in an attribute.

    Another number is as large as that of the heads, of which each has a learned level.
    """

    def __init__(self, linear: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.inner, self.dim_of_keys = 3, 4, 12, 3
        self.level = nn.Parameter(torch.ones(3, 1, 1))
        self.register_buffer("past", torch.ones(7, 7).tril().bool(), persistent=False)
        self.qkv, self.project = linear(8, 36, bias=False), linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for each in self.qkv(x).split(self.inner, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, self.past)
        y = y * self.level / self.dim_of_keys
        return self.project(y.transpose(1, 2).reshape(*x.shape[:2], self.inner))


class Windows(FusedAttention):
    """It adds a table of distances, looked up by a buffer, and what layers compute of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seq_len, self.token_dim = 12, 12
        self.table = nn.Parameter(torch.randn(13, 3))
        steps = torch.arange(7)
        self.register_buffer("index", steps[:, None] - steps + 6)
        self.distances = Distances(3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for each in self.qkv(x).split(self.inner, -1)
        )
        bias = self.table[self.index.view(-1)].view(7, 7, -1).permute(2, 0, 1).contiguous()
        weights = (q @ k.mT / self.seq_len + bias.unsqueeze(0) + self.distances()).softmax(-1)
        return self.project((weights @ v).transpose(1, 2).reshape(*x.shape[:2], self.token_dim))


class GroupedQueries(nn.Module):
    """Two heads of queries for one of keys and values, with rotary positions and a norm of each.

    Where keys come first, the layer that reads the heads is registered before all, as in Phi-3.
    """

    def __init__(self, keys_first: bool = False) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.keys_first = 4, 2, keys_first
        self.wq, self.wkv, self.wo = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        for name in ("wq", "wkv") if keys_first else ():
            setattr(self, name, self._modules.pop(name))
        self.norm = nn.RMSNorm(4)
        frequencies = torch.tensor([1.0, 0.1, 1.0, 0.1])
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        calls = [self.wkv, self.wq] if self.keys_first else [self.wq, self.wkv]
        outputs = {layer: layer(x) for layer in calls}
        q = self.norm(outputs[self.wq].view(batch, time, self.n_heads, 4))
        k, v = outputs[self.wkv].view(batch, time, 2, self.n_kv_heads, 4).unbind(2)
        angle = torch.arange(time)[:, None, None] * self.frequencies
        q, k = (
            each * angle.cos() + torch.cat([-each[..., 2:], each[..., :2]], -1) * angle.sin()
            for each in (q, k)
        )
        k, v = (each.repeat_interleave(2, 2) for each in (k, v))
        y = nn.functional.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)))
        return self.wo(y.transpose(1, 2).flatten(2))


class Paired(nn.Module):
    """A layer that computes values and their gates, or one of whose units the larger counts."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.both, self.out, self.function = nn.Linear(8, 12), nn.Linear(6, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.function(self.both(x)))


class Encoder(nn.Module):
    """A residual block around a module, with an MLP."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embedding, self.inner, self.norm = nn.Embedding(9, 8), inner, nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(x)
        y = y + self.inner(self.norm(y))
        return self.head((y + self.mlp(self.norm(y))).mean(1))


class Towers(nn.Module):
    """A layer that reads what two others wrote, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.both(self.left(x).relu()) * self.both(self.right(x).tanh()))


class Stacked(nn.Module):
    """Outputs of two layers, one behind the other in time."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.one(x), self.two(x)], dim=1).amax(1))


class Unet(nn.Module):
    """A map that is made smaller and larger again, with the larger one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inside = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 5, 2, 2)
        self.up = nn.ConvTranspose2d(5, 6, 2, 2)
        self.spread = nn.ConvTranspose2d(6, 6, 3, padding=1, groups=6)
        self.norm, self.join = nn.BatchNorm2d(6), nn.ConvTranspose2d(10, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        large = torch.relu(self.down(x))
        small = torch.relu(self.inside(large))
        again = torch.relu(self.norm(self.spread(self.up(small))))
        return self.join(torch.cat([again, large], 1)).mean((2, 3))


class Unrolled(nn.Module):
    """A cell that is called at each step, and a network that reads the first and the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.again = nn.Linear(4, 5), nn.Linear(5, 5)
        self.twin = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = [torch.tanh(self.inside(x[:, 0]))]
        for time in range(1, x.shape[1]):
            states.append(torch.tanh(self.inside(x[:, time]) + self.again(states[-1])))
        return self.head((self.twin(states[-1]) - self.twin(states[0])).abs())


def flattening() -> nn.Module:
    """Convolutions whose maps are flattened."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 4, 10),
    )  # fmt: skip


def sequences() -> nn.Module:
    """Convolutions along time."""
    return nn.Sequential(
        nn.Conv1d(1, 3, 5, stride=2), nn.BatchNorm1d(3), nn.ReLU(), nn.Conv1d(3, 4, 3), nn.SiLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 10),
    )  # fmt: skip


def spectral() -> nn.Module:
    """A layer behind one whose weight changes whenever it is read in training."""
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    return nn.Sequential(first, nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


class Conv1D(nn.Module):
    """A linear layer as GPT-2 has it at Hugging Face's, with the inputs first."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True):
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 4)
        self.bias = nn.Parameter(torch.full((outputs,), 0.1 * bias))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(x.size()[:-1] + (self.nf,))


class Weights(nn.Module):
    """Weights that are parameters: as they are, turned, scaled, and of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.slope = (nn.Parameter(torch.randn(4, n, 3) / 3) for n in (1, 4))
        self.first, self.bias = nn.Parameter(torch.randn(4, 5) / 2), nn.Parameter(torch.zeros(5))
        self.second, self.shift = (nn.Parameter(torch.randn(6, *n)) for n in ((5,), ()))
        self.last = nn.ParameterList(torch.randn(6, n) for n in (6, 3))
        self.mixture, self.gain = nn.Parameter(torch.randn(7, 7)), nn.Parameter(torch.ones(1) / 2)
        self.register_buffer("filter", torch.randn(7, 7))
        self.hidden = 5

    def forward(self, x: Tensor) -> Tensor:
        maps = F.conv1d((x @ self.filter)[:, None], self.kernel, padding=1).relu() @ self.mixture
        maps = maps + F.conv1d(maps, self.slope, padding=1).tanh()
        inner = (maps.mean(2) @ self.first + self.bias).view(-1, self.hidden).relu()
        inner = F.linear(inner, self.gain * self.second, self.shift).relu()
        inner = (inner @ self.last[0].T).relu()
        return torch.einsum("...c,co->...o", inner, self.last[1])


class Product(nn.Module):
    """A linear layer whose weight has the inputs first."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Experts(nn.Module):
    """Experts in one tensor, behind a norm: called in turn, and all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(3, *n) / 2) for n in ((6, 4), (4, 6)))
        self.first, self.second = (nn.Parameter(torch.randn(3, *n) / 2) for n in ((4, 5), (5, 4)))
        self.embed, self.norm, self.head = Product(6, 4), nn.RMSNorm(4), nn.Linear(4, 3)
        self.gate = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        stream = self.embed(x)
        normed = self.norm(stream)
        shares = (normed @ self.gate).softmax(-1)
        for i, share in enumerate(shares.unbind(-1)):
            inner = F.linear(normed, self.up[i]).relu()
            stream = stream + share[:, None] * F.linear(inner, self.down[i])
        inner = torch.einsum("bc,ech->beh", self.norm(stream), self.first).relu()
        outer = torch.bmm(inner.transpose(0, 1), self.second).transpose(0, 1)
        return self.head(stream + (shares[..., None] * outer).sum(1))


class Temporal(nn.Module):
    """A block of a temporal network (Bai et al., 2018), whose convolutions have weight norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (weight_norm(nn.Conv1d(4, 4, 3, padding=1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.conv2(self.conv1(x).relu())).relu()


def temporal() -> nn.Module:
    """Blocks behind a transposed convolution that has a weight norm, too."""
    first = weight_norm(nn.ConvTranspose1d(1, 4, 2), dim=1)
    blocks = nn.Sequential(Temporal(), Temporal())
    return nn.Sequential(first, nn.ReLU(), blocks, nn.Flatten(), nn.Linear(4 * 8, 3))


def decoder() -> nn.Module:
    """Transposed convolutions along time."""
    return nn.Sequential(
        nn.ConvTranspose1d(3, 4, 2, 2), nn.BatchNorm1d(4), nn.ReLU(),
        nn.ConvTranspose1d(4, 5, 3), nn.Tanh(), nn.Conv1d(5, 2, 1),
    )  # fmt: skip


def groups() -> nn.Module:
    """Convolutions in groups, one of which writes more than it reads, and a norm of maps."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3, groups=4), nn.ReLU(),
        nn.SyncBatchNorm(16), nn.Conv2d(16, 6, 1), nn.ConvTranspose2d(6, 3, 2, groups=3), nn.ReLU(),
        nn.Flatten(), nn.BatchNorm1d(3 * 25), nn.Linear(3 * 25, 3),
    )  # fmt: skip


def multilayer() -> nn.Module:
    """A perceptron with dropout."""
    return nn.Sequential(
        nn.Linear(6, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)
    )


def transformer() -> nn.Module:
    """A transformer of width 8 over patches of an image."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(5, 8), layers, nn.Flatten(), nn.Linear(8 * 4, 3))


class Patches(nn.Module):
    """A transformer of torch's layers over patches, with learned tokens, places and a query."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.token, self.query = (nn.Parameter(torch.randn(1, 1, 8)) for _ in range(2))
        self.places = nn.Parameter(torch.randn(1, 5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pool = nn.MultiheadAttention(8, 1, batch_first=True, bias=False)
        self.mixture, self.scale = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.ones(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1) + self.places
        x = self.mixture.softmax(-1) @ self.layers(x) * (self.scale * torch.ones(5, 1))
        return self.head(self.pool(self.query.expand(len(x), -1, -1), x, x)[0][:, 0])


class Numbers(nn.Module):
    """Tokens of numbers, each of which has a vector of its own, as in the FT-Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.slope = (nn.Parameter(torch.randn(6, 4)) for _ in range(3))
        layers = nn.LayerNorm(4), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4)
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(8, 3)
        self.beside = nn.Linear(24, 3)  # reads what no layer writes

    def forward(self, x: Tensor) -> Tensor:
        tokens, others = x[..., None] * self.weight + self.bias, x[..., None] * self.slope
        stream = torch.cat([tokens + self.layers(tokens), others], -1)
        return self.head(stream.mean(1)) + self.beside(others.flatten(1))


class Translator(nn.Module):
    """Torch's encoder and decoder of words, which end with a mask of what is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 8, padding_idx=0), nn.Embedding(7, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x) * 8**0.5 + self.places(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=y.dtype)
        y = self.transformer(y, y, None, mask, src_key_padding_mask=x == 0)
        return nn.functional.linear(y, self.words.weight)


class Masked(nn.Module):
    """A layer, an activation and a norm before the table of an embedding, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bias = nn.Embedding(9, 8), nn.Parameter(torch.zeros(9))
        self.first, self.last = nn.LayerNorm(8), nn.LayerNorm(8)
        self.inner, self.outer, self.transform = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 9)
        self.head.weight, self.head.bias = self.words.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        x = self.first(x + self.outer(self.inner(x).relu()))
        return self.head(self.last(self.transform(x).tanh()))


class OneMore(nn.Module):
    """An RMS norm that multiplies by one more than its weight, as Gemma's do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:]) * (1.0 + self.weight)


class Gemma(nn.Module):
    """Such a norm before the table of an embedding; the module itself holds the width."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.hidden_dim = nn.Embedding(9, 8), OneMore(), 8
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        stream = self.words(x).view(-1, x.shape[1], self.hidden_dim)
        return self.head(self.norm(stream + self.outer(self.inner(stream).relu())))


def words() -> Tensor:
    """Batch of sequences."""
    return torch.randint(9, (8, 7))


class CrossStage(nn.Module):
    """Half of the channels goes past a convolution (CSPNet, Wang et al., 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.inner = nn.Conv2d(1, 6, 3), nn.Conv2d(3, 4, 1)
        self.join, self.head = nn.Conv2d(7, 5, 1), nn.Linear(5, 3)
        self.groups = [3, 3]  # what a layer calls a number may be something else elsewhere

    def forward(self, x: Tensor) -> Tensor:
        past, through = self.expand(x).chunk(2, 1)
        return self.head(self.join(torch.cat([past, self.inner(through).relu()], 1)).mean((2, 3)))


class Scatter(nn.Module):
    """Sums over the edges of a graph, into zeros of the shape that the channels have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(6, 4), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, ends = self.inner(x).relu(), torch.arange(len(x)) // 2
        x = x.new_zeros(x.shape).scatter_add_(0, ends[:, None].expand_as(x), x)
        x = self.outer(x)
        return self.head(torch.zeros_like(x).index_add(0, ends, x.relu()))


class Scale(nn.Module):
    """A learned scale of each channel, behind a division by their mean square where ``norm``."""

    def __init__(self, channels: int, norm: bool = True) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.linspace(0.5, 1.5, channels)), norm
        self.normalized_shape = [channels] if norm else None

    def forward(self, x: Tensor) -> Tensor:
        size = x.square().mean(1, keepdim=True).add(1e-6).sqrt() if self.norm else 1.0
        shape = *(self.normalized_shape or [-1]), *[1] * (x.ndim - 2)
        return x / size * self.scale.view(shape)


def normed() -> nn.Module:
    """Norms of all channels: behind a layer, behind an activation, and written by hand."""
    return nn.Sequential(
        nn.Linear(6, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 5), nn.Tanh(), nn.RMSNorm(5),
        nn.Linear(5, 3), Scale(3), nn.ReLU(), nn.Linear(3, 6), Scale(6, norm=False),
        nn.Linear(6, 3),
    )  # fmt: skip


class Twice(nn.Module):
    """A norm of layers whose weights have norms, which is called behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = (
            weight_norm(nn.Linear(*n)) for n in ((6, 4), (4, 4), (4, 3))
        )
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.two(self.norm(self.one(x)).relu())).relu())


def normed_maps() -> nn.Module:
    """Convolutions behind which norms see all channels, of each pixel or of the map."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), Scale(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.GroupNorm(1, 6), nn.SiLU(),
        nn.Flatten(), nn.Linear(6 * 16, 3),
    )  # fmt: skip


class NormedReader(nn.Module):
    """An LSTM whose last state is normed."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm = nn.LSTM(4, 5), nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.lstm(x.transpose(0, 1))[0][-1]))


class Factors(nn.Module):
    """Products of the rows of two tables, and of one with the whole of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Embedding(9, 4), nn.Embedding(9, 4)
        self.levels = nn.Embedding(9, 1)

    def forward(self, x: Tensor) -> Tensor:
        row = self.rows(x[:, 0])
        single = torch.bmm(self.columns(x), row[:, :, None])[..., 0] + self.levels(x)[..., 0]
        return torch.cat([single, row @ self.columns.weight.T], 1)


class Mixer(nn.Module):
    """Layers along the tokens, of two kinds, between those along the channels."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.embed, self.head = norm, nn.Linear(4, 5), nn.Linear(5, 3)
        self.tokens = nn.Sequential(nn.Conv1d(6, 7, 1), nn.GELU(), nn.Conv1d(7, 6, 1))
        self.time, self.inner, self.outer = nn.Linear(6, 6), nn.Linear(5, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.tokens(self.norm(x))
        x = x + self.time(x.mT).mT
        return self.head((x + self.outer(self.inner(x).relu())).mean(1))


class Query(nn.Module):
    """A weighted mean of states, by their products with a query."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.query = nn.LSTM(4, 5, batch_first=True), nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = self.lstm(x)[0]
        weights = (states * self.query(x.mean(1))[:, None]).sum(-1, keepdim=True).softmax(1)
        return self.head((weights * states).sum(1))


class Pairs(nn.Module):
    """Products of two representations, each behind a norm of all of its channels."""

    def __init__(self, *norms: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)
        self.norm, self.other = norms

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.left(x)) @ self.other(self.right(x)).T


class Modulated(nn.Module):
    """A condition scales, shifts and gates what norms without parameters compute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.condition, self.parts = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 48)
        for number in range(2):
            block = nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 7), nn.Linear(7, 8)
            setattr(self, f"block{number}", nn.ModuleList(block))
        self.norm, self.last = nn.RMSNorm(8, elementwise_affine=False), nn.Linear(8, 16)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        condition, x = self.condition(x).relu(), self.embed(x)
        parts = self.parts(condition).chunk(6, -1)
        for (norm, inner, outer), (scale, shift, gate) in zip(
            (self.block0, self.block1), (parts[:3], parts[3:]), strict=True
        ):
            x = x + gate * outer(inner(norm(x) * (1 + scale) + shift).relu())
        scale, shift = self.last(condition).chunk(2, -1)
        return self.head(self.norm(x) * (1 + scale) + shift)


def zero_start() -> nn.Module:
    """Residual blocks whose last norms begin at 0 (Goyal et al., 2017)."""
    module = ResidualNet()
    for block in (*module.layer1, *module.layer2):
        nn.init.zeros_(block.bn2.weight)
    return module


RESIDUAL = (
    "stem + layer1.0.conv2 + layer1.1.conv2", "layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1",
    "layer2.0.conv2 + layer2.0.shortcut.0 + layer2.1.conv2", "layer2.1.conv1",
)  # fmt: skip
PATCHES = [f"layers.layers.{i}.{x}" for i in range(2) for x in ("self_attn.out_proj", "linear2")]
LANGUAGE = [f"blocks.{i}.{x}" for i in range(3) for x in ("attention.out_proj", "mlp.2")]
TRANSLATOR = [
    *(f"encoder.layers.0.{x}" for x in ("self_attn.out_proj", "linear2")),
    *(f"decoder.layers.0.{x}" for x in ("self_attn.out_proj", "multihead_attn.out_proj")),
    "decoder.layers.0.linear2",
]


def stream(layer: str) -> str:
    """The name of the channels of an ``Encoder``."""
    return f"embedding + {layer} + mlp.2"


HOSTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[str, ...]]] = {
    "perceptron": (multilayer, lambda: torch.randn(8, 6), ("0", "3")),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)),
        lambda: torch.randn(8, 6), ("0",),
    ),
    "branches": (Branches, lambda: torch.randn(8, 1, 8, 8), ("join", "left", "right")),
    "dense": (Dense, lambda: torch.randn(8, 6), ("layers.0", "layers.1", "layers.2")),
    "slopes": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
            nn.PReLU(4), nn.Flatten(), nn.Linear(4 * 36, 6), nn.PReLU(6), nn.Linear(6, 5),
            nn.PReLU(), nn.Linear(5, 3),
        ),
        lambda: torch.randn(8, 1, 8, 8), ("0", "4", "6"),
    ),
    "convolutions": (flattening, lambda: torch.randn(8, 1, 8, 8), ("0", "4")),
    "sequences": (sequences, lambda: torch.randn(8, 1, 40), ("0", "3")),
    "gated": (
        GatedNet, lambda: torch.randn(8, 1, 8, 8), ("expand + excite", "squeeze", "project"),
    ),
    "residual": (ResidualNet, lambda: images(8)[0], RESIDUAL),
    "zero start": (zero_start, lambda: images(8)[0], RESIDUAL),
    "group norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(), nn.Conv2d(6, 4, 3),
            nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3),
        ),
        lambda: torch.randn(8, 1, 8, 8), ("0", "3"),
    ),
    "normed": (normed, lambda: torch.randn(8, 6), ("0", "3", "6", "9")),
    "twice": (Twice, lambda: torch.randn(8, 6), ("one + two",)),
    "normed maps": (normed_maps, lambda: torch.randn(8, 1, 8, 8), ("0", "3")),
    "normed reader": (NormedReader, lambda: torch.randn(8, 6, 4), ("lstm",)),
    "scatter": (Scatter, lambda: torch.randn(8, 6), ("inner", "outer")),
    "cross stage": (CrossStage, lambda: torch.randn(8, 1, 8, 8), ("inner", "join")),
    "transformer": (
        transformer, lambda: torch.randn(8, 4, 5),
        (" + ".join(["0", *(f"1.{x.removeprefix('layers.')}" for x in PATCHES)]),
         "1.layers.0.linear1", "1.layers.1.linear1"),
    ),
    "patches": (
        Patches, lambda: torch.randn(8, 4, 5),
        (" + ".join(["embed", *PATCHES, "pool.out_proj"]),
         *(f"layers.layers.{i}.linear1" for i in range(2))),
    ),
    "translator": (
        Translator, words,
        (" + ".join(["words", "places", *(f"transformer.{x}" for x in TRANSLATOR)]),
         *(f"transformer.{x}coder.layers.0.linear1" for x in ("en", "de"))),
    ),
    "language": (
        Gpt, lambda: tokens(8)[:, :-1],
        (" + ".join(["embedding", *LANGUAGE]), *(f"blocks.{i}.mlp.0" for i in range(3))),
    ),
    "masked": (Masked, words, ("words + outer + transform", "inner")),
    "gemma": (Gemma, words, ("words + outer", "inner")),
    "table": (
        lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3)), words, ("0",),
    ),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 3)), words, ("0",)),
    "numbers": (Numbers, lambda: torch.randn(8, 6), ("layers.3", "layers.1")),
    "tagger": (Tagger, lambda: torch.randint(9, (8, 5)), ("embedding", "lstm", "hidden")),
    "fields": (Fields, words, ("words", "value", "inner")),
    "both ways": (BothWays, lambda: torch.randn(8, 6, 4), ("lstm",)),
    "mirror": (Mirror, lambda: torch.randn(8, 6), ("first + inner",)),
    "normed sides": (NormedSides, lambda: torch.randn(8, 6, 4), ("gru",)),
    "cells": (Cells, lambda: torch.randn(8, 6, 4), ("inner + outer", "between")),
    "answers": (
        Answers, words, ("words", "both", "join", "encoder + decoder", "key + query", "start"),
    ),
    "tied reader": (TiedReader, words, ("words + lstm",)),
    "factors": (Factors, words, ("rows + columns",)),
    "mixer": (
        lambda: Mixer(nn.LayerNorm(5)), lambda: torch.randn(8, 6, 4),
        ("embed + outer", "tokens.0", "inner"),
    ),
    "plain mixer": (
        lambda: Mixer(nn.Identity()), lambda: torch.randn(8, 6, 4),
        ("embed + outer", "tokens.0", "inner"),
    ),
    "query": (Query, lambda: torch.randn(8, 6, 4), ("lstm + query",)),
    "pairs": (
        lambda: Pairs(nn.LayerNorm(4), nn.LayerNorm(4)), lambda: torch.randn(8, 6),
        ("left + right",),
    ),
    "directions": (
        lambda: Pairs(nn.functional.normalize, nn.functional.normalize),
        lambda: torch.randn(8, 6), ("left + right",),
    ),
    "modulated": (
        Modulated, lambda: torch.randn(8, 6),
        ("embed + parts + block0.2 + block1.2 + last", "condition", "block0.1", "block1.1"),
    ),
    "reader": (Reader, lambda: torch.randn(8, 6, 4), ("gru",)),
    "own weights": (
        Weights, lambda: torch.randn(8, 7), ("kernel + slope", "first", "second + shift", "last.0"),
    ),
    "experts": (
        Experts, lambda: torch.randn(8, 6), ("embed.weight + down + second", "up", "first"),
    ),
    "spectral": (spectral, lambda: torch.randn(8, 6), ("1",)),
    "groups": (groups, lambda: torch.randn(8, 1, 8, 8), ("0", "6")),
    "inputs first": (
        lambda: Encoder(FusedAttention(Conv1D)), words,
        ("inner.qkv", "mlp.0", stream("inner.project")),
    ),
    "weight norms": (
        temporal, lambda: torch.randn(8, 1, 7),
        ("0 + 2.0.conv2 + 2.1.conv2", "2.0.conv1", "2.1.conv1"),
    ),
    "decoder": (decoder, lambda: torch.randn(8, 3, 5), ("0", "3")),
    "unet": (Unet, lambda: torch.randn(8, 1, 8, 8), ("down", "inside", "up")),
    "unrolled": (
        Unrolled, lambda: torch.randn(8, 3, 4), ("inside + again", "twin.0", "twin.3"),
    ),
    "towers": (Towers, lambda: torch.randn(8, 4), ("left + right", "both")),
    "stacked": (Stacked, lambda: torch.randn(8, 6, 4), ("one + two",)),
    "attention": (
        lambda: Encoder(Attention()), words,
        ("inner.linears.0 + inner.linears.1 + inner.linears.2", "mlp.0", stream("inner.linears.3")),
    ),
    "narrow heads": (
        lambda: Encoder(Attention(heads=8)), words,
        ("inner.linears.0 + inner.linears.1 + inner.linears.2", "mlp.0", stream("inner.linears.3")),
    ),
    "chain": (
        lambda: nn.Sequential(nn.Linear(4, 8), Attention(), nn.Linear(8, 3)),
        lambda: torch.randn(8, 7, 4),
        ("0", "1.linears.0 + 1.linears.1 + 1.linears.2", "1.linears.3"),
    ),
    "input width": (lambda: Encoder(InputWidth()), words, ("mlp.0", stream("inner.linears.3"))),
    "pointwise": (
        lambda: Encoder(InputWidth(linear=Pointwise)), words,
        ("mlp.0", stream("inner.linears.3.map")),
    ),
    "fused": (
        lambda: Encoder(FusedAttention()), words, ("inner.qkv", "mlp.0", stream("inner.project")),
    ),
    "windows": (
        lambda: Encoder(Windows()), words,
        (
            "inner.qkv + inner.distances.last", "inner.distances.first", "mlp.0",
            stream("inner.project"),
        ),
    ),
    "distances": (
        lambda: Encoder(DistanceAttention()), words,
        ("inner.distances.first", "mlp.0", stream("inner.linears.3")),
    ),
    "levels": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3, groups=4), Level(8, 1, 1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
        ),
        lambda: torch.randn(8, 1, 8, 8), ("0",),
    ),
    "sides": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), Resample(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
        ),
        lambda: torch.randn(8, 1, 8, 8), ("0", "2.conv"),
    ),
    "fixed scale": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), Level(6).requires_grad_(False), nn.ReLU(), nn.Linear(6, 3)
        ),
        lambda: torch.randn(8, 4), ("0",),
    ),
    "grouped": (
        lambda: Encoder(GroupedQueries()), words,
        ("inner.wq + inner.wkv", "mlp.0", stream("inner.wo")),
    ),
    "keys first": (
        lambda: Encoder(GroupedQueries(keys_first=True)), words,
        ("inner.wkv + inner.wq", "mlp.0", stream("inner.wo")),
    ),
    "glu": (lambda: Encoder(Paired(nn.GLU())), words, ("inner.both", "mlp.0", stream("inner.out"))),
    "maxout": (
        lambda: Encoder(Paired(lambda y: y.unflatten(-1, (-1, 2)).amax(-1))), words,
        ("inner.both", "mlp.0", stream("inner.out")),
    ),
}  # fmt: skip
"""By name: the module, inputs, and the groups of channels that can be widened."""
