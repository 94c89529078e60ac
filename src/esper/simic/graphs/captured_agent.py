"""An actor and a learner whose steps are captured as CUDA graphs."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from esper.leyline.metrics import Metric
from esper.simic.actor import PolicyActor
from esper.simic.graphs.capture import CapturedFunction, CudaRecorder, Recorder, Tensors
from esper.simic.normalise import ObservationMoments
from esper.simic.ppo import PPOAgent
from esper.simic.sequences import Sequences
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
        return sequences.pick_padded(indices)

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


def agent_class(device: torch.device, compile_mode: str) -> type[PPOAgent[Any]]:
    """``CapturedAgent`` on CUDA with the mode ``default``.

    The modes ``reduce-overhead`` and ``max-autotune`` of ``torch.compile`` capture graphs
    themselves, and a capture cannot contain another.
    """
    captures = device.type == "cuda" and compile_mode == "default"
    return CapturedAgent if captures else PPOAgent
