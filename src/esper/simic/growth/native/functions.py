"""Hands the rows of a shard over to the native library, in blocks of fields."""

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from esper.kasmina.lifecycle import Rules
from esper.kasmina.seeds import SeedSignals, SeedState
from esper.leyline.actions import HEADS, Op
from esper.simic.growth.native.blocks import Blocks, CutSignals, CutState
from esper.simic.growth.native.interface import (
    AMOUNTS,
    FLAGS,
    NUMBERS,
    SIGNAL_FLAGS,
    SIGNALS,
    ActCall,
    CheckCall,
    ObserveCall,
    PassCall,
    SeedBlocks,
    SignalBlocks,
    step_library,
)
from esper.simic.growth.native.spec import governor_call, step_spec
from esper.simic.growth.step_functions import Acted, Features, Passed, StepFunctions, TorchStep
from esper.tamiyo.policy import features
from esper.tamiyo.policy.features import CRITIC_FEATURES, HOST_FEATURES, SLOT_FEATURES, Progress
from esper.tolaria import governor as disaster
from esper.tolaria.backends import EpochResult, Scores
from esper.tolaria.backends.native.backend import NativeBackend
from esper.tolaria.backends.native.build import Unavailable
from esper.tolaria.engine import Engine, Measurement
from esper.tolaria.governor import Governor

_INT64, _FLOAT32, _BOOL = torch.int64, torch.float32, torch.bool


def step_functions(engine: Engine, count: int, rules: Rules, kinds: Tensor) -> StepFunctions:
    """What keeps the books of a shard: the library beside the native backend in float32, otherwise
    torch. Arguments as of ``TorchStep``."""
    native = isinstance(engine.backend, NativeBackend) and engine.dtype == _FLOAT32
    known = native and engine.device.type == "cpu" and engine.optimisation.scales is None
    return (NativeStep if known and available() else TorchStep)(engine, count, rules, kinds)


@cache
def available() -> bool:
    """Whether there is a library; one line of the log says why not."""
    try:
        step_library()
    except Unavailable as reason:
        logging.getLogger(__name__).warning(f"native step: {reason}; using torch")
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Seeds:
    """A state and the blocks it is made of."""

    state: SeedState
    own: SeedState
    blocks: Blocks
    at: SeedBlocks


