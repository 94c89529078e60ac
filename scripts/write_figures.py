"""Write the figures of README.md and docs/ from the committed results.

    python scripts/write_figures.py

A page holds a text from the results between ``<!-- figures: NAME -->`` and ``<!-- end -->``; a
block of code or a table is copied as it is. A test compares the pages with this script. Where a
result is missing, the text is that it is not measured yet.
"""

import argparse
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from own_model_figures import own_models
from policy_figures import acting, looking, policy, read, what_shifts

from esper.runtime.tasks import SUITES, find
from esper_lab.evaluation import CAPACITY, CLAIRVOYANT, NEVER_GROW, RULES, SWEEP
from esper_lab.ladder_steps import points_text, verdict
from esper_lab.shipped_controls import shipped_controls, shipped_suites

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    "README.md",
    "benchmarks/results/policy_study.md",
    "benchmarks/results/summary.md",
    "docs/evaluation.md",
    "docs/own-models.md",
    "docs/performance.md",
    "docs/tasks.md",
)
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIXED = "best fixed schedule"
TUNED_TWIN, COPY = "never grow, tuned", "full tuning of a copy"
NEVER_GROWS = "best network that never grows"
WIDTH = 105


RACES = {
    "digits": "digits",
    "mlp": "fully connected",
    "text": "text",
    "pixels": "CIFAR shapes",
    "wide_32": "32-64 channels",
    "wide_128": "128-256 channels",
}
"""What the races are called in the texts, by the names of their files."""


def speed(results: Path) -> str:
    """How much faster than the naive loop, in its fastest way, the whole training loop runs."""
    races = {what: read(f"hot_path_{name}", results) for name, what in RACES.items()}
    if None in races.values():
        return (
            "- **It is fast**, but against the fastest way of running the naive loop it is not "
            "measured yet (`make bench-hot-path`)."
        )
    ratios = []
    for what, rows in races.items():
        (native,) = (row for row in rows if row["backend"] == "NativeBackend")
        ratios.append(f"{native['ratio']:.1f} ({what})")
    counts = {len(rows[0]["ways"]) for rows in races.values()}
    ways, cores = " to ".join(map(str, sorted({min(counts), max(counts)}))), native["threads"]
    return (
        f"- **It is fast.** On {cores} cores training runs {', '.join(ratios[:-1])} and "
        f"{ratios[-1]} times as fast as over plain modules in the fastest of {ways} ways "
        "([races](docs/performance.md))."
    )


def world(results: Path) -> str:
    """Where knowing a host would be worth something, and what growing is worth there."""
    found = read("world", results)
    if found is None:
        return (
            "- **Where looking at a host could pay** is not measured yet in this version "
            "(`make bench-world`)."
        )
    passing = [f"`{name}`" for name, own in found.items() if own["passes"]]
    parts = [
        "- **Where looking at a host could pay:** "
        f"{', '.join(passing) if passing else 'none'} of {len(found)} families "
        f"{'passes' if len(passing) < 2 else 'pass'} "
        "[the gate](docs/evaluation.md#intervals-and-headroom)."
    ]
    for name, own in found.items():
        room = own["headroom"]
        text = (
            f"On {own['hosts']} fresh hosts of `{name}` a clairvoyant is "
            f"{verdict(room['over_looking'])} the best rule that looks, by "
            f"{points_text(room['over_looking'])} points of test utility"
        )
        if room["best_training"] is not None:
            text += (
                f", and {verdict(room['over_training'])} the best network that does not grow "
                f"(*{room['best_training']}*), by {points_text(room['over_training'])}"
            )
        parts.append(f"{text}.")
    return f"{' '.join(parts)} ([results](benchmarks/results/world.md))"


def gate(results: Path) -> str:
    """What the gate says of each family, and what a network that does not grow reaches there."""
    found = read("world", results)
    if found is None:
        return "The families are not measured yet in this version (`make bench-world`)."
    parts = [world_pages(found)]
    for name, own in found.items():
        room, controls = own["headroom"], own["controls"]
        text = (
            f"`{name}` {'passes' if own['passes'] else 'does not pass'} the gate: a clairvoyant "
            f"that knows the best plan of each host is {verdict(room['over_looking'])} the best "
            f"rule that looks, by {points_text(room['over_looking'])} points"
        )
        if room["best_training"] is not None:
            text += (
                f", and {verdict(room['over_training'])} *{room['best_training']}*, the best "
                f"network that does not grow, by {points_text(room['over_training'])}"
            )
        parts.append(f"{text}.")
        if COPY in controls:
            parts.append(
                f"Its gain is {points_text(controls[CLAIRVOYANT]['gain'])}, that of *{COPY}*, "
                f"which pays the price, {points_text(controls[COPY]['gain'])}."
            )
        if TUNED_TWIN in controls:
            growing_rules = [rule for rule in RULES if rule in controls and rule != NEVER_GROW]
            best = max(growing_rules, key=lambda rule: controls[rule]["utility"][0])
            parts.append(
                f"Its hosts start from initial weights: the best rule that grows (*{best}*) gains "
                f"{points_text(controls[best]['gain'])} points, a never-grow twin with a tuned "
                f"learning rate {points_text(controls[TUNED_TWIN]['gain'])}."
            )
    return " ".join(parts)


def world_pages(found: dict[str, Any]) -> str:
    """Where the ladders of the families are, and of how many hosts."""
    hosts = sorted({own["hosts"] for own in found.values()})
    return (
        f"The page of [all families](benchmarks/results/world.md) has "
        f"{' or '.join(map(str, hosts))} hosts of each; what was tried before is on "
        "[another](benchmarks/results/rejected_families.md)."
    )


def shipped(results: Path) -> str:
    """Which controls of families ship, and of how many hosts; they are results in the package."""
    stored = {name: shipped_controls(name) for name in shipped_suites() if name != CAPACITY}
    sizes = {(own.hosts, own.training_hosts) for own in stored.values() if own is not None}
    (hosts, training), *others = sorted(sizes)
    if others:
        raise ValueError(f"the shipped controls are of several sizes: {sorted(sizes)}")
    *first, last = (f"`{name}`" for name in stored)
    return (
        f"The controls of {', '.join(first)} and {last} ship with Esper, played on {hosts} hosts "
        f"with rules tuned on {training}."
    )


def table_of(names: Sequence[str]) -> Callable[[Path], str]:
    """A table of tasks, from their definitions alone."""

    def table(results: Path) -> str:
        lines = ["| task | data | host | parameters | slots | steps |", "|---|---|---|---|---|---|"]
        for task in map(find, names):
            host = task.host.summary.removeprefix("conv ")
            lines.append(
                f"| `{task.name}` | {task.summary} | {host} | "
                f"{task.host.parameter_count:,} | {len(task.host.slots)} | {task.episode_length} |"
            )
        return "\n".join(lines)

    return table


def example(results: Path) -> str:
    """What ``esper evaluate`` prints, as a block of code."""
    path = results / "example_ladder.md"
    if not path.exists():
        return "Its output is not kept yet in this version (`make bench-world`)."
    (block,) = re.findall(r"^```\n.*?^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return block


def growing(results: Path) -> str:
    """On which tasks growing pays, above the twin and above the best network without growing."""
    found = read("tasks", results)
    if found is None:
        return (
            "- **What growing is worth on each task** is not measured yet in this version "
            "(`make bench-tasks`)."
        )
    gains = {name: own["controls"][FIXED]["gain"] for name, own in found.items()}
    rising = [name for name, gain in gains.items() if gain[1] > 0.0]
    paying = [name for name, own in found.items() if own["above_network"][1] > 0.0]
    best, least = (choose(gains, key=lambda name: gains[name][0]) for choose in (max, min))
    where = f" ({', '.join(f'`{name}`' for name in paying)})" if paying else ""
    return (
        f"- **What growing is worth on each task:** on {len(rising)} of {len(gains)} tasks the "
        "best fixed schedule, chosen on other hosts and splits, is above the never-grow twin of "
        f"the same recipe on test. Its gain is largest on `{best}`, {points_text(gains[best])} "
        f"points, and smallest on `{least}`, {points_text(gains[least])}. Against the better of a "
        "never-grow twin with tuned rates and a tuned static network of three times the size, "
        f"growing **pays on {len(paying)}**{where} ([results](benchmarks/results/tasks.md))."
    )


def backends(results: Path) -> str:
    """How much faster the native backend is than torch."""
    names = {
        "hot_path_digits": "on `digits_shift`",
        "hot_path_pixels_tiny": "on tiny hosts",
        "hot_path_pixels": "on CIFAR-shaped images",
        "hot_path_text": "on text",
    }
    ratios = []
    for name, where in names.items():
        rows = {row["backend"]: row for row in read(name, results)}
        ratio = rows["NativeBackend"]["eps"] / rows["TorchBackend"]["eps"]
        ratios.append(f"{ratio:.1f} times {where}")
    return (
        "Without g++ torch computes the hosts. In whole training loops the native backend is "
        f"faster than torch, {', '.join(ratios[:-1])} and {ratios[-1]} (tables linked below)."
    )


def results_table(results: Path) -> str:
    """The main comparisons in at most eight lines, those included that growing loses: a table."""
    rows = [*_widening_rows(results), *_slot_rows(results), *_policy_rows(results)]
    rows += _looking_rows(results)
    tasks = read("tasks", results)
    if tasks is not None:
        paying = sum(one["above_network"][1] > 0.0 for one in tasks.values())
        rows.append(
            (
                "best fixed schedule, by task",
                NEVER_GROWS,
                f"above on {paying} of {len(tasks)} tasks",
                "tasks",
            )
        )
    if not rows:
        return "This is not measured yet in this version."
    lines = ["| | against | difference |", "|---|---|---|"]
    for who, opponent, difference, page in rows:
        lines.append(f"| [{who}](benchmarks/results/{page}.md) | {opponent} | {difference} |")
    return "\n".join(lines)


def _widening_rows(results: Path) -> list[tuple[str, str, str, str]]:
    """What ``esper.grow`` does by default, on the hosts of the suite ``capacity``."""
    ladder = read("capacity_ladder", results)
    if ladder is None:
        return []
    opponents = {NEVER_GROW: "never grown", SWEEP: "best of five static sizes"}
    who = f"`widen`, {ladder['hosts']} tuned networks"
    return [
        (who, text, _judged(ladder["tuned_minus"][name]), "capacity_ladder")
        for name, text in opponents.items()
    ]


def _slot_rows(results: Path) -> list[tuple[str, str, str, str]]:
    """What PPO gains where its seeds make layers wider."""
    slots = read("spanning_slots", results)
    if slots is None:
        return []
    who = f"PPO, layers become wider, {slots['seeds']} seeds"
    difference = _judged(slots["ppo_minus_default"]["wide"])
    return [(who, "seeds behind layers", difference, "spanning_slots")]


def _policy_rows(results: Path) -> list[tuple[str, str, str, str]]:
    """The policies of the training suite on the held-out suite."""
    suite = read("suite", results)
    if suite is None:
        return []
    one = suite["fresh"]["held_out"]["policies"]["sampled"]
    who = f"{suite['policies']} PPO policies, held-out suite"
    return [
        (who, f"best rule (*{one['rule']}*)", _judged(one["above_rule"]), "suite"),
        (who, NEVER_GROWS, _judged(one["above_network"]), "suite"),
    ]


def _looking_rows(results: Path) -> list[tuple[str, str, str, str]]:
    """The policies that learned from recorded branches, on the family where a look pays."""
    rows = []
    study = read("policy", results)
    if study is not None:
        one = study["policies"]["greedy"]
        who = f"{len(one['by_controller'])} policies from records, `one_seed`"
        rows.append((who, f"best rule (*{one['rule']}*)", _judged(one["above_rule"]), "policy"))
        rows.append((who, NEVER_GROWS, _judged(one["above_network"]), "policy"))
    return rows


def _judged(difference: Sequence[float]) -> str:
    """A difference with its interval; bold where the interval excludes zero."""
    text = points_text(difference)
    return text if verdict(difference).startswith("neither") else f"**{text}**"


def picture(results: Path) -> str:
    """What the picture of growth shows."""
    drawn = (results.parents[1] / "docs" / "images" / "growth.svg").read_text()
    description = match(r"<desc>(.*)</desc>", drawn)[0]
    envs, gain = match(r"median gain of (\d+): ([^)]*)\)", description)
    host, grown = match(r"twin (\d+) parameters, grown host (\d+)", description)
    return (
        f"*A host of {host} parameters, {grown} when grown, and its never-grow twin, which has the "
        f"same initial weights and minibatches. Of the last {envs} episodes of `esper train ppo "
        f"--slots wide` it has the median gain, {gain} ([script](scripts/draw_growth.py)).*"
    )


def match(pattern: str, text: str) -> tuple[str, ...]:
    """Return the groups of a pattern that the text is sure to have.

    Raises:
        ValueError: it has not.
    """
    groups = re.search(pattern, text)
    if groups is None:
        raise ValueError(f"docs/images/growth.svg says nothing like {pattern}")
    return groups.groups()


TEXTS: dict[str, Callable[[Path], str]] = {
    "speed": speed,
    "picture": picture,
    "policy": policy,
    "looking": looking,
    "shifts": what_shifts,
    "acting": acting,
    "growing": growing,
    "own_models": own_models,
    "results": results_table,
    "world": world,
    "backends": backends,
    "gate": gate,
    "shipped": shipped,
    "example": example,
    **{f"tasks_{suite}": table_of(SUITES[suite]) for suite in ("suite", "held_out", "cifar")},
    "tasks_text": table_of(("text_bytes", "text_gpt")),
}


def written(page: str, results: Path = RESULTS, folder: str = "") -> str:
    """Return a page with the texts from the results.

    Args:
        page: the page.
        results: folder of the results.
        folder: how to get from the page to the root of the repository.
    """

    def block(found: re.Match[str]) -> str:
        text = TEXTS[found[2]](results)
        text = re.sub(r"\]\((benchmarks|docs)/", rf"]({folder}\1/", text)
        if text.startswith(("```", "|")):
            return f"{found[1]}{text}\n{found[3]}"
        return "\n".join([found[1] + "\n".join(map(_wrapped, text.splitlines())), found[3]])

    return BLOCK.sub(block, page)


def _wrapped(text: str) -> str:
    """A paragraph or an item of a list in lines of ``WIDTH``."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def main() -> None:
    """Write all pages."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    for name in PAGES:
        path = ROOT / name
        path.write_text(written(path.read_text(), folder="../" * name.count("/")))


if __name__ == "__main__":
    main()
