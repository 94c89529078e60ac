"""Runs that benchmarks train or reuse, and means with standard errors over their episodes."""

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from reporting import new_parser

from esper.karn.store import read_events
from esper.leyline.config import flatten, unflatten
from esper.leyline.config.algorithm import learns_by_acting
from esper.leyline.events import (
    AnalyticsSnapshot,
    EpisodeOutcome,
    PPOUpdateCompleted,
    TrainingFinished,
    to_floats,
)
from esper.runtime.tasks import find_all
from esper.simic.run.run_directory import stored_config
from esper.simic.training.vectorized import resume_ppo, run_training

Settings = dict[str, Any]


@dataclass(frozen=True)
class Mean:
    """A mean with its standard error, both as fractions; as text, in points.

    Attributes:
        value: the mean.
        error: its standard error.
    """

    value: float
    error: float

    @classmethod
    def of(cls, samples: ArrayLike) -> "Mean":
        """Return the mean of independent samples; the error of a single sample is NaN."""
        values = np.asarray(samples, float)
        error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(float(values.mean()), float(error))

    def __format__(self, spec: str) -> str:
        spec = spec or ".1f"
        return f"{100 * self.value:+{spec}} ± {100 * self.error:{spec}}"

    def __str__(self) -> str:
        return format(self)


_FREE = {"rounds", "threads", "telemetry_dir", "plugin"}
"""Settings that may differ between a stored run and the one wanted."""


class Run:
    """The events of a finished run.

    Attributes:
        path: the run directory.
        outcomes, updates, snapshots: events of every round.
    """

    def __init__(self, path: Path):
        self.path = path
        self.outcomes = list(read_events(path, EpisodeOutcome))
        self.updates = list(read_events(path, PPOUpdateCompleted))
        self.snapshots = list(read_events(path, AnalyticsSnapshot))
        self._group_size = stored_config(path)[0].world.group_size

    @property
    def seconds(self) -> float:
        """Seconds of all rollouts and updates."""
        return sum(s.rollout_seconds + s.update_seconds for s in self.snapshots)

    def ends(self, parts: int) -> tuple[list[EpisodeOutcome], list[EpisodeOutcome]]:
        """Return the first and the last of ``parts`` equal parts of the rounds."""
        count = math.ceil(len(self.outcomes) / parts)
        return self.outcomes[:count], self.outcomes[-count:]

    def metric(self, name: str) -> NDArray[np.float64]:
        """Return a metric of every update; NaN where it is missing."""
        values = [update.metrics[name] for update in self.updates]
        return np.array([math.nan if value is None else float(value) for value in values])

    def gain(self, outcomes: Sequence[EpisodeOutcome], measure: str = "test_utility") -> Mean:
        """Return the mean difference from the never-grow twin, with equal weight per task.

        With the default measure this is the gain: test utility above the twin's.

        The environments of a group share a twin, so the error is that of (round, group) means
        within each task.

        Args:
            outcomes: outcomes of some rounds.
            measure: ``test_utility``, ``utility`` (the gain on validation), ``test_accuracy`` or
                ``accuracy`` (on validation).

        Exits if the run has no test scores, which are recorded from schema 4 on.
        """
        samples = defaultdict(list)
        for outcome in outcomes:
            grown = np.array(to_floats(getattr(outcome, measure)))
            if len(grown) == 0:
                raise SystemExit(f"{self.path} has no {measure}; give another --work")
            gain = grown - np.array(to_floats(getattr(outcome, f"twin_{measure}")))
            for begin in range(0, len(gain), self._group_size):
                samples[outcome.task[begin]].append(gain[begin : begin + self._group_size].mean())
        means = [Mean.of(values) for values in samples.values()]
        error = math.sqrt(sum(mean.error**2 for mean in means)) / len(means)
        return Mean(float(np.mean([mean.value for mean in means])), error)


def study_parser(doc: str | None, work: str, seeds: int, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every study of trainings takes.

    Args:
        doc: docstring of the script.
        work: name of the folder of its runs in ``runs/``.
        seeds: default number of seeds, counted from 1.
        rounds: default number of rounds of a training.
    """
    parser = new_parser(doc)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, seeds + 1)))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--work", type=Path, default=Path("runs") / work)
    return parser


def trained(policy: str, settings: Settings, folder: Path) -> Run:
    """Return the finished run of a policy in ``folder``: reused, resumed, or trained now."""
    learns = learns_by_acting(policy)
    algorithm = {"algorithm": policy} if learns else {}
    place = {"telemetry_dir": str(folder), "telemetry_level": "minimal"}
    config = unflatten({**settings, **algorithm, **place})
    for run in sorted(folder.glob("*")):
        _same(flatten(config), run)
        ends = list(read_events(run, TrainingFinished)) if (run / "events.jsonl").exists() else []
        if ends and ends[-1].status == "finished" and ends[-1].round >= settings["rounds"]:
            return Run(run)
        if learns and any((run / "checkpoints").glob("0*")):
            return Run(resume_ppo(run, {"rounds": settings["rounds"]}).path)
    return Run(run_training(config, policy).path)


def _same(wanted: Settings, run: Path) -> None:
    """Exit if a stored run was made with other settings."""
    stored = flatten(stored_config(run)[0])
    wanted = wanted | {"task": [task.name for task in find_all(wanted["task"])]}
    for name, value in wanted.items():
        given = value not in (None, [], "auto") and name not in _FREE
        if given and stored[name] != value:
            raise SystemExit(f"{run} has {name} {stored[name]}, not {value}; give another --work")
