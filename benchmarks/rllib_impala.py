"""IMPALA of Esper beside that of RLlib: CartPole and masked CartPole, same cores, same network.

    OMP_NUM_THREADS=1 python benchmarks/rllib_impala.py --write      # about an hour on two cores

Both learn with two actors of four environments each on a local ray, and with a network of one layer
of 64 tanh units that actor and critic share, and another one in each of their heads; for masked
CartPole, which shows no velocities, an LSTM of 64 follows the shared layer. Esper has the defaults
of `esper train impala --gym`. RLlib begins with the settings of its own examples for these tasks;
the best of several variants of them, chosen on another seed, is the one that is compared. A run is
solved when the mean return of its last 100 episodes, as they were played for training, reaches the
threshold. Every run is a process of its own, the sides take turns, and results are kept under
``--work``.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from reporting import kept, made_on, new_parser, publish, table

EPISODES = 100
ACTORS, ENVS = 2, 8
UNITS = 64
TUNING_SEED, TUNING_STEPS = 100, 100_000
VARIANTS: dict[str, dict[str, Any]] = {
    "its example": {},
    "observations as they are": {"normalise": False},
    "observations as they are, rate 0.0015": {"normalise": False, "lr": 0.0015},
    "observations as they are, rate 0.0015, critic 0.5": {
        "normalise": False,
        "lr": 0.0015,
        "vf_loss_coeff": 0.5,
    },
    "observations as they are, rate 0.003, critic 0.5, entropy 0.005": {
        "normalise": False,
        "lr": 0.003,
        "vf_loss_coeff": 0.5,
        "entropy_coeff": 0.005,
    },
}
"""Settings of RLlib beside those of its example."""


@dataclass(frozen=True)
class Task:
    """A task, the mean return that solves it, and the policy's memory.

    Attributes:
        gym: id of the Gymnasium environment.
        threshold: mean return of ``EPISODES`` episodes.
        memory: ``none`` or ``lstm``.
    """

    gym: str
    threshold: float
    memory: str


# The thresholds are those of gym_proofs.py.
TASKS = {
    "cartpole": Task("CartPole-v1", 475.0, "none"),
    "masked": Task("esper/MaskedCartPole-v0", 450.0, "lstm"),
}


class Curve:
    """Steps, seconds and returns of a run.

    Args:
        threshold: mean return that solves the task.

    Attributes:
        solved: environment steps and seconds when it was solved; infinite before.
        best: highest mean return of ``EPISODES`` episodes.
        parameters: number of the network's parameters.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold, self.parameters = threshold, 0
        self.begin: tuple[float, int] | None = None
        self.end = (0.0, 0)
        self.solved = (math.inf, math.inf)
        self.best = -math.inf
        self._returns: deque[float] = deque(maxlen=EPISODES)

    def note(self, seconds: float, steps: int, returns: list[float]) -> None:
        """Note what was known after so many seconds and steps, with the episodes that ended."""
        # The first report is of processes that start and code that warms up.
        self.begin = self.begin or (seconds, steps)
        self.end = seconds, steps
        self._returns.extend(returns)
        if len(self._returns) < EPISODES:
            return
        mean = statistics.fmean(self._returns)
        self.best = max(self.best, mean)
        if mean >= self.threshold and self.solved[0] == math.inf:
            self.solved = float(steps), seconds

    def figures(self) -> dict[str, float]:
        """Return steps per second after the first report, and steps and seconds to solve."""
        assert self.begin is not None, "nothing was reported"
        seconds, steps = (b - a for a, b in zip(self.begin, self.end, strict=True))
        return {
            "steps_per_second": steps / seconds,
            "steps_to_solve": self.solved[0],
            "seconds_to_solve": self.solved[1],
            "best_mean_return": self.best,
            "parameters": self.parameters,
        }


def esper(task: Task, seed: int, steps: int, folder: Path) -> Curve:
    """Train with Esper for about ``steps`` environment steps."""
    from esper.karn.store import read_events
    from esper.leyline.events import GymEpisodes, TrainingStarted, to_floats
    from esper.simic.run.checkpoint import load_latest
    from esper.simic.training.vectorized import train_impala

    settings: dict[str, Any] = {"gym": task.gym, "memory": task.memory, "lstm_hidden": UNITS}
    per_round = ENVS * 128
    run = train_impala(
        **settings,
        envs=ENVS,
        actors=ACTORS,
        seed=seed,
        rounds=steps // per_round,
        telemetry_dir=str(folder),
    )
    begin = next(read_events(run.path, TrainingStarted)).time
    curve = Curve(task.threshold)
    curve.parameters = sum(x.numel() for x in load_latest(run.path).parts["policy"].values())
    for event in read_events(run.path, GymEpisodes):
        returns = list(to_floats(event.episode_return))
        curve.note(event.time - begin, event.round * per_round, returns)
    return curve


