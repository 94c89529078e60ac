"""No seed grows where it would be called as a layer, could never learn, or reads a prediction."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from esper.leyline.errors import UsageError
from grown_modules import slots_of
from own_modules import ResidualNet, images, tokens, unchanged


def found(model: nn.Module, x: Tensor, names: list[str] | None = None) -> list[str]:
    return [slot.name for slot in slots_of(model, x, names)]


class DenseBlock(nn.ModuleDict):
    """Each layer reads all activations before it, as in a DenseNet."""

    def __init__(self, width: int, growth: int):
        layers = (nn.Conv2d(width + i * growth, growth, 3, padding=1) for i in range(2))
        super().__init__({f"layer{i}": layer for i, layer in enumerate(layers)})

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for _, layer in self.items():
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


class Strict(DenseBlock):
    """Calls the layers with what only they accept."""

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for _, layer in self.items():
            features.append(layer(torch.cat(features, 1))[:, :, :8])
            assert features[-1].shape[1] == 4
        return torch.cat(features, 1)


class Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x).relu()
        return x


class Counted(nn.ModuleList):
    """Calls its submodules by their numbers."""

    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self)):
            x = self[i](x)
        return x


class Net(nn.Module):
    """A body of three blocks between a stem of 4 channels and a head."""

    def __init__(self, *body: nn.Module, width: int = 4):
        super().__init__()
        self.stem, self.body = nn.Conv2d(1, 4, 3, padding=1), nn.Sequential(*body)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


CALLED = "calls all of its submodules, and would call the seed"


@pytest.mark.parametrize(
    ("block", "width", "reason"),
    [
        (DenseBlock(4, 4), 12, CALLED),
        (Strict(4, 4), 12, CALLED),
        (Looping(), 4, CALLED),
        (Counted([nn.Conv2d(4, 4, 1), nn.ReLU()]), 4, "fails with one more submodule"),
    ],
)
def test_a_block_that_would_call_the_seed_is_refused_and_others_are_not(
    block: nn.Module, width: int, reason: str
) -> None:
    narrow = ResidualNet(width=4).layer1[0]
    model, x = Net(narrow, block, width=width), images(4)[0]
    with pytest.raises(UsageError, match=rf"^slots: 'body.1' {reason}"):
        found(model, x, ["body.1"])
    assert found(model, x, ["body.0"]) == ["body.0"]
    assert "body.1" not in found(model, x)


def test_several_blocks_that_would_call_seeds_leave_the_layers_in_them() -> None:
    model, x = Net(Looping(), DenseBlock(4, 4), Counted([nn.Conv2d(12, 4, 1)])), images(4)[0]
    places = found(model, x)
    assert len(places) >= 2
    assert not {"body.0", "body.1", "body.2"} & set(places)


def test_a_block_that_fails_with_a_seed_does_not_hide_the_next() -> None:
    model = Net(Strict(4, 4), nn.Conv2d(12, 4, 1), Looping())
    with pytest.raises(UsageError, match=f"'body.2' {CALLED}"):
        found(model, images(4)[0], ["body.2"])


class State(nn.Module):
    """Reads the last state of a recurrent layer and not its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(12, 8), nn.LSTM(8, 6, batch_first=True)
        self.mix, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, (state, _) = self.lstm(self.embedding(x))
        return self.head(self.mix(state[-1]).relu())


class Frozen(Net):
    """A body that is computed without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.body(x)
        return self.head(self.stem(x).mean((2, 3)))


def test_a_module_that_gets_no_gradient_has_no_seed() -> None:
    message = "gets no gradient from the outputs; name another module"
    with pytest.raises(UsageError, match=f"^slots: 'lstm' {message}"):
        found(State(), tokens(4), ["lstm"])
    assert found(State(), tokens(4)) == ["embedding", "mix"]

    model, x = Frozen(nn.Conv2d(1, 5, 1), nn.ReLU(), nn.Conv2d(5, 1, 1)), images(4)[0]
    with pytest.raises(UsageError, match=f"^slots: 'body.1' {message}"):
        found(model, x, ["body.1"])
    assert found(model, x) == ["stem"]


def test_frozen_weights_before_a_trained_layer_get_a_gradient() -> None:
    model = ResidualNet()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.head.requires_grad_(True)
    assert len(found(model, images(4)[0])) == 4


class Checkpointed(Net):
    """A body whose graph is built in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(checkpoint(self.body, x, use_reentrant=True).mean((2, 3)))


class Unused(Checkpointed):
    """Computes more than it returns, as a graph."""

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return super().forward(x)


def test_what_a_checkpoint_does_not_hide_is_checked() -> None:
    model = Unused(nn.Conv2d(4, 4, 1), nn.ReLU())
    model.unused = nn.Conv2d(1, 4, 3)
    with pytest.raises(UsageError, match="'unused' gets no gradient from the outputs"):
        found(model, images(4)[0], ["unused"])


class Wrapped(Net):
    """Returns an object of its own, beside a tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, SimpleNamespace]:
        return self.head.weight.norm(), SimpleNamespace(logits=super().forward(x))


class Predicting(Net):
    """Returns classes in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


class Refusing(Net):
    """Fails where evaluation mode has gradients."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not self.training:
            raise RuntimeError("evaluation needs no gradients")
        return super().forward(x)


@pytest.mark.parametrize("build", [Checkpointed, Wrapped, Predicting, Refusing])
def test_where_gradients_are_not_known_every_place_may_have_a_seed(build: type[Net]) -> None:
    model = build(nn.Conv2d(4, 5, 1), nn.ReLU(), nn.Conv2d(5, 4, 1))
    assert found(model, images(4)[0]) == ["stem", "body.1", "body.2"]


class TwoHeads(nn.Module):
    """Two predictions, and the features of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.features = nn.Sequential(nn.Linear(8, 6), nn.Tanh())
        self.cls = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3), nn.ReLU())
        self.aux = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        z = self.stem(x)
        features = self.features(z)
        return {"logits": self.cls(features), "more": (features, [self.aux(z), features])}


def test_no_seed_is_found_behind_a_prediction_but_behind_features_that_are_returned() -> None:
    model, x = TwoHeads(), torch.randn(4, 5)
    assert found(model, x) == ["stem.1", "features.1", "cls.1"]
    assert found(model, x, ["cls"]) == ["cls.3"]


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.linear(x.mean((2, 3)))]
        return x + self.kept[0][:, :, None, None]


def test_nothing_is_left_of_the_probes() -> None:
    model = Net(Looping(), Keeping(), DenseBlock(4, 4), width=12)
    names = [name for name, _ in model.named_modules()]
    before = copy.deepcopy(model.state_dict())
    found(model, images(4)[0])
    assert [name for name, _ in model.named_modules()] == names
    assert not any(module._forward_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert unchanged(model, before)
    assert not any(x.requires_grad for x in model.body[1].kept)
    model.stem = nn.Conv2d(2, 4, 3)
    with pytest.raises(RuntimeError):
        found(model, images(4)[0])
    assert not any(module._forward_hooks for module in model.modules())
