"""Is growth of one's own model worth it? Five models beside tuned training and wider networks.

    python benchmarks/own_model_results.py --write      # about an hour on one free core

Every arm of a model has the same data, initial weights of the same seeds, AdamW with a cosine and,
unless it says otherwise, the same epochs. The recipe of an arm without growth is the best on
validation, as the mean over ``TUNING_SEEDS``; growth takes that of plain training. Arms are then
played on ``SEEDS`` and reported on test. Every run is a process of its own, and is kept under
``--work``.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from own_model_cases import CASES, Case, Recipe
from reporting import kept, made_on, new_parser, publish, table
from torch import nn

from esper.karn.intervals import interval
from esper.kasmina.wider_layers import parameter_count
from esper.own_models.growing import grow
from esper.own_models.objectives import objective
from esper.own_models.options import PRICE
from esper.tolaria.memory import forget_peak, peak_resident
from esper_lab.ladder_steps import points_text, verdict

SEEDS, TUNING_SEEDS = (0, 1, 2, 3, 4), (100, 101)
PLAIN, SAME_SIZE, SAME_TIME = "plain", "wider, equal parameters", "longer, equal time"
STATIC = (PLAIN, SAME_SIZE, SAME_TIME)
"""Arms that do not grow."""
GROWING = {"wider layers": ("widen",), "residual seeds": ("heuristic", "rule", "keep-or-move")}
"""Policies by what they grow; each kind has opponents of its own size and time."""
PRICES = {"widen": PRICE}
"""Prices of parameters by policy."""
OTHER_PRICE = 0.05


@dataclass(frozen=True)
class Plan:
    """How an arm trains.

    Attributes:
        width: of the module.
        epochs: epochs of training.
        policy: see ``esper.grow``.
        recipe: see ``own_model_cases.Recipe``.
    """

    width: int
    epochs: int
    policy: str
    recipe: Recipe = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Names the file of a run."""
        recipe = "-".join(f"{key}-{value:g}" for key, value in self.recipe.items())
        return f"{Path(self.policy).name}-width-{self.width}-epochs-{self.epochs}-{recipe}"


@cache
def built(case: str, width: int, seed: int) -> nn.Module:
    """The module before training; only to be copied."""
    torch.manual_seed(seed)
    return CASES[case].build(width, seed)


def trained(name: str, plan: Plan, seed: int) -> dict[str, Any]:
    """Train once: figures on validation and test, parameters, seconds and peak memory."""
    case = CASES[name]
    model, (train, validation, test) = (
        copy.deepcopy(built(name, plan.width, seed)),
        case.loaders(seed),
    )
    forget_peak()
    torch.manual_seed(seed)
    begun, used = time.perf_counter(), time.process_time()
    result = grow(
        model,
        train,
        validation,
        loss=case.loss,
        epochs=plan.epochs,
        policy=plan.policy,
        price=PRICES.get(plan.policy, OTHER_PRICE),
        optimizer=lambda _: case.optimizer(model, plan.recipe),
        scheduler=lambda optimizer: case.scheduler(optimizer, plan.epochs),
        clip=case.clip,
        test_loader=test,
        seed=seed,
        progress=False,
    )
    assert result.test is not None
    return {
        "validation": case.measure(result.validation),
        "test": case.measure(result.test),
        "parameters": result.parameters,
        "host_parameters": result.host_parameters,
        "seconds": time.perf_counter() - begun,
        "processor_seconds": time.process_time() - used,
        "peak_mib": (peak_resident() or 0) / 2**20,
        "seeds": result.seeds,
    }


def alone(name: str, plan: Plan, seed: int) -> dict[str, Any]:
    """``trained`` in a process of its own."""
    built(name, plan.width, seed)
    with get_context("fork").Pool(1) as pool:
        return pool.apply(trained, (name, plan, seed))


