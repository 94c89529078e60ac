"""Anomalies and rollbacks of a run as one list."""

from collections import Counter
from dataclasses import dataclass

from rich.text import Text

from esper.karn.sanctum.formatting import counted
from esper.karn.sanctum.palette import Palette
from esper.karn.sanctum.snapshot import Moment
from esper.leyline.events import AnomalyDetected, GovernorRollback


@dataclass(frozen=True, slots=True)
class Trouble:
    """One anomaly; a rollback counts as an anomaly of its environment."""

    anomaly: AnomalyDetected
    environment: int | None = None

    @property
    def kind(self) -> str:
        """Name of the kind of anomaly, in words."""
        return _words(self.anomaly.kind)


def troubles(moment: Moment) -> list[Trouble]:
    """Return all anomalies and rollbacks up to ``moment``, newest first."""
    found = [Trouble(event) for event in moment.anomalies]
    found += [
        Trouble(_as_anomaly(event, environment, reason), environment)
        for event in moment.events(GovernorRollback)
        for environment, reason in zip(event.environment, event.reason, strict=True)
    ]
    return sorted(found, key=lambda trouble: -trouble.anomaly.time)


def _as_anomaly(event: GovernorRollback, environment: int, reason: str) -> AnomalyDetected:
    message = f"environment {environment} was rolled back: {_words(reason)}"
    return AnomalyDetected(
        time=event.time, round=event.round, step=event.step, kind="rollback", message=message
    )


def _words(name: str) -> str:
    return name.lower().replace("_", " ").removesuffix(" detected")


def summary(moment: Moment, palette: Palette) -> Text:
    """Return one line that counts anomalies by kind; empty where there are none."""
    anomalies, rollbacks = moment.anomalies, moment.events(GovernorRollback)
    counts = Counter(_words(event.kind) for event in anomalies)
    if rollbacks:
        counts["rollback"] = sum(len(event.environment) for event in rollbacks)
    text = Text(no_wrap=True, overflow="ellipsis")
    if not counts:
        return text
    last = max([*anomalies, *rollbacks], key=lambda event: event.time)
    number = counted(sum(counts.values()), "anomaly", "anomalies")
    text.append(f"▲ {number}", style=palette.bad)
    text.append(f", the last in round {last.round}: ")
    return text.append(", ".join(f"{kind} {n}x" for kind, n in counts.most_common()))
