"""Runs and growing networks side by side in one Sanctum."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from esper.karn.sanctum.side_by_side import SideBySide
from esper.scripts.sanctum import find_run
from grown_modules import EPOCHS, logged_growth
from karn.sanctum.screen import lines_of, settle, until
from run_directories import recorded_run


def test_sanctum_shows_growth_and_runs_side_by_side(tmp_path: Path) -> None:
    result, run = logged_growth(tmp_path / "mine"), recorded_run(tmp_path / "run")
    events = tmp_path / "mine" / "events.jsonl"
    lines = events.read_bytes().splitlines(keepends=True)
    events.write_bytes(b"".join(lines[:3]))
    assert find_run(tmp_path / "mine") == tmp_path / "mine"

    async def body() -> Path | None:
        app = SideBySide([tmp_path / "mine", run])

        def shows(text: str) -> Callable[[], bool]:
            return lambda: text in "\n".join(lines_of(app))

        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, shows(f"grown 2/{EPOCHS}"))
            with events.open("ab") as file:
                file.write(b"".join(lines[3:]))
            await until(pilot, shows(f"twin {EPOCHS}/{EPOCHS}"))
            await settle(pilot)
            verdict = result.verdict().split(":")[0]
            assert shows(verdict)()
            assert shows(f"{result.parameters:,}")()
            assert shows("accuracy on validation, %")()
            await pilot.press("down")
            await until(pilot, shows("gain, points"))
            await pilot.press("enter")
            await until(pilot, lambda: app.return_value is not None)
        return app.return_value

    assert asyncio.run(body()) == run
