"""How a run ended: means over the last tenth of its rounds, read from its events."""

import math
from pathlib import Path
from statistics import fmean

from esper.leyline.events import EpisodeOutcome, GymEpisodes, to_floats
from esper.leyline.events.reader import EventReader

GROWTH = {
    "gain": "gain, points",
    "validation_gain": "on validation",
    "episode_return": "return",
    "added_parameters": "parameters added",
}
"""Figures of a run on growing networks, and what they are called."""
GYM = {"episode_return": "return", "length": "length"}
"""Figures of a run on a Gymnasium task, and what they are called."""


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
    last = [rounds[number] for number in sorted(rounds)[-math.ceil(len(rounds) / 10) :]]
    names = dict.fromkeys(
        name for event in last for name in (GYM if isinstance(event, GymEpisodes) else GROWTH)
    )
    means = {name: [_mean(to_floats(getattr(event, name))) for event in last] for name in names}
    found = {name: _mean(values) for name, values in means.items()}
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan
