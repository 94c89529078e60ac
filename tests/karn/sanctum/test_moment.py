"""Past moments of a run, and moving between them."""

from pathlib import Path

import pytest

from esper.karn.sanctum.log import EventLog
from esper.karn.sanctum.overview_page import feed
from esper.karn.sanctum.record_pages import _summary, summary
from esper.karn.sanctum.signs import DARK
from esper.karn.sanctum.snapshot import SPEEDS, Playhead
from esper.leyline.events import (
    AnomalyDetected,
    EpisodeStarted,
    EpochCompleted,
    Event,
    SeedContributions,
    SeedGerminated,
    TelemetryDropped,
)
from karn.sanctum.events import a_round, finished, outcome, started, step, write


def opened(run: Path) -> Playhead:
    log = EventLog(run)
    while log.poll() or log.behind:
        pass
    return Playhead(log)


def playing(tmp_path: Path, *events: Event) -> Playhead:
    """A playhead over a run that has these events after its start."""
    return opened(write(tmp_path / "run", [started(), *events]))


def at(playhead: Playhead) -> tuple[int, int]:
    shown = playhead.moment().step
    assert shown is not None
    return shown.round, shown.step


def test_a_past_moment_has_no_later_events(tmp_path: Path) -> None:
    playhead = playing(tmp_path, *a_round(1), *a_round(2), finished(2))
    assert playhead.live
    assert at(playhead) == (2, 4)
    assert playhead.moment().finished is not None
    playhead.index = 4
    past = playhead.moment()
    assert at(playhead) == (2, 1)
    assert [event.round for event in past.outcomes] == [1]
    assert [event.round for event in past.updates] == [1]
    assert past.finished is None
    assert [event.step for event in past.episode(2)] == [1]
    assert past.steps == 5
    playhead.index = 3
    assert playhead.moment().outcomes == []


def test_a_step_by_hand_pauses_a_replay(tmp_path: Path) -> None:
    playhead = playing(tmp_path, *a_round(1))
    playhead.replay()
    playhead.step(2)
    assert (playhead.playing, at(playhead)) == (False, (1, 3))
    playhead.step(-1)
    assert at(playhead) == (1, 2)


def test_a_replay_passes_every_step_at_its_speed_and_ends_live(tmp_path: Path) -> None:
    playhead = playing(tmp_path, *a_round(1), *a_round(2))
    playhead.replay()
    playhead.speed = SPEEDS.index(5)
    seen, ticks = [at(playhead)], 0
    while not playhead.live and ticks < 100:
        ticks += 1
        if playhead.advance(0.1):
            seen.append(at(playhead))
    assert ticks == pytest.approx(2 * (len(seen) - 1), abs=1)
    assert seen == [(r, s) for r in (1, 2) for s in (1, 2, 3, 4)] + [(2, 4)]
    assert playhead.live


def test_speed_stays_within_its_range(tmp_path: Path) -> None:
    playhead = playing(tmp_path, *a_round(1))
    playhead.change_speed(100)
    assert playhead.steps_per_second == SPEEDS[-1]
    playhead.change_speed(-100)
    assert playhead.steps_per_second == 1


def test_steps_and_rounds_back_and_forward(tmp_path: Path) -> None:
    playhead = playing(tmp_path, *a_round(1), *a_round(2), *a_round(3))
    playhead.move(-1)
    assert at(playhead) == (3, 3)
    playhead.move_rounds(-1)
    assert at(playhead) == (3, 1)
    playhead.move_rounds(-1)
    assert at(playhead) == (2, 1)
    playhead.move(1)
    playhead.move_rounds(1)
    assert at(playhead) == (3, 1)
    playhead.move(-100)
    assert at(playhead) == (1, 1)
    playhead.show(2)
    assert at(playhead) == (2, 4)
    playhead.move(100)
    assert playhead.live


def test_pausing_holds_a_live_run(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [started(), *a_round(1), step(2, 1)])
    playhead = opened(run)
    playhead.toggle()
    write(run, [started(), *a_round(1), step(2, 1), step(2, 2)])
    playhead.log.poll()
    assert at(playhead) == (2, 1)
    assert not playhead.advance(10.0)
    playhead.follow()
    assert at(playhead) == (2, 2)


