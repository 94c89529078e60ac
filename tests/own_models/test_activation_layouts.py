"""The channels of an activation are on the axis on which the layers around it have them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import Slot
from esper.kasmina.slots import SlotSpec
from esper.leyline.errors import UsageError
from esper.own_models.module_traces import _time_first
from esper.own_models.slot_search import find_slots
from grown_modules import slots_of


class Permuted(nn.Module):
    """Layers, and then another order of axes."""

    def __init__(self, order: tuple[int, ...], *layers: nn.Module, flat: bool = False):
        super().__init__()
        self.layers, self.order, self.flat = nn.Sequential(*layers), order, flat

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return (x.flatten(2) if self.flat else x).permute(self.order)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm, self.widen = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.narrow(self.widen(y).relu()).permute(0, 3, 1, 2)


class Inception(nn.Module):
    """Branches whose outputs are concatenated."""

    def __init__(self, inputs: int, *widths: int):
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(inputs, width, 1) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm of [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Pooled(nn.Module):
    """A linear layer for the mean over all axes but two."""

    def __init__(self, width: int, *axes: int):
        super().__init__()
        self.head, self.axes = nn.Linear(width, 3), axes

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean(self.axes))


FIRST, LAST = (0, 3, 1, 2), (0, 2, 3, 1)


def slot(x: Tensor, name: str, *parts: nn.Module) -> SlotSpec:
    return slots_of(nn.Sequential(*parts), x, [name])[0]


def layout(x: Tensor, name: str, *parts: nn.Module) -> tuple[str, int]:
    found = slot(x, name, *parts)
    return found.family, found.channels


@pytest.mark.parametrize("width", [6, 8])
def test_blocks_that_permute_behind_a_linear_layer_have_channels_first(width: int) -> None:
    x = torch.randn(4, width, 8, 8)
    blocks = ConvNeXtBlock(width), ConvNeXtBlock(width), Pooled(width, 2, 3)
    assert layout(x, "0", *blocks) == ("conv", width)
    if width != 8:
        assert layout(x, "1", *blocks) == ("conv", width)
    # The block is trained on the axes on which its seed works.
    assert slot(x, "0", *blocks).size == (8, 8)


@pytest.mark.parametrize("width", [6, 8])
def test_a_convolution_that_is_permuted_has_channels_last(width: int) -> None:
    x = torch.randn(4, 1, 8, 8)
    patches = Permuted(LAST, nn.Conv2d(1, width, 1))
    assert layout(x, "0", patches, nn.LayerNorm(width), Pooled(width, 1, 2)) == ("mlp", width)


def test_a_square_of_channels_and_pixels_has_the_channels_where_its_convolution_has_them() -> None:
    x = torch.randn(4, 1, 8, 8)
    stem = nn.Sequential(nn.Conv2d(1, 8, 1), nn.ReLU())
    assert layout(x, "0", stem, Pooled(8, 2, 3)) == ("conv", 8)
    assert layout(x, "0", stem, nn.Conv2d(8, 3, 8), nn.Flatten()) == ("conv", 8)
    last = Permuted(LAST, nn.Identity())
    for name in ("0.0", "0.1"):
        assert layout(x, name, stem, last, nn.LayerNorm(8), Pooled(8, 1, 2)) == ("conv", 8)


def test_concatenated_channels_come_first_though_the_last_of_them_are_as_many_as_pixels() -> None:
    x = torch.randn(4, 1, 8, 8)
    block, last = Inception(1, 4, 8), Permuted(LAST, nn.Identity())
    assert layout(x, "0", block, nn.Conv2d(12, 5, 1), Pooled(5, 2, 3)) == ("conv", 12)
    assert layout(x, "0", block, Pooled(12, 2, 3)) == ("conv", 12)
    assert layout(x, "0", block, last, nn.Linear(12, 5), Pooled(5, 1, 2)) == ("conv", 12)


def test_a_norm_that_permutes_within_has_channels_first() -> None:
    x = torch.randn(4, 1, 8, 8)
    stem = nn.Conv2d(1, 6, 1), LayerNorm2d(6), nn.ReLU()
    assert layout(x, "1", *stem, Pooled(6, 2, 3)) == ("conv", 6)
    assert layout(x, "2", *stem, Pooled(6, 2, 3)) == ("conv", 6)
    square = torch.randn(4, 6, 6, 6)
    block = Inception(6, 2, 4), LayerNorm2d(6), Pooled(6, 2, 3)
    assert layout(square, "0", *block) == ("conv", 6)


@pytest.mark.parametrize("width", [6, 16])
def test_patches_of_an_image_are_a_sequence(width: int) -> None:
    x = torch.randn(4, 1, 8, 8)
    patches = Permuted((0, 2, 1), nn.Conv2d(1, width, 2, 2), flat=True)
    found = layout(x, "0", patches, nn.LayerNorm(width), Pooled(width, 1))
    assert found == ("sequence", width)


def test_an_embedding_as_wide_as_its_sequences_are_long_is_a_sequence() -> None:
    x = torch.randint(12, (4, 9))
    turned = Permuted((0, 2, 1), nn.Identity())
    ends = turned, nn.Conv1d(9, 4, 3), Pooled(4, 2)
    assert layout(x, "0", nn.Embedding(12, 9), *ends) == ("sequence", 9)
    assert layout(x, "1", nn.Embedding(12, 9), nn.Dropout(), *ends) == ("sequence", 9)


def test_a_vector_that_becomes_an_image_has_channels_first() -> None:
    parts = nn.Linear(5, 54), nn.Unflatten(1, (6, 3, 3)), nn.ConvTranspose2d(6, 4, 2)
    assert layout(torch.randn(4, 5), "1", *parts, Pooled(4, 2, 3)) == ("conv", 6)


def test_a_sequence_that_begins_with_time_has_channels_last() -> None:
    x = torch.randn(8, 5, 6)
    turned = Permuted((2, 0, 1), nn.Conv1d(5, 8, 1))
    with torch.no_grad():
        model = nn.Sequential(turned, nn.Conv1d(8, 4, 1), nn.Flatten(0, 1), nn.Linear(8, 2)).eval()
        (found,) = find_slots(model, lambda half: model(x) if not half else turned(x[:4]), ["0"])
    assert (found.family, found.channels) == ("sequence", 8)


@pytest.mark.parametrize("width", [6, 9])
def test_a_transposed_sequence_is_refused(width: int) -> None:
    x = torch.randn(4, 9, 5)
    transposed = Permuted((0, 2, 1), nn.Linear(5, width))
    with pytest.raises(UsageError, match=r"'0' returns \[B, C, L\]"):
        slot(x, "0", transposed, nn.Conv1d(width, 4, 3), Pooled(4, 2))


def test_a_marker_with_another_number_of_channels_is_refused() -> None:
    x = torch.randn(4, 8, 6, 6)
    ends = nn.Conv2d(8, 8, 1), Pooled(8, 2, 3)
    message = r"^slots: '1' is esper.Slot\(5\), but its activation has 8 channels; write esper"
    with pytest.raises(UsageError, match=message):
        slot(x, "1", ends[0], Slot(5), ends[1])
    assert layout(x, "1", ends[0], Slot(8), ends[1]) == ("conv", 8)


def test_a_marker_says_which_axis_has_the_channels() -> None:
    x = torch.randn(4, 1, 6, 6)
    parts = nn.Conv2d(1, 8, 1), Permuted(LAST, nn.PixelShuffle(2)), Slot(2), Pooled(2, 1, 2)
    assert layout(x, "2", *parts) == ("mlp", 2)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_module_whose_batch_axis_is_unknown_is_as_it_says(batch_first: bool) -> None:
    lstm = nn.LSTM(4, 4, batch_first=batch_first)
    trace: Any = SimpleNamespace(batch_axis=None, module=lstm)
    assert _time_first(trace, False) == _time_first(trace, True) == (not batch_first)
    trace.module = nn.Linear(4, 4)
    assert not _time_first(trace, True)
