"""Pictures of seeds: counts, blueprints, slots, germination steps, outcomes and lives."""

from collections import Counter
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from esper.karn.report.curves import INTERVAL, gain_of
from esper.karn.report.drawing import (
    BAD,
    GOOD,
    INK,
    MUTED,
    SERIES,
    STAGE_COLOURS,
    SURFACE,
    WIDE,
    Picture,
    bands,
    guide,
    label_width,
    labelled_figure,
    new_figure,
    panels,
    picture,
)
from esper.karn.report.gather import SEED_OUTCOMES, RunData, SeedKey, SeedLife

MAX_LANES = 24
"""Maximum number of slots whose seeds are drawn, one lane per slot."""

MAX_KINDS = 16
"""Maximum number of rows (blueprint and slot) per picture; the rarest are left out."""

THICKNESS = {
    "GERMINATED": 0.25,
    "TRAINING": 0.4,
    "BLENDING": 0.58,
    "HOLDING": 0.72,
    "FOSSILISED": 0.86,
}
"""A seed's bar is thicker in later stages, so that stages can be told apart without colour."""

OUTCOME_COLOURS = dict(zip(SEED_OUTCOMES, (GOOD, SERIES[0], BAD, MUTED), strict=True))
OUTCOME_MARKS = dict(zip(SEED_OUTCOMES, ("D", "o", "X", "v"), strict=True))

Entries = list[tuple[int, SeedKey, int]]
"""(row of the picture, key, number of such seeds)."""

NOT_RECORDED = "Lives of seeds are recorded at --telemetry-level normal and above, not at minimal."
NO_SEED = "No seed germinated in a completed round."


def growth_pictures(runs: list[RunData]) -> list[Picture]:
    """Return pictures of seed counts, of blueprints by slot and step, and of seeds' lives."""
    with_rounds = [run for run in runs if len(run.rounds)]
    if not with_rounds:
        return []
    return [
        _counts(with_rounds),
        *(picture for run in with_rounds for picture in _germinations(with_rounds, run)),
        *(_lives(with_rounds, run) for run in with_rounds),
    ]


def _counts(runs: list[RunData]) -> Picture:
    names = ("germinated", "fossilised", "pruned")
    figure, grid = panels(3, 2.0, "seeds per episode", sharey=True)
    for axes, name in zip(grid, names, strict=True):
        axes.set_title(name)
        bands(axes, runs, name)
    return picture(figure, "Seeds per episode", f"Means over environments. {INTERVAL}.")


def _germinations(runs: list[RunData], run: RunData) -> list[Picture]:
    """Seeds germinated in the last tenth of the rounds, by blueprint and slot."""
    last = run.rounds[run.final_rounds]
    seeds = sum((run.lives.seed_counts.get(int(number), Counter()) for number in last), Counter())
    suffix = _title_suffix(runs, run)
    title = f"Blueprints{suffix}"
    if not seeds:
        return [Picture(title, _why_no_lives(run))]
    kinds: Counter[str] = Counter()
    for key, count in seeds.items():
        kinds[_kind(run, key)] += count
    rows = [kind for kind, _ in kinds.most_common(MAX_KINDS)][::-1]
    entries = [
        (rows.index(kind), key, count)
        for key, count in seeds.items()
        if (kind := _kind(run, key)) in rows
    ]
    span = f"Rounds {last[0]:.0f} to {last[-1]:.0f}." if len(last) > 1 else f"Round {last[0]:.0f}."
    return [
        _outcomes(title, span, entries, rows),
        _steps(f"Germination step{suffix}", span, run, entries, rows),
    ]