def test_a_run_without_steps_is_replayed_by_its_rounds(tmp_path: Path) -> None:
    playhead = playing(tmp_path, outcome(1), outcome(2), outcome(3))
    playhead.replay()
    assert len(playhead.moment().outcomes) == 1
    playhead.move(1)
    assert len(playhead.moment().outcomes) == 2


def test_a_resumed_run_is_not_finished(tmp_path: Path) -> None:
    events = [started(rounds=1), *a_round(1), finished(1)]
    assert opened(write(tmp_path / "a", events)).moment().finished is not None
    more = [*events, started(rounds=2, round=1), step(2, 1)]
    assert opened(write(tmp_path / "b", more)).moment().finished is None
    ended = [*more, finished(2)]
    moment = opened(write(tmp_path / "c", ended)).moment()
    assert moment.finished is not None
    assert moment.finished.round == 2


def test_a_replay_of_an_empty_run_does_nothing(tmp_path: Path) -> None:
    playhead = opened(tmp_path)
    for act in (playhead.replay, playhead.toggle, playhead.follow):
        act()
    playhead.move(3)
    playhead.move_rounds(-2)
    playhead.show(4)
    assert playhead.live
    assert playhead.moment().step is None
    assert not playhead.log.index.locations[EpochCompleted]


def test_the_feed_names_the_slot_of_the_task_that_was_played_in_that_round(tmp_path: Path) -> None:
    both = started(tasks=["a", "b"], slots=[["a0", "a1"], ["b0"]], host_parameters=[1, 2])

    def germination(round_number: int, environment: int, slot: int) -> Event:
        return SeedGerminated(
            time=round_number + environment / 10, round=round_number, step=1,
            environment=[environment], slot=[slot], blueprint=["norm"],
        )  # fmt: skip

    run = write(tmp_path / "run", [
        both, EpisodeStarted(time=1.0, round=1, task=["a", "b"], host_parameters=[1, 2]),
        germination(1, 0, 1), germination(1, 1, 0),
        EpisodeStarted(time=2.0, round=2, task=["b", "a"], host_parameters=[2, 1]), step(2, 1),
        germination(2, 0, 0), germination(3, 0, 0),
    ])  # fmt: skip
    lines = feed(opened(run).moment(), 9, DARK).plain.split("\n")
    assert [line.split("norm in ")[1] for line in lines] == ["slot 0", "b0", "b0", "a1"]


@pytest.mark.parametrize(
    ("number", "words", "steps"),
    [(1, "1 anomaly", "1 step not"), (2, "2 anomalies", "2 steps not")],
)
def test_counts_are_written_in_the_singular_and_the_plural(
    tmp_path: Path, number: int, words: str, steps: str
) -> None:
    found = AnomalyDetected(time=1.0, round=1, kind="not_finite", message="NaN")
    dropped = TelemetryDropped(time=1.0, round=1, steps=number, total=number)
    moment = opened(write(tmp_path / "run", [started(), *[found] * number, dropped])).moment()
    assert summary(moment, DARK).plain.startswith(f"▲ {words}, the last in round 1")
    assert _summary(moment, DARK).plain.startswith(f"{words} · {steps} recorded")


def test_a_contribution_is_the_last_one_of_its_seed_in_the_round(tmp_path: Path) -> None:
    def told(number: int, at: int, value: float) -> SeedContributions:
        return SeedContributions(
            time=0.0, round=number, step=at, environment=[0, 1], slot=[1, 0],
            contribution=[value, -value],
        )  # fmt: skip

    moment = playing(tmp_path, step(1, 1), told(1, 4, 0.1), told(1, 8, 0.2)).moment()
    assert moment.contribution(1, 0, 1) == 0.2
    assert moment.contribution(1, 1, 0) == -0.2
    assert moment.contribution(1, 1, 1) is None
    assert moment.contribution(2, 0, 1) is None
