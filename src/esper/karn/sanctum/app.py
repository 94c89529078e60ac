"""The Sanctum application: follows a run directory and shows its pages."""

import asyncio
import math
import os
import signal
import time
from pathlib import Path
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import ContentSwitcher, Footer

from esper.karn.runs import is_running
from esper.karn.sanctum.anomaly_page import Anomalies, summary
from esper.karn.sanctum.environment_page import Environment
from esper.karn.sanctum.header import QUIET_SECONDS, Header, Standing
from esper.karn.sanctum.help import Help
from esper.karn.sanctum.log import EventLog
from esper.karn.sanctum.overview_page import Overview
from esper.karn.sanctum.palette import DARK, LIGHT, Palette
from esper.karn.sanctum.policy_page import Policy
from esper.karn.sanctum.scoreboard_page import Scoreboard
from esper.karn.sanctum.snapshot import Playhead
from esper.karn.sanctum.widgets import WIDE, Lines, RowsTable, View

POLL_SECONDS = 0.25
FRAMES_PER_SECOND = 10
PAGES: tuple[type[View], ...] = (Overview, Policy, Environment, Anomalies, Scoreboard)


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
        self._last_data = time.monotonic()
        self._alive: bool | None = None
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
        """Yield the header, the pages and the footer."""
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
            self._last_data -= max(0.0, time.time() - last_change)
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
                self._last_data = time.monotonic()
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
        if now - self._last_data < QUIET_SECONDS:
            self._alive = None
        elif now - self._last_check > QUIET_SECONDS:
            self._alive, self._last_check = is_running(self.run_directory), now

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
        silence = time.monotonic() - self._last_data
        standing = Standing(self.log_file, self.playhead, silence, self._alive, self.at_end)
        self.header.describe(self.run_name, self.playhead.moment(), standing, self.palette)

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
