"""Formats of numbers, states of heads and environments, sorting and filtering."""

import math
from dataclasses import replace
from typing import Any

import pytest

from esper.karn.sanctum.policy_page import ROWS, State, heads
from esper.karn.sanctum.rows import FILTERS, SORTS, Row, Status, arrange
from esper.karn.sanctum.signs import (
    DARK,
    GLYPHS,
    LIGHT,
    compact,
    gauge,
    number_text,
    sparkline,
    trend,
)
from esper.leyline.actions import HEADS
from esper.leyline.anomaly_kinds import Thresholds
from esper.leyline.stages import Stage
from karn.sanctum.events import update

MIN_NORM, MIN_ENTROPY = Thresholds().gradient_vanishing, Thresholds().entropy_collapse


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "missing"), ("NaN", "NaN"), ("Infinity", "Inf"), ("-Infinity", "-Inf"), (0.0, "0.000")],
)
def test_missing_and_non_finite_values_are_never_written_as_numbers(value: Any, shown: str) -> None:
    assert number_text(value) == shown
    if value != 0.0:
        assert compact(value) == shown


def test_numbers_of_any_size_take_eight_characters() -> None:
    for exponent in range(-300, 300):
        assert len(compact(-1.2345 * 10.0**exponent)) <= 9
        assert len(compact(1.2345 * 10.0**exponent)) <= 8


def test_a_sparkline_marks_missing_and_non_finite_values() -> None:
    assert sparkline([0.0, 1.0, None, "NaN", 0.5], 5) == "▁█·×▅"
    assert sparkline([3.0, 3.0], 5) == "▁▁"
    assert sparkline([1.0, 2.0, 3.0], 2) == "▁█"
    assert sparkline([], 5) == ""


def test_trends() -> None:
    assert trend([1.0, 1.0, 2.0, 2.0]) == "▲"
    assert trend([2.0, "NaN", 2.0, None, 1.0, 1.0]) == "▼"
    assert trend([1.0, 1.01]) == "="
    assert trend([1.0]) == " "
    assert trend([None, "NaN"]) == " "


def test_gauges() -> None:
    assert gauge(1.0, 4) == "████"
    assert gauge(0.5, 4) == "██  "
    assert gauge(-1.0, 4) == "    "


def state_of(head: str, metrics: dict[str, Any]) -> State:
    (found,) = [h for h in heads([update(1, **metrics)]) if h.name == head]
    return found.state


@pytest.mark.parametrize(
    ("metrics", "state"),
    [
        ({}, State.MISSING), ({"head_grad_norms/op": None, "head_entropy/op": 1.0}, State.MISSING),
        ({"head_grad_norms/op": "NaN", "head_entropy/op": 1.0}, State.NOT_FINITE),
        ({"head_grad_norms/op": "Infinity", "head_entropy/op": 1.0}, State.NOT_FINITE),
        ({"head_grad_norms/op": 0.1, "head_entropy/op": "NaN"}, State.NOT_FINITE),
        ({"head_grad_norms/op": 0.0, "head_entropy/op": 0.0}, State.IDLE),
        ({"head_grad_norms/op": 0.1, "head_entropy/op": 0.9, "head_choice/op": 0.0}, State.IDLE),
        ({"head_grad_norms/op": 0.0, "head_entropy/op": 1.0}, State.VANISHING),
        ({"head_grad_norms/op": 0.9 * MIN_NORM, "head_entropy/op": 1.0}, State.VANISHING),
        ({"head_grad_norms/op": 1.1 * MIN_NORM, "head_entropy/op": 1.0}, State.HEALTHY),
        ({"head_grad_norms/op": 1e9, "head_entropy/op": 1.0}, State.EXPLODING),
        ({"head_grad_norms/op": 0.1, "head_entropy/op": 0.9 * MIN_ENTROPY}, State.COLLAPSE),
        ({"head_grad_norms/op": 0.1, "head_entropy/op": 1.1 * MIN_ENTROPY}, State.HEALTHY),
        ({"head_grad_norms/op": 0.1, "head_entropy/op": 1.0}, State.HEALTHY),
        ({"head_grad_norms/op": 0.1}, State.HEALTHY),
    ],
)  # fmt: skip
def test_the_state_of_a_head(metrics: dict[str, Any], state: State) -> None:
    assert state_of("op", metrics) is state