@dataclass(frozen=True, slots=True)
class _Signals:
    """Signals and the blocks they are made of."""

    signals: SeedSignals
    own: SeedSignals
    blocks: Blocks
    at: SignalBlocks


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
        self.library = step_library()
        self.shape = len(engine.rows), len(engine.slots)
        self.size = self.shape[0] * self.shape[1]
        self.spec = step_spec(engine, count, rules, kinds)
        self.norms = [slot.segment_count for slot in engine.slots]
        # What was answered last is asked about next; its blocks need not be put together anew.
        self.acted: _Seeds | None = None
        self.passed: _Seeds | None = None
        self.given: _Seeds | None = None
        self.measured: _Signals | None = None
        self.watch: tuple[Governor, CheckCall] | None = None

    def act(self, state: SeedState, actions: Tensor, legal: Tensor) -> Acted:
        """See ``StepFunctions``."""
        rows, before, after = self.shape[0], self._seeds(state), self._empty_seeds()
        success = torch.empty(rows, dtype=_BOOL)
        call = ActCall(
            before=before.at,
            actions=_at(actions, _INT64, rows * len(HEADS)),
            legal=_at(legal, _BOOL, self.size * len(Op)),
            after=after.at,
            success=success.data_ptr(),
        )
        self.library.act(self.spec, call)
        self.acted = after
        germinates, fossilises = call.germinated > 0, call.fossilised > 0
        return Acted(after.state, after.own, success, germinates, fossilises)

    def check(
        self, governor: Governor, epoch: EpochResult, scores: Scores, acted: SeedState
    ) -> Tensor:
        """See ``StepFunctions``; the governor's memory is changed in place."""
        if self.watch is None or self.watch[0] is not governor:
            self.watch = governor, governor_call(governor, self.spec, self.shape)
        rows, call = self.shape[0], self.watch[1]
        reason = torch.empty(rows, dtype=_INT64)
        call.losses = _at(governor.losses, _FLOAT32, rows * disaster.HISTORY)
        call.strikes = _at(governor.strikes, _INT64, rows)
        call.healthy = _at(governor.healthy, _BOOL, rows)
        call.train_loss = _at(epoch.loss, _FLOAT32, rows)
        call.loss = _at(scores.loss, _FLOAT32, rows)
        call.expected = _at(scores.expected, _FLOAT32, rows)
        call.host_norm = _at(epoch.host_gradient_norm, _FLOAT32, rows)
        call.seed_norm = _at(epoch.seed_gradient_norm, _FLOAT32, self.size)
        call.stage = _at(acted.stage, _INT64, self.size)
        call.reason = reason.data_ptr()
        self.library.check(call)
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
        norms = [_at(part, _FLOAT32, rows * width) for part, width in tensors]
        table = (ctypes.c_void_p * len(norms))(*norms)
        numbers = torch.empty(2, *self.shape, dtype=_INT64)
        birth_accuracy = torch.empty(self.shape, dtype=_FLOAT32)
        legal = torch.empty(rows, len(Op), self.shape[1], dtype=_BOOL)
        parameters, ever = numbers.unbind()
        before, seeds = self._seeds(then.state), self._seeds(acted)
        previous = self._signals(then.signals)
        after, signals = self._empty_seeds(), self._empty_signals()
        call = PassCall(
            before=before.at,
            acted=seeds.at,
            previous=previous.at,
            rolled=None if rolled is None else _at(rolled, _BOOL, rows),
            seed_parameters=_at(then.seed_parameters, _INT64, size),
            accuracy_before=_at(accuracy, _FLOAT32, rows),
            accuracy=_at(measurement.scores.accuracy, _FLOAT32, rows),
            train_loss=_at(epoch.loss, _FLOAT32, rows),
            host_norm=_at(epoch.host_gradient_norm, _FLOAT32, rows),
            seed_norm=_at(epoch.seed_gradient_norm, _FLOAT32, size),
            tensor_norms=ctypes.addressof(table),
            contribution=_at(measurement.contribution, _FLOAT32, size),
            after=after.at,
            signals=signals.at,
            birth_accuracy=birth_accuracy.data_ptr(),
            legal=legal.data_ptr(),
            parameters=parameters.data_ptr(),
            ever=ever.data_ptr(),
        )
        self.library.pass_time(self.spec, call)
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
        call = ObserveCall(
            seeds=seeds.at,
            signals=signals.at,
            seed_parameters=_at(now.seed_parameters, _INT64, self.size),
            part=part,
            rest=1.0 - part,
            losses=_at(progress.losses, _FLOAT32, history),
            expected=_at(progress.expected, _FLOAT32, history),
            train_loss=_at(progress.train_loss, _FLOAT32, rows),
            train_accuracy=_at(progress.train_accuracy, _FLOAT32, rows),
            last_op=_at(progress.last_op, _INT64, rows),
            success=_at(progress.success, _BOOL, rows),
            rolled_back=_at(progress.rolled_back, _BOOL, rows),
            score=_at(score, _FLOAT32, count),
            twin_score=_at(twin_score, _FLOAT32, count),
            host=seen.host.data_ptr(),
            slot=seen.slots.data_ptr(),
            critic=seen.critic.data_ptr(),
            blueprints=seen.blueprints.data_ptr(),
        )
        self.library.observe(self.spec, call)
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
        at = SeedBlocks(*(block.data_ptr() for block in blocks))
        return _Seeds(CutState.of(blocks), CutState.of(blocks, self.count), blocks, at)

    def _cut_signals(self, *blocks: Tensor) -> _Signals:
        at = SignalBlocks(*(block.data_ptr() for block in blocks))
        return _Signals(CutSignals.of(blocks), CutSignals.of(blocks, self.count), blocks, at)


def _at(tensor: Tensor, dtype: torch.dtype, count: int) -> int:
    """The address of a tensor of ``count`` numbers."""
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()
    assert tensor.numel() == count
    return tensor.data_ptr()


def _together(record: SeedState | SeedSignals, names: Sequence[str]) -> Tensor:
    """A block of some fields."""
    return torch.stack([getattr(record, name) for name in names])
