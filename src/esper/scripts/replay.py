"""``esper replay FILE``: repeat a refused update."""

from dataclasses import dataclass
from pathlib import Path

from esper.leyline.config.setting import setting
from esper.leyline.phases import phase
from esper.scripts.flags import parse
from esper.simic.training.replay import replay as replay_file


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayArguments:
    """Repeat a refused update to find its first non-finite tensor.

    The exit status is 0 if it is the same tensor as in the run, 1 if not.
    """

    file: Path = setting(positional=True)
    """The recorded update: RUN/refused/FILE.pt."""


def replay(arguments: list[str]) -> int:
    """Repeat a refused update to find its first non-finite tensor."""
    file = parse(ReplayArguments, "esper replay", arguments).file
    with phase("repeating the update"):
        outcome = replay_file(file)
    now = outcome.replay_tensor or "every number is finite"
    print(
        f"round {outcome.round}: first tensor that is not finite: {outcome.run_tensor}; now: {now}"
    )
    return 0 if outcome.replay_tensor == outcome.run_tensor else 1
