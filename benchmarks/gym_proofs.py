"""Does the engine learn public Gymnasium tasks? PPO beside sb3-contrib's, and IMPALA; three seeds.

    python benchmarks/gym_proofs.py --write          # about an hour on one core
    python benchmarks/gym_proofs.py --algorithm impala --write    # about a quarter of an hour
    python benchmarks/gym_proofs.py --only masked --seeds 1

Every run is the command that the page lists. Its checkpoints are evaluated with the most probable
action in 20 fresh episodes; the result is the first evaluation that reaches the threshold.
RecurrentPPO of sb3-contrib is evaluated in the same way and stops there. Results are kept under
``--work`` and not computed again.
"""

import contextlib
import math
import operator
import statistics
import sys
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from reporting import kept, made_on, new_parser, publish, table

from esper.leyline.config import TrainConfig, unflatten
from esper.simic.gym.agent import gym_agent
from esper.simic.gym.collect import play
from esper.simic.gym.registration import register_envs
from esper.simic.gym.vector_environment import GymEnvironments, make
from esper.simic.run.checkpoint import load_checkpoint
from esper.simic.training.gym_trainee import arguments_of
from esper.simic.training.vectorized import resume_ppo, run_training

EPISODES = 20
EVALUATION_SEED = 1_000_003
BETWEEN = 2
"""Rounds between evaluations."""


@dataclass(frozen=True)
class Proof:
    """A task, the return to reach, and the number of steps allowed.

    Attributes:
        name: name of the row in the table.
        gym: id of the Gymnasium environment.
        threshold: mean return to reach.
        budget: environment steps allowed.
        args: arguments of the environment.
        settings: settings that differ from the defaults of ``--gym``.
        reached: whether the threshold must be reached; else it must never be.
        compared: whether RecurrentPPO runs on the task too.
        algorithm: ``ppo`` or ``impala``.
    """

    name: str
    gym: str
    threshold: float
    budget: int
    args: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    reached: bool = True
    compared: bool = True
    algorithm: str = "ppo"


PROOFS = (
    Proof("cartpole", "CartPole-v1", 475.0, 100_000),
    Proof("masked", "esper/MaskedCartPole-v0", 450.0, 50_000),
    Proof(
        "memoryless",
        "esper/MaskedCartPole-v0",
        100.0,
        50_000,
        settings={"memory": "none"},
        reached=False,
        compared=False,
    ),
    Proof("chain8", "esper/MemoryChain-v0", 0.95, 25_000, ("length=8",)),
    Proof("chain32", "esper/MemoryChain-v0", 0.95, 200_000, ("length=32",)),
    Proof("cartpole-impala", "CartPole-v1", 475.0, 100_000, compared=False, algorithm="impala"),
    Proof(
        "masked-impala",
        "esper/MaskedCartPole-v0",
        450.0,
        50_000,
        compared=False,
        algorithm="impala",
    ),
)


@dataclass(frozen=True)
class Result:
    """Evaluations of a run.

    Attributes:
        steps, returns: environment steps before, and mean return of, each evaluation.
    """

    steps: list[int]
    returns: list[float]

    def first(self, threshold: float) -> float:
        """Return the steps at the first evaluation that reached it; infinite where none did."""
        found = (s for s, r in zip(self.steps, self.returns, strict=True) if r >= threshold)
        return next(found, math.inf)


def config_of(proof: Proof, seed: int, folder: Path) -> TrainConfig:
    """Return the configuration of a proof: its budget as rounds, with all checkpoints kept."""
    settings = {"gym": proof.gym, "gym_args": proof.args, "algorithm": proof.algorithm}
    config = unflatten({**settings, **proof.settings})
    steps = config.world.envs * config.gymnasium.rollout_steps
    rounds = proof.budget // steps
    return unflatten(
        {
            "seed": seed,
            "rounds": rounds,
            "checkpoint_every": BETWEEN,
            "keep_checkpoints": rounds,
            "telemetry_dir": str(folder),
            "threads": 1,
        },
        config,
    )


