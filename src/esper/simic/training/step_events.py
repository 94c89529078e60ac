"""The events of one environment step, built from tensors in the telemetry thread."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from esper.leyline.actions import BLUEPRINTS, HEADS
from esper.leyline.events import (
    EpochCompleted,
    Event,
    SeedContributions,
    SeedFossilized,
    SeedGerminated,
    SeedPruned,
    SeedSignalsMeasured,
    SeedStageChanged,
    nested_numbers,
    numbers,
)
from esper.leyline.stages import Stage
from esper.simic.growth.step import StepReport

_FLOATS = {
    "train_loss": attrgetter("train_loss"),
    "train_accuracy": attrgetter("train_accuracy"),
    "validation_loss": attrgetter("scores.loss"),
    "validation_accuracy": attrgetter("scores.accuracy"),
    "expected_accuracy": attrgetter("scores.expected"),
    "twin_validation_accuracy": attrgetter("twin_scores.accuracy"),
    "twin_expected_accuracy": attrgetter("twin_scores.expected"),
}
"""Getters of fields of ``EpochCompleted`` from a ``StepReport``, by field name."""

_DIGITS = 6
"""Decimals of floats in events: about the precision of float32, in half the bytes."""


CONTRIBUTION_STRIDE = 4
"""Steps between two records of contributions: all of them would be as long as the step itself."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The recorded tensors of one step, in CPU memory; see ``stack``.

    Attributes:
        time: seconds since 1970.
        round: from 1.
        step: from 1.
        environments: identities of the environments, int64 ``[N]``.
        floats: the fields of ``_FLOATS`` and the reward, float64 ``[F + 1, N]``.
        integers: added parameters, op, slot, success, int64 ``[4, N]``.
        stages: stages before the action, after it and after the tick, int64 ``[3, N, S]``.
        seeds: blueprints before and after the action, parameters after the tick, int64
            ``[3, N, S]``.
        signals: alpha, contribution, gradient norm, gradient health, float64 ``[4, N, S]``.
    """

    time: float
    round: int
    step: int
    environments: Tensor
    floats: Tensor
    integers: Tensor
    stages: Tensor
    seeds: Tensor
    signals: Tensor

    @staticmethod
    def stack(
        identities: Tensor, actions: Tensor, reward: Tensor, report: StepReport
    ) -> list[Tensor]:
        """The recorded tensors on the device of the step, in the order of the fields."""
        floats = [*(of(report) for of in _FLOATS.values()), reward]
        integers = [
            report.added_parameters,
            actions[:, HEADS.index("op")],
            actions[:, HEADS.index("slot")],
            report.success.long(),
        ]
        before, action, after = report.before, report.acted, report.after
        signals = report.signals
        measures = (signals.contribution, signals.gradient_norm, signals.health)
        return [
            identities,
            torch.stack([x.double() for x in floats]),
            torch.stack(integers),
            torch.stack([before.stage, action.stage, after.stage]),
            torch.stack([before.blueprint, action.blueprint, report.seed_parameters]),
            torch.stack([after.alpha, *measures]).double(),
        ]

    def events(self) -> Iterator[Event]:
        """The events of the step, in the order in which they occurred."""
        yield from self._changes(self.stages[0], self.stages[1])
        yield self._epoch()
        yield from self._contributions()
        yield SeedSignalsMeasured(
            time=self.time,
            round=self.round,
            step=self.step,
            contribution=nested_numbers(self.signals[1].tolist()),
            gradient_norm=nested_numbers(self.signals[2].tolist()),
            gradient_health=nested_numbers(self.signals[3].tolist()),
        )
        yield from self._changes(self.stages[1], self.stages[2])

    def _contributions(self) -> Iterator[Event]:
        """Contributions of the seeds that act; rarely, because most lines of a run are steps."""
        contribution = self.signals[1]
        acting = contribution.isfinite()
        if self.step % CONTRIBUTION_STRIDE or not bool(acting.any()):
            return
        rows, slots = acting.nonzero().unbind(1)
        yield SeedContributions(
            time=self.time,
            round=self.round,
            step=self.step,
            environment=self.environments[rows].tolist(),
            slot=slots.tolist(),
            contribution=numbers(contribution[acting].round(decimals=4).tolist()),
        )

    def _epoch(self) -> EpochCompleted:
        growth, op, slot, success = self.integers.tolist()
        rows = map(numbers, self.floats.round(decimals=_DIGITS).tolist())
        columns = dict(zip((*_FLOATS, "reward"), rows, strict=True))
        stage = self.stages[2]
        blueprint = torch.where(stage <= Stage.DORMANT, 0, self.seeds[1])
        return EpochCompleted(
            time=self.time,
            round=self.round,
            step=self.step,
            added_parameters=growth,
            op=op,
            slot=slot,
            success=[bool(value) for value in success],
            stage=stage.tolist(),
            blueprint=blueprint.tolist(),
            alpha=nested_numbers(self.signals[0].round(decimals=_DIGITS).tolist()),
            **columns,
        )

    def _changes(self, before: Tensor, after: Tensor) -> Iterator[Event]:
        """Events of the slots whose stage changed; an emptied slot has its former blueprint."""
        rows, slots = (before != after).nonzero().unbind(1)
        if len(rows) == 0:
            return
        was, now = before[rows, slots], after[rows, slots]
        old, new, parameters = self.seeds[:, rows, slots]
        kinds = torch.where(new > 0, new, old)

        def about(where: Tensor) -> dict[str, object]:
            return {
                "time": self.time,
                "round": self.round,
                "step": self.step,
                "environment": self.environments[rows[where]].tolist(),
                "slot": slots[where].tolist(),
                "blueprint": [BLUEPRINTS[kind] for kind in kinds[where].tolist()],
            }

        yield SeedStageChanged(
            **about(torch.ones_like(was, dtype=torch.bool)),  # type: ignore[arg-type]
            previous=[Stage(stage).name for stage in was.tolist()],
            stage=[Stage(stage).name for stage in now.tolist()],
        )
        for stage, kind in ((Stage.GERMINATED, SeedGerminated), (Stage.PRUNED, SeedPruned)):
            if bool((now == stage).any()):
                yield kind(**about(now == stage))  # type: ignore[arg-type]
        mask = now == Stage.FOSSILISED
        if bool(mask.any()):
            yield SeedFossilized(**about(mask), parameters=parameters[mask].tolist())  # type: ignore[arg-type]
