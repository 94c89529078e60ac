"""Episodes for the tests of rewards: the real lifecycle under random legal actions.

Measurements are random numbers; states, births, parameters and price are computed as in a real run.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from esper.kasmina.lifecycle import Rules, apply, legal_slots, tick
from esper.kasmina.seeds import SeedSignals, SeedState
from esper.leyline.actions import BLUEPRINTS, CANONICAL_CHOICE, HEAD_WIDTHS, HEADS, Op
from esper.leyline.stages import Stage
from esper.simic.growth.rewards import REWARDS, RewardInputs, escrow_credit
from esper.tamiyo.policy.features import utility
from examples import examples
from oracles.rewards import Moment, Seed

CPU = torch.device("cpu")
F64 = torch.float64
quick = settings(max_examples=examples(12))
seeds = st.integers(0, 2**31)
lengths = st.integers(1, 30)
OP_WEIGHTS = torch.tensor([2.0, 4.0, 1.0, 0.7, 2.0, 6.0])
"""Weights of the legal ops in a draw; ADVANCE is frequent enough that some seeds fossilise."""

Choose = Callable[[Tensor, int], Tensor]
"""Chooses actions ``[N, heads]`` from the legal slots ``[N, ops, S]`` and the step."""


@dataclass(frozen=True)
class World:
    """The measurements of an episode.

    Attributes:
        accuracy, score, twin: before the first step and after each step, ``[T + 1, N]``.
        contribution: of each step, used where a seed acts, ``[T, N, S]``.
        price: price of parameters, ``[N]``.
    """

    accuracy: Tensor
    score: Tensor
    twin: Tensor
    contribution: Tensor
    price: Tensor
    host_parameters: int = 500

    @classmethod
    def random(cls, generator: torch.Generator, length: int, count: int, slots: int) -> "World":
        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, dtype=F64)

        steps = (length + 1, count)
        contribution = (2.0 * uniform(length, count, slots) - 1.0) ** 5  # small ones too
        twin = uniform(*steps)
        near = twin + 0.02 * (uniform(*steps) - 0.5)
        score = torch.where(uniform(*steps) < 0.5, uniform(*steps), near).clamp(0.0, 1.0)
        return cls(uniform(*steps), score, twin, contribution, 0.3 * uniform(count))

    @classmethod
    def flat(cls, world: "World", contribution: float) -> "World":
        """The world with constant measurements, which no action changes."""
        return replace(
            world, accuracy=world.accuracy[:1].expand_as(world.accuracy),
            score=world.twin[:1].expand_as(world.twin), twin=world.twin[:1].expand_as(world.twin),
            contribution=torch.full_like(world.contribution, contribution),
        )  # fmt: skip


def choose_at_random(generator: torch.Generator, banned: tuple[Op, ...] = ()) -> Choose:
    """Legal actions, except that one in ten names a slot that does not exist."""

    def choose(legal: Tensor, step: int) -> Tensor:
        count, _, slots = legal.shape
        weights = OP_WEIGHTS.clone()
        weights[list(banned)] = 0.0
        op = torch.multinomial(legal.any(2) * weights, 1, generator=generator)[:, 0]
        places = legal[torch.arange(count), op].float()
        chosen = {"op": op, "slot": torch.multinomial(places, 1, generator=generator)[:, 0]}
        chosen["slot"] += slots * (torch.rand(count, generator=generator) < 0.1)
        for head in HEADS[2:]:
            chosen[head] = torch.randint(HEAD_WIDTHS[head], (count,), generator=generator)
        chosen["blueprint"] = chosen["blueprint"].clamp(min=1)
        return torch.stack([chosen[head] for head in HEADS], 1)

    return choose


def always(plan: list[dict[str, int]]) -> Choose:
    """The plan's actions in order, then WAIT; heads not named are canonical."""

    def choose(legal: Tensor, step: int) -> Tensor:
        action = CANONICAL_CHOICE | {"op": int(Op.WAIT)} | (plan[step] if step < len(plan) else {})
        return torch.tensor([[action[head] for head in HEADS]]).expand(len(legal), -1)

    return choose