@pytest.mark.parametrize(
    ("count", "variance", "state"),
    [(4, 0.008, State.HEALTHY), (5, 0.008, State.BLIND), (5, 0.4, State.HEALTHY)],
)
def test_a_critic_that_explains_nothing_is_not_healthy_once_that_can_be_known(
    count: int, variance: float, state: State
) -> None:
    metrics = {"head_grad_norms/value": 0.2, "explained_variance": variance}
    updates = [update(i + 1, **metrics) for i in range(count)]
    assert heads(updates)[-1].state is state


def test_every_head_and_the_critic_have_a_row() -> None:
    assert [head.name for head in heads([update(1)])] == [*HEADS, "value"]
    assert state_of("value", {"head_grad_norms/value": 0.2}) is State.HEALTHY
    assert (*HEADS, "value") == ROWS


ROW = Row(
    environment=3, task="digits", accuracy=0.5, twin=0.45, loss=1.0, reward=0.1,
    stages=[Stage.DORMANT, Stage.TRAINING], blueprints=["noop", "conv_heavy"], op="wait",
    success=True, added_parameters=0, rolled_back=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"accuracy": math.nan}, Status.NOT_FINITE),
        ({"loss": math.inf, "rolled_back": True}, Status.NOT_FINITE),
        ({"rolled_back": True, "accuracy": 0.1}, Status.ROLLED_BACK),
        ({"accuracy": 0.40}, Status.BEHIND),
        ({}, Status.GROWING),
        ({"stages": [Stage.FOSSILISED, Stage.DORMANT], "added_parameters": 9}, Status.GROWN),
        ({"stages": [Stage.DORMANT, Stage.EMBARGOED]}, Status.PLAIN),
    ],
)
def test_the_status_of_an_environment(changes: dict[str, Any], status: Status) -> None:
    assert replace(ROW, **changes).status is status


def test_sorting_and_filtering() -> None:
    rows = [
        replace(ROW, environment=i, accuracy=a, added_parameters=n, stages=s)
        for i, (a, n, s) in enumerate(
            [
                (0.5, 0, [Stage.DORMANT, Stage.TRAINING]),
                (0.9, 5, [Stage.DORMANT, Stage.FOSSILISED]),
                (0.1, 0, [Stage.DORMANT, Stage.DORMANT]),
                (math.nan, 0, [Stage.DORMANT, Stage.DORMANT]),
            ]
        )
    ]

    def order(sort: str, reverse: bool = False, keep: str = "all", words: str = "") -> list[int]:
        return [row.environment for row in arrange(rows, sort, reverse, keep, words)]

    assert order("env") == [0, 1, 2, 3]
    assert order("lead") == [3, 1, 0, 2]
    assert order("lead", reverse=True) == [2, 0, 1, 3]
    assert order("status") == [3, 2, 0, 1]
    assert order("env", keep="in trouble") == [2, 3]
    assert order("env", keep="grown") == [1]
    assert order("env", words="Conv_Heavy training") == [0]
    assert order("env", words="nothing") == []
    for sort in SORTS:
        for keep in FILTERS:
            assert set(order(sort, keep=keep)) <= {0, 1, 2, 3}


def test_every_meaning_has_a_glyph_of_its_own() -> None:
    assert set(GLYPHS) == {0, *Stage}
    assert len(set(GLYPHS.values())) == len(GLYPHS)
    for kind in (State, Status):
        glyphs = [member.value.split()[0] for member in kind]
        assert len(set(glyphs)) == len(glyphs)


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_have_enough_contrast_on_their_background() -> None:
    for palette, ground in ((DARK, "#242f38"), (LIGHT, "#d0d0d0")):
        roles = ("good", "bad", "warning", "muted", "accent", "grown", "twin")
        styles = [*palette.stages.values(), *(getattr(palette, role) for role in roles)]
        for style in styles:
            pair = sorted([luminance(style.split()[-1]), luminance(ground)])
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, style
