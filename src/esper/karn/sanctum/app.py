"""The Sanctum application: follows a run directory and shows its pages, a header and a help."""

import asyncio
import math
import os
import signal
import time
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import ContentSwitcher, Footer, Static

from esper.karn.runs import is_running
from esper.karn.sanctum.environment_page import Environment
from esper.karn.sanctum.log import EventLog
from esper.karn.sanctum.overview_page import Overview
from esper.karn.sanctum.policy_page import Policy, State, learning_rate
from esper.karn.sanctum.record_pages import Anomalies, Scoreboard, summary
from esper.karn.sanctum.rows import Status
from esper.karn.sanctum.signs import DARK, GLYPHS, LIGHT, Palette, gauge, number_text, stage_name
from esper.karn.sanctum.snapshot import Moment, Playhead
from esper.karn.sanctum.widgets import WIDE, Lines, RowsTable, View
from esper.leyline.phases import duration
from esper.leyline.precision_text import precision_text

POLL_SECONDS = 0.25
FRAMES_PER_SECOND = 10
QUIET_SECONDS = 10.0
"""Seconds without new data after which Sanctum reports the silence; more for a slow run."""
_QUIET_STEPS = 5.0
_RECENT = 5
PAGES: tuple[type[View], ...] = (Overview, Policy, Environment, Anomalies, Scoreboard)


class Header(Lines):
    """The two header lines."""

    def describe(self, sanctum: "Sanctum") -> None:
        """Show the run and the state of the viewer."""
        moment, palette = sanctum.playhead.moment(), sanctum.palette
        text = _identity(sanctum.run_name, moment, palette)
        text.append("\n").append_text(_status(sanctum, moment, palette)).append("  ")
        text.append_text(_progress(moment, palette, self.size.width))
        self.show(text)


class Sanctum(App[None]):
    """Show the run in a directory.

    Args:
        run: the run directory.
        light: dark text on a light background.
        owner: id of the parent process; Sanctum closes when that process ends. None: only the user
            closes Sanctum.
    """

    TITLE = "Sanctum"
    CSS_PATH = "sanctum.tcss"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (36, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"page('{page.title}')", page.title, show=False)
            for number, page in enumerate(PAGES, 1)
        ),
        Binding("space", "playhead('toggle')", "pause"),
        Binding("r", "playhead('replay')", "replay"),
        Binding("plus,equals_sign", "playhead('change_speed', 1)", "faster", show=False),
        Binding("minus", "playhead('change_speed', -1)", "slower", show=False),
        Binding("comma", "playhead('step', -1)", "step back", show=False),
        Binding("full_stop", "playhead('step', 1)", "step", show=False),
        Binding("less_than_sign", "playhead('move_rounds', -1)", "round back", show=False),
        Binding("greater_than_sign", "playhead('move_rounds', 1)", "round", show=False),
        Binding("l", "playhead('follow')", "live"),
        Binding("t", "toggle_theme", "theme", show=False),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q,ctrl+c,ctrl+q", "quit", "close", key_display="q", priority=True),
    ]

    def __init__(self, run: Path, light: bool = False, owner: int | None = None):
        super().__init__()
        self.run_directory, self.run_name = run, run.resolve().name
        self.log_file = EventLog(run)
        self.playhead = Playhead(self.log_file)
        self.owner = owner
        self.at_end = False
        self.theme = "textual-light" if light else "textual-dark"
        self.last_data = time.monotonic()
        self.alive: bool | None = None
        self._last_check = -math.inf
        # Kept as attributes: a query searches only the topmost screen, which may be the help.
        self.header, self.strip, self.tabs = (
            Header(id="header"),
            Lines(id="strip"),
            Lines(id="tabs"),
        )
        self.pages = {page.title: page() for page in PAGES}
        self.switcher = ContentSwitcher(initial=PAGES[0].title)

    def compose(self) -> ComposeResult:
        yield from (self.header, self.strip, self.tabs)
        with self.switcher:
            yield from self.pages.values()
        yield Footer()

    @property
    def palette(self) -> Palette:
        """The colours for the current background."""
        return DARK if self.current_theme.dark else LIGHT

    @property
    def page(self) -> View:
        """The current page."""
        assert self.switcher.current is not None
        return self.pages[self.switcher.current]

    def on_mount(self) -> None:
        """Start following the run and drawing."""
        last_change = self.log_file.last_change()
        if last_change is not None:
            self.last_data -= max(0.0, time.time() - last_change)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self.run_worker(self._follow(), name="follow")
        self.set_interval(1 / FRAMES_PER_SECOND, self._tick)
        self.set_interval(1.0, self._every_second)
        self.action_page(PAGES[0].title)

    async def _follow(self) -> None:
        """Read new events on another thread, so that drawing does not wait."""
        while True:
            news = await asyncio.to_thread(self.log_file.poll)
            if news and self.at_end:
                self.last_data = time.monotonic()
            if not self.log_file.behind:
                news |= not self.at_end
                self.at_end = True
            if self.at_end and news:
                self.draw()
            elif news:
                self._draw_header()
            await asyncio.sleep(0.0 if self.log_file.behind else POLL_SECONDS)

    def _tick(self) -> None:
        if self.playhead.advance(1 / FRAMES_PER_SECOND):
            self.draw()

    def _every_second(self) -> None:
        if self.owner is not None and os.getppid() != self.owner:
            self.exit()
        self._check_process()
        self._draw_header()

    def _check_process(self) -> None:
        """Check whether the run's process is alive; rarely, as the check takes the run's lock."""
        now = time.monotonic()
        if now - self.last_data < QUIET_SECONDS:
            self.alive = None
        elif now - self._last_check > QUIET_SECONDS:
            self.alive, self._last_check = is_running(self.run_directory), now

    def draw(self) -> None:
        """Show the moment at the playhead. Only the current page is drawn."""
        if not self.page.is_attached:
            return  # Sanctum is closing
        moment, palette = self.playhead.moment(), self.palette
        self._draw_header()
        text = summary(moment, palette)
        self.strip.set_class(bool(text), "-shown")
        self.strip.show(text)
        self.page.show(moment, palette)

    def _draw_header(self) -> None:
        self.header.describe(self)

    def _draw_tabs(self) -> None:
        tabs = Text()
        for i, page in enumerate(PAGES, 1):
            click = Style(
                reverse=page is type(self.page), meta={"@click": f"app.page('{page.title}')"}
            )
            tabs.append(f" {i} {page.title} ", click).append(" ")
        self.tabs.show(tabs)

    def action_page(self, title: str) -> None:
        """Show a page."""
        self.switcher.current = title
        tables = self.page.query(RowsTable)
        if tables:
            tables.first().focus()
        else:
            self.page.focus()
        self._draw_tabs()
        self.call_after_refresh(self.draw)

    def on_resize(self) -> None:
        """Draw again once the new size is known."""
        self.call_after_refresh(self.draw)

    def on_view_size_change(self) -> None:
        """Draw again: a page may get its size only after the first refresh."""
        self.draw()

    def action_playhead(self, movement: str, *by: int) -> None:
        """Move the playhead: call its method ``movement``."""
        getattr(self.playhead, movement)(*by)
        self.draw()

    def action_toggle_theme(self) -> None:
        """Switch between the dark and the light theme."""
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"
        self.draw()

    def action_help(self) -> None:
        """Show the help."""
        self.push_screen(Help(self.palette))

    def on_view_choice(self, event: View.Choice) -> None:
        """Open an environment, or the overview at the end of a round."""
        if event.round is not None:
            self.playhead.show(event.round)
        if event.environment is not None:
            page = self.pages[Environment.title]
            assert isinstance(page, Environment)
            page.environment = event.environment
        self.action_page(Overview.title if event.environment is None else Environment.title)


