"""Diagnosis of a task without a learner: is there anything in it to learn?

Five policies that do not learn play the task on the same hosts and data. Three measurements show
whether a learner could improve on them: which operations are legal, which stages the seeds reach,
and how much of the return depends on the actions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from esper.karn.intervals import group_means, interval
from esper.kasmina.transfer import CPU
from esper.leyline.actions import Op
from esper.leyline.config import LearnerConfig
from esper.leyline.errors import UsageError
from esper.leyline.stages import Stage
from esper.runtime.tasks import Task
from esper.scripts.tasks import TasksArguments
from esper.simic.growth.agent import growth_agent
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig, Step
from esper.tamiyo.baselines import Actor, NeverActor
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tamiyo.heuristic import HeuristicActor
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.random_actor import RandomActor
from esper.tolaria.precision import Precision
from esper.tolaria.results import Scores

STAGES = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILISED)


@dataclass(frozen=True, slots=True)
class Ending:
    """What committed hosts score on one split on the last step, ``[N]`` each.

    Attributes:
        utility: expected accuracy minus the price; that of validation is a mean over three steps.
        gain: utility minus the expected accuracy of the never-grow twin.
        accuracy, loss: share of correct predictions and mean loss in nats.
    """

    utility: Tensor
    gain: Tensor
    accuracy: Tensor
    loss: Tensor


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """Measurements of one policy in one episode of every environment.

    Attributes:
        legal: for each ``Op``, the share of (step, environment) pairs in which it was legal.
        entries: for each stage, the mean number of seeds per episode that entered it.
        test, validation: the last step on either split.
        rewards: ``[T, N]``, from scores on validation.
    """

    legal: dict[Op, float]
    entries: dict[Stage, float]
    test: Ending
    validation: Ending
    rewards: Tensor


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Measurements of a task from the episodes of all policies.

    Attributes:
        results: measurements by policy: never, random, heuristic, everything, untrained.
        by_init, by_actions, by_rest: shares of the variance of the untrained policy's return due to
            the hosts' initial weights and data, to the actions, and to neither; see
            ``variance_shares``. The untrained policy is a learner before its first update. It is
            used because the random policy prunes nearly all seeds before they have an effect.
        step_signal: signal-to-noise ratio of the reward of ``everything`` minus that of ``never``,
            mean over the steps, see ``signal_to_noise``.
        return_signal: the same ratio of the difference of their returns.
    """

    results: dict[str, PolicyResult]
    by_init: float
    by_actions: float
    by_rest: float
    step_signal: float
    return_signal: float


