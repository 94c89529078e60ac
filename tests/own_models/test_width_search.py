"""The policy ``widen``: which channels are new, what the counterfactual decides, and the result."""

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import esper
from esper.kasmina import width_prior
from esper.kasmina.channel_groups import ChannelGroup, channel_groups
from esper.kasmina.nested import tensors
from esper.kasmina.new_channels import NewChannels
from esper.kasmina.wider_groups import wider_groups
from esper.kasmina.wider_layers import layer_sizes, parameter_count, widen
from esper.leyline.errors import UsageError
from esper.own_models import layer_growth, new_units, width_search
from esper.own_models.growth_result import price_of
from esper.own_models.new_units import propose
from esper.own_models.objectives import Evaluator, Validation
from esper.own_models.options import GrowOptions
from esper.own_models.training_loop import Training
from esper.own_models.width_search import WidthSearch
from esper.own_models.written_code import rebuilding_code
from own_modules import loader
from wide_modules import HOSTS, multilayer, sequences


def numbers(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Six inputs and a class of three that takes more than four units."""
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return x, (3.0 * (x[:, 0] * x[:, 1] + x[:, 2] * x[:, 3]).sigmoid()).long().clamp(max=2)


def grown(model: nn.Module | None = None, **more: Any) -> esper.GrowthResult:
    torch.manual_seed(0)
    arguments = {"epochs": 12, "progress": False, "optimizer": adam, "best_epoch": False} | more
    batches = loader(*numbers(256, 0)), loader(*numbers(128, 1))
    return esper.grow(multilayer() if model is None else model, *batches, **arguments)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).relu())


def residual() -> nn.Sequential:
    """Two blocks that can be copied."""
    return nn.Sequential(nn.Linear(6, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 3))


def grown_by(policy: str, **more: Any) -> esper.GrowthResult:
    torch.manual_seed(0)
    return grown(residual() if policy == "deepen" else None, policy=policy, **more)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


class Again(nn.Module):
    """Each of its channels, beside or without its square."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.square()][: self.times], 1)


@pytest.mark.parametrize(("times", "repeats", "samples"), [(1, 1, 200), (2, 1, 200), (1, 3, 10)])
def test_the_share_is_the_gradient_that_new_channels_explain_beyond_the_others(
    times: int, repeats: int, samples: int
) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Tanh(), Again(times))
    model = nn.Sequential(nn.Linear(6, 4 * repeats), first, nn.Linear(4 * repeats * times, 3))
    x, y = numbers(samples, 0)
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight[:4].repeat(repeats, 1))
        model[0].bias.copy_(model[0].bias[:4].repeat(repeats))
        (group,), _ = channel_groups(model, lambda: model(x))

    def backward(module: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        F.cross_entropy(module(batch[0]), batch[1]).backward()

    before = copy.deepcopy(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    channels, share = propose(model, group, 3, [(x, y)], backward, generator)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    # By least squares: the gradient at the outputs, on the old activations and on all of them.
    with torch.no_grad():
        old = model[1](model[0](x))
        new = first(x @ channels.entries["0.weight"].T + channels.entries["0.bias"])
        gradient = (model(x).softmax(1) - F.one_hot(y, 3)).double().numpy()

    def left(activations: Tensor) -> float:
        matrix = activations.double().numpy()
        solution = np.linalg.lstsq(matrix, gradient, rcond=None)[0]
        return float(((gradient - matrix @ solution) ** 2).sum())

    expected = 1.0 - left(torch.cat([old, new], 1)) / left(old)
    assert share == pytest.approx(expected, abs=1e-4)
    # Far above three channels that were drawn at random.
    shares = []
    for seed in range(20):
        draws = torch.randn(3, 7, generator=torch.Generator().manual_seed(seed))
        entries = first(x @ draws[:, :6].T * 0.4 + 0.4 * draws[:, 6])
        shares.append(1.0 - left(torch.cat([old, entries], 1)) / left(old))
    assert share > max(shares)


class OneStep(nn.Module):
    """A recurrent layer in two directions that reads a packed sequence of one step, or a linear one
    with its weights, beside another reader."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(6, 4), nn.RNN(4, 3, bidirectional=True)
        self.beside, self.linear = nn.Linear(4, 6), None

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        if self.linear is None:
            steps = pack_padded_sequence(y[None], torch.ones(len(x)))
            return self.rnn(steps)[0].data + self.beside(y)
        return self.linear(y).tanh() + self.beside(y)


def test_a_recurrent_layer_chooses_what_it_reads_as_a_linear_layer_does() -> None:
    torch.manual_seed(0)
    one, linear = OneStep(), nn.Linear(4, 6)
    for key, both in (("weight", ("weight_ih_l0",)), ("bias", ("bias_ih_l0", "bias_hh_l0"))):
        names = ((name, f"{name}_reverse") for name in both)
        parts = [torch.cat([one.rnn.get_parameter(x) for x in pair]) for pair in names]
        setattr(linear, key, nn.Parameter(torch.stack(parts).sum(0).detach()))
    twin = copy.deepcopy(one)
    twin.linear = linear
    x, y = numbers(200, 0)
    torch.testing.assert_close(one(x), twin(x))

    def backward(module: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        F.cross_entropy(module(batch[0]), batch[1]).backward()

    weights, shares = [], []
    for model in (one, twin):
        with torch.no_grad():
            (group,), _ = channel_groups(model, lambda model=model: model(x))
        new, share = propose(model, group, 3, [(x, y)], backward, torch.Generator().manual_seed(1))
        shares.append(share)
        weights.append(new.entries["first.weight"])
    assert torch.equal(*weights)
    assert shares[0] == 0.0 < shares[1]  # what it computes of them is not known


def test_candidates_that_are_sums_of_old_channels_explain_nothing() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), torch.randn(40, 2)
    with torch.no_grad():
        (group,), _ = channel_groups(model, lambda: model(x))
    backward = lambda module, batch: module(batch).exp().mean().backward()  # noqa: E731
    assert propose(model, group, 2, [x], backward, torch.Generator().manual_seed(1))[1] == 0.0


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, partial(nn.LSTM, bidirectional=True)])
def test_new_hidden_units_read_each_other_as_those_of_a_new_layer_of_the_wider_size(
    kind: Callable[..., nn.RNNBase],
) -> None:
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = kind(5, 4, 2, batch_first=True), nn.LazyLinear(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])

    model, x = Tagger(), torch.randn(20, 7, 5)
    with torch.no_grad():
        model(x)
        model.lstm.weight_hh_l0.mul_(10.0)  # as trained weights are, larger than at the start
        (group,), _ = channel_groups(model, lambda: model(x))
        before = model(x)

    def backward(module: nn.Module, batch: Tensor) -> None:
        module(batch).square().mean().backward()

    new, _ = propose(model, group, 28, [x], backward, torch.Generator().manual_seed(1))
    widen(model, group, new)
    torch.testing.assert_close(model(x), before, rtol=1e-6, atol=1e-6)
    fresh = kind(5, 32).weight_hh_l0.detach().std()
    for name in ("weight_hh_l0", "weight_ih_l1", "weight_hh_l1"):
        weight = getattr(model.lstm, name).detach().unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
        assert not weight[:, :4, :, 4:].any()
        for columns in (slice(4), slice(4, None)):
            torch.testing.assert_close(weight[:, 4:, :, columns].std(), fresh, rtol=0.2, atol=0.0)


def test_samples_that_tell_no_more_candidates_apart_end_the_choice(monkeypatch) -> None:
    """The others come in order, each once, instead of a look at all of them for each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    x, looks = torch.randn(6, 5).double(), list[Tensor]()
    gains = new_units._Reader.gains

    def counted(reader: new_units._Reader) -> Tensor:
        looks.append(gains(reader))
        return looks[-1]

    def backward(module: nn.Module, batch: Tensor) -> None:
        module(batch).square().mean().backward()

    monkeypatch.setattr(new_units._Reader, "gains", counted)
    monkeypatch.setattr(new_units, "MORE", 100)
    (group,), _ = channel_groups(model, lambda: model(x))
    new, share = propose(model, group, 200, [x], backward, torch.Generator().manual_seed(1))
    assert len(looks) <= len(x) + 1
    assert {len(each) for each in looks} == {300}
    assert share == pytest.approx(1.0)
    assert new.entries["0.weight"].unique(dim=0).shape == (200, 5)


def test_the_result_is_the_same_class_with_wider_layers_and_rebuilds_without_esper(
    tmp_path: Path,
) -> None:
    result = grown(twin=True)
    model = result.model
    assert [type(layer) for layer in model] == [type(layer) for layer in multilayer()]
    assert (model[0].out_features, model[3].in_features, model[3].out_features) == (32, 32, 32)
    assert result.widths["0"] == {"out_features": (4, 32), "in_features": (6, 6)}
    assert not model._forward_hooks
    assert not result.seeds
    assert result.grew
    assert result.parameters == sum(p.numel() for p in model.parameters())
    assert result.history[-1].parameters == result.parameters
    assert result.twin is not None
    assert result.twin.parameters == result.host_parameters
    assert result.validation.score > result.twin.validation.score
    folder = result.save(tmp_path / "saved")
    x = numbers(16, 3)[0]
    torch.save([x, model.eval()(x)], tmp_path / "expected.pt")
    code = f"""
import sys, torch
from torch import nn
sys.path.insert(0, {str(folder)!r})
import rebuild
layers = nn.Linear(6, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)
model = rebuild.rebuild(nn.Sequential(*layers), {str(folder / "state_dict.pt")!r}).eval()
x, expected = torch.load({str(tmp_path / "expected.pt")!r})
assert torch.equal(model(x), expected)
before = model[0].weight.clone()
model.train()(x).square().mean().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
assert not torch.equal(model[0].weight, before)
assert not any(name.startswith("esper") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    again = esper.load_grown(multilayer(), model.state_dict()).eval()
    assert torch.equal(again(x), model(x))
    with pytest.raises(UsageError, match="load_grown"):
        esper.load_grown(model, multilayer().state_dict())
    for size in ((5, 2), (5, 3), (4, 1)):
        with pytest.raises(UsageError, match="load_grown"):
            esper.load_grown(nn.Embedding(4, 2), nn.Embedding(*size).state_dict())
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))


def test_statistics_of_new_channels_behind_a_concatenation_are_theirs() -> None:
    torch.manual_seed(0)
    make, inputs, _ = HOSTS["branches"]
    model, x = make(), inputs()
    groups, _ = channel_groups(model, lambda: model(x))
    left = next(group for group in groups if group.name == "left")

    def backward(module: nn.Module, batch: Tensor) -> None:
        module(batch).square().mean().backward()

    generator = torch.Generator().manual_seed(0)
    entries = propose(model, left, 3, [x], backward, generator)[0].entries
    activation = F.conv2d(x, entries["left.weight"], entries["left.bias"], padding=1).relu()
    mean = model.norm.momentum * activation.mean((0, 2, 3))
    torch.testing.assert_close(entries["norm.running_mean"], mean)


def test_statistics_of_new_channels_go_to_each_of_their_places() -> None:
    torch.manual_seed(0)
    make, inputs, _ = HOSTS["mirror"]
    model, x = make(), inputs()
    with torch.no_grad():
        (group,), _ = channel_groups(model.eval(), lambda: model(x))
    backward = lambda module, batch: module(batch).square().mean().backward()  # noqa: E731
    generator = torch.Generator().manual_seed(0)
    new, _ = propose(model.train(), group, 3, [x], backward, generator)
    widen(model, group, new)
    mean = model.norm.momentum * (x @ model.first.weight[4:].T + model.first.bias[4:]).mean(0)
    for places, expected in ((slice(4, 7), mean), (slice(11, 14), -mean)):
        torch.testing.assert_close(model.norm.running_mean[places], expected)


class Noisy(nn.Module):
    """Draws in each pass, as a variational autoencoder does."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize("change", [esper.widen, esper.deepen])
def test_what_a_module_draws_refuses_no_layer_and_no_block(change: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 8), Noisy(), *residual()[1:])
    before, after = change(model, loader(*numbers(32, 0))).parameters
    assert after > before


@pytest.mark.parametrize("host", HOSTS)
def test_the_written_code_rebuilds_every_kind_of_layer(host: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, inputs, _ = HOSTS[host]
    model, x = make().eval(), inputs()
    before = layer_sizes(model)
    with torch.no_grad():
        outputs = model(x)
        groups, _ = wider_groups(model, lambda: model(x))

    def square(output: Any, _: object) -> Tensor:
        return (output["logits"] if isinstance(output, dict) else output).square().mean()

    size = width_prior.wider_size(model, {each: each.new_count(0.5) for each in groups})
    enlargement = esper.widen(model, [(x, torch.zeros(8))], loss=square, factor=1.5)
    assert size == enlargement.parameters[1] == sum(p.numel() for p in model.parameters())
    for one, two in zip(tensors(model(x)), tensors(outputs), strict=True):
        torch.testing.assert_close(one, two)
    assert not model.training
    widths = {
        name: {key: (before[name].get(key, size), size) for key, size in sizes.items()}
        for name, sizes in layer_sizes(model).items()
        if sizes != before[name]
    }
    assert len(widths) >= len([each for each in groups if each.writers[0] not in each.axes])
    space: dict[str, Any] = {}
    exec(rebuilding_code(model, widths), space)
    again = space["rebuild"](make().eval(), model.state_dict())
    assert size == sum(p.numel() for p in again.parameters())
    for one, two in zip(tensors(model(x)), tensors(again(x)), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("policy", "change"), [("widen", "0: 4 -> 32 channels"), ("deepen", "1: 2 -> 4 blocks")]
)
@pytest.mark.parametrize("trial", [1, 2])
def test_what_does_harm_is_taken_back_to_the_bit(
    policy: str, change: str, trial: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(width_search, "interval", lambda *_: (-2.0, -1.0))
    monkeypatch.setattr(width_search, "expected_gain", lambda *_: -1.0)
    for name in ("TRIAL", "BLOCK_TRIAL"):
        monkeypatch.setattr(width_search, name, trial / 12)
    torch.manual_seed(0)
    module = residual() if policy == "deepen" else multilayer()
    refused, never = grown(copy.deepcopy(module), policy=policy), grown(module, policy="never")
    lines = [line for record in refused.history for line in record.actions]
    assert sum("is taken back" in line for line in lines) == 1
    assert any(change in line for line in lines)
    assert not refused.grew
    assert not refused.copies
    state = never.model.state_dict()
    assert all(torch.equal(v, state[n]) for n, v in refused.model.state_dict().items())
    assert [r.validation for r in refused.history] == [r.validation for r in never.history]


@pytest.mark.parametrize("policy", ["widen", "deepen"])
def test_what_a_trial_learned_is_kept_or_learned_again_in_the_same_bits(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(width_search, "interval", lambda *_: (1.0, 2.0))
    monkeypatch.setattr(width_search, "LONGER", 13)
    results, lines, epochs = [], [], []
    real = Training.epoch

    def counted(training: Training) -> float:
        epochs[-1] += 1
        return real(training)

    monkeypatch.setattr(Training, "epoch", counted)
    for trial, largest in ((1, 10_000), (3, 10_000), (3, 0)):
        for name in ("TRIAL", "BLOCK_TRIAL"):
            monkeypatch.setattr(width_search, name, trial / 12)
        monkeypatch.setattr(width_search, "AHEAD", largest)
        epochs.append(0)
        results.append(grown_by(policy, epochs=12))
        lines += [line for r in results[-1].history for line in r.actions if "with and" in line]
    assert epochs == [12 + 1, 12 + 3, 12 + 3 + 2]
    assert ["after an epoch" in lines[0], "after 3 epochs" in lines[1]] == [True, True]
    assert all(("for a slow start" in line) == (policy == "deepen") for line in lines)
    state = results[0].model.state_dict()
    for result in results[1:]:
        assert [r.validation for r in result.history] == [r.validation for r in results[0].history]
        assert [r.train_loss for r in result.history] == [r.train_loss for r in results[0].history]
        assert all(torch.equal(v, state[n]) for n, v in result.model.state_dict().items())


def test_the_higher_the_price_the_fewer_channels() -> None:
    """Against the naive choice: all factors on networks that are built at their size."""

    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))

    for width, gains in ((3, 3), (5, 6), (12, 12), (40, 48), (49, None)):
        model, x = build(width), torch.randn(2, 6)
        with torch.no_grad():
            groups, _ = channel_groups(model, lambda: model(x))  # noqa: B023
        counts = []
        for price, training_price in (
            (0.0, 0.0), (0.0, 0.01), (0.01, 0.0), (0.01, 0.02), (0.03, 0.02), (0.1, 0.1), (1.0, 1.0)
        ):  # fmt: skip
            options = GrowOptions(epochs=40, price=price, training_price=training_price)
            search = WidthSearch(model, options, 0)
            worths = [(0.0, 0)]
            for factor, gain in zip(
                width_prior.FACTORS, width_prior.GAINS.get(gains, (0.0,) * 4), strict=True
            ):
                wide = width + round(width * (factor - 1.0))
                ratio = parameter_count(build(wide)) / parameter_count(model)
                # Four narrow epochs before the trial of eight and in it, and 36 wide ones.
                cost = price * math.log(ratio) + training_price * math.log((12 + 36 * ratio) / 40)
                worths.append((gain - cost, wide - width))
            best = max(worths)[0]
            expected = next(n for worth, n in worths if worth >= best - 0.005)
            plan = width_prior.planned_counts(model, groups, search.cost)
            assert plan.get(groups[0], 0) == (expected if gains else 0)
            counts.append(plan.get(groups[0], 0))
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] == 0


@pytest.mark.parametrize("dear", [0.0, 1.0])
@pytest.mark.parametrize(
    ("prior", "trial", "stays"), [
        (0.1, -0.09, True), (0.1, -0.11, False), (-0.2, 0.25, True), (-0.2, 0.15, False),
        (None, 0.01, True), (None, -0.01, False),
    ]
)  # fmt: skip
def test_prior_and_trial_count_alike(
    prior: float | None, trial: float, stays: bool, dear: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both after the prices: layers grow where their sum is above 0; blocks have no prior."""
    policy, small = ("deepen", residual()) if prior is None else ("widen", multilayer())
    growth = parameter_count(grown_by(policy).model) / parameter_count(small)
    # Of two epochs one is trained narrow and both wide, instead of both narrow and one wide.
    cost = 0.01 * math.log(growth) + dear * math.log((1 + 2 * growth) / (2 + growth))
    validations = iter([0.5, 0.5, 0.5 + trial + cost])

    def validate(evaluator: Evaluator) -> Validation:
        result = real(evaluator)
        accuracy = next(validations, None)
        return result if accuracy is None else replace(result, accuracy=accuracy)

    real = Evaluator.__call__
    monkeypatch.setattr(Evaluator, "__call__", validate)
    monkeypatch.setattr(width_search, "expected_gain", lambda *_: (prior or 0.0) + cost)
    monkeypatch.setattr(width_search, "interval", lambda *_: None)
    plan, free = width_prior.planned_counts, partial(price_of, 0.01)
    monkeypatch.setattr(layer_growth, "planned_counts", lambda *each: plan(*each[:2], free))
    assert grown_by(policy, epochs=2, price=0.01, training_price=dear).grew == stays


def test_what_is_refused_by_its_outputs_is_not_expected_to_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []

    def problem(_: object, group: ChannelGroup, *__: object) -> str:
        return "no" if group.name == "0" else ""

    def expected(counts: dict[ChannelGroup, int]) -> float:
        names.extend(group.name for group in counts)
        return 1.0

    monkeypatch.setattr(width_search.WidthSearch, "_problem", problem)
    monkeypatch.setattr(width_search, "expected_gain", expected)
    assert set(grown().widths) == {"3", "5"}
    assert names == ["3"]


def test_the_expected_gain_is_that_of_the_table() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), torch.randn(2, 6)
    with torch.no_grad():
        (group,), _ = channel_groups(model, lambda: model(x))
    row = (0.0, *width_prior.GAINS[6])
    for count in range(1, 50):
        factor = 1.0 + count / 5
        i = sum(each <= factor for each in width_prior.FACTORS)
        gain = row[-1]
        if i < 4:
            low, high = (1.0, *width_prior.FACTORS)[i : i + 2]
            gain = row[i] + (row[i + 1] - row[i]) * math.log(factor / low) / math.log(high / low)
        assert width_prior.expected_gain({group: count}) == pytest.approx(gain, abs=1e-9)


def test_decisions_take_at_most_half_of_the_epochs() -> None:
    """An epoch or more with and without, of which all but one is trained again."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    for epochs, deepens in product(range(2, 200), (False, True)):
        options = GrowOptions(policy="deepen" if deepens else "widen", epochs=epochs)
        search = width_search.WidthSearch(model, options, 0, deepens)
        assert 2 * search.trial - 1 <= epochs / 2
        assert search.trial >= (2 if epochs >= 12 else 1)


def test_a_wider_network_that_diverges_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_a_number(*arguments: Any) -> tuple[NewChannels, float]:
        new, share = propose(*arguments)
        entries = {name: x * float("nan") for name, x in new.entries.items()}
        return NewChannels(entries, new.count), share

    monkeypatch.setattr(layer_growth, "propose", not_a_number)
    monkeypatch.setattr(width_search.WidthSearch, "_problem", lambda *_: "")
    result, never = grown(), grown(policy="never")
    assert not result.grew
    assert result.validation == never.validation


@cache
def uninterrupted(policy: str) -> esper.GrowthResult:
    return grown_by(policy, tries=2)


@pytest.mark.parametrize("policy", ["widen", "deepen"])
@pytest.mark.parametrize("last", [1, 2, 3, 6])
def test_growth_resumes_in_the_same_bits(tmp_path: Path, last: int, policy: str) -> None:
    whole = uninterrupted(policy)
    assert whole.grew
    path = tmp_path / "growth.pt"

    def stop(record: esper.EpochRecord) -> None:
        if record.epoch == last + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grown_by(policy, tries=2, checkpoint=path, callbacks=[stop])
    resumed = grown_by(policy, tries=2, checkpoint=path)
    state = whole.model.state_dict()
    assert all(torch.equal(v, state[n]) for n, v in resumed.model.state_dict().items())
    assert [r.actions for r in resumed.history] == [r.actions for r in whole.history]
    assert resumed.widths == whole.widths
    assert resumed.copies == whole.copies


def test_a_deeper_network_is_an_ordinary_module_that_rebuilds_without_esper(tmp_path: Path) -> None:
    result = grown_by("deepen", twin=True)
    assert result.copies == [("1", 1), ("1", 0)]
    assert [type(block) for block in result.model[1]] == [Block] * 4
    assert result.twin is not None
    size = sum(p.numel() for p in Block().parameters())
    assert result.parameters == result.twin.parameters + 2 * size
    # The copies have learned: taken out, the module computes something else.
    x = numbers(16, 3)[0]
    expected = result.model.eval()(x)
    without = copy.deepcopy(result.model)
    del without[1][3], without[1][1]
    assert not torch.allclose(without(x), expected, atol=1e-3)
    space: dict[str, Any] = {}
    exec((result.save(tmp_path) / "rebuild.py").read_text(), space)
    rebuilt = space["rebuild"](residual().eval(), str(tmp_path / "state_dict.pt"))
    assert torch.equal(rebuilt(x), expected)
    assert torch.equal(esper.load_grown(residual(), result.model.state_dict()).eval()(x), expected)
    before = residual()
    with pytest.raises(UsageError, match="load_grown"):
        esper.load_grown(before, {"0.weight": torch.zeros(1), **result.model[1].state_dict()})
    assert len(before[1]) == 2
    limited = grown_by("deepen", max_parameters=result.host_parameters + size)
    assert limited.parameters == result.host_parameters + size
    nothing = grown(policy="deepen")
    assert any("no block is repeated" in line for r in nothing.history for line in r.actions)


def test_a_limit_of_parameters_holds_and_wide_layers_stay() -> None:
    limited = grown(max_parameters=120)
    assert limited.host_parameters < limited.parameters <= 120
    wide = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))
    result = grown(wide)
    assert not result.grew
    assert any("wide enough" in line for r in result.history for line in r.actions)


