"""The fourth page: what went out of its bounds, newest first."""

from rich.text import Text
from textual.app import ComposeResult
from textual.message import Message

from esper.karn.sanctum.formatting import compact
from esper.karn.sanctum.palette import Palette
from esper.karn.sanctum.snapshot import Moment
from esper.karn.sanctum.table import Column, RowsTable
from esper.karn.sanctum.troubles import Trouble, troubles
from esper.karn.sanctum.view import WIDE, Lines, View
from esper.leyline.events import TelemetryDropped

PLACE = (Column("round", 5, right=True), Column("step", 4, right=True), Column("what", 21))
MEASURED = (Column("value", 9, right=True), Column("bound", 9, right=True))


class Anomalies(View):
    """See the module."""

    title = "anomalies"

    class RoundChosen(Message):
        """An anomaly was opened."""

        def __init__(self, trouble: Trouble):
            super().__init__()
            self.trouble = trouble

    def __init__(self) -> None:
        super().__init__(id="anomalies")
        self.troubles: list[Trouble] = []
        self.summary = Lines(id="anomalies-summary")
        self.table = RowsTable("anomaly-table", "● nothing went out of its bounds")

    def compose(self) -> ComposeResult:
        yield self.summary
        yield self.table

    def show(self, moment: Moment, palette: Palette) -> None:
        self.troubles = troubles(moment)
        self.summary.show(_summary(moment, palette))
        wide = self.app.screen.size.width >= WIDE
        words = Column("in words", max(20, self.size.width - (54 if wide else 34)))
        self.table.show(
            [*PLACE, *(MEASURED if wide else ()), words],
            len(self.troubles),
            lambda i: _cells(self.troubles[i], wide, palette),
            palette.cursor,
        )

    def on_rows_table_chosen(self, event: RowsTable.Chosen) -> None:
        self.post_message(self.RoundChosen(self.troubles[event.row]))


def _summary(moment: Moment, palette: Palette) -> Text:
    """How much of the run is told, and how much of it could be read."""
    index = moment.index
    dropped = moment.latest(TelemetryDropped)
    parts = [f"{len(moment.anomalies)} anomalies"]
    if index.corrupt:
        parts.append(f"{index.corrupt} corrupt lines passed over")
    if index.unknown:
        parts.append(f"{index.unknown} lines of a kind this version does not know")
    if moment.log.cut_off and moment.line is None:
        parts.append("the last line is half written")
    if dropped is not None:
        parts.append(f"{dropped.total} steps not told: telemetry could not keep up")
    return Text(" · ".join(parts), style=palette.muted, no_wrap=True, overflow="ellipsis")


def _cells(trouble: Trouble, wide: bool, palette: Palette) -> list[Text | str]:
    measured = [
        compact(trouble.value) if trouble.value is not None or trouble.measured else "",
        "" if trouble.threshold is None else compact(trouble.threshold),
    ]
    return [
        str(trouble.round),
        "" if trouble.step is None else str(trouble.step),
        Text(f"▲ {trouble.kind}", style=palette.bad),
        *(measured if wide else ()),
        trouble.message,
    ]
