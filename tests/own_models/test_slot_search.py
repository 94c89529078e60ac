"""Where seeds may grow is found by a walk over the module."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import Slot
from esper.leyline.errors import UsageError
from esper.own_models.slot_search import MAX_SLOTS, POINTWISE
from grown_modules import slots_of
from own_modules import (
    Gpt,
    Recurrent,
    ResidualBlock,
    ResidualNet,
    images,
    perceptron,
    tokens,
    unchanged,
)


def seen(model: nn.Module, x: Tensor, names: list[str] | None = None) -> list[tuple]:
    return [(slot.name, slot.family, slot.channels) for slot in slots_of(model, x, names)]


def head() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]


def flat_cnn() -> nn.Sequential:
    first = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, nn.Conv2d(6, 8, 3), nn.ReLU(inplace=True), *head())


def stages() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *head(),
    )


IMAGES = images(4)[0]


def test_blocks_of_a_residual_network() -> None:
    blocks = [(f"layer{stage}.{block}", "conv", 4 * stage) for stage in (1, 2) for block in (0, 1)]
    assert seen(ResidualNet(), IMAGES) == blocks


def test_blocks_of_a_transformer_and_not_what_is_in_them() -> None:
    found = slots_of(Gpt(), tokens(4))
    assert [slot.name for slot in found] == ["blocks.0", "blocks.1", "blocks.2"]
    assert {(slot.family, slot.channels, slot.size) for slot in found} == {("sequence", 8, (1, 9))}
    assert [slot.depth for slot in found] == [1 / 3, 2 / 3, 1.0]
    assert "attention" in found[0].accepts


def test_beside_an_lstm() -> None:
    assert seen(Recurrent(), tokens(4)) == [("embedding", "sequence", 8), ("lstm", "sequence", 6)]


def test_stages_and_layers() -> None:
    assert seen(stages(), IMAGES) == [("0.2", "conv", 6), ("1.2", "conv", 8)]
    assert seen(flat_cnn(), IMAGES) == [("2", "conv", 6), ("5", "conv", 8)]
    assert seen(perceptron(), torch.randn(4, 5)) == [("1", "mlp", 16), ("4", "mlp", 16)]


class Encoder(nn.Module):
    def __init__(self, batch_first: bool):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 12)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x)
        return self.head(x if self.batch_first else x.transpose(0, 1))


def test_attention_is_not_offered_where_time_comes_first() -> None:
    first, second = (slots_of(Encoder(batch_first), tokens(4)) for batch_first in (True, False))
    assert [slot.name for slot in first] == ["encoder.layers.0", "encoder.layers.1"]
    assert "attention" in first[0].accepts
    assert set(second[0].accepts) == set(POINTWISE)
    alone = slots_of(Encoder(False), tokens(1))
    assert set(alone[0].accepts) == set(POINTWISE)


class TimeFirst(nn.Module):
    """A recurrent layer for batches [T, B, F], between linear layers that look at one position."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.lstm, self.head = nn.Linear(5, 8), nn.LSTM(8, 6), nn.Linear(6, 2)
        self.turned = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.turned(self.lstm(self.stem(x))[0].transpose(0, 1)))


def test_attention_is_not_offered_across_the_samples_of_batches_that_begin_with_time() -> None:
    found = slots_of(TimeFirst(), torch.randn(6, 4, 5), ["stem", "lstm", "turned"])
    offered = {slot.name: "attention" in slot.accepts for slot in found}
    assert offered == {"stem": False, "lstm": False, "turned": True}


