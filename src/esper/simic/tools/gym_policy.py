"""A policy that was learned on a Gymnasium task: loaded from its run, acting, and played.

``load_policy`` is public as ``esper.load_policy``.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.wrappers import RecordVideo
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from esper.leyline.config import TrainConfig
from esper.leyline.errors import UsageError, first_line
from esper.runtime import plugins
from esper.runtime.gate import Permission
from esper.simic.actor import PolicyActor
from esper.simic.gym.collect import play
from esper.simic.gym.lockstep import Environments, Episode
from esper.simic.gym.vector_environment import GymEnvironments, features_of
from esper.simic.run.checkpoint import (
    Checkpoint,
    CorruptCheckpoint,
    best_checkpoint,
    load_checkpoint,
    load_latest,
    restore_agent,
)
from esper.simic.run.run_directory import stored_config
from esper.simic.run.unusable_run import UnusableRun
from esper.simic.training.gym_trainee import EVALUATION, build_gym_agent, made_environments
from esper.tamiyo.policy.interface import RecurrentState
from esper.tamiyo.policy.recurrent import FlatObservation

CPU = torch.device("cpu")
VIDEOS = 5
"""Number of episodes that are filmed."""
EXAMPLES = 3
"""Rows of the traced call; torch.export treats 0 or 1 as a constant."""


class PolicyStep(nn.Module):
    """One step of a policy with the most probable actions, normalisation and memory included.

    Args:
        policy: its network, moments and conversion of actions.
    """

    def __init__(self, policy: "GymPolicy"):
        super().__init__()
        self.policy, self.normalise = policy.actor.policy, policy.actor.moments.normalise
        actions = policy.example.actions
        self.heads, self.components = len(actions.options), actions.components
        self.starts = torch.tensor(actions.starts)
        low, high = (torch.from_numpy(bound).float() for bound in actions.bounds)
        self.low, self.high = low, high

    def forward(self, observation: Tensor, mask: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Actions, and the state after the step.

        Actions are int64 ``[N, heads]`` if there are heads, and then float32 ``[N, components]`` if
        there are Boxes.

        Args:
            observation: flat, float64 ``[N, inputs]``.
            mask: legal options, bool ``[N, heads, widest]``.
            state: tensors ``[1, N, width]``, zeros at the begin of an episode.
        """
        normal = self.normalise(FlatObservation(observation.float(), mask))
        choices, _, _, after = self.policy.act(normal, state, None)
        if not self.components:
            return choices + self.starts, *after
        squashed = torch.tanh(choices[:, self.heads :])
        numbers = self.low + (squashed + 1.0) / 2.0 * (self.high - self.low)
        numbers = torch.minimum(torch.maximum(numbers, self.low), self.high)
        options = (choices[:, : self.heads].long() + self.starts,) if self.heads else ()
        return *options, numbers, *after


@dataclass(frozen=True, slots=True)
class GymPolicy:
    """A learned policy of a Gymnasium task, with everything between raw observations and actions.

    Attributes:
        config: settings of its run.
        round: round of its checkpoint.
        actor: network and normalisation.
        example: environments of the task, whose spaces tell how to convert.
    """

    config: TrainConfig
    round: int
    actor: PolicyActor[FlatObservation]
    example: Environments

    def act(
        self,
        observation: Any,
        state: RecurrentState | None = None,
        mask: Any = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Any, RecurrentState]:
        """Choose an action, or one for each observation of a batch.

        Args:
            observation: as ``reset`` and ``step`` of the environment return it, or a batch with one
                more leading axis; of Dict and Tuple a list.
            state: what the call before returned; None at the begin of episodes. Without memory it
                is empty.
            mask: ``info["action_mask"]``, a list of them for a batch; None if all actions are
                legal.
            generator: draws the action by its probability; None takes the most probable one.

        Returns:
            the action as ``step`` takes it, a list of actions for a batch; and the state.

        Raises:
            ValueError: the observation, the state or the mask has another shape.
        """
        example, space = self.example, self.example.shape.space
        assert space is not None
        if space.shape is None:  # Dict and Tuple
            batch = isinstance(observation, list)
        else:
            batch = np.ndim(observation) > len(space.shape)
        observations = list(observation) if batch else [observation]
        features = np.stack([features_of(space, each) for each in observations])
        if features.shape != (len(observations), example.shape.inputs):
            raise ValueError(f"observation has shape {np.shape(observation)}, not {space.shape}")
        masks = np.zeros((len(observations), *example.observation.masks.shape[1:]), np.bool_)
        legal_actions = mask if batch and mask is not None else [mask] * len(masks)
        for rows, legal in zip(masks, legal_actions, strict=True):
            example.actions.write_mask(legal, rows)
        raw = FlatObservation(torch.from_numpy(features).float(), torch.from_numpy(masks))
        hidden = self.actor.policy.initial_hidden(len(masks)) if state is None else state
        if any(part.shape[1] != len(masks) for part in hidden):
            raise ValueError(f"state belongs to {hidden[0].shape[1]} episodes, not {len(masks)}")
        noise = None
        if generator is not None:
            shape = len(masks), *self.actor.policy.noise_shape(raw)
            noise = torch.rand(shape, generator=generator)
        normal = self.actor.moments.normalise(raw)
        choices, _, _, hidden = self.actor.policy.act(normal, hidden, noise)
        actions = example.actions.of(choices.numpy())
        return (list(actions) if batch else actions[0]), hidden

    def export(self) -> ExportedProgram:
        """``PolicyStep`` as a program that runs without Esper, with any number of rows."""
        heads, widest = self.example.observation.masks.shape[1:]
        observation = torch.zeros(EXAMPLES, self.example.shape.inputs, dtype=torch.float64)
        mask = torch.ones(EXAMPLES, heads, widest, dtype=torch.bool)
        state = self.actor.policy.initial_hidden(EXAMPLES)
        rows = Dim("rows")
        shapes: tuple[Any, ...] = {0: rows}, {0: rows}
        if state:
            shapes += (tuple({1: rows} for _ in state),)
        with torch.no_grad():
            return export(
                PolicyStep(self).eval(), (observation, mask, *state), dynamic_shapes=shapes
            )

    def export_names(self) -> tuple[list[str], list[str]]:
        """Names of the inputs and outputs of ``export``."""
        count = len(self.actor.policy.initial_hidden(1))
        actions = self.example.actions
        gives = ["actions"] * bool(actions.options) + ["numbers"] * bool(actions.components)
        before, after = ([f"{name}_{i}" for i in range(count)] for name in ("state", "next_state"))
        return ["observation", "mask", *before], [*gives, *after]

    def play(self, episodes: int, greedy: bool = True, videos: Path | None = None) -> list[Episode]:
        """Play fresh episodes of the task, whose seeds no training has.

        Args:
            episodes: number of episodes, each in an environment of its own.
            greedy: whether to take the most probable action rather than draw one.
            videos: folder for videos of the first ``VIDEOS`` episodes; none if None.

        Raises:
            UsageError: the task cannot be drawn.
        """
        config = self.config if videos is None else _drawing(self.config)
        environments = made_environments(config, EVALUATION, EVALUATION + episodes)
        if videos is not None:
            _film(environments, videos)
        try:
            return play(self.actor, environments, greedy)
        finally:
            environments.close()


