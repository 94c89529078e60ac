"""Figures of a ladder against numpy, and the gate on its headroom."""

import re
from dataclasses import replace
from html import unescape
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from scipy import stats

from esper.karn.report import write_report
from esper.karn.report.drawing import figure_style, standalone
from esper.leyline.disk import sealed_json
from esper.leyline.errors import UsageError
from esper.leyline.run_files import LADDERS
from esper_lab.evaluation import Evaluation, Rung, encoded, read_evaluation
from esper_lab.ladder_figures import ladder_picture, ladder_tables
from esper_lab.ladder_steps import Headroom, headroom, headroom_text, steps, units
from report_pages import check
from run_directories import recorded_run

HOSTS = 10
DRAWS = np.random.default_rng(0)
NAMES = [
    "never grow", "best fixed schedule", "one look", "forest", "clairvoyant per host", "policy",
]  # fmt: skip
CHOSEN = [0, 0, 0, 1, 1, 2, 2, 3, 4, 4]
"""What the clairvoyant grows: never on 30 %, five plans on 10 % or more."""


def rung(name: str, mean: float) -> Rung:
    values = (mean + 0.01 * DRAWS.normal(size=HOSTS)).tolist()
    added = DRAWS.integers(100, size=HOSTS).astype(float).tolist()
    chosen = CHOSEN if name.startswith("clair") else None
    return Rung(name, name == "policy", values, [v + 0.03 for v in values], added, chosen)


