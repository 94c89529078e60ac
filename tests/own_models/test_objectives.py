"""Losses by name and their scores, against scikit-learn and by hand."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, r2_score
from torch import Tensor, nn

from esper.leyline.errors import UsageError
from esper.own_models.objectives import OBJECTIVES, Evaluator, Scale, as_score, objective
from esper.own_models.options import loss_problem
from own_modules import Gpt, ResidualNet, images, loader, perceptron, table, tokens

CPU = torch.device("cpu")


def evaluated(model: nn.Module, batches: object, loss: object, **more: object):
    return Evaluator(model, batches, objective(loss), CPU, **more)()


def test_classes() -> None:
    torch.manual_seed(0)
    model, (x, y) = ResidualNet().train(), images(50)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    found = evaluated(model, loader(x, y, batch=16), "cross_entropy")
    assert model.training
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    with torch.no_grad():
        logits = model.eval()(x)
    assert found.loss == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-6)
    assert found.accuracy == pytest.approx(accuracy_score(y, logits.argmax(1)))
    probabilities = logits.softmax(1)[torch.arange(50), y]
    assert found.score == pytest.approx(float(probabilities.mean()), rel=1e-6)


def test_every_position_of_a_sequence_and_of_an_image_counts() -> None:
    torch.manual_seed(0)
    model, text = Gpt(), tokens(10)
    found = evaluated(model, [text], "cross_entropy")
    with torch.no_grad():
        logits = model.eval()(text[:, :-1])["logits"]
    assert found.loss == pytest.approx(
        float(F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())), rel=1e-6
    )
    pixels, labels = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    goal = objective("cross_entropy")
    torch.testing.assert_close(goal.loss(pixels, labels), F.cross_entropy(pixels, labels))
    sums = goal.sums(pixels, labels)
    expected = pixels.softmax(1).gather(1, labels[:, None]).mean()
    assert goal.scores(sums)[1] == pytest.approx(float(expected), rel=1e-6)


def test_labels_that_are_ignored_do_not_count() -> None:
    logits, labels = torch.randn(6, 3), torch.tensor([0, 1, -100, 2, -100, 1])
    goal, kept = objective("cross_entropy"), labels >= 0
    torch.testing.assert_close(
        goal.loss(logits, labels), F.cross_entropy(logits[kept], labels[kept])
    )
    assert torch.equal(goal.sums(logits, labels), goal.sums(logits[kept], labels[kept]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int16, torch.bool])
def test_labels_may_be_integers_of_any_kind(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(6, 2), torch.tensor([0, 1, 1, 0, 0, 1])
    goal = objective("cross_entropy")
    assert torch.equal(goal.loss(logits, labels.to(dtype)), goal.loss(logits, labels))
    assert torch.equal(goal.sums(logits, labels.to(dtype)), goal.sums(logits, labels))


def test_labels_that_are_no_integers_are_refused() -> None:
    goal = objective("cross_entropy")
    for target in (torch.tensor([0.0, 1.0]), torch.tensor([[0.0], [1.0]])):
        for use in (goal.loss, goal.sums):
            with pytest.raises(UsageError, match=r"of float32 for logits \(2, 3\); give integers"):
                use(torch.zeros(2, 3), target)


def test_probabilities_of_classes_are_a_target_too() -> None:
    logits, target = torch.randn(5, 3), torch.randn(5, 3).softmax(1)
    goal = objective("cross_entropy")
    torch.testing.assert_close(goal.loss(logits, target), F.cross_entropy(logits, target))
    assert float(goal.sums(logits, target)[2]) == 5.0


def test_several_labels() -> None:
    logits, target = torch.randn(7, 4), torch.randint(2, (7, 4))
    goal = OBJECTIVES["binary_cross_entropy"]
    expected = F.binary_cross_entropy_with_logits(logits, target.float())
    torch.testing.assert_close(goal.loss(logits, target), expected)
    accuracy, score = goal.scores(
        goal.sums(logits[:3], target[:3]) + goal.sums(logits[3:], target[3:])
    )
    assert accuracy == pytest.approx(accuracy_score(target.flatten(), (logits > 0).flatten()))
    right = torch.where(target > 0, logits.sigmoid(), 1 - logits.sigmoid())
    assert score == pytest.approx(float(right.mean()), rel=1e-6)


@pytest.mark.parametrize("loss", ["mse", "l1", "huber"])
def test_regression_is_scored_by_explained_variance(loss: str) -> None:
    torch.manual_seed(0)
    x, y = table(60)
    model = perceptron()
    found = evaluated(model, loader(x, y, batch=16), loss)
    with torch.no_grad():
        out = model.eval()(x)
    assert found.accuracy is None
    assert found.score == pytest.approx(r2_score(y.double(), out.double()), rel=1e-5)
    own = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}[loss]
    assert found.loss == pytest.approx(float(own(out, y)), rel=1e-5)
    # A target without the axis of the single output means the same.
    flat = evaluated(model, loader(x, y[:, 0], batch=16), loss)
    assert flat == found


@pytest.mark.parametrize("loss", ["mse", "l1", "huber", "binary_cross_entropy"])
def test_only_axes_of_one_element_may_be_missing_from_a_target(loss: str) -> None:
    goal, output = OBJECTIVES[loss], torch.randn(4, 3, 1)
    target = torch.rand(4, 3, 1)
    expected = goal.loss(output, target)
    for same in (target[..., 0], target[:, None]):
        assert torch.equal(goal.loss(output, same), expected)
        assert torch.equal(goal.sums(output, same), goal.sums(output, target))
    for wrong in (target.movedim(0, 1), torch.rand(12), torch.rand(2, 6)):
        found = re.escape(f"{loss} got outputs (4, 3, 1) and a target {tuple(wrong.shape)}")
        with pytest.raises(UsageError, match=found):
            goal.loss(output, wrong)
        with pytest.raises(UsageError, match=r"got outputs \(4, 3, 1\)"):
            goal.sums(output, wrong)


def test_any_other_loss_is_scored_by_the_share_that_is_gone() -> None:
    model, (x, y) = perceptron(), table(20)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().mean() * factor

    evaluate = Evaluator(model, [(x, y)], objective(loss), CPU)
    factor = 4.0
    assert evaluate().score == 0.0
    factor = 1.0
    assert evaluate().score == pytest.approx(0.75)


@pytest.mark.parametrize("first", [-1.5, 0.0])
def test_from_a_first_loss_that_is_not_above_0_each_nat_leaves_a_part(first: float) -> None:
    scale = Scale()
    assert scale.score(first) == 0.0
    assert scale.score(first - 1.0) == pytest.approx(1.0 - math.exp(-1.0))
    assert scale.score(first - 1000.0) == 1.0
    assert scale.score(first + 1.0) == pytest.approx(1.0 - math.e)
    assert -math.inf < scale.score(first + 1e6) < scale.score(first + 49.0)
    assert math.isnan(scale.score(math.nan))


@pytest.mark.parametrize("first", [math.nan, math.inf, -math.inf])
def test_a_first_loss_that_is_not_finite_is_no_scale(first: float) -> None:
    scale = Scale()
    assert math.isnan(scale.score(first))
    assert scale.first is None
    assert scale.score(4.0) == 0.0
    assert scale.score(1.0) == 0.75


def test_a_metric_of_the_users_own_gives_the_score() -> None:
    torch.manual_seed(0)
    model, (x, y) = perceptron(), table(40)
    with torch.no_grad():
        out = model.eval()(x)

    def worst(prediction: Tensor, target: Tensor) -> float:
        assert len(prediction) == 40
        return float((prediction - target).abs().max())

    expected = float((out - y).abs().max())
    found = evaluated(model, loader(x, y), "mse", metric=worst, higher_is_better=False)
    assert found.metric == pytest.approx(expected)
    assert found.score == 0.0

    class Mean:
        """As in torchmetrics."""

        def __init__(self) -> None:
            self.reset()

        def reset(self) -> None:
            self.total, self.count = 0.0, 0

        def update(self, prediction: Tensor, target: Tensor) -> None:
            self.total += float((prediction * target > 0).sum())
            self.count += len(target)

        def compute(self) -> Tensor:
            return torch.tensor(self.total / self.count)

    evaluate = Evaluator(model, loader(x, y), objective("mse"), CPU, metric=Mean())
    share = float((out * y > 0).float().mean())
    assert evaluate().score == evaluate().metric == pytest.approx(share)


def test_what_is_not_valid_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"loss: 'crossentropy' is not one of cross_entropy"):
        objective("crossentropy")
    with pytest.raises(UsageError, match="loss: got a int"):
        objective(3)
    with pytest.raises(UsageError, match=r"got logits \(2, 3\) and target \(4,\)"):
        objective("cross_entropy").loss(torch.zeros(2, 3), torch.zeros(4, dtype=torch.long))
    with pytest.raises(UsageError, match="output has the keys out; return the prediction"):
        objective("mse").loss({"out": torch.zeros(2)}, torch.zeros(2))
    with pytest.raises(UsageError, match="needs an output with a 'loss'"):
        objective("model").loss(torch.zeros(2), None)
    with pytest.raises(UsageError, match="fraction instead of percent"):
        as_score(93.0, True, Scale())
    with pytest.raises(UsageError, match="validation_loader: it yields no batch"):
        evaluated(perceptron(), [], "mse")


def test_what_is_no_loss_of_a_batch_is_said_with_what_to_do() -> None:
    assert loss_problem(torch.ones(())) is None
    assert loss_problem(torch.ones(1, 1)) is None
    assert loss_problem(torch.ones(3)) == "loss: it has the shape (3,); return its mean"
    said = loss_problem("high")
    assert said is not None
    assert said.startswith("loss: it returns a str; give a function of output and target")
