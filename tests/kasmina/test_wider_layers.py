"""Groups of channels, and their widening: the function stays, and so does the optimizer's state."""

import copy
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import copied_channels as copies
from esper.kasmina import new_channels as starts
from esper.kasmina.attention_heads import head_counts
from esper.kasmina.channel_groups import ChannelGroup
from esper.kasmina.layer_kinds import gates_of, layer_at, rows_first, weight_name
from esper.kasmina.resizing import resize
from esper.kasmina.user_weights import later_numbers
from esper.kasmina.wider_groups import wider_groups
from esper.kasmina.wider_layers import layer_sizes, widen
from wide_modules import HOSTS, Attention, Encoder, FusedAttention, Patches, spectral, words


def groups_of(model: nn.Module, x: Tensor) -> tuple[list[ChannelGroup], dict[str, str]]:
    model.eval()
    with torch.no_grad():
        return wider_groups(model, lambda: model(x))


def new_channels(model: nn.Module, group: ChannelGroup, count: int) -> starts.NewChannels:
    """Channels that differ from those that are there, as many as the group can get."""
    if group.is_balanced:
        generator = torch.Generator().manual_seed(0)
        return copies.balanced_channels(model, group, group.channels, generator)
    zeros = starts.zero_channels(model, group, count).entries
    draws = {name: torch.rand(x.shape) + 0.1 for name, x in zeros.items()}
    silent = {name: x for name, x in zeros.items() if name.rpartition(".")[0] in group.silent}
    return starts.NewChannels(draws | silent, count)


