"""Draw the README's picture of growth: a grown host and its never-grow twin over one episode.

python scripts/draw_growth.py                     # train a run, then write docs/images/growth.svg
python scripts/draw_growth.py --run RUN           # draw an existing run
python scripts/draw_growth.py --run RUN --png growth.png --dark   # a PNG to look at

A rule picks the episode: the environment with the median gain of the last complete round.
"""

import argparse
import io
import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from esper.karn.queries import Store
from esper.leyline.errors import UsageError
from esper.leyline.events import POINTS
from esper.runtime.tasks import find
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tamiyo.policy.features import utility

TARGET = Path(__file__).parents[1] / "docs" / "images" / "growth.svg"
SETTINGS: dict[str, Any] = {"task": "digits_shift", "slots": ("wide",)}
"""All other settings keep their defaults, as in ``esper train ppo``."""

STAGES = ("GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILISED")
LIGHT = {
    "surface": "#ffffff",
    "edge": "#d0d7de",
    "ink": "#1f2328",
    "muted": "#59636e",
    "grid": "#e6e9ed",
    "grown": "#16803f",
    "twin": "#6e7781",
    "GERMINATED": "#d9c26a",
    "TRAINING": "#8fb8ea",
    "BLENDING": "#e8954c",
    "HOLDING": "#a987d6",
    "FOSSILISED": "#4fae78",
}
DARK = {
    "surface": "#151b23",
    "edge": "#3d444d",
    "ink": "#f0f6fc",
    "muted": "#9198a1",
    "grid": "#2a313a",
    "grown": "#58c483",
    "twin": "#9198a1",
    "GERMINATED": "#8f7d2f",
    "TRAINING": "#315f99",
    "BLENDING": "#a85d1c",
    "HOLDING": "#6f4aa3",
    "FOSSILISED": "#23784a",
}
STAND_INS = {name: f"#0900{number:02x}" for number, name in enumerate(LIGHT)}
"""Placeholder colours for matplotlib; ``write_svg`` replaces them with CSS variables."""

_STYLE: Any = {
    # A fixed salt makes the file reproducible; text as paths looks the same on every machine.
    "svg.hashsalt": "esper",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 11.0,
}


@dataclass(frozen=True, slots=True)
class Span:
    """One stage of a seed, from step ``first`` to step ``last`` inclusive."""

    slot: str
    blueprint: str
    stage: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Growth:
    """One episode of one environment, over T steps.

    Attributes:
        steps: step numbers from 1, ``[T]``.
        grown: utility of the host with its seeds on validation, in points, ``[T]``: expected
            accuracy minus the price of the parameters added.
        twin: the same of the never-grow twin, which pays no price, in points, ``[T]``.
        test: test utility of the committed host and of its twin after the last step, in points.
        parameters: parameters of the host and of its seeds from BLENDING on, ``[T]``.
        host_parameters: parameters of the host alone, which are also those of the twin.
        slots: names of the host's slots.
        spans: stages of the seeds.
        title: task, round, environment and gain.
    """

    steps: np.ndarray[Any, Any]
    grown: np.ndarray[Any, Any]
    twin: np.ndarray[Any, Any]
    test: tuple[float, float]
    parameters: np.ndarray[Any, Any]
    host_parameters: int
    slots: list[str]
    spans: list[Span]
    title: str


