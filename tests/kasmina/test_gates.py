"""Gates: every clause matters, and seeds pass them with the measurements of a real step."""

from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from esper.kasmina.lifecycle import Rules, advance_automatically, apply, legal_slots, open_gates
from esper.kasmina.seeds import AlphaMode, SeedSignals, SeedState
from esper.leyline.actions import BLUEPRINTS, Op
from esper.leyline.config import unflatten
from esper.leyline.errors import UsageError
from esper.leyline.stages import LIVING, PRUNABLE, Gate, Stage
from esper.simic.growth.step import Step
from esper.simic.training.vectorized import run_training
from oracles.lifecycle import BLOCKS_GERMINATION
from small_runs import SMALL
from support import CPU, small_environments, small_host, small_task
from synthetic import canonical_action

NAN = float("nan")
RULES = Rules(training_age=3, blending_age=4, prune_age=2, embargo=2, max_seeds=1, strict=True)
PERMISSIVE = replace(RULES, strict=False)


@dataclass(frozen=True)
class Case:
    """A seed that passes a strict gate, and the operation that the gate guards."""

    gate: Gate
    op: Op
    seed: dict[str, float]
    signals: dict[str, float]


HEALTHY = {"health": 0.7, "exploding": False}
CASES = {
    "G0": Case(Gate.G0, Op.GERMINATE, {"stage": Stage.DORMANT}, {}),
    "G1": Case(Gate.G1, Op.ADVANCE, {"stage": Stage.GERMINATED}, {}),
    "G2": Case(
        Gate.G2, Op.ADVANCE, {"stage": Stage.TRAINING, "stage_age": 3},
        HEALTHY | {"improvement": 0.0051, "gradient_ratio": 0.1001},
    ),
    "G3": Case(
        Gate.G3, Op.ADVANCE,
        {"stage": Stage.BLENDING, "stage_age": 4, "alpha": 1.0, "ramp_target": 1.0}, {},
    ),
    "G5": Case(
        Gate.G5, Op.FOSSILISE, {"stage": Stage.HOLDING, "alpha": 1.0, "ramp_target": 1.0},
        HEALTHY | {"contribution": 0.0101},
    ),
}  # fmt: skip

ALWAYS = [
    ("G2", {"stage_age": 2}), ("G2", {"health": 0.69}), ("G2", {"health": NAN}),
    ("G2", {"exploding": True}), ("G3", {"alpha": 0.99}), ("G3", {"ramp_target": 0.7}),
    ("G3", {"ramp_mode": AlphaMode.UP}), ("G3", {"ramp_mode": AlphaMode.DOWN}),
    ("G5", {"contribution": NAN}), ("G5", {"health": 0.69}), ("G5", {"health": NAN}),
    ("G5", {"exploding": True}),
]  # fmt: skip
"""Changes that close a gate under any rules."""
STRICT = [
    ("G2", {"improvement": 0.0049}), ("G2", {"improvement": NAN}),
    ("G2", {"gradient_ratio": 0.0999}), ("G2", {"gradient_ratio": NAN}), ("G3", {"stage_age": 3}),
    ("G5", {"contribution": 0.0099}), ("G5", {"contribution": -0.2}),
]  # fmt: skip
"""Changes that close a gate only under strict rules."""


def seed_of(case: Case, changes: dict[str, float]) -> tuple[SeedState, SeedSignals]:
    """State and signals of one environment with one slot."""
    state, signals = SeedState.dormant((1, 1), CPU), SeedSignals.unknown((1, 1), CPU)
    known = {f.name for f in fields(SeedState)} | {f.name for f in fields(SeedSignals)}
    wanted = case.seed | case.signals | changes
    assert set(wanted) <= known
    for name, value in wanted.items():
        getattr(state if hasattr(state, name) else signals, name).fill_(value)
    return state, signals


def passes(case: Case, rules: Rules, **changes: float) -> bool:
    state, signals = seed_of(case, changes)
    gates = {gate: bool(found) for gate, found in open_gates(state, signals, rules).items()}
    assert [gate for gate, found in gates.items() if found] in ([], [case.gate])
    legal = legal_slots(state, signals, rules)[0, :, 0]
    assert bool(legal[case.op]) == gates[case.gate]
    return gates[case.gate]


# --- one clause at a time ---------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rules", [RULES, PERMISSIVE], ids=["strict", "permissive"])
def test_gate_passes_only_in_its_own_stage(name: str, rules: Rules):
    case = CASES[name]
    assert passes(case, rules)
    for stage in Stage:
        state, signals = seed_of(case, {"stage": stage})
        found = open_gates(state, signals, rules)[case.gate]
        assert bool(found) == (stage == case.seed["stage"])