def logits(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    output = model(x)
    return output["logits"] if isinstance(output, dict) else output


def without_dropout(model: nn.Module) -> nn.Module:
    """The module, whose masks would be other ones for wider activations."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def trained(model: nn.Module, x: Tensor, steps: int, kind: Any) -> torch.optim.Optimizer:
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(steps):
        step(model, x, optimizer)
    return optimizer


def step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    logits(model.train(), x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("host", HOSTS)
def test_groups_are_those_that_share_channels(host: str) -> None:
    torch.manual_seed(0)
    make, inputs, names = HOSTS[host]
    model, x = make(), inputs()
    before = copy.deepcopy(model.state_dict())
    groups, reasons = groups_of(model, x)
    assert sorted(group.name for group in groups) == sorted(names)
    assert "" not in reasons
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_new_channels_behind_a_norm_are_copies() -> None:
    balanced = {}
    for host in ("normed", "normed maps", "normed reader"):
        make, inputs, _ = HOSTS[host]
        balanced |= {(host, g.name): g.is_balanced for g in groups_of(make(), inputs())[0]}
    assert {name for name, is_balanced in balanced.items() if not is_balanced} == {("normed", "9")}


def test_a_table_reads_copies_with_0_and_what_they_become_with_a_share_as_heads_read_all() -> None:
    torch.manual_seed(0)
    make, inputs, _ = HOSTS["language"]
    model = make()
    group = next(each for each in groups_of(model, inputs())[0] if each.silent)
    generator = torch.Generator().manual_seed(0)
    new = copies.balanced_channels(model, group, group.channels, generator)
    later = copies.substitutes(model, group, new, generator)
    name = f"{group.silent[0]}.weight"
    assert not new.entries[name].any()
    assert torch.equal(later.entries[name], torch.full((group.channels,), starts.DIFFERENCE))
    weights = [x for each in new.heads for x in each.entries.values() if x.ndim > 3]
    assert weights
    for x in weights:
        old, more = x.tensor_split([group.channels], 3)
        assert 0.5 < float(more.std() / old.std()) < 1.0


def test_a_norm_that_multiplies_by_one_more_hides_copies_with_minus_1() -> None:
    make, inputs, _ = HOSTS["gemma"]
    model, generator = make(), torch.Generator().manual_seed(0)
    stream, _ = groups_of(model, inputs())[0]
    new = copies.balanced_channels(model, stream, 8, generator)
    later = copies.substitutes(model, stream, new, generator)
    assert torch.equal(new.entries["norm.weight"], torch.full((8,), -1.0))
    expected = torch.full((8,), starts.DIFFERENCE - 1.0)
    torch.testing.assert_close(later.entries["norm.weight"], expected)


@pytest.mark.parametrize("host", ["normed reader", "normed"])
def test_equal_channels_keep_the_function_and_learn_something_else(host: str) -> None:
    torch.manual_seed(0)
    make, inputs, _ = HOSTS[host]
    model, x = make(), inputs()
    group = groups_of(model, x)[0][0]
    before = model(x)
    generator = torch.Generator().manual_seed(0)
    widen(model, group, copies.balanced_channels(model, group, 3 * group.channels, generator))
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)
    trained(model, x, 5, torch.optim.Adam)
    bias = model[0].bias if host == "normed" else model.lstm.bias_ih_l0
    units = bias.detach().view(-1, 4, group.channels)  # gates, copies, units
    assert torch.pdist(units.transpose(0, 1).flatten(1)).min() > 1e-3


@pytest.mark.parametrize("host", HOSTS)
def test_a_widening_keeps_the_function_and_learns_and_is_taken_back_to_the_bit(host: str) -> None:
    torch.manual_seed(0)
    make, inputs, _ = HOSTS[host]
    model, x = without_dropout(make()), inputs()
    optimizer = trained(model, x, 3, torch.optim.AdamW)
    groups, _ = groups_of(model, x)
    state, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    shown = {mode: logits(model.train(mode), x) for mode in (False, True)}
    model.load_state_dict(state)
    changes, counts = [], {}
    for group in groups:
        new = new_channels(model, group, 3)
        changes.append(widen(model, group, new, optimizer))
        counts |= dict.fromkeys(group.writers, new.count)
    assert all(p.is_contiguous() for p in model.parameters())
    for mode in (False, True):
        wider = logits(model.train(mode), x)
        torch.testing.assert_close(wider, shown[mode], rtol=1e-5, atol=1e-6)
    for group in groups:
        name = group.writers[0]
        if name in group.axes:
            size = model.get_parameter(name).shape[group.axes[name][0]]
        else:
            size = next(iter(layer_sizes(model)[name].values()))
        assert size == prod(group.units.get(name, ())) * (group.channels + counts[name])
    readers = {name: group.axes.get(name) for group in groups for name in group.readers}
    weights = {
        name: layer_at(model, name)[1][0][2] if axes else layer.get_parameter(weight_name(layer))
        for name, axes in readers.items()
        for layer in [layer_at(model, name)[0]]
    }
    starts = {name: weight.clone() for name, weight in weights.items()}
    step(model, x, optimizer)
    step(model, x, optimizer)
    for name, start in starts.items():
        motion = rows_first(layer_at(model, name)[0], weights[name] - start, axes=readers[name])
        assert bool(motion[:, -3:].any())
    wide = copy.deepcopy(model)
    assert type(wide) is type(model)
    again = without_dropout(make())
    resize(again, model.state_dict())
    again.load_state_dict(model.state_dict())
    assert [p.shape for p in again.parameters()] == [p.shape for p in model.parameters()]
    torch.testing.assert_close(logits(again.eval(), x), logits(model.eval(), x), rtol=0, atol=0)
    for change in reversed(changes):
        change.undo()
    optimizer.load_state_dict(moments)
    model.load_state_dict(state)
    alone = without_dropout(make())
    alone.load_state_dict(state)
    assert [p.shape for p in model.parameters()] == [p.shape for p in alone.parameters()]
    other = torch.optim.AdamW(alone.parameters(), lr=0.01)
    other.load_state_dict(copy.deepcopy(moments))
    for _ in range(3):
        step(model, x, optimizer)
        step(alone, x, other)
    alone_state = alone.state_dict()
    assert all(torch.equal(v, alone_state[n]) for n, v in model.state_dict().items())


KINDS = torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad
GO_ON = (
    "perceptron",
    "cells",
    "tagger",
    "reader",
    "attention",
    "fused",
    "inputs first",
    "decoder",
    "groups",
)


@pytest.mark.parametrize("host", [*GO_ON, "weight norms"])
@pytest.mark.parametrize("kind", [*KINDS, partial(torch.optim.SGD, momentum=0.9)])
def test_what_was_there_goes_on_as_without_new_channels(kind: Any, host: str) -> None:
    torch.manual_seed(0)
    make, inputs, _ = HOSTS[host]
    model, x = without_dropout(make()).double(), inputs()
    x = x.double() if x.is_floating_point() else x
    optimizer = trained(model, x, 5, kind)
    twin = copy.deepcopy(model)
    other = kind(twin.parameters(), lr=0.01)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    # A norm's gradients are others where it has more channels.
    groups = [group for group in groups_of(model, x)[0] if not group.is_balanced]
    units = {name: unit for group in groups for name, unit in group.units.items()}
    for group in groups:
        widen(model, group, new_channels(model, group, 2), optimizer)
    step(model, x, optimizer)
    step(twin, x, other)
    for name, parameter in twin.named_parameters():
        layer = name.rpartition(".")[0]
        module = model.get_submodule(layer)
        gates, both = (
            units.get(layer, (gates_of(module), 1))[0],
            (parameter, model.get_parameter(name)),
        )
        rows, wide = (rows_first(module, p).unflatten(0, (gates, -1)) for p in both)
        torch.testing.assert_close(wide[tuple(map(slice, rows.shape))], rows)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


SIDES = [range(start, start + 3) for start in (0, 5, 10, 15)]
OLD_ENTRIES = {
    "branches": {
        "norm.weight": [range(4), range(6, 10)], "depthwise.weight": [range(4), range(6, 10)],
        "join.weight": [range(4), range(6, 10)],
        "head.weight": [range(5), range(7, 11), range(13, 17)],
    },
    "answers": {
        "both.weight_ih_l0_reverse": [range(4)], "encoder.weight_ih_l0": [range(5)],
        "decoder.weight_ih_l0": [range(3), range(5, 10)], "encoder.weight_hh_l0": [range(5)],
    },
    "fields": {
        "inner.weight": [range(6 * i, 6 * i + 4) for i in range(7)],
        "head.weight": [range(5), *(range(8 * i + 7, 8 * i + 13) for i in range(3))],
    },
    "both ways": {
        "lstm.weight_ih_l1": [range(3), range(5, 8)], "lstm.weight_hh_l1_reverse": [range(3)],
        "head.weight": SIDES, "norm.weight": SIDES, "norm.running_mean": SIDES,
    },
    "unet": {"join.weight": [range(6), range(8, 12)]},
    "dense": {
        "layers.1.weight": [range(4), range(6, 12)],
        "layers.2.weight": [range(4), range(6, 10), range(12, 18)],
        "head.weight": [range(4), range(6, 10), range(12, 16), range(18, 24)],
    },
}  # fmt: skip
"""Where the old rows of companions, or columns of readers, lie after two new channels a group."""
TRANSPOSED = nn.Unflatten(1, (4, 1)), nn.ConvTranspose1d(4, 4, 1), nn.Conv1d(4, 4, 1, groups=2)


@pytest.mark.parametrize("host", OLD_ENTRIES)
def test_what_was_there_goes_on_behind_a_concatenation(host: str) -> None:
    torch.manual_seed(0)
    make, inputs, _ = HOSTS[host]
    model, x = make(), inputs()
    optimizer = trained(model, x, 5, torch.optim.Adam)
    twin = copy.deepcopy(model)
    other = torch.optim.Adam(twin.parameters(), lr=0.01)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in groups_of(model, x)[0]:
        widen(model, group, new_channels(model, group, 2), optimizer)
    step(model, x, optimizer)
    step(twin, x, other)
    for name, ranges in OLD_ENTRIES[host].items():
        wide, narrow = model.state_dict()[name], twin.state_dict()[name]
        gates = gates_of(model.get_submodule(name.rpartition(".")[0]))
        axis = 0 if host == "unet" or name.startswith(("norm", "depthwise")) else 1
        old = wide.index_select(axis, torch.tensor([*chain(*ranges)]))
        old, narrow = (p.unflatten(0, (gates, -1)) for p in (old, narrow))
        torch.testing.assert_close(old[:, : narrow.shape[1]], narrow, rtol=1e-4, atol=1e-5)


def test_new_entries_start_with_small_squared_gradients_and_without_a_mean() -> None:
    torch.manual_seed(0)
    make, inputs, _ = HOSTS["perceptron"]
    model, x = make(), inputs()
    optimizer = trained(model, x, 5, torch.optim.Adam)
    before = {key: x.clone() for key, x in optimizer.state[model[0].weight].items()}
    group = groups_of(model, x)[0][0]
    widen(model, group, new_channels(model, group, 2), optimizer)
    state = optimizer.state[model[0].weight]
    assert state["step"] == before["step"]
    assert torch.equal(state["exp_avg"][:4], before["exp_avg"])
    assert not bool(state["exp_avg"][4:].any())
    assert torch.equal(state["exp_avg_sq"][:4], before["exp_avg_sq"])
    torch.testing.assert_close(
        state["exp_avg_sq"][4:], (0.01 * before["exp_avg_sq"].mean()).expand(2, 6)
    )


@pytest.mark.parametrize(
    ("host", "name", "rows", "columns"),
    [("perceptron", "3.weight", 6, 6), ("tagger", "lstm.weight_hh_l0", 32, 8)],
)
def test_a_factored_state_becomes_longer_too(host: str, name: str, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    make, inputs, _ = HOSTS[host]
    model, x = make(), inputs()
    optimizer = trained(model, x, 5, torch.optim.Adafactor)
    for group in groups_of(model, x)[0]:
        widen(model, group, new_channels(model, group, 2), optimizer)
    state = optimizer.state[model.get_parameter(name)]
    assert (state["row_var"].shape, state["col_var"].shape) == ((rows, 1), (1, columns))
    step(model, x, optimizer)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_slow_weights_start_at_the_new_ones_and_lists_of_states_anew() -> None:
    """As those of Lookahead and schedule-free optimizers, and as several momenta."""
    torch.manual_seed(0)
    make, inputs, _ = HOSTS["perceptron"]
    model, x = make(), inputs()
    optimizer = trained(model, x, 5, torch.optim.AdamW)
    first, last = model.get_parameter("0.weight"), model.get_parameter("5.weight")
    slow = first.detach() + 0.1 * first.detach().std() * torch.randn(first.shape)
    optimizer.state[first]["slow"] = slow
    optimizer.state[last]["momenta"] = [last.detach().clone()]
    for group in groups_of(model, x)[0]:
        widen(model, group, new_channels(model, group, 2), optimizer)
    wide = model.get_parameter("0.weight")
    expected = torch.cat([slow, wide[len(slow) :]])
    torch.testing.assert_close(optimizer.state[wide]["slow"], expected, rtol=0, atol=0)
    assert not optimizer.state[wide]["exp_avg"][len(slow) :].any()
    assert model.get_parameter("5.weight") not in optimizer.state


class Caching(nn.Module):
    """Attention and two views of a layer; its first pass computes what it then keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cache = FusedAttention(), list[Tensor]()
        self.one, self.head = nn.Linear(8, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = self.cache or [x.exp()]
        x = self.one(self.inner(x))
        total, positive = x.sum(1), x.relu()
        return self.head(total) + self.head(positive).sum(1)


def test_a_pass_that_calls_fewer_functions_than_the_first_shifts_no_channels() -> None:
    torch.manual_seed(0)
    groups, _ = groups_of(Caching(), torch.randn(4, 7, 8))
    assert {group.name for group in groups} == {"inner.qkv", "inner.project", "one"}


TIED = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
TIED[0].register_parameter("twin", TIED[1].weight)


class Recurrent(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.one, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 3, **options)
        self.head = nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.one(x))[0])


