"""``esper replay FILE``."""

from dataclasses import dataclass
from pathlib import Path

from esper.leyline.config.setting import setting
from esper.scripts.flags import parse
from esper.simic.training.replay import replay as replay_file


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayArguments:
    """Do an update again that met a number that is not finite.

    Exit status 0 where the same tensor is found again, 1 where it is not.
    """

    file: Path = setting(positional=True)
    """The update: RUN/refused/FILE.pt."""


def replay(arguments: list[str]) -> int:
    """Do an update again that met a number that is not finite."""
    seen = replay_file(parse(ReplayArguments, "esper replay", arguments).file)
    now = seen.found or "every number is finite"
    print(f"round {seen.round}: first tensor that is not finite: {seen.recorded}; now: {now}")
    return 0 if seen.found == seen.recorded else 1
