"""Widening in mid-training, against networks that have the larger size from the start.

    python benchmarks/widening.py [--write]
    python benchmarks/widening.py --parts fresh normed recurrent products own gromo trained deep

Every arm is ``esper.grow`` with Adam and cosine decay; ``never`` is the plain loop. Rates are tuned
for each arm alike, on other seeds, by validation, and every arm hands back the epoch that is best
on validation where it is better than the last by more than noise. Figures are test accuracy or R²
in percent.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np
import tiny_growth
import torch
from reporting import kept, made_on, new_parser, publish, table
from torch import nn
from widening_cost import cost_page, interval_text
from widening_hosts import (
    BATCH,
    EPOCHS,
    GROWN,
    HOSTS,
    NORMED_HOSTS,
    OWN_HOSTS,
    PRODUCT_HOSTS,
    RECURRENT_HOSTS,
    TRAIN,
    VALIDATION,
    Arm,
    Gpt,
    Host,
    from_scratch,
    noisy_digits,
    perceptron,
    residual,
    text_windows,
    tuned,
)

import esper
from esper.karn.intervals import interval
from esper.kasmina import wider_layers
from esper.own_models import layer_growth, width_search

MORE_TUNING, MORE_SEEDS = range(100, 120), range(200, 260)
SWEEP = (1, 2, 4, 6)
EXTRA = (3, 6, 12, 24)
SHARES = {"mild": 0.6, "shrunk": 0.3}
"""Of its weights that a trained network keeps before it grows, by arm."""


def fresh(host: Host, factor: float) -> dict[str, list[dict[str, float]]]:
    """The arms of a host that is trained from the start."""

    arm = partial(from_scratch, host)
    parts = [tuned(partial(arm, times, "never", EPOCHS // len(SWEEP))) for times in SWEEP]
    best = [max(each, key=lambda one: one["validation"]) for each in zip(*parts, strict=True)]
    return {
        "small": tuned(partial(arm, 1, "never", EPOCHS)),
        "grown": tuned(partial(arm, 1, "widen", EPOCHS)),
        "static": tuned(partial(arm, factor, "never", EPOCHS)),
        "sweep": best,
    }


def repeated(host: Host, factor: float) -> dict[str, list[dict[str, float]]]:
    """The grown network and the static one of its size, on more seeds that none was tuned on."""

    grown = partial(from_scratch, host, 1, "widen", EPOCHS)
    static = partial(from_scratch, host, factor, "never", EPOCHS)
    return {
        "grown": tuned(grown, MORE_SEEDS, MORE_TUNING),
        "static": tuned(static, MORE_SEEDS, MORE_TUNING),
    }


def by_gromo(host: Host) -> list[dict[str, float]]:
    """The perceptron grown by gromo to at most the size of the grown one."""

    def arm(seed: int, rate: float) -> dict[str, float]:
        x, y = host.data(seed)
        held_out = slice(TRAIN, TRAIN + VALIDATION), slice(TRAIN + VALIDATION, None)
        widths = host.width, 8 * host.width
        return tiny_growth.train(
            x, y, slice(TRAIN), held_out, widths, host.loss, BATCH, EPOCHS, seed, rate
        )

    return tuned(arm, MORE_SEEDS, MORE_TUNING)


@cache
def trained_model(host: Host, seed: int) -> nn.Module:
    """The small network after ``EPOCHS`` epochs; copy it before training it further."""
    model = host.build(1, seed)
    host.train(model, seed, "never", EPOCHS, 0.01)
    return model


def trained(host: Host, factor: float, epochs: int) -> dict[str, list[dict[str, float]]]:
    """The arms of a host that was trained before, after further epochs."""

    def further(policy: str, seed: int, rate: float) -> dict[str, float]:
        return host.train(deepcopy(trained_model(host, seed)), seed, policy, epochs, rate)

    def shrunk(share: float, seed: int, rate: float) -> dict[str, float]:
        fresh = host.build(1, seed + 1000)
        model = esper.shrink_and_perturb(trained_model(host, seed), fresh, share)
        return host.train(model, seed, "widen", epochs, rate)

    arms: dict[str, Arm] = {
        "longer": partial(further, "never"),
        "grown": partial(further, "widen"),
        **{name: partial(shrunk, share) for name, share in SHARES.items()},
        "scratch": partial(from_scratch, host, factor, "never", epochs),
    }
    return {name: tuned(arm, range(8)) for name, arm in arms.items()}


def deep(name: str) -> dict[str, list[dict[str, float]]]:
    """The arms of a host of two blocks, beside one that has four from the start."""
    make: Callable[[int], nn.Module]
    make, data, stack = DEEP[name]
    host = Host(perceptron, data, 1)

    def arm(depth: int, policy: str, seed: int, rate: float) -> dict[str, float]:
        torch.manual_seed(seed)
        return host.train(make(depth), seed, policy, EPOCHS, rate)

    def stacked(seed: int, rate: float) -> dict[str, float]:
        """As G_stack: the trained blocks twice, after a tenth of the epochs."""
        torch.manual_seed(seed)
        model, begin = make(2), EPOCHS // 10
        host.train(model, seed, "never", begin, rate)
        larger = make(4)
        blocks = list(model.get_submodule(stack).children())
        state = {n: x for n, x in model.state_dict().items() if not n.startswith(f"{stack}.")}
        for i in range(4):
            for key, x in blocks[i % 2].state_dict().items():
                state[f"{stack}.{i}.{key}"] = x
        larger.load_state_dict(state)
        return host.train(larger, seed, "never", EPOCHS - begin, rate)

    arms: dict[str, Arm] = {
        "small": partial(arm, 2, "never"), "deepened": partial(arm, 2, "deepen"),
        "widened": partial(arm, 2, "widen"), "static": partial(arm, 4, "never"), "stacked": stacked,
    }  # fmt: skip
    return {each: tuned(function, range(6)) for each, function in arms.items()}


def _three_times(_: nn.Module, groups: list[Any], __: object) -> dict[Any, int]:
    return {group: 2 * group.channels for group in groups}


def moment(host: Host) -> list[list[Any]]:
    """Test figures by the moment of widening and the start of the squared gradients."""
    rows = []
    for begin in (0.1, 0.25, 0.5):
        row: list[Any] = [begin]
        for share in (1.0, 0.01, 0.0):
            with (
                patch.object(width_search, "BEGIN", begin),
                patch.object(wider_layers, "FRESH", share),
                patch.object(layer_growth, "planned_counts", _three_times),
            ):
                row += [
                    [
                        host.train(host.build(1, seed), seed, "widen", EPOCHS, rate)["test"]
                        for seed in range(8)
                    ]
                    for rate in (0.01, 0.03)
                ]
        rows.append(row)
    return rows


def mean(values: list[float]) -> str:
    """Mean and 95 % interval over seeds (Student's t)."""
    estimate = interval(np.array([values]))
    return f"{estimate.mean[0]:.1f} ± {(estimate.high[0] - estimate.low[0]) / 2:.1f}"


def of(results: list[dict[str, float]]) -> list[float]:
    """The test figures."""
    return [one["test"] for one in results]


def difference(one: list[dict[str, float]], two: list[dict[str, float]]) -> str:
    """Paired difference with its 95 % interval over seeds."""
    return interval_text([a - b for a, b in zip(of(one), of(two), strict=True)], "+.1f")


def fresh_rows(hosts: dict[str, Host], work: Path) -> list[tuple[str, ...]]:
    """Each host as it is trained from the start."""
    rows = []
    for name, host in hosts.items():
        make = partial(fresh, host, GROWN.get(name, 8))
        arms = kept(work / f"fresh-{name}.json", make)
        ratio = fmean(g["seconds"] for g in arms["grown"]) / fmean(
            s["seconds"] for s in arms["static"]
        )
        sizes = [f"{arms[arm][0]['parameters']:,.0f}" for arm in ("small", "grown")]
        rows.append(
            (
                name, " → ".join(sizes), *(mean(of(arms[arm])) for arm in arms),
                difference(arms["grown"], arms["static"]), difference(arms["grown"], arms["sweep"]),
                f"{ratio:.2f}",
            )
        )  # fmt: skip
    return rows


FRESH_HEADS = (
    "host", "parameters", "never grown", "grown", "static, the grown size", "best of four",
    "grown − static", "grown − best of four", "time, grown / static",
)  # fmt: skip


def fresh_page(work: Path) -> list[str]:
    """The table of hosts that are trained from the start."""
    return [
        f"## From the start\n\n{EPOCHS} epochs, ten seeds. *Static* has from the start the size "
        "that the grown network ends with, which is also the one that the rule would choose "
        "beforehand. *Best of four* trains widths of 1, 2, 4 and 6 times for "
        f"{EPOCHS // len(SWEEP)} epochs each, and keeps the best on validation.",
        table(FRESH_HEADS, fresh_rows(HOSTS, work)),
    ]


def normed_page(work: Path) -> list[str]:
    """The table of hosts with norms that see all channels."""
    return [
        "## Behind norms of all channels\n\nNew channels begin as copies, which the norm does not "
        "see, and turn into random ones while training goes on. Arms as above.",
        table(FRESH_HEADS, fresh_rows(NORMED_HOSTS, work)),
    ]


def beside_before(host: Host, before: tuple[str, ...]) -> dict[str, list[dict[str, float]]]:
    """The arms of a host of which only some layers, or none, became wider before."""
    arms = {
        "small": (host, 1, "never"), "grown": (host, 1, "widen"), "static": (host, 8, "never"),
        **({"before": (replace(host, slots=before), 1, "widen")} if before else {}),
    }  # fmt: skip
    return {
        arm: tuned(partial(from_scratch, one, times, policy, EPOCHS))
        for arm, (one, times, policy) in arms.items()
    }


def before_table(work: Path, hosts: dict[str, tuple[Host, tuple[str, ...]]]) -> str:
    """The table of hosts of which only some layers, or none, became wider before."""
    rows = []
    for name, (host, before) in hosts.items():
        arms = kept(work / f"before-{name}.json", partial(beside_before, host, before))
        sizes = [f"{arms[arm][0]['parameters']:,.0f}" for arm in ("small", "grown")]
        cells = [mean(of(arms[arm])) for arm in ("small", "grown", "static")]
        earlier = arms.get("before", arms["small"])
        rows.append(
            (
                name, " → ".join(sizes), *cells, mean(of(earlier)),
                difference(arms["grown"], arms["static"]), difference(arms["grown"], earlier),
            )
        )  # fmt: skip
    heads = (
        "host", "parameters", "never grown", "grown", "static, the grown size", "grown before",
        "grown − static", "grown − grown before",
    )  # fmt: skip
    return table(heads, rows)


def recurrent_page(work: Path) -> list[str]:
    """The table of hosts whose recurrent layers read what becomes wider, too."""
    return [
        "## What recurrent layers read\n\nArms as above. *Grown before*: hidden units of the last "
        "layer alone, of both directions none.",
        before_table(work, RECURRENT_HOSTS),
    ]


def product_page(work: Path) -> list[str]:
    """The table of hosts that sum products of channels, or have layers along another axis."""
    return [
        "## What is multiplied with other channels, or passed on along another axis\n\nArms as "
        "above. *Grown before*: of towers and Mixer their hidden layers, of the others nothing.",
        before_table(work, PRODUCT_HOSTS),
    ]


def own_page(work: Path) -> list[str]:
    """The table of hosts with weights of their own."""
    return [
        "## Weights that are parameters\n\nArms as above. *Grown before*: nothing.",
        before_table(work, OWN_HOSTS),
    ]


def repeated_page(work: Path) -> list[str]:
    """The table of the grown and the static network on more seeds."""
    rows = []
    for name, host in HOSTS.items():
        make = partial(repeated, host, GROWN.get(name, 8))
        arms = kept(work / f"repeated-{name}.json", make)
        rates = [str(arms[arm][0]["rate"]) for arm in ("grown", "static")]
        cells = [mean(of(arms[arm])) for arm in ("grown", "static")]
        rows.append((name, *cells, *rates, difference(arms["grown"], arms["static"])))
    heads = ("host", "grown", "static, the grown size", "rate", "rate", "grown − static")
    return [
        f"## The same with {len(MORE_SEEDS)} seeds\n\nSeeds of which the table above has none, "
        f"with rates tuned on {len(MORE_TUNING)} seeds: on five, the better of two near ones is a "
        "matter of chance.",
        table(heads, rows),
    ]


def gromo_page(work: Path) -> list[str]:
    """The table of the perceptrons beside gromo."""
    rows = []
    for name, host in list(HOSTS.items())[:2]:
        arms = kept(work / f"repeated-{name}.json", partial(repeated, host, 8))
        gromo = kept(work / f"gromo-{name}.json", partial(by_gromo, host))
        sizes = f"{fmean(one['parameters'] for one in gromo):,.0f}"
        cells = mean(of(arms["grown"])), mean(of(gromo)), sizes, str(gromo[0]["rate"])
        rows.append((name, *cells, *(difference(arms[arm], gromo) for arm in ("grown", "static"))))
    heads = (
        "host", "grown", "gromo", "parameters of gromo's", "its rate", "grown − gromo",
        "static − gromo",
    )  # fmt: skip
    return [
        "## Beside gromo\n\nTINY (Verbockhaven and others, 2024) as gromo 0.1 has it: both layers "
        f"grow in {tiny_growth.EVENTS} steps between a tenth and the half of {EPOCHS} epochs to at "
        "most the width of the grown network, with statistics of all training samples and a line "
        "search; seeds and tuning as above.",
        table(heads, rows),
    ]


def trained_page(work: Path) -> list[str]:
    """The table of hosts that were trained before."""
    rows = []
    for name, host in HOSTS.items():
        for epochs in EXTRA:
            make = partial(trained, host, GROWN.get(name, 8), epochs)
            arms = kept(work / f"trained-{name}-{epochs}.json", make)
            cells = (mean(of(arms[arm])) for arm in ("longer", "grown", *SHARES, "scratch"))
            others = (difference(arms[arm], arms["scratch"]) for arm in ("grown", *SHARES))
            rows.append((name, epochs, *cells, *others))
    shares = [f"shrunk to {share} and grown" for share in SHARES.values()]
    heads = (
        "host", "further epochs", "trained longer", "grown in place", *shares,
        "larger, from scratch", "grown − from scratch", *(f"{s} − from scratch" for s in shares),
    )  # fmt: skip
    return [
        "## A network that is trained already\n\nTrained for 40 epochs, then found too small: "
        "eight seeds, after further epochs. *Shrunk to 0.6* keeps 0.6 of each weight and adds 0.4 "
        "of a fresh one before it grows (Ash and Adams, 2020).",
        table(heads, rows),
    ]


def deep_page(work: Path) -> list[str]:
    """The table of stacks of blocks."""
    rows = []
    for name in DEEP:
        arms = kept(work / f"deep-{name}.json", partial(deep, name))
        sizes = [f"{arms[arm][0]['parameters']:,.0f}" for arm in ("small", "deepened", "widened")]
        others = ("small", "static", "stacked")
        differences = [difference(arms["deepened"], arms[other]) for other in others]
        rows.append((name, ", ".join(sizes), *(mean(of(arms[arm])) for arm in arms), *differences))
    heads = (
        "host of two blocks", "parameters: small, deepened, widened", "never grown", "deepened",
        "widened", "four from the start", "stacked", "deepened − never grown",
        "deepened − four from the start", "deepened − stacked",
    )  # fmt: skip
    return [
        f"## Deeper\n\n{EPOCHS} epochs, six seeds. *Stacked* repeats the trained blocks after a "
        "tenth of the epochs and trains the rest with a new optimizer, as G_stack (Du and others, "
        "2024). Of the GPT the figure is the accuracy of the next byte.",
        table(heads, rows),
    ]


def moment_page(work: Path) -> list[str]:
    """The table of moments and of the optimizer's state."""
    host = HOSTS["MLP of width 4, noisy digits"]
    rows = [
        (f"{begin:.0%}", *(mean(values) for values in cells))
        for begin, *cells in kept(work / "moment.json", partial(moment, host))
    ]
    heads = ["widened after"]
    heads += [f"{share:.0%}, rate {rate}" for share in (1.0, 0.01, 0.0) for rate in (0.01, 0.03)]
    return [
        "## When, and with which state of the optimizer\n\nThe MLP on noisy digits, three times as "
        "wide, eight seeds. Adam's mean of squared gradients of a new entry starts at a share of "
        "the mean over the others (`wider_layers.FRESH` is 1 %): at the whole mean, new entries "
        "learn so slowly that a late widening comes to nothing.",
        table(heads, rows),
    ]


DEEP: dict[str, Any] = {
    "residual CNN, noisy digits": (residual, noisy_digits, "4"),
    "GPT of width 32, bytes": (Gpt, text_windows, "blocks"),
}
PARTS = {
    "fresh": fresh_page,
    "normed": normed_page,
    "recurrent": recurrent_page,
    "products": product_page,
    "own": own_page,
    "cost": cost_page,
    "repeated": repeated_page,
    "gromo": gromo_page,
    "trained": trained_page,
    "deep": deep_page,
    "moment": moment_page,
}


def main() -> None:
    """Run the parts and print the page."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/widening"))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    paragraphs = [text for name in arguments.parts for text in PARTS[name](arguments.work)]
    figures = "Test accuracy or R² in percent; intervals are 95 % over seeds (Student's t)."
    parts = (figures, *paragraphs, f"{made_on()}.")
    publish("widening", "Widening in mid-training", parts, arguments.write)


if __name__ == "__main__":
    main()
