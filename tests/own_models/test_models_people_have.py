"""Models and loops with what plain tests lack: loose buffers, parametrizations, odd outputs."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import esper
from esper.own_models.objectives import objective
from grown_modules import quietly_grown
from own_modules import ResidualNet, images, loader

DATA = loader(*images(32))


def grown(model: nn.Module, **more: Any) -> esper.GrowthResult:
    torch.manual_seed(0)
    return quietly_grown(model, DATA, DATA, **({"epochs": 12, "price": 0.0} | more))


class Drifting(ResidualNet):
    """Adds a running mean that no state_dict holds, and counts its passes."""

    mean: Tensor
    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean().detach()
        return super().forward(x + self.mean)


def test_each_of_a_pair_of_twins_has_its_own_buffers() -> None:
    torch.manual_seed(0)
    model = Drifting()
    alone = copy.deepcopy(model)
    result = grown(model, twin=True, test_loader=DATA)
    assert result.seeds
    assert result.twin is not None
    for one in (result, result.twin):
        assert one.test is not None
        assert one.test.loss == pytest.approx(one.validation.loss)
    plain = grown(alone, policy="never", test_loader=DATA)
    assert torch.equal(plain.model.mean, result.twin.model.mean)
    assert plain.validation.loss == result.twin.validation.loss


def test_checks_leave_buffers_as_they_are() -> None:
    model = Drifting()
    before = {name: x.clone() for name, x in model.named_buffers()}
    assert esper.check(model, DATA, progress=False).ok
    assert all(torch.equal(x, before[name]) for name, x in model.named_buffers())
    grown(model, policy="never", epochs=2)
    # Two batches of training, and two of validation, in each epoch; validation at the end.
    assert float(model.passes) == 2 * (2 + 2) + 2


def test_a_run_that_is_stopped_in_the_twin_leaves_the_grown_module() -> None:
    class Stopped(Exception):
        pass

    calls: list[int] = []

    def stop(record: esper.EpochRecord) -> None:
        calls.append(record.epoch)
        if len(calls) == 15:
            raise Stopped

    model = ResidualNet()
    with pytest.raises(Stopped):
        grown(model, twin=True, callbacks=[stop])
    assert any(".seed." in name for name in model.state_dict())


def test_layers_with_parametrizations_have_slots() -> None:
    norm = parametrizations.spectral_norm
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
    tail = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    plain = nn.Sequential(*layers, *tail)
    wrapped = nn.Sequential(*(norm(x) if hasattr(x, "weight") else x for x in (*layers, *tail)))
    slots = [
        [slot.name for slot in esper.check(model, DATA, progress=False).slots]
        for model in (plain, wrapped)
    ]
    assert slots[0] == slots[1] == ["1", "3"]


def test_classes_of_images_are_on_axis_1_as_in_torch() -> None:
    goal = objective("cross_entropy")
    logits, labels = torch.randn(4, 8, 8, 8), torch.randint(8, (4, 8, 8))
    # The order of the sums depends on the processor.
    torch.testing.assert_close(goal.loss(logits, labels), F.cross_entropy(logits, labels))
    last = torch.randn(4, 5, 6, 8)
    expected = F.cross_entropy(last.flatten(0, 2), labels[:, :5, :6].flatten())
    torch.testing.assert_close(goal.loss(last, labels[:, :5, :6]), expected)


def test_a_state_beside_the_batch_does_not_hinder_growth() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 8, batch_first=True)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
            return self.head(self.lstm(x, state)[0].mean(1))

    model = Recurrent()
    optimizer = SGD(model.parameters(), lr=0.1)
    growth = esper.Growth(model, optimizer, validate=lambda: 0.5, report=None)
    model(torch.randn(6, 7, 5), (torch.zeros(1, 6, 8), torch.zeros(1, 6, 8)))
    growth.step()
    assert [slot.name for slot in growth.slots] == ["lstm"]


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor | None = None


@pytest.mark.parametrize("loss", ["cross_entropy", "model"])
def test_outputs_may_be_objects(loss: str) -> None:
    class Answering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = ResidualNet()

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Answer:
            logits = self.body(x)
            return Answer(logits, None if labels is None else F.cross_entropy(logits, labels))

    data = [{"x": x, "labels": y} for x, y in DATA]

    def accuracy(output: Tensor, target: Tensor) -> float:
        return float((output.argmax(1) == target).float().mean())

    result = esper.grow(
        Answering(), data, data, loss=loss, metric=accuracy, epochs=8, progress=False
    )
    assert result.validation.metric is not None


def test_a_reentrant_checkpoint_is_checked_without_costs() -> None:
    class Checkpointed(ResidualNet):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=True)

    report = esper.check(Checkpointed(), DATA, progress=False)
    assert report.ok, report.problems
    assert any("memory and time are not known" in remark for remark in report.remarks)


def test_deep_supervision_of_training_alone_is_no_mistake() -> None:
    class Deep(ResidualNet):
        def forward(self, x: Tensor) -> Any:
            found = super().forward(x)
            return [found, found] if self.training else found

    def loss(output: Any, target: Tensor) -> Tensor:
        parts = output if isinstance(output, list) else [output]
        assert len(parts) == (2 if target.ndim == 2 else 1)
        return sum(F.cross_entropy(part, target.view(-1, len(parts))[:, 0]) for part in parts)

    train = [(x, y[:, None].repeat(1, 2)) for x, y in DATA]
    result = esper.grow(Deep(), train, DATA, loss=loss, epochs=2, policy="never", progress=False)
    assert len(result.history) == 2


def test_a_batch_sampler_keeps_its_order() -> None:
    def trained(measures: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        dataset = TensorDataset(*images(32))
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
        data = DataLoader(dataset, batch_sampler=BatchSampler(sampler, 8, False))
        model = ResidualNet().train()
        if measures:
            esper.grow(model, data, DATA, epochs=1, policy="never", progress=False)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for x, y in data:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return model.state_dict()

    one, two = trained(True), trained(False)
    assert all(torch.equal(x, two[name]) for name, x in one.items())


class GraphNet(nn.Sequential):
    """Two graph convolutions (Kipf and Welling, 2017) on the nodes of one graph."""

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self[1](adjacency @ self[0](adjacency @ x).relu())


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_graph_whose_nodes_belong_together_is_not_cut(is_sparse: bool) -> None:
    torch.manual_seed(0)
    x, adjacency = torch.randn(20, 8), (torch.rand(20, 20) < 0.2).float()
    y = (adjacency @ x)[:, :3].argmax(1)
    data = [((x, adjacency.to_sparse() if is_sparse else adjacency), y)] * 2
    model = GraphNet(nn.Linear(8, 4), nn.Linear(4, 3))
    report = esper.check(model, data, progress=False)
    assert (report.ok, report.batch, report.widths["0"][0]) == (True, 20, 4)
    assert report.step.seconds > 0.0
    assert quietly_grown(copy.deepcopy(model), data, data, policy="widen", epochs=4).widths
    history = quietly_grown(model, data, data, policy="rule", epochs=4).history
    assert any("germinates" in line for record in history for line in record.actions)