def ours(proof: Proof, seed: int, work: Path) -> Result:
    """Train, or resume an interrupted run, and evaluate its checkpoints."""
    config = config_of(proof, seed, work)
    saved = sorted(work.glob("*/checkpoints/0*"))
    if saved:
        path = saved[-1].parents[1]
        if int(saved[-1].name) < config.world.rounds:
            resume_ppo(path, {})
    else:
        path = run_training(config, proof.algorithm).path
    made = make(proof.gym, arguments_of(proof.args), EPISODES)
    environments = GymEnvironments(made, EVALUATION_SEED)
    agent = gym_agent(config, environments.shape, torch.device("cpu"))
    agent.begin(torch.arange(1), 0)
    per_round = config.world.envs * config.gymnasium.rollout_steps
    steps, returns = [], []
    for folder in sorted((path / "checkpoints").glob("0*")):
        agent.load_state(load_checkpoint(folder).parts)
        steps.append(int(folder.name) * per_round)
        episodes = play(agent, environments)
        returns.append(statistics.fmean(e.episode_return for e in episodes))
    return Result(steps, returns)


def rival(proof: Proof, seed: int, work: Path) -> Result:
    """Train RecurrentPPO with the settings of sb3-contrib's own test of masked CartPole."""
    import gymnasium
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    arguments = arguments_of(proof.args)

    def maker() -> Monitor:
        made = gymnasium.make(proof.gym, **arguments)
        # RecurrentPPO cannot count the features of a MultiDiscrete observation.
        return Monitor(made if boxed else gymnasium.wrappers.FlattenObservation(made))

    plain = gymnasium.make(proof.gym, **arguments)
    boxed = isinstance(plain.observation_space, gymnasium.spaces.Box)

    def normalised(count: int, training: bool) -> VecNormalize:
        inner = DummyVecEnv([maker] * count)
        inner.seed(seed if training else EVALUATION_SEED)
        return VecNormalize(inner, training, norm_obs=boxed, norm_reward=training)

    training, evaluation = normalised(8, True), normalised(EPISODES, False)
    model = RecurrentPPO(
        "MlpLstmPolicy",
        training,
        n_steps=128,
        batch_size=256,
        learning_rate=7e-4,
        n_epochs=10,
        gae_lambda=0.98,
        policy_kwargs={"lstm_hidden_size": 64},
        seed=seed,
        device="cpu",
    )
    steps: list[int] = []
    returns: list[float] = []

    class Evaluate(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            if self.num_timesteps == 0 or self.num_timesteps % (BETWEEN * 1024):
                return
            if boxed:
                evaluation.obs_rms = training.obs_rms
            mean, _ = evaluate_policy(self.model, evaluation, n_eval_episodes=EPISODES)
            steps.append(self.num_timesteps)
            returns.append(float(mean))
            if mean >= proof.threshold:
                raise StopIteration

    with contextlib.suppress(StopIteration):
        model.learn(proof.budget + 1024, callback=Evaluate())
    return Result(steps, returns)


def results(proof: Proof, seeds: list[int], who: str, work: Path) -> list[Result]:
    """Return the results of all seeds: stored ones, and the missing ones computed now."""
    found = []
    for seed in seeds:
        place = work / f"{who}-{proof.name}-seed{seed}"
        make = partial(ours if who == "esper" else rival, proof, seed, place)
        found.append(Result(**kept(place.with_suffix(".json"), make)))
        print(who, proof.name, seed, _steps([found[-1].first(proof.threshold)]), flush=True)
    return found


def row(proof: Proof, mine: list[Result], theirs: list[Result]) -> tuple[list[str], bool]:
    """Return a line of the table, and whether the proof holds."""
    firsts, others = ([r.first(proof.threshold) for r in found] for found in (mine, theirs))
    best, final = (
        statistics.median([value(r.returns) for r in mine] or [math.nan])
        for value in (max, operator.itemgetter(-1))
    )
    cells = [proof.name, f"{'' if proof.reached else 'below '}{proof.threshold:g}"]
    cells += [f"{proof.budget:,}", _steps(firsts), f"{best:.2f}", f"{final:.2f}"]
    cells += [_steps(others) if proof.compared else "-"]
    if not proof.reached:
        return cells, best < proof.threshold
    median = statistics.median(firsts or [math.inf])
    rivals = statistics.median(others or [math.inf])
    return cells, median <= min(proof.budget, rivals)


def _steps(counts: list[float]) -> str:
    """The median in bold, and the values of the seeds."""
    if not counts:
        return "not run"
    median, *each = (
        "never" if count == math.inf else f"{count:,.0f}"
        for count in (statistics.median(counts), *counts)
    )
    return f"**{median}** ({', '.join(each)})"


def command(proof: Proof) -> str:
    """Return the command that reproduces a proof."""
    settings = {**proof.settings, "seed": "SEED"}
    config = config_of(proof, 1, Path("runs"))
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in settings.items()]
    parts = [f"esper train {proof.algorithm} --gym {proof.gym}"]
    parts += [f"--gym-args {' '.join(proof.args)}"] if proof.args else []
    return " ".join([*parts, f"--rounds {config.world.rounds}", *flags])


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--algorithm", choices=["ppo", "impala"], default="ppo")
    parser.add_argument("--only", nargs="+", default=[proof.name for proof in PROOFS])
    parser.add_argument("--who", nargs="+", default=["esper", "sb3"], choices=["esper", "sb3"])
    parser.add_argument("--work", type=Path, default=Path("runs/gym_proofs"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    register_envs()
    algorithm, impala = arguments.algorithm, arguments.algorithm == "impala"
    chosen = [p for p in PROOFS if p.name in arguments.only and p.algorithm == algorithm]
    rows = []
    for proof in chosen:
        found: dict[str, list[Result]] = {"esper": [], "sb3": []}
        for who in arguments.who:
            if who == "esper" or proof.compared:
                found[who] = results(proof, arguments.seeds, who, arguments.work)
        rows.append(row(proof, found["esper"], found["sb3"]))
    heads = [
        "task",
        "threshold, mean return",
        "within steps",
        "steps: median (seeds)",
        "best evaluation, median",
        "last evaluation, median",
        "sb3-contrib: median (seeds)",
    ]
    rival_runs = "sb3" in arguments.who and not impala
    versions = [f"gymnasium {version('gymnasium')}"]
    versions += [f"sb3-contrib {version('sb3-contrib')}"] if rival_runs else []
    text = (
        "Environment steps until the mean return of an evaluation first reaches the threshold; "
        f"medians over seeds {', '.join(map(str, arguments.seeds))}. An evaluation follows every "
        f"{BETWEEN} rounds and takes {EPISODES} fresh episodes with the most probable action. "
        "Steps that only reset are counted."
    )
    if impala:
        heads.pop()
        rows = [(cells[:-1], holds) for cells, holds in rows]
        text += " IMPALA has its defaults, without a lag."
    else:
        text += (
            " `memoryless` is `masked` without the LSTM; its mean return must stay below the "
            "threshold. RecurrentPPO of sb3-contrib: 8 x 128 steps, batch 256, 10 epochs, learning "
            "rate 7e-4, lambda 0.98, LSTM 64, normalised, which are the settings of its own test "
            "of masked CartPole; its run ends when it reaches the threshold."
        )
    parts = (
        text,
        table(heads, [cells for cells, _ in rows]),
        "Commands:",
        "\n".join(f"- {proof.name}: `{command(proof)}`" for proof in chosen),
        f"{made_on(*versions, '1 thread')}.",
    )
    if impala:
        title = "Gymnasium tasks: IMPALA"
        publish("gym_proofs_impala", title, parts, arguments.write)
    else:
        title = "Gymnasium tasks: Esper and RecurrentPPO of sb3-contrib"
        publish("gym_proofs", title, parts, arguments.write)
    missed = [proof.name for proof, (_, holds) in zip(chosen, rows, strict=True) if not holds]
    if missed:
        print(f"not reached: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