def read_growth(run: Path) -> Growth:
    """Read the episode with the median gain of the run's last complete round.

    With an even number of environments the episode is that of the lower of the two middle gains.
    The lower environment number breaks ties.

    Raises:
        UsageError: ``run`` is not a run directory, has no test scores, or trained on a family.
        IndexError: the run has no complete round.
    """
    with Store([run]) as store:
        last = "round = (SELECT max(round) FROM episodes)"
        ranked = store.query(
            "SELECT round, environment, task, gain, test_utility, twin_test_utility FROM episodes "
            f"WHERE {last} ORDER BY gain, environment"
        ).to_pylist()
        chosen = ranked[(len(ranked) - 1) // 2]
        if chosen["gain"] is None:
            raise UsageError(f"run: {run} has no test scores; train it again")
        here = f"round = {chosen['round']} AND environment = {chosen['environment']}"
        steps = store.query(
            "SELECT step, expected_accuracy, twin_expected_accuracy, added_parameters "
            f"FROM steps WHERE {here} ORDER BY step"
        ).to_pydict()
        changes = store.query(
            "SELECT step, slot_name, blueprint, stage FROM seeds "
            f"WHERE {here} ORDER BY slot, step, time"
        ).to_pylist()
        place = chosen["environment"] + 1
        host = store.query(
            f"SELECT host_parameters[{place}] AS host FROM episode_started "
            f"WHERE round = {chosen['round']}"
        ).to_pylist()[-1]["host"]
        names = store.query(
            f"SELECT slots[list_position(tasks, '{chosen['task']}')] AS slots FROM training_started"
        ).to_pylist()[-1]["slots"]
    score, added = (torch.tensor(steps[name]) for name in ("expected_accuracy", "added_parameters"))
    price = find(chosen["task"]).price
    return Growth(
        np.array(steps["step"]),
        POINTS * utility(score, added, host, price).numpy(),
        POINTS * np.array(steps["twin_expected_accuracy"]),
        (POINTS * chosen["test_utility"], POINTS * chosen["twin_test_utility"]),
        host + added.numpy(),
        host,
        names,
        _spans(changes, steps["step"][-1]),
        f"{chosen['task']}, round {chosen['round']}, environment {chosen['environment']} "
        f"(median gain of {len(ranked)}: {chosen['gain']:+.1f} points of test utility)",
    )


def _spans(changes: list[dict[str, Any]], end: int) -> list[Span]:
    """Turn stage changes into spans; a stage ends at the next change in the same slot."""
    by_slot: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for change in changes:
        by_slot[change["slot_name"]].append(change)
    return [
        Span(slot, now["blueprint"], now["stage"], now["step"], after - 1)
        for slot, rows in by_slot.items()
        for now, after in zip(rows, [*(row["step"] for row in rows[1:]), end + 1], strict=True)
        if now["stage"] in STAGES and after > now["step"]
    ]


def draw(growth: Growth, colours: dict[str, str]) -> Figure:
    """Draw utility, seed stages and parameters against the steps of the episode.

    Diamonds mark the test utility, which is measured once, after the last step; the gain is the
    distance between them.
    """
    figure = Figure(figsize=(8.8, 5.6), facecolor="none")
    worth, lanes, parameters = figure.subplots(
        3, 1, sharex=True, height_ratios=(3.0, 0.55 * len(growth.slots) + 0.1, 1.4)
    )
    figure.subplots_adjust(left=0.115, right=0.98, top=0.905, bottom=0.155, hspace=0.16)
    for axes in (worth, lanes, parameters):
        _dress(axes, colours)
    end = growth.steps[-1] + 1.5
    worth.set(xlim=(growth.steps[0] - 0.5, end + 1.0), ylabel="utility,\npoints")
    named = (("grown", "grown host", "-"), ("twin", "never-grow twin", "--"))
    handles = []
    for (name, label, line), tested in zip(named, growth.test, strict=True):
        values, colour = getattr(growth, name), colours[name]
        handles += worth.plot(
            growth.steps, values, color=colour, lw=2.4, ls=line, label=f"{label}, validation"
        )
        handles += worth.plot(
            end, tested, "D", color=colour, ms=6, label=f"{label}, test after the last step"
        )
    worth.annotate(
        "",
        (end, growth.test[0]),
        (end, growth.test[1]),
        arrowprops={"arrowstyle": "<->", "color": colours["ink"], "shrinkA": 5, "shrinkB": 5},
    )
    worth.text(
        end - 0.5,
        sum(growth.test) / 2,
        f"gain {growth.test[0] - growth.test[1]:+.1f}",
        ha="right",
        va="center",
        color=colours["ink"],
        fontsize=11,
    )
    worth.legend(
        handles=handles, loc="upper left", frameon=False, labelcolor=colours["ink"], fontsize=10
    )
    _draw_lanes(lanes, growth, colours)
    parameters.set(ylabel="parameters", xlabel="step of the episode (one training epoch each)")
    parameters.yaxis.set_major_locator(MaxNLocator(3))
    parameters.yaxis.set_major_formatter("{x:,.0f}")
    parameters.axhline(growth.host_parameters, color=colours["twin"], lw=2, ls="--")
    parameters.step(growth.steps, growth.parameters, where="mid", color=colours["grown"], lw=2.4)
    parameters.set_ylim(0, 1.5 * growth.parameters.max())
    for count, colour, side in (
        (growth.parameters[-1], colours["grown"], "bottom"),
        (growth.host_parameters, colours["muted"], "top"),
    ):
        parameters.annotate(
            f"{count:,}",
            (growth.steps[-1], count),
            (0, 4 if side == "bottom" else -4),
            textcoords="offset points",
            ha="right",
            va=side,
            color=colour,
            fontsize=10,
        )
    figure.text(0.02, 0.94, growth.title, color=colours["ink"], fontsize=12, weight="bold")
    _draw_stage_key(figure, colours)
    return figure


def _dress(axes: Axes, colours: dict[str, str]) -> None:
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colours["edge"])
    axes.tick_params(colors=colours["muted"], labelsize=10, length=3)
    axes.xaxis.label.set_color(colours["muted"])
    axes.yaxis.label.set_color(colours["muted"])
    axes.grid(color=colours["grid"], lw=0.8)
    axes.set_axisbelow(True)