def _identity(name: str, moment: Moment, palette: Palette) -> Text:
    text = Text("SANCTUM ", style=palette.accent, no_wrap=True, overflow="ellipsis")
    text.append(name, style="bold")
    start = moment.start
    if start is None:
        return text
    latest = moment.snapshots[-1] if moment.snapshots else start
    is_mixed = latest.amp_enabled
    precision = precision_text(latest.amp_dtype, latest.amp_policy_dtype, is_mixed=is_mixed)
    tasks, device = " ".join(start.tasks), f"{start.device} {precision}"
    words = f"  {tasks} · {start.policy} · {device} · {start.envs} envs"
    return text.append(words, style=palette.muted)


def _progress(moment: Moment, palette: Palette, width: int) -> Text:
    start, step = moment.start, moment.step
    if start is None:
        return Text("waiting for the run's first event", style=palette.muted)
    done = moment.outcomes[-1].round if moment.outcomes else start.round
    within = 0.0
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"round {min(moment.round or 1, start.rounds)}/{start.rounds}")
    if step is not None:
        text.append(f" step {step.step}/{start.episode_length}")
        within = step.step / start.episode_length if step.round > done else 0.0
    share = (done + within) / max(1, start.rounds)
    wide = width >= WIDE - 10
    if wide:
        text.append(" ").append(gauge(share, 24), style=palette.accent)
    text.append(f" {100 * share:.0f} %")
    if moment.outcomes:
        last = moment.outcomes[-1]
        name = "gain" if last.gain else "on val."
        gain = number_text(fmean(last.gain or last.validation_gain), "+.1f")
        text.append(f"  round {last.round}: {name} {gain}")
    remaining = seconds_left(moment)
    if remaining is not None and moment.finished is None and remaining > 0:
        text.append(f"  {duration(remaining)} left")
    if moment.snapshots:
        speed = moment.snapshots[-1].environment_steps_per_second
        text.append(f"  {number_text(speed, ',.0f')} steps/s")
    # The page of the policy shows it as well.
    if wide and (rate := learning_rate(moment)) is not None:
        text.append(f"  LR {rate}")
    return text


