"""Anomalies and rollbacks of a run as one list."""

from collections import Counter
from dataclasses import dataclass

from rich.text import Text

from esper.karn.sanctum.palette import Palette
from esper.karn.sanctum.snapshot import Moment
from esper.leyline.events import AnomalyDetected, GovernorRollback, Number


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that went wrong.

    Attributes:
        time: seconds since 1970.
        round: in which round.
        step: in which environment step, where it belongs to one.
        kind: in a word or two.
        message: in a sentence.
        value: what was measured.
        threshold: the bound.
        measured: whether there was something to measure; a value of None is missing then.
        environment: where it belongs to one.
    """

    time: float
    round: int
    step: int | None
    kind: str
    message: str
    value: Number | None = None
    threshold: Number | None = None
    measured: bool = False
    environment: int | None = None


def troubles(moment: Moment) -> list[Trouble]:
    """All that went wrong until ``moment``, newest first."""
    found = [_of_anomaly(event) for event in moment.anomalies]
    found += [
        _of_rollback(event, environment, reason)
        for event in moment.events(GovernorRollback)
        for environment, reason in zip(event.environment, event.reason, strict=True)
    ]
    return sorted(found, key=lambda trouble: -trouble.time)


def _of_anomaly(event: AnomalyDetected) -> Trouble:
    return Trouble(
        time=event.time,
        round=event.round,
        step=event.step,
        kind=_words(event.kind),
        message=event.message,
        value=event.value,
        threshold=event.threshold,
        measured=event.metric is not None,
    )


def _of_rollback(event: GovernorRollback, environment: int, reason: str) -> Trouble:
    return Trouble(
        time=event.time,
        round=event.round,
        step=event.step,
        kind="rollback",
        message=f"environment {environment} was put back: {_words(reason)}",
        environment=environment,
    )


def _words(name: str) -> str:
    return name.lower().replace("_", " ").removesuffix(" detected")


def summary(moment: Moment, palette: Palette) -> Text:
    """One line that counts what went wrong; empty while nothing did."""
    anomalies, rollbacks = moment.anomalies, moment.events(GovernorRollback)
    counts = Counter(_words(event.kind) for event in anomalies)
    if rollbacks:
        counts["rollback"] = sum(len(event.environment) for event in rollbacks)
    text = Text(no_wrap=True, overflow="ellipsis")
    if not counts:
        return text
    last = max([*anomalies, *rollbacks], key=lambda event: event.time)
    text.append(f"▲ {sum(counts.values())} anomalies", style=palette.bad)
    text.append(f", the last in round {last.round}: ")
    return text.append(", ".join(f"{kind} {n}x" for kind, n in counts.most_common()))
