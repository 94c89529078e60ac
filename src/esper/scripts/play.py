"""``esper play RUN``: play episodes of a Gymnasium task with a learned policy."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from esper.leyline.config.setting import Range, setting
from esper.leyline.errors import UsageError, first_line
from esper.leyline.extras import require
from esper.leyline.phases import phase
from esper.runtime.gate import Permission
from esper.scripts.exported_files import check_exports, write_exports
from esper.scripts.flags import parse

if TYPE_CHECKING:
    from esper.simic.tools.gym_policy import GymPolicy


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
    out: Path | None = None
    """A .pt2 file to write: a step of the policy, normalisation and memory included, which runs
    with torch alone."""
    onnx: Path | None = None
    """The same as an ONNX file; needs pip install 'esper-growth[onnx]'."""
    video: Path | None = None
    """A folder to write videos of the first five episodes to; needs pip install
    'esper-growth[video]'."""
    plugin: tuple[str, ...] = ()
    """Python files that register the environment."""
    gym: str | None = None
    """Id of the environment, if it names a module."""
    trust: bool = False
    """Whether plugins may be executed that only the run names."""


def play(arguments: list[str]) -> int:
    """Play a Gymnasium task with the policy of a run."""
    flags = parse(PlayArguments, "esper play", arguments)
    check_exports(flags.out, flags.onnx)
    if flags.video is not None:
        require("video", "video", "moviepy")
        if flags.video.exists() and (not flags.video.is_dir() or any(flags.video.iterdir())):
            raise UsageError(f"video: {flags.video} exists; give a new or an empty folder")
    import numpy as np

    from esper.karn.intervals import interval
    from esper.simic.tools.gym_policy import gym_policy

    permission = Permission(flags.plugin, flags.gym, flags.trust)
    with phase("loading the policy"):
        policy = gym_policy(flags.run, flags.latest, permission)
    with phase("playing"):
        episodes = policy.play(flags.episodes, flags.greedy, flags.video)
    returns = [episode.episode_return for episode in episodes]
    bounds, estimate = "", interval(np.array([returns]))
    if len(returns) > 1:
        bounds = f" [{estimate.low[0]:.2f}, {estimate.high[0]:.2f}]"
    how = "most probable actions" if flags.greedy else "drawn actions"
    print(f"mean return {estimate.mean[0]:.2f}{bounds} over {len(returns)} episodes, {how}")
    print(
        f"lowest {min(returns):.2f}, highest {max(returns):.2f}, "
        f"mean length {fmean(episode.length for episode in episodes):.1f} steps"
    )
    if flags.out is not None or flags.onnx is not None:
        _write({"out": flags.out, "onnx": flags.onnx}, policy)
    if flags.video is not None:
        print(f"wrote videos to {flags.video}")
    print(f"policy of round {policy.round}/{policy.config.world.rounds} of {flags.run}")
    return 0


def _write(paths: dict[str, Path | None], policy: "GymPolicy") -> None:
    """Export a step of the policy to files, and say what it takes and gives."""
    from esper.tolaria.export import onnx_bytes, pt2_bytes

    try:
        program, names = policy.export(), policy.export_names()
        contents = {
            name: (path, pt2_bytes(program) if name == "out" else onnx_bytes(program, *names))
            for name, path in paths.items()
            if path is not None
        }
    except Exception as error:
        reason = first_line(error)
        raise UsageError(f"out: torch cannot export this policy ({reason})") from error
    write_exports(contents)
    shape = policy.example.shape
    heads, widest = policy.example.observation.masks.shape[1:]
    states = policy.actor.policy.initial_hidden(1)
    state = f", state {len(states)} x [1, N, {states[0].shape[-1]}]" if states else ""
    gives = [f"actions [N, {heads}]"] if heads else []
    gives += [f"numbers [N, {shape.components}]"] if shape.components else []
    gives += ["the state"] if states else []
    print(
        f"takes observation [N, {shape.inputs}] (float64, flat), mask [N, {heads}, {widest}] "
        f"(bool){state}; gives {' and '.join(gives)}"
    )
