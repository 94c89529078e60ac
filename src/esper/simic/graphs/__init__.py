"""Steps with fixed shapes, captured once as a CUDA graph and then replayed.

Small networks spend most of their time on kernel launches; a replay launches all kernels at once.
A captured function must not wait for the device, and it reads and writes the same memory in every
call: inputs are copied into buffers and outputs out of them.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.kasmina.transfer import moved
from esper.leyline.errors import first_line
from esper.leyline.metrics import Metric
from esper.simic.actor import PolicyActor
from esper.simic.normalise import ObservationMoments
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Sequences
from esper.simic.update_metrics import Metrics
from esper.tamiyo.policy.interface import (
    ObservationT,
    Policy,
    RecurrentState,
    hidden_from,
    inputs_from,
    named_hidden,
    named_inputs,
)

log = logging.getLogger(__name__)

Tensors = dict[str, Tensor]
Function = Callable[[Tensors], Tensors]

WARMUPS = 3
"""Eager calls before recording, in which libraries choose kernels and allocate buffers."""


MAX_SHAPES = 32
"""Maximum number of recordings of one function, because each keeps its memory."""


class Recorder(Protocol):
    """Records the operations of a function once so that they can be replayed."""

    def warm(self, function: Callable[[], Tensors]) -> Tensors:
        """Call ``function`` eagerly, in preparation for recording."""
        ...

    def record(self, function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """Record ``function``; returns the replay and the tensors that hold its results."""
        ...


class CudaRecorder:
    """Records CUDA graphs.

    Warm-up calls run on a side stream, which torch requires if gradients are captured.

    Args:
        device: device of the functions; another one may be current.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._side = torch.cuda.Stream(device)

    def warm(self, function: Callable[[], Tensors]) -> Tensors:
        """See ``Recorder.warm``."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            results = function()
        current.wait_stream(self._side)
        return results

    def record(self, function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """See ``Recorder.record``. Recording computes nothing."""
        graph = torch.cuda.CUDAGraph()
        # The telemetry thread may wait for a copy meanwhile, which other modes take for an error.
        mode = "thread_local"
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, stream=self._side, capture_error_mode=mode),
        ):
            results = function()

        def replay() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return replay, results


@dataclass(slots=True)
class _Recording:
    """The calls with inputs of one set of shapes.

    Attributes:
        buffers: inputs of the recorded function.
        calls: number of calls so far.
        replay: carries out the recorded operations; None before they are recorded.
        results: results of a replay.
    """

    buffers: Tensors
    calls: int = 0
    replay: Callable[[], None] | None = None
    results: Tensors = field(default_factory=dict)


class CapturedFunction:
    """``function``, recorded once for each set of its inputs' shapes and dtypes, then replayed.

    The first ``WARMUPS`` calls with new shapes run eagerly, and so do all calls once there are
    ``MAX_SHAPES``. If recording fails, one warning is logged and every call runs eagerly.

    Args:
        function: maps named tensors to named tensors; may change other tensors in place, the same
            ones in every call.
        recorder: see ``Recorder``.
        name: name of the function in the warning.
    """

    def __init__(self, function: Function, recorder: Recorder, name: str):
        self.function, self.recorder, self.name = function, recorder, name
        self.failure = False
        self.recordings: dict[tuple[object, ...], _Recording] = {}

    def __call__(self, inputs: Tensors) -> Tensors:
        """The results of ``function(inputs)``, in new tensors."""
        recording = None if self.failure else self._recording(inputs)
        if recording is None:
            return self.function(inputs)
        recording.calls += 1
        if recording.calls <= WARMUPS:
            return self.recorder.warm(lambda: self.function(inputs))
        for name, x in inputs.items():
            recording.buffers[name].copy_(x, non_blocking=True)
        if recording.replay is None and not self._record(recording):
            return self.function(inputs)
        assert recording.replay is not None
        recording.replay()
        return {name: x.clone() for name, x in recording.results.items()}

    def _recording(self, inputs: Tensors) -> _Recording | None:
        """The recording of these shapes; None if there are too many."""
        key = tuple((name, x.shape, x.dtype) for name, x in inputs.items())
        if key not in self.recordings and len(self.recordings) < MAX_SHAPES:
            buffers = {name: torch.empty_like(x) for name, x in inputs.items()}
            self.recordings[key] = _Recording(buffers)
        return self.recordings.get(key)

    def _record(self, recording: _Recording) -> bool:
        try:
            recording.replay, recording.results = self.recorder.record(
                lambda: self.function(recording.buffers)
            )
        except Exception as error:
            reason = first_line(error)
            log.warning("%s: not captured as a CUDA graph (%s); running eagerly", self.name, reason)
            self.failure = True
            return False
        return True


class CapturedActor(PolicyActor[ObservationT]):
    """A ``PolicyActor`` that replays a captured graph and chooses the same actions.

    Args:
        recorder: records the graph; a ``CudaRecorder`` if None.
    """

    def __init__(self, *arguments: Any, recorder: Recorder | None = None, **keywords: Any):
        self._given_recorder = recorder
        super().__init__(*arguments, **keywords)
        self._acting = CapturedFunction(self._act_on, self._recorder, "rollout step")

    @cached_property
    def _recorder(self) -> Recorder:
        return self._given_recorder or CudaRecorder(self.device)

    def acting_with(
        self, policy: Policy[ObservationT], moments: ObservationMoments[ObservationT]
    ) -> PolicyActor[ObservationT]:
        """See ``PolicyActor.acting_with``."""
        return CapturedActor(policy, moments, self.seed, self.device, recorder=self._recorder)

    def _act(
        self, observation: ObservationT, hidden: RecurrentState, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, RecurrentState]:
        if noise is None:
            return super()._act(observation, hidden, noise)
        self._kind = type(observation)
        outputs = self._acting(named_inputs(observation, hidden) | {"noise": noise})
        return outputs["actions"], outputs["log_prob"], outputs["value"], hidden_from(outputs)

    def _act_on(self, inputs: Tensors) -> Tensors:
        actions, log_prob, value, hidden = super()._act(
            *inputs_from(self._kind, inputs), inputs["noise"]
        )
        return {"actions": actions, "log_prob": log_prob, "value": value, **named_hidden(hidden)}


class CapturedAgent(CapturedActor[ObservationT], PPOAgent[ObservationT]):
    """A ``PPOAgent`` that replays captured graphs and computes the same numbers.

    Args:
        recorder: records the graphs; a ``CudaRecorder`` if None.
    """

    def __init__(self, *arguments: Any, recorder: Recorder | None = None, **keywords: Any):
        super().__init__(*arguments, recorder=recorder, **keywords)
        self._captured_step = CapturedFunction(self._minibatch_step_on, self._recorder, "update")
        self._missing: set[str] = set()

    def _pick(self, sequences: Sequences[ObservationT], indices: Tensor) -> Sequences[ObservationT]:
        return pick_padded(sequences, indices)

    def _minibatch_step(
        self, minibatch: Sequences[ObservationT], stop: Tensor
    ) -> tuple[Metrics, Tensor]:
        self._kind = type(minibatch.observation)
        metrics: Metrics = dict(self._captured_step(minibatch.tensors() | {"before": stop}))
        stop = metrics[Metric.STOPPED]
        return metrics | dict.fromkeys(self._missing), stop

    def _minibatch_step_on(self, inputs: Tensors) -> Tensors:
        minibatch = Sequences.from_tensors(self._kind, inputs)
        metrics, _ = super()._minibatch_step(minibatch, inputs["before"])
        self._missing = {name for name, value in metrics.items() if value is None}
        return {name: value for name, value in metrics.items() if value is not None}


def pick_padded(sequences: Sequences[ObservationT], indices: Tensor) -> Sequences[ObservationT]:
    """``Sequences.pick``, padded so that few shapes occur, because each is recorded.

    If sequences differ in length, the length and the number of the chosen ones are rounded up to
    powers of two, with steps of weight 0.
    """
    if sequences.lengths is None:
        return sequences.pick(indices)
    length, count = int(sequences.lengths[indices].max()), len(indices)
    steps, columns = torch.arange(_power_of_two(length)), torch.arange(_power_of_two(count))
    device = sequences.actions.device
    inside = moved((steps < length)[:, None] & (columns < count), device)
    positions = moved(steps.clamp(max=length - 1), device)
    index = moved(torch.cat([indices, indices[:1].expand(len(columns) - count)]), device)

    def part(x: Tensor) -> Tensor:
        return x.index_select(1, index).index_select(0, positions)

    selection = sequences.selection(index, part)
    assert selection.weight is not None
    assert selection.critic_weight is not None
    weights = selection.weight * inside, selection.critic_weight * inside
    return replace(selection, weight=weights[0], critic_weight=weights[1])


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def agent_class(device: torch.device, compile_mode: str) -> type[PPOAgent[Any]]:
    """``CapturedAgent`` on CUDA with the mode ``default``.

    The modes ``reduce-overhead`` and ``max-autotune`` of ``torch.compile`` capture graphs
    themselves, and a capture cannot contain another.
    """
    captures = device.type == "cuda" and compile_mode == "default"
    return CapturedAgent if captures else PPOAgent
