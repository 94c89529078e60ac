"""The lifecycle as a hypothesis state machine, which shrinks a failure to a short sequence.

``test_lifecycle.py`` covers more sequences; here every action and reading is drawn separately.
"""

import math
from dataclasses import replace

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from esper.kasmina.lifecycle import Rules, apply, legal_slots, tick
from esper.kasmina.seeds import SeedSignals, SeedState
from esper.leyline.actions import HEAD_WIDTHS, HEADS, Op
from esper.leyline.stages import TRANSITIONS, Stage
from examples import examples
from oracles.lifecycle import Environment, Reading, Slot, scaled_age

CPU = torch.device("cpu")
SLOTS = 2
KIND = 1
WIDTHS = [SLOTS if head == "slot" else HEAD_WIDTHS[head] for head in HEADS]
ANYTHING = st.tuples(*(st.integers(-1, width) for width in WIDTHS))
LIKELY = st.tuples(
    st.sampled_from([Op.GERMINATE, Op.ADVANCE, Op.ADVANCE, Op.FOSSILISE, Op.PRUNE]),
    st.integers(0, SLOTS - 1), st.just(KIND), *(st.integers(0, width - 1) for width in WIDTHS[3:]),
)  # fmt: skip

HEALTH = st.sampled_from([0.9, 0.9, 0.5, math.nan])
CONTRIBUTION = st.sampled_from([0.1, -0.1, math.nan])


class Lifecycle(RuleBasedStateMachine):
    """One environment, as tensors and as the oracle."""

    @initialize(episode_length=st.sampled_from([20, 40]), max_seeds=st.sampled_from([1, 2]))
    def begin(self, episode_length: int, max_seeds: int) -> None:
        self.rules = Rules.for_horizon(episode_length, max_seeds)
        self.kinds = torch.zeros(SLOTS, HEAD_WIDTHS["blueprint"], dtype=torch.bool)
        self.kinds[:, KIND] = True
        self.state = SeedState.dormant((1, SLOTS), CPU)
        ages = (scaled_age(steps, episode_length) for steps in (10, 5, 5))
        slots = [Slot() for _ in range(SLOTS)]
        self.oracle = Environment(slots, [{KIND}] * SLOTS, *ages, max_seeds)

    @rule(
        action=st.one_of(ANYTHING, LIKELY, LIKELY),
        health=st.tuples(HEALTH, HEALTH),
        contribution=st.tuples(CONTRIBUTION, CONTRIBUTION),
    )
    def step(
        self, action: tuple[int, ...], health: tuple[float, ...], contribution: tuple[float, ...]
    ) -> None:
        self.oracle.readings = [
            Reading(h, False, c) for h, c in zip(health, contribution, strict=True)
        ]
        signals = replace(
            SeedSignals.unknown((1, SLOTS), CPU),
            health=torch.tensor([health]),
            contribution=torch.tensor([contribution]),
        )
        legal = legal_slots(self.state, signals, self.rules)
        acted, success = apply(self.state, torch.tensor([action]), legal, self.kinds)
        assert success.item() == self.oracle.act(list(action))
        if not success:
            assert torch.equal(acted.stage, self.state.stage)
            assert torch.equal(acted.alpha, self.state.alpha)
        after = tick(acted, self.rules)
        self.oracle.tick()
        for old, new in ((self.state, acted), (acted, after)):
            stages = zip(old.stage[0].tolist(), new.stage[0].tolist(), strict=True)
            assert all(b == a or Stage(b) in TRANSITIONS[Stage(a)] for a, b in stages)
        self.state = after

    @invariant()
    def agrees_with_the_oracle(self) -> None:
        if not hasattr(self, "state"):
            return
        slots = self.oracle.slots
        assert self.state.stage[0].tolist() == [slot.stage for slot in slots]
        assert self.state.stage_age[0].tolist() == [slot.stage_age for slot in slots]
        alphas = zip(self.state.alpha[0].tolist(), slots, strict=True)
        assert all(abs(alpha - slot.alpha) < 1e-6 and 0 <= alpha <= 1 for alpha, slot in alphas)
        assert self.state.living.sum().item() <= self.rules.max_seeds


Lifecycle.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
TestLifecycle = Lifecycle.TestCase
