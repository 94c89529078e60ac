"""The front by thirds of the price, against a loop over the hosts."""

import io
import re

import msgspec
import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from esper.karn.report.drawing import figure_style
from esper_lab.evaluate import show
from esper_lab.evaluation import Evaluation, Rung
from esper_lab.ladder_figures import ladder_picture, ladder_tables
from esper_lab.ladder_steps import (
    FRONT_HEADS,
    front,
    front_cells,
    price_range,
    step_cells,
    steps,
    training_text,
)
from tiny_population import evaluation_of

HOSTS, SIZE = 21, 400.0
DRAWS = np.random.default_rng(0)
RENTS = np.exp(DRAWS.uniform(np.log(0.02), np.log(0.3), HOSTS))
LEVELS = {
    "never grow": (0.4, 0.0), "best fixed schedule": (0.5, 300.0), "forest": (0.7, 300.0),
    "clairvoyant per host": (0.9, 200.0), "policy, greedy": (0.6, 40.0),
    "misled twin, greedy": (0.6, 40.0), "policy, sampled": (0.65, 20.0),
}  # fmt: skip
SHOWN = ("never grow", "forest", "clairvoyant per host", "policy, greedy", "policy, sampled")


def rung(name: str, level: float, parameters: float) -> Rung:
    """The policies add the fewer parameters the dearer they are."""
    score = level + DRAWS.normal(0.0, 0.03, HOSTS)
    added = np.full(HOSTS, parameters)
    if name.startswith("policy"):
        added = parameters / (RENTS * 10.0)
    utility = score - RENTS * np.log1p(added / SIZE)
    chosen = [0] * HOSTS if name.startswith("clair") else None
    policy = name.startswith("policy")
    columns = (values.tolist() for values in (utility, utility, added))
    return Rung(name, policy, *columns, chosen, score.tolist())


FOUND = evaluation_of(
    [rung(name, *levels) for name, levels in LEVELS.items()], rents=RENTS.tolist()
)
THIRDS = [sorted(range(HOSTS), key=lambda host: RENTS[host])[i : i + 7] for i in (0, 7, 14)]
"""The hosts of each third, cheapest first."""


def test_every_third_has_its_hosts_and_means_with_intervals():
    rows = front(FOUND)
    assert [row.rung for row in rows] == [*SHOWN] * 3
    named = {one.name: one for one in FOUND.rungs}
    for row, hosts in zip(rows, [own for own in THIRDS for _ in SHOWN], strict=True):
        prices = [RENTS[host] for host in hosts]
        assert row.prices == (min(prices), max(prices))
        assert row.hosts == 7
        one = named[row.rung]
        for found, column, unit in (
            (row.added, one.added, 1.0),
            (row.score, one.score, 100.0),
            (row.utility, one.utility, 100.0),
        ):
            values = unit * np.array([column[host] for host in hosts])
            half = stats.t.ppf(0.975, 6) * stats.sem(values)
            expected = values.mean(), values.mean() - half, values.mean() + half
            assert found == pytest.approx(expected, abs=1e-9)
    added = [row.added[0] for row in rows if row.rung == "policy, greedy"]
    assert added == sorted(added, reverse=True)
    assert added[0] > 3 * added[2]


def test_scores_pay_no_price():
    for row in front(FOUND):
        if row.rung == "never grow":
            assert row.score == pytest.approx(row.utility)
        elif row.rung == "forest":
            assert row.score[0] > row.utility[0] + 0.5


@pytest.mark.parametrize(
    "change",
    [
        {"rents": []},
        {"rents": [0.05] * HOSTS},
        {"rungs": [msgspec.structs.replace(one, score=None) for one in FOUND.rungs]},
    ],
)
def test_there_is_no_front_without_drawn_prices_and_scores(change: dict[str, object]):
    found = msgspec.structs.replace(FOUND, **change)
    assert front(found) == []
    assert len(ladder_tables(found)) == 1
    with figure_style():
        assert "parameters added" not in (ladder_picture(found).svg or "")


def test_the_table_is_printed_and_in_the_report():
    console = Console(file=io.StringIO(), width=140)
    show(console, FOUND)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    (table,) = (table for table in ladder_tables(FOUND) if table.title.endswith("by price"))
    assert table.columns == ["price, rung", *FRONT_HEADS]
    rows = front(FOUND)
    for row, cells in zip(rows, table.rows, strict=True):
        assert cells == [f"{price_range(row)}, {row.rung}", *front_cells(row)]
        line = rf"│ {re.escape(row.rung)} +│ +" + " │ +".join(map(re.escape, front_cells(row)))
        assert re.search(line, printed), row
    for prices in {price_range(row) for row in rows}:
        assert printed.count(f"│ {prices} │") == 1


def test_the_picture_has_a_line_for_every_rung_and_a_point_for_every_third():
    with figure_style():
        drawing = ladder_picture(FOUND)
    assert drawing.svg is not None
    assert "test accuracy, %" in drawing.svg
    assert "third of the prices" in drawing.text
    front_axes = drawing.svg.split("axes_2")[1]
    assert front_axes.count("--data-") == len(SHOWN) * (1 + 3)


def costly(doublings: dict[str, float], utility: dict[str, float], price=0.0) -> Evaluation:
    """An evaluation in which training of each rung doubles so often, on the mean of the hosts."""
    rungs = []
    for name, count in doublings.items():
        noise = DRAWS.normal(0.0, 0.5, HOSTS)
        operations = 1e6 * 2.0 ** (count + noise - noise.mean()) if count else np.full(HOSTS, 1e6)
        score = [utility[name] / 100.0] * HOSTS
        columns = [0.0] * HOSTS, [0] * HOSTS, score, operations.tolist()
        paid = (score - price * np.log(operations / 1e6)).tolist()
        rungs.append(Rung(name, name.startswith("policy"), paid, paid, *columns))
    return evaluation_of(rungs, training_prices=[price] * HOSTS)


@pytest.mark.parametrize(
    ("policy", "doublings", "expected"),
    [
        (46.0, 2.0, "0.00 to 2.00 points"),  # never growing is its equal at 2
        (44.0, 2.0, "0.50 to 1.00 points"),  # the sweep is better before
        (43.0, 1.0, "0.67 to 1.00 points"),
        (44.0, -1.0, "0.20 or more points"),
    ],
)
def test_prices_of_training_at_which_a_policy_is_best_are_those_of_a_grid(
    policy, doublings, expected
) -> None:
    names = "never grow", "five sizes, five trainings", "clairvoyant per host", "policy"
    counts = dict(zip(names, (0.0, 4.0, 0.0, doublings), strict=True))
    utility = dict(zip(names, (42.0, 45.0, 99.0, policy), strict=True))
    evaluation = costly(counts, utility)
    text = training_text(evaluation)
    assert expected in text
    low, high = float(expected[:4]), float(expected[8:12]) if "to" in expected else 9.0
    for price in (0.0, *np.linspace(0.005, 8.995, 900)):
        worth = {name: utility[name] - price * counts[name] for name in names if name[0] != "c"}
        is_best = max(worth, key=worth.__getitem__) == "policy"
        if abs(price - low) > 0.01 and abs(price - high) > 0.01:
            assert is_best == (low < price < high), price
    assert training_text(costly(counts, utility, 0.01)) == text  # what is paid is not paid twice
    for row, name in zip(steps(evaluation), names, strict=True):
        assert row.costs == pytest.approx((utility[name], counts[name]), abs=1e-6)


def test_a_policy_that_is_never_best_is_said_to_be_so_and_tables_show_the_costs() -> None:
    names = "never grow", "best fixed schedule", "forest", "clairvoyant per host", "policy"
    evaluation = costly(
        dict(zip(names, (0.0, 1.0, 1.0, 0.0, 2.0), strict=True)),
        dict(zip(names, (42.0, 41.0, 45.0, 50.0, 44.0), strict=True)),
    )
    assert "At no price of a doubling" in training_text(evaluation)
    rows = [[step.rung.name, *step_cells(step)] for step in steps(evaluation)]
    assert [t.columns[3] for t in ladder_tables(evaluation) if t.rows == rows] == ["doublings"]
    console = Console(file=io.StringIO(), width=140)
    show(console, evaluation)
    printed = console.file.getvalue()
    assert "At no price" in printed
    for row in rows:
        assert re.search(" +│ +".join(map(re.escape, row[1:])), printed), row
    assert [step.costs for step in steps(FOUND)] == [()] * len(FOUND.rungs)
    assert training_text(FOUND) == ""
