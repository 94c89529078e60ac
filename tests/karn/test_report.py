"""The report is one self-contained page without empty plots."""

import os
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from esper.karn.report import curves, drawing, write_report
from esper.karn.report.drawing import figure_style, new_figure, picture
from esper.karn.report.gather import RunData
from esper.karn.report.tables import seed_table
from esper.leyline.errors import UsageError
from esper.leyline.events import (
    AnomalyDetected,
    GovernorRollback,
    TelemetryDropped,
    TrainingFinished,
)
from report_pages import Page, check
from run_directories import (
    changed,
    finished,
    outcome,
    recorded_run,
    started,
    update,
    whole_round,
    write_run,
)

RECORDED = Path(__file__).parents[1] / "recorded"


def report(*runs: Path, to: Path) -> Page:
    """Write and check the report about ``runs``; return the page."""
    return check(write_report(runs, to / "report.html").read_text(encoding="utf-8"))


def test_runs_side_by_side_share_axes_and_list_differing_settings(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [started(), *whole_round(1), *whole_round(2)], lr=1)
    two = write_run(tmp_path / "two", [started(), *whole_round(1)], lr=2)
    page = report(one, two, to=tmp_path)
    curves = [len(curve) for curve in page.plots["Gain over the twin"].axes[0].curves]
    assert curves.count(2) == 1, "the run of two rounds has a curve through two points"
    assert curves.count(1) == 1
    assert {"one", "two"} <= set(page.plots["Gain over the twin"].words)
    rows = re.findall(r"<tr>(.*?)</tr>", page.text, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    assert ["lr", "1", "2"] in cells
    assert not [row for row in cells if row[0] == "envs"], "a setting in which they agree"
    gains = next(row for row in cells if row[0] == "gain, points")
    assert gains[1:] == ["+2.0 [+2.0, +2.0]", "+1.0 [+1.0, +1.0]"]


def test_two_runs_with_the_same_name_get_numbered_labels(tmp_path: Path) -> None:
    runs = [recorded_run(tmp_path / parent / "run", 1) for parent in "ab"]
    page = report(*runs, to=tmp_path)
    assert {"run (1)", "run (2)"} <= set(page.plots["Gain over the twin"].words)


def test_the_same_run_gives_the_same_report(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", 2)
    write_report([run], tmp_path / "one.html")
    write_report([run], tmp_path / "two.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_blueprints_that_germinated_equally_often_are_sorted_by_name() -> None:
    """The order of a set would differ between processes."""
    table = seed_table(RunData(RECORDED / "healthy"), several=False)
    assert table is not None
    locations = [(-int(row[1]), row[0]) for row in table.rows]
    assert locations == sorted(locations)
    assert len({times for times, _ in locations}) < len(locations)


def test_names_in_a_run_are_escaped(tmp_path: Path) -> None:
    page = report(recorded_run(tmp_path / "<b>run", 1), to=tmp_path)
    assert "a&lt;b: ppo" in page.text
    assert "a<b" not in page.text
    assert "b" not in page.tags


def test_directories_may_have_any_name(tmp_path: Path) -> None:
    names = [b"_run", rb"$\frac$", b"run\xff\x1b"]
    runs = [recorded_run(tmp_path / os.fsdecode(name), 1) for name in names]
    page = report(*runs, to=tmp_path)
    shown = {"run _run", r"$\frac$", r"run\udcff\x1b"}
    assert shown <= set(page.plots["Gain over the twin"].words)


def test_a_run_that_does_not_learn_says_so_in_place_of_the_plots(tmp_path: Path) -> None:
    page = report(recorded_run(tmp_path / "run", 2, learns=False), to=tmp_path)
    assert "There are no policy updates" in page.text
    assert not {"Updates", "Schedules", "Entropy of each head"} & page.plots.keys()


def test_one_environment_has_a_curve_but_no_interval(tmp_path: Path) -> None:
    page = report(recorded_run(tmp_path / "run", 2, envs=1), to=tmp_path)
    (axes,) = page.plots["Gain over the twin"].axes
    assert [len(curve) for curve in axes.curves] == [2]
    assert "[" not in re.search(r"gain, points</th><td>(.*?)</td>", page.text)[1]


def test_the_report_of_a_run_in_its_first_round_explains_missing_plots(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run", [started()]), to=tmp_path)
    assert page.plots == {}
    for sentence in ("has not completed a round", "No round is complete yet", "No round was timed"):
        assert sentence in page.text


def test_without_seed_events_the_report_says_why_there_are_no_lives(tmp_path: Path) -> None:
    quiet = write_run(tmp_path / "quiet", [started(level="minimal"), outcome(1)])
    assert "--telemetry-level normal and above" in report(quiet, to=tmp_path).text
    barren = write_run(tmp_path / "barren", [started(level="normal"), outcome(1)])
    assert "No seed germinated" in report(barren, to=tmp_path).text


def test_values_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    bad = outcome(2, accuracy=["NaN", "Infinity", 0.5, 0.7], utility=["NaN"] * 4)
    run = write_run(tmp_path / "run", [started(), *whole_round(1), bad])
    page = report(run, to=tmp_path)
    assert "Values that are not finite are left out: 2." in page.text
    (axes,) = page.plots["Accuracy"].axes
    assert all(np.isfinite(curve).all() for curve in axes.curves)


def test_a_missing_gradient_is_a_cross_and_never_a_zero(tmp_path: Path) -> None:
    name = "head_grad_norms/slot"
    metrics = [0.5, None, 0.7, "NaN", 0.0]
    updates = [update(i, **{name: value}) for i, value in enumerate(metrics, 1)]
    run = write_run(tmp_path / "run", [started(), outcome(1), *updates])
    plot = report(run, to=tmp_path).plots["Gradient norm of each head"]
    slot = next(axes for axes in plot.axes if "slot" in axes.words)
    line, *special = slot.marks
    assert len(line) == 2, "only what was measured and is above 0 is on the curve"
    assert [len(marks) for marks in special] == [1, 1, 1]
    rounds = [round(marks[0][0], 3) for marks in special]
    op = next(axes for axes in plot.axes if "op" in axes.words)
    whole = [round(x, 3) - op.box[0] for x, _ in op.marks[0]]
    assert [x - slot.box[0] for x in rounds] == pytest.approx(
        [whole[1], whole[3], whole[4]], abs=0.01
    )
    assert {"missing", "not a number", "exactly 0"} <= set(plot.words)


def test_anomalies_are_listed_with_their_rounds(tmp_path: Path) -> None:
    found = AnomalyDetected(time=0, round=2, kind="ratio_explosion", message="9 times as probable")
    rollback = GovernorRollback(time=0, round=3, step=1, environment=[0, 1], reason=["RUNAWAY"] * 2)
    events = [started(), outcome(1), outcome(2), outcome(3), found, rollback]
    events += [TelemetryDropped(time=0, round=3, steps=5, total=5)]
    end = TrainingFinished(time=0, round=3, status="failed", message="the disk is full")
    page = report(write_run(tmp_path / "run", [*events, end]), to=tmp_path)
    assert {"ratio explosion", "rollback: runaway"} <= set(page.plots["Anomalies"].words)
    for words in ("9 times as probable", "the disk is full", "steps dropped: 5"):
        assert words in page.text


def test_lives_are_followed_to_their_ends(tmp_path: Path) -> None:
    events = [
        changed(1, 1, "GERMINATED", environment=0),
        changed(1, 2, "GERMINATED", environment=1, slot=1, blueprint="attention"),
        changed(1, 2, "TRAINING", environment=0), changed(1, 3, "PRUNED", environment=1, slot=1),
        changed(1, 4, "EMBARGOED", environment=1, slot=1),
        changed(1, 3, "GERMINATED", environment=2), changed(1, 4, "DORMANT", environment=2),
        changed(1, 5, "GERMINATED", environment=3), changed(1, 5, "FOSSILISED", environment=0),
    ]  # fmt: skip
    lives = RunData(write_run(tmp_path / "run", [started(), *events, outcome(1)])).lives
    outcomes = {(b.blueprint, b.slot, b.step): b.outcome for b in lives.seed_counts[1]}
    assert outcomes == {
        ("norm", 0, 1): "fossilised",
        ("attention", 1, 2): "pruned",
        ("norm", 0, 3): "rolled back",
        ("norm", 0, 5): "unfinished",
    }
    kept = next(life for life in lives.last if life.environment == 0)
    assert kept.stages == [(1, "GERMINATED"), (2, "TRAINING"), (5, "FOSSILISED")]
    assert next(life for life in lives.last if life.outcome == "pruned").end == 3


def test_a_repeated_round_counts_once(tmp_path: Path) -> None:
    cut = [changed(2, 1, "GERMINATED", environment=3)]
    again = [started(round=1), *whole_round(2)]
    data = RunData(write_run(tmp_path / "run", [started(), *whole_round(1), *cut, *again]))
    assert data.rounds.tolist() == [1, 2]
    assert sum(data.lives.seed_counts[2].values()) == 1
    assert data.processes == 2


def test_many_tasks_have_their_own_curves_and_rows(tmp_path: Path) -> None:
    tasks = started(tasks=["x", "y"], slots=[["r0c0"]] * 2, host_parameters=[10, 1000])
    rounds = [outcome(i, task=["x", "x", "y", "y"]) for i in (1, 2)]
    page = report(write_run(tmp_path / "run", [tasks, *rounds]), to=tmp_path)
    assert {"x", "y"} <= set(page.plots["Gain by task"].words)
    assert len(page.plots["Gain by task"].axes) == 2
    assert re.search(r'<th scope="row">y</th><td>\+2\.0<.*?<td>\+10\.0<.*?<td>37\.0', page.text)


def test_long_runs_are_drawn_as_means_of_rounds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [started(1000), *(outcome(i) for i in range(1, 1001))])
    page = report(run, to=tmp_path)
    assert "Each point is the mean of 4 rounds" in page.text
    assert max(len(c) for a in page.plots["Accuracy"].axes for c in a.curves) <= 300


def test_memory_does_not_grow_with_the_number_of_rounds(tmp_path: Path) -> None:
    def peak(rounds: int) -> int:
        run = recorded_run(tmp_path / str(rounds), rounds, envs=64)
        tracemalloc.start()
        data = RunData(run)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(data.rounds) == rounds
        return most

    # Both are longer than the block in which the end of a file is read.
    few, many = peak(40), peak(100)
    values_in_steps = 60 * 6 * 64 * 12
    assert many - few < 8 * values_in_steps / 2


def test_a_figure_without_a_finite_point_is_left_out_with_a_sentence() -> None:
    with figure_style():
        figure = new_figure()
        figure.add_subplot().plot([1, 2], [np.nan, np.inf])
        assert picture(figure, "Empty", "Nothing.").svg is None
        figure = new_figure()
        full, empty = figure.subplots(1, 2)
        full.plot([1, 2], [3, 4])
        empty.scatter([1], [np.nan])
        assert check(picture(figure, "Half", "One axes.").svg or "").plots["Half"].axes[1:] == []


def test_a_directory_that_is_not_a_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", 1)
    for bad in ([tmp_path / "nowhere"], [run, run]):
        with pytest.raises(UsageError, match="run:"):
            write_report(bad, tmp_path / "report.html")
    silent = write_run(tmp_path / "silent", [finished(1)])
    with pytest.raises(UsageError, match="has no TRAINING_STARTED event yet"):
        write_report([silent], tmp_path / "report.html")
    assert not list(tmp_path.glob("*.html"))


def test_the_entropy_of_a_head_without_a_choice_is_not_drawn_as_zero(tmp_path: Path) -> None:
    slot = {"head_entropy/slot": 0.0}
    free = update(1, **slot | {"head_choice/slot": 0.5})
    forced = update(2, **slot | {"head_choice/slot": 0.0})
    run = write_run(tmp_path / "run", [started(), outcome(1), outcome(2), free, forced])
    plot = report(run, to=tmp_path).plots["Entropy of each head"]
    line, ring = next(axes for axes in plot.axes if "slot, nats" in axes.words).marks
    assert (len(line), len(ring)) == (1, 1)
    assert line[0][0] < ring[0][0]
    assert "no choice" in plot.words


def test_equal_schedules_share_a_panel(tmp_path: Path) -> None:
    rates = {"learning_rate/policy": 1e-3, "learning_rate/value": 5e-4, "clip": 1e-3}
    run = write_run(tmp_path / "run", [started(), outcome(1), outcome(2), update(1, **rates)])
    titles = [axes.words for axes in report(run, to=tmp_path).plots["Schedules"].axes]
    assert len(titles) == 2
    assert "learning rate, clip" in titles[0]
    assert "learning rate/value" in titles[1]


def test_only_lives_are_too_wide_for_a_phone(tmp_path: Path) -> None:
    page = report(recorded_run(tmp_path / "run"), to=tmp_path)
    wide = re.findall(r'<figure class="wide">\s*<h3>([^<]*)', page.text)
    assert wide == ["Lives of seeds"]


def test_the_page_stacks_on_a_phone(tmp_path: Path) -> None:
    page = report(recorded_run(tmp_path / "run"), to=tmp_path)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page.text
    rules = re.search(r"@media \(max-width: 40rem\) \{\n(.*?)\n\}", page.text, re.DOTALL)[1]
    assert re.search(r"\.grid \{ grid-template-columns: minmax\(0, 1fr\); \}", rules)
    # What is wider scrolls in its own box; the width of every other figure is that of its column.
    assert "\n.scroll { overflow-x: auto; }" in page.text
    assert "\nfigure svg { display: block; width: 100%; height: auto; }" in page.text
    for tag in ("svg", "table"):
        count = len(re.findall(rf"<{tag}\b", page.text))
        assert count == len(re.findall(rf'<div class="scroll"><{tag}\b', page.text)) > 0


def test_no_title_label_or_legend_sticks_out_of_its_figure(tmp_path, monkeypatch) -> None:
    sticking: list[tuple[str, str]] = []
    lines_of_lives: list[bool] = []
    drawn = drawing._svg

    def checked(figure: Figure, title: str, description: str) -> str:
        FigureCanvasAgg(figure).draw()
        # Ticks beyond the limits are there as well, but not drawn.
        every = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
        ticks = {text for axis in every for text in axis.get_ticklabels(which="both")}
        for text in set(figure.findobj(Text)) - ticks:
            box = text.get_window_extent()
            inside = box.x0 >= -2 and box.x1 <= figure.bbox.x1 + 2 and box.y0 >= -2
            if text.get_visible() and text.get_text() and not inside:
                sticking.append((title, text.get_text()))
        if title == "Lives of seeds":
            lines_of_lives.extend(g.get_visible() for g in figure.axes[-1].get_ygridlines())
        return drawn(figure, title, description)

    monkeypatch.setattr(drawing, "_svg", checked)
    for name in ("healthy", "anomalous"):
        write_report([RECORDED / name], tmp_path / "report.html")
    assert sticking == []
    assert lines_of_lives
    assert not any(lines_of_lives)


def test_the_page_says_whether_the_policy_learns(tmp_path: Path) -> None:
    rising = recorded_run(tmp_path / "rising", rounds=12)
    text = report(rising, to=tmp_path).text
    assert "Is it learning? learning: gain from +1.5 to +11.5 points in 12 rounds" in text
    control = recorded_run(tmp_path / "control", rounds=12, learns=False)
    assert "Is it learning?" not in report(control, to=tmp_path).text


def test_metrics_that_are_not_finite_count_as_anomalies_of_old_versions(tmp_path: Path) -> None:
    events = [started(2, schema=2), *whole_round(1), *whole_round(2, policy_loss=float("nan"))]
    run = RunData(write_run(tmp_path / "run", [*events, finished(2)]))
    assert curves.anomalies(run) == {(2, "not finite: policy_loss"): 1}
