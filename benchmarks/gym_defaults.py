"""Do the defaults learn Gymnasium tasks, and keep what they learned? Ten seeds or more.

    python benchmarks/gym_defaults.py --write                # half a day on one core
    python benchmarks/gym_defaults.py --only CartPole --seeds 2 --who esper
    python benchmarks/gym_defaults.py --algorithm impala --only CartPole --seeds 3 --write

Every run is ``esper train ppo --gym ID --seed SEED``, with more frequent evaluations, which change
no bit of it: 20 fresh episodes with the most probable actions every 2,048 steps. *Kept* is the mean
of the last tenth of the evaluations relative to the best one. The interquartile mean over seeds and
its bootstrapped interval are those of Agarwal and others (2021). The others are those of
``gym_opponents.py``, evaluated alike; each of their runs ends at the threshold, so whether they
keep it is not known. ``memory=none`` shows that a task cannot be solved without a memory. POPGym is
left out where it is not installed.
"""

import math
import statistics
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from reporting import kept, made_on, new_parser, publish, table
from scipy import stats

from esper.karn.store import read_events
from esper.leyline.config import TrainConfig, unflatten
from esper.leyline.config.reading import with_horizons
from esper.leyline.events import AnalyticsSnapshot, GymEvaluation
from esper.runtime import plugins
from esper.runtime.gate import Permission
from esper.simic.gym.agent import gym_agent
from esper.simic.gym.collect import collect, play
from esper.simic.gym.registration import register_envs
from esper.simic.gym.vector_environment import GymEnvironments, make
from esper.simic.training.gym_trainee import EVALUATION, arguments_of, begin
from esper.simic.training.vectorized import run_training

SEEDS = 10
BUDGET, EVERY, EPISODES = 102_400, 2_048, 20
SHARE = 0.95
FEWER, MORE = 2, 30


@dataclass(frozen=True)
class Case:
    """A task.

    Attributes:
        gym: id of the environment.
        threshold: mean return that counts as solved.
        args: arguments of the environment.
        worst: return of a policy that has learned nothing, where it is not 0.
        others: the opponents, see ``gym_opponents.py``.
        seeds: number of seeds; more where ten do not separate the opponents from Esper.
        seeds_of_others: number of their seeds; fewer where none of them ends before the budget.
        masked: whether actions have masks.
        settings: further settings.
    """

    gym: str
    threshold: float
    args: tuple[str, ...] = ()
    worst: float = 0.0
    others: tuple[str, ...] = ()
    seeds: int = SEEDS
    seeds_of_others: int = SEEDS
    masked: bool = False
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The name in the table."""
        settings = (f"{name}={value}" for name, value in self.settings if name != "plugin")
        return " ".join([self.gym.rpartition(":")[2], *self.args, *settings])


PERMISSION = Permission(trust=True)
TOY = str(Path(__file__).with_name("gym_masked_toy.py"))
OWN_TEST, CART_POLE = "RecurrentPPO (own test)", "MaskablePPO (Zoo, CartPole)"
MASKED, CHAIN = "esper/MaskedCartPole-v0", "esper/MemoryChain-v0"
POPGYM = (
    Case(
        "popgym:popgym-RepeatPreviousEasy-v0",
        0.5,
        worst=-1.0,
        others=(OWN_TEST,),
        seeds_of_others=FEWER,
    ),
    Case(
        "popgym:popgym-CountRecallEasy-v0",
        -0.5,
        worst=-1.0,
        others=(OWN_TEST,),
        seeds_of_others=FEWER,
    ),
)
CASES = (
    Case("CartPole-v1", 475.0, others=(OWN_TEST, CART_POLE)),
    Case(MASKED, 450.0, others=(OWN_TEST,), seeds=MORE, seeds_of_others=MORE),
    Case(
        "Acrobot-v1", -100.0, worst=-500.0,
        others=("RecurrentPPO (Zoo, Acrobot)", "MaskablePPO (Zoo, Acrobot)"),
    ),
    Case(CHAIN, 0.95, ("length=8",), others=(OWN_TEST,)),
    Case(CHAIN, 0.95, ("length=16",), others=(OWN_TEST,), seeds_of_others=FEWER),
    Case(CHAIN, 0.95, ("length=32",), others=(OWN_TEST,), seeds_of_others=FEWER),
    Case("Pendulum-v1", -200.0, worst=-1200.0),
    Case(
        "test/MaskedToy-v0", 19.0, others=(CART_POLE,), masked=True,
        settings=(("plugin", (TOY,)),),
    ),
    *(POPGYM if find_spec("popgym") else ()),
    Case(MASKED, 450.0, settings=(("memory", "none"),)),
)  # fmt: skip


def config_of(case: Case, seed: int, algorithm: str) -> TrainConfig:
    """The settings of a run."""
    config = unflatten({"gym": case.gym, "algorithm": algorithm})
    steps = config.world.envs * config.gymnasium.rollout_steps
    settings = {
        "gym_args": case.args, "seed": seed, "rounds": BUDGET // steps, "threads": 1,
        "evaluate_every": max(1, EVERY // steps), "evaluation_episodes": EPISODES,
    }  # fmt: skip
    return unflatten({**settings, **dict(case.settings)}, config)


def ours(case: Case, seed: int, algorithm: str, work: Path) -> dict[str, Any]:
    """Train; return steps and mean return of each evaluation, and the steps per second."""
    config = config_of(case, seed, algorithm)
    config = unflatten({"telemetry_dir": str(work / "runs")}, config)
    run = run_training(config, algorithm, permission=PERMISSION)
    evaluations = list(read_events(run.path, GymEvaluation))
    speeds = [e.environment_steps_per_second for e in read_events(run.path, AnalyticsSnapshot)]
    steps = config.world.envs * config.gymnasium.rollout_steps
    return {
        "steps": [steps * e.round for e in evaluations],
        "returns": [e.episode_return for e in evaluations],
        "speed": statistics.median(speeds),
    }


def theirs(case: Case, seed: int, name: str) -> dict[str, Any]:
    """Train an opponent, see ``gym_opponents.outcome``."""
    from gym_opponents import outcome

    plugins.load_all(config_of(case, seed, "ppo"), PERMISSION, "a setting")
    arguments = arguments_of(case.args)
    return outcome(
        name, case.gym, arguments, case.masked, seed, case.threshold, BUDGET, EVERY, EPISODES
    )


UNITS = {
    "as they are": (1.0, 0.0, 1.0),
    "observations times 1e-8": (1e-8, 0.0, 1.0),
    "observations times 1e8": (1e8, 0.0, 1.0),
    "observations plus 10": (1.0, 10.0, 1.0),
    "observations minus 1,000": (1.0, -1000.0, 1.0),
    "rewards times 1e-8": (1.0, 0.0, 1e-8),
    "rewards times 1e8": (1.0, 0.0, 1e8),
    "observations times 1e8, rewards times 1e-8": (1e8, 0.0, 1e-8),
}
"""What CartPole's observations are multiplied with and then shifted by, and its rewards."""