@pytest.mark.parametrize(("epochs", "trials"), [(1, 0), (2, 1), (3, 1), (4, 1)])
def test_a_training_has_one_trial(
    epochs: int, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    def refuse(*_: object) -> tuple[float, float]:
        nonlocal count
        count += 1
        return -2.0, -1.0

    monkeypatch.setattr(width_search, "interval", refuse)
    monkeypatch.setattr(width_search, "expected_gain", lambda *_: -1.0)
    result = grown(epochs=epochs)
    assert count == trials
    assert bool(trials) or "a single epoch" in result.history[0].actions[0]


def test_a_loop_of_ones_own_takes_another_policy() -> None:
    model = multilayer()
    with pytest.raises(UsageError, match=r"policy: 'widen' .* call esper.grow, or esper.widen"):
        esper.Growth(model, adam(list(model.parameters())), policy="widen", epochs=3)


def test_convolutions_with_batch_norm_are_widened() -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 1, 40)
    y = (x[:, 0, :20].mean(1) > x[:, 0, 20:].mean(1)).long()
    result = esper.grow(
        sequences(), loader(x, y), loader(x, y), epochs=8, progress=False, optimizer=adam,
        best_epoch=False,
    )  # fmt: skip
    assert result.model[0].out_channels > 3
    assert result.model[1].num_features == result.model[0].out_channels
    assert result.history[-1].validation.score == pytest.approx(result.validation.score)
