"""Batches of every form, and measuring that disturbs no random number."""

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from esper.kasmina.nested import map_leaves
from esper.leyline.errors import UsageError
from esper.own_models.samples import (
    call,
    evaluating,
    first_batch,
    first_samples,
    random_state_kept,
    sample_count,
    to_device,
    unpack,
    unpack_whole,
)
from own_modules import ResidualNet

x, y = torch.randn(4, 3), torch.arange(4)


class Keywords(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left - 2.0 * right


def test_batches_are_split_by_their_form() -> None:
    assert unpack((x, y)) == (x, y)
    assert unpack([x, y]) == (x, y)
    inputs, target = unpack((x, 2 * x, y))
    assert target is y
    assert torch.equal(call(Keywords(), inputs), -3.0 * x)
    inputs, target = unpack({"left": x, "right": 2 * x, "labels": y})
    assert target is y
    assert torch.equal(call(Keywords(), inputs), -3.0 * x)
    inputs, target = unpack(torch.arange(10).view(2, 5))
    assert inputs.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert target.tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert unpack(x) == (x, x)
    batch = {"left": x, "labels": y}
    assert unpack_whole(batch) == (batch, y)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"image": x}, "a batch has the keys image; call the target 'labels'"),
        ("text", "a batch is a str; yield"),
        ((x,), "a batch is a tuple; yield"),
    ],
)
def test_other_batches_are_refused(batch: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        unpack(batch)
    with pytest.raises(UsageError, match="'model' passes a whole batch"):
        unpack_whole(x)


def test_loaders_that_give_nothing_or_only_once_are_refused() -> None:
    with pytest.raises(UsageError, match="train: it yields no batch"):
        first_batch([], "train")
    with pytest.raises(UsageError, match="train: it can be read only once"):
        first_batch(iter([x]), "train")


def test_samples_are_counted_and_taken_in_every_form() -> None:
    for value in (x, (x, y), {"left": x, "flag": True}):
        assert sample_count(value) == 4
    assert torch.equal(first_samples({"left": x}, 2, 4)["left"], x[:2])
    assert [len(part) for part in first_samples((x, y), 3, 4)] == [3, 3]
    assert to_device({"left": [x], "flag": "on"}, torch.device("cpu"))["flag"] == "on"
    batch = {"left": [x, "on"], "right": (y, 2)}
    shapes = {"left": [(4, 3), None], "right": ((4,), None)}
    assert map_leaves(batch, lambda part: tuple(part.shape), lambda part: None) == shapes


def test_only_tensors_with_an_element_per_sample_are_cut() -> None:
    inputs = {"scale": torch.tensor(0.5), "x": x, "mask": torch.zeros(3, 3)}
    assert sample_count(inputs) == 4, "a number is no sample"
    few = first_samples(inputs, 2, 4)
    assert float(few["scale"]) == 0.5
    assert torch.equal(few["x"], x[:2])
    assert few["mask"].shape == (3, 3)
    assert sample_count({"parts": [{"x": x}]}) == 4
    assert sample_count((torch.tensor(0.5), "on")) == 1


def test_named_tuples_keep_their_names() -> None:
    class Batch(NamedTuple):
        image: torch.Tensor
        mask: torch.Tensor

    few = first_samples(to_device(Batch(x, y), torch.device("cpu")), 2, 4)
    assert isinstance(few, Batch)
    assert torch.equal(few.mask, y[:2])


@pytest.mark.parametrize("lengths", [[3, 5, 2, 4], [5, 4, 3, 2]], ids=["shuffled", "sorted"])
def test_packed_sequences_are_one_argument_and_are_counted_moved_and_cut(
    lengths: list[int],
) -> None:
    ordered = sorted(lengths, reverse=True) == lengths
    packed = pack_padded_sequence(torch.randn(4, 5, 2), lengths, True, ordered)
    assert sample_count(packed) == sample_count((packed, y[:3])) == 4
    lstm = nn.LSTM(2, 3, batch_first=True)
    _, (whole, _) = call(lstm, packed)
    _, (some, _) = call(lstm, first_samples(packed, 2, 4))
    torch.testing.assert_close(some, whole[:, :2])
    assert first_samples(packed, 2, 7) is packed
    there = to_device((packed, y), torch.device("meta"))[0]
    assert isinstance(there, PackedSequence)
    assert there.data.is_meta
    with pytest.raises(UsageError, match="a batch is a PackedSequence"):
        unpack(packed)


def test_whatever_has_a_method_to_is_moved() -> None:
    class Graph:
        def to(self, device: torch.device) -> str:
            return f"on {device}"

    there = to_device({"graph": Graph(), "name": "a"}, torch.device("cpu"))
    assert there == {"graph": "on cpu", "name": "a"}


def test_measuring_disturbs_no_random_number() -> None:
    data = TensorDataset(torch.arange(20))
    own = torch.Generator().manual_seed(1)
    shuffled = DataLoader(data, 4, shuffle=True, generator=own)

    def drawn() -> list[object]:
        order = torch.cat([batch[0] for batch in shuffled]).tolist()
        return [torch.rand(1).item(), np.random.rand(), random.random(), order]

    def seeded() -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        own.manual_seed(1)

    seeded()
    expected = drawn()
    seeded()
    with random_state_kept(shuffled):
        drawn()
    first_batch(shuffled, "train")
    assert drawn() == expected


def test_every_module_is_put_back_in_its_own_mode() -> None:
    model = ResidualNet().train()
    model.layer1.eval()
    before = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
