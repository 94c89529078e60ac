"""Sanctum, driven as by a user."""

import os
import re
import time
from pathlib import Path

import pytest
from textual.pilot import Pilot

from esper.karn.sanctum.app import KEYS, PAGES, Sanctum
from esper.karn.sanctum.policy_page import ROWS
from esper.karn.sanctum.signs import GLYPHS, stage_name
from esper.karn.sanctum.widgets import RowsTable
from esper.leyline.events import AnomalyDetected, TrainingFinished, encode
from esper.leyline.stages import Stage
from karn.sanctum.events import a_round, finished, outcome, snapshot, started, step, update, write
from karn.sanctum.screen import (
    KINDS,
    RECORDED,
    drive,
    lines_of,
    press,
    settle,
    shown,
    text_of,
    until,
)

EXPECTED = Path(__file__).parent / "screens"


def screen(app: Sanctum) -> str:
    return "\n".join(lines_of(app))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_recorded_runs_open_on_every_page(kind: str) -> None:
    async def session(app: Sanctum, pilot: Pilot[None]) -> None:
        for number, page in enumerate(PAGES, 1):
            await press(pilot, str(number))
            text = screen(app)
            assert f"SANCTUM {kind}" in text
            assert app.page.title == page.title
            assert text.count("\n") == 24 - 1
        await press(pilot, "r", "space", "full_stop", "less_than_sign", "1")
        assert "paused" in screen(app)

    drive(RECORDED / kind, session)


@pytest.mark.parametrize("kind", ["healthy", "anomalous"])
@pytest.mark.parametrize("size", [(80, 24), (160, 50)], ids=str)
def test_the_screens_are_those_recorded(kind: str, size: tuple[int, int]) -> None:
    """After an intended change, run ``python scripts/make_screenshots.py --expected``."""
    screens: dict[str, str] = {}

    async def session(app: Sanctum, pilot: Pilot[None]) -> None:
        for number, page in enumerate(PAGES, 1):
            await press(pilot, str(number))
            screens[page.title] = screen(app)
            assert text_of(app.export_screenshot()) == lines_of(app)

    drive(RECORDED / kind, session, size)
    for page, text in screens.items():
        path = EXPECTED / f"{kind}-{page}-{size[0]}x{size[1]}.txt"
        assert text == path.read_text().rstrip("\n"), page


def test_every_page_is_recorded_in_both_sizes() -> None:
    kinds = [path.stem.split("-") for path in EXPECTED.glob("*.txt")]
    assert len(kinds) == 2 * len(PAGES) * 2
    assert {page for _, page, _ in kinds} == {page.title for page in PAGES}
    assert {size for _, _, size in kinds} == {"80x24", "160x50"}


def test_sanctum_is_dark_unless_asked() -> None:
    assert Sanctum(RECORDED / KINDS[0]).theme == "textual-dark"
    assert Sanctum(RECORDED / KINDS[0], light=True).theme == "textual-light"


def test_light_and_dark_themes_show_the_same_text() -> None:
    screens: dict[bool, list[str]] = {}

    async def session(app: Sanctum, pilot: Pilot[None]) -> None:
        for _ in range(2):
            found = screens.setdefault(app.current_theme.dark, [])
            for number in range(1, len(PAGES) + 1):
                await press(pilot, str(number))
                found.append(screen(app))
            await press(pilot, "t")

    drive(RECORDED / "healthy", session)
    assert len(screens[True]) == len(PAGES)
    assert screens[True] == screens[False]
    assert "\n".join(shown(RECORDED / "healthy", light=True)) == screens[True][0]


def test_the_overview_shows_every_environment_and_opens_one() -> None:
    lines = shown(RECORDED / "healthy", "1")
    rows = [line.split() for line in lines if re.match(r" +\d+ +0\.\d{3} ", line)]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    opened = shown(RECORDED / "healthy", "down", "down", "enter")
    assert any("environment 2 " in line for line in opened)


