"""A clock that goes back, and numbers that are not finite."""

import math
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from esper.karn.runs import inspect
from esper.simic.ppo import PPOAgent
from esper.simic.run.checkpoint import load_latest
from esper.simic.trainer import Batch, Trainer
from esper.simic.training import growth_trainee
from torture.cases import Case, called, cases, runs_in
from torture.common import Part, fresh, quiet, timed, trained

NAN_TIMES = 10
BACK = (1.0, 3_600.0, 1e9, 1.7e9)
"""Seconds by which the clock is set back."""


def _set_back(seconds: float) -> None:
    """From now on the clock of this process is set back again and again, by up to ``seconds``."""
    begin, original, draw = time.time(), time.time, random.Random(1).random
    patch("time.time", lambda: original() - seconds * draw() if draw() < 0.5 else begin).start()


def clock(work: Path) -> Part:
    """Set the clock back while a command writes; what it writes is the same."""
    part = Part("clock set back during each writing command")
    with timed(part):
        for case in cases(work):
            folder, log = work / case.name, work / f"{case.name}.log"
            folder.mkdir()
            case.fill(folder)
            called(case.first(folder), log)
            whole = fresh(folder, work / f"{case.name}-whole")
            for seconds in BACK[:1] if case.continues else BACK:
                case.fill(folder)
                status, output = called(case.first(folder), log, partial(_set_back, seconds))
                problem = (
                    f"status {status}: {output[-300:]}" if status else case.same(folder, whole)
                )
                with quiet():
                    unfinished = [p for p in runs_in(folder) if inspect(p).status != "finished"]
                problem = problem or (f"{unfinished[0]} is not finished" if unfinished else "")
                part.lost += [f"{case.name}, {seconds} s: {problem}"] if problem else []
                part.tried += 1
    return part


def _in_rollout(name: str) -> Callable[[Any], None]:
    def spoil(rollout: Any) -> None:
        tensor = getattr(rollout, name)
        tensor.view(-1)[-1] = math.nan

    return spoil


def not_finite(work: Path) -> Part:
    """Put NaN at seven points of an update; it is refused, and the weights stay."""
    part = Part(f"NaN at 7 points, {NAN_TIMES} times each")
    points = ("rewards", "values", "log_prob", "last_value", "host", "weights", "moments")
    with timed(part):
        for point in points:
            for number in range(NAN_TIMES):
                found = _with_nan(work / f"{point}-{number}", point, number)
                part.lost += [f"{point} {number}: {found}"] if found else []
                part.tried += 1
    return part


def _with_nan(folder: Path, point: str, number: int) -> str:
    """Train three rounds of which the second meets NaN; says what is wrong."""
    collect, before = growth_trainee.collect, {}  # type: ignore[attr-defined]
    agents: list[PPOAgent[Any]] = []

    def spoilt(environment: Any, actor: Any, index: int, on_step: Any) -> Any:
        rollout = collect(environment, actor, index, on_step)
        if index == 2:
            agent = agents[0]
            before.update({n: p.detach().clone() for n, p in agent.policy.named_parameters()})
            if point == "host":
                rollout.observation.host.view(-1)[number] = math.nan
            elif point == "weights":
                name = sorted(before)[number % len(before)]
                dict(agent.policy.named_parameters())[name].data.view(-1)[0] = math.nan
                before[name].view(-1)[0] = math.nan
            elif point == "moments":
                states = list(agent.optimizer.states.values())
                states[number % len(states)]["exp_avg"].view(-1)[0] = math.nan
            else:
                _in_rollout(point)(rollout)
        return rollout

    original = PPOAgent.__init__

    def made(agent: Any, *arguments: Any, **named: Any) -> None:
        original(agent, *arguments, **named)
        agents.append(agent)

    after: dict[str, torch.Tensor] = {}
    update = PPOAgent.update

    def updated(agent: Any, rollout: Any) -> Any:
        metrics = update(agent, rollout)
        if agent.updates == 2:
            after.update({n: p.detach().clone() for n, p in agent.policy.named_parameters()})
        return metrics

    with (
        patch.object(growth_trainee, "collect", spoilt),
        patch.object(PPOAgent, "__init__", made),
        patch.object(PPOAgent, "update", updated),
    ):
        run = trained(folder, 3, seed=number)
    if load_latest(run).round != 3:
        return "rounds are missing"
    same = all(torch.equal(before[n].nan_to_num(7.0), after[n].nan_to_num(7.0)) for n in before)
    if not same:
        return "weights moved"
    told = (run / "events.jsonl").read_text()
    return "" if "UPDATE_REFUSED" in told else "not refused"


def others_not_finite(work: Path) -> Part:
    """Put NaN into what the other commands learn; they say so, and leave no such weights."""
    part = Part("NaN in imitation, offline learning and growth, 3 points each")
    outcomes: Counter[str] = Counter()
    with timed(part):
        learning = [case for case in cases(work) if case.name in ("imitation", "offline", "grow")]
        for case in learning:
            points = ("weights", "moments", "inputs" if case.name == "grow" else "returns")
            for number, point in enumerate(points * 2):
                problem = _spoilt_run(case, work / f"{case.name}-{number}", point, 1 + number // 3)
                part.lost += [f"{case.name} {point} {number}: {problem}"] if problem else []
                part.tried += 1
                outcomes[f"{case.name} {point}"] += 1
        part.notes = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
    return part


def _spoilt_run(case: Case, folder: Path, point: str, step: int) -> str:
    """What is wrong with a command that meets NaN at some step; empty if it says so and ends."""
    folder.mkdir()
    case.fill(folder)
    status, output = called(case.first(folder), folder / "log", partial(_spoil, point, step))
    if status not in (1, 2) or "Traceback" in output:
        return f"status {status}: {output[-300:]}"
    if not any(word in output for word in ("finite", "NaN", "diverged")):
        return f"does not say why: {output[-300:]}"
    for run in runs_in(folder):
        if any(run.glob("checkpoints/[0-9]*")):
            weights = load_latest(run).parts["policy"].values()
            if not all(bool(x.isfinite().all()) for x in weights if x.is_floating_point()):
                return "the policy of the last checkpoint is not finite"
    return "a model was written" if (folder / "out" / "state_dict.pt").exists() else ""


def _spoil(point: str, step: int) -> None:
    """Put NaN into a tensor before or after the given step of the optimizer of this process."""
    import own_modules

    count = [0]
    original, images = Trainer.step, own_modules.images

    def spoilt_images(number: int, seed: int = 0) -> Any:
        inputs, labels = images(number, seed)
        if point == "inputs" and seed == 0:
            inputs[step] = math.nan
        return inputs, labels

    def learn(trainer: Trainer, batch: Batch) -> Any:
        if point == "returns" and count[0] == step:
            batch.returns.view(-1)[0] = math.nan
        return original(trainer, batch)

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        count[0] += 1
        if count[0] != step:
            return
        parameter = next(p for p in optimizer.param_groups[0]["params"] if p in optimizer.state)
        tensors = {"weights": parameter.data, "moments": optimizer.state[parameter].get("exp_avg")}
        if (tensor := tensors.get(point)) is not None:
            tensor.view(-1)[0] = math.nan

    patch.object(Trainer, "step", learn).start()
    patch.object(own_modules, "images", spoilt_images).start()
    register_optimizer_step_post_hook(after)
