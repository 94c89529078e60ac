"""How fast is CartPole? Esper against a script of one file and sb3-contrib, in turns.

    python benchmarks/cartpole_speed.py --write

In one process, 8 environments of 128 steps, 10 epochs of 4 minibatches: Esper's defaults for all.
The script is written like CleanRL's ``ppo.py``: Gymnasium's ``SyncVectorEnv``, a rollout in NumPy,
actor and critic of two layers of 64 each; Esper's share the first layer, as by default. Both report
returns, clip fraction and KL divergence; Esper also evaluates masks, gradient norms of every head
and the check that all is finite. RecurrentPPO has its LSTM of 64 shared, as Esper's by default.
"""

import os
from importlib.metadata import version
from typing import Any

import gymnasium
import numpy as np
import torch
from gym_speed import Theirs
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from reporting import in_turns, made_on, new_parser, publish, table
from stable_baselines3.common.env_util import make_vec_env
from torch import nn
from torch.distributions import Categorical

from esper.leyline.config import unflatten
from esper.leyline.config.reading import with_horizons
from esper.simic.gym.agent import gym_agent
from esper.simic.gym.collect import collect
from esper.simic.gym.vector_environment import GymEnvironments, make

TASK, ENVS, STEPS, EPOCHS, PARTS, WIDTH = "CartPole-v1", 8, 128, 10, 4, 64
DISCOUNT, TRACE_DECAY = 0.99, 0.98
CPU = torch.device("cpu")


def layers(outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers, as CleanRL initialises them."""
    linears = [nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, outputs)]
    for linear, scale in zip(linears, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(linear.weight, scale)
        nn.init.zeros_(linear.bias)
    return nn.Sequential(linears[0], nn.Tanh(), linears[1], nn.Tanh(), linears[2])


class Script:
    """PPO of one file."""

    def __init__(self) -> None:
        make_one = [lambda: RecordEpisodeStatistics(gymnasium.make(TASK))] * ENVS
        self.envs = SyncVectorEnv(make_one)
        self.actor, self.critic = layers(2, 0.01), layers(1, 1.0)
        self.weights = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.weights, 1e-3, eps=1e-5)
        self.observation, _ = self.envs.reset(seed=1)
        self.done = np.zeros(ENVS, np.float32)

    def collect(self) -> None:
        """Collect one rollout."""
        shape = STEPS, ENVS
        seen, actions = np.zeros((*shape, 4), np.float32), np.zeros(shape, np.int64)
        log_probs, rewards, dones, values = np.zeros((4, *shape), np.float32)
        for t in range(STEPS):
            seen[t], dones[t] = self.observation, self.done
            with torch.no_grad():
                now = torch.from_numpy(seen[t])
                distribution = Categorical(logits=self.actor(now))
                action = distribution.sample()
                log_probs[t] = distribution.log_prob(action).numpy()
                values[t] = self.critic(now)[:, 0].numpy()
            actions[t] = action.numpy()
            self.observation, rewards[t], ended, cut, info = self.envs.step(actions[t])
            self.done = np.logical_or(ended, cut)
            if "episode" in info:
                self.returns = info["episode"]["r"][info["_episode"]]
        self.rollout = seen, actions, log_probs, rewards, dones, values

    def update(self) -> None:
        """Learn from the rollout."""
        seen, actions, log_probs, rewards, dones, values = self.rollout
        with torch.no_grad():
            after = self.critic(torch.from_numpy(self.observation))[:, 0].numpy()
        advantages, last = np.zeros_like(rewards), 0.0
        for t in reversed(range(STEPS)):
            alive = 1.0 - (dones[t + 1] if t + 1 < STEPS else self.done)
            value = values[t + 1] if t + 1 < STEPS else after
            delta = rewards[t] + DISCOUNT * value * alive - values[t]
            advantages[t] = last = delta + DISCOUNT * TRACE_DECAY * alive * last
        columns = seen, actions, log_probs, advantages, advantages + values
        flat = [torch.from_numpy(x.reshape(STEPS * ENVS, *x.shape[2:])) for x in columns]
        for _ in range(EPOCHS):
            for part in torch.randperm(STEPS * ENVS).chunk(PARTS):
                self.step(*(x[part] for x in flat))

    def step(self, seen: Any, actions: Any, log_probs: Any, advantage: Any, target: Any) -> None:
        """One step of the optimizer."""
        distribution = Categorical(logits=self.actor(seen))
        value = self.critic(seen)[:, 0]
        log_ratio = distribution.log_prob(actions) - log_probs
        ratio = log_ratio.exp()
        with torch.no_grad():
            self.kl = ((ratio - 1.0) - log_ratio).mean()
            self.outside = ((ratio - 1.0).abs() > 0.2).float().mean().item()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
        error = 0.5 * (value - target).square().mean()
        loss = policy - 0.01 * distribution.entropy().mean() + 0.5 * error
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, 0.5)
        self.optimizer.step()


class Esper:
    """Rollout and update of Esper; ``memory`` as on the command line."""

    def __init__(self, memory: str) -> None:
        config = with_horizons(unflatten({"gym": TASK, "memory": memory, "rounds": 10_000}))
        self.environments = GymEnvironments(make(TASK, {}, ENVS), 1)
        self.agent = gym_agent(config, self.environments.shape, CPU)
        self.environments.reset()
        self.agent.begin(torch.arange(ENVS), 0)
        self.number = 0

    def collect(self) -> None:
        """Collect one rollout."""
        self.number += 1
        self.rollout = collect(self.environments, self.agent, STEPS, self.number)

    def update(self) -> None:
        """Learn from the rollout."""
        self.agent.update(self.rollout)


def main() -> None:
    """Time them in turns."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batch = STEPS * ENVS // PARTS
    env = make_vec_env(TASK, ENVS, seed=1)
    theirs = Theirs(env, STEPS, WIDTH, n_epochs=EPOCHS, batch_size=batch, seed=1, device="cpu")
    learners: dict[str, Any] = {
        "script": Script(), "Esper, --memory none": Esper("none"),
        "RecurrentPPO": theirs, "Esper": Esper("lstm"),
    }  # fmt: skip
    calls: dict[str, Any] = {}
    for name, learner in learners.items():
        calls |= {f"{name}: rollout": learner.collect, f"{name}: update": learner.update}
    times = in_turns(calls, arguments.repeats)

    def seconds(name: str, clock: int) -> float:
        return sum(times[f"{name}: {part}"][clock] for part in ("rollout", "update"))

    rows = [
        (
            name,
            *(f"{1e3 * times[f'{name}: {part}'][1]:.0f}" for part in ("rollout", "update")),
            f"{STEPS * ENVS / seconds(name, 1):,.0f}",
        )
        for name in learners
    ]
    pairs = (("Esper, --memory none", "script"), ("Esper", "RecurrentPPO"))
    ratios = {
        f"{ours} relative to {theirs}": seconds(theirs, 1) / seconds(ours, 1)
        for ours, theirs in pairs
    }
    about = " ".join((__doc__ or "").split("\n\n")[2].split())
    parts = (
        about,
        table(("learner", "rollout, CPU ms", "update, CPU ms", "steps/s"), rows),
        table(("speed", "ratio"), [(name, f"{ratio:.2f}") for name, ratio in ratios.items()]),
        made_on(
            f"sb3-contrib {version('sb3-contrib')}", f"gymnasium {gymnasium.__version__}",
            "1 thread", f"load {os.getloadavg()[0]:.1f}",
        ),
    )  # fmt: skip
    publish("cartpole_speed", "Speed on CartPole", parts, arguments.write, ratios)


if __name__ == "__main__":
    main()
