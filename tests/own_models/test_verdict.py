"""What is printed at the end: whether growth paid, in the user's own figure."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score, r2_score
from torch import Tensor, nn

import esper
from esper.own_models.figure_intervals import SampleValues, interval, sample_values
from esper.own_models.objectives import Evaluator, Validation, objective
from grown_modules import quietly_grown
from own_modules import ResidualNet, images, loader, table

CPU = torch.device("cpu")


def result(grown: Validation, never: Validation, **more: object) -> esper.GrowthResult:
    """A result of 20 parameters beside a twin of 10."""
    twin = esper.GrowthResult(nn.Linear(1, 1), [], never, None, 10, 10, 1.0, 0.05)
    one = esper.GrowthResult(nn.Linear(1, 1), [], grown, None, 20, 10, 1.0, 0.05, twin=twin)
    for name, value in more.items():
        setattr(one, name, value)
    return one


def accuracy(share: float, score: float = 0.5) -> Validation:
    return Validation(1.0, score, share, unit="accuracy")


@pytest.mark.parametrize(
    ("grown", "never", "paid"), [(0.94, 0.96, False), (0.96, 0.94, False), (0.96, 0.92, True)]
)
def test_growth_pays_only_if_the_gain_in_points_exceeds_the_price(
    grown: float, never: float, paid: bool
) -> None:
    # The expected accuracy, which nobody sees, says the opposite each time.
    one = result(accuracy(grown, never), accuracy(never, grown))
    assert one.paid == paid
    assert one.better is (one if paid else one.twin)
    answer = "growth paid" if paid else "growth did not pay"
    assert one.verdict() == (
        f"{answer}: grown accuracy {100 * grown:.1f} % (20 parameters) against {100 * never:.1f} % "
        f"(10): {100 * (grown - never):+.1f} points on validation; the price of 10 more parameters "
        "is 3.5 points"
    )


def test_growth_pays_if_only_the_twin_diverged() -> None:
    nothing = Validation(math.nan, math.nan, None)
    assert result(accuracy(0.9), nothing).verdict() == (
        "growth paid: the twin that never grows diverged"
    )
    assert "diverged" not in result(nothing, nothing).verdict()


def test_a_gain_whose_interval_holds_zero_is_called_noise() -> None:
    one = result(accuracy(0.96), accuracy(0.92), difference={"validation": (-0.01, 0.09)})
    assert "+4.0 [-1.0, +9.0] points on validation, within the noise" in one.verdict()
    one.difference = {"validation": (0.01, 0.07)}
    assert "noise" not in one.verdict()
    # Of a metric where lower is better, a gain is negative.
    less, more = (Validation(1.0, s, metric=m, unit="metric") for s, m in ((0.8, 1.2), (0.6, 1.5)))
    lower = result(less, more, difference={"validation": (-0.5, -0.1)})
    assert "grown metric 1.2 (20 parameters) against 1.5 (10): -0.3 [-0.5, -0.1]" in lower.verdict()
    assert "noise" not in lower.verdict()


def test_figures_other_than_accuracies_keep_their_unit() -> None:
    one = result(Validation(2.0, 0.8, unit="R²"), Validation(3.0, 0.7, unit="R²"))
    assert "grown R² 0.8 (20 parameters) against 0.7 (10): +0.1 R² on validation" in one.verdict()
    assert "the price of 10 more parameters is 0.0347 of R²" in one.verdict()


def test_intervals_are_those_of_paired_samples() -> None:
    torch.manual_seed(0)
    one, two = torch.rand(200).double(), torch.rand(200).double()
    bounds = interval(SampleValues(one), SampleValues(two))
    differences = (one - two).numpy()
    error = stats.norm.ppf(0.975) * np.std(differences, ddof=1) / np.sqrt(200)
    assert bounds == pytest.approx((differences.mean() - error, differences.mean() + error), 1e-4)


def test_the_interval_of_a_metric_is_that_of_the_paired_bootstrap() -> None:
    torch.manual_seed(0)
    target = torch.randint(2, (300,))
    one, two = (torch.where(torch.rand(300) < p, target, 1 - target) for p in (0.9, 0.7))

    def f1(prediction: Tensor, target: Tensor) -> float:
        return float(f1_score(target, prediction))

    values = [SampleValues(metric=f1, prediction=each, target=target) for each in (one, two)]
    bounds = interval(*values)
    expected = stats.bootstrap(
        (one.numpy(), two.numpy(), target.numpy()),
        lambda a, b, t: f1_score(t, a) - f1_score(t, b),
        paired=True, vectorized=False, n_resamples=500, method="percentile", rng=0,
    ).confidence_interval  # fmt: skip
    assert bounds == pytest.approx((expected.low, expected.high), abs=0.02)
    assert interval(None, values[0]) is None


def test_a_metric_of_several_targets_has_no_interval() -> None:
    x, y = images(2)
    data = [(x, {"labels": y, "weights": torch.ones(2)})]
    loss = objective(lambda output, target: output.mean())
    validate = Evaluator(ResidualNet(), data, loss, CPU, metric=lambda *_: 0.5)
    assert sample_values(validate) is None


def test_the_mean_of_the_terms_is_the_figure() -> None:
    torch.manual_seed(0)
    x, y = images(50)
    classes = Evaluator(ResidualNet(), loader(x, y, batch=16), objective("cross_entropy"), CPU)
    values = sample_values(classes)
    assert values is not None
    terms = values.terms
    assert terms is not None
    assert float(terms.mean()) == pytest.approx(classes().figure)
    with torch.no_grad():
        prediction = classes.model.eval()(x).argmax(1)
    assert float(terms.mean()) == pytest.approx(accuracy_score(y, prediction))
    x, y = table(60)
    numbers = Evaluator(nn.Linear(x.shape[1], 1), loader(x, y, batch=16), objective("mse"), CPU)
    values = sample_values(numbers)
    assert values is not None
    terms = values.terms
    assert terms is not None
    assert numbers().unit == "R²"
    with torch.no_grad():
        expected = r2_score(y.flatten(), numbers.model(x).flatten())
    assert float(terms.mean()) == pytest.approx(expected, abs=1e-6)
    assert numbers().figure == pytest.approx(expected, abs=1e-6)


def test_what_is_delivered_is_what_the_last_line_shows() -> None:
    # Cut short while seeds blend in: those that earn more than their price stay.
    for epochs in (4, 6, 8, 10):
        torch.manual_seed(0)
        grown = quietly_grown(
            ResidualNet(), loader(*images(32)), loader(*images(32, 1)), price=0.0,
            callbacks=[lambda record, last=epochs: record.epoch == last],
        )  # fmt: skip
        shown = grown.history[-1].validation.score
        assert grown.validation.score >= shown - 0.005
        undecided = [line for line in grown.history[-1].actions if " at the end " in line]
        if any("is removed" in line for line in undecided):
            assert " before, " in grown.history[-1].actions[-1]


@pytest.mark.parametrize("scale", [1e-3, 1e3, 1e6])
def test_decisions_do_not_depend_on_the_unit_of_the_target(scale: float) -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale
            self.net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.head(self.net(x))

    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3].abs()

    def decisions(scale: float) -> list[list[str]]:
        torch.manual_seed(0)
        batches = loader(x, scale * y)
        tiny = {"lr": 0.01, "eps": 1e-30}
        grown = quietly_grown(
            Scaled(scale), batches, batches, loss="mse", epochs=16, clip=None,
            optimizer=lambda parameters: torch.optim.Adam(parameters, **tiny),
        )  # fmt: skip
        return [[line.partition(" (")[0] for line in record.actions] for record in grown.history]

    usual = decisions(1.0)
    assert any(usual)
    assert decisions(scale) == usual


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_module_of_torch_has_the_accuracy_of_its_name(smoothing: float) -> None:
    torch.manual_seed(0)
    x, y = images(40)
    weight = torch.rand(ResidualNet()(x).shape[1])
    module = nn.CrossEntropyLoss(weight, ignore_index=1, label_smoothing=smoothing)
    model = ResidualNet()
    validation = Evaluator(model, [(x, y)], objective(module), CPU)()
    with torch.no_grad():
        logits = model.eval()(x)
    assert validation.loss == pytest.approx(float(module(logits, y)))
    counts = y != 1
    assert validation.accuracy == pytest.approx(accuracy_score(y[counts], logits.argmax(1)[counts]))
    for kind, name in ((nn.MSELoss, "mse"), (nn.HuberLoss, "huber"), (nn.L1Loss, "l1")):
        assert objective(kind()).name == name
        assert objective(kind()).unit == "R²"
    output, target = torch.randn(5, 1), torch.randn(5)
    assert objective(nn.MSELoss()).loss(output, target) == (output[:, 0] - target).square().mean()
