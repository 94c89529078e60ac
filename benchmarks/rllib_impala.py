"""IMPALA of Esper beside that of RLlib: CartPole, same cores, same network.

    OMP_NUM_THREADS=1 python benchmarks/rllib_impala.py --write      # about 15 minutes on two cores

Both learn CartPole-v1 with two actors of four environments each on a local ray, and with a network
of one layer of 64 tanh units that actor and critic share, and another one in each of their heads.
Esper has the defaults of `esper train impala --gym`, RLlib those of its own example for this task.
A run is solved when the mean return of its last 100 episodes, as they were played for training,
reaches 475. Every run is a process of its own, the sides take turns, and results are kept under
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
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reporting import kept, made_on, new_parser, publish, table

THRESHOLD, EPISODES = 475.0, 100
ACTORS, ENVS = 2, 8
UNITS = 64


class Curve:
    """Steps, seconds and returns of a run.

    Attributes:
        solved: environment steps and seconds when it was solved; infinite before.
    """

    def __init__(self) -> None:
        self.begin: tuple[float, int] | None = None
        self.end = (0.0, 0)
        self.solved = (math.inf, math.inf)
        self._returns: deque[float] = deque(maxlen=EPISODES)

    def note(self, seconds: float, steps: int, returns: list[float]) -> None:
        """Note what was known after so many seconds and steps, with the episodes that ended."""
        # The first report is of processes that start and code that warms up.
        self.begin = self.begin or (seconds, steps)
        self.end = seconds, steps
        self._returns.extend(returns)
        full = len(self._returns) == EPISODES
        if full and self.solved[0] == math.inf and statistics.fmean(self._returns) >= THRESHOLD:
            self.solved = float(steps), seconds

    def figures(self) -> dict[str, float]:
        """Return steps per second after the first report, and steps and seconds to solve."""
        assert self.begin is not None, "nothing was reported"
        seconds, steps = (b - a for a, b in zip(self.begin, self.end, strict=True))
        return {
            "steps_per_second": steps / seconds,
            "steps_to_solve": self.solved[0],
            "seconds_to_solve": self.solved[1],
        }


def esper(seed: int, steps: int, folder: Path) -> Curve:
    """Train with Esper for about ``steps`` environment steps."""
    from esper.karn.store import read_events
    from esper.leyline.events import GymEpisodes, TrainingStarted, to_floats
    from esper.simic.training.vectorized import train_impala

    settings: dict[str, Any] = {"gym": "CartPole-v1", "memory": "none", "envs": ENVS}
    per_round = ENVS * 128
    run = train_impala(
        **settings, actors=ACTORS, seed=seed, rounds=steps // per_round, telemetry_dir=str(folder)
    )
    begin = next(read_events(run.path, TrainingStarted)).time
    curve = Curve()
    for event in read_events(run.path, GymEpisodes):
        returns = list(to_floats(event.episode_return))
        curve.note(event.time - begin, event.round * per_round, returns)
    return curve


def rllib(seed: int, steps: int) -> Curve:
    """Train with RLlib for about ``steps`` environment steps."""
    import ray
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.connectors.env_to_module import MeanStdFilter
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    def report(*, episode: Any, metrics_logger: Any, **more: Any) -> None:
        metrics_logger.log_value("returns", episode.get_return(), reduce="item_series")

    ray.init(
        "local",
        num_cpus=ACTORS + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=200 * 2**20,
    )
    config = (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=ACTORS,
            num_envs_per_env_runner=ENVS // ACTORS,
            env_to_module_connector=lambda env=None, spaces=None, device=None: MeanStdFilter(),
        )
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=500,
            grad_clip=40.0,
            grad_clip_by="global_norm",
            lr=0.0005,
            vf_loss_coeff=0.05,
            entropy_coeff=0.0,
        )
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[UNITS],
                fcnet_activation="tanh",
                head_fcnet_hiddens=[UNITS],
                head_fcnet_activation="tanh",
                vf_share_layers=True,
            )
        )
        .reporting(min_time_s_per_iteration=1)
        .callbacks(on_episode_end=report)
        .debugging(seed=seed, log_level="ERROR")
    )
    algorithm = config.build_algo()
    curve, begin, done = Curve(), time.monotonic(), 0
    while done < steps:
        found = algorithm.train()["env_runners"]
        done = int(found.get("num_env_steps_sampled_lifetime", 0))
        returns = [float(x) for x in found.get("returns", [])]
        curve.note(time.monotonic() - begin, done, returns)
    algorithm.stop()
    ray.shutdown()
    return curve


def measured(side: str, seed: int, steps: int, work: Path) -> dict[str, float]:
    """Return the figures of one run, in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--seeds", str(seed)]
    command += ["--steps", str(steps), "--work", str(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def text(values: list[float], spec: str = ",.0f") -> str:
    """Return the values of all seeds with their median."""
    shown = [format(value, spec) if math.isfinite(value) else "not solved" for value in values]
    middle = statistics.median(values)
    return f"{middle:{spec}} ({', '.join(shown)})" if math.isfinite(middle) else ", ".join(shown)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300_000, help="environment steps of a run")
    parser.add_argument("--work", type=Path, default=Path("runs/rllib_impala"))
    parser.add_argument("--side", choices=("esper", "rllib"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        (seed,) = arguments.seeds
        curve = (
            rllib(seed, arguments.steps)
            if arguments.side == "rllib"
            else esper(seed, arguments.steps, arguments.work / "runs")
        )
        print(json.dumps(curve.figures()))
        return 0
    figures: dict[str, dict[str, list[float]]] = {}
    for seed in arguments.seeds:
        for side in ("esper", "rllib"):
            place = arguments.work / f"{side}-{seed}-{arguments.steps}.json"
            found = kept(place, partial(measured, side, seed, arguments.steps, arguments.work))
            print(side, seed, found, flush=True)
            for name, value in found.items():
                figures.setdefault(side, {}).setdefault(name, []).append(value)
    names = {"esper": "Esper", "rllib": f"RLlib {version('ray')}"}
    heads = ("", "steps per second", "steps to solve", "seconds to solve")
    rows = [(names[side], *(text(own[name]) for name in own)) for side, own in figures.items()]
    speed = [statistics.median(figures[side]["steps_per_second"]) for side in ("esper", "rllib")]
    parts = (
        f"CartPole-v1, {ACTORS} actors of {ENVS // ACTORS} environments on one machine, "
        f"{arguments.steps:,} environment steps. Medians over {len(arguments.seeds)} seeds, in "
        "parentheses each of them. Both sides have the same network: a layer of "
        f"{UNITS} tanh units, shared, then a layer of {UNITS} in the actor's and in the critic's "
        "head; no memory. They differ otherwise, each as its authors set it: Esper updates from "
        f"{ENVS * 128} steps in four minibatches, with weights one update old and a learning rate "
        "of 0.0015, RLlib from 500 steps at once, as they arrive, with a learning rate of 0.0005. "
        "Esper's learner and actors share the cores like RLlib's. Seconds count from the first "
        "step on; the speed leaves out the first report of a run.",
        table(heads, rows),
        f"Esper takes {speed[0] / speed[1]:.1f} times as many steps per second.",
        f"{made_on()}.",
    )
    publish("rllib_impala", "IMPALA beside RLlib's", parts, arguments.write, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