def play(world: World, choose: Choose) -> list[RewardInputs]:
    """Play an episode; returns the reward inputs of every step, in float64."""
    length, count, slots = world.contribution.shape
    rules = Rules.for_horizon(length, slots)
    kinds = torch.ones(slots, len(BLUEPRINTS), dtype=torch.bool)
    parameters = 37 * torch.arange(len(BLUEPRINTS))
    shape = (count, slots)
    state, signals = SeedState.dormant(shape, CPU), SeedSignals.unknown(shape, CPU)
    birth = torch.full(shape, float("nan"), dtype=F64)
    gain, credit = torch.zeros(count, dtype=F64), torch.zeros(shape, dtype=F64)
    episode: list[RewardInputs] = []
    for t in range(length):
        now, last = t + 1, t + 1 == length
        actions = choose(legal_slots(state, signals, rules), t)
        acted, success = apply(state, actions, legal_slots(state, signals, rules), kinds)
        after = tick(acted, rules)
        born = (acted.stage == Stage.GERMINATED) & (state.stage == Stage.DORMANT)
        birth = torch.where(born, world.accuracy[t][:, None], birth)
        birth = torch.where(after.living, birth, float("nan"))
        contribution = torch.where(acted.acting, world.contribution[t], float("nan"))
        signals = replace(
            SeedSignals.unknown(shape, CPU), contribution=contribution, health=torch.ones(shape)
        )
        size = torch.where(after.living | state.living, parameters[acted.blueprint], 0)
        counted = after.stage == Stage.FOSSILISED if last else after.acting
        added = torch.where(counted, size, 0).sum(1)
        inputs = RewardInputs(
            step=now, episode_length=length, last=last,
            op=torch.where(success, actions[:, 0], Op.WAIT), slot=actions[:, 1],
            before=state, after=after, contribution=contribution, accuracy=world.accuracy[now],
            initial_accuracy=world.accuracy[0], birth_accuracy=birth, score=world.score[now],
            twin_score=world.twin[now], previous_gain=gain, host_parameters=world.host_parameters,
            seed_parameters=size, added_parameters=added, price=world.price, credit=credit,
            loss=4.0 * (1.0 - world.accuracy[now]), previous_loss=4.0 * (1.0 - world.accuracy[t]),
        )  # fmt: skip
        episode.append(inputs)
        credit = escrow_credit(episode[-1])
        worth = utility(world.score[now], added, world.host_parameters, world.price)
        gain = worth - world.twin[now]
        state = after
    return episode


def random_episode(seed: int, length: int, count: int = 6, slots: int = 3) -> list[RewardInputs]:
    """An episode of random legal actions in a random world."""
    generator = torch.Generator().manual_seed(seed)
    return play(World.random(generator, length, count, slots), choose_at_random(generator))


def total(mode: str, episode: list[RewardInputs]) -> Tensor:
    return torch.stack([REWARDS[mode](inputs) for inputs in episode]).sum(0)


def tensors(inputs: RewardInputs, change: Callable[[Tensor], Tensor]) -> RewardInputs:
    """The inputs with every tensor changed, including those of the seed states."""
    values = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    for name, value in values.items():
        if isinstance(value, Tensor):
            values[name] = change(value)
        elif isinstance(value, SeedState):
            values[name] = value.map(change)
    return RewardInputs(**values)


def moment(inputs: RewardInputs, row: int) -> Moment:
    """One environment's step as input of the oracle."""
    before, after = inputs.before.map(lambda x: x[row]), inputs.after.map(lambda x: x[row])
    return Moment(
        episode_length=inputs.episode_length,
        last=inputs.last,
        op=int(inputs.op[row]),
        slot=int(inputs.slot[row]),
        seeds=[
            Seed(
                stage_before=Stage(int(before.stage[s])), stage=Stage(int(after.stage[s])),
                age_before=int(before.stage_age[s]), age=int(after.stage_age[s]),
                alpha_before=float(before.alpha[s]), alpha=float(after.alpha[s]),
                contribution=float(inputs.contribution[row, s]),
                birth_accuracy=float(inputs.birth_accuracy[row, s]),
                parameters=int(inputs.seed_parameters[row, s]), credit=float(inputs.credit[row, s]),
            )
            for s in range(len(before.stage))
        ],
        accuracy=float(inputs.accuracy[row]),
        initial_accuracy=float(inputs.initial_accuracy[row]),
        score=float(inputs.score[row]),
        twin_score=float(inputs.twin_score[row]),
        previous_gain=float(inputs.previous_gain[row]),
        price=float(inputs.price[row]),
        host_parameters=inputs.host_parameters,
        added_parameters=int(inputs.added_parameters[row]),
        step=inputs.step,
        loss=float(inputs.loss[row]),
        previous_loss=float(inputs.previous_loss[row]),
    )  # fmt: skip
