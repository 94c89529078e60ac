"""Is it the learner or the environment? Figures of a task that need no learner.

Five policies that do not learn play the task on the same hosts and data. What they are allowed to
do, how far their seeds come, and how much of the return is theirs to decide tells whether there is
anything to learn, before anybody blames a learner for not learning it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.leyline.actions import Op
from esper.leyline.config import LearnerConfig
from esper.leyline.stages import Stage
from esper.runtime.tasks import Task
from esper.simic.growth.agent import growth_agent
from esper.simic.growth.collect import Actor, collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.rewards import utility
from esper.simic.growth.step import GrowthConfig, Step
from esper.tamiyo.baselines import NeverActor, RandomActor
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tamiyo.heuristic import HeuristicActor
from esper.tamiyo.policy.features import Observation
from esper.tolaria.precision import Precision

CPU = torch.device("cpu")
STAGES = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILISED)


@dataclass(frozen=True, slots=True)
class Played:
    """What a policy did in one episode of every environment.

    Attributes:
        legal: of each ``Op``, the share of (step, environment) pairs in which it was legal.
        reached: of each stage, seeds an episode that came into it.
        utility: of the last step, ``[N]``.
        accuracy, loss: of validation, as committed, ``[N]``.
        rewards: ``[T, N]``.
    """

    legal: dict[Op, float]
    reached: dict[Stage, float]
    utility: Tensor
    accuracy: Tensor
    loss: Tensor
    rewards: Tensor


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the policies' episodes say of a task.

    Attributes:
        played: by policy: never, random, heuristic, everything, untrained.
        by_init, by_actions, by_rest: shares of the variance of the untrained policy's return, see
            ``variance_shares``. The untrained policy is a learner's before its first update; one
            that is random in earnest prunes nearly all it grows before it shows.
        step_signal: signal to noise of the reward of a single step, see ``signal_to_noise``.
        return_signal: the same of the return.
    """

    played: dict[str, Played]
    by_init: float
    by_actions: float
    by_rest: float
    step_signal: float
    return_signal: float


class SharedStreams:
    """An actor that draws the same for the same member of every group.

    Args:
        actor: who acts, keyed by identity.
        group_size: environments of a group.
    """

    def __init__(self, actor: Actor, group_size: int):
        self.actor, self.group_size = actor, group_size

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``simic.rollout.Actor.begin``."""
        self.actor.begin(environments % self.group_size, episode)

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``simic.rollout.Actor.act``."""
        return self.actor.act(observation, step)


def diagnose(
    task: Task,
    groups: int,
    config: GrowthConfig,
    on_policy: Callable[[str], None] = lambda name: None,
) -> Diagnosis:
    """Play ``task`` with every policy on ``groups * config.group_size`` environments.

    Args:
        task: what to describe; its horizon and batches take the place of those of ``config``.
        groups: hosts with data of their own, at least 2.
        config: seed, reward and rules; at least 2 environments a group.
        on_policy: told of each policy before it plays.

    Raises:
        ValueError: fewer than two groups, or environments a group: nothing could be compared.
    """
    size = config.group_size
    if groups < 2 or size < 2:
        raise ValueError(f"two groups of two at least, got {groups} of {size}")
    config = replace(
        config,
        episode_length=task.episode_length,
        max_batches=task.max_batches,
        batch_size=task.batch_size,
    )
    count = groups * size
    actors: dict[str, Actor] = {
        "never": NeverActor(),
        "random": SharedStreams(RandomActor(config.seed), size),
        "heuristic": HeuristicActor(config.episode_length),
        "everything": ScheduleActor(Schedule.everything(count, task.host.slots)),
        "untrained": SharedStreams(growth_agent(LearnerConfig(), config.seed, CPU), size),
    }
    played = {}
    for name, actor in actors.items():
        on_policy(name)
        # What is grown at once develops at once, whatever the rule is for the others.
        rules = replace(config, one_at_a_time=config.one_at_a_time and name != "everything")
        env = GrowthEnv([task], torch.arange(count), rules, Precision("cpu"), CPU)
        played[name] = play(env, actor)
    returns = played["untrained"].rewards.sum(0).view(groups, size)
    difference = played["everything"].rewards - played["never"].rewards
    steps = signal_to_noise(difference)
    return Diagnosis(
        played,
        *variance_shares(returns),
        step_signal=float(steps.mean()),
        return_signal=float(signal_to_noise(difference.sum(0))),
    )


def play(env: GrowthEnv, actor: Actor, episode: int = 0) -> Played:
    """One episode of environments of one task."""
    reached = dict.fromkeys(STAGES, 0.0)
    last: list[Step] = []

    def on_step(t: int, actions: Tensor, step: Step) -> None:
        for stage in STAGES:
            reached[stage] += step.report.entered(stage).double().mean().item()
        last[:] = [step]

    rollout = collect(env, actor, episode, on_step)
    report = last[0].report
    assert report.committed is not None
    shares = rollout.observation.masks.ops.double().mean((0, 1)).tolist()
    return Played(
        legal=dict(zip(Op, shares, strict=True)),
        reached=reached,
        utility=utility(report.score, report.added, env.tasks[0].host.parameter_count).double(),
        accuracy=report.committed.accuracy.double(),
        loss=report.committed.loss.double(),
        rewards=rollout.rewards.double(),
    )


def variance_shares(returns: Tensor) -> tuple[float, float, float]:
    """How much of the variance of ``returns [G, M]`` goes with the row, the column, and neither.

    Rows are initial hosts with their data, columns streams of a policy's draws, fully crossed. The
    components of a two-way analysis of variance without replication, from its expected mean squares
    (Searle, Casella and McCulloch, "Variance Components", 1992): what rows or columns of mere noise
    would show is taken off, and a component below 0 counts as 0. The rest is what init and actions
    do together, and the seeds' own initial numbers. The shares add up to 1; all NaN when every
    return is the same.
    """
    groups, members = returns.shape
    centred = returns - returns.mean()
    rows, columns = centred.mean(1, keepdim=True), centred.mean(0, keepdim=True)
    rest = (centred - rows - columns).square().sum() / ((groups - 1) * (members - 1))
    by_row = (rows.square().sum() * members / (groups - 1) - rest).clamp(min=0.0) / members
    by_column = (columns.square().sum() * groups / (members - 1) - rest).clamp(min=0.0) / groups
    total = by_row + by_column + rest
    return float(by_row / total), float(by_column / total), float(rest / total)


def signal_to_noise(differences: Tensor) -> Tensor:
    """``|mean| / standard deviation`` over the last axis ``[..., N]``; 0 where nothing differs.

    The square of what noise alone would show, ``1 / N``, is taken off that of the ratio.
    """
    count = differences.shape[-1]
    deviation = differences.std(-1)
    ratio = differences.mean(-1).square() / deviation.square() - 1.0 / count
    return torch.where(deviation > 0, ratio.clamp(min=0.0).sqrt(), 0.0)


def mean_and_error(values: Tensor, group_size: int) -> tuple[float, float]:
    """Mean of ``values [N]`` and its standard error; environments of a group share a host."""
    groups = values.view(-1, group_size).mean(1)
    return float(groups.mean()), float(groups.std() / len(groups) ** 0.5)
