"""The bookkeeping of a step in torch: everything except the arithmetic of the hosts.

Rows are the environments, followed by their twins. Every function returns newly allocated tensors,
because telemetry reads the tensors of earlier steps.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from esper.kasmina.lifecycle import (
    Rules,
    advance_automatically,
    apply,
    legal_slots,
    roll_back,
    tick,
)
from esper.kasmina.seeds import SeedSignals, SeedState, states_on_host
from esper.kasmina.slots import SlotSpec
from esper.leyline.stages import Stage
from esper.tamiyo.policy.features import Progress, critic_features, host_features, slot_features
from esper.tolaria.governor import DivergenceDetector
from esper.tolaria.results import EpochResult, Measurement, Scores, updated_signals


@dataclass(frozen=True, slots=True)
class ActionOutcome:
    """Outcome of the actions.

    Attributes:
        state: seeds of all rows.
        environment_state: seeds of the environments.
        success: whether the action was legal, bool ``[R]``.
        germinates: whether any seed germinated.
        fossilises: whether any seed was fossilised.
        host_before, host: seeds of all rows before and after, in CPU memory.
    """

    state: SeedState
    environment_state: SeedState
    success: Tensor
    germinates: bool
    fossilises: bool
    host_before: SeedState
    host: SeedState


@dataclass(frozen=True, slots=True)
class RowsAfterStep:
    """Seeds, signals and legal actions of the rows after a step.

    Attributes:
        state, signals: seeds and signals of all rows.
        own, own_signals: seeds and signals of the environments.
        legal: slots in which each operation is legal, bool ``[R, ops, S]``.
        seed_parameters: parameters of the living seeds, int64 ``[R, S]``.
        seed_parameters_max: parameters of the seeds that were alive before or after the step,
            int64 ``[R, S]``.
        birth_accuracy: see ``SeedSignals``; includes seeds whose life ended in this step.
    """

    state: SeedState
    own: SeedState
    signals: SeedSignals
    own_signals: SeedSignals
    legal: Tensor
    seed_parameters: Tensor
    seed_parameters_max: Tensor
    birth_accuracy: Tensor


@dataclass(frozen=True, slots=True)
class Features:
    """Features of the environments, see ``Observation``."""

    host: Tensor
    slots: Tensor
    blueprints: Tensor
    critic: Tensor


class _Size(Protocol):
    @property
    def parameter_count(self) -> int: ...


class HostView(Protocol):
    """What the bookkeeping reads of the hosts: an engine, or a module of the user's own."""

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots of the hosts."""
        ...

    @property
    def host(self) -> _Size:
        """The host without seeds."""
        ...

    @property
    def episode_length(self) -> int:
        """Steps per episode."""
        ...

    def seed_parameters(self, state: SeedState) -> Tensor:
        """Parameter count of each living seed, int64 ``[N, S]``; 0 in other slots."""
        ...


class TorchStep:
    """The bookkeeping of one shard, for every device and dtype.

    Args:
        engine: the hosts.
        count: number of environments among the rows.
        rules: rules of the lifecycle.
        kinds: blueprints that can germinate in each slot, bool ``[S, blueprints]``.
    """

    def __init__(self, engine: HostView, count: int, rules: Rules, kinds: Tensor):
        self.engine, self.count, self.rules, self.kinds = engine, count, rules, kinds

    def begin(self, state: SeedState, signals: SeedSignals) -> RowsAfterStep:
        """Seeds, signals and legal actions before the first step."""
        parameters = self.engine.seed_parameters(state)
        return self._rows(state, signals, signals, parameters, parameters)

    def act(self, state: SeedState, actions: Tensor, legal: Tensor) -> ActionOutcome:
        """See ``lifecycle.apply``. Which seeds live where decides what is launched in the step."""
        next_state, success = apply(state, actions, legal, self.kinds)
        before, after = states_on_host(state, next_state)
        changes = after.stage != before.stage
        stages = Stage.GERMINATED, Stage.FOSSILISED
        entries = [changes & (after.stage == stage) for stage in stages]
        germinates, fossilises = torch.stack(entries).any(2).any(1).tolist()
        environment_state = next_state.map(self._environment_rows)
        return ActionOutcome(
            next_state, environment_state, success, germinates, fossilises, before, after
        )

    def check(
        self,
        governor: DivergenceDetector,
        epoch: EpochResult,
        scores: Scores,
        epoch_state: SeedState,
    ) -> Tensor:
        """See ``DivergenceDetector.check``; ``epoch_state``: the seeds during the epoch."""
        return governor.check(epoch, scores, epoch_state.computing)

    def advance_lifecycle(
        self,
        epoch_state: SeedState,
        rolled_back: Tensor | None,
        before: RowsAfterStep,
        accuracy: Tensor,
        epoch: EpochResult,
        measurement: Measurement,
    ) -> RowsAfterStep:
        """Tick the lifecycle, update the signals and find the next legal actions.

        Args:
            epoch_state: seeds during the epoch.
            rolled_back: rows that the governor rolled back, bool ``[R]``; None if there are none.
            before: the rows before the actions.
            accuracy: validation accuracy of the previous step, ``[R]``.
            epoch: result of training.
            measurement: result of validation.
        """
        state, before_tick = tick(epoch_state, self.rules), epoch_state
        if rolled_back is not None:
            state, before_tick = roll_back(state, rolled_back), roll_back(epoch_state, rolled_back)
        parameters = self.engine.seed_parameters(state)
        seed_parameters_max = torch.maximum(parameters, before.seed_parameters)
        full_signals = updated_signals(
            before.signals.after_entries(before.state, epoch_state, accuracy),
            before_tick,
            self.engine.slots,
            epoch,
            measurement.contribution,
            measurement.scores.accuracy,
            seed_parameters_max,
            self.engine.host.parameter_count,
        )
        signals = full_signals.forget(~state.living)
        state = advance_automatically(state, signals, self.rules)
        return self._rows(state, full_signals, signals, parameters, seed_parameters_max)

    def observe(
        self, progress: Progress, now: RowsAfterStep, score: Tensor, twin_score: Tensor
    ) -> Features:
        """The features that a policy observes.

        Args:
            progress: progress of all rows.
            now: the rows after the step.
            score, twin_score: smoothed expected accuracy of environments and of their twins,
                ``[N]``.
        """
        engine, state = self.engine, now.own
        host, parameters = engine.host.parameter_count, self._environment_rows(now.seed_parameters)
        most = self.rules.max_seeds
        environment_progress = progress.map(self._environment_rows)
        return Features(
            host=host_features(environment_progress, state, host, parameters, most),
            slots=slot_features(
                engine.slots,
                engine.episode_length,
                state,
                now.own_signals,
                host,
                parameters,
                environment_progress.slot_measures,
            ),
            blueprints=state.blueprint * state.living,
            critic=critic_features(score, twin_score),
        )

    def _rows(
        self,
        state: SeedState,
        full_signals: SeedSignals,
        signals: SeedSignals,
        parameters: Tensor,
        seed_parameters_max: Tensor,
    ) -> RowsAfterStep:
        return RowsAfterStep(
            state=state,
            own=state.map(self._environment_rows),
            signals=signals,
            own_signals=signals.map(self._environment_rows),
            legal=legal_slots(state, signals, self.rules),
            seed_parameters=parameters,
            seed_parameters_max=seed_parameters_max,
            birth_accuracy=full_signals.birth_accuracy,
        )

    def _environment_rows(self, rows: Tensor) -> Tensor:
        """The environments' rows of a tensor over all rows."""
        return rows[: self.count]
