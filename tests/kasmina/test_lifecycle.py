"""The tensor lifecycle agrees with the oracle, and obeys each rule by itself."""

from collections import Counter
from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.lifecycle import Rules, apply, legal_slots, progress, roll_back, tick
from esper.kasmina.seeds import AlphaMode, SeedSignals, SeedState
from esper.leyline import actions
from esper.leyline.actions import BLUEPRINTS, HEADS, Curve, Op, Style
from esper.leyline.stages import PRUNABLE, TRANSITIONS, Stage
from esper.runtime import data
from esper.runtime.tasks import Task
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.engine import Engine, Rows
from esper.tolaria.precision import Precision
from oracles.lifecycle import (
    HOLD,
    SPEED,
    TARGET,
    TEMPO,
    WITH_SEED,
    Environment,
    Reading,
    Slot,
    curve_value,
    scaled_age,
    seed_parameters,
)
from support import bank_of

CPU = torch.device("cpu")
CHANNELS = (3, 4, 6, 9)
ENVIRONMENTS, EXAMPLES = 64, 34
WIDTHS = (len(Op), None, len(BLUEPRINTS), 4, 3, 3, 4, 5)
FIELDS = tuple(f.name for f in fields(SeedState))


# --- oracles and tensors side by side ---------------------------------------------------------


class World:
    """A batch of environments, as tensors and as oracles, driven by the same actions."""

    def __init__(
        self, seed: int, slots: int, episode_length: int, max_seeds: int, everything: bool
    ):
        self.random = np.random.default_rng(seed)
        self.slots = slots
        strict, one_at_a_time = bool(seed % 2), bool(seed % 3)
        self.rules = Rules.for_horizon(episode_length, max_seeds, strict, one_at_a_time)
        growing = self.random.random((slots, len(BLUEPRINTS))) < (1.0 if everything else 0.5)
        growing[:, 0] = False
        growing[:, 8:] = False
        self.kinds = torch.from_numpy(growing)
        self.state = SeedState.dormant((ENVIRONMENTS, slots), CPU)
        self.oracles = [
            Environment(
                slots=[Slot() for _ in range(slots)],
                kinds=[set(np.flatnonzero(row).tolist()) for row in growing],
                training_age=scaled_age(10, episode_length),
                prune_age=scaled_age(5, episode_length), embargo=scaled_age(5, episode_length),
                max_seeds=max_seeds, strict=strict, one_at_a_time=one_at_a_time,
            )
            for _ in range(ENVIRONMENTS)
        ]  # fmt: skip
        self.guided = self.random.random(ENVIRONMENTS) ** 0.2

    def measure(self) -> SeedSignals:
        """Draw new signals everywhere, a quarter of them not measured."""
        shape = (ENVIRONMENTS, self.slots)
        draw = self.random.random
        health = np.where(draw(shape) < 0.25, np.nan, 0.4 + 0.6 * draw(shape)).astype(np.float32)
        contribution = np.where(draw(shape) < 0.25, np.nan, draw(shape) - 0.5).astype(np.float32)
        exploding = draw(shape) < 0.1
        # The ranges include the thresholds of strict gates; some signals are not measured.
        improvement = np.where(draw(shape) < 0.1, np.nan, 0.02 * draw(shape)).astype(np.float32)
        ratio = np.where(draw(shape) < 0.1, np.nan, 0.4 * draw(shape)).astype(np.float32)
        for n, oracle in enumerate(self.oracles):
            oracle.readings = [
                Reading(
                    float(health[n, s]),
                    bool(exploding[n, s]),
                    float(contribution[n, s]),
                    float(improvement[n, s]),
                    float(ratio[n, s]),
                )
                for s in range(self.slots)
            ]
        return replace(
            SeedSignals.unknown(shape, CPU), health=torch.from_numpy(health),
            contribution=torch.from_numpy(contribution), exploding=torch.from_numpy(exploding),
            improvement=torch.from_numpy(improvement), gradient_ratio=torch.from_numpy(ratio),
        )  # fmt: skip

    def actions(self) -> Tensor:
        """Draw actions: some legal according to the oracle, some random, some out of range."""
        widths = np.array([self.slots if width is None else width for width in WIDTHS])
        drawn = self.random.integers(0, widths, (ENVIRONMENTS, len(HEADS)))
        for n, oracle in enumerate(self.oracles):
            dice = self.random.random()
            if dice < self.guided[n]:
                drawn[n, :3] = self._legal_choice(oracle, drawn[n, :3])
            elif self.random.random() < 0.3:
                head = self.random.integers(len(HEADS))
                beyond = (-1, widths[head], -(1 << 40), 1 << 40)
                drawn[n, head] = beyond[self.random.integers(len(beyond))]
        return torch.from_numpy(drawn)

    def _legal_choice(self, oracle: Environment, drawn: np.ndarray) -> np.ndarray:
        ops = [Op.GERMINATE, Op.SET_ALPHA_TARGET, Op.FOSSILISE, Op.ADVANCE]
        held = any(slot.stage is Stage.HOLDING for slot in oracle.slots)
        if self.random.random() < (0.5 if held else 0.06):
            ops.append(Op.PRUNE)
        places = {op: [s for s in range(self.slots) if oracle.may(op, s)] for op in ops}
        ops = [op for op in ops if places[op]]
        if not ops:
            return drawn
        op = ops[self.random.integers(len(ops))]
        place = places[op][self.random.integers(len(places[op]))]
        kinds = sorted(oracle.kinds[place]) or [0]
        return np.array([op, place, kinds[self.random.integers(len(kinds))]])