@pytest.mark.parametrize(("name", "change"), ALWAYS)
def test_each_failed_clause_closes_the_gate(name: str, change: dict[str, float]):
    assert not passes(CASES[name], RULES, **change)
    assert not passes(CASES[name], PERMISSIVE, **change)


@pytest.mark.parametrize(("name", "change"), STRICT)
def test_each_failed_strict_clause_closes_the_strict_gate(name: str, change: dict[str, float]):
    assert not passes(CASES[name], RULES, **change)
    assert passes(CASES[name], PERMISSIVE, **change)


def test_fields_without_a_clause_do_not_affect_the_gate():
    """Sets every field of a seed except those of a clause to its worst value."""
    worst = {"health": NAN, "exploding": True, "contribution": NAN, "improvement": NAN}
    worst |= {"gradient_ratio": NAN, "contribution_velocity": -1.0, "previous_health": NAN}
    worst |= {"gradient_norm": NAN, "birth_accuracy": NAN, "baseline": NAN}
    for name, case in CASES.items():
        named = {key for other, change in ALWAYS + STRICT if other == name for key in change}
        assert passes(case, RULES, **{k: v for k, v in worst.items() if k not in named})


# --- limits on the number of seeds ------------------------------------------------------------


def garden(*stages: Stage) -> SeedState:
    state = SeedState.dormant((1, len(stages)), CPU)
    state.stage[0] = torch.tensor(stages)
    return state


def germination(rules: Rules, *stages: Stage) -> list[bool]:
    """The slots in which GERMINATE is legal."""
    state = garden(*stages)
    signals = SeedSignals.unknown((1, len(stages)), CPU)
    return legal_slots(state, signals, rules)[0, Op.GERMINATE].tolist()


@pytest.mark.parametrize("beside", Stage)
def test_one_at_a_time_can_be_disabled(beside: Stage):
    rules = replace(RULES, max_seeds=9)
    develops = beside in BLOCKS_GERMINATION
    empty = [True] if beside is Stage.DORMANT else [False]
    assert germination(rules, beside, Stage.DORMANT) == [*empty, not develops]
    free = replace(rules, one_at_a_time=False)
    assert germination(free, beside, Stage.DORMANT) == [*empty, True]


@pytest.mark.parametrize("beside", Stage)
@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_every_living_seed_counts_towards_max_seeds(beside: Stage, one_at_a_time: bool):
    for limit in (1, 2, 3):
        rules = replace(RULES, max_seeds=limit, one_at_a_time=one_at_a_time)
        found = germination(rules, Stage.FOSSILISED, beside, Stage.DORMANT)
        living = 1 + (beside in LIVING)
        closed = one_at_a_time and beside not in (Stage.DORMANT, Stage.BLENDING,
                                                  Stage.HOLDING, Stage.FOSSILISED)  # fmt: skip
        assert found[2] == (living < limit and not closed)


def test_max_seeds_applies_per_environment():
    state = SeedState.dormant((2, 2), CPU)
    state.stage[0, 0] = Stage.FOSSILISED
    signals = SeedSignals.unknown((2, 2), CPU)
    found = legal_slots(state, signals, RULES)[:, Op.GERMINATE]
    assert found.tolist() == [[False, False], [True, True]]


def test_blueprint_germinates_only_in_slots_of_its_family():
    """``apply`` checks this instead of gate G0, because it depends on the action."""
    kinds = torch.zeros(2, len(BLUEPRINTS), dtype=torch.bool)
    kinds[0, BLUEPRINTS.index("norm")] = kinds[1, BLUEPRINTS.index("mlp")] = True
    state, signals = garden(Stage.DORMANT, Stage.DORMANT), SeedSignals.unknown((1, 2), CPU)
    legal = legal_slots(state, signals, RULES)
    assert bool(legal[0, Op.GERMINATE].all())
    for slot in range(2):
        for kind, name in enumerate(BLUEPRINTS):
            action = canonical_action(op=Op.GERMINATE, slot=slot, blueprint=kind)[None]
            after, success = apply(state, action, legal, kinds)
            lives = bool(kinds[slot, kind])
            assert success.item() == lives, name
            assert (after.stage[0, slot] == Stage.GERMINATED).item() == lives
            assert after.stage[0, 1 - slot] == Stage.DORMANT


