"""The lifecycle of seeds, one slot at a time in plain Python.

Written from the specification, to be compared with ``esper.kasmina.lifecycle``. Numbers are Python
floats, so real quantities agree to the rounding of float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from esper.leyline.actions import Curve, Op, Style
from esper.leyline.stages import Stage

TEMPO = {0: 3, 1: 5, 2: 8}
TARGET = {0: 0.5, 1: 0.7, 2: 1.0}
SPEED = {0: 0, 1: 3, 2: 5, 3: 8}
STEEPNESS = {Curve.SIGMOID_GENTLE: 6.0, Curve.SIGMOID: 12.0, Curve.SIGMOID_SHARP: 24.0}
GATE_HEALTH = 0.7

HOLD, UP, DOWN = 0, 1, 2

WITH_SEED = {Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILISED}
BLOCKS_GERMINATION = {
    Stage.GERMINATED,
    Stage.TRAINING,
    Stage.PRUNED,
    Stage.EMBARGOED,
    Stage.RESETTING,
}


def scaled_age(steps: int, episode_length: int) -> int:
    """An age limit given for episodes of 150 steps, scaled to another episode length."""
    return max(1, round(steps * episode_length / 150))


def curve_value(curve: int, time: float) -> float:
    """Completed fraction of a ramp at ``time`` in [0, 1]."""
    if curve == Curve.LINEAR:
        return time
    if curve == Curve.COSINE:
        return (1.0 - math.cos(math.pi * time)) / 2.0

    def logistic(x: float) -> float:
        return 1.0 / (1.0 + math.exp(-STEEPNESS[Curve(curve)] * (x - 0.5)))

    return (logistic(time) - logistic(0.0)) / (logistic(1.0) - logistic(0.0))


def seed_parameters(blueprint: str, channels: int, gated: bool) -> int:
    """Parameter count of a seed, computed from the description of its layers."""
    c, squeezed, narrow = channels, max(1, channels // 4), max(8, channels // 4)
    affine = 2 * c
    branch = {
        "norm": 1 + affine,
        "attention": squeezed * c + c * squeezed + c,
        "conv_small": affine + c * c,
        "conv_light": affine + 9 * c * c,
        "depthwise": 9 * c + affine + c * c,
        "bottleneck": affine + c * narrow + 9 * narrow * narrow + narrow * c,
        "conv_heavy": 9 * c * 4 * c + 2 * 4 * c + 4 * c * c,
    }[blueprint]
    gate = (c * narrow + narrow) + (narrow + 1)
    return branch + (gate if gated else 0)


@dataclass
class Reading:
    """Measurements of one seed."""

    health: float = math.nan
    exploding: bool = False
    contribution: float = math.nan
    improvement: float = math.nan
    gradient_ratio: float = math.nan

    @property
    def healthy(self) -> bool:
        return self.health >= GATE_HEALTH and not self.exploding


@dataclass
class Ramp:
    """A ramp of alpha, in progress or finished."""

    start: float
    target: float
    steps: int
    curve: int
    done: int = 0


@dataclass
class Slot:
    """One slot; everything but ``stage`` belongs to the seed in it."""

    stage: Stage = Stage.DORMANT
    stage_age: int = 0
    age: int = 0
    blueprint: int = 0
    style: int = 0
    tempo: int = 0
    goal: float = 0.0
    alpha: float = 0.0
    alpha_velocity: float = 0.0
    target: float = 0.0
    mode: int = HOLD
    ramp: Ramp | None = None
    pruning: bool = False

    def clear(self) -> None:
        vars(self).update(vars(Slot()))

    def enter(self, stage: Stage) -> None:
        self.stage, self.stage_age = stage, 0

    def head_for(self, target: float, steps: int, curve: int) -> None:
        self.target = target
        if steps == 0 or target == self.alpha:
            self.alpha, self.mode, self.ramp = target, HOLD, None
        else:
            self.mode = UP if target > self.alpha else DOWN
            self.ramp = Ramp(self.alpha, target, steps, curve)

    def die(self) -> None:
        self.enter(Stage.PRUNED)
        self.alpha, self.mode, self.ramp, self.pruning = 0.0, HOLD, None, False

    def tick(self, embargo: int) -> None:
        if self.stage in WITH_SEED:
            self.age += 1
        self.stage_age += 1
        if self.stage is Stage.DORMANT:
            self.stage_age = 0
        elif self.stage is Stage.PRUNED:
            self.enter(Stage.EMBARGOED)
        elif self.stage is Stage.EMBARGOED and self.stage_age == embargo:
            self.enter(Stage.RESETTING)
        elif self.stage is Stage.RESETTING:
            self.clear()
        before = self.alpha
        if self.stage is Stage.BLENDING and self.mode != HOLD:
            self._move_alpha()
        self.alpha_velocity = self.alpha - before

    def _move_alpha(self) -> None:
        ramp = self.ramp
        ramp.done += 1
        part = curve_value(ramp.curve, ramp.done / ramp.steps)
        self.alpha = ramp.start + (ramp.target - ramp.start) * part
        if ramp.done == ramp.steps:
            self.alpha, self.mode = ramp.target, HOLD
            if self.pruning:
                self.die()


@dataclass
class Environment:
    """The slots of one host and the rules of their lifecycle."""

    slots: list[Slot]
    kinds: list[set[int]]
    training_age: int
    prune_age: int
    embargo: int
    max_seeds: int
    strict: bool = False
    one_at_a_time: bool = True
    readings: list[Reading] = field(default_factory=list)

    def may(self, op: int, place: int) -> bool:
        """Whether ``op`` is legal in slot ``place``, ignoring the other heads of the action."""
        slot, reading = self.slots[place], self.readings[place]
        resting = slot.mode == HOLD
        if op == Op.WAIT:
            return True
        if op == Op.GERMINATE:
            living = sum(s.stage in WITH_SEED for s in self.slots)
            blocked = self.one_at_a_time and any(s.stage in BLOCKS_GERMINATION for s in self.slots)
            return slot.stage is Stage.DORMANT and living < self.max_seeds and not blocked
        if op == Op.SET_ALPHA_TARGET:
            return slot.stage in (Stage.BLENDING, Stage.HOLDING) and resting
        if op == Op.PRUNE:
            developing = slot.stage in WITH_SEED - {Stage.FOSSILISED}
            return developing and slot.age >= self.prune_age and resting
        if op == Op.FOSSILISE:
            measured = not math.isnan(reading.contribution)
            enough = not self.strict or reading.contribution >= 0.01
            return slot.stage is Stage.HOLDING and measured and reading.healthy and enough
        if slot.stage is Stage.TRAINING:
            proven = reading.improvement >= 0.005 and reading.gradient_ratio >= 0.1
            old_enough = slot.stage_age >= self.training_age
            return old_enough and reading.healthy and (proven or not self.strict)
        if slot.stage is Stage.BLENDING:
            waited = not self.strict or slot.stage_age >= self.training_age
            return slot.target == 1.0 and slot.alpha == 1.0 and resting and waited
        return slot.stage is Stage.GERMINATED

    def act(self, action: list[int]) -> bool:
        """Apply an action; returns whether it was legal."""
        op, place, blueprint, style, tempo, target, speed, curve = action
        limits = (6, len(self.slots), 13, 4, 3, 3, 4, 5)
        if not all(0 <= chosen < limit for chosen, limit in zip(action, limits, strict=True)):
            return False
        if not self.may(op, place):
            return False
        slot = self.slots[place]
        if op == Op.GERMINATE:
            if blueprint not in self.kinds[place]:
                return False
            slot.clear()
            slot.enter(Stage.GERMINATED)
            slot.blueprint, slot.style = blueprint, style
            slot.tempo, slot.goal = TEMPO[tempo], TARGET[target]
        elif op == Op.SET_ALPHA_TARGET:
            if slot.stage is Stage.HOLDING and TARGET[target] < 1.0:
                slot.enter(Stage.BLENDING)
            slot.head_for(TARGET[target], SPEED[speed], curve)
        elif op == Op.PRUNE:
            self._prune(slot, SPEED[speed], curve)
        elif op == Op.FOSSILISE:
            slot.enter(Stage.FOSSILISED)
        elif op == Op.ADVANCE:
            self._advance(slot)
        return True

    def _advance(self, slot: Slot) -> None:
        if slot.stage is Stage.GERMINATED:
            slot.enter(Stage.TRAINING)
        elif slot.stage is Stage.TRAINING:
            slot.enter(Stage.BLENDING)
            sigmoid = slot.style == Style.SIGMOID_ADD
            slot.head_for(slot.goal, slot.tempo, Curve.SIGMOID if sigmoid else Curve.LINEAR)
        else:
            slot.enter(Stage.HOLDING)
            slot.alpha = 1.0

    def _prune(self, slot: Slot, steps: int, curve: int) -> None:
        if steps == 0 or slot.alpha == 0.0:
            slot.die()
            return
        if slot.stage is Stage.HOLDING:
            slot.enter(Stage.BLENDING)
        slot.pruning = True
        slot.head_for(0.0, steps, curve)

    def tick(self) -> None:
        for slot in self.slots:
            slot.tick(self.embargo)