def table(oracles: list[Environment], value) -> np.ndarray:
    """``value`` of every slot, ``[N, S]``."""
    return np.array([[value(slot) for slot in oracle.slots] for oracle in oracles])


def assert_state_is(state: SeedState, oracles: list[Environment], moment: str) -> None:
    """Every field equals that of the oracle wherever the field has a meaning."""
    everywhere = np.ones(state.stage.shape, dtype=bool)
    alive = table(oracles, lambda slot: slot.stage in WITH_SEED)
    ramped = table(oracles, lambda slot: slot.ramp is not None)
    expected = {
        "stage": (everywhere, lambda slot: int(slot.stage)),
        "stage_age": (everywhere, lambda slot: slot.stage_age),
        "alpha": (everywhere, lambda slot: slot.alpha),
        "ramp_mode": (everywhere, lambda slot: slot.mode),
        "pruning": (everywhere, lambda slot: slot.pruning),
        "blueprint": (alive, lambda slot: slot.blueprint),
        "style": (alive, lambda slot: slot.style),
        "tempo": (alive, lambda slot: slot.tempo),
        "goal": (alive, lambda slot: slot.goal),
        "age": (alive, lambda slot: slot.age),
        "alpha_velocity": (alive, lambda slot: slot.alpha_velocity),
        "ramp_target": (alive, lambda slot: slot.target),
        "ramp_start": (ramped, lambda slot: slot.ramp.start if slot.ramp else 0.0),
        "ramp_curve": (ramped, lambda slot: slot.ramp.curve if slot.ramp else 0),
        "ramp_steps": (ramped, lambda slot: slot.ramp.steps if slot.ramp else 0),
        "ramp_done": (ramped, lambda slot: slot.ramp.done if slot.ramp else 0),
    }
    assert set(expected) == set(FIELDS)
    for name, (where, value) in expected.items():
        difference = np.abs(getattr(state, name).double().numpy() - table(oracles, value))
        wrong = np.argwhere(where & (difference > 1e-6))
        assert not len(wrong), (
            f"{moment}: {name} of environment {wrong[0][0]}, slot {wrong[0][1]} is "
            f"{getattr(state, name)[tuple(wrong[0])].item()}, "
            f"by the oracle {oracles[wrong[0][0]].slots[wrong[0][1]]}"
        )


def assert_lawful(state: SeedState, max_seeds: int) -> None:
    """Check the invariants that hold at all times."""
    assert bool(((state.alpha >= 0.0) & (state.alpha <= 1.0)).all())
    assert int(state.living.sum(1).max()) <= max_seeds
    empty = state.stage == Stage.DORMANT
    nothing = SeedState.dormant(tuple(state.stage.shape), CPU)
    for name in FIELDS:
        assert torch.equal(getattr(state, name)[empty], getattr(nothing, name)[empty]), name
    fossilised = state.stage == Stage.FOSSILISED
    assert bool((state.alpha[fossilised] == 1.0).all())
    assert not bool(state.frozen[fossilised].any())


def transitions(before: SeedState, after: SeedState) -> Counter:
    """Count each change of stage, and check that it is legal."""
    changed = before.stage != after.stage
    pairs = Counter(zip(before.stage[changed].tolist(), after.stage[changed].tolist(), strict=True))
    for old, new in pairs:
        assert Stage(new) in TRANSITIONS[Stage(old)], f"{Stage(old)!r} to {Stage(new)!r}"
    return pairs


