"""The epoch of training: which number a scheduler gets that waits for a plateau."""

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from esper.own_models.objectives import Validation, objective
from esper.own_models.training_loop import Training
from own_modules import perceptron

LOSS, SCORE, METRIC = 0.3, 0.2, 0.1


def training(scheduler: type, higher_is_better: bool = True, **more: object) -> Training:
    model = perceptron()
    made = SGD(model.parameters(), lr=1.0)
    return Training(
        model, [], objective("mse"), made, torch.device("cpu"), scheduler(made, **more),
        higher_is_better=higher_is_better,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "metric", "higher_is_better", "expected"),
    [
        ("min", None, True, LOSS), ("min", METRIC, True, LOSS), ("min", METRIC, False, METRIC),
        ("max", None, True, SCORE), ("max", METRIC, True, METRIC), ("max", METRIC, False, SCORE),
    ],
)  # fmt: skip
def test_a_plateau_is_sought_in_a_number_that_moves_in_the_direction_of_the_scheduler(
    mode: str, metric: float | None, higher_is_better: bool, expected: float
) -> None:
    loop = training(ReduceLROnPlateau, higher_is_better, mode=mode)
    loop.end_epoch(Validation(LOSS, SCORE, None, metric))
    assert loop.scheduler.best == expected


def test_the_rate_stays_while_the_score_rises() -> None:
    loop = training(ReduceLROnPlateau, mode="max", patience=0)
    for score in (0.1, 0.2, 0.3):
        loop.end_epoch(Validation(1.0 - score, score))
    assert loop.optimizer.param_groups[0]["lr"] == 1.0
    loop.end_epoch(Validation(0.8, 0.2))
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_other_schedulers_step_whatever_was_measured() -> None:
    loop = training(StepLR, step_size=1, gamma=0.5)
    loop.optimizer.step()
    loop.end_epoch(Validation(LOSS, SCORE))
    assert loop.optimizer.param_groups[0]["lr"] == 0.5