def seconds_left(moment: Moment) -> float | None:
    """Estimate the seconds to the end of the run from its last rounds; None before the first."""
    start, snapshots = moment.start, moment.snapshots[-_RECENT:]
    if start is None or not snapshots:
        return None
    pace = fmean(float(s.rollout_seconds) + float(s.update_seconds) for s in snapshots)
    return pace * (start.rounds - snapshots[-1].round)


def _status(sanctum: "Sanctum", moment: Moment, palette: Palette) -> Text:
    """The status: reading, paused, replay, ended, silent or live."""
    playhead, end = sanctum.playhead, moment.finished
    silence = time.monotonic() - sanctum.last_data
    if not sanctum.at_end:
        share = sanctum.log_file.index.length / max(1, sanctum.log_file.size)
        return Text(f"reading, {100 * share:.0f} %", style=palette.warning)
    if not playhead.live:
        replay = f"▶ replay at {playhead.steps_per_second} steps/s"
        return Text(replay if playhead.playing else "⏸ paused", style=palette.warning)
    if end is not None:
        is_whole = end.status == "finished"
        style = palette.good if is_whole else palette.warning
        return Text(f"{'■' if is_whole else '▲'} {end.status}", style=style)
    if silence > quiet_after(moment):
        why = {None: "", True: ", but its process is alive", False: "; its process has ended"}
        words = f"▲ no new data for {duration(silence)}{why[sanctum.alive]}"
        return Text(words, style=palette.bad)
    return Text("● live", style=palette.good)


def quiet_after(moment: Moment) -> float:
    """Return after how many seconds silence is reported: the time of several steps or updates."""
    if not moment.snapshots or moment.start is None:
        return QUIET_SECONDS
    last = moment.snapshots[-1]
    rollout, update = float(last.rollout_seconds), float(last.update_seconds)
    step = rollout / max(1, moment.start.episode_length)
    interval = max(step, update) if moment.steps else rollout + update
    return max(QUIET_SECONDS, _QUIET_STEPS * interval)


KEYS: dict[str, tuple[tuple[str, str], ...]] = {
    "Pages": (
        ("1 2 3 4 5", "overview, policy, environment, anomalies, scoreboard"),
        ("Enter", "open the row under the cursor"),
        ("t", "dark or light theme"),
        ("?", "this help; Escape closes it"),
        ("q, Ctrl+C", "close Sanctum; training continues"),
    ),
    "Tables": (
        ("↑ ↓ PgUp PgDn", "move the cursor"),
        ("s  S", "overview: sort by the next column; reverse the order"),
        ("f  /  Escape", "overview: next filter; search; show all again"),
        ("←  →  w", "environment: previous, next; show or hide waits"),
    ),
    "Words": (
        ("lead", "validation accuracy above the twin's, live"),
        ("gain", "test utility above the twin's, in points"),
        ("val. difference", "the same on the validation split"),
    ),
    "Time": (
        ("Space", "pause; continue"),
        ("r", "replay from the beginning"),
        ("+  -", "faster; slower"),
        (",  .", "one step back; forward"),
        ("<  >", "one round back; forward"),
        ("l", "return to the latest data"),
    ),
}
"""All keys and some terms with their meanings, by subject."""


class Help(ModalScreen[None]):
    """The help screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "app.pop_screen", "close")
    ]

    def __init__(self, palette: Palette):
        super().__init__()
        self.palette = palette

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help"):
            yield Static(_help_text(self.palette))


def _help_text(palette: Palette) -> Text:
    text = Text()
    for subject, keys in KEYS.items():
        text.append(f"{subject}\n", style=palette.accent)
        for key, meaning in keys:
            text.append(f"  {key:<15}", style="bold").append(f"{meaning}\n")
    text.append("Stages of a slot\n", style=palette.accent)
    for stage, glyph in GLYPHS.items():
        if stage:
            end = "\n" if stage in (4, 9) else ""
            text.append(f"  {glyph} {stage_name(stage):<11}", style=palette.stage(stage)).append(
                end
            )
    statuses, states = ("  ".join(sign.value for sign in kind) for kind in (Status, State))
    return text.append_text(
        Text.assemble(
            ("\nAn environment  ", palette.accent),
            statuses,
            ("\nA head  ", palette.accent),
            states,
            "\n  missing: the head had no gradient. not finite: a value was NaN or infinite."
            "\n  no choice: the head never had more than one option.\n",
            ("Gain", palette.accent),
            " is test utility above that of the never-grow twin of the same group.",
        )
    )