def _made(gym: str, arguments: Any) -> Any:
    """Return the environment, in a process that may not know Esper's tasks yet."""
    import gymnasium

    from esper.simic.gym.registration import register_envs

    register_envs()
    return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(gym))


def rllib(task: Task, seed: int, steps: int, variant: str) -> Curve:
    """Train with a variant of RLlib's settings for about ``steps`` environment steps."""
    import ray
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.connectors.env_to_module import MeanStdFilter
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.tune import register_env

    def report(*, episode: Any, metrics_logger: Any, **more: Any) -> None:
        # `episode` is the part of the episode since the last rollout, so its own return is not that
        # of the whole one.
        whole = float(episode.get_infos(-1)["episode"]["r"])
        metrics_logger.log_value("returns", whole, reduce="item_series")

    def normalised(env: Any = None, spaces: Any = None, device: Any = None) -> Any:
        return MeanStdFilter()

    ray.init(
        "local",
        num_cpus=ACTORS + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=200 * 2**20,
    )
    register_env("task", partial(_made, task.gym))
    memory = task.memory == "lstm"
    settings = {
        "train_batch_size_per_learner": 500,
        "grad_clip": 40.0,
        "grad_clip_by": "global_norm",
        "lr": 0.0005,
        "vf_loss_coeff": 0.05,
        "entropy_coeff": 0.0,
        **VARIANTS[variant],
    }
    normalise = settings.pop("normalise", True)
    config = (
        IMPALAConfig()
        .environment("task")
        .env_runners(
            num_env_runners=ACTORS,
            num_envs_per_env_runner=ENVS // ACTORS,
            # Its example with an LSTM leaves this out: with it, training gave NaNs.
            env_to_module_connector=normalised if normalise and not memory else None,
        )
        .learners(num_learners=0)
        .training(**settings)
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[UNITS],
                fcnet_activation="tanh",
                head_fcnet_hiddens=[UNITS],
                head_fcnet_activation="tanh",
                vf_share_layers=True,
                use_lstm=memory,
                lstm_cell_size=UNITS,
                max_seq_len=20,
            )
        )
        .reporting(min_time_s_per_iteration=1)
        .callbacks(on_episode_end=report)
        .debugging(seed=seed, log_level="ERROR")
    )
    algorithm = config.build_algo()
    curve, begin, done = Curve(task.threshold), time.monotonic(), 0
    # Of the learner: the modules of the actors have no critic's head.
    counts = algorithm.learner_group.foreach_learner(
        lambda learner: sum(x.numel() for x in learner.module["default_policy"].parameters())
    )
    curve.parameters = next(iter(counts)).get()
    while done < steps:
        found = algorithm.train()["env_runners"]
        done = int(found.get("num_env_steps_sampled_lifetime", 0))
        # A series of one item comes back as that item.
        returns = np.atleast_1d(found.get("returns", ())).tolist()
        curve.note(time.monotonic() - begin, done, returns)
    algorithm.stop()
    ray.shutdown()
    return curve


def measured(
    name: str, side: str, seed: int, steps: int, work: Path, variant: str
) -> dict[str, float]:
    """Return the figures of one run, in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--tasks", name, "--seeds", str(seed)]
    command += ["--steps", str(steps), "--work", str(work), "--variant", variant]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def tuned(name: str, work: Path) -> tuple[str, dict[str, dict[str, float]]]:
    """Return the variant of RLlib's settings that learns a task best, and the figures of each."""
    found = {}
    for number, (variant, changes) in enumerate(VARIANTS.items()):
        if TASKS[name].memory == "lstm" and changes.get("normalise", True):
            continue
        place = work / f"{name}-variant{number}-{TUNING_STEPS}.json"
        arguments = (name, "rllib", TUNING_SEED, TUNING_STEPS, work, variant)
        found[variant] = kept(place, partial(measured, *arguments))
        print(name, variant, found[variant], flush=True)

    def quality(variant: str) -> tuple[float, float]:
        return -found[variant]["steps_to_solve"], found[variant]["best_mean_return"]

    return max(found, key=quality), found