def _outcomes(title: str, span: str, entries: Entries, rows: list[str]) -> Picture:
    figure, axes = labelled_figure(rows, "seeds", 0.9 + 0.22 * max(6, len(rows)))
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    before = np.zeros(len(rows))
    for outcome in SEED_OUTCOMES:
        counts = np.zeros(len(rows))
        for row, key, count in entries:
            counts[row] += count * (key.outcome == outcome)
        some = np.flatnonzero(counts)
        if len(some):
            look: Any = {"color": OUTCOME_COLOURS[outcome], "edgecolor": SURFACE, "height": 0.62}
            label = f"{outcome} ({counts.sum():.0f})"
            axes.barh(some, counts[some], left=before[some], label=label, **look)
        before += counts
    return picture(figure, title, f"Outcomes of the seeds by blueprint and slot. {span}")


def _steps(title: str, span: str, run: RunData, entries: Entries, rows: list[str]) -> Picture:
    """Steps of germination."""
    figure, axes = labelled_figure(rows, "step of the episode", 0.9 + 0.22 * max(6, len(rows)))
    axes.set(xlim=(0, run.start.episode_length + 1), ylim=(-0.6, len(rows) - 0.4))
    most = max(count for _, _, count in entries)
    for outcome in SEED_OUTCOMES:
        points = [(key.step, row, count) for row, key, count in entries if key.outcome == outcome]
        if not points:
            continue
        steps, heights, counts = np.array(points, dtype=float).T
        heights += 0.15 * (1 - SEED_OUTCOMES.index(outcome))
        style: Any = {"marker": OUTCOME_MARKS[outcome], "color": OUTCOME_COLOURS[outcome]}
        axes.scatter(steps, heights, s=12 + 110 * counts / most, alpha=0.65, linewidths=0, **style)
        guide(axes.plot([], [], linestyle="none", label=outcome, **style)[0])
    return picture(figure, title, f"Step of germination; larger marks mean more seeds. {span}")


def _lives(runs: list[RunData], run: RunData) -> Picture:
    """Lives of seeds in the last completed round, with the accuracy of the median environment."""
    title = f"Lives of seeds{_title_suffix(runs, run)}"
    if not run.lives.last:
        return Picture(title, _why_no_lives(run))
    lanes = _lanes(run)
    heights = [*([1.6] if run.episode else []), 0.21 * max(3, len(lanes))]
    names = [f"{environment} {_slot(run, environment, slot)}" for environment, slot in lanes]
    figure = new_figure(WIDE, sum(heights) + 1.3, label_width(names))
    figure.subplots_adjust(
        hspace=0.5 / (sum(heights) / len(heights)), top=1 - 0.3 / figure.get_figheight()
    )
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    middle = _median_environment(run)
    if run.episode is not None:
        _median_accuracy(grid[0, 0], run, middle)
    _gantt(grid[-1, 0], run, lanes, middle)
    grid[-1, 0].set_xlabel("step of the episode")
    environments = len({environment for environment, _ in lanes})
    return picture(
        figure,
        title,
        f"Round {run.rounds[-1]:.0f}: {environments} of {run.tasks.shape[1]} environments, one "
        "lane per slot. Later stages have thicker bars. A diamond marks fossilisation; a cross "
        "marks pruning, by the policy or by a rollback."
        + (
            f" Above: validation accuracy of environment {middle}, which has the median "
            f"{'gain' if gain_of([run]) == 'gain' else 'validation difference'}, and of its twin."
            if run.episode
            else ""
        ),
    )


def _lanes(run: RunData) -> list[tuple[int, int]]:
    """The lanes to draw, (environment, slot): environments that fit, including the median."""
    counts = Counter(life.environment for life in run.lives.last)
    middle = _median_environment(run)
    order = sorted(counts, key=lambda environment: (environment != middle, environment))
    lanes: list[tuple[int, int]] = []
    for environment in order:
        slots = sorted({s.slot for s in run.lives.last if s.environment == environment})
        if len(lanes) + len(slots) > MAX_LANES and lanes:
            break
        lanes += [(environment, slot) for slot in slots[:MAX_LANES]]
    return sorted(lanes)


