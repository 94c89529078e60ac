"""The bookkeeping of a shard's step computed by the native library."""

from typing import Any

import torch
from torch import Tensor

from esper.kasmina.lifecycle import Rules
from esper.kasmina.seeds import SeedSignals, SeedState
from esper.leyline.actions import HEADS, Op
from esper.native import library as native
from esper.native.pointers import Pointers, address
from esper.simic.growth.native_blocks import CALLS, Records, SignalsInBlocks, StateInBlocks
from esper.simic.growth.native_spec import governor_limits, step_spec
from esper.simic.growth.step_functions import ActionOutcome, Features, RowsAfterStep, TorchStep
from esper.tamiyo.policy import features
from esper.tamiyo.policy.features import CRITIC_FEATURES, HOST_FEATURES, SLOT_FEATURES, Progress
from esper.tolaria import governor as governor_module
from esper.tolaria.backends import EpochResult, Scores
from esper.tolaria.backends.native import NativeBackend
from esper.tolaria.engine import Engine, Measurement
from esper.tolaria.governor import DivergenceDetector
from esper.tolaria.slot_measures import SLOT_MEASURES

_INT64, _FLOAT32, _BOOL = torch.int64, torch.float32, torch.bool


def step_functions(engine: Engine, count: int, rules: Rules, kinds: Tensor) -> TorchStep:
    """The bookkeeping of a shard; arguments as for ``TorchStep``.

    ``NativeStep`` for hosts on the native backend in float32 without loss scales, else
    ``TorchStep``.
    """
    native_hosts = engine.backend.name == NativeBackend.name and engine.dtype == _FLOAT32
    supported = native_hosts and engine.device.type == "cpu" and engine.scales is None
    kind = NativeStep if supported and native.available() else TorchStep
    return kind(engine, count, rules, kinds)


class NativeStep(TorchStep):
    """``TorchStep`` with the native library instead of torch, on a CPU in float32.

    Integers and bools equal those of ``TorchStep``, and so do the bits of floats computed by sums,
    products and quotients; results of a cosine, an exponential or a logarithm agree to 1e-6. The
    governor's mean may be rounded differently, which can change its decision only for values
    within rounding error of a limit.

    Args: see ``TorchStep``.

    Raises:
        Unavailable: the library cannot be built.
    """

    def __init__(self, engine: Engine, count: int, rules: Rules, kinds: Tensor):
        super().__init__(engine, count, rules, kinds)
        spec = CALLS.StepSpec
        self._act = native.function("step_act", spec, CALLS.ActCall)
        self._check = native.function("step_check", CALLS.CheckCall)
        self._advance_lifecycle = native.function("step_pass", spec, CALLS.PassCall)
        self._observe = native.function("step_observe", spec, CALLS.ObserveCall)
        self.shape = len(engine.rows), len(engine.slots)
        self.size = self.shape[0] * self.shape[1]
        self.spec = step_spec(engine, count, rules, kinds)
        self.norms = [slot.segment_count for slot in engine.slots]
        self.states: Records[SeedState] = Records(StateInBlocks, self.shape, count)
        self.signals: Records[SeedSignals] = Records(SignalsInBlocks, self.shape, count)
        self.watch: tuple[DivergenceDetector, dict[str, Any]] | None = None

    def act(self, state: SeedState, actions: Tensor, legal: Tensor) -> ActionOutcome:
        """See ``TorchStep``."""
        rows, before, after = self.shape[0], self.states.of(state), self.states.empty()
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
        germinates, fossilises = call.germinated > 0, call.fossilised > 0
        state_after = after.record
        return ActionOutcome(
            state_after, after.own, success, germinates, fossilises, state, state_after
        )

    def check(
        self, governor: DivergenceDetector, epoch: EpochResult, scores: Scores, acted: SeedState
    ) -> Tensor:
        """See ``TorchStep``; changes the governor's tensors in place."""
        if self.watch is None or self.watch[0] is not governor:
            self.watch = governor, governor_limits(governor, self.spec, self.shape)
        rows = self.shape[0]
        reason = torch.empty(rows, dtype=_INT64)
        call = CALLS.CheckCall(
            **self.watch[1],
            losses=address(governor.losses, _FLOAT32, rows * governor_module.HISTORY),
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

    def advance_lifecycle(
        self,
        acted: SeedState,
        rolled_back: Tensor | None,
        before: RowsAfterStep,
        accuracy: Tensor,
        epoch: EpochResult,
        measurement: Measurement,
    ) -> RowsAfterStep:
        """See ``TorchStep``."""
        rows, size = self.shape[0], self.size
        tensors = zip(epoch.seed_tensor_norms, self.norms, strict=True)
        assert all(x.shape == (rows, width) and x.dtype is _FLOAT32 for x, width in tensors)
        at = Pointers()
        numbers = torch.empty(2, *self.shape, dtype=_INT64)
        birth_accuracy = torch.empty(self.shape, dtype=_FLOAT32)
        legal = torch.empty(rows, len(Op), self.shape[1], dtype=_BOOL)
        parameters, seed_parameters_max = numbers.unbind()
        seeds_before, seeds = self.states.of(before.state), self.states.of(acted)
        previous = self.signals.of(before.signals)
        after, signals = self.states.empty(), self.signals.empty()
        call = CALLS.PassCall(
            before=seeds_before.at,
            acted=seeds.at,
            previous=previous.at,
            rolled_back=None if rolled_back is None else address(rolled_back, _BOOL, rows),
            seed_parameters=address(before.seed_parameters, _INT64, size),
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
            seed_parameters_max=seed_parameters_max.data_ptr(),
        )
        self._advance_lifecycle(self.spec, call)
        return RowsAfterStep(
            after.record,
            after.own,
            signals.record,
            signals.own,
            legal,
            parameters,
            seed_parameters_max,
            birth_accuracy,
        )

    def observe(
        self, progress: Progress, now: RowsAfterStep, score: Tensor, twin_score: Tensor
    ) -> Features:
        """See ``TorchStep``."""
        rows, count, slots = self.shape[0], self.count, self.shape[1]
        history = rows * (features.HISTORY + 1)
        part, remaining = progress.step / progress.episode_length, progress.remaining
        seeds, signals = self.states.of(now.state), self.signals.of(now.signals)
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
            remaining=address(remaining, _FLOAT32, rows),
            losses=address(progress.losses, _FLOAT32, history),
            expected=address(progress.expected, _FLOAT32, history),
            train_loss=address(progress.train_loss, _FLOAT32, rows),
            train_accuracy=address(progress.train_accuracy, _FLOAT32, rows),
            slot_measures=address(progress.slot_measures, _FLOAT32, self.size * len(SLOT_MEASURES)),
            last_op=address(progress.last_op, _INT64, rows),
            success=address(progress.success, _BOOL, rows),
            rolled_back=address(progress.rolled_back, _BOOL, rows),
            log_price=address(progress.log_price, _FLOAT32, rows),
            score=address(score, _FLOAT32, count),
            twin_score=address(twin_score, _FLOAT32, count),
            host=seen.host.data_ptr(),
            slot=seen.slots.data_ptr(),
            critic=seen.critic.data_ptr(),
            blueprints=seen.blueprints.data_ptr(),
        )
        self._observe(self.spec, call)
        return seen
