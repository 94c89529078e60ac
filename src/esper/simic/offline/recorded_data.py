"""The data of offline learning: recorded episodes, checked, with their returns and their split."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline.config import (
    EpisodeRules,
    LearnerConfig,
    MachineConfig,
    MethodConfig,
    OutputConfig,
    TrainConfig,
    WorldConfig,
    shown,
)
from esper.leyline.config.offline import ImitationConfig
from esper.leyline.config.setting import settings_of
from esper.leyline.errors import UsageError
from esper.leyline.notices import notice
from esper.leyline.records import run_identity
from esper.runtime import plugins
from esper.runtime.gate import NOTHING, Permission
from esper.runtime.tasks import FAMILIES, find
from esper.simic.gradients import first_not_finite
from esper.simic.normalise import ObservationMoments, RunningMoments
from esper.simic.offline.batches import first_of, groups_of, monte_carlo_returns, split
from esper.simic.offline.methods import method_of
from esper.simic.records.episodes import Episodes, read_episodes
from esper.simic.run.run_directory import stored_config
from esper.tamiyo.policy.action_masks import relevance
from esper.tamiyo.policy.features import Observation

RULES = ("max_seeds", *settings_of(EpisodeRules))
"""Settings in which the recorded runs must agree: actions mean the same, and so do rewards."""

_UNEQUAL = (
    "warning: records: without --common-seeds the seeds of a group start from different weights; "
    "the vine compares its environments as if they were equal until their actions differ"
)
_CHUNK = 256
"""Episodes whose moments are computed at a time, because they are copied in float64."""


@dataclass(frozen=True, slots=True)
class RecordedData:
    """What is learned from.

    Attributes:
        episodes: all M episodes.
        returns: of each step, ``[T, M]``.
        training, held_out: indices of the episodes of either part, int64.
        world: the tasks of all runs, and their rules of growth and of reward.
        identities: identity of each run, see ``run_identity``.
    """

    episodes: Episodes
    returns: Tensor
    training: Tensor
    held_out: Tensor
    world: WorldConfig
    identities: list[str]

    @property
    def steps(self) -> int:
        """Number of recorded steps that are learned from."""
        return int(self.episodes.lengths[self.training].sum())


def read_data(config: ImitationConfig, permission: Permission = NOTHING) -> RecordedData:
    """Read and check the records that the settings name.

    Args:
        config: the settings.
        permission: without which the plugins of the runs must have been loaded.

    Raises:
        UsageError: a plugin is not permitted; a run has no records or unusable ones; the runs
            differ in their rules; or their records do not suit the method.
    """
    if not config.records:
        raise UsageError("records: no run is named; give --records RUN, trained with --record")
    runs = [Path(os.path.expanduser(run)) for run in config.records]
    identities = _identities(runs)
    settings = {run: stored_config(run)[0] for run in runs}
    for run, one in settings.items():
        if one.gymnasium.gym is not None:
            raise UsageError(
                f"records: {run} was trained on {shown(one.gymnasium.gym)}; name growth runs"
            )
        plugins.load_all(one, permission, str(run))
    worlds = {run: one.world for run, one in settings.items()}
    world = _common_world(worlds)
    episodes = read_episodes(runs, config.skip_bad)
    _check_numbers(episodes)
    if method_of(config) == "vtrace":
        _check_stochastic_actions(episodes)
    if method_of(config) == "vine":
        _check_branches(episodes)
        if not all(world.common_seeds for world in worlds.values()):
            notice(_UNEQUAL)
    training, held_out = split(episodes, config.held_out, config.seed)
    if config.held_out > 0.0 and len(held_out) == 0:
        raise UsageError(
            "held_out: all episodes share host and data, so none can be held out; record more "
            "rounds, or give --held-out 0"
        )
    returns = monte_carlo_returns(episodes, config.discount)
    return RecordedData(episodes, returns, training, held_out, world, identities)


def _identities(runs: Sequence[Path]) -> list[str]:
    """The identity of each run; refuses a run that is named twice, also by a copy."""
    runs_by_identity: dict[str, Path] = {}
    for run in runs:
        identity = run_identity(run)
        if identity in runs_by_identity:
            raise UsageError(
                f"records: {runs_by_identity[identity]} and {run} are the same run; name it once"
            )
        runs_by_identity[identity] = run
    return list(runs_by_identity)


def _common_world(worlds: dict[Path, WorldConfig]) -> WorldConfig:
    """The settings of the first run, with the tasks and plug-ins of all.

    Raises:
        UsageError: the runs differ in ``RULES``.
    """
    plain = {run: _without_defaults(world) for run, world in worlds.items()}
    first, *followers = plain
    for follower in followers:
        for name in RULES:
            one, two = (getattr(plain[run], name) for run in (first, follower))
            if one != two:
                raise UsageError(
                    f"records: {name} is {one} in {first} and {two} in {follower}; "
                    "name runs with the same rules"
                )
    slots = {world.slots for world in worlds.values()}
    return replace(
        plain[first],
        task=tuple(
            dict.fromkeys(_population(task) for world in worlds.values() for task in world.task)
        ),
        plugin=tuple(
            dict.fromkeys(
                plugins.file_of(path) for world in worlds.values() for path in world.plugin
            )
        ),
        slots=slots.pop() if len(slots) == 1 else (),
    )


def _without_defaults(world: WorldConfig) -> WorldConfig:
    """The settings without a limit of seeds that is that of the tasks, or their number of slots."""
    task_limit = find(world.task[0]).max_seeds
    every = world.slots and world.max_seeds == len(world.slots)
    return replace(world, max_seeds=None) if every or world.max_seeds == task_limit else world


def _population(name: str) -> str:
    """The family of a draw; the policy is one for all its draws."""
    family = name.partition(":")[0]
    return family if family in FAMILIES else name


def _check_numbers(episodes: Episodes) -> None:
    """Refuse what cannot be learned from.

    Raises:
        UsageError: a number is not finite, an action was not legal, or an episode was cut off.
    """
    columns = episodes.observation.tensors() | {
        "log_prob": episodes.log_prob,
        "reward": episodes.rewards,
    }
    name = first_not_finite(columns)
    if name is not None:
        bad = ~columns[name].isfinite()
        bad = bad.flatten(2).any(2) if bad.ndim > 2 else bad
        raise _unusable(episodes, bad, f"a number in {name} that is not finite")
    forbidden = ~_legal(episodes) & episodes.valid
    if bool(forbidden.any()):
        raise _unusable(episodes, forbidden, "an action that was not legal")
    last = episodes.lengths - 1
    ends = episodes.terminated.gather(0, last[None])[0]
    if not bool(ends.all()):
        raise _unusable(episodes, ~ends[None], "an episode that was cut off")


def _unusable(episodes: Episodes, where: Tensor, what: str) -> UsageError:
    """The error that names the first episode in which ``where``, bool ``[T, M]``, is true."""
    column = int(where.any(0).nonzero()[0])
    run = episodes.runs[column]
    return UsageError(
        f"records: round {int(episodes.rounds[column])} of {run} has {what}; "
        f"remove {run} from --records"
    )


def _legal(episodes: Episodes) -> Tensor:
    """Whether each action was legal in all heads that matter, bool ``[T, M]``."""
    masks, actions = episodes.observation.masks, episodes.actions
    op, slot = actions[..., 0], actions[..., 1]

    def legality(options: Tensor, choice: Tensor) -> Tensor:
        return options.gather(-1, choice[..., None])[..., 0]

    matters = relevance(op)
    choices = legality(masks.choices_of(op, slot), actions[..., 2:])
    both = torch.stack([legality(masks.ops, op), legality(masks.slots_of(op), slot)], -1)
    return (torch.cat([both, choices], -1) | ~matters).all(-1)


def _check_stochastic_actions(episodes: Episodes) -> None:
    """Refuse policies whose actions were deterministic: their importance ratios say nothing.

    Such a policy never took another action, so no ratio tells what another one is worth.

    Raises:
        UsageError: all actions of a run had probability 1.
    """
    for run in dict.fromkeys(episodes.runs):
        indices = [i for i, name in enumerate(episodes.runs) if name == run]
        if not bool((episodes.log_prob[:, indices] != 0.0).any()):
            raise UsageError(
                f"method: vtrace needs policies that draw their actions, and {run} has "
                f"{episodes.policies[indices[0]]}, whose actions are deterministic; use "
                "--method awr or bc"
            )


def _check_branches(episodes: Episodes) -> None:
    """Refuse records in which nothing can be compared.

    Raises:
        UsageError: no two episodes share host and data and differ in their actions.
    """
    groups = groups_of(episodes)
    first = first_of(groups)[groups]
    if not bool((episodes.actions != episodes.actions[:, first]).any()):
        raise UsageError(
            "method: vine compares episodes that share host and data and act differently, and "
            "there are none; record a policy that draws, with a --group-size above 1, or take bc"
        )


def fit_moments(
    data: RecordedData, moments: ObservationMoments[Observation], return_moments: RunningMoments
) -> None:
    """Fit the moments of observations and returns to the episodes that are learned from."""
    valid = data.episodes.valid
    for columns in data.training.split(_CHUNK):
        inside = valid[:, columns]

        def valid_rows(x: Tensor, columns: Tensor = columns, inside: Tensor = inside) -> Tensor:
            # Moments ignore rows of NaN.
            missing = ~inside.view(*inside.shape, *[1] * (x.ndim - 2))
            return x[:, columns].masked_fill(missing, float("nan"))

        tensors = {name: x[:, columns] for name, x in data.episodes.observation.tensors().items()}
        tensors |= {
            name: valid_rows(data.episodes.observation.tensors()[name]) for name in _QUANTITIES
        }
        moments.update(Observation.from_tensors(tensors), None)
        return_moments.update(valid_rows(data.returns))


_QUANTITIES = ("host", "slots")
"""The tensors of an observation whose moments are taken."""


def policy_config(
    config: ImitationConfig, algorithm: str, world: WorldConfig, threads: int
) -> TrainConfig:
    """The settings of the run: those of a policy that other commands take.

    Args:
        config: settings of learning.
        algorithm: ``imitation`` or ``offline``.
        world: tasks and rules, see ``RecordedData``.
        threads: CPU threads.
    """
    return TrainConfig(
        world=replace(world, rounds=config.epochs, seed=config.seed),
        method=MethodConfig(algorithm=algorithm),
        learner=LearnerConfig(
            learning_rate=config.learning_rate,
            value_weight=config.value_weight,
            max_gradient_norm=config.max_gradient_norm,
            discount=config.discount,
            lstm_hidden=config.lstm_hidden,
        ),
        machine=MachineConfig(
            device=config.device,
            devices=(config.device,),
            amp_dtype=config.amp_dtype,
            tf32=config.tf32,
            threads=threads,
        ),
        output=OutputConfig(
            telemetry_dir=config.telemetry_dir,
            name=config.name,
            telemetry_level=config.telemetry_level,
            keep_checkpoints=config.keep_checkpoints,
        ),
    )
