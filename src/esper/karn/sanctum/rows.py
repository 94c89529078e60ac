"""The environments of a moment as rows that can be sorted and filtered."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from esper.karn.sanctum.signs import op_name, stage_name
from esper.karn.sanctum.snapshot import Moment
from esper.leyline.events import EpisodeOutcome
from esper.leyline.stages import Stage

BEHIND = -0.02
"""Lead below which an environment counts as behind its twin."""

_DEVELOPING = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)


class Status(Enum):
    """Status of an environment: a glyph and a word."""

    NOT_FINITE = "✖ not finite"
    ROLLED_BACK = "↩ rolled back"
    BEHIND = "▼ behind"
    GROWING = "◑ growing"
    GROWN = "● grown"
    PLAIN = "· plain"


TROUBLE = (Status.NOT_FINITE, Status.ROLLED_BACK, Status.BEHIND)


@dataclass(frozen=True, slots=True)
class Row:
    """One environment.

    Attributes:
        environment: number of the environment.
        task: the task of its host; None while it is unknown.
        accuracy, twin: validation accuracy of the host and of its never-grow twin.
        loss: training loss of the last step.
        reward: reward of the last step; return of the episode where the run has no step events.
        added_parameters: number of parameters added.
        rolled_back: whether the environment was rolled back in this round.
        stages, blueprints: stage and name of the blueprint of each slot.
        op: name of the last operation.
        success: whether the operation was legal and therefore took effect.

    The last four keep their defaults where the run has no step events.
    """

    environment: int
    task: str | None
    accuracy: float
    twin: float
    loss: float
    reward: float
    added_parameters: int
    rolled_back: bool
    stages: Sequence[int] = ()
    blueprints: Sequence[str] = ()
    op: str = ""
    success: bool = True

    @property
    def lead(self) -> float:
        """Validation accuracy above the twin's; the gain is known only when an episode is over."""
        return self.accuracy - self.twin

    @property
    def status(self) -> Status:
        """The worst status that applies."""
        if not (math.isfinite(self.accuracy) and math.isfinite(self.loss)):
            return Status.NOT_FINITE
        if self.rolled_back:
            return Status.ROLLED_BACK
        if self.lead < BEHIND:
            return Status.BEHIND
        if any(stage in _DEVELOPING for stage in self.stages):
            return Status.GROWING
        if self.added_parameters or Stage.FOSSILISED in self.stages:
            return Status.GROWN
        return Status.PLAIN

    @property
    def words(self) -> str:
        """The text in which a search looks for words."""
        seeds = [
            f"{stage_name(stage)} {name}"
            for stage, name in zip(self.stages, self.blueprints, strict=True)
            if stage > Stage.DORMANT
        ]
        task = self.task or ""
        return " ".join([str(self.environment), task, self.op, self.status.value, *seeds]).lower()


def rows(moment: Moment) -> list[Row]:
    """Return one row per environment, of the last outcome where there are no step events."""
    step = moment.step
    if step is None:
        return _of_outcome(moment.outcomes[-1]) if moment.outcomes else []
    return [
        Row(
            environment=i,
            task=moment.task(i),
            accuracy=float(step.validation_accuracy[i]),
            twin=float(step.twin_validation_accuracy[i]),
            loss=float(step.train_loss[i]),
            reward=float(step.reward[i]),
            added_parameters=step.added_parameters[i],
            rolled_back=i in moment.rolled_back,
            stages=step.stage[i],
            blueprints=[moment.blueprint_name(kind) for kind in step.blueprint[i]],
            op=op_name(step.op[i]),
            success=step.success[i],
        )
        for i in range(len(step.reward))
    ]


def _of_outcome(outcome: EpisodeOutcome) -> list[Row]:
    return [
        Row(
            environment=i,
            task=outcome.task[i],
            accuracy=float(outcome.accuracy[i]),
            twin=float(outcome.twin_accuracy[i]),
            loss=0.0,
            reward=float(outcome.episode_return[i]),
            added_parameters=outcome.added_parameters[i],
            rolled_back=outcome.rolled_back[i] > 0,
        )
        for i in range(len(outcome.accuracy))
    ]


SORTS: dict[str, tuple[Callable[[Row], float | str], bool]] = {
    "env": (lambda row: row.environment, False),
    "val. acc": (lambda row: row.accuracy, True),
    "lead": (lambda row: row.lead, True),
    "reward": (lambda row: row.reward, True),
    "added": (lambda row: row.added_parameters, True),
    "last op": (lambda row: row.op, False),
    "status": (lambda row: list(Status).index(row.status), False),
}
"""Sort keys: the value of a row, and whether the default order is descending."""

FILTERS: dict[str, Callable[[Row], bool]] = {
    "all": lambda row: True,
    "growing": lambda row: row.status is Status.GROWING,
    "grown": lambda row: row.added_parameters > 0,
    "in trouble": lambda row: row.status in TROUBLE,
}


def arrange(every: list[Row], sort: str, reverse: bool, keep: str, words: str) -> list[Row]:
    """Return the rows that pass a filter and contain all of ``words``, sorted.

    NaN sorts as the largest value, so it comes first in descending order.
    """
    terms = words.lower().split()
    matches = [
        row for row in every if FILTERS[keep](row) and all(word in row.words for word in terms)
    ]
    value, descending = SORTS[sort]

    def key(row: Row) -> float | str:
        number = value(row)
        return math.inf if isinstance(number, float) and math.isnan(number) else number

    return sorted(matches, key=key, reverse=descending != reverse)
