"""A ``Growth`` that was saved and loaded gives bit-identical results."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW

from esper.leyline.actions import ALPHA_SPEED_STEPS, ALPHA_TARGETS, BLUEPRINTS, Op
from esper.leyline.errors import UsageError
from esper.leyline.stages import Stage
from esper.own_models.attachment import grown_seeds
from esper.own_models.controller import Growth
from esper.own_models.lifecycle_controller import reason_for
from esper.own_models.objectives import Validation
from esper.tamiyo.heuristic import HeuristicActor
from own_modules import ResidualNet, images, unchanged

EPOCHS = 14


class Run:
    """A loop of the user's own."""

    def __init__(self, policy: Any):
        torch.manual_seed(0)
        self.model, (x, y) = ResidualNet(dropout=0.0), images(32)
        self.optimizer = AdamW(self.model.parameters(), lr=0.01)
        self.x, self.y = x, y
        options = {"epochs": EPOCHS, "price": 0.001, "validate": self.score, "report": None}
        self.growth = Growth(self.model, self.optimizer, policy=policy, **options)

    def score(self) -> Validation:
        logits = self.model(self.x)
        expected = logits.softmax(1).gather(1, self.y[:, None]).mean()
        return Validation(float(F.cross_entropy(logits, self.y)), float(expected))

    def epochs(self, count: int) -> "Run":
        for _ in range(count):
            self.model.train()
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(self.x), self.y)
            loss.backward()
            self.growth.clip(1.0)
            self.optimizer.step()
            self.growth.step(train_loss=float(loss.detach()))
        return self

    def saved(self) -> dict[str, Any]:
        """The state as a file would hold it."""
        parts = {"growth": self.growth, "model": self.model, "optimizer": self.optimizer}
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def loaded(self, saved: dict[str, Any]) -> "Run":
        self.growth.load_state_dict(saved["growth"])
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        return self


@pytest.mark.parametrize("policy", ["never", "heuristic", "rule"])
def test_growth_resumes_bit_identically_from_every_epoch(policy: str) -> None:
    whole = Run(policy)
    states = [whole.saved()]
    for _ in range(EPOCHS):
        states.append(whole.epochs(1).saved())
    if policy == "rule":
        stages = {stage for record in whole.growth.history for stage in record.stages.values()}
        assert {Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILISED} <= stages
    for epoch in range(0, EPOCHS, 3):
        again = Run(policy).loaded(states[epoch])
        assert set(grown_seeds(again.model)) == {
            name.removesuffix(".seed.alpha")
            for name in states[epoch]["model"]
            if name.endswith(".seed.alpha")
        }
        again.epochs(EPOCHS - epoch)
        assert again.growth.history == whole.growth.history
        assert again.growth.finished
        assert unchanged(again.model, whole.model.state_dict()), epoch


def test_the_snapshot_for_a_rollback_is_part_of_the_state() -> None:
    runs = [Run("rule").epochs(7)]
    runs.append(Run("rule").loaded(runs[0].saved()))
    for run in runs:
        with torch.no_grad():
            run.model.head.weight.fill_(float("nan"))
        run.epochs(1)
        assert run.growth.history[-1].actions[0] == "rolled back: not_finite"
    assert unchanged(runs[0].model, runs[1].model.state_dict())


class Moody(HeuristicActor):
    """Acts differently the second time."""

    lives = 0

    def begin(self, environments: Tensor, episode: int) -> None:
        super().begin(environments, episode)
        Moody.lives += 1

    def act(self, observation: Any, step: int) -> tuple[Tensor, Tensor, Tensor]:
        actions, *rest = super().act(observation, step)
        return (actions + Moody.lives, *rest)


def test_another_growth_is_refused_in_one_line() -> None:
    saved = Run("rule").epochs(3).saved()
    with pytest.raises(UsageError, match="policy: growth began with rule, got heuristic"):
        Run("heuristic").loaded(saved)
    with pytest.raises(UsageError, match="load_state_dict: an epoch is already over"):
        Run("rule").epochs(1).loaded(saved)
    saved["growth"]["epochs"] = 3
    with pytest.raises(UsageError, match="epochs: growth began with 3, got 14"):
        Run("rule").loaded(saved)
    saved = Run(Moody(EPOCHS)).epochs(2).saved()
    with pytest.raises(UsageError, match="policy: on the same observations it does not act"):
        Run(Moody(EPOCHS)).loaded(saved)


@pytest.mark.parametrize(
    ("op", "contribution", "says"),
    [
        (
            Op.SET_ALPHA_TARGET,
            0.012,
            "norm goes to alpha 0.5 in 3 epochs (contribution +1.20 points)",
        ),
        (Op.FOSSILISE, -0.5, "norm becomes FOSSILISED (contribution -50.00 points)"),
        (Op.PRUNE, 0.0, "norm is pruned (contribution +0.00 points)"),
        (Op.PRUNE, float("nan"), "norm is pruned (contribution unknown)"),
    ],
)
def test_an_action_is_told_with_the_figures_behind_it(
    op: Op, contribution: float, says: str
) -> None:
    state: Any = SimpleNamespace(blueprint=torch.tensor([[BLUEPRINTS.index("norm")]]))
    signals: Any = SimpleNamespace(contribution=torch.tensor([[contribution]], dtype=torch.float64))
    progress: Any = None
    choice = {"alpha_target": ALPHA_TARGETS.index(0.5), "alpha_speed": ALPHA_SPEED_STEPS.index(3)}
    assert reason_for(op, 0, choice, state, signals, progress) == says