def assert_rows_identical(before: SeedState, after: SeedState, rows: Tensor) -> None:
    for name in FIELDS:
        assert torch.equal(getattr(before, name)[rows], getattr(after, name)[rows]), name


# --- engines that count parameters ------------------------------------------------------------


@cache
def counting_engine(slots: int) -> Engine:
    """An engine whose host has slots with the first ``slots`` of ``CHANNELS``."""
    host = CnnHost(channels=CHANNELS[:slots], classes=10, image=(8, 8, 1))
    task = Task("counting", "for its parameter counts", host, data.digits)
    one, backend = torch.zeros(1, dtype=torch.long), TorchBackend(host, Precision("cpu"))
    return Engine(bank_of(task, torch.float32), Rows(one, one), 0, backend, 1, 1)


def assert_counts(engine: Engine, state: SeedState, oracles: list[Environment]) -> None:
    """Compare the engine's parameter counts of living seeds with those of the described layers."""
    expected = [
        sum(
            seed_parameters(BLUEPRINTS[slot.blueprint], channels, slot.style == Style.GATED_GATE)
            for slot, channels in zip(oracle.slots, CHANNELS, strict=False)
            if slot.stage in WITH_SEED
        )
        for oracle in oracles
    ]
    assert engine.seed_parameters(state).sum(1).tolist() == expected


# --- sequences --------------------------------------------------------------------------------


def test_random_action_sequences_agree_with_the_oracle() -> None:
    """Compares after every change, in over 2,000 sequences of at least 20 steps."""
    assert ENVIRONMENTS * EXAMPLES >= 2000
    seen: Counter = Counter()
    succeeded: Counter = Counter()
    failed: Counter = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # a smaller random seed is not simpler
        suppress_health_check=list(HealthCheck),
    )
    @given(
        seed=st.integers(0, 2**32 - 1),
        slots=st.integers(1, len(CHANNELS)),
        episode_length=st.sampled_from([20, 40, 40, 150]),
        max_seeds=st.sampled_from([1, 2, 3, 1 << 30]),
        everything=st.booleans(),
        steps=st.integers(20, 45),
    )
    def run(seed, slots, episode_length, max_seeds, everything, steps) -> None:
        world = World(seed, slots, episode_length, max_seeds, everything)
        for step in range(steps):
            signals, actions = world.measure(), world.actions()
            before = world.state.map(Tensor.clone)
            legal = legal_slots(world.state, signals, world.rules)
            for n in (step % ENVIRONMENTS, (7 * step + 3) % ENVIRONMENTS):
                book = [[world.oracles[n].may(op, s) for s in range(slots)] for op in Op]
                assert legal[n].tolist() == book

            acted, success = apply(world.state, actions, legal, world.kinds)
            verdicts = [
                oracle.act(action)
                for oracle, action in zip(world.oracles, actions.tolist(), strict=True)
            ]
            assert success.tolist() == verdicts
            assert_rows_identical(before, world.state, slice(None))  # apply is pure
            assert_rows_identical(before, acted, ~success)
            assert_state_is(acted, world.oracles, f"action of step {step}")
            assert_lawful(acted, max_seeds)
            assert_counts(counting_engine(slots), acted, world.oracles)

            ticked = tick(acted, world.rules)
            for oracle in world.oracles:
                oracle.tick()
            assert_state_is(ticked, world.oracles, f"tick of step {step}")
            assert_lawful(ticked, max_seeds)
            assert_counts(counting_engine(slots), ticked, world.oracles)

            seen.update(transitions(before, acted) + transitions(acted, ticked))
            for verdict, op in zip(verdicts, actions[:, 0].tolist(), strict=True):
                (succeeded if verdict else failed)[op] += 1
            world.state = ticked

    run()
    assert set(seen) == {(old, new) for old, after in TRANSITIONS.items() for new in after}
    assert min(seen.values()) >= 10
    assert all(succeeded[op] >= 50 for op in Op)
    assert all(failed[op] >= 100 for op in Op)


# --- one environment at a time ----------------------------------------------------------------