def in_units(units: str, seed: int) -> dict[str, Any]:
    """Train on CartPole in other units until an evaluation reaches 475."""
    factor, shift, unit = UNITS[units]
    config = with_horizons(config_of(CASES[0], seed, "ppo"))

    def environments(count: int, first: int) -> GymEnvironments:
        each: list[gymnasium.Env[Any, Any]] = []
        for plain in make("CartPole-v1", {}, count):
            space = gymnasium.spaces.Box(-np.inf, np.inf, plain.observation_space.shape, np.float64)
            shifted = gymnasium.wrappers.TransformObservation(
                plain, lambda x: np.asarray(x, np.float64) * factor + shift, space
            )
            each.append(gymnasium.wrappers.TransformReward(shifted, lambda r: float(r) * unit))
        return GymEnvironments(each, seed, first)

    training, evaluation = environments(config.world.envs, 0), environments(EPISODES, EVALUATION)
    agent = gym_agent(config, training.shape, torch.device("cpu"))
    begin(training, agent.actor)
    length = config.gymnasium.rollout_steps
    result: dict[str, list[Any]] = {"steps": [], "returns": []}
    for number in range(1, config.world.rounds + 1):
        agent.update(collect(training, agent.actor, length, number))
        if number % config.gymnasium.evaluate_every == 0:
            returns = [e.episode_return / unit for e in play(agent.actor, evaluation)]
            result["steps"].append(number * length * config.world.envs)
            result["returns"].append(statistics.fmean(returns))
            if result["returns"][-1] >= CASES[0].threshold:
                break
    return result


def steps_to(threshold: float, one: dict[str, Any]) -> float:
    """Steps before the first evaluation that reaches the threshold; infinite where none does."""
    pairs = zip(one["steps"], one["returns"], strict=True)
    return next((s for s, r in pairs if r >= threshold), math.inf)


def text_of(steps: float) -> str:
    """A number of steps."""
    return "never" if math.isinf(steps) else f"{steps:,.0f}"


