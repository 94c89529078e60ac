"""Do other learners grow networks as well? Esper, sb3-contrib and a script on one family.

    OMP_NUM_THREADS=1 python benchmarks/growth_learners.py --write     # two hours on one core
    OMP_NUM_THREADS=1 python benchmarks/growth_learners.py --seeds 1 --rounds 5

Every learner trains on ``gymnasium.make_vec("esper/adaptation-v0", num_envs=32)`` or, Esper's own,
with ``esper train ppo --task adaptation`` on the same environments: 60 episodes of each.
MaskablePPO is that of sb3-contrib, unmodified, behind the adaptor below and VecNormalize. The
script is a PPO of one file, a network of two layers of 64. Both learn from whole episodes, with the
discount and lambda of Esper's defaults; their learning rates and entropy weights are the best of
four on a seed that is not in the table. Each policy then plays 64 hosts of ``adaptation_held_out``
with its most probable actions. *Gain* is the utility (expected accuracy on the test split minus the
price of parameters) relative to the same hosts that never grow, in points.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers.utils import RunningMeanStd
from reporting import in_turns, kept, made_on, new_parser, publish, table
from sb3_contrib import MaskablePPO
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import Tensor, nn

import esper
from esper.karn.intervals import interval
from esper.leyline.config import defaults_of
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.run.checkpoint import load_latest, restore_agent
from esper.simic.run.run_directory import stored_config
from esper.simic.tools.growth_vector import GrowthVectorEnv
from esper.simic.training.setup import build_agent, control
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tamiyo.policy.action_masks import MaskedCategorical

FAMILY, ENVS, STEPS, ROUNDS, SEEDS = "adaptation", 32, 24, 60, 8
HOSTS, HOST_SEED, TUNING_SEED = 64, 1_000_003, 100
LEARNER = defaults_of("growth", "ppo").learner
RATES, ENTROPIES = (3e-4, 1e-3), (0.0, 0.01)
Act = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""The most probable legal actions ``[N, 6]`` for observations and masks."""