class Walk:
    """One environment, driven by names of operations and heads."""

    def __init__(self, slots: int = 1, episode_length: int = 150, max_seeds: int = 1 << 30):
        self.rules = Rules.for_horizon(episode_length, max_seeds)
        self.state = SeedState.dormant((1, slots), CPU)
        kinds = torch.ones(slots, len(BLUEPRINTS), dtype=torch.bool)
        kinds[:, 0] = False
        self.kinds = kinds
        self.signals = replace(
            SeedSignals.unknown((1, slots), CPU),
            health=torch.ones(1, slots),
            contribution=torch.full((1, slots), 0.1),
        )

    def legal(self, op: Op, slot: int = 0) -> bool:
        return bool(legal_slots(self.state, self.signals, self.rules)[0, op, slot])

    def do(self, op: Op, slot: int = 0, **choices: int) -> bool:
        """Act without a tick. Heads that are not given take option 1."""
        return self.act({"op": op, "slot": slot} | choices)

    def act(self, choices: dict[str, int]) -> bool:
        action = dict.fromkeys(HEADS, 1) | choices
        row = torch.tensor([[action[head] for head in HEADS]])
        legal = legal_slots(self.state, self.signals, self.rules)
        self.state, success = apply(self.state, row, legal, self.kinds)
        return bool(success)

    def ticks(self, count: int = 1) -> None:
        for _ in range(count):
            self.state = tick(self.state, self.rules)

    def stage(self, slot: int = 0) -> Stage:
        return Stage(self.state.stage[0, slot].item())

    def alpha(self, slot: int = 0) -> float:
        return self.state.alpha[0, slot].item()

    def resting(self, slot: int = 0) -> bool:
        return self.state.ramp_mode[0, slot].item() == AlphaMode.HOLD

    def to(self, stage: Stage, slot: int = 0, **germination: int) -> "Walk":
        """Bring the slot to ``stage`` by the shortest path."""
        assert self.do(Op.GERMINATE, slot, **({"alpha_target": 2} | germination))
        if stage == Stage.GERMINATED:
            return self
        assert self.do(Op.ADVANCE, slot)
        if stage == Stage.TRAINING:
            return self
        self.ticks(self.rules.training_age)
        assert self.do(Op.ADVANCE, slot)
        if stage == Stage.BLENDING:
            return self
        while not self.resting(slot):
            self.ticks()
        assert self.do(Op.ADVANCE, slot)
        if stage == Stage.FOSSILISED:
            assert self.do(Op.FOSSILISE, slot)
        assert self.stage(slot) == stage
        return self


@pytest.mark.parametrize(
    ("episode_length", "training_age", "prune_age", "embargo"),
    [(150, 10, 5, 5), (40, 3, 1, 1), (300, 20, 10, 10), (1, 1, 1, 1)],
)
def test_ages_scale_with_the_horizon(episode_length, training_age, prune_age, embargo) -> None:
    rules = Rules.for_horizon(episode_length, 3)
    assert rules == Rules(training_age, training_age, prune_age, embargo, 3)


@pytest.mark.parametrize(
    ("stage", "op", "after", "ages"),
    [
        (Stage.TRAINING, Op.ADVANCE, Stage.BLENDING, {150: 10, 40: 3}),
        (Stage.GERMINATED, Op.PRUNE, Stage.PRUNED, {150: 5, 40: 1}),
    ],
)
def test_training_ends_and_a_seed_is_pruned_only_at_their_ages(stage, op, after, ages) -> None:
    for episode_length, age in ages.items():
        walk = Walk(episode_length=episode_length).to(stage)
        for _ in range(age):
            assert not walk.do(op)
            walk.ticks()
        assert walk.do(op)
        assert walk.stage() == after


@pytest.mark.parametrize(("episode_length", "embargo"), [(150, 5), (40, 1)])
def test_pruned_slot_stays_closed_for_the_embargo_and_two_steps(episode_length, embargo) -> None:
    walk = Walk(slots=2, episode_length=episode_length).to(Stage.GERMINATED)
    walk.ticks(walk.rules.prune_age)
    assert walk.do(Op.PRUNE)
    expected = [Stage.PRUNED, *[Stage.EMBARGOED] * embargo, Stage.RESETTING]
    for stage in expected:
        assert walk.stage() == stage
        assert not walk.do(Op.GERMINATE, 0)
        assert not walk.do(Op.GERMINATE, 1)
        walk.ticks()
    assert walk.stage() == Stage.DORMANT
    assert walk.do(Op.GERMINATE, 0)


def test_options_of_the_heads_stand_for_the_documented_numbers() -> None:
    assert actions.TEMPO_STEPS == (3, 5, 8)
    assert actions.ALPHA_TARGETS == (0.5, 0.7, 1.0)
    assert actions.ALPHA_SPEED_STEPS == (0, 3, 5, 8)
    assert actions.CURVE_STEEPNESS == (0.0, 0.0, 6.0, 12.0, 24.0)