@pytest.mark.parametrize("stage", Stage)
def test_ungated_operations_require_stage_rest_and_age(stage: Stage):
    state, signals = garden(stage), SeedSignals.unknown((1, 1), CPU)
    for age, mode in ((2, AlphaMode.HOLD), (1, AlphaMode.HOLD), (2, AlphaMode.UP)):
        state.age.fill_(age)
        state.ramp_mode.fill_(mode)
        legal = legal_slots(state, signals, RULES)[0, :, 0]
        rests = mode is AlphaMode.HOLD
        assert legal[Op.WAIT]
        assert legal[Op.PRUNE] == (stage in PRUNABLE and rests and age >= 2)
        blended = stage in (Stage.BLENDING, Stage.HOLDING)
        assert legal[Op.SET_ALPHA_TARGET] == (blended and rests)


# --- in the environment -----------------------------------------------------------------------


class Gardener:
    """One environment with three slots, driven by names of operations and heads."""

    def __init__(self, **settings):
        short = {"seed": 4, "episode_length": 30, "group_size": 1}
        self.env = small_environments([small_task(small_host())], 1, **(short | settings))
        self.observation = self.env.reset(0)

    def do(self, op: Op = Op.WAIT, slot: int = 0, **choices: int) -> Step:
        """Perform one step, whose action must be legal."""
        action = canonical_action(op=op, slot=0 if op is Op.WAIT else slot, **choices)
        step = self.env.step(action[None])
        self.observation = step.observation
        assert bool(step.report.success), (op, slot)
        return step

    def legal(self, op: Op, slot: int = 0) -> bool:
        return bool(self.observation.masks.slots[0, op, slot])

    def until_legal(self, op: Op, slot: int = 0) -> None:
        """Wait until the operation is legal, for a limited number of steps."""
        while not self.legal(op, slot):
            self.do()

    def grow(self, stage: Stage, slot: int = 0, blueprint: str = "conv_light") -> Step:
        """Grow a seed to ``stage`` by the shortest path."""
        kind = BLUEPRINTS.index(blueprint)
        step = self.do(Op.GERMINATE, slot, blueprint=kind, tempo=0)
        while step.report.after.stage[0, slot] != stage:
            op = Op.FOSSILISE if step.report.after.stage[0, slot] == Stage.HOLDING else Op.ADVANCE
            self.until_legal(op, slot)
            step = self.do(op, slot)
        return step

    def seed(self, slot: int = 0) -> Tensor:
        """The current parameters of the seed in ``slot``."""
        return self.env.shards[0].engine.stack.seeds[slot][0].clone()


def test_held_seed_can_be_lowered_raised_and_fossilised():
    """HOLDING, BLENDING, HOLDING, FOSSILISED: it learns while alpha rises, not while it falls."""
    world = Gardener()
    world.grow(Stage.HOLDING)
    alphas, moved = [], []
    for target in (0, 2):
        before = world.seed()
        step = world.do(Op.SET_ALPHA_TARGET, alpha_target=target, alpha_speed=1)
        assert step.report.acted.stage[0, 0] == Stage.BLENDING
        for tick in range(3):
            report = step.report
            alphas.append(report.after.alpha[0, 0].item())
            assert report.after.stage[0, 0] == Stage.BLENDING
            assert report.signals.contribution[0, 0].isfinite()
            moved.append(not torch.equal(world.seed(), before))
            before = world.seed()
            assert not world.legal(Op.FOSSILISE)
            assert world.legal(Op.SET_ALPHA_TARGET) == (tick == 2)
            assert world.legal(Op.ADVANCE) == (tick == 2 and target == 2)
            if tick < 2:
                step = world.do()
    assert alphas == pytest.approx([5 / 6, 4 / 6, 0.5, 4 / 6, 5 / 6, 1.0])
    assert moved == [False] * 3 + [True] * 3
    assert world.do(Op.ADVANCE).report.after.stage[0, 0] == Stage.HOLDING
    assert world.do(Op.FOSSILISE).report.after.stage[0, 0] == Stage.FOSSILISED


def test_fossilised_seeds_continue_to_learn():
    world = Gardener()
    world.grow(Stage.FOSSILISED)
    for _ in range(3):
        before = world.seed()
        report = world.do().report
        assert not torch.equal(world.seed(), before)
        assert report.after.stage[0, 0] == Stage.FOSSILISED
        assert report.after.alpha[0, 0] == 1.0
        assert report.signals.gradient_norm[0, 0] > 0