def play(work: Path, name: str, plan: Plan, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Runs of a plan, one per seed; those that are kept are not repeated."""
    found = []
    for seed in seeds:
        path = work / name / f"{plan.name}-seed-{seed}.json"
        known = path.exists()
        run = kept(path, partial(alone, name, plan, seed))
        if not known:
            print(
                f"{name}: {plan.name}, seed {seed}: validation {run['validation']:.2f}, "
                f"test {run['test']:.2f}, {run['parameters']:,} parameters, "
                f"{run['seconds']:.1f} s",
                flush=True,
            )
        found.append(run)
    return found


def mean(runs: list[dict[str, Any]], key: str) -> float:
    """The mean over runs."""
    return float(np.mean([run[key] for run in runs]))


def tuned(work: Path, name: str, width: int) -> Plan:
    """The plan without growth whose recipe is best on validation."""
    case = CASES[name]
    plans = [Plan(width, case.epochs, "never", recipe) for recipe in case.recipes]
    scores = [mean(play(work, name, plan, TUNING_SEEDS), "validation") for plan in plans]
    return plans[int(np.argmax(scores))]


def wider(name: str, parameters: float) -> int:
    """The least width of a module with at least so many parameters."""
    case = CASES[name]
    width = case.width
    while parameter_count(built(name, width, TUNING_SEEDS[0])) < parameters:
        width += case.multiple
    return width


def longer(work: Path, name: str, plans: list[Plan], seconds: float) -> Plan:
    """The static plan that is best on validation if each trains for ``seconds``."""
    found = []
    for plan in plans:
        own = mean(play(work, name, plan, TUNING_SEEDS), "processor_seconds")
        epochs = max(plan.epochs, ceil(plan.epochs * seconds / own))
        found.append(replace(plan, epochs=epochs))
    scores = [mean(play(work, name, plan, TUNING_SEEDS), "validation") for plan in found]
    return found[int(np.argmax(scores))]


def arms(work: Path, name: str, policies: Sequence[str]) -> dict[str, Plan]:
    """The plan of every arm.

    The wider network has at least as many parameters as the larger of the grown networks, and the
    longer training takes at least as long as the slower of them, on the seeds of tuning.
    """
    plain = tuned(work, name, CASES[name].width)
    growing = {policy: replace(plain, policy=policy) for policy in policies}
    grown = [play(work, name, plan, TUNING_SEEDS) for plan in growing.values()]
    width = wider(name, max(mean(runs, "parameters") for runs in grown))
    large = tuned(work, name, width)
    seconds = max(mean(runs, "processor_seconds") for runs in grown)
    static = {PLAIN: plain, SAME_SIZE: large}
    return static | {SAME_TIME: longer(work, name, [plain, large], seconds)} | growing


def same_as_plain_loop(case: Case, name: str) -> bool:
    """Whether two epochs of ``esper.grow`` without growth have the bits of a plain loop."""
    recipe, goal = case.recipes[-1], objective(case.loss)
    models = [copy.deepcopy(built(name, case.width, 0)) for _ in range(2)]
    train, validation, _ = case.loaders(0)
    torch.manual_seed(0)
    optimizer = case.optimizer(models[0], recipe)
    scheduler = case.scheduler(optimizer, 2)
    for _ in range(2):
        models[0].train()
        for x, y in train:
            optimizer.zero_grad()
            goal.loss(models[0](x), y).backward()
            if case.clip is not None:
                nn.utils.clip_grad_norm_(models[0].parameters(), case.clip)
            optimizer.step()
        scheduler.step()
    torch.manual_seed(0)
    grow(
        models[1],
        train,
        validation,
        loss=case.loss,
        epochs=2,
        policy="never",
        optimizer=lambda _: case.optimizer(models[1], recipe),
        scheduler=lambda made: case.scheduler(made, 2),
        clip=case.clip,
        progress=False,
    )
    ours, theirs = (model.state_dict() for model in models)
    return all(torch.equal(value, theirs[key]) for key, value in ours.items())


def measured(work: Path, name: str, policies: Sequence[str]) -> dict[str, Any]:
    """Every arm of a model on ``SEEDS``."""
    plans = arms(work, name, policies)
    return {
        arm: {"plan": asdict(plan), "runs": play(work, name, plan, SEEDS)}
        for arm, plan in plans.items()
    }


def shown(values: Sequence[float], form: str = ".1f") -> str:
    """The mean with its 95 % interval."""
    known = interval(np.array([values]))
    return points_text((known.mean[0], known.low[0], known.high[0]), form)


def differences(found: dict[str, Any], arm: str, other: str) -> list[float]:
    """How much better ``arm`` is than ``other`` on test, by seed."""
    pairs = zip(found[arm]["runs"], found[other]["runs"], strict=True)
    return [run["test"] - beside["test"] for run, beside in pairs]


def best_static(found: dict[str, Any]) -> str:
    """The arm without growth that is best on test."""
    return max(STATIC, key=lambda arm: mean(found[arm]["runs"], "test"))


def compared(values: Sequence[float], form: str) -> str:
    """The mean of differences, its interval, and on which side of zero that lies."""
    known = interval(np.array([values]))
    return f"{shown(values, form)}: {verdict((known.mean[0], known.low[0], known.high[0]))}"


def page(name: str, kind: str, found: dict[str, Any]) -> list[str]:
    """The paragraphs about a model and what grows in it."""
    case, form = CASES[name], ".3f" if name == "GPT" else ".1f"
    rows = []
    for arm, own in found.items():
        plan, runs = own["plan"], own["runs"]
        recipe = ", ".join(f"{key} {value:g}" for key, value in plan["recipe"].items())
        beside = shown(differences(found, arm, PLAIN), f"+{form}") if arm != PLAIN else ""
        rows.append(
            (
                arm,
                f"{recipe}; {plan['epochs']} epochs, width {plan['width']}",
                f"{mean(runs, 'parameters'):,.0f}",
                shown([run["test"] for run in runs], form),
                beside,
                f"{mean(runs, 'processor_seconds'):.1f}",
                f"{mean(runs, 'peak_mib'):.0f}",
            )
        )
    heads = ["arm", "recipe", "parameters", f"test {case.figure}", "difference from plain"]
    heads += ["time, s", "peak, MiB"]
    return [
        f"## {name}, {kind}",
        f"{case.description[0].upper()}{case.description[1:]}.",
        table(heads, rows),
    ]


def summary(results: dict[str, dict[str, Any]]) -> str:
    """One line for each model and policy, of one kind of growth."""
    rows = []
    for name, found in results.items():
        best, form = best_static(found), "+.3f" if name == "GPT" else "+.1f"
        for policy in [arm for arm in found if arm not in STATIC]:
            above, beside = (differences(found, policy, other) for other in (PLAIN, best))
            rows.append((name, policy, compared(above, form), best, compared(beside, form)))
    heads = (
        "model",
        "policy",
        "difference from plain, on test",
        "best without growth",
        "difference",
    )
    return table(heads, rows)


def main() -> int:
    """Run the benchmark; return its exit status, 1 if a never-grow run is not the plain loop."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/own_models"))
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    equal = {name: same_as_plain_loop(CASES[name], name) for name in arguments.models}
    results = {
        kind: {name: measured(arguments.work, name, policies) for name in arguments.models}
        for kind, policies in GROWING.items()
    }
    differing = [name for name, same in equal.items() if not same]
    parts = [
        "Means over five seeds, which determine initial weights, minibatches and (but for the "
        "text) the split, with 95 % intervals (Student's t), on test after the last epoch; "
        "differences are paired by seed. The recipe of each arm without growth is the best of the "
        "same few on validation, on two other seeds; growth takes that of plain training. The "
        "wider network has at least as many parameters as the larger of the grown ones. The longer "
        "training takes at least as long as the slower of them; it is plain training or that of "
        "the wider network, whichever is better on validation. Both are chosen on the seeds of "
        "tuning. `widen` has its default price of parameters, 0.01, and residual seeds 0.05; each "
        "kind of growth has opponents of its own size and time. Time is that of the processor, "
        "which on a free core is wall time; peak memory is that of the whole process.",
        "Two epochs of the never-grow run of each model equal those of a plain PyTorch loop "
        + (
            f"to the last bit, except of {', '.join(differing)}."
            if differing
            else "to the last bit."
        ),
        *(f"**{kind.capitalize()}**\n\n{summary(found)}" for kind, found in results.items()),
        *(
            part
            for name in arguments.models
            for kind, found in results.items()
            for part in page(name, kind, found[name])
        ),
        f"{made_on('1 thread')}.",
    ]
    publish(
        "own_model_results",
        "Own models: growth beside what does not grow",
        parts,
        arguments.write,
        results,
    )
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