def test_the_overview_sorts_reverses_filters_and_searches() -> None:
    async def session(app: Sanctum, pilot: Pilot[None]) -> None:
        async def order(*keys: str) -> list[int]:
            await press(pilot, *keys)
            return [int(n) for n in re.findall(r"^ +(\d+) +0\.\d{3} ", screen(app), re.MULTILINE)]

        by_accuracy = await order("s")
        assert sorted(by_accuracy) == list(range(6))
        assert by_accuracy != list(range(6))
        assert await order("S") == by_accuracy[::-1]
        narrowed = await order("slash", *"conv_heavy", "enter")
        assert 0 < len(narrowed) < 6
        assert "showing all with “conv_heavy”" in screen(app)
        assert sorted(await order("escape")) == list(range(6))
        assert await order("f", "f") == []
        assert "showing grown: 0 of 6" in screen(app)

    drive(RECORDED / "healthy", session)


def test_a_click_on_a_heading_sorts_by_its_column() -> None:
    async def session(app: Sanctum, pilot: Pilot[None]) -> None:
        def order() -> list[str]:
            return re.findall(r"^ +(\d+) +0\.\d{3} ", screen(app), re.MULTILINE)

        table = app.screen.query_one("#environments", RowsTable)
        heading = next(line for line in screen(app).splitlines() if "val. acc" in line)
        by_number = order()
        await pilot.click(table, offset=(heading.index("acc") - table.region.x, 0))
        await settle(pilot)
        assert sorted(order()) == sorted(by_number) != order()

    drive(RECORDED / "healthy", session)


def test_the_decision_under_the_cursor_is_the_one_explained() -> None:
    first, second = (
        shown(RECORDED / "healthy", "3", *keys) for keys in (("tab",), ("tab", "down"))
    )
    assert first != second


def test_the_policy_page_distinguishes_missing_from_nan() -> None:
    text = "\n".join(shown(RECORDED / "anomalous", "2"))
    assert re.search(r"^ style .* NaN .* ✖ not finite", text, re.MULTILINE)
    assert re.search(r"^ tempo .* missing .* ∅ missing", text, re.MULTILINE)
    assert re.search(r"^ op .* 0\.\d+ .* ● healthy", text, re.MULTILINE)


def test_the_environment_page_shows_lives_decisions_and_masks() -> None:
    text = "\n".join(shown(RECORDED / "healthy", "3", "right", "right"))
    assert "environment 2 " in text
    assert re.search(r"r0c1 ○+◔+◑+", text)
    assert re.search(r"set alpha +41 % ✓ +r1c1 to 0\.7", text)
    assert "legal: " in text
    assert "wait" not in text.split("where and what")[1].split("legal")[0]
    assert "wait" in "\n".join(shown(RECORDED / "healthy", "3", "w")).split("where and what")[1]
    wide = "\n".join(shown(RECORDED / "healthy", "3", size=(160, 50)))
    assert "not legal" in wide
    assert "log-prob" in wide


def test_a_run_of_an_older_schema_can_be_shown() -> None:
    text = "\n".join(shown(RECORDED / "old_schema", "3"))
    assert "legal ops were not recorded" in text
    assert re.search(r"germinate +- ", text)


def test_the_scoreboard_and_the_anomalies_open_their_moment() -> None:
    best = "\n".join(shown(RECORDED / "healthy", "5", "enter"))
    assert "paused" in best
    assert "environment " in best
    trouble = "\n".join(shown(RECORDED / "anomalous", "4", "end", "enter"))
    assert "round 4/6" in trouble


def test_help_lists_every_key() -> None:
    lines = shown(RECORDED / "healthy", "question_mark", size=(100, 50))
    begin = next(i for i, line in enumerate(lines) if "Stages of a slot" in line)
    for line, stages in zip(lines[begin + 1 :], (range(1, 5), range(5, 10)), strict=False):
        for stage in GLYPHS.keys() & set(stages):
            assert GLYPHS[stage] in line
            assert stage_name(stage) in line
    text = " ".join(lines)
    for keys in KEYS.values():
        for key, meaning in keys:
            assert key in text
            assert meaning in text
    key_names = " ".join(key for keys in KEYS.values() for key, _ in keys)
    names = {
        "slash": "/", "plus": "+", "minus": "-", "comma": ",", "full_stop": ".", "left": "←",
        "less_than_sign": "<", "greater_than_sign": ">", "question_mark": "?", "right": "→",
        "space": "Space", "escape": "Escape",
    }  # fmt: skip
    bound = [key for kind in (Sanctum, *PAGES) for key, *_ in map(first_key, kind.BINDINGS)]
    for key in bound:
        assert names.get(key, key) in key_names, key
    assert "overview" not in " ".join(shown(RECORDED / "healthy", "question_mark", "escape")[5:])


