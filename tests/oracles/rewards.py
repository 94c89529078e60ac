"""The rewards of one environment in plain Python, written from docs/rewards.md.

Some modes are in docs/from-esper-lite.md. Tests compare this with ``esper.simic.growth.rewards``. A
``Moment`` is one step of one environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from esper.leyline.actions import Op
from esper.leyline.stages import Stage

POTENTIAL = {
    Stage.GERMINATED: 1.0,
    Stage.TRAINING: 2.0,
    Stage.BLENDING: 3.5,
    Stage.HOLDING: 5.5,
    Stage.FOSSILISED: 6.0,
}


@dataclass
class Seed:
    """One slot before and after a step."""

    stage_before: Stage
    stage: Stage
    age_before: int
    """Steps in the stage before the action."""
    age: int
    alpha_before: float
    alpha: float
    contribution: float
    birth_accuracy: float
    parameters: int
    credit: float
    """What ``escrow`` has paid before the step."""


@dataclass
class Moment:
    """One step of one environment."""

    episode_length: int
    last: bool
    op: int
    slot: int
    seeds: list[Seed]
    accuracy: float
    initial_accuracy: float
    score: float
    twin_score: float
    previous_gain: float
    host_parameters: int
    added_parameters: int
    price: float
    step: int
    loss: float
    previous_loss: float

    @property
    def imp(self) -> float:
        return 100.0 * (self.score - self.twin_score)

    @property
    def utility(self) -> float:
        return self.score - self.price * math.log(
            1.0 + self.added_parameters / self.host_parameters
        )

    def named(self, op: Op) -> Seed | None:
        """The seed that ``op`` acted on."""
        return self.seeds[self.slot] if self.op == op else None

    def held(self, seed: Seed) -> float:
        return min(1.0, seed.age_before / max(1, round(5 * self.episode_length / 150)))

    def potential(self, stage: Stage, age: int) -> float:
        if stage not in POTENTIAL:
            return 0.0
        return POTENTIAL[stage] + min(0.3 * 150 / self.episode_length * age, 2.0)


def harmonic(a: float, b: float) -> float:
    return 2.0 / (1.0 / a + 1.0 / b) if a > 0 and b > 0 else 0.0


def points(seed: Seed) -> float:
    return 0.0 if math.isnan(seed.contribution) else 100.0 * seed.contribution


def shaping(m: Moment) -> float:
    before = sum(m.potential(s.stage_before, s.age_before) for s in m.seeds)
    after = 0.0 if m.last else sum(m.potential(s.stage, s.age) for s in m.seeds)
    return 0.3 * (after - before)


def terminal(m: Moment) -> float:
    return 10.0 * m.utility if m.last else 0.0


def paired(m: Moment) -> float:
    return 10.0 * (m.utility - m.twin_score - m.previous_gain)


def utility(m: Moment) -> float:
    return 10.0 * m.utility / m.episode_length


def shaped(m: Moment) -> float:
    credit = 0.0
    for seed in m.seeds:
        if not m.last and seed.stage in (Stage.BLENDING, Stage.HOLDING):
            credit += _credit(m, seed)
    return credit + _beside_credit(m)


def escrow(m: Moment) -> float:
    total = _beside_credit(m)
    for seed in m.seeds:
        if seed.stage is Stage.FOSSILISED:
            continue  # keeps what it was paid
        if not m.last and seed.stage in (Stage.BLENDING, Stage.HOLDING):
            total += max(-2.0, min(2.0, _credit(m, seed) - seed.credit))
        else:
            total -= seed.credit
    return total


def _beside_credit(m: Moment) -> float:
    total = shaping(m)
    total -= min(0.5 * math.log(1.0 + m.added_parameters / m.host_parameters), 1.5)
    shock = sum((s.alpha - s.alpha_before) ** 2 * s.parameters / m.host_parameters for s in m.seeds)
    total -= min(0.1958 * shock, 1.0)
    total -= 0.01 * max(0, sum(s.stage in POTENTIAL for s in m.seeds) - 1)
    costs = {Op.GERMINATE: 0.15, Op.SET_ALPHA_TARGET: 0.005, Op.PRUNE: 0.005, Op.FOSSILISE: 0.01}
    total -= costs.get(Op(m.op), 0.0)
    advanced, kept = m.named(Op.ADVANCE), m.named(Op.FOSSILISE)
    if advanced is not None and advanced.stage_before is Stage.TRAINING:
        total -= 0.1
    if kept is not None:
        total += _verdict(m, kept)
    return total + (5.0 * m.accuracy if m.last else 0.0)


def _credit(m: Moment, seed: Seed) -> float:
    c, progress = points(seed), 100.0 * (m.accuracy - seed.birth_accuracy)
    if c <= 0:
        return c
    credit = c if c < progress else harmonic(progress, c)
    if m.imp < 0:
        credit *= 2.0 / (1.0 + math.exp(-3.0 * m.imp))
    ratio = c / max(m.imp, 0.1)
    return credit - min(0.3, 0.1 * max(0.0, ratio - 5.0) / 5.0)


def _verdict(m: Moment, seed: Seed) -> float:
    c, total = points(seed), 0.0
    if m.imp < 0:
        total -= 0.5 + min(0.2 * abs(m.imp), 1.0)
    if c < 1.0:
        return total - 0.2 - 0.1 * max(0.0, -c)
    if m.imp >= 0:
        total += (0.5 + 0.1 * c + 3.0 * math.tanh(1.0 / 3.0)) * m.held(seed)
    return total


def simplified(m: Moment) -> float:
    total = shaping(m) - (0.01 if m.op != Op.WAIT else 0.0)
    if m.last:
        fossils = [s for s in m.seeds if s.stage is Stage.FOSSILISED]
        total += 3.0 * m.accuracy + 2.0 * sum(s.contribution >= 0.01 for s in fossils)
    return total


def basic(m: Moment, share: float = 1.0) -> float:
    total = shaping(m) - 0.1 * m.added_parameters / 500_000
    kept = m.named(Op.FOSSILISE)
    if kept is not None:
        c = points(kept)
        if c <= 0:
            total -= 0.5
        elif m.imp <= 0:
            total -= 0.2
        else:
            total += share * (0.3 + 0.5 * harmonic(m.imp, c)) * m.held(kept)
    return total + (5.0 * (m.accuracy - m.initial_accuracy) if m.last else 0.0)


def basic_plus(m: Moment) -> float:
    total = basic(m, 0.3)
    for seed in m.seeds:
        if seed.stage_before is Stage.FOSSILISED:
            c = points(seed)
            bonus = 0.3 + 0.5 * harmonic(m.imp, c) if c > 0 and m.imp > 0 else 0.5 * min(c, 0.0)
            total += max(-0.05, min(0.1, 0.7 * bonus / m.episode_length))
    return total


def loss_change(m: Moment) -> float:
    change = max(-25.0, min(25.0, 5.0 * (m.previous_loss - m.loss) / 0.05))
    total = (change if change > 0 else 0.5 * change) + 0.1 * shaping(m)
    if m.step > 3:
        total -= 0.05 * math.log(1.0 + m.added_parameters / m.host_parameters)
    return total + (max(0.0, min(1.0, (2.3 - m.loss) / 2.0)) if m.last else 0.0)


def sparse(m: Moment) -> float:
    return max(-1.0, min(1.0, m.accuracy - 0.1 * m.added_parameters / 500_000)) if m.last else 0.0


MODES = (
    *(terminal, paired, utility, shaped, escrow, simplified),
    *(basic, basic_plus, sparse, loss_change),
)
ORACLES: dict[str, Callable[[Moment], float]] = {f.__name__: f for f in MODES}
