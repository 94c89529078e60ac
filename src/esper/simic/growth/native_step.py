"""Hands the rows of a shard over to the native library, in blocks of fields."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.lifecycle import Rules
from esper.kasmina.seeds import SeedSignals, SeedState
from esper.leyline.actions import HEADS, Op
from esper.native import library as native
from esper.native.pointers import Pointers, address
from esper.native.structures import Struct
from esper.simic.growth.native_blocks import (
    AMOUNTS,
    CALLS,
    FLAGS,
    NUMBERS,
    SIGNAL_FLAGS,
    SIGNALS,
    Blocks,
    CutSignals,
    CutState,
)
from esper.simic.growth.native_spec import governor_limits, step_spec
from esper.simic.growth.step_functions import Acted, Features, Passed, StepFunctions, TorchStep
from esper.tamiyo.policy import features
from esper.tamiyo.policy.features import CRITIC_FEATURES, HOST_FEATURES, SLOT_FEATURES, Progress
from esper.tolaria import governor as disaster
from esper.tolaria.backends import EpochResult, Scores
from esper.tolaria.backends.native import NativeBackend
from esper.tolaria.engine import Engine, Measurement
from esper.tolaria.governor import Governor

_INT64, _FLOAT32, _BOOL = torch.int64, torch.float32, torch.bool


def step_functions(engine: Engine, count: int, rules: Rules, kinds: Tensor) -> StepFunctions:
    """What keeps the books of a shard: the library beside the native backend in float32, otherwise
    torch. Arguments as of ``TorchStep``."""
    beside = engine.backend.name == NativeBackend.name and engine.dtype == _FLOAT32
    known = beside and engine.device.type == "cpu" and engine.optimisation.scales is None
    made = NativeStep if known and native.available() else TorchStep
    return made(engine, count, rules, kinds)


@dataclass(frozen=True, slots=True)
class _Seeds:
    """A state and the blocks it is made of."""

    state: SeedState
    own: SeedState
    blocks: Blocks
    at: Struct


@dataclass(frozen=True, slots=True)
class _Signals:
    """Signals and the blocks they are made of."""

    signals: SeedSignals
    own: SeedSignals
    blocks: Blocks
    at: Struct


class NativeStep(TorchStep):
    """Implements ``StepFunctions`` with the native library, on a CPU in float32.

    Integers and bools are those of torch, and so are the bits of numbers made of sums, products and
    quotients; where a cosine, an exponential or a logarithm is involved they agree to 1e-6. The
    governor's mean may be rounded otherwise, which matters on the very edge of a limit alone.

    Args: see ``TorchStep``.

    Raises:
        Unavailable: the library cannot be built.
    """

    def __init__(self, engine: Engine, count: int, rules: Rules, kinds: Tensor):
        super().__init__(engine, count, rules, kinds)
        spec = CALLS.StepSpec
        self._act = native.function("step_act", spec, CALLS.ActCall)
        self._check = native.function("step_check", CALLS.CheckCall)
        self._pass_time = native.function("step_pass", spec, CALLS.PassCall)
        self._observe = native.function("step_observe", spec, CALLS.ObserveCall)
        self.shape = len(engine.rows), len(engine.slots)
        self.size = self.shape[0] * self.shape[1]
        self.spec = step_spec(engine, count, rules, kinds)
        self.norms = [slot.segment_count for slot in engine.slots]
        # What was answered last is asked about next; its blocks need not be put together anew.
        self.acted: _Seeds | None = None
        self.passed: _Seeds | None = None
        self.given: _Seeds | None = None
        self.measured: _Signals | None = None
        self.watch: tuple[Governor, dict[str, Any]] | None = None

    def act(self, state: SeedState, actions: Tensor, legal: Tensor) -> Acted:
        """See ``StepFunctions``."""
        rows, before, after = self.shape[0], self._seeds(state), self._empty_seeds()
        success = torch.empty(rows, dtype=_BOOL)
        call = CALLS.ActCall(
            before=before.at,
            actions=address(actions, _INT64, rows * len(HEADS)),
            legal=address(legal, _BOOL, self.size * len(Op)),
            after=after.at,
            success=success.data_ptr(),
            germinated=0,
            fossilised=0,
        )
        self._act(self.spec, call)
        self.acted = after
        germinates, fossilises = call.germinated > 0, call.fossilised > 0
        return Acted(after.state, after.own, success, germinates, fossilises)

    def check(
        self, governor: Governor, epoch: EpochResult, scores: Scores, acted: SeedState
    ) -> Tensor:
        """See ``StepFunctions``; the governor's memory is changed in place."""
        if self.watch is None or self.watch[0] is not governor:
            self.watch = governor, governor_limits(governor, self.spec, self.shape)
        rows = self.shape[0]
        reason = torch.empty(rows, dtype=_INT64)
        call = CALLS.CheckCall(
            **self.watch[1],
            losses=address(governor.losses, _FLOAT32, rows * disaster.HISTORY),
            strikes=address(governor.strikes, _INT64, rows),
            healthy=address(governor.healthy, _BOOL, rows),
            train_loss=address(epoch.loss, _FLOAT32, rows),
            loss=address(scores.loss, _FLOAT32, rows),
            expected=address(scores.expected, _FLOAT32, rows),
            host_norm=address(epoch.host_gradient_norm, _FLOAT32, rows),
            seed_norm=address(epoch.seed_gradient_norm, _FLOAT32, self.size),
            stage=address(acted.stage, _INT64, self.size),
            reason=reason.data_ptr(),
        )
        self._check(call)
        return reason

    def pass_time(
        self,
        acted: SeedState,
        rolled: Tensor | None,
        then: Passed,
        accuracy: Tensor,
        epoch: EpochResult,
        measurement: Measurement,
    ) -> Passed:
        """See ``StepFunctions``."""
        rows, size = self.shape[0], self.size
        tensors = zip(epoch.seed_tensor_norms, self.norms, strict=True)
        assert all(part.shape == (rows, width) for part, width in tensors)
        at = Pointers()
        numbers = torch.empty(2, *self.shape, dtype=_INT64)
        birth_accuracy = torch.empty(self.shape, dtype=_FLOAT32)
        legal = torch.empty(rows, len(Op), self.shape[1], dtype=_BOOL)
        parameters, ever = numbers.unbind()
        before, seeds = self._seeds(then.state), self._seeds(acted)
        previous = self._signals(then.signals)
        after, signals = self._empty_seeds(), self._empty_signals()
        call = CALLS.PassCall(
            before=before.at,
            acted=seeds.at,
            previous=previous.at,
            rolled=None if rolled is None else address(rolled, _BOOL, rows),
            seed_parameters=address(then.seed_parameters, _INT64, size),
            accuracy_before=address(accuracy, _FLOAT32, rows),
            accuracy=address(measurement.scores.accuracy, _FLOAT32, rows),
            train_loss=address(epoch.loss, _FLOAT32, rows),
            host_norm=address(epoch.host_gradient_norm, _FLOAT32, rows),
            seed_norm=address(epoch.seed_gradient_norm, _FLOAT32, size),
            tensor_norms=at.of_each(epoch.seed_tensor_norms),
            contribution=address(measurement.contribution, _FLOAT32, size),
            after=after.at,
            signals=signals.at,
            birth_accuracy=birth_accuracy.data_ptr(),
            legal=legal.data_ptr(),
            parameters=parameters.data_ptr(),
            ever=ever.data_ptr(),
        )
        self._pass_time(self.spec, call)
        self.passed, self.measured = after, signals
        return Passed(
            after.state,
            after.own,
            signals.signals,
            signals.own,
            legal,
            parameters,
            ever,
            birth_accuracy,
        )

    def observe(
        self, progress: Progress, now: Passed, score: Tensor, twin_score: Tensor
    ) -> Features:
        """See ``StepFunctions``."""
        rows, count, slots = self.shape[0], self.count, self.shape[1]
        history = rows * (features.HISTORY + 1)
        part = progress.step / progress.episode_length
        seeds, signals = self._seeds(now.state), self._signals(now.signals)
        seen = Features(
            host=torch.empty(count, len(HOST_FEATURES), dtype=_FLOAT32),
            slots=torch.empty(count, slots, len(SLOT_FEATURES), dtype=_FLOAT32),
            blueprints=torch.empty(count, slots, dtype=_INT64),
            critic=torch.empty(count, len(CRITIC_FEATURES), dtype=_FLOAT32),
        )
        call = CALLS.ObserveCall(
            seeds=seeds.at,
            signals=signals.at,
            seed_parameters=address(now.seed_parameters, _INT64, self.size),
            part=part,
            rest=1.0 - part,
            losses=address(progress.losses, _FLOAT32, history),
            expected=address(progress.expected, _FLOAT32, history),
            train_loss=address(progress.train_loss, _FLOAT32, rows),
            train_accuracy=address(progress.train_accuracy, _FLOAT32, rows),
            last_op=address(progress.last_op, _INT64, rows),
            success=address(progress.success, _BOOL, rows),
            rolled_back=address(progress.rolled_back, _BOOL, rows),
            score=address(score, _FLOAT32, count),
            twin_score=address(twin_score, _FLOAT32, count),
            host=seen.host.data_ptr(),
            slot=seen.slots.data_ptr(),
            critic=seen.critic.data_ptr(),
            blueprints=seen.blueprints.data_ptr(),
        )
        self._observe(self.spec, call)
        return seen

    def _seeds(self, state: SeedState) -> _Seeds:
        """The blocks of ``state``, put together where they were made elsewhere.

        The caller holds them for as long as the library reads them.
        """
        for known in (self.passed, self.acted, self.given):
            if known is not None and known.state is state:
                return known
        blocks = (_together(state, names) for names in (NUMBERS, AMOUNTS, FLAGS))
        self.given = replace(self._cut(*blocks), state=state)
        return self.given

    def _signals(self, signals: SeedSignals) -> _Signals:
        """Likewise of ``signals``."""
        if self.measured is not None and self.measured.signals is signals:
            return self.measured
        blocks = (_together(signals, names) for names in (SIGNALS, SIGNAL_FLAGS))
        self.measured = replace(self._cut_signals(*blocks), signals=signals)
        return self.measured

    def _empty_seeds(self) -> _Seeds:
        return self._cut(
            torch.empty(len(NUMBERS), *self.shape, dtype=_INT64),
            torch.empty(len(AMOUNTS), *self.shape, dtype=_FLOAT32),
            torch.empty(len(FLAGS), *self.shape, dtype=_BOOL),
        )

    def _empty_signals(self) -> _Signals:
        return self._cut_signals(
            torch.empty(len(SIGNALS), *self.shape, dtype=_FLOAT32),
            torch.empty(len(SIGNAL_FLAGS), *self.shape, dtype=_BOOL),
        )

    def _cut(self, *blocks: Tensor) -> _Seeds:
        numbers, amounts, flags = (block.data_ptr() for block in blocks)
        at = CALLS.SeedBlocks(numbers=numbers, amounts=amounts, flags=flags)
        return _Seeds(CutState.of(blocks), CutState.of(blocks, self.count), blocks, at)

    def _cut_signals(self, *blocks: Tensor) -> _Signals:
        amounts, flags = (block.data_ptr() for block in blocks)
        at = CALLS.SignalBlocks(amounts=amounts, flags=flags)
        return _Signals(CutSignals.of(blocks), CutSignals.of(blocks, self.count), blocks, at)


def _together(record: SeedState | SeedSignals, names: Sequence[str]) -> Tensor:
    """A block of some fields."""
    return torch.stack([getattr(record, name) for name in names])
