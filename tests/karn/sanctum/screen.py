"""Drive Sanctum by keys and read its screen."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from xml.etree import ElementTree

from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Footer
from textual.widgets._footer import FooterKey

from esper.karn.sanctum.app import Sanctum
from processes import WATCHDOG

RECORDED = Path(__file__).parents[2] / "recorded"
KINDS = ("healthy", "anomalous", "interrupted", "old_schema")
_CHARACTER = 12.2
"""Width of a character in Textual's screenshots."""


def text_of(svg: str) -> list[str]:
    """Return the characters of a screenshot by row, independent of fonts, colours and ids."""
    rows: dict[int, dict[int, str]] = {}
    for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        place = re.search(r"-line-(\d+)\)", element.get("clip-path", ""))
        if place is None:
            continue
        column = round(float(element.get("x", "0")) / _CHARACTER)
        row = rows.setdefault(int(place[1]), {})
        for i, character in enumerate((element.text or "").replace("\xa0", " ")):
            row[column + i] = character
    return [
        "".join(row.get(i, " ") for i in range(max(row, default=-1) + 1)).rstrip()
        for row in (rows.get(i, {}) for i in range(max(rows, default=-1) + 1))
    ]


def lines_of(app: App[None]) -> list[str]:
    """Return the characters on the screen by row."""
    return [strip.text.rstrip() for strip in app.screen._compositor.render_strips()]


def drive(
    run: Path,
    session: Callable[[Sanctum, Pilot[None]], Awaitable[None]],
    size: tuple[int, int] = (80, 24),
    light: bool = False,
) -> None:
    """Open Sanctum on ``run`` without a terminal; run ``session`` once it has read all events."""

    async def body() -> None:
        app = Sanctum(run, light)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.at_end)
            await settle(pilot)
            await session(app, pilot)

    asyncio.run(body())


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    """Wait until a condition holds, however slow the machine is."""
    end = time.monotonic() + WATCHDOG
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError
        await pilot.pause(0.02)


async def settle(pilot: Pilot[None]) -> None:
    """Wait until the screen is the same three times in a row and the footer shows the active keys.

    The content may depend on a size that is known only after the next layout, and the footer is
    rebuilt several messages after the keys have changed.
    """
    shows: list[str] = []

    def settled() -> bool:
        shows.append("\n".join(lines_of(pilot.app)))
        return len(shows) >= 3 and len(set(shows[-3:])) == 1 and footer_is_right(pilot)

    while not settled():
        await pilot.wait_for_animation()
        await pilot.pause(0.0)


def footer_is_right(pilot: Pilot[None]) -> bool:
    """Whether the footer, if there is one, shows the keys that are active now."""
    active = [active.binding for active in pilot.app.screen.active_bindings.values()]
    wanted = {binding.action for binding in active if binding.show}
    footers = pilot.app.screen.query(Footer)
    return all({key.action for key in footer.query(FooterKey)} == wanted for footer in footers)


async def press(pilot: Pilot[None], *keys: str) -> None:
    """Press keys, and wait for the screen after each."""
    for key in keys:
        await pilot.press(key)
        await settle(pilot)


def shown(
    run: Path, *keys: str, size: tuple[int, int] = (80, 24), light: bool = False
) -> list[str]:
    """Return the lines of the screen after some keys."""
    found: list[str] = []

    async def session(app: Sanctum, pilot: Pilot[None]) -> None:
        await press(pilot, *keys)
        found.extend(lines_of(app))

    drive(run, session, size, light)
    return found