def _median_environment(run: RunData) -> int:
    """The environment with the median gain among those in which a seed germinated.

    The validation difference stands for the gain if the run has no test scores.
    """
    environments = sorted({life.environment for life in run.lives.last})
    gains = np.nan_to_num(run.outcomes[gain_of([run])][-1][environments], nan=-np.inf)
    return environments[int(np.argsort(gains, kind="stable")[len(environments) // 2])]


def _median_accuracy(axes: Axes, run: RunData, environment: int) -> None:
    assert run.episode is not None
    steps, grown = run.episode.steps, run.episode.grown[:, environment]
    axes.plot(steps, 100 * grown, color=SERIES[0])
    axes.plot(steps, 100 * run.episode.twin[:, environment], ":", color=MUTED)
    axes.set_ylabel("validation acc., %")
    axes.set_title(f"environment {environment}; dotted: its twin")


def _gantt(axes: Axes, run: RunData, lanes: list[tuple[int, int]], middle: int) -> None:
    heights = {lane: len(lanes) - 1 - i for i, lane in enumerate(lanes)}
    last = run.start.episode_length
    for life in run.lives.last:
        if (life.environment, life.slot) in heights:
            _bar(axes, life, heights[life.environment, life.slot], last)
    labels = [f"{environment} {_slot(run, environment, slot)}" for environment, slot in heights]
    axes.set(yticks=list(heights.values()), yticklabels=labels, ylim=(-0.7, len(lanes) - 0.3))
    for text, (environment, _) in zip(axes.get_yticklabels(), heights, strict=True):
        text.set_fontweight("bold" if environment == middle else "normal")
    axes.set_xlim(0, last + 1.5)
    axes.grid(axis="y", visible=False)
    for environment, slot in lanes:
        if (environment, slot - 1) not in heights and heights[environment, slot] < len(lanes) - 1:
            edge = heights[environment, slot] + 0.5
            guide(axes.axhline(edge, color=MUTED, linewidth=0.3))
    stages = [Patch(color=colour, label=name.lower()) for name, colour in STAGE_COLOURS.items()]
    axes.legend(handles=stages, ncols=5, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)


def _bar(axes: Axes, life: SeedLife, lane: int, last: int) -> None:
    end = life.end if life.end is not None else last + 0.5
    ends = [*(step for step, _ in life.stages[1:]), end]
    for (begin, stage), until in zip(life.stages, ends, strict=True):
        if stage in THICKNESS and until > begin:
            colour, thick = STAGE_COLOURS[stage], THICKNESS[stage]
            axes.barh(lane, until - begin, left=begin, height=thick, color=colour, linewidth=0)
    steps = [step for step, stage in life.stages if stage == "FOSSILISED"]
    if steps:
        axes.plot(steps[-1], lane, "D", color=INK, markersize=3.5)
    elif life.end is not None:
        axes.plot(life.end, lane, "X" if life.outcome == "pruned" else "v", color=BAD, markersize=5)
    late = life.birth > 0.85 * last
    axes.annotate(life.blueprint, (life.birth, lane), (-2 if late else 2, 0), fontsize=7,
                  va="center", ha="right" if late else "left",
                  textcoords="offset points")  # fmt: skip


def _kind(run: RunData, key: SeedKey) -> str:
    """Label of a row: blueprint and slot."""
    return f"{key.blueprint} {_slot_name(run, key.task, key.slot)}"


def _slot(run: RunData, environment: int, slot: int) -> str:
    return _slot_name(run, str(run.tasks[-1, environment]), slot)


def _slot_name(run: RunData, task: str, slot: int) -> str:
    slots = dict(zip(run.start.tasks, run.start.slots, strict=False)).get(task, [])
    return slots[slot] if slot < len(slots) else f"slot {slot}"


def _title_suffix(runs: list[RunData], run: RunData) -> str:
    return f": {run.label}" if len(runs) > 1 else ""


def _why_no_lives(run: RunData) -> str:
    level = run.start.level or run.config.get("settings", {}).get("telemetry_level")
    return NOT_RECORDED if level == "minimal" else NO_SEED
