"""``esper play RUN``: play episodes of a Gymnasium task with a learned policy."""

from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from esper.leyline.config.setting import Range, setting
from esper.leyline.phases import phase
from esper.runtime.gate import Permission
from esper.scripts.flags import parse


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayArguments:
    """Play fresh episodes of a Gymnasium task with the policy of a run, and print its returns.

    Their seeds are the same in every call, and no training has them.
    """

    run: Path = setting(positional=True)
    """The run directory."""
    episodes: int = setting(100, Range(1, 10_000))
    """Number of episodes."""
    greedy: bool = True
    """Whether to take the most probable action; if not, actions are drawn as in training."""
    latest: bool = False
    """Whether to play the latest checkpoint rather than the one with the best evaluation."""
    plugin: tuple[str, ...] = ()
    """Python files that register the environment."""
    gym: str | None = None
    """Id of the environment, if it names a module."""
    trust: bool = False
    """Whether plugins may be executed that only the run names."""


Z = 1.96
"""Half the width of a 95 % interval, in standard errors."""


def play(arguments: list[str]) -> int:
    """Play a Gymnasium task with the policy of a run."""
    flags = parse(PlayArguments, "esper play", arguments)
    from esper.simic.tools.gym_policy import gym_policy

    permission = Permission(flags.plugin, flags.gym, flags.trust)
    with phase("loading the policy"):
        policy = gym_policy(flags.run, flags.latest, permission)
    with phase("playing"):
        episodes = policy.play(flags.episodes, flags.greedy)
    returns = [episode.episode_return for episode in episodes]
    mean, interval = fmean(returns), ""
    if len(returns) > 1:
        error = Z * stdev(returns) / sqrt(len(returns))
        interval = f" [{mean - error:.2f}, {mean + error:.2f}]"
    how = "most probable actions" if flags.greedy else "drawn actions"
    print(f"mean return {mean:.2f}{interval} over {len(returns)} episodes, {how}")
    print(
        f"lowest {min(returns):.2f}, highest {max(returns):.2f}, "
        f"mean length {fmean(episode.length for episode in episodes):.1f} steps"
    )
    print(f"policy of round {policy.round}/{policy.config.world.rounds} of {flags.run}")
    return 0
