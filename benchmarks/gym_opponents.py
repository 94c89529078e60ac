"""RecurrentPPO and MaskablePPO of sb3-contrib, with the settings that their authors tuned.

``own test``: the settings of sb3-contrib's test of CartPole without velocities. ``Zoo``: those of
RL Baselines3 Zoo for the task named, without its number of steps. The Zoo's for CartPole without
velocities with RecurrentPPO are left out: on CartPole they took 19,456 steps in the median of eight
seeds, at 150 a second.
"""

import contextlib
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_maskable
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

EVALUATION_SEED = 1_000_003


@dataclass(frozen=True)
class Opponent:
    """An algorithm with its settings.

    Attributes:
        recurrent: RecurrentPPO rather than MaskablePPO.
        envs: number of environments.
        normalise: whether observations and rewards are normalised.
        settings: arguments of the algorithm.
    """

    recurrent: bool
    envs: int
    normalise: bool
    settings: dict[str, Any] = field(default_factory=dict)


def falling(start: float, share: float) -> float:
    """A schedule that falls linearly to 0 with the share of the run that is left."""
    return start * share


CART_POLE: dict[str, Any] = {
    "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20,
    "ent_coef": 0.0, "learning_rate": partial(falling, 1e-3), "clip_range": partial(falling, 0.2),
}  # fmt: skip
ACROBOT: dict[str, Any] = {
    "n_steps": 256, "gae_lambda": 0.94, "gamma": 0.99, "n_epochs": 4, "ent_coef": 0.0,
}  # fmt: skip
OWN_TEST: dict[str, Any] = {
    "n_steps": 128, "batch_size": 256, "learning_rate": 7e-4, "n_epochs": 10, "gae_lambda": 0.98,
    "policy_kwargs": {"lstm_hidden_size": 64},
}  # fmt: skip
OPPONENTS = {
    "RecurrentPPO (own test)": Opponent(True, 8, True, OWN_TEST),
    "RecurrentPPO (Zoo, Acrobot)": Opponent(True, 16, True, ACROBOT),
    "MaskablePPO (Zoo, CartPole)": Opponent(False, 8, False, CART_POLE),
    "MaskablePPO (Zoo, Acrobot)": Opponent(False, 16, True, ACROBOT),
}


class Masked(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Shows the masks of an environment as MaskablePPO asks for them."""

    def reset(self, **arguments: Any) -> Any:
        """Begin an episode."""
        observation, self.info = self.env.reset(**arguments)
        return observation, self.info

    def step(self, action: Any) -> Any:
        """Take a step."""
        observation, reward, terminated, truncated, self.info = self.env.step(action)
        return observation, reward, terminated, truncated, self.info

    def action_masks(self) -> list[int]:
        """The masks of the current state, as one row."""
        return [int(legal) for mask in self.info["action_mask"] for legal in mask]


def outcome(
    name: str, gym: str, arguments: dict[str, Any], masked: bool, seed: int,
    threshold: float, budget: int, every: int, episodes: int,
) -> dict[str, Any]:  # fmt: skip
    """Train until an evaluation reaches the threshold, or to the end of the budget.

    Args:
        name: one of ``OPPONENTS``.
        gym, arguments: id of the environment and what it is made with.
        masked: whether the environment has masks.
        seed: seed of the run.
        threshold: mean return that ends the run.
        budget: environment steps allowed.
        every: environment steps between evaluations.
        episodes: episodes of an evaluation.

    Returns:
        steps and mean return of each evaluation, and the steps per second without evaluations.
    """
    opponent = OPPONENTS[name]
    more = {} if opponent.recurrent else {"use_masking": masked}
    evaluate: Any = evaluate_policy if opponent.recurrent else evaluate_maskable

    def maker() -> Any:
        made = gymnasium.make(gym, **arguments)
        boxed = isinstance(made.observation_space, gymnasium.spaces.Box)
        # RecurrentPPO cannot count the features of a MultiDiscrete observation.
        flat = made if boxed else gymnasium.wrappers.FlattenObservation(made)
        return Monitor(Masked(flat) if masked else flat)

    def environments(count: int, training: bool) -> Any:
        inner = DummyVecEnv([maker] * count)
        inner.seed(seed if training else EVALUATION_SEED)
        if not opponent.normalise:
            return inner
        boxed = isinstance(inner.observation_space, gymnasium.spaces.Box)
        return VecNormalize(inner, training, norm_obs=boxed, norm_reward=training)

    training, evaluation = environments(opponent.envs, True), environments(episodes, False)
    kind: Any = RecurrentPPO if opponent.recurrent else MaskablePPO
    policy = "MlpLstmPolicy" if opponent.recurrent else "MlpPolicy"
    model = kind(policy, training, seed=seed, device="cpu", **opponent.settings)
    steps: list[int] = []
    returns: list[float] = []
    begin, pauses = time.perf_counter(), 0.0

    class Evaluate(BaseCallback):  # type: ignore[misc]
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            nonlocal pauses
            if self.num_timesteps < every * (len(steps) + 1):
                return
            start = time.perf_counter()
            if opponent.normalise:
                evaluation.obs_rms = training.obs_rms
            mean, _ = evaluate(self.model, evaluation, n_eval_episodes=episodes, **more)
            pauses += time.perf_counter() - start
            steps.append(self.num_timesteps)
            returns.append(float(mean))
            if mean >= threshold or self.num_timesteps >= budget:
                raise StopIteration

    with contextlib.suppress(StopIteration):
        # Schedules fall over the steps given here; one rollout more, before which it stops.
        model.learn(budget + model.n_steps * opponent.envs, callback=Evaluate(), **more)
    speed = steps[-1] / (time.perf_counter() - begin - pauses)
    return {"steps": steps, "returns": returns, "speed": speed}