def _draw_lanes(axes: Axes, growth: Growth, colours: dict[str, str]) -> None:
    """Draw one lane per slot, with one colour per stage and the blueprint's name in the bar."""
    slots = growth.slots
    axes.set(ylim=(len(slots) - 0.4, -0.6), yticks=range(len(slots)), yticklabels=slots)
    axes.set_ylabel("slots")
    axes.grid(visible=False)
    for span in growth.spans:
        axes.barh(
            slots.index(span.slot),
            span.last - span.first + 1,
            left=span.first - 0.5,
            height=0.74,
            color=colours[span.stage],
            linewidth=0,
        )
    for slot, blueprint, first, last in _names(growth.spans):
        if 0.19 * len(blueprint) * len(growth.steps) / 10 < last - first + 1:
            axes.text(
                last,
                slots.index(slot),
                blueprint,
                ha="right",
                va="center",
                fontsize=10,
                color=colours["ink"],
            )


def _names(spans: list[Span]) -> list[tuple[str, str, int, int]]:
    """Return slot, blueprint, first and last step of each seed's final stage."""
    return [
        (span.slot, span.blueprint, span.first, span.last)
        for number, span in enumerate(spans)
        if number + 1 == len(spans)
        or spans[number + 1].slot != span.slot
        or spans[number + 1].stage == "GERMINATED"
    ]


def _draw_stage_key(figure: Figure, colours: dict[str, str]) -> None:
    """Draw the legend of stages, in the order in which a seed passes through them."""
    figure.legend(
        handles=[Patch(color=colours[stage], label=stage.lower()) for stage in STAGES],
        loc="lower left",
        bbox_to_anchor=(0.105, 0.0),
        ncols=len(STAGES),
        frameon=False,
        labelcolor=colours["ink"],
        fontsize=10.5,
        handlelength=1.2,
        columnspacing=1.6,
    )


def write_svg(growth: Growth, target: Path) -> None:
    """Write an SVG with its own background, which follows the reader's light or dark setting."""
    with matplotlib.rc_context(_STYLE):
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        draw(growth, STAND_INS).savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    drawing = text[text.index("<svg") :]
    variables = {stand_in: f"var(--{name.lower()})" for name, stand_in in STAND_INS.items()}
    drawing = re.sub(r"#0900[0-9a-f]{2}", lambda found: variables[found[0]], drawing)
    drawing = re.sub(r"[ \t]+$", "", drawing, flags=re.MULTILINE)
    opening, rest = drawing.split(">", 1)
    head = (
        f"<title>{_DESCRIPTION}</title><desc>{_describe(growth)}</desc><style>:root{{{_css(LIGHT)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{_css(DARK)}}}}}</style>"
        '<rect x="0.5" y="0.5" width="99.8%" height="99.7%" rx="8" '
        'style="fill:var(--surface);stroke:var(--edge)"/>'
    )
    target.write_text(f"{opening}>{head}{rest}", encoding="utf-8")


_DESCRIPTION = (
    "Utility and parameters of a grown host and its never-grow twin over one episode, "
    "with the stages of its seeds"
)


def _describe(growth: Growth) -> str:
    return (
        f"{growth.title}; twin {growth.host_parameters} parameters, "
        f"grown host {growth.parameters[-1]} parameters"
    )


def _css(colours: dict[str, str]) -> str:
    return ";".join(f"--{name.lower()}:{colour}" for name, colour in colours.items())


def write_png(growth: Growth, target: Path, colours: dict[str, str]) -> None:
    """Write a PNG at README width, for checking the picture."""
    with matplotlib.rc_context(_STYLE):
        figure = draw(growth, colours)
        figure.savefig(target, facecolor=colours["surface"], dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="draw this run instead of training one")
    parser.add_argument("--png", type=Path, help="write a PNG to this file instead of the SVG")
    parser.add_argument("--dark", action="store_true", help="use the dark colours for the PNG")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = arguments.run or train_ppo_vectorized(telemetry_dir=folder, **SETTINGS).path
        growth = read_growth(run)
    print(growth.title)
    if arguments.png is not None:
        write_png(growth, arguments.png, DARK if arguments.dark else LIGHT)
    else:
        TARGET.parent.mkdir(exist_ok=True)
        write_svg(growth, TARGET)


if __name__ == "__main__":
    main()