def row(case: Case, outcomes: list[dict[str, Any]]) -> tuple[str, ...]:
    """The row of a task."""
    solved = [steps_to(case.threshold, one) for one in outcomes]
    shares, finals = [], []
    for one in outcomes:
        last = statistics.fmean(one["returns"][-math.ceil(len(one["returns"]) / 10) :])
        finals.append(last)
        shares.append((last - case.worst) / (max(one["returns"]) - case.worst))
    low, high = interval(finals)
    return (
        case.name,
        f"{case.threshold:g}",
        text_of(statistics.median(solved)),
        f"{sum(map(math.isfinite, solved))} of {len(solved)}",
        f"{sum(share >= SHARE for share in shares)} of {len(shares)}",
        f"{min(shares):.2f}",
        f"{middle(np.array(finals)):.2f} [{low:.2f}, {high:.2f}]",
        f"{statistics.median(one['speed'] for one in outcomes):,.0f}",
    )


def opponent_row(case: Case, name: str, outcomes: list[dict[str, Any]]) -> tuple[str, ...]:
    """The row of an opponent."""
    solved = [steps_to(case.threshold, one) for one in outcomes]
    return (
        case.name,
        name,
        text_of(statistics.median(solved)),
        f"{sum(map(math.isfinite, solved))} of {len(solved)}",
        f"{statistics.median(max(one['returns']) for one in outcomes):.2f}",
        f"{statistics.median(one['speed'] for one in outcomes):,.0f}",
    )


def middle(values: Any, axis: int = -1) -> Any:
    """The interquartile mean."""
    return stats.trim_mean(values, 0.25, axis=axis)


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the interquartile mean over seeds."""
    if max(values) == min(values) or len(values) < 3:
        return min(values), max(values)
    generator = np.random.default_rng(0)
    result = stats.bootstrap((values,), middle, method="percentile", random_state=generator)
    return result.confidence_interval


def main() -> None:
    """Run all seeds of all tasks and print the page."""
    parser = new_parser(__doc__)
    parser.add_argument("--only", default="", help="part of the name of the tasks to run")
    parser.add_argument("--seeds", type=int, default=MORE, help="at most so many")
    parser.add_argument("--who", nargs="+", default=["esper", "others"])
    parser.add_argument("--algorithm", choices=["ppo", "impala"], default="ppo")
    parser.add_argument("--work", type=Path, default=Path("runs/gym_defaults"))
    arguments = parser.parse_args()
    register_envs()
    rows, opponents, figures = [], [], {}
    algorithm, work = arguments.algorithm, arguments.work

    def outcomes(label: str, seeds: int, run: Any) -> list[dict[str, Any]]:
        file = f"{label} {{}}.json".replace("/", "-")
        return [kept(work / file.format(s), partial(run, s)) for s in range(1, seeds + 1)]

    for case in CASES:
        if arguments.only not in case.name:
            continue
        if "esper" in arguments.who:
            prefix = "" if algorithm == "ppo" else f"{algorithm} "
            results = outcomes(
                f"{prefix}{case.name}",
                min(arguments.seeds, case.seeds),
                lambda seed, case=case: ours(case, seed, algorithm, work),
            )
            figures[case.name] = [" ".join(f"{r:g}" for r in one["returns"]) for one in results]
            rows.append(row(case, results))
            print("esper", *rows[-1], flush=True)
        for name in case.others if "others" in arguments.who and algorithm == "ppo" else ():
            results = outcomes(
                f"{name} {case.name}",
                min(arguments.seeds, case.seeds_of_others),
                lambda seed, case=case, name=name: theirs(case, seed, name),
            )
            opponents.append(opponent_row(case, name, results))
            print(*opponents[-1], flush=True)
    units, seeds = [], min(arguments.seeds, SEEDS) // 2
    for name in UNITS if algorithm == "ppo" and arguments.only in "CartPole-v1" else ():
        results = outcomes(f"units {name}", seeds, partial(in_units, name))
        units.append((name, text_of(statistics.median(steps_to(475.0, r) for r in results))))
    heads = (
        "task", "threshold", "steps to it, median", "solved", "kept 0.95", "least kept",
        "last tenth", "steps a second",
    )  # fmt: skip
    about = " ".join((__doc__ or "").split("\n\n")[2].split()).replace(
        "train ppo", f"train {algorithm}"
    )
    parts = [about, table(heads, rows)]
    versions = [f"{name} {version(name)}" for name in ("gymnasium", "popgym") if find_spec(name)]
    if opponents:
        others = ("task", "opponent", "steps, median", "solved", "best, median", "steps a second")
        parts.append(table(others, opponents))
        versions.append(f"sb3-contrib {version('sb3-contrib')}")
    if units:
        parts.append(f"CartPole in other units, {seeds} seeds, until it is solved:")
        parts.append(table(("units", "steps, median"), units))
    parts.append(made_on(*versions, "1 thread"))
    name = "gym_defaults" if algorithm == "ppo" else f"gym_defaults_{algorithm}"
    title = f"The defaults of {algorithm.upper()} on Gymnasium tasks"
    publish(name, title, parts, arguments.write, figures)


if __name__ == "__main__":
    main()
