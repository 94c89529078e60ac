"""The learner of a Gymnasium task."""

import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from esper.leyline.config import TrainConfig
from esper.leyline.errors import UsageError
from esper.simic.graphs import agent_class
from esper.simic.gym.cut_offs import bootstrap
from esper.simic.gym.lockstep import Shape
from esper.simic.gym.structured_encoder import structured_encoder
from esper.simic.normalise import RunningMoments
from esper.simic.ppo import PPOAgent
from esper.tamiyo.policy.recurrent import FlatObservation, RecurrentPolicy


class FlatMoments:
    """Moments of the features of observations.

    Args:
        width: number of features of an observation.
        device: device of the moments.
        active: whether features are normalised.
        raw: columns that stay as they are, see ``Shape.raw``.
    """

    def __init__(
        self, width: int, device: torch.device, active: bool, raw: Iterable[tuple[int, int]] = ()
    ):
        columns = torch.zeros(width, dtype=torch.bool)
        for begin, end in raw:
            columns[begin:end] = True
        raw_columns = columns if columns.any() else None
        self.features = RunningMoments((width,), device, raw_columns, 0.0, math.inf)
        self.active = active

    def normalise(self, observation: FlatObservation) -> FlatObservation:
        """See ``ObservationMoments.normalise``."""
        if not self.active:
            return observation
        return FlatObservation(self.features.normalise(observation.features), observation.masks)

    def update(self, observation: FlatObservation, valid: Tensor | None) -> None:
        """See ``ObservationMoments.update``; ignores the final observations of episodes."""
        if not self.active:
            return
        features = observation.features
        if valid is not None:
            # Moments ignore rows of NaN; boolean indexing would make the CPU wait for the device.
            features = torch.where(valid[..., None].to(features.device), features, float("nan"))
        self.features.update(features)

    def parts(self) -> dict[str, RunningMoments]:
        """See ``ObservationMoments.parts``."""
        return {"features": self.features}


SMALLEST_DEVIATION = 1e-30
"""Advantage floor. Rewards may have any scale, so it only prevents a division by 0."""


def gym_agent(
    config: TrainConfig,
    shape: Shape,
    device: torch.device,
    amp_dtype: torch.dtype | None = None,
    compile_mode: str = "off",
) -> PPOAgent[FlatObservation]:
    """A learner of a Gymnasium task.

    Args:
        config: settings of the run.
        shape: sizes of the task's observations and actions.
        device, compile_mode: see ``PPOAgent``.
        amp_dtype: dtype of the policy's trunk, see ``Policy.amp_dtype``.

    Raises:
        UsageError: the encoder does not exist, or fails.
    """
    memory = config.learner.lstm_hidden if config.gymnasium.memory == "lstm" else 0

    encoder: dict[str, Any] = {}
    name = config.gymnasium.encoder
    if name is not None:
        if shape.space is None:
            raise UsageError("encoder: an update of a policy with your own encoder has no replay")
        encoder["encoder"] = partial(structured_encoder, name, shape.space)

    def network() -> RecurrentPolicy:
        shared = config.gymnasium.critic == "shared"
        policy = RecurrentPolicy(
            shape.inputs, shape.options, memory, shared, components=shape.components, **encoder
        )
        policy.amp_dtype = amp_dtype
        return policy

    normalise = shape.measured and config.gymnasium.normalise_observations
    moments = FlatMoments(shape.inputs, device, normalise, shape.raw)
    agent: PPOAgent[FlatObservation] = agent_class(device, compile_mode)(
        config.learner,
        config.world.seed,
        device,
        network,
        moments,
        compile_mode,
        advantage_floor=SMALLEST_DEVIATION,
        bootstrap=bootstrap,
        **config.algorithm.learner_arguments(config.learner),
    )
    agent.shape = asdict(replace(shape, space=None))
    return agent