FOUND = Evaluation(
    "runs/mine", "tiny", 128, ["a", "b"] * (HOSTS // 2), [f"plan {i}" for i in range(6)],
    [rung(name, 0.4 + 0.05 * i) for i, name in enumerate(NAMES)], [None] * HOSTS,
)  # fmt: skip


def interval_of(values: np.ndarray) -> tuple[float, float, float]:
    """Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return values.mean(), values.mean() - half, values.mean() + half


@pytest.mark.parametrize("task", [None, "a"])
def test_steps_are_points_with_intervals_over_hosts(task: str | None):
    rows = np.ones(HOSTS, dtype=bool) if task is None else np.array(FOUND.tasks) == task
    found = steps(FOUND, None if task is None else rows)
    assert [step.rung for step in found] == FOUND.rungs
    never = FOUND.rungs[0]
    for step in found:
        utility, validation = np.array(step.rung.utility), np.array(step.rung.validation)
        gain = 100 * (utility - never.utility)[rows]
        above = 100 * (validation - never.validation)[rows]
        assert step.utility == pytest.approx(interval_of(100 * utility[rows]))
        assert step.gain == pytest.approx(interval_of(gain))
        assert step.validation_gain == pytest.approx(interval_of(above))
        assert step.added == pytest.approx(np.array(step.rung.added)[rows].mean())
    assert found[0].gain == (0.0, 0.0, 0.0)


def test_units_are_the_splits_where_there_are_several():
    values = np.arange(12.0)
    by_split = [1, 2, 3] * 4
    assert units(values, by_split).tolist() == [4.5, 5.5, 6.5]
    assert units(values[None], by_split).shape == (1, 3)
    for one in ([1] * 12, [None] * 12, [None, *by_split[1:]]):
        assert units(values, one).tolist() == values.tolist()


def test_intervals_are_over_splits_where_there_are_several():
    splits = [1, 2, 3, 4, 5] * 2
    found = msgspec.structs.replace(FOUND, splits=splits)
    never, grown = (np.array(FOUND.rungs[i].utility) for i in (0, 4))
    own = 100 * (grown - never).reshape(2, 5).mean(0)
    assert steps(found)[4].gain == pytest.approx(interval_of(own))
    first = np.arange(HOSTS) < 3
    assert steps(found, first)[4].gain == pytest.approx(interval_of(100 * (grown - never)[:3]))
    looking = 100 * (grown - np.array(FOUND.rungs[3].utility)).reshape(2, 5).mean(0)
    assert headroom(found).over_looking == pytest.approx(interval_of(looking))


def test_headroom_compares_the_clairvoyant_with_the_best_of_each_kind():
    found = headroom(FOUND)
    clairvoyant = np.array(FOUND.rungs[4].utility)
    assert found.never == pytest.approx(0.3)
    assert found.plans == 5
    for over, opponent in ((found.over_blind, 1), (found.over_looking, 3)):
        expected = interval_of(100 * (clairvoyant - FOUND.rungs[opponent].utility))
        assert over == pytest.approx(expected)
    assert found.passes
    assert found.over_training is None
    assert "does not grow" not in headroom_text(FOUND)


def test_headroom_names_the_best_network_that_does_not_grow():
    more = [rung("full tuning", 0.7), rung("Auto-RGN", 0.5)]
    with_baselines = msgspec.structs.replace(FOUND, rungs=[*FOUND.rungs, *more])
    found = headroom(with_baselines)
    expected = interval_of(100 * np.subtract(FOUND.rungs[4].utility, more[0].utility))
    assert found.over_training == pytest.approx(expected)
    assert found.best_training == "full tuning"
    assert f"(full tuning), the clairvoyant scores {expected[0]:+.1f} [" in headroom_text(
        with_baselines
    )
    assert found.passes


ENOUGH = Headroom(0.4, 4, (4.0, 2.0, 6.0), (2.0, 1.0, 3.0))


@pytest.mark.parametrize(
    "change",
    [
        {"never": 0.19}, {"never": 0.61}, {"plans": 3}, {"over_blind": (3.9, 2.0, 6.0)},
        {"over_blind": (4.0, 1.9, 6.0)}, *({"over_looking": x} for x in ((1.9, 1, 3), (2, 0.9, 3))),
    ],
)  # fmt: skip
def test_every_condition_of_the_gate_counts(change: dict):
    assert ENOUGH.passes
    assert not replace(ENOUGH, **change).passes


def test_the_picture_names_every_rung_and_marks_the_policy():
    with figure_style():
        drawing = ladder_picture(FOUND)
    assert drawing.svg is not None
    assert "xmlns" in drawing.svg[:300]
    for name in NAMES:
        assert name in drawing.svg
    assert "10 fresh hosts of tiny" in drawing.text
    assert "128 other hosts" in drawing.text


def test_a_picture_of_its_own_has_every_colour_that_it_uses():
    with figure_style():
        drawing = ladder_picture(FOUND).svg
    assert drawing is not None
    used = {*re.findall(r"var\((--[\w-]+)\)", drawing)}
    assert used >= {"--grid", "--muted", "--series-0"}
    assert "<style>" not in drawing
    alone = standalone(drawing)
    ElementTree.fromstring(alone)
    style = alone.split("<style>")[1].split("</style>")[0]
    for scheme in style.split("@media"):
        assert used | {"--page"} <= {*re.findall(r"(--[\w-]+): #", scheme)}


def test_the_tables_hold_every_rung_over_all_hosts_and_by_task():
    tables = ladder_tables(msgspec.structs.replace(FOUND, shipped="made here"))
    assert [table.title for table in tables] == [
        f"runs/mine on tiny{part}" for part in ("", ": a", ": b")
    ]
    assert "(made here)" in tables[0].text
    assert "30 % of the hosts; 5 plans" in tables[0].text
    for table, task in zip(tables, (None, "a", "b"), strict=True):
        rows = np.ones(HOSTS, dtype=bool) if task is None else np.array(FOUND.tasks) == task
        for row, found in zip(table.rows, FOUND.rungs, strict=True):
            assert row[0] == found.name
            assert row[1].startswith(f"{100 * np.array(found.utility)[rows].mean():.1f} [")
    one = msgspec.structs.replace(FOUND, tasks=["a"] * HOSTS)
    assert len(ladder_tables(one)) == 1


def changed(place: int, **values: object) -> Evaluation:
    rungs = list(FOUND.rungs)
    rungs[place] = msgspec.structs.replace(rungs[place], **values)
    return msgspec.structs.replace(FOUND, rungs=rungs)


DAMAGED = (
    (changed(2, utility=[0.5]), "'one look' has not one value per host"),
    (changed(4, chosen=[6] * HOSTS), "'clairvoyant per host' chooses an unknown plan"),
    (changed(4, name="other"), "controls are missing"),
    (changed(0, name="other"), "does not begin with 'never grow'"),
    (changed(2, score=[0.5]), "'one look' has not one value per host"),
    (msgspec.structs.replace(FOUND, tasks=[]), "on at least one host"),
    (msgspec.structs.replace(FOUND, rents=[0.1]), "it has not one price per host"),
)


def test_damaged_ladders_are_refused_and_the_report_shows_the_rest(tmp_path):
    folder = (run := recorded_run(tmp_path / "run", 1)) / LADDERS
    folder.mkdir()
    for name, content in (("tiny", msgspec.structs.replace(FOUND, policy="else")), ("copy", FOUND)):
        (folder / f"{name}.json").write_bytes(encoded(content))
    for number, (damaged, _) in enumerate(DAMAGED):
        (folder / f"bad{number}.json").write_bytes(encoded(damaged))
        with pytest.raises(UsageError, match=r"^evaluation: .*\.json is damaged .*evaluate again$"):
            read_evaluation(folder / f"bad{number}.json")
    text = write_report([run], tmp_path / "report.html").read_text()
    notes, page = unescape(text), check(text)
    for number, (_, says) in enumerate(DAMAGED):
        assert re.search(rf"bad{number}\.json is damaged[^\n;]*{re.escape(says)}", notes)
    assert "copy.json is of tiny; rename it" in notes
    assert "run on tiny" in page.plots
    assert "Gain over the twin" in page.plots


def test_the_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "ladder.json"
    path.write_bytes(encoded(FOUND))
    assert read_evaluation(path) == FOUND


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read"),
        (b"{", "is damaged"),
        (encoded(FOUND).replace(b"0.5", b"0.6", 1), "its checksum does not match"),
        (sealed_json({"policy": "x"}), "cannot read"),
        (encoded(msgspec.structs.replace(FOUND, schema=9)), "has schema 9, not 1"),
    ],
)
def test_an_unreadable_file_is_refused_in_one_line(tmp_path, content: bytes | None, says: str):
    path = tmp_path / "ladder.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=f"^evaluation: [^\n]*{says}[^\n]*; evaluate again$"):
        read_evaluation(path)