@pytest.mark.parametrize("tempo", TEMPO)
@pytest.mark.parametrize("style", Style)
@pytest.mark.parametrize("target", TARGET)
def test_first_blend_takes_tempo_steps_and_stops_at_its_target(tempo, style, target) -> None:
    choices = {"tempo": tempo, "style": style, "alpha_target": target}
    walk = Walk().to(Stage.BLENDING, **choices)
    curve = Curve.SIGMOID if style == Style.SIGMOID_ADD else Curve.LINEAR
    for step in range(TEMPO[tempo]):
        assert not walk.resting()
        share = curve_value(curve, step / TEMPO[tempo])
        assert walk.alpha() == pytest.approx(TARGET[target] * share, abs=1e-6)
        walk.ticks()
    assert walk.resting()
    assert walk.alpha() == pytest.approx(TARGET[target], abs=1e-7)
    walk.ticks(3)
    assert walk.alpha() == pytest.approx(TARGET[target], abs=1e-7)


@pytest.mark.parametrize("speed", SPEED)
@pytest.mark.parametrize("curve", Curve)
def test_retargeting_takes_alpha_speed_steps(speed, curve) -> None:
    walk = Walk().to(Stage.HOLDING)
    assert walk.do(Op.SET_ALPHA_TARGET, alpha_target=0, alpha_speed=speed, alpha_curve=curve)
    for step in range(SPEED[speed]):
        assert not walk.resting()
        assert bool(walk.state.frozen[0, 0])
        share = curve_value(curve, step / SPEED[speed])
        assert walk.alpha() == pytest.approx(1.0 - 0.5 * share, abs=1e-6)
        walk.ticks()
    assert walk.resting()
    assert walk.alpha() == 0.5
    assert not bool(walk.state.frozen[0, 0])


@pytest.mark.parametrize("speed", SPEED)
@pytest.mark.parametrize("stage", [Stage.BLENDING, Stage.HOLDING])
def test_prune_takes_alpha_speed_steps(speed, stage) -> None:
    walk = Walk().to(stage)
    while not walk.resting():
        walk.ticks()
    assert walk.do(Op.PRUNE, alpha_speed=speed, alpha_curve=Curve.COSINE)
    for _ in range(SPEED[speed]):
        assert walk.stage() == Stage.BLENDING
        assert bool(walk.state.frozen[0, 0])
        assert not any(walk.legal(op) for op in Op if op != Op.WAIT)
        walk.ticks()
    assert walk.stage() == Stage.PRUNED
    assert walk.alpha() == 0.0


@pytest.mark.parametrize("stage", [Stage.GERMINATED, Stage.TRAINING])
def test_seed_with_alpha_0_is_pruned_at_once(stage) -> None:
    walk = Walk().to(stage)
    walk.ticks(walk.rules.prune_age)
    assert walk.do(Op.PRUNE, alpha_speed=3)
    assert walk.stage() == Stage.PRUNED


def test_blending_ends_only_with_alpha_target_1_and_no_ramp() -> None:
    walk = Walk().to(Stage.BLENDING, alpha_target=1, tempo=0)
    walk.ticks(3)
    assert walk.resting()
    assert not walk.do(Op.ADVANCE)  # at rest, but at alpha 0.7
    assert walk.do(Op.SET_ALPHA_TARGET, alpha_target=2, alpha_speed=1)
    for _ in range(3):
        assert not walk.do(Op.ADVANCE)  # still rising to 1
        walk.ticks()
    assert walk.do(Op.ADVANCE)
    assert walk.stage() == Stage.HOLDING


def test_held_seed_with_a_lower_target_blends_again() -> None:
    walk = Walk().to(Stage.HOLDING)
    assert walk.do(Op.SET_ALPHA_TARGET, alpha_target=2, alpha_speed=3)
    assert walk.stage() == Stage.HOLDING
    assert walk.resting()
    assert walk.do(Op.SET_ALPHA_TARGET, alpha_target=1, alpha_speed=0)
    assert walk.stage() == Stage.BLENDING
    assert not walk.legal(Op.FOSSILISE)


@pytest.mark.parametrize("style", Style)
def test_setting_the_alpha_target_keeps_the_style(style) -> None:
    walk = Walk().to(Stage.HOLDING, style=style)
    for other in Style:
        assert walk.do(Op.SET_ALPHA_TARGET, style=other, alpha_target=1, alpha_speed=0)
        assert walk.state.style.item() == style