class NormSum(nn.Module):
    """Layers of which one is added to the output of a norm, and so is the sum of both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.head = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.two = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.head(self.two(x) + (x + self.one(x)))


class Joined(nn.Module):
    """Two layers side by side, then a function of the module, of both and of the input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 4)
        self.gate, self.norm, self.lstm = nn.Linear(4, 1), nn.LayerNorm(8), nn.LSTM(8, 3)
        self.head, self.function = nn.LazyLinear(2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, torch.cat([self.one(x), self.two(x)], -1), x)


class Unit(nn.Module):
    """Divides by the length, which more channels make larger."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=1, keepdim=True)


class Unsaved(nn.Module):
    """Adds a buffer that ``state_dict`` has not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Neighbours(nn.Module):
    """Products of words with all words, from the same table or another."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.others = self.words if tied else nn.Embedding(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.words(x).mean(1)
        whole = mean @ self.others.weight.T
        return (
            whole
            if self.others is self.words
            else whole + (mean * self.others(x[:, 0])).sum(1)[:, None]
        )


def test_of_two_factors_one_begins_at_0_and_of_tables_the_other_is_small() -> None:
    torch.manual_seed(0)
    model = HOSTS["factors"][0]()
    (group,) = groups_of(model, words())[0]
    new = starts.random_channels(model, group, 64, 68, torch.Generator().manual_seed(0)).entries
    assert not new["columns.weight"].any()
    share = float(new["rows.weight"].std() / model.get_parameter("rows.weight").std())
    assert share == pytest.approx(starts.FACTOR, rel=0.2)
    reason = groups_of(Neighbours(tied=True), words())[1]["words"]
    assert reason == "the same layers write both factors of a product"
    assert [each.name for each in groups_of(Neighbours(tied=False), words())[0]] == [
        "words + others"
    ]
    gated = HOSTS["gated"]  # a layer reads the products
    assert not any(each.silent for each in groups_of(gated[0](), gated[1]())[0])
    mean = Joined(lambda m, _, x: m.one(x) @ m.two(x).T / m.one(x).shape[1])
    assert "one + two" not in groups_of(mean, torch.randn(8, 4))[1]


def test_a_layer_of_tokens_that_mixes_channels_beside_each_other_passes_none_on() -> None:
    make, inputs, names = HOSTS["plain mixer"]
    model = make()
    setattr(model.get_submodule("tokens"), "0", nn.Conv1d(6, 7, 3, padding=1))
    groups, refused = groups_of(model, inputs())
    assert [each.name for each in groups] == [*names[1:]]
    assert "does not read it on its axis" in refused["embed"]


@pytest.mark.parametrize(
    ("model", "name", "reason"),
    [
        (nn.Sequential(nn.Linear(4, 6), spectral()), "0", "it with a weight of no known layer"),
        (Joined(lambda m, y, x: torch.addmm(x, mat1=y, mat2=x.T @ x)), "one", "addmm reads it"),
        (Joined(lambda m, y, _: m.head(y.softmax(-1))), "one", "softmax mixes its channels"),
        (Joined(lambda m, y, x: m.head(y + m.three(x))), "one", "add mixes its channels"),
        (NormSum(), "two + one", "they meet others or their number"),
        (Joined(lambda m, _, x: (m.three(x) @ m.three.weight).sum(1)), "three", "matmul mixes"),
        (Joined(lambda m, _, x: torch.cdist(m.one(x), m.two(x))), "one", "cdist mixes"),
        (
            Joined(lambda m, _, x: m.head(m.three(x).view(-1, 4))), "three",
            "is written into it: mat1 and mat2 shapes",
        ),
        (Joined(lambda m, _, x: m.head(m.gate(x) * m.three(x))), "gate", "lays its only channel"),
        (Recurrent(proj_size=2), "lstm", "projects its hidden units"),
        (Joined(lambda m, _, x: m.head(m.lstm(m.three(x).T)[0])), "three", "its axis of channels"),
        (
            Joined(lambda m, y, x: m.head(m.norm(torch.cat([y, m.three(x)], 1)))), "three",
            "layer_norm mixes its channels",
        ),
        (TIED, "0", "shares its parameters"),
        (Joined(lambda m, _, x: m.head(m.three(m.three(x)))), "three", "takes no more channels"),
        (
            Joined(lambda m, _, x: m.head(m.three(x) * m.three.bias)), "three",
            "has parameters of three per channel",
        ),
        (nn.Sequential(nn.Linear(4, 4), Unsaved(), nn.Linear(4, 2)), "0", "is not persistent"),
        (nn.Sequential(nn.Linear(4, 4), Unit(), nn.Linear(4, 2)), "0", "norm mixes its channels"),
        (nn.Sequential(nn.Linear(4, 4), nn.Softmax(1), nn.Linear(4, 2)), "0", "softmax mixes"),
        (nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)), "0", "frozen"),
        (nn.Sequential(*TRANSPOSED), "1", "2 reads it in groups"),
    ],
)  # fmt: skip
def test_what_cannot_be_widened_is_refused_by_name(
    model: nn.Module, name: str, reason: str
) -> None:
    groups, refused = groups_of(model, torch.randn(8, 4))
    assert name not in {group.name for group in groups}
    assert reason in refused[name]


def test_outputs_are_not_listed() -> None:
    for model in (nn.Sequential(nn.Linear(4, 3), nn.ReLU()), Joined(lambda _, y, __: y)):
        groups, refused = groups_of(model, torch.randn(8, 4))
        assert not groups
        assert not refused


class Inline(Attention):
    """Attention and an MLP in one module, whose number of heads a reload could not tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(super().forward(x))))