def _drawing(config: TrainConfig) -> TrainConfig:
    """Settings whose environments draw pictures."""
    words = (*config.gymnasium.gym_args, "render_mode=rgb_array")
    return replace(config, gymnasium=replace(config.gymnasium, gym_args=words))


def _film(environments: Environments, folder: Path) -> None:
    """Film the first episode of the first environments.

    Raises:
        UsageError: they are a VectorEnv.
    """
    if not isinstance(environments, GymEnvironments):
        raise UsageError("video: a VectorEnv is not filmed; leave it out")
    for i, environment in enumerate(environments.environments[:VIDEOS]):
        name = f"episode-{i + 1}"
        environments.environments[i] = RecordVideo(
            environment, str(folder), lambda number: number == 0, name_prefix=name
        )


def load_policy(run: str | Path, *, latest: bool = False, trust: bool = False) -> GymPolicy:
    """Load the policy of a run on a Gymnasium task.

    For example ``policy = esper.load_policy("runs/...-CartPole-v1")``, then
    ``action, state = policy.act(observation, state)``.

    Args:
        run: the run directory.
        latest: whether to load the latest checkpoint rather than the one with the best evaluation.
        trust: whether plugins that the run names may be executed.

    Raises:
        UsageError: there is no such run, it trained no Gymnasium task, or it has no intact
            checkpoint.
    """
    return gym_policy(Path(run), latest, Permission(trust=trust))


def gym_policy(run: Path, latest: bool, permission: Permission) -> GymPolicy:
    """See ``load_policy``; ``permission`` is that for plugins, and for the module of an id."""
    try:
        config, _ = stored_config(run)
        if config.gymnasium.gym is None:
            raise UsageError(
                f"run: {run} trained no Gymnasium task; measure it with esper evaluate --policy"
            )
        checkpoint = _checkpoint(run, latest)
    except UnusableRun as error:
        raise UsageError(f"run: {error.reason}") from error
    plugins.load_all(config, permission, str(run))
    if config.gymnasium.vectorization == "async":
        # With the same results in this process.
        config = replace(config, gymnasium=replace(config.gymnasium, vectorization="sync"))
    example = made_environments(config, EVALUATION, EVALUATION + 1)
    agent = build_gym_agent(config, example.shape, CPU)
    restore_agent(agent, checkpoint.parts)
    agent.policy.requires_grad_(False)  # so that what an exported step returns holds no graph
    actor = PolicyActor(agent.policy, agent.moments, config.world.seed, CPU)
    return GymPolicy(config, checkpoint.round, actor, example)


def _checkpoint(run: Path, latest: bool) -> Checkpoint:
    best = None if latest else best_checkpoint(run)
    if best is None:
        return load_latest(run)
    try:
        return load_checkpoint(best)
    except (CorruptCheckpoint, OSError) as error:
        raise UsageError(
            f"run: {best} is corrupt ({first_line(error)}); give --latest for another checkpoint"
        ) from error