def first_key(binding: object) -> tuple[str]:
    return (str(getattr(binding, "key", "")).split(",")[0],)


def test_a_run_is_followed_and_its_silence_reported(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [started(), *a_round(1)])

    async def session(app: Sanctum, pilot: Pilot[None]) -> None:
        app.last_data = time.monotonic()
        await until(pilot, lambda: "● live" in screen(app))
        assert "round 1/3 step 4/4" in screen(app)
        assert "2 s left" in screen(app)
        with (run / "events.jsonl").open("ab") as file:
            half = encode(step(2, 1, reward=[0.125, 7.5]))
            file.write(half[:99])
            file.flush()
            await pilot.pause(0.5)
            assert "round 1/3 step 4/4" in screen(app)
            file.write(half[99:] + b"\n")
        await until(pilot, lambda: "round 2/3 step 1/4" in screen(app))
        assert "+7.500" in screen(app)
        app.last_data = time.monotonic() - 12
        await until(pilot, lambda: "▲ no new data for 1" in screen(app))
        await until(pilot, lambda: "its process has ended" in screen(app))
        with (run / "events.jsonl").open("ab") as file:
            file.write(encode(finished(2)) + b"\n")
        await until(pilot, lambda: "■ finished" in screen(app))

    drive(run, session)


@pytest.mark.parametrize(
    ("seconds", "age", "words"),
    [(1.0, 3 * 3600, "no new data for 3 h 0 min"), (40.0, 30, "live")],
    ids=["an old file", "a slow run"],
)
def test_silence_is_reported_at_once_but_not_of_a_slow_run(tmp_path, seconds, age, words) -> None:
    events = [*a_round(1)[:-2], snapshot(1, seconds=seconds), outcome(1)]
    run = write(tmp_path / "run", [started(), *events])
    past = time.time() - age
    os.utime(run / "events.jsonl", (past, past))
    assert words in shown(run)[1]


def test_a_resumed_run_is_shown_as_it_is_now(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [started(), *a_round(1), *a_round(2), step(3, 1)])

    async def session(app: Sanctum, pilot: Pilot[None]) -> None:
        assert "round 3/3 step 1/4" in screen(app)
        write(run, [started(), *a_round(1), started(round=1, time=9.0), step(2, 1, time=9.5)])
        await until(pilot, lambda: "round 2/3 step 1/4" in screen(app))

    drive(run, session)


def test_a_replay_is_watched_and_left(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [started(), *a_round(1), *a_round(2), *a_round(3), finished(3)])

    async def session(app: Sanctum, pilot: Pilot[None]) -> None:
        app.playhead.speed = 1
        await press(pilot, "r")
        assert "▶ replay at 2 steps/s" in screen(app)
        await press(pilot, "plus")
        assert "▶ replay at 5 steps/s" in screen(app)
        await until(pilot, lambda: "step 3/4" in screen(app))
        await press(pilot, "space")
        assert "⏸ paused" in screen(app)
        await press(pilot, "l")
        assert "■ finished" in screen(app)

    drive(run, session)


