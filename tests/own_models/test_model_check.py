"""``esper.check``: batches of every form, the data it reads, and the modules it refuses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, IterableDataset

import esper
from esper.kasmina.slots import SlotSpec
from esper.leyline.errors import UsageError
from esper.own_models.attachment import attach, new_seed
from own_modules import ResidualNet, images, loader, perceptron, table
from wide_modules import transformer


class Masked(nn.Module):
    """Attention under a mask ``[T, T]``, scaled by a number without an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        x = self.inside(x)
        return self.head(scale * self.attention(x, x, x, attn_mask=mask)[0].mean(1))


def masked_batch(mask: Tensor) -> dict[str, Tensor]:
    return {
        "x": torch.randn(10, 8, 5),
        "mask": mask,
        "scale": torch.tensor(2.0),
        "labels": torch.randint(3, (10,)),
    }


def test_tensors_that_belong_to_all_samples_stay_whole_in_a_check_and_while_growing() -> None:
    batches = [masked_batch(torch.zeros(8, 8))]
    report = esper.check(Masked(), batches, progress=False)
    assert report.ok, report.problems
    assert report.step.seconds > 0.0
    result = esper.grow(Masked(), batches, batches, policy="rule", epochs=2, progress=False)
    assert len(result.history) == 2


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inside(x).mean(0))


def test_targets_of_time_first_inputs_are_not_cut() -> None:
    batch = torch.randn(12, 7, 5), torch.randint(3, (7,))
    report = esper.check(TimeFirst(), [batch], progress=False)
    assert report.ok, report.problems


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, batch_first=True)
        self.inside = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, sequences: Any) -> Tensor:
        return self.head(self.inside(self.lstm(sequences)[1][0][-1]))


def test_packed_sequences_are_checked_and_grow() -> None:
    lengths = torch.randint(1, 7, (10,))
    packed = pack_padded_sequence(torch.randn(10, 6, 5), lengths, True, False)
    batches = [(packed, torch.randint(3, (10,)))]
    report = esper.check(Packed(), batches, progress=False)
    assert report.ok, report.problems
    assert report.batch == 10
    result = esper.grow(Packed(), batches, batches, policy="rule", epochs=2, progress=False)
    assert len(result.history) == 2


@pytest.mark.parametrize("training", [True, False])
def test_a_check_leaves_every_part_in_its_own_mode(training: bool) -> None:
    model = ResidualNet().train(training)
    model.layer1.train(not training)
    before = [module.training for module in model.modules()]
    during = []
    model.layer1.register_forward_hook(lambda module, *_: during.append(module.training))
    assert esper.check(model, loader(*images(16)), progress=False).ok
    assert [module.training for module in model.modules()] == before
    # A part that is frozen in evaluation mode is also measured so; else everything trains.
    assert any(during) != training


def compiled() -> nn.Module:
    model = perceptron()
    model[0].compile()
    return model


def with_seeds() -> nn.Module:
    model = perceptron()
    slot = SlotSpec("1", 16, (1, 1), 1.0, "mlp")
    attach(model, "1", new_seed(slot, slot.kinds[0], 0, 0))
    return model


REFUSED = {
    "no module": (lambda: "net", "model: got a str; give an nn.Module"),
    "scripted": (lambda: torch.jit.trace(perceptron().eval(), torch.zeros(2, 5)), "is scripted"),
    "compiled": (compiled, "model: it is compiled"),
    "parallel": (lambda: nn.DataParallel(perceptron()), "give model.module"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(1)), "model: it has lazy layers"),
    "seeds": (with_seeds, "model: it has seeds already"),
    "frozen": (
        lambda: perceptron().requires_grad_(False),
        "model: no parameter requires a gradient, so",
    ),
    "meta": (lambda: perceptron().to("meta"), "model: it is on the device meta"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_check_refuses_what_growth_refuses_and_leaves_it_alone(case: str) -> None:
    build, message = REFUSED[case]
    model, data = build(), loader(*table(16))
    before = str(model)
    with pytest.raises(UsageError, match=message) as caught:
        esper.check(model, data, loss="mse", progress=False)
    assert "\n" not in str(caught.value)
    assert str(model) == before
    with pytest.raises(UsageError, match=message):
        esper.grow(model, data, data, loss="mse", progress=False)


class Stream(IterableDataset):
    """Samples without a known number."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*table(20), strict=True)


def test_a_stream_without_a_length_is_checked() -> None:
    data = DataLoader(Stream(), 8)
    held_back = {"test": iter([])}
    report = esper.check(perceptron(), data, loss="mse", held_back=held_back, progress=False)
    assert report.ok, report.problems
    assert (report.batch, report.batches) == (8, 3), "those that were read"
    assert report.splits == {"train": "of unknown size", "test": "of unknown size"}


def test_an_additive_mask_is_no_fault_of_the_data() -> None:
    causal = nn.Transformer.generate_square_subsequent_mask(8)
    report = esper.check(Masked(), [masked_batch(causal)], progress=False)
    assert report.ok, report.problems
    for bad in (causal + 1.0, -causal, torch.full((8, 8), -torch.inf), causal * 0.0):
        report = esper.check(Masked(), [masked_batch(bad)], progress=False)
        assert "loader: 1 of 1 minibatches hold NaN or infinite numbers" in report.problems
    x, y = table(16)
    y = torch.where(y > 0, 0.0, -torch.inf)
    report = esper.check(perceptron(), loader(x, y), loss="mse", progress=False)
    assert "loader: 1 of 1 minibatches hold NaN or infinite numbers" in report.problems


def test_labels_below_0_are_reported_wherever_they_are_but_not_the_ignored_one() -> None:
    x, y = images(32)
    y[10] = -100
    assert esper.check(ResidualNet(), loader(x, y), progress=False).ok
    y[20] = -1
    report = esper.check(ResidualNet(), loader(x, y), progress=False)
    assert report.problems == ["loader: a label is -1; count from 0"]


def test_labels_of_any_integer_kind_are_counted_and_grow() -> None:
    x, y = images(16)
    data = loader(x, y > 1)
    report = esper.check(ResidualNet(), data, progress=False)
    assert report.ok, report.problems
    assert "{0: " in str(report.class_counts), "labels are shown as integers"
    data = loader(x, y.to(torch.uint8))
    result = esper.grow(ResidualNet(), data, data, epochs=1, progress=False)
    assert result.validation.accuracy is not None


def test_the_report_says_which_layers_become_wider_and_which_cannot() -> None:
    model = nn.Sequential(transformer()[:3], nn.Linear(32, 6), nn.Softmax(1), nn.Linear(6, 3))
    report = esper.check(model, [(torch.randn(8, 4, 5), torch.arange(8) % 3)], progress=False)
    assert report.ok, str(report)
    hidden = {f"0.1.layers.{i}.linear1": (16, 32) for i in range(2)}
    assert report.widths == hidden | {"0.0 + 4 more": (8, 32)}
    assert "layers   0.1.layers.0.linear1: 16 channels, 32 under the policy widen" in str(report)
    assert report.rigid == {"1": "softmax mixes its channels"}
    assert "stay: softmax mixes its channels" in str(report)