@pytest.mark.parametrize(
    ("model", "widened", "reason"),
    [
        (HOSTS["input width"][0]().inner, [], "is invalid for input of size"),
        (Inline(), ["linears.3", "up"], "is written into it"),
        (Attention(heads=1), [], "is written into it"),
    ],
)
def test_heads_that_cannot_become_more_are_refused_by_name(
    model: nn.Module, widened: list[str], reason: str
) -> None:
    groups, refused = groups_of(model, torch.randn(4, 7, 8))
    assert [group.name for group in groups] == widened
    assert any(reason in text for name, text in refused.items() if "linears.2" in name)
    before = {n: v for n, v in vars(model).items() if type(v) is int}
    for group in groups:
        widen(model, group, new_channels(model, group, 8))
    again = type(model)() if widened else copy.deepcopy(model)
    resize(again, model.state_dict())
    assert before == {n: v for n, v in vars(again).items() if type(v) is int}


class Talking(nn.Module):
    """Heads of pixels whose weights are mixed before and behind the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q, self.k, self.v = (nn.Conv2d(8, 8, 1) for _ in range(3))
        self.near, self.project = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 5, 1)
        self.talk, self.hear = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        layers = self.v(x), self.q(x), self.k(x)
        v, q, k = (y.reshape(len(x), self.num_heads, -1, 16).mT for y in layers)
        weights = self.hear(self.talk(q @ k.mT).softmax(-1))
        return self.project((weights @ v).mT.reshape(x.shape) + self.near(layers[0]))


def test_heads_that_talk_are_refused_by_name() -> None:
    groups, refused = groups_of(Talking(), torch.randn(4, 8, 4, 4))
    assert [group.name for group in groups] == ["talk"]
    assert refused.keys() == {"q + k", "v + hear"}


def test_a_wider_attention_counts_its_heads_and_their_width() -> None:
    model = Encoder(FusedAttention())
    before = layer_sizes(model)["inner"]
    assert before == {"num_heads": 3, "inner": 12}
    group = groups_of(model, words())[0][1]
    assert (group.change(2), group.channels, group.width) == ("3 -> 5 heads", 3, 12)
    assert group.units["inner.qkv"] == (3, 4)
    change = widen(model, group, new_channels(model, group, 2))
    assert layer_sizes(model)["inner"] == {"num_heads": 5, "inner": 20}
    assert model.inner.head_dim == 4
    again = Encoder(FusedAttention())
    resize(again, model.state_dict())
    assert layer_sizes(again) == layer_sizes(model)
    change.undo()
    assert layer_sizes(model)["inner"] == before


def test_heads_as_wide_as_their_input_become_more_with_it() -> None:
    make, inputs, _ = HOSTS["input width"]
    model = make()
    (stream, _), refused = groups_of(model, inputs())
    assert stream.change(8) == "8 -> 16 channels and 2 -> 4 heads"
    assert not refused
    change = widen(model, stream, new_channels(model, stream, 8))
    assert (model.inner.h, model.inner.linears[2].weight.shape) == (4, (16, 16))
    change.undo()
    assert (model.inner.h, model.inner.linears[2].weight.shape) == (2, (8, 8))


def test_the_attention_of_torch_gets_heads_of_the_same_width_with_its_stream() -> None:
    torch.manual_seed(0)
    make, inputs, _ = HOSTS["patches"]
    model, before = make(), layer_sizes(make())
    group = groups_of(model, inputs())[0][0]
    assert group.change(8) == "8 -> 16 channels and 2 -> 4 heads and 1 -> 2 heads"
    change = widen(model, group, new_channels(model, group, 8))
    sizes, widths = layer_sizes(model), dict.fromkeys(("embed_dim", "kdim", "vdim"), 16)
    assert sizes["layers.layers.1.self_attn"] == {**widths, "num_heads": 4}
    assert sizes["pool"] == {**widths, "num_heads": 2}
    change.undo()
    assert layer_sizes(model) == before


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"kdim": 6, "vdim": 6}])
def test_attention_that_reads_more_than_its_stream_is_refused(options: dict[str, Any]) -> None:
    model = Patches()
    model.pool = nn.MultiheadAttention(8, 1, batch_first=True, **options)
    key = torch.ones(8, 4, 6) if "kdim" in options else None

    def forward(x: Tensor) -> Tensor:
        query = model.embed(x)
        return model.head(model.pool(query, *(query if key is None else key for _ in range(2)))[0])

    model.forward = forward
    groups, refused = groups_of(model, torch.randn(8, 4, 5))
    assert not groups
    assert "pool mixes its channels" in refused["embed"]


def test_the_word_that_pads_stays_zero_and_a_largest_norm_is_refused() -> None:
    model, x = Joined(lambda m, _, x: m.head((y := m.one(x)) + m.three(y))), words()
    model.one, model.two = nn.Embedding(9, 4, 2), nn.Embedding(9, 4)
    (group,) = groups_of(model, x)[0]
    widen(model, group, starts.random_channels(model, group, 3, 7, torch.Generator()))
    assert model.one.embedding_dim == 7
    assert [index for index, row in enumerate(model.one.weight) if not row[4:].any()] == [2]
    model.one.max_norm = 1.0
    assert "largest norm" in groups_of(model, x)[1]["one + three"]


def test_a_widening_that_fails_half_way_leaves_the_module_as_it_was() -> None:
    make, inputs, _ = HOSTS["patches"]
    model = make()
    group, state = groups_of(model, inputs())[0][0], copy.deepcopy(model.state_dict())
    new, sizes = new_channels(model, group, 8), layer_sizes(model)
    with pytest.raises(RuntimeError, match="Sizes of tensors"):
        widen(model, group, replace(new, entries={**new.entries, "places": torch.ones(8, 3, 1)}))
    assert layer_sizes(model) == sizes
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


class Narrow(nn.Module):
    """Queries and keys of a width of their own, and attributes with every size."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.inner, self.width = 2, 6, 8
        self.function = nn.Identity()
        self.function.heads = 2  # a module that counts heads and has no layers
        self.layers = nn.ModuleList([nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)])


