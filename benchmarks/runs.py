"""Runs that benchmarks train or find finished, and means with errors over their episodes."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from esper.karn.store import read_events
from esper.leyline.config import flatten, unflatten
from esper.leyline.events import EpisodeOutcome, TrainingFinished, to_floats
from esper.runtime.tasks import find_all
from esper.simic.run.run_directory import stored_config
from esper.simic.training.vectorized import resume_ppo, run_training


@dataclass(frozen=True)
class Mean:
    """A mean with its standard error."""

    value: float
    error: float

    def above(self, other: "Mean") -> bool:
        """Whether this is larger by two standard errors of the difference."""
        return self.value - other.value > 2.0 * math.hypot(self.error, other.error)

    def __str__(self) -> str:
        return f"{100 * self.value:+.1f} ± {100 * self.error:.1f}"


ZERO = Mean(0.0, 0.0)
_FREE = {"rounds", "threads", "telemetry_dir", "plugin"}
"""Settings that may differ between a run that is found and what is wanted."""


def trained(policy: str, settings: dict, folder: Path) -> Path:
    """The finished run of a policy in ``folder``: found, gone on with, or made."""
    config = unflatten({**settings, "telemetry_dir": str(folder), "telemetry_level": "minimal"})
    for run in sorted(folder.glob("*")):
        _same(flatten(config), run)
        ends = list(read_events(run, TrainingFinished)) if (run / "events.jsonl").exists() else []
        if ends and ends[-1].status == "finished" and ends[-1].round >= settings["rounds"]:
            return run
        if policy == "ppo" and any((run / "checkpoints").glob("0*")):
            return resume_ppo(run, {"rounds": settings["rounds"]}).path
    return run_training(config, policy).path


def _same(wanted: dict, run: Path) -> None:
    """Refuse a run that was made with other settings."""
    stored = flatten(stored_config(run)[0])
    wanted = wanted | {"task": [task.name for task in find_all(wanted["task"])]}
    for name, value in wanted.items():
        given = value not in (None, []) and name not in _FREE
        if given and stored[name] != value:
            raise SystemExit(f"{run} has {name} {stored[name]}, not {value}; give another --work")


def mean_gain(
    outcomes: Sequence[EpisodeOutcome], group_size: int, measure: str = "accuracy"
) -> Mean:
    """Mean gain over the never-grow twin, tasks weighing the same.

    The environments of a group share a twin, so the error is that of (round, group) means within
    each task.

    Args:
        outcomes: rounds.
        group_size: environments of a group.
        measure: ``accuracy`` (committed) or ``utility``.
    """
    samples = defaultdict(list)
    for outcome in outcomes:
        grown = np.array(to_floats(getattr(outcome, measure)))
        gain = grown - np.array(to_floats(getattr(outcome, f"twin_{measure}")))
        for begin in range(0, len(gain), group_size):
            samples[outcome.task[begin]].append(gain[begin : begin + group_size].mean())
    means = [np.mean(values) for values in samples.values()]
    variances = [np.var(values, ddof=1) / len(values) for values in samples.values()]
    return Mean(float(np.mean(means)), float(math.sqrt(np.sum(variances)) / len(means)))


def of_task(outcomes: Sequence[EpisodeOutcome], task: str, field: str) -> float:
    """Mean of a field over the environments that drew ``task``."""
    values = [
        value
        for outcome in outcomes
        for name, value in zip(outcome.task, to_floats(getattr(outcome, field)), strict=True)
        if name == task
    ]
    return float(np.mean(values))