class Adaptor(VecEnv):  # type: ignore[misc]
    """A Gymnasium ``VectorEnv`` with masks, as stable-baselines3 wants it."""

    def __init__(self, env: Any) -> None:
        self.env = env
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> np.ndarray:
        """Begin episodes."""
        observation, self.info = self.env.reset(seed=self._seeds[0])
        self._reset_seeds()
        return observation

    def step_async(self, actions: np.ndarray) -> None:
        """Remember the actions."""
        self.actions = actions

    def step_wait(self) -> Any:
        """Take the step."""
        observation, reward, over, _, self.info = self.env.step(self.actions)
        infos: list[dict[str, Any]] = [{} for _ in over]
        for i in np.flatnonzero(over):
            infos[i]["terminal_observation"] = self.info["final_obs"][i]
        return observation, reward, over, infos

    def env_method(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """The masks, which is all that is asked for."""
        assert name == "action_masks"
        return list(self.info["action_mask"])

    def has_attr(self, name: str) -> bool:
        """Whether the environments have masks."""
        return name == "action_masks"

    def get_attr(self, name: str, indices: Any = None) -> list[Any]:
        """An attribute of every environment."""
        return [None] * self.num_envs

    def set_attr(self, name: str, value: Any, indices: Any = None) -> None:
        """Nothing is set."""

    def env_is_wrapped(self, wrapper: Any, indices: Any = None) -> list[bool]:
        """No environment is wrapped."""
        return [False] * self.num_envs

    def close(self) -> None:
        """Nothing is open."""


def training() -> Any:
    """The environments in which the others learn."""
    return gymnasium.make_vec(
        f"esper/{FAMILY}-v0", num_envs=ENVS, autoreset_mode="SameStep", threads=1
    )


def maskable(seed: int, rounds: int, rate: float, entropy: float) -> Act:
    """Train MaskablePPO of sb3-contrib."""
    env = VecNormalize(Adaptor(training()))
    model = MaskablePPO(
        "MlpPolicy", env, rate, n_steps=STEPS, batch_size=ENVS * STEPS // 4, n_epochs=10,
        gamma=LEARNER.discount, gae_lambda=LEARNER.trace_decay, ent_coef=entropy, seed=seed,
        device="cpu",
    )  # fmt: skip
    model.learn(rounds * STEPS * ENVS)

    def act(observation: np.ndarray, masks: np.ndarray) -> np.ndarray:
        normal = env.normalize_obs(observation)
        return model.predict(normal, action_masks=masks, deterministic=True)[0]

    return act


class Network(nn.Module):
    """Actor and critic of the script, each of two layers of 64."""

    def __init__(self, inputs: int, options: list[int]) -> None:
        super().__init__()
        self.options, widest = options, max(options)
        self.exists = torch.arange(widest) < torch.tensor(options)[:, None]

        def layers(outputs: int, gain: float) -> nn.Sequential:
            sizes = ((inputs, 64, 2**0.5), (64, 64, 2**0.5), (64, outputs, gain))
            linears = [nn.Linear(a, b) for a, b, _ in sizes]
            for linear, (_, _, scale) in zip(linears, sizes, strict=True):
                nn.init.orthogonal_(linear.weight, scale)
                nn.init.zeros_(linear.bias)
            return nn.Sequential(linears[0], nn.Tanh(), linears[1], nn.Tanh(), linears[2])

        self.actor, self.critic = layers(len(options) * widest, 0.01), layers(1, 1.0)

    def forward(self, observation: Tensor, masks: Tensor) -> tuple[MaskedCategorical, Tensor]:
        """Distribution ``[..., 6, widest]`` and value ``[...]``."""
        wide = self.exists.expand(*masks.shape[:-1], *self.exists.shape).clone()
        wide[wide.clone()] = masks.flatten()
        logits = self.actor(observation).unflatten(-1, self.exists.shape)
        return MaskedCategorical(logits, wide, validate=False), self.critic(observation)[..., 0]


def script(seed: int, rounds: int, rate: float, entropy: float) -> Act:
    """Train with a PPO of one file."""
    torch.manual_seed(seed)
    env = training()
    network = Network(env.single_observation_space.shape[0], env.single_action_space.nvec.tolist())
    optimizer = torch.optim.Adam(network.parameters(), rate, eps=1e-5)
    moments = RunningMeanStd(shape=env.single_observation_space.shape)

    def normalised(observation: np.ndarray) -> Tensor:
        return torch.from_numpy((observation - moments.mean) / np.sqrt(moments.var + 1e-8)).float()

    observation, info = env.reset(seed=seed)
    for round_ in range(rounds):
        optimizer.param_groups[0]["lr"] = rate * (1 - round_ / rounds)
        rows: list[tuple[Tensor, ...]] = []
        for _ in range(STEPS):
            moments.update(observation)
            now = normalised(observation), torch.from_numpy(info["action_mask"])
            with torch.no_grad():
                distribution, value = network(*now)
                action = distribution.sample(torch.rand(distribution.log_probs.shape))
                log_prob = distribution.log_prob(action).sum(-1)
            observation, reward, _, _, info = env.step(action.numpy())
            rows.append((*now, action, log_prob, value, torch.from_numpy(reward).float()))
        seen, masks, actions, old, values, rewards = (
            torch.stack(x) for x in zip(*rows, strict=True)
        )
        advantages, last = torch.zeros_like(rewards), torch.zeros(ENVS)
        for t in reversed(range(STEPS)):
            after = values[t + 1] if t + 1 < STEPS else torch.zeros(ENVS)
            delta = rewards[t] + LEARNER.discount * after - values[t]
            advantages[t] = last = delta + LEARNER.discount * LEARNER.trace_decay * last
        returns = advantages + values
        flat = [x.flatten(0, 1) for x in (seen, masks, actions, old, advantages, returns)]
        for _ in range(10):
            for part in torch.randperm(ENVS * STEPS).chunk(4):
                seen_, masks_, actions_, old_, advantage, target = (x[part] for x in flat)
                distribution, value = network(seen_, masks_)
                ratio = (distribution.log_prob(actions_).sum(-1) - old_).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                gains = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                error = 0.5 * (value - target).square().mean()
                loss = 0.5 * error - gains.mean() - entropy * distribution.entropy().sum(-1).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(network.parameters(), 0.5)
                optimizer.step()

    def act(observation: np.ndarray, masks: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            inputs = normalised(observation), torch.from_numpy(masks)
            return network(*inputs)[0].mode.numpy()

    return act


def held_out() -> GrowthVectorEnv:
    """The hosts on which policies are compared, each with a twin that never grows."""
    env = GrowthVectorEnv(HOSTS, f"{FAMILY}_held_out", group_size=1, threads=1)
    env.reset(seed=HOST_SEED)
    return env


def gain(env: GrowthEnv, report: Any) -> float:
    """Mean utility above that of the hosts that never grow, in points."""
    utility = env.utility(report.test.expected, report.added_parameters)
    return 100.0 * float((utility - report.twin_test.expected).mean())


def gain_of_others(train: Callable[..., Act], seed: int, rounds: int, *settings: float) -> Any:
    """Gain of a learner behind the ``VectorEnv``, and its environment steps per second."""
    begin = time.perf_counter()
    act = train(seed, rounds, *settings)
    speed = rounds * STEPS * ENVS / (time.perf_counter() - begin)
    env = held_out()
    observation, info = env.reset(seed=HOST_SEED)
    for _ in range(STEPS):
        step = env.advance(act(observation, info["action_mask"]))
        observation, info = env.batch(step.observation), env.info(step)
    return {"gain": gain(env.growth, step.report), "speed": speed}


def gain_of_actor(actor: Any) -> float:
    """Gain of an actor of Esper."""
    env, last = held_out().growth, []
    collect(env, actor(env), 0, lambda t, actions, step: last.append(step))
    return gain(env, last[-1].report)


def ours(seed: int, rounds: int, work: Path) -> Any:
    """Gain of Esper's PPO with its defaults, and its environment steps per second."""
    begin = time.perf_counter()
    run = train_ppo_vectorized(
        task=FAMILY,
        envs=ENVS,
        rounds=rounds,
        seed=seed,
        threads=1,
        telemetry_dir=str(work / "runs"),
    )
    speed = rounds * STEPS * ENVS / (time.perf_counter() - begin)
    agent = build_agent(stored_config(run.path)[0], torch.device("cpu"))
    restore_agent(agent, load_latest(run.path).parts)
    agent.greedy = True
    return {"gain": gain_of_actor(lambda env: agent), "speed": speed}


def speed_of_interface() -> str:
    """Time of an episode through the ``VectorEnv`` relative to the growth environment itself."""
    env = training().unwrapped
    env.reset(seed=1)
    growth = GrowthVectorEnv(ENVS, FAMILY, threads=1).growth
    still, heads = np.zeros((ENVS, 6), np.int64), torch.tensor([[0, 0, 0, 2, 1, 2, 0, 0]] * ENVS)

    def direct() -> None:
        growth.reset(1)
        for _ in range(STEPS):
            growth.step(heads)

    def through() -> None:
        for _ in range(STEPS):
            env.step(still)

    times = in_turns({"direct": direct, "through": through}, 9)
    return f"{times['direct'][1] / times['through'][1]:.2f}"


def main() -> None:
    """Train and compare."""
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--work", type=Path, default=Path("runs/growth_learners"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    esper.register_envs()
    rounds, work = arguments.rounds, arguments.work

    def of(name: str, make: Callable[[], Any]) -> Any:
        return kept(work / f"{name} {rounds}.json", make)

    rows, figures = [], {}
    for name in ("never", "heuristic", "rule"):
        value = of(name, partial(gain_of_actor, partial(control, name)))
        rows.append((name, f"{value:+.1f}", "", ""))
    learners = {"MaskablePPO": maskable, "script": script}
    best = {}
    for name, train in learners.items():
        tried = {
            pair: of(
                f"{name} tuning {pair}", partial(gain_of_others, train, TUNING_SEED, rounds, *pair)
            )
            for pair in product(RATES, ENTROPIES)
        }
        best[name] = max(tried, key=lambda pair: tried[pair]["gain"])
    outcomes: dict[str, list[Any]] = {"Esper": [], **{name: [] for name in learners}}
    for seed in range(1, arguments.seeds + 1):
        outcomes["Esper"].append(of(f"esper {seed}", partial(ours, seed, rounds, work)))
        for name, train in learners.items():
            call = partial(gain_of_others, train, seed, rounds, *best[name])
            outcomes[name].append(of(f"{name} {seed}", call))
    for name, results in outcomes.items():
        gains = [result["gain"] for result in results]
        bounds = interval(np.array([gains]))
        settings = "rate {:g}, entropy {:g}".format(*best[name]) if name in best else "defaults"
        rows.append(
            (
                f"{name} ({settings})",
                f"{np.mean(gains):+.1f} [{bounds.low[0]:+.1f}, {bounds.high[0]:+.1f}]",
                f"{min(gains):+.1f} to {max(gains):+.1f}",
                f"{np.median([result['speed'] for result in results]):,.0f}",
            )
        )
        figures[name] = gains
    about = " ".join((__doc__ or "").split("\n\n")[2].split())
    ratio = of("interface", speed_of_interface)
    parts = [
        about,
        table(("policy", "gain", "seeds", "steps a second"), rows),
        f"Through the ``VectorEnv``, an episode runs at {ratio} of the speed of the growth "
        "environment itself (processor time, in turns in one process).",
        made_on(f"gymnasium {gymnasium.__version__}", f"{arguments.seeds} seeds", "1 thread"),
    ]
    publish("growth_learners", "Other learners on growth", parts, arguments.write, figures)


if __name__ == "__main__":
    main()