def test_heads_are_told_from_the_width_of_the_stream_when_both_are_doubled() -> None:
    model, names = Narrow(), [f"layers.{i}" for i in range(3)]
    double, triple = dict.fromkeys(names, Fraction(2)), dict.fromkeys(names, Fraction(3))
    counts = {key: size for _, key, size in head_counts(model, double, double)}
    assert counts == {"heads": 4, "inner": 12}
    assert not list(head_counts(model, double, triple))
    assert not list(head_counts(model, {names[2]: Fraction(2)}, dict.fromkeys(names, Fraction(2))))


def test_numbers_with_the_name_of_a_size_follow_it_unless_it_means_several() -> None:
    module = Lengths()
    sizes = {"hidden_dim": 4, "depth": 4, "head_dim": 4, "width": 9, "in_dim": 1, "features": 3}
    for name, size in sizes.items():
        setattr(module, name, size)
    shapes = {"weight": (9, 9), "length": (4, 2), "level": (1,), "first.weight": (3, 6)}
    before = {id(module.get_parameter(name)): torch.Size(x) for name, x in shapes.items()}
    before |= {id(module.first.bias): torch.Size([3]), id(module.head.weight): torch.Size([7, 3])}
    changes = [(key, size) for _, key, size in later_numbers(module, before)]
    assert changes == [("hidden_dim", 5)]
    # Of norms without parameters the one of all channels alone, by the columns that it is read by.
    norms = [nn.LayerNorm(shape, elementwise_affine=False) for shape in (3, (2, 3))]
    network, before = nn.Sequential(*norms, module.head), {id(module.head.weight): (3, 3)}
    assert [(x, size) for x, _, size in later_numbers(network, before)] == [(norms[0], 4)]


class Lengths(nn.Module):
    """Directions and lengths of a weight, and an outer product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
        self.weight, self.length = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.ones(5, 1))
        self.level = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.linear(self.first(x), F.normalize(self.weight) * self.length).relu()
        return self.head(torch.einsum("b,o->bo", inner.sum(-1), self.level))


def test_what_is_no_product_with_a_weight_is_refused() -> None:
    groups, reasons = groups_of(Lengths(), torch.randn(8, 6))
    assert groups == []
    assert list(reasons) == ["first"]
