"""The fourth page: anomalies and rollbacks, newest first."""

from collections import Counter
from dataclasses import dataclass

from rich.text import Text
from textual.app import ComposeResult

from esper.karn.sanctum.formatting import compact, count_text
from esper.karn.sanctum.palette import Palette
from esper.karn.sanctum.snapshot import Moment
from esper.karn.sanctum.widgets import WIDE, Column, Lines, RowsTable, View
from esper.leyline.events import AnomalyDetected, GovernorRollback, TelemetryDropped


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
    entries = [Trouble(event) for event in moment.anomalies]
    entries += [
        Trouble(_as_anomaly(event, environment, reason), environment)
        for event in moment.events(GovernorRollback)
        for environment, reason in zip(event.environment, event.reason, strict=True)
    ]
    return sorted(entries, key=lambda trouble: -trouble.anomaly.time)


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
    number = count_text(sum(counts.values()), "anomaly", "anomalies")
    text.append(f"▲ {number}", style=palette.bad)
    text.append(f", the last in round {last.round}: ")
    return text.append(", ".join(f"{kind} {n}x" for kind, n in counts.most_common()))


class Anomalies(View):
    """The page of anomalies and rollbacks."""

    title = "anomalies"

    def __init__(self) -> None:
        super().__init__()
        self.troubles: list[Trouble] = []
        self.summary = Lines(id="anomalies-summary")
        self.table = RowsTable("anomaly-table", "● no anomalies so far")

    def compose(self) -> ComposeResult:
        """Yield the widgets of the page."""
        yield self.summary
        yield self.table

    def draw(self, moment: Moment, palette: Palette) -> None:
        """Draw the anomalies of a moment."""
        self.troubles = troubles(moment)
        self.summary.show(_summary(moment, palette))
        wide = self.app.screen.size.width >= WIDE
        columns = _columns(wide, self.size.width, palette)
        self.table.show(columns, self.troubles, palette.cursor)

    def on_rows_table_choice(self, event: RowsTable.Choice) -> None:
        """Open the round and the environment of the chosen anomaly."""
        trouble = self.troubles[event.row]
        self.post_message(self.Choice(trouble.anomaly.round, trouble.environment))


def _summary(moment: Moment, palette: Palette) -> Text:
    """One line that counts anomalies, unreadable lines and steps that were not recorded."""
    index = moment.index
    drops = moment.latest(TelemetryDropped)
    parts = [count_text(len(moment.anomalies), "anomaly", "anomalies")]
    if index.corrupt:
        parts.append(f"{count_text(index.corrupt, 'corrupt line', 'corrupt lines')} skipped")
    if index.unknown:
        parts.append(f"{count_text(index.unknown, 'line', 'lines')} of an unknown kind skipped")
    if moment.log.cut_off and moment.line is None:
        parts.append("the last line is incomplete")
    if drops is not None:
        steps = count_text(drops.total, "step", "steps")
        parts.append(f"{steps} not recorded: telemetry could not keep up")
    return Text(" · ".join(parts), style=palette.muted, no_wrap=True, overflow="ellipsis")


def _columns(wide: bool, width: int, palette: Palette) -> list[Column[Trouble]]:
    columns: list[Column[Trouble]] = [
        Column("round", 5, lambda trouble: str(trouble.anomaly.round), right=True),
        Column("step", 4, _step, right=True),
        Column("kind", 21, lambda trouble: Text(f"▲ {trouble.kind}", style=palette.bad)),
    ]
    if wide:
        columns += [
            Column("value", 9, _value, right=True),
            Column("bound", 9, _threshold, right=True),
        ]
    room = max(20, width - (54 if wide else 34))
    return [*columns, Column("message", room, lambda trouble: trouble.anomaly.message)]


def _step(trouble: Trouble) -> str:
    return "" if trouble.anomaly.step is None else str(trouble.anomaly.step)


def _value(trouble: Trouble) -> str:
    """The measured value; ``missing`` where the update has no value of the metric."""
    anomaly = trouble.anomaly
    return "" if anomaly.metric is None and anomaly.value is None else compact(anomaly.value)


def _threshold(trouble: Trouble) -> str:
    return "" if trouble.anomaly.threshold is None else compact(trouble.anomaly.threshold)
