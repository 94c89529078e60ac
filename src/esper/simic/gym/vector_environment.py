"""N Gymnasium environments in lockstep; each is reset in the step after its episode ends.

An episode is a function of its seed and its actions; its seed is a function of the run's seed, the
environment and the episode number. An environment is therefore saved as its episode number and the
actions taken in that episode, and is restored by replaying them. No pickle is needed.
"""

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Env

from esper.kasmina.rng import Purpose, random_bits
from esper.leyline.errors import UsageError, suggestion
from esper.runtime.gate import NOTHING
from esper.runtime.plugins import is_imported
from esper.simic.gym.spaces import Actions, Features, actions_of, features_of
from esper.tamiyo.policy.recurrent import FlatObservation


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode that ended.

    Attributes:
        environment: identity of its environment.
        episode_return: sum of its rewards, unnormalised.
        length: number of steps.
        terminated: whether the episode reached a terminal state rather than being truncated.
    """

    environment: int
    episode_return: float
    length: int
    terminated: bool


class GymEnvironments:
    """Environments of one task with their current observations.

    Args:
        environments: environments of one task, not yet reset.
        seed: seed of the run.
        first: identity of the first environment; those of the others follow.

    Attributes:
        identities: identities of the environments, int64 ``[N]``.
        observation: the current observations; overwritten by the next step.
        reward: rewards of the last step, float64 ``[N]``.
        terminated, truncated: whether the last step ended the episode, bool ``[N]``.
        over: environments whose episode has ended, bool ``[N]``: ``observation`` is their final
            one, and the next step only resets them.
        ended: episodes that ended in the last step.

    Raises:
        UsageError: Esper does not support a space.
    """

    def __init__(self, environments: list[Env[Any, Any]], seed: int, first: int = 0):
        self.environments, self.seed = environments, seed
        self.identities = torch.arange(first, first + len(environments))
        self.features: Features = features_of(environments[0])
        self.actions: Actions = actions_of(environments[0])
        count, heads = len(environments), len(self.actions.options)
        self._features = np.zeros((count, self.features.width), dtype=np.float32)
        self._masks = np.zeros((count, heads, self.actions.widest), dtype=np.bool_)
        self.observation = FlatObservation(
            torch.from_numpy(self._features), torch.from_numpy(self._masks)
        )
        self.reward, self._returns = np.zeros((2, count))
        self.terminated, self.truncated, self.over = np.zeros((3, count), dtype=np.bool_)
        self.episode = np.full(count, -1)
        self._history: list[list[list[int]]] = [[] for _ in environments]
        self.ended: list[Episode] = []

    @property
    def count(self) -> int:
        """Number of environments N."""
        return len(self.environments)

    def reset(self) -> None:
        """Begin the first episode of every environment."""
        for i in range(self.count):
            self._begin(i, 0)

    def step(self, choices: np.ndarray[Any, Any]) -> None:
        """Take one step in every environment; those that are ``over`` are reset instead.

        Args:
            choices: int64 ``[N, heads]``.
        """
        self.ended = []
        actions, over = self.actions.of(choices), self.over.tolist()
        for i, (choice, action) in enumerate(zip(choices.tolist(), actions, strict=True)):
            if over[i]:
                self._begin(i, int(self.episode[i]) + 1)
            else:
                self._advance(i, choice, action)

    def close(self) -> None:
        """Close the environments."""
        for environment in self.environments:
            environment.close()

    def _begin(self, i: int, episode: int) -> None:
        bits = random_bits(self.seed, self.identities[i : i + 1], Purpose.GYM_RESET, episode, 0, 1)
        observation, info = self.environments[i].reset(seed=int(bits))
        self.episode[i] = episode
        self._history[i].clear()
        self.reward[i] = self._returns[i] = 0.0
        self.terminated[i] = self.truncated[i] = self.over[i] = False
        self._store(i, observation, info)

    def _advance(self, i: int, choice: list[int], action: Any) -> None:
        observation, reward, terminated, truncated, info = self.environments[i].step(action)
        self._history[i].append(choice)
        self.reward[i] = reward
        self._returns[i] += float(reward)
        self.terminated[i], self.truncated[i] = terminated, truncated
        self._store(i, observation, info)
        if terminated or truncated:
            self.over[i] = True
            self.ended.append(
                Episode(
                    int(self.identities[i]),
                    float(self._returns[i]),
                    len(self._history[i]),
                    bool(terminated),
                )
            )

    def _store(self, i: int, observation: Any, info: dict[str, Any]) -> None:
        """Store an observation and its action mask.

        Raises:
            UsageError: the mask is invalid.
        """
        self.features.write(observation, self._features[i])
        over = self.terminated[i] or self.truncated[i]
        # No action is chosen in a final state, where some environments allow no option at all.
        mask = None if over else info.get("action_mask")
        try:
            self.actions.write_mask(mask, self._masks[i])
        except (ValueError, TypeError) as error:
            raise UsageError(f"gym: action_mask of environment {i} {error}") from error

    # --- state --------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Episode numbers, actions taken and current observations, for the checkpoint."""
        heads = len(self.actions.options)
        choices = [choice for history in self._history for choice in history]
        return {
            "episode": torch.from_numpy(self.episode).clone(),
            "lengths": torch.tensor([len(history) for history in self._history]),
            "actions": torch.tensor(choices, dtype=torch.int64).view(-1, heads),
            "features": self.observation.features.clone(),
            "masks": self.observation.masks.clone(),
        }

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Restore ``state`` by replaying its actions.

        Raises:
            ValueError: the number of environments or of features differs.
            UsageError: an environment's observation differs from the saved one.
        """
        lengths = state["lengths"].tolist()
        if len(lengths) != self.count or state["features"].shape != self._features.shape:
            raise ValueError("the environments differ")
        choices = state["actions"]
        actions = zip(choices.tolist(), self.actions.of(choices.numpy()), strict=True)
        for i, (episode, length) in enumerate(zip(state["episode"].tolist(), lengths, strict=True)):
            self._begin(i, episode)
            for _ in range(length):
                choice, action = next(actions)
                if self.over[i]:
                    raise _mismatch(i)
                self._advance(i, choice, action)
            features, reference = self._features[i], state["features"][i].numpy()
            same_masks = np.array_equal(self._masks[i], state["masks"][i].numpy())
            if features.tobytes() != reference.tobytes() or not same_masks:
                raise _mismatch(i)


def _mismatch(i: int) -> UsageError:
    return UsageError(
        f"resume: environment {i} did not reproduce its saved observation, because seed and "
        "actions do not determine the episodes of this task; start a new run"
    )


def make(name: str, arguments: dict[str, Any], count: int) -> list[Env[Any, Any]]:
    """Create ``count`` environments of the Gymnasium id ``name``.

    Raises:
        UsageError: there is no such id, its module has not been imported (``plugins.load_all``),
            or the environment cannot be created.
    """
    if not is_imported(name):
        NOTHING.check((), name, "a setting")
    try:
        return [gymnasium.make(name, disable_env_checker=True, **arguments) for _ in range(count)]
    except gymnasium.error.UnregisteredEnv as error:
        otherwise = "give the id of a registered one, or module:id"
        hint = suggestion(name, gymnasium.registry, otherwise, cutoff=0.5)
        raise UsageError(f"gym: there is no environment {name!r}; {hint}") from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"gym: {name} cannot be created ({reason})") from error
