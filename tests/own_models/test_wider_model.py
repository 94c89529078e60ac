"""``esper.widen`` and ``esper.deepen`` in a training loop of one's own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_width_search import numbers, residual
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import esper
from esper.kasmina.wider_layers import layer_sizes
from esper.leyline.errors import UsageError
from esper.own_models import layer_growth, new_units
from own_modules import loader, unchanged
from wide_modules import HOSTS, Twice, multilayer, normed


class Loop:
    """Adam with a schedule and an average of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.data = model, loader(*numbers(256, 0))
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 12)
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def train(self, epochs: int) -> float:
        """The loss of the last minibatch."""
        for _ in range(epochs):
            for x, y in self.data:
                self.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.ema.update_parameters(self.model)
            self.scheduler.step()
        return float(loss.detach())

    def outputs(self) -> list[Tensor]:
        """Of the model and of the average, in evaluation mode."""
        models = [copy.deepcopy(model).eval() for model in (self.model, self.ema.module)]
        return [model(numbers(64, 2)[0]).detach() for model in models]

    def state(self) -> list[dict[str, Any]]:
        parts = self.model, self.ema, self.optimizer, self.scheduler
        return [copy.deepcopy(part.state_dict()) for part in parts]


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(equal, one, two))
    return torch.equal(one, two) if isinstance(one, Tensor) else one == two


@pytest.mark.parametrize("name", ["widen", "deepen"])
def test_several_optimizers_each_keep_their_parameters_and_states(name: str) -> None:
    """Muon for matrices and AdamW for the others."""
    torch.manual_seed(0)
    model = MAKERS[name]()
    parts = [[p for p in model.parameters() if (p.ndim == 2) == flat] for flat in (True, False)]
    optimizers = torch.optim.Muon(parts[0], lr=0.01), torch.optim.AdamW(parts[1], lr=0.01)

    def train() -> None:
        for x, y in loader(*numbers(128, 0)):
            nn.functional.cross_entropy(model(x), y).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()

    def state() -> list[dict[str, Any]]:
        return [copy.deepcopy(part.state_dict()) for part in (model, *optimizers)]

    train()
    before = state()
    only = getattr(esper, name)(model, loader(*numbers(64, 0)), optimizer=optimizers[0])
    assert any("if another trains it, give a list" in line for line in only.lines)
    only.undo()
    enlargement = getattr(esper, name)(model, loader(*numbers(64, 0)), optimizer=optimizers)
    assert not any("give a list" in line for line in enlargement.lines)
    wide = {n: p.detach().clone() for n, p in model.named_parameters()}
    for each, flat in zip(optimizers, (True, False), strict=True):
        parameters = each.param_groups[0]["params"]
        assert {*parameters} == {p for p in model.parameters() if (p.ndim == 2) == flat}
        assert len(parameters) == len({*parameters})
    enlargement.undo()
    assert equal(state(), before)
    getattr(esper, name)(model, loader(*numbers(64, 0)), optimizer=optimizers)
    train()
    assert not any(torch.equal(p, wide[n]) for n, p in model.named_parameters())


MAKERS = {"widen": multilayer, "deepen": residual}


def loop_of(function: str) -> Loop:
    torch.manual_seed(0)
    return Loop(MAKERS[function]())


def enlarge(function: str, loop: Loop, **more: Any) -> esper.Enlargement:
    arguments = {"optimizer": loop.optimizer, "averages": [loop.ema.module]} | more
    return getattr(esper, function)(loop.model, loop.data, **arguments)


def attentive() -> nn.Module:
    """A layer of a transformer that reads numbers as tokens."""
    return nn.Sequential(
        nn.Unflatten(1, (6, 1)), nn.Linear(1, 4),
        nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), nn.AvgPool2d((6, 1)),
        nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("function", "maker"),
    [*MAKERS.items(), ("widen", normed), ("widen", Twice), ("widen", attentive)],
    ids=[*MAKERS, "normed", "twice", "attentive"],
)
def test_a_loop_goes_on_with_a_larger_model_that_computes_the_same(
    function: str, maker: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    loop = Loop(maker())
    loop.train(3)
    size = sum(p.numel() for p in loop.model.parameters())
    before, random = loop.outputs(), torch.get_rng_state()
    moment = loop.optimizer.state[next(loop.model.parameters())]["exp_avg"].clone()
    enlargement = enlarge(function, loop)
    assert torch.equal(random, torch.get_rng_state())
    torch.testing.assert_close(loop.outputs(), before)
    parameters = list(loop.model.parameters())
    assert enlargement.parameters == (size, sum(p.numel() for p in parameters))
    assert enlargement.parameters[1] > size
    assert str(enlargement).endswith(f"{size:,} -> {enlargement.parameters[1]:,} parameters")
    (group,) = loop.optimizer.param_groups
    assert [*map(id, group["params"])] == [*map(id, parameters)]
    assert torch.equal(loop.optimizer.state[parameters[0]]["exp_avg"][: len(moment)], moment)
    loop.train(9)
    assert loop.scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-9)
    for one, two in zip(parameters, loop.ema.module.parameters(), strict=True):
        assert one.shape == two.shape
        assert not torch.equal(one, two)


