"""Every word of a report, and the size of every picture, as they were recorded; no plot is empty.

After a change that is meant: ``python tests/karn/test_report_pages.py``, and read the difference.
"""

import re
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from esper.karn.report import write_report
from esper.leyline.events import Event, GrowthEpochCompleted, GrowthFinished, GrowthStarted, encode
from report_pages import check

RECORDED = Path(__file__).parents[1] / "recorded"
PAGES = RECORDED / "pages"
RUNS = {
    **{name: (name,) for name in ("healthy", "anomalous", "interrupted", "old_schema")},
    "side_by_side": ("healthy", "anomalous"),
    "grown": ("grown",),
    "grown_side_by_side": ("grown", "growing"),
}


class Words(HTMLParser):
    """The text of a page: a line for each element that has some, and one for each picture, with
    its size and its words."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._hidden, self._in_picture = "", False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("style", "script"):
            self._hidden = tag
        elif tag == "svg":
            self.lines.append(f"picture {dict(attrs).get('viewbox')}")
            self._in_picture = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "svg":
            self._in_picture = False
        elif tag == self._hidden:
            self._hidden = ""

    def handle_data(self, data: str) -> None:
        words = " ".join(data.split())
        if self._hidden or not words:
            return
        if self._in_picture:
            self.lines[-1] += f" | {words}"
        else:
            self.lines.append(words)


def growth(policy: str, tries: int, ends: bool) -> list[Event]:
    """What a growth of three epochs tells, whose module gains 6 points on its twin."""
    events: list[Event] = [
        GrowthStarted(
            time=1.0, schema=4, model="Net", policy=policy, epochs=3, tries=tries, price=0.01,
            parameters=90,
        )
    ]  # fmt: skip
    variants = [("grown", 1), ("grown", 2), ("twin", 1)] if tries > 1 else [("grown", 1)]
    for variant, attempt in variants:
        for epoch in range(1, 4):
            is_grown = variant == "grown" and epoch > 1
            events.append(
                GrowthEpochCompleted(
                    time=1.0 + epoch, variant=variant, attempt=attempt, epoch=epoch,
                    unit="accuracy", figure=0.5 + 0.1 * epoch + 0.06 * is_grown,
                    loss=1.0 / epoch, train_loss=0.9 / epoch, parameters=180 if is_grown else 90,
                    stages={"layer": "TRAINING"} if policy == "rule" and is_grown else {},
                    actions=["layer: 4 -> 8 channels"] if is_grown and epoch == 2 else [],
                )
            )  # fmt: skip
    if ends:
        events.append(
            GrowthFinished(
                time=9.0, unit="accuracy", validation=[0.86, 0.8], parameters=[180, 90],
                seconds=[4.0, 2.0], paid=True, verdict="growth paid: 86.0 % against 80.0 %",
                grew={"layer": "4 -> 8 channels"}, test=[0.85, 0.81],
            )
        )  # fmt: skip
    return events


def page_of(name: str, work: Path) -> str:
    """The recorded report ``name``."""
    for folder, events in (
        ("grown", growth("widen", 2, True)),
        ("growing", growth("rule", 1, False)),
    ):
        (work / folder).mkdir(exist_ok=True)
        (work / folder / "events.lock").touch()
        lines = b"".join(encode(event) + b"\n" for event in events)
        (work / folder / "events.jsonl").write_bytes(lines)
    runs = [work / run if run.startswith("grow") else RECORDED / run for run in RUNS[name]]
    page = write_report(runs, work / f"{name}.html").read_text(encoding="utf-8")
    return re.sub(f"{re.escape(str(work))}|{re.escape(str(RECORDED))}", "PLACE", page)


def words(page: str) -> str:
    """The text of a report."""
    parser = Words()
    parser.feed(page)
    return "\n".join(parser.lines) + "\n"


@pytest.mark.parametrize("name", RUNS)
def test_a_report_has_the_words_that_were_recorded_and_no_empty_plot(
    name: str, tmp_path: Path
) -> None:
    text = page_of(name, tmp_path)
    assert words(text) == (PAGES / f"{name}.txt").read_text(encoding="utf-8")
    page = check(text)
    if name.startswith("grown"):
        return
    for axes in page.plots["Time per round"].axes:
        assert len([curve for curve in axes.curves if len(curve) > 1]) >= 2
    # A bar for each stage of each life, not only the axes.
    stages = {f"var(--stage-{name})" for name in ("germinated", "training")}
    assert all(stage in page.text for stage in stages)


if __name__ == "__main__":
    for each in RUNS:
        with tempfile.TemporaryDirectory() as place:
            text = words(page_of(each, Path(place)))
            (PAGES / f"{each}.txt").write_text(text, encoding="utf-8")
