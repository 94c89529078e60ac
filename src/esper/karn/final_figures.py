"""The figures of episodes: what they are called, and their means at the end of a run."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from esper.leyline.events import EpisodeOutcome, GymEpisodes, to_floats
from esper.leyline.events.reader import EventReader


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the episodes of a round.

    Attributes:
        name: its name in ``EpisodeOutcome``.
        label: what tables call it, with its unit.
        form: number format.
        accuracy: whether it is an accuracy in [0, 1], which the report shows in percent.
    """

    name: str
    label: str
    form: str
    accuracy: bool = False


FIGURES: Final = {
    figure.name: figure
    for figure in (
        Figure("gain", "gain, points", "+.1f"),
        Figure("validation_gain", "validation difference, points", "+.1f"),
        Figure("test_accuracy", "test accuracy grown", ".3f", True),
        Figure("twin_test_accuracy", "test accuracy of the twin", ".3f", True),
        Figure("accuracy", "validation accuracy grown", ".3f", True),
        Figure("twin_accuracy", "validation accuracy of the twin", ".3f", True),
        Figure("episode_return", "return", "+.3f"),
        Figure("added_parameters", "parameters added", ".0f"),
        Figure("germinated", "seeds germinated", ".2f"),
        Figure("fossilised", "seeds fossilised", ".2f"),
        Figure("pruned", "seeds pruned", ".2f"),
        Figure("rolled_back", "rollbacks", ".2f"),
    )
}
"""The figures of a run on growing networks, by name in the order of tables."""

GROWTH = {
    name: FIGURES[name].label
    for name in ("gain", "validation_gain", "episode_return", "added_parameters")
}
"""The figures by which runs on growing networks are compared, and what they are called."""
GYM = {"episode_return": "return", "length": "length"}
"""The same of a run on a Gymnasium task."""


def last_tenth(rounds: int) -> int:
    """Return how many of the rounds are the last ones, of which means are shown: at least one."""
    return max(1, math.ceil(rounds / 10))


def final_figures(run: Path) -> dict[str, float]:
    """Return the figures of ``GROWTH`` or ``GYM`` of a run, each the mean over its last rounds.

    The last rounds are the last tenth, at least one. The value of a round is the mean over its
    environments or episodes. A figure that was not recorded is left out, and so are values that are
    not finite. A run without events has none.
    """
    if not (run / "events.jsonl").exists():
        return {}
    # A round that was repeated after a crash counts once, as it was repeated.
    rounds: dict[int, EpisodeOutcome | GymEpisodes] = {}
    for _, event in EventReader(run, EpisodeOutcome, GymEpisodes):
        assert isinstance(event, EpisodeOutcome | GymEpisodes)
        rounds[event.round] = event
    last = [rounds[number] for number in sorted(rounds)[-last_tenth(len(rounds)) :]]
    names = dict.fromkeys(
        name for event in last for name in (GYM if isinstance(event, GymEpisodes) else GROWTH)
    )
    means = {
        name: _mean([_mean(to_floats(getattr(event, name))) for event in last]) for name in names
    }
    return {name: value for name, value in means.items() if not math.isnan(value)}


def _mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan
