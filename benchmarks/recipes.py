"""With which recipe is each task's host trained well, and a static network of the grown size too?

    python benchmarks/recipes.py --write      # both suites, about an hour on one core

Trains two networks of every task without growing: its host, and a host of the same kind that is
widened to three times its parameters, which is about what growing everything adds. Every recipe of
a task is played on the same hosts with the same minibatches, in one engine.

1. All rates with both decays, clipping at norm 1, no weight decay. The best recipe of either
   network is chosen, and the one that loses least against both; or the most accurate of those that
   lose no more than it and are more accurate, by two standard errors.
2. These recipes with other clipping, and with weight decay; taken where they gain more than two
   standard errors.
3. The chosen recipes on fresh hosts.

Recipes are chosen by expected accuracy, of which utility is made, on validation. Hosts and splits
are the tuning's own: their identities and split seeds are not those of evaluations. The losses and
scores in the tables are those of stage 3 on test. Finished tasks are kept in ``--work``; an
interrupted benchmark continues from there. ``--write`` also writes the table that evaluations read.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from reporting import kept, made_on, new_parser, publish, table
from runs import Mean

from esper.kasmina.seeds import SeedState
from esper.runtime.tasks import Task, find_all
from esper.tolaria.backends.choice import choose_backend
from esper.tolaria.bank import DataBank
from esper.tolaria.engine import Engine, Rows
from esper.tolaria.precision import Precision
from esper_lab.baselines import GROWN, TABLE, Recipe, TunedRecipes, widen

Floats = NDArray[np.float64]

RATES = 0.01, 0.02, 0.05, 0.1, 0.2
DECAYS = "constant", "cosine"
PLAIN = [Recipe(rate, decay) for decay, rate in product(DECAYS, RATES)]
VARIANTS: dict[str, dict[str, float]] = {
    "clip 10": {"max_gradient_norm": 10.0},
    "weight decay 0.01": {"weight_decay": 0.01},
    "weight decay 0.1": {"weight_decay": 0.1},
}
"""What stage 2 changes in a recipe."""
ROLES = "host", "static", "shared"
KINDS = "former", "shared", "own"
NOTICEABLE = 0.005
"""Loss below which two recipes count as equally good."""
FORMER = Recipe(0.005)
"""The recipe of most tasks before recipes were tuned."""

SPLITS = 101, 102, 103
"""Seeds of the splits; evaluations use small ones."""
TUNING_HOSTS, FINAL_HOSTS = 1 << 22, 1 << 23
"""Identities of the first hosts of the tuning and of stage 3; evaluations use smaller ones."""
PER_TUNING, PER_FINAL = 5, 12
"""Hosts per split."""
ORDER = 3
"""Seed of the data order; evaluations use 1 and 2."""
CPU = torch.device("cpu")


def trained(task: Task, recipes: Sequence[Recipe], first: int, hosts: int) -> Floats:
    """Train the host of ``task`` without growing, by every recipe on the same hosts.

    Args:
        task: the task.
        recipes: R recipes.
        first: identity of the first host.
        hosts: number of hosts per split, H / 3.

    Returns:
        Expected accuracy and accuracy on validation, then on test, after the last step,
        ``[4, R, H]``.
    """
    found = np.zeros((4, len(recipes), len(SPLITS), hosts))
    kinds = [(recipe.max_gradient_norm, recipe.weight_decay) for recipe in recipes]
    for kind, (i, split) in product(dict.fromkeys(kinds), enumerate(SPLITS)):
        mine = [r for r, other in enumerate(kinds) if other == kind]
        tasks = [recipes[r].on(task.with_split(split)) for r in mine]
        found[:, mine, i] = _trained_together(tasks, first + i * hosts, hosts)
    return found.reshape(4, len(recipes), -1)


def _trained_together(tasks: list[Task], first: int, hosts: int) -> Floats:
    """As ``trained``, for tasks that differ in rate and decay alone; ``[4, R, hosts]``."""
    task, count = tasks[0], len(tasks) * hosts
    bank = DataBank([(one, one.datasets()) for one in tasks], torch.float32, CPU)
    identity = first + torch.arange(hosts).repeat(len(tasks))
    rows = Rows(torch.arange(count), identity, torch.arange(len(tasks)).repeat_interleave(hosts))
    backend = choose_backend("auto", task.host, Precision("cpu"), torch.float32, CPU)
    length = task.episode_length
    budget = (task.max_batches, task.batch_size, length)
    engine = Engine(bank, rows, 1, backend, *budget, data_seed=ORDER)
    engine.reset(0)
    seeds = SeedState.dormant((count, len(engine.slots)), CPU)
    for step in range(length):
        engine.train(seeds, step)
    scores = [engine.committed_scores(seeds, length - 1, split) for split in ("validation", "test")]
    found = torch.stack([x for score in scores for x in (score.expected, score.accuracy)])
    # A diverged host predicts nothing.
    return found.double().nan_to_num(0.0).view(4, len(tasks), hosts).numpy()


def least(losses: Floats, accuracy: Floats | None = None) -> int:
    """Return the recipe that loses least; ``losses`` and ``accuracy`` are ``[R, H]``.

    With ``accuracy``, the most accurate of the recipes that lose no more and are more accurate,
    both by two standard errors; if there are none, the one that loses least.
    """
    best = int(losses.mean(1).argmin())
    if accuracy is None:
        return best
    better = [
        r
        for r, loss in enumerate(losses)
        if not _above(loss, losses[best]) and _above(accuracy[r], accuracy[best])
    ]
    return max(better, key=lambda r: float(accuracy[r].mean()), default=best)


def _above(a: Floats, b: Floats) -> bool:
    """Whether the paired difference ``a - b`` is above 0 by more than two standard errors."""
    difference = Mean.of(a - b)
    return difference.value > 2.0 * difference.error


def tuned(task: Task) -> dict[str, Any]:
    """Return the chosen recipes of a task and what they score."""
    host = widen(task.host, GROWN * task.host.parameter_count)
    assert host is not None
    networks = {"host": task, "static": replace(task, host=host)}

    def played(recipes: Sequence[Recipe], first: int, hosts: int) -> dict[str, Floats]:
        return {name: trained(one, recipes, first, hosts) for name, one in networks.items()}

    screened = played(PLAIN, TUNING_HOSTS, PER_TUNING)
    expected = np.stack([screened[name][0] for name in networks])
    accuracy = np.mean([screened[name][1] for name in networks], 0)
    best = [least(-found) for found in expected]
    losses = np.stack([found[best[own]] - found for own, found in enumerate(expected)])
    picks = [*best, least(_larger(losses), accuracy)]
    roles = {role: PLAIN[pick] for role, pick in zip(ROLES, picks, strict=True)}
    varied = {
        role: [msgspec.structs.replace(recipe, **change) for change in VARIANTS.values()]
        for role, recipe in roles.items()
    }
    together = list(dict.fromkeys(recipe for some in varied.values() for recipe in some))
    again = played(together, TUNING_HOSTS, PER_TUNING)
    variants = np.stack([again[name][0] for name in networks])
    gains: dict[str, dict[str, Mean]] = {}
    for role, pick in zip(ROLES, picks, strict=True):
        nets = [ROLES.index(role)] if role in networks else [0, 1]
        # Gain of each variant, by the network that gains less.
        mine = [together.index(recipe) for recipe in varied[role]]
        gain = -_larger(expected[nets][:, [pick]] - variants[nets][:, mine])
        gains[role] = {name: Mean.of(g) for name, g in zip(VARIANTS, gain, strict=True)}
        top = int(gain.mean(1).argmax())
        if _above(gain[top], np.zeros_like(gain[top])):
            roles[role] = varied[role][top]
    tested = played([*roles.values(), FORMER], FINAL_HOSTS, PER_FINAL)
    return {
        **roles,
        "host_parameters": task.host.parameter_count,
        "static_parameters": host.parameter_count,
        "static_summary": host.summary,
        "variants": gains,
        "tested": {name: _measured(tested[name], own) for own, name in enumerate(networks)},
        "grid": {
            str(recipe): {
                name: {"expected": float(found[0, r].mean()), "accuracy": float(found[1, r].mean())}
                for name, found in screened.items()
            }
            for r, recipe in enumerate(PLAIN)
        },
    }


def _larger(losses: Floats) -> Floats:
    """The losses ``[R, H]`` of the network whose mean loss is larger, of ``[networks, R, H]``."""
    worse = losses.mean(2).argmax(0)
    larger: Floats = losses[worse, np.arange(losses.shape[1])]
    return larger


def _measured(scores: Floats, own: int) -> dict[str, Any]:
    """Test figures of a network; ``scores [4, 4, H]`` are by own recipes, shared and former."""
    _, _, expected, accuracy = scores
    return {
        "own": Mean.of(expected[own]),
        "own_accuracy": float(accuracy[own].mean()),
        "shared_accuracy": float(accuracy[2].mean()),
        "former_accuracy": float(accuracy[3].mean()),
        "loss_shared": Mean.of(expected[own] - expected[2]),
        "loss_former": Mean.of(expected[own] - expected[3]),
    }


def page(figures: dict[str, Any]) -> list[str]:
    """Return the tables: recipes and their losses, accuracies, variants."""
    recipes, scores, variants = [], [], []
    for name, found in figures.items():
        own = [str(_recipe(found[role])) for role in ROLES]
        losses = [Mean(**found["tested"][net]["loss_shared"]) for net in ("host", "static")]
        differ = any(loss.value > max(NOTICEABLE, 2.0 * loss.error) for loss in losses)
        recipes.append((f"`{name}`", *own, *losses, "differ" if differ else "agree"))
        grown = f"{found['static_parameters']} ({found['static_summary']})"
        row: list[object] = [f"`{name}`"]
        for net, size in (("host", found["host_parameters"]), ("static", grown)):
            row.append(size)
            row += [f"{100 * found['tested'][net][f'{kind}_accuracy']:.1f}" for kind in KINDS]
        scores.append(row)
        gains = [Mean(**gain) for gain in found["variants"]["shared"].values()]
        variants.append((f"`{name}`", *gains))
    heads = ["task", "best for the host", "best for the static network", "shared"]
    heads += ["host loses", "static network loses", "optima"]
    score_heads = ["task", "host", *KINDS, "static network", *KINDS]
    return [table(heads, recipes), table(score_heads, scores), table(["task", *VARIANTS], variants)]


def _recipe(values: dict[str, Any]) -> Recipe:
    return msgspec.convert(values, Recipe)


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__)
    parser.add_argument("--task", nargs="+", default=["suite", "held_out"])
    parser.add_argument("--work", type=Path, default=Path("runs/bench-recipes"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for task in find_all(arguments.task):
        found = kept(arguments.work / f"{task.name}.json", lambda: _plain(tuned(task)))  # noqa: B023
        figures[task.name] = found
        print(
            f"{task.name}: " + ", ".join(f"{role} {_recipe(found[role])}" for role in ROLES),
            flush=True,
        )
    recipes, scores, variants = page(figures)
    parts = (
        f"Rates {', '.join(map(str, RATES))}, constant and with cosine decay. "
        f"{len(SPLITS) * PER_TUNING} hosts per recipe in the tuning, and {len(SPLITS) * PER_FINAL} "
        f"other hosts in the first two tables, on {len(SPLITS)} splits of the data. The tasks on "
        "CIFAR-10 and on text were not tuned: their episodes are too long for a grid.",
        recipes,
        "Losses by the shared recipe against the network's own are points of expected accuracy on "
        "test, with the standard error over hosts. Optima *differ* if either loses more than "
        f"{100 * NOTICEABLE:g} points and two standard errors. The shared recipe is the task's.",
        "Recipes are chosen by expected accuracy, of which utility is made. A constant rate gives "
        "small networks more of it, because they are more confident, but less accuracy.",
        scores,
        f"Accuracy on test in percent. *Former*: {FORMER}, the default of tasks.",
        variants,
        "What other clipping and weight decay gain at the shared recipe, in points of expected "
        "accuracy on validation, by the network that gains less.",
        f"{made_on('1 thread')}.",
    )
    title = "Recipes of the tasks, tuned for hosts that never grow and for static networks"
    publish("recipes", title, parts, arguments.write, figures)
    if arguments.write:
        names = TunedRecipes.__struct_fields__
        kept_figures = {name: {key: found[key] for key in names} for name, found in figures.items()}
        TABLE.write_text(json.dumps(kept_figures, indent=2) + "\n")
    return 0


def _plain(found: dict[str, Any]) -> Any:
    """The figures as JSON values."""
    return json.loads(msgspec.json.encode(found, enc_hook=vars))


if __name__ == "__main__":
    raise SystemExit(main())