class SharedStreams:
    """Wraps an actor so that it makes the same draws for the same member of every group.

    Args:
        actor: an actor whose draws are keyed by the environment's identity.
        group_size: environments per group.
    """

    def __init__(self, actor: Actor, group_size: int):
        self.actor, self.group_size = actor, group_size

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""
        self.actor.begin(environments % self.group_size, episode)

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``."""
        return self.actor.act(observation, step)


def diagnose(
    task: Task,
    groups: int,
    config: GrowthConfig,
    on_policy: Callable[[str], None] = lambda name: None,
) -> Diagnosis:
    """Play ``task`` with every policy on ``groups * config.group_size`` environments.

    Args:
        task: the task; its episode length and batches replace those of ``config``.
        groups: number of groups, each with its own initial host and data; at least 2.
        config: seed, reward and rules; at least 2 environments per group.
        on_policy: called with the name of each policy before it plays.

    Raises:
        ValueError: there are fewer than two groups or fewer than two environments per group.
    """
    size = config.group_size
    if groups < 2 or size < 2:
        raise ValueError(
            f"at least two groups of two environments are needed, got {groups} of {size}"
        )
    config = replace(
        config, episode_length=task.episode_length, max_batches=task.max_batches,
        batch_size=task.batch_size, max_seeds=config.max_seeds or task.max_seeds,
    )  # fmt: skip
    count = groups * size
    actors: dict[str, Actor] = {
        "never": NeverActor(),
        "random": SharedStreams(RandomActor(config.seed), size),
        "heuristic": HeuristicActor(config.episode_length),
        "everything": ScheduleActor(Schedule.everything(count, task.host.slots)),
        "untrained": SharedStreams(growth_agent(LearnerConfig(), config.seed, CPU), size),
    }
    results = {}
    for name, actor in actors.items():
        on_policy(name)
        # ``everything`` grows in every slot at the same time, which one_at_a_time forbids.
        rules = replace(config, one_at_a_time=config.one_at_a_time and name != "everything")
        env = GrowthEnv([task], torch.arange(count), rules, Precision("cpu"), CPU)
        results[name] = run_policy(env, actor)
    returns = results["untrained"].rewards.sum(0).view(groups, size)
    difference = results["everything"].rewards - results["never"].rewards
    steps = signal_to_noise(difference)
    return Diagnosis(
        results, *variance_shares(returns), step_signal=float(steps.mean()),
        return_signal=float(signal_to_noise(difference.sum(0))),
    )  # fmt: skip


def run_policy(env: GrowthEnv, actor: Actor, episode: int = 0) -> PolicyResult:
    """Play one episode of environments of one task and measure it."""
    entries = dict.fromkeys(STAGES, 0.0)
    last: list[Step] = []

    def on_step(t: int, actions: Tensor, step: Step) -> None:
        for stage in STAGES:
            entries[stage] += step.report.entered(stage).double().mean().item()
        last[:] = [step]

    rollout = collect(env, actor, episode, on_step)
    report = last[0].report
    assert report.committed is not None
    assert report.test is not None
    assert report.twin_test is not None

    def ending(scores: Scores, score: Tensor, twin_score: Tensor) -> Ending:
        utility = env.utility(score, report.added_parameters).double()
        accuracy, loss = scores.accuracy.double(), scores.loss.double()
        return Ending(utility, utility - twin_score, accuracy, loss)

    shares = rollout.observation.masks.ops.double().mean((0, 1)).tolist()
    return PolicyResult(
        legal=dict(zip(Op, shares, strict=True)),
        entries=entries,
        test=ending(report.test, report.test.expected, report.twin_test.expected),
        validation=ending(report.committed, report.score, report.twin_score),
        rewards=rollout.rewards.double(),
    )


def variance_shares(returns: Tensor) -> tuple[float, float, float]:
    """Shares of the variance of ``returns [G, M]`` due to rows, to columns and to neither.

    Rows are initial hosts with their data, columns are streams of a policy's draws, fully crossed.
    The variance components of a two-way analysis of variance without replication are estimated from
    its expected mean squares (Searle, Casella and McCulloch, "Variance Components", 1992): the
    variance expected from noise alone is subtracted, and a negative component counts as 0. The rest
    is the interaction of rows and columns and the seeds' random initial weights. The shares sum to
    1; all are NaN if the returns do not vary.
    """
    groups, members = returns.shape
    deviations = returns - returns.mean()
    rows, columns = deviations.mean(1, keepdim=True), deviations.mean(0, keepdim=True)
    residual = (deviations - rows - columns).square().sum() / ((groups - 1) * (members - 1))
    by_row = (rows.square().sum() * members / (groups - 1) - residual).clamp(min=0.0) / members
    by_column = (columns.square().sum() * groups / (members - 1) - residual).clamp(min=0.0) / groups
    total = by_row + by_column + residual
    return float(by_row / total), float(by_column / total), float(residual / total)


def signal_to_noise(differences: Tensor) -> Tensor:
    """``|mean| / standard deviation`` over the last axis of ``[..., N]``; 0 if the deviation is 0.

    The expected squared ratio of pure noise, ``1 / N``, is subtracted from the squared ratio.
    """
    count = differences.shape[-1]
    deviation = differences.std(-1)
    ratio = differences.mean(-1).square() / deviation.square() - 1.0 / count
    return torch.where(deviation > 0, ratio.clamp(min=0.0).sqrt(), 0.0)


SEED = 42
MAX_ENVIRONMENTS = 2048


def describe(console: Console, tasks: Sequence[Task], trial: TasksArguments) -> int:
    """Play the tasks with policies that do not learn, and print the diagnosis.

    Raises:
        UsageError: there would be too many environments.
    """
    if trial.groups * trial.group_size > MAX_ENVIRONMENTS:
        raise UsageError(
            f"groups: {trial.groups} groups of {trial.group_size} are more than "
            f"{MAX_ENVIRONMENTS} environments; take fewer"
        )
    config = GrowthConfig(seed=SEED, group_size=trial.group_size, reward=trial.reward)
    for task in tasks:
        with console.status("") as status:
            diagnosis = diagnose(
                task,
                trial.groups,
                config,
                lambda policy, name=task.name: status.update(f"{name}: {policy}"),  # type: ignore[misc]
            )
        _show(console, task, diagnosis, trial)
    return 0


def _show(console: Console, task: Task, diagnosis: Diagnosis, trial: TasksArguments) -> None:
    table = Table(
        title=f"{task.name}: an episode of {task.episode_length} steps, "
        f"{trial.groups} hosts x {trial.group_size} environments, reward {trial.reward}",
        title_justify="left",
    )
    table.add_column("")
    for name in diagnosis.results:
        table.add_column(name, justify="right")
    results = list(diagnosis.results.values())

    def means(label: str, values: list[Tensor], form: str = ".1f") -> None:
        table.add_row(label, *(f"{100.0 * float(value.mean()):{form}}" for value in values))

    gains = torch.stack([policy.test.gain for policy in results])
    estimate = interval(group_means(100.0 * gains.numpy(), trial.group_size))
    means("gain, points", [p.test.gain for p in results], "+.1f")
    ends = zip(estimate.low, estimate.high, strict=True)
    table.add_row("95 % interval", *(f"{low:+.1f}, {high:+.1f}" for low, high in ends))
    means("validation difference", [p.validation.gain for p in results], "+.1f")
    means("utility (test), points", [p.test.utility for p in results])
    means("utility on validation", [p.validation.utility for p in results])
    means("accuracy (test), %", [p.test.accuracy for p in results])
    means("accuracy on validation", [p.validation.accuracy for p in results])
    table.add_section()
    for stage in STAGES:
        table.add_row(f"seeds {stage.name}", *(f"{p.entries[stage]:.2f}" for p in results))
    table.add_section()
    for op in Op:
        table.add_row(f"{op.name} legal, %", *(f"{100 * p.legal[op]:.0f}" for p in results))
    console.print(table)
    init, actions, remainder = (
        "-" if math.isnan(share) else f"{100 * share:.0f} %"
        for share in (diagnosis.by_init, diagnosis.by_actions, diagnosis.by_rest)
    )
    console.print(
        "Gain is test utility minus that of the never-grow twin, after the last step; its interval "
        "is over hosts.\n"
        f"variance of the untrained policy's return: {init} from init alone (host and data), "
        f"{actions} from actions alone, {remainder} from both and from the seeds' initial weights\n"
        "signal-to-noise ratio of growing everything against never growing: "
        f"{diagnosis.step_signal:.2f} in the reward of a step, "
        f"{diagnosis.return_signal:.2f} in the return",
        highlight=False,
        soft_wrap=True,
    )