def test_no_action_changes_a_fossilised_seed() -> None:
    walk = Walk().to(Stage.FOSSILISED)
    before = walk.state.map(Tensor.clone)
    for op in Op:
        assert walk.do(op) == (op == Op.WAIT)
    assert_rows_identical(before, walk.state, slice(None))
    walk.ticks(30)
    assert walk.stage() == Stage.FOSSILISED
    assert walk.alpha() == 1.0


@pytest.mark.parametrize("head", range(len(HEADS)))
@pytest.mark.parametrize("beyond", ["below", "above", "far above"])
def test_action_out_of_range_changes_nothing(head, beyond) -> None:
    """Also in heads that the operation does not use."""
    walk = Walk(slots=2)
    widths = [2 if width is None else width for width in WIDTHS]
    value = {"below": -1, "above": widths[head], "far above": 2**62}[beyond]
    for op in (Op.WAIT, Op.GERMINATE):
        before = walk.state.map(Tensor.clone)
        assert not walk.act({"op": op, "slot": 0} | {HEADS[head]: value})
        assert_rows_identical(before, walk.state, slice(None))
    assert walk.do(Op.GERMINATE)


# --- curves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", Curve)
def test_curves_rise_from_0_to_1(curve) -> None:
    time = torch.linspace(0.0, 1.0, 1001)
    risen = progress(torch.full((1001,), int(curve)), time)
    assert risen[0].item() == 0.0
    assert risen[-1].item() == 1.0
    assert bool((risen.diff() >= 0.0).all())
    assert bool((risen.diff()[100:-100] > 0.0).all())
    expected = torch.tensor([curve_value(curve, t) for t in time.tolist()])
    torch.testing.assert_close(risen, expected, atol=1e-6, rtol=0.0)


def test_sharper_sigmoids_start_later() -> None:
    curves = torch.tensor([Curve.SIGMOID_GENTLE, Curve.SIGMOID, Curve.SIGMOID_SHARP])
    early = progress(curves, torch.full((3,), 0.25))
    assert bool((early.diff() < 0.0).all())


@pytest.mark.parametrize("curve", Curve)
def test_a_finished_ramp_is_exactly_at_its_target(curve) -> None:
    """From 0.09, the interpolation to 0.7 misses it by rounding."""
    state = Walk().to(Stage.BLENDING).state
    filled = {"alpha": 0.09042361378669739, "ramp_start": 0.09042361378669739, "ramp_target": 0.7}
    numbers = {"ramp_steps": 3, "ramp_done": 2, "ramp_curve": int(curve)}
    state = replace(
        state, **{k: torch.full_like(getattr(state, k), v) for k, v in (filled | numbers).items()}
    )
    after = tick(state, Rules.for_horizon(150, 1))
    assert torch.equal(after.alpha, state.ramp_target)
    assert after.ramp_mode.item() == AlphaMode.HOLD


@pytest.mark.parametrize("stage", Stage)
def test_a_roll_back_prunes_every_seed_but_fossils(stage) -> None:
    state = SeedState.dormant((2, 1), CPU)
    state = replace(
        state, stage=torch.full_like(state.stage, int(stage)),
        stage_age=torch.full_like(state.stage_age, 4), alpha=torch.full_like(state.alpha, 0.5),
    )  # fmt: skip
    after = roll_back(state, torch.tensor([True, False]))
    prunable = stage in PRUNABLE
    assert after.stage[:, 0].tolist() == [Stage.PRUNED if prunable else stage, stage]
    assert after.alpha[:, 0].tolist() == [0.0 if prunable else 0.5, 0.5]
    assert after.stage_age[:, 0].tolist() == [0 if prunable else 4, 4]


# --- signals and parameters -------------------------------------------------------------------


def test_forget_resets_only_the_given_slots() -> None:
    known = SeedSignals.unknown((2, 3), CPU).map(lambda x: torch.full_like(x, 1))
    where = torch.tensor([[True, False, False], [False, False, True]])
    forgotten, unknown = known.forget(where), SeedSignals.unknown((2, 3), CPU)
    for field in fields(SeedSignals):
        value = getattr(forgotten, field.name)
        assert torch.equal(value[~where], getattr(known, field.name)[~where])
        fresh = getattr(unknown, field.name)[where]
        torch.testing.assert_close(value[where], fresh, equal_nan=True)


def test_oracle_and_alpha_mode_agree_on_hold() -> None:
    assert HOLD == AlphaMode.HOLD