@pytest.mark.parametrize("function", MAKERS)
def test_undo_restores_model_average_and_optimizer_to_the_bit(function: str) -> None:
    loop = loop_of(function)
    loop.train(2)
    before = loop.state()
    enlargement = enlarge(function, loop)
    assert not equal(before, loop.state())
    enlargement.undo()
    assert equal(before, loop.state())
    enlarge(function, loop, averages=loop.ema.module).undo()
    assert equal(before, loop.state())
    assert layer_sizes(loop.model) == layer_sizes(MAKERS[function]())


@pytest.mark.parametrize("function", MAKERS)
def test_a_later_process_resumes_the_loop_in_the_same_bits(function: str) -> None:
    loop = loop_of(function)
    loop.train(2)
    enlarge(function, loop)
    loop.train(2)
    states, random = loop.state(), torch.get_rng_state()
    loop.train(3)
    later = Loop(esper.load_grown(MAKERS[function](), states[0]))
    for part, state in zip((later.ema, later.optimizer, later.scheduler), states[1:], strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(random)
    later.train(3)
    assert equal(loop.state(), later.state())


def test_factors_of_large_tables_have_no_candidates(monkeypatch) -> None:
    """Nothing with weights reads the products, by which they could be compared."""
    monkeypatch.setattr(new_units, "CANDIDATES", 10**12)
    make, inputs, (group,) = HOSTS["factors"]
    model, x = make(), inputs()
    change = esper.widen(model, [(x, model(x).detach())], loss="mse", factor=3)
    assert str(change).startswith(f"{group}: 4 -> 12 channels\n")


def test_slots_price_and_limit_restrict_what_becomes_wider() -> None:
    def widths(**more: Any) -> tuple[int, int]:
        loop = loop_of("widen")
        enlarge("widen", loop, **more)
        return loop.model[0].out_features, loop.model[3].out_features

    assert widths() == (32, 32)
    assert widths(slots=["3"]) == (4, 32)
    assert widths(slots=["3"], factor=1.5) == (4, 6)
    assert widths(price=10.0) == (4, 4)
    assert widths(factor=1.01) == (4, 4)
    assert 4 < widths(max_parameters=120)[0] < 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_unit_of_rounding_is_no_change_of_the_output(dtype: torch.dtype) -> None:
    x = torch.linspace(1.0, 2.0, 50).to(dtype)
    unit = torch.finfo(dtype).eps
    assert layer_growth.equal(x, x * (1.0 + unit))
    assert not layer_growth.equal(x, x * (1.0 + 1e-4 + 4.0 * unit))


class FixedSize(nn.Module):
    """Its second layer is read in a size that is written into the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x).relu()).relu().view(-1, 4))


def test_a_layer_whose_size_the_forward_pass_fixes_stays_and_the_others_grow() -> None:
    model, data = FixedSize(), loader(*numbers(256, 0))
    assert "two stay: the forward pass takes no more" in str(esper.check(model, data))
    assert esper.grow(model, data, data, epochs=2, price=0.0).grew
    assert model.one.out_features > 4
    assert model.two.out_features == 4


class SkippedBlock(nn.Module):
    """Stochastic depth that leaves its block out in every pass of the training."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x if self.training else x + self.block(x))


def test_a_block_that_training_left_out_becomes_wider_too() -> None:
    model, (x, y) = SkippedBlock(), numbers(64, 0)
    before = model.eval()(x)
    esper.widen(model.train(), loader(x, y), factor=2.0)
    assert model.block[0].out_features == 8
    torch.testing.assert_close(model.eval()(x), before)


class Router(nn.Linear):
    """Returns scores beside logits."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(x)
        return logits.softmax(-1), logits


class Momentum(nn.Module):
    """Calls its layers once more without gradients, and one that returns several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.router = nn.Linear(6, 4), nn.Linear(4, 4), Router(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.second(self.first(x).relu())
        y = self.second(self.first(x).relu())
        return self.router((y + target).relu())[1]


def test_layers_that_also_run_without_gradients_or_return_several_outputs_become_wider() -> None:
    model, (x, y) = Momentum(), numbers(64, 0)
    before = model.eval()(x)
    esper.widen(model, loader(x, y), factor=2.0)
    assert (model.first.out_features, model.second.out_features) == (8, 8)
    torch.testing.assert_close(model(x), before)


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_layers_with_a_weight_norm_become_wider_in_a_loop(norm: Any) -> None:
    torch.manual_seed(0)
    layers = norm(nn.Linear(6, 4)), nn.ReLU(), norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 3)
    model, (x, y) = nn.Sequential(*layers), numbers(64, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for factor in (2.0, 1.5):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        before = model(x)
        esper.widen(model, loader(x, y), optimizer=optimizer, factor=factor)
        torch.testing.assert_close(model(x), before)
    lengths = [p for name, p in model.named_parameters() if name.endswith(("original0", "_g"))]
    assert [len(each) for each in lengths] == [12, 12]
    assert all(bool((each > 0.0).all()) for each in lengths)


class Product(nn.Module):
    """A linear layer of one's own, whose weight is ``[inputs, outputs]`` or half as large."""

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        super().__init__()
        weight = layer.weight.detach().clone() / (2.0 if kind == "scaled" else 1.0)
        self.weight = nn.Parameter((weight.T if kind == "turned" else weight).contiguous())
        self.bias, self.kind = nn.Parameter(layer.bias.detach().clone()), kind
        self.register_buffer("scale", torch.tensor(2.0 if kind == "scaled" else 1.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "turned":
            return torch.addmm(self.bias, x, self.weight)
        return nn.functional.linear(x, self.scale * self.weight, self.bias)


@pytest.mark.parametrize("kind", ["plain", "turned", "scaled"])
def test_weights_of_ones_own_grow_and_learn_as_those_of_layers_do(kind: str) -> None:
    torch.manual_seed(0)
    layers = multilayer().eval()
    own = copy.deepcopy(layers)
    for name, layer in layers.named_children():
        if isinstance(layer, nn.Linear):
            setattr(own, name, Product(layer, kind))
    loops, epochs = (Loop(layers), Loop(own)), 0 if kind == "scaled" else 2  # Adam sees the scale
    for loop in loops:
        torch.manual_seed(1)
        arguments = {"optimizer": loop.optimizer, "averages": loop.ema.module}
        for _ in range(epochs):
            loop.train(1)
        esper.widen(loop.model, loop.data, factor=1.5, **arguments)
        for _ in range(epochs):
            loop.train(1)
    tolerance = 1e-5 * (kind == "turned")
    for part in ("model", "ema"):
        theirs, ours = (getattr(loop, part).state_dict() for loop in loops)
        for name, x in theirs.items():
            y = ours[name].T if kind == "turned" and x.ndim > 1 else ours[name]
            y = y * 2.0 if kind == "scaled" and x.ndim > 1 else y
            torch.testing.assert_close(y, x, rtol=100 * tolerance, atol=tolerance)
    assert layers[0].out_features == 6


def test_where_nothing_becomes_larger_a_line_says_why() -> None:
    for function, model, line in (
        ("widen", nn.Linear(6, 3), "nothing is widened (no hidden layer of a known kind)"),
        ("deepen", multilayer(), "nothing is deepened (no block is repeated)"),
    ):
        state = copy.deepcopy(model.state_dict())
        enlargement = getattr(esper, function)(model, loader(*numbers(64, 0)))
        assert enlargement.lines == (line,)
        assert enlargement.parameters[0] == enlargement.parameters[1]
        enlargement.undo()
        assert unchanged(model, state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factor": 1.0}, "factor: got 1.0; give a number above 1"),
        ({"factor": float("nan")}, "factor: got nan"),
        ({"factor": "2"}, "factor: got '2'; give a number above 1"),
        ({"optimizer": "adam"}, "optimizer: got a str; give one of torch"),
        ({"slots": "0"}, "slots: got the string '0'; give a list of names"),
        ({"price": -1.0}, "price: got -1.0"),
        ({"max_parameters": 10}, "max_parameters: the module has 63 already"),
        ({"slots": ["9"]}, "slots: Sequential has no module '9'"),
        ({"averages": [nn.Linear(2, 2)]}, "averages: got a Linear with other parameters"),
        ({"averages": [AveragedModel(multilayer())]}, "averages: got a AveragedModel"),
        ({"optimizer": torch.optim.SGD(residual().parameters())}, "optimizer: it has no parameter"),
        ({"loss": "mse"}, "loss: "),
        ({"loss": lambda output, _: output}, "loss: it has the shape"),
    ],
)
def test_a_mistake_is_a_line_and_changes_nothing(arguments: Any, message: str) -> None:
    loop = loop_of("widen")
    before = loop.state()
    with pytest.raises(UsageError, match="^" + message) as error:
        enlarge("widen", loop, **arguments)
    assert "\n" not in str(error.value)
    assert equal(before, loop.state())