def test_two_germinated_seeds_coexist_without_one_at_a_time():
    world = Gardener(one_at_a_time=False)
    for slot in range(2):
        kind = BLUEPRINTS.index("norm")
        step = world.do(Op.GERMINATE, slot, blueprint=kind)
    assert step.report.after.stage[0].tolist() == [Stage.GERMINATED] * 2 + [Stage.DORMANT]
    lonely = Gardener()
    lonely.do(Op.GERMINATE, 0, blueprint=kind)
    assert not any(lonely.legal(Op.GERMINATE, slot) for slot in range(3))


def test_no_more_than_max_seeds_grow():
    world = Gardener(max_seeds=2, one_at_a_time=False)
    for slot in range(2):
        world.do(Op.GERMINATE, slot, blueprint=1)
    assert not world.legal(Op.GERMINATE, 2)
    world.until_legal(Op.PRUNE, 1)
    world.do(Op.PRUNE, 1)
    assert world.legal(Op.GERMINATE, 2)


def test_strict_gates_use_the_measurements_of_the_step():
    offered: dict[bool, list[bool]] = {False: [], True: []}
    for strict, seed in product((False, True), range(1, 4)):
        world = Gardener(strict_gates=strict, seed=seed)
        world.grow(Stage.TRAINING)
        for _ in range(6):
            signals = world.do().report.signals
            healthy = (signals.health >= 0.7) & ~signals.exploding
            proven = (signals.improvement >= 0.005) & (signals.gradient_ratio >= 0.1)
            expected = (healthy & proven if strict else healthy)[0, 0].item()
            assert world.legal(Op.ADVANCE) == expected
            offered[strict].append(expected)
    assert sum(offered[False]) > sum(offered[True]) > 0


def test_seeds_advance_at_every_telemetry_level(tmp_path: Path):
    """Health and contribution are measured in every step, whether or not they are written."""
    settings = {"task": "digits", "envs": 8, "group_size": 8, "rounds": 1, "episode_length": 40}
    settings = SMALL | settings | {"lstm_hidden": 16, "telemetry_dir": str(tmp_path)}
    outcomes = []
    for level in ("off", "debug"):
        config = unflatten(settings | {"telemetry_level": level})
        (found,) = run_training(config, "ppo").rounds
        assert found.fossilised > 0.0
        outcomes.append(replace(found, steps_per_second=0.0))
    assert outcomes[0] == outcomes[1]


# --- gates that open by themselves ------------------------------------------------------------


@pytest.mark.parametrize("name", ["G1", "G2", "G3"])
def test_an_automatic_gate_advances_as_the_operation_does_and_masks_it(name: str) -> None:
    case = CASES[name]
    rules = replace(RULES, automatic=(case.gate,))
    state, signals = seed_of(case, {"goal": 1.0, "tempo": 3})
    legal = legal_slots(state, signals, RULES)
    assert bool(legal[0, Op.ADVANCE, 0])
    assert not bool(legal_slots(state, signals, rules)[0, Op.ADVANCE, 0])
    advance = canonical_action(op=Op.ADVANCE, slot=0)[None]
    expected, _ = apply(state, advance, legal, torch.ones(1, len(BLUEPRINTS), dtype=torch.bool))
    advanced = advance_automatically(state, signals, rules)
    assert advanced.stage != state.stage
    for f in fields(SeedState):
        assert torch.equal(getattr(advanced, f.name), getattr(expected, f.name)), f.name
    assert advance_automatically(state, signals, RULES) is state
    closed, closed_signals = seed_of(case, {"stage": Stage.HOLDING})
    assert advance_automatically(closed, closed_signals, rules).stage == Stage.HOLDING


def test_with_automatic_gates_a_seed_reaches_holding_without_an_operation() -> None:
    world = Gardener(auto_advance=("g1", "g2", "G3"))
    kind = BLUEPRINTS.index("conv_light")
    stages = [int(world.do(Op.GERMINATE, 0, blueprint=kind, tempo=0).report.after.stage[0, 0])]
    while stages[-1] != Stage.HOLDING:
        assert not world.legal(Op.ADVANCE)
        stages.append(int(world.do().report.after.stage[0, 0]))
    order = [Stage.TRAINING, Stage.BLENDING, Stage.HOLDING]
    assert [stage for stage in order if stage in stages] == order
    assert stages == sorted(stages)
    world.until_legal(Op.FOSSILISE)


def test_a_gate_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^auto_advance: must name gates of g1, g2, g3, got 'g5'"):
        Gardener(auto_advance=("g1", "g5"))