class FastPath(nn.Module):
    """A layer that reads the weights of its attention without calling it."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(5, 1, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.attention.out_proj.weight


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_layer_that_skips_its_attention_says_where_time_is(batch_first: bool) -> None:
    model = nn.Sequential(FastPath(batch_first), nn.Linear(5, 8), nn.Linear(8, 2))
    (found,) = slots_of(model, torch.randn(6, 4, 5), ["1"])
    assert ("attention" in found.accepts) is batch_first


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(5, 8), nn.LSTM(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_an_unused_layer_says_nothing_about_time() -> None:
    (found,) = slots_of(
        nn.Sequential(Unused(), nn.Linear(8, 2)), torch.randn(4, 6, 5), ["0.linear"]
    )
    assert "attention" in found.accepts


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.grows, self.head = nn.Conv2d(1, 6, 3), Slot(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.grows(self.stem(x).relu()).mean((2, 3)))


def test_markers_and_names() -> None:
    assert seen(Marked(), IMAGES) == [("grows", "conv", 6)]
    assert seen(Marked(), IMAGES, ["stem"]) == [("stem", "conv", 6)]
    places = [("stem", "conv", 4), ("layer2.1", "conv", 8)]
    assert seen(ResidualNet(), IMAGES, ["layer2", "stem"]) == places
    assert seen(stages(), IMAGES, ["1"]) == [("1.2", "conv", 8)]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.unused = nn.Linear(5, 5), nn.Linear(5, 5)
        self.conv, self.head = nn.Conv1d(1, 4, 3, padding=1), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.shared(x))
        return self.head(self.conv(x[:, None]).mean(1))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["shred"], r"Twice has no module 'shred'; did you mean 'shared'\?"),
        (["shared"], r"'shared' is called 2 times in a forward pass; name another module"),
        (["unused"], r"'unused' is not called in a forward pass"),
        (["conv"], r"'conv' returns \[B, C, L\], for which there are no seeds yet"),
        ([], r"the list is empty; omit slots"),
        (["head", "head"], r"'head' is named twice"),
        ("22", r"^slots: got the string '22'; give a list of names$"),
    ],
)
def test_a_name_that_cannot_be_a_slot_is_refused_with_the_reason(
    names: list[str] | str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        slots_of(Twice(), torch.randn(4, 5), names)


class Aliases(nn.Module):
    """Layers under their own names and in Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.act = nn.Conv2d(1, 6, 3), nn.ReLU()
        self.backbone = nn.Sequential(self.conv1, self.act)
        self.trunk = self.backbone
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).mean((2, 3)))


@pytest.mark.parametrize("name", ["backbone", "backbone.1", "trunk", "trunk.1", "act"])
def test_a_module_with_several_names_is_found_by_each(name: str) -> None:
    assert seen(Aliases(), images(4)[0], [name]) == [("act", "conv", 6)]


class Padded(nn.Module):
    """A transformer whose evaluation mode leaves padding out of the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x), src_key_padding_mask=x == 0))


def test_a_nested_tensor_is_called_what_it_is() -> None:
    x = tokens(4).clamp(min=1)
    x[0, 6:] = 0
    with pytest.raises(UsageError, match=r"'encoder.layers.0' returns a nested tensor"):
        slots_of(Padded(), x, ["encoder.layers.0"])


def test_a_module_without_a_place_is_refused() -> None:
    with pytest.raises(UsageError, match=r"found no place for a seed in Twice"):
        slots_of(Twice(), torch.randn(4, 5))


def test_many_blocks_are_thinned_out_evenly_and_end_with_the_last() -> None:
    blocks = [ResidualBlock(4, 4, 1) for _ in range(20)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    model = nn.Sequential(nn.Conv2d(1, 4, 3), *blocks, head)
    found = [int(slot.name) for slot in slots_of(model, images(4)[0])]
    assert len(found) == MAX_SLOTS
    assert found[-1] == 20
    assert {b - a for a, b in pairwise(found)} <= {2, 3}


def test_nothing_is_left_behind() -> None:
    model = ResidualNet().train()
    before = copy.deepcopy(model.state_dict())
    slots_of(model, images(4)[0])
    assert not any(module._forward_hooks for module in model.modules())
    assert unchanged(model, before)