def text(values: list[float], spec: str = ",.0f") -> str:
    """Return the values of all seeds with their median."""
    shown = [format(value, spec) if math.isfinite(value) else "not solved" for value in values]
    middle = statistics.median(values)
    return f"{middle:{spec}} ({', '.join(shown)})" if math.isfinite(middle) else ", ".join(shown)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tune-only", action="store_true", help="choose RLlib's settings and stop")
    parser.add_argument("--steps", type=int, default=300_000, help="environment steps of a run")
    parser.add_argument("--work", type=Path, default=Path("runs/rllib_impala"))
    parser.add_argument("--side", choices=("esper", "rllib"), help=argparse.SUPPRESS)
    parser.add_argument("--variant", default=next(iter(VARIANTS)), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    steps, work = arguments.steps, arguments.work
    if arguments.side:
        (name,), (seed,) = arguments.tasks, arguments.seeds
        curve = (
            rllib(TASKS[name], seed, steps, arguments.variant)
            if arguments.side == "rllib"
            else esper(TASKS[name], seed, steps, work / "runs")
        )
        print(json.dumps(curve.figures()))
        return 0
    figures: dict[str, dict[str, dict[str, list[float]]]] = {}
    tuning: dict[str, dict[str, dict[str, float]]] = {}
    chosen: dict[str, str] = {}
    for name in arguments.tasks:
        chosen[name], tuning[name] = tuned(name, work)
        if arguments.tune_only:
            continue
        sides: dict[str, dict[str, list[float]]] = {"esper": {}, "rllib": {}}
        figures[name] = sides
        for seed in arguments.seeds:
            for side, own in sides.items():
                place = work / f"{name}-{side}-{seed}-{steps}.json"
                found = kept(place, partial(measured, name, side, seed, steps, work, chosen[name]))
                print(name, side, seed, found, flush=True)
                for figure, value in found.items():
                    own.setdefault(figure, []).append(value)
    if arguments.tune_only:
        return 0
    names = {"esper": "Esper", "rllib": f"RLlib {version('ray')}"}
    heads = (
        "task",
        "",
        "parameters",
        "steps per second",
        "steps to solve",
        "seconds to solve",
        "best mean return",
    )
    columns = ("steps_per_second", "steps_to_solve", "seconds_to_solve", "best_mean_return")
    rows = [
        (name, names[side], f"{own['parameters'][0]:,}", *(text(own[column]) for column in columns))
        for name, sides in figures.items()
        for side, own in sides.items()
    ]
    tasks = ", ".join(
        f"{name} is {TASKS[name].gym}, solved at {TASKS[name].threshold:g}" for name in figures
    )
    parts = (
        f"{tasks}: mean return of the last {EPISODES} episodes, as they were played for training. "
        f"{ACTORS} actors of {ENVS // ACTORS} environments on one machine, {steps:,} environment "
        f"steps. Medians over {len(arguments.seeds)} seeds, in parentheses each of them. Both "
        f"sides have the same network: a layer of {UNITS} tanh units, shared, then, for `masked` "
        f"only, an LSTM of {UNITS}, then a layer of {UNITS} in the actor's and in the critic's "
        "head. They differ otherwise: Esper has its defaults and updates from "
        f"{ENVS * 128} steps in four minibatches, with weights one update old and a learning rate "
        "of 0.0015. RLlib's example updates from 500 steps at once, as they arrive, with a "
        "learning rate of 0.0005 and a weight of 0.05 of the critic's loss, and, with an LSTM, "
        "takes sequences of 20 steps and observations as they are; without one it normalises them. "
        "RLlib runs with the best of the variants of its example that are listed below, with an "
        "LSTM of those whose observations are as they are. Esper's learner "
        "and actors share the cores like RLlib's. Seconds count from the first step on; the speed "
        "leaves out the first report of a run.",
        table(heads, rows),
        *(_ratio(name, sides) for name, sides in figures.items()),
        f"RLlib's variants, {TUNING_STEPS:,} steps of seed {TUNING_SEED}; the chosen one in bold:",
        table(
            ("task", "variant", "steps to solve", "best mean return"),
            [
                (
                    name,
                    f"**{variant}**" if variant == chosen[name] else variant,
                    text([own["steps_to_solve"]], ",.0f").split(" (")[0],
                    f"{own['best_mean_return']:.0f}",
                )
                for name, variants in tuning.items()
                for variant, own in variants.items()
            ],
        ),
        f"{made_on()}.",
    )
    stored = {"runs": figures, "tuning": tuning, "chosen": chosen}
    publish("rllib_impala", "IMPALA beside RLlib's", parts, arguments.write, stored)
    return 0


def _ratio(name: str, sides: dict[str, dict[str, list[float]]]) -> str:
    """Return how the speeds of the sides compare."""
    mine, theirs = (statistics.median(own["steps_per_second"]) for own in sides.values())
    return f"`{name}`: Esper takes {mine / theirs:.1f} times as many steps per second."


if __name__ == "__main__":
    raise SystemExit(main())