def test_an_empty_run_can_be_opened(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert "waiting for the run's first event" in shown(run)[1]

    async def session(app: Sanctum, pilot: Pilot[None]) -> None:
        for number in range(1, len(PAGES) + 1):
            await press(pilot, str(number), "down", "enter", "r")
            assert app.is_running

    drive(run, session, (160, 50))


def test_a_run_of_level_minimal_shows_its_rounds(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [started(), update(1), snapshot(1), outcome(1, [0.5, 0.75])])
    overview = "\n".join(shown(run))
    assert re.search(r"1 +0\.750 +\+0\.350", overview)
    assert "telemetry level normal" in "\n".join(shown(run, "3"))


def test_the_gain_is_on_test_with_validation_beside_it_once_an_episode_is_over(tmp_path) -> None:
    told = outcome(1)
    told.test_utility, told.twin_test_utility = [0.5, 0.75], [0.25, 0.25]
    told.utility, told.twin_utility = [0.5, 0.5], [0.4, 0.4]
    run = write(tmp_path / "run", [started(), step(1, 1)])
    assert "gain" not in "\n".join(shown(run)[3:])
    assert "lead" in "\n".join(shown(run, "3"))
    write(run, [started(), *a_round(1)[:-1], told])
    assert "round 1: gain +37.5  val. difference +10.0" in "\n".join(shown(run))
    assert "gain +25.0 (val. +10.0)" in "\n".join(shown(run, "3"))
    best = [line.split()[:4] for line in shown(run, "5") if re.match(r" +\+", line)]
    assert best == [
        ["+50.0", "+10.0", "1", "1"],
        ["+25.0", "+10.0", "1", "0"],
        ["+37.5", "+10.0", "1", "0.550"],
    ]


def test_an_older_run_shows_a_dash_for_the_gain() -> None:
    assert re.search(r"gain -  val. difference [+-]\d", "\n".join(shown(RECORDED / "old_schema")))
    board = "\n".join(shown(RECORDED / "old_schema", "5"))
    assert re.search(r"^ +- +[+-]\d+\.\d +\d", board, re.MULTILINE)


def test_values_that_are_not_finite_or_unknown_do_not_crash_sanctum(tmp_path: Path) -> None:
    bad = step(
        1, 1, validation_accuracy=["NaN", 0.5], train_loss=["Infinity", 1.0], reward=["NaN", 0.0],
        stage=[[Stage.BLENDING, 99], [0, 0]], blueprint=[[500, 1], [0, 0]],
        alpha=[["NaN", 0.5], [0.0, 0.0]], op=[77, 0],
    )  # fmt: skip
    run = write(tmp_path / "run", [started(), bad])

    async def session(app: Sanctum, pilot: Pilot[None]) -> None:
        assert "✖ not finite" in screen(app)
        for number in range(2, len(PAGES) + 1):
            await press(pilot, str(number))
            assert app.is_running
        await press(pilot, "3")
        assert "blueprint 500" in screen(app)
        assert "op 77" in screen(app)

    drive(run, session, (160, 50))


def test_control_characters_in_names_are_not_printed(tmp_path: Path) -> None:
    name = b"run-\xff\x1b[2J"
    wild = "\x1b]0;owned\x07\r\x9b31m"
    anomaly = AnomalyDetected(time=9.0, round=1, kind=f"odd{wild}", message=f"{wild} thing")
    ended = TrainingFinished(time=9.5, round=1, status=f"failed{wild}")
    events = [started(tasks=[f"digits{wild}"]), step(1, 1), anomaly, ended]
    run = write(tmp_path / os.fsdecode(name), events)

    async def session(app: Sanctum, pilot: Pilot[None]) -> None:
        for number in range(1, len(PAGES) + 1):
            await press(pilot, str(number))
            drawn = "".join(
                s.text for strip in app.screen._compositor.render_strips() for s in strip
            )
            assert drawn.isprintable()
            assert "SANCTUM run-" in drawn
        drawn.encode()

    drive(run, session)


def test_many_slots_and_many_environments_fit(tmp_path: Path) -> None:
    count, slots = 300, 12
    wide = step(
        1, 1, stage=[[Stage.TRAINING] * slots] * count, blueprint=[[1] * slots] * count,
        alpha=[[0.5] * slots] * count, op=[0] * count, slot=[0] * count, success=[True] * count,
        added_parameters=[1] * count,
        **{
            name: [0.25] * count
            for name in (
                "train_loss", "train_accuracy", "validation_loss", "validation_accuracy",
                "expected_accuracy", "twin_validation_accuracy", "twin_expected_accuracy", "reward",
            )
        },
    )  # fmt: skip
    run = write(tmp_path / "run", [started(envs=count), wide])
    text = "\n".join(shown(run, "end"))
    assert re.search(r"^ +299 ", text, re.MULTILINE)
    assert re.search(r"^ +285 ", text, re.MULTILINE)
    assert "environment 299" in "\n".join(shown(run, "3", "left"))
    first = max(map(int, re.findall(r"^ +(\d+) ", "\n".join(shown(run)), re.MULTILINE)))
    assert f"environment {first} " in "\n".join(shown(run, "pagedown", "enter"))


def test_every_head_is_visible_at_80x24() -> None:
    lines = shown(RECORDED / "healthy", "2")
    for head in ROWS:
        found = [line for line in lines if re.match(rf" {head} .* [●○·∅✖▲▽▬] [a-z ]+$", line)]
        assert len(found) == 1, head
