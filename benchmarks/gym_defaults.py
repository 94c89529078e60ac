"""Do the defaults learn Gymnasium tasks, and keep what they learned? Ten seeds each.

    python benchmarks/gym_defaults.py --write                # an hour and a half on one core
    python benchmarks/gym_defaults.py --only CartPole --seeds 2

Every run is ``esper train ppo --gym ID --seed SEED``, with more frequent evaluations, which change
no bit of it: 20 fresh episodes with the most probable actions every 2 rounds. *Kept* is the mean of
the last tenth of the evaluations relative to the best one. The interquartile mean over seeds and
its bootstrapped interval are those of Agarwal and others (2021).
"""

import math
import statistics
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from reporting import kept, made_on, new_parser, publish, table
from scipy import stats

from esper.karn.store import read_events
from esper.leyline.config import defaults_of
from esper.leyline.events import AnalyticsSnapshot, GymEvaluation
from esper.simic.training.vectorized import train_ppo_vectorized

SEEDS = 10
EVERY, EPISODES = 2, 20
SHARE = 0.95


@dataclass(frozen=True)
class Case:
    """A task.

    Attributes:
        gym: id of the environment.
        threshold: mean return that counts as solved.
        args: arguments of the environment.
        worst: return of a policy that has learned nothing, where it is not 0.
        settings: further settings.
    """

    gym: str
    threshold: float
    args: tuple[str, ...] = ()
    worst: float = 0.0
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The name in the table."""
        return " ".join([self.gym, *self.args])


TOY = str(Path(__file__).with_name("gym_masked_toy.py"))
CASES = (
    Case("CartPole-v1", 475.0),
    Case("esper/MaskedCartPole-v0", 450.0),
    Case("Acrobot-v1", -100.0, worst=-500.0),
    Case("esper/MemoryChain-v0", 0.95, ("length=8",)),
    Case("esper/MemoryChain-v0", 0.95, ("length=16",)),
    Case("esper/MemoryChain-v0", 0.95, ("length=32",)),
    Case("Pendulum-v1", -200.0, worst=-1200.0),
    Case("test/MaskedToy-v0", 19.0, settings=(("plugin", (TOY,)),)),
)


def outcome(case: Case, seed: int, work: Path) -> dict[str, Any]:
    """Train; return steps and mean return of each evaluation, and the steps per second."""
    run = train_ppo_vectorized(
        gym=case.gym, gym_args=case.args, seed=seed, evaluate_every=EVERY, threads=1,
        evaluation_episodes=EPISODES, telemetry_dir=str(work / "runs"), **dict(case.settings),
    )  # fmt: skip
    evaluations = list(read_events(run.path, GymEvaluation))
    speeds = [e.environment_steps_per_second for e in read_events(run.path, AnalyticsSnapshot)]
    defaults = defaults_of("gym")
    steps = defaults.world.envs * defaults.gymnasium.rollout_steps
    return {
        "steps": [steps * e.round for e in evaluations],
        "returns": [e.episode_return for e in evaluations],
        "speed": statistics.median(speeds),
    }


def row(case: Case, outcomes: list[dict[str, Any]]) -> tuple[str, ...]:
    """The row of a task."""
    solved, shares, finals = [], [], []
    for one in outcomes:
        pairs = zip(one["steps"], one["returns"], strict=True)
        solved.append(next((s for s, r in pairs if r >= case.threshold), math.inf))
        last = statistics.fmean(one["returns"][-math.ceil(len(one["returns"]) / 10) :])
        finals.append(last)
        shares.append((last - case.worst) / (max(one["returns"]) - case.worst))
    low, high = interval(finals)
    median = statistics.median(solved)
    return (
        case.name,
        f"{case.threshold:g}",
        "never" if math.isinf(median) else f"{median:,.0f}",
        f"{sum(map(math.isfinite, solved))} of {len(solved)}",
        f"{sum(share >= SHARE for share in shares)} of {len(shares)}",
        f"{min(shares):.2f}",
        f"{middle(np.array(finals)):.2f} [{low:.2f}, {high:.2f}]",
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
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--work", type=Path, default=Path("runs/gym_defaults"))
    arguments = parser.parse_args()
    rows, figures = [], {}
    for case in CASES:
        if arguments.only not in case.name:
            continue
        outcomes = []
        for seed in range(1, arguments.seeds + 1):
            file = arguments.work / f"{case.name} {seed}.json".replace("/", "-")
            outcomes.append(kept(file, partial(outcome, case, seed, arguments.work)))
        figures[case.name] = [" ".join(f"{r:g}" for r in one["returns"]) for one in outcomes]
        rows.append(row(case, outcomes))
    heads = (
        "task", "threshold", "steps to it, median", "solved", "kept 0.95", "least kept",
        "last tenth", "steps a second",
    )  # fmt: skip
    about = " ".join((__doc__ or "").split("\n\n")[2].split())
    parts = [about, table(heads, rows), made_on(f"gymnasium {version('gymnasium')}", "1 thread")]
    publish("gym_defaults", "The defaults on Gymnasium tasks", parts, arguments.write, figures)


if __name__ == "__main__":
    main()
